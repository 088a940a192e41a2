"""What a run may say to people while it goes on. What it looks like is somebody else's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batchrun.records import BadRow, Standing

__all__ = ["Console"]


class Console(Protocol):
    """What a run may say to people."""

    def notice(self, text: str) -> None:
        """Says one line that a person should see."""

    def warn(self, text: str) -> None:
        """Says one line about something that is not as it should be."""

    def debug(self, text: str) -> None:
        """Says one line, with ``--verbose`` only."""

    def start(self, total: int) -> None:
        """Begins to show progress over ``total`` rows."""

    def update(self, standing: Standing) -> None:
        """Takes how the run stands; cheap enough for several times a second."""

    def stop(self) -> None:
        """Ends showing progress; again does nothing."""

    def bad_lines(self, bad: Sequence[BadRow], count: int) -> None:
        """Names the first bad lines, with reasons and hints, and says how many of ``count`` are left out."""
