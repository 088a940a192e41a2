"""What libraries and the interpreter would write to stderr by themselves, said by the console instead.

So it is inert as all else there, and one JSON object a line where that was asked for.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from batchrun.terminal.console import StderrConsole

__all__ = ["spoken_for"]


class _Handler(logging.Handler):
    def __init__(self, console: StderrConsole) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.name}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        if record.levelno >= logging.ERROR:
            self._console.error(text)
        else:
            self._console.warn(text)


@contextlib.contextmanager
def spoken_for(console: StderrConsole) -> Iterator[None]:
    """Sends log records from WARNING up, warnings, and errors that nobody caught to the console while it lasts."""

    def on_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:  # noqa: ANN401 - unread
        console.warn(f"{category.__name__}: {message}")

    def on_thread(caught: threading.ExceptHookArgs) -> None:
        console.error(f"internal error in a thread: {caught.exc_value!r}")

    def on_unraisable(caught: sys.UnraisableHookArgs) -> None:
        console.error(f"internal error: {caught.exc_value!r}")

    handler = _Handler(console)
    last_resort = logging.lastResort
    logging.lastResort = handler
    thread_hook, threading.excepthook = threading.excepthook, on_thread
    unraisable_hook, sys.unraisablehook = sys.unraisablehook, on_unraisable
    try:
        with warnings.catch_warnings():
            warnings.showwarning = on_warning
            yield
    finally:
        logging.lastResort = last_resort
        threading.excepthook = thread_hook
        sys.unraisablehook = unraisable_hook
