"""Where data goes: stdout, or a file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from batchrun.errors import BatchrunError, Exit

__all__ = ["data_output", "mute_stdout"]


@contextlib.contextmanager
def data_output(path: str | None) -> Iterator[BinaryIO]:
    """Gives a stream of bytes to stdout for None or ``-``, else to a file (replaced at the end, mode 0600).

    Raises:
        BrokenPipeError: The reader of stdout has gone.
        BatchrunError: It cannot be written (74).
    """
    try:
        if path is None or path == "-":
            with _stdout() as out:
                yield out
        else:
            with _file(Path(path)) as out:
                yield out
    except BrokenPipeError:
        mute_stdout()
        raise
    except OSError as error:
        mute_stdout()
        raise BatchrunError(
            f"cannot write {path or 'stdout'}: {error.strerror}",
            hint="free space, or give another place with -o FILE",
            exit_code=Exit.STORAGE,
        ) from None


@contextlib.contextmanager
def _stdout() -> Iterator[BinaryIO]:
    if sys.stdout is None:
        raise OSError(0, "it is closed")
    sys.stdout.flush()
    out: BinaryIO = sys.stdout.buffer
    yield cast("BinaryIO", _Inert(out)) if out.isatty() else out
    out.flush()


class _Inert:
    """A terminal, in which JSON says the same with escapes for characters that would act upon it."""

    _LOUD = re.compile("[\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]")

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, data: bytes) -> int:
        text = data.decode("utf-8", "replace")
        return self._out.write(self._LOUD.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode())


@contextlib.contextmanager
def _file(path: Path) -> Iterator[BinaryIO]:
    from batchrun.run.files import replace_file

    path = Path(os.path.realpath(path))  # a link stays a link: what it names is replaced
    if path.exists() and not path.is_file():  # a pipe or a device is written to; a rename would remove it
        with path.open("wb") as out:
            yield out
    else:
        with replace_file(path) as out:
            yield out


def mute_stdout() -> None:
    """Lets go of what could not be written, so that the interpreter does not fail over it at its end."""
    if sys.stdout is None:
        return
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
