"""The one error tree: what a person is told, what to do about it, and the exit code."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["BatchrunError", "Exit"]


class Exit(IntEnum):
    """Exit codes of the command line (sysexits.h where it has a fitting one)."""

    OK = 0
    ROWS_FAILED = 1
    USAGE = 2
    STOPPED = 3
    """Stopped early on purpose: budget, deadline, max-failures; resumable."""
    INPUT = 65
    UNREACHABLE = 69
    SOFTWARE = 70
    STORAGE = 74
    BUSY = 75
    """Another run holds this job."""
    PERMISSION = 77
    CONFIGURATION = 78
    """Account or configuration: quota or credit gone, unknown model, no key, missing price."""
    SIGHUP = 129
    SIGINT = 130
    SIGTERM = 143


class BatchrunError(Exception):
    """An error for a person: printed as ``error: message`` then ``hint: hint``; never with a traceback."""

    def __init__(self, message: str, *, hint: str | None = None, exit_code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
