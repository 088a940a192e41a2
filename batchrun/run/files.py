"""Files that only their owner can read, that appear whole or not at all, and a lock that dies with its holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from batchrun.errors import BatchrunError, Exit
from batchrun.run.failpoint import reached

__all__ = ["JobLock", "make_private_dir", "private_file", "rename", "replace_file", "sync_dir"]

_LOOKED_AT_S = 0.3
"""`status` holds the lock for an instant to see whether a run does; a run waits out that much."""


def make_private_dir(path: Path) -> None:
    """Creates ``path`` with mode 0700 whatever the umask; its parent must exist. Raises: FileExistsError."""
    path.mkdir(mode=0o700)
    path.chmod(0o700)


def private_file(path: Path) -> BinaryIO:
    """Opens ``path`` for writing from scratch, mode 0600 whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(fd, 0o600)
    return os.fdopen(fd, "wb", buffering=1 << 20)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Writes a file that appears whole or not at all: temp → fsync → rename → fsync of the directory."""
    temporary = path.with_name(f".{path.name}.tmp")  # what a killed run left of it is written over
    try:
        with private_file(temporary) as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        reached("replace")
        rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def rename(source: Path, target: Path) -> None:
    """Renames within a directory, durably."""
    source.replace(target)
    reached("rename")
    sync_dir(target.parent)


def sync_dir(path: Path) -> None:
    """Makes the names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class JobLock:
    """Says that one run owns a job. Held by the kernel (flock), so a dead run leaves no stale lock.

    The file is not the database: SQLite's own locks on it must not be dropped by closing a second descriptor.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._fd: int | None = None

    def acquire(self) -> None:
        """Takes the lock at once. Raises: BatchrunError(75) if another run holds it."""
        until = time.monotonic() + _LOOKED_AT_S
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == self._path.stat().st_ino:
                    break
            except (BlockingIOError, FileNotFoundError):
                if time.monotonic() > until:
                    holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                    os.close(fd)
                    raise BatchrunError(
                        f"another run holds this job (process {holder or 'unknown'})",
                        hint="wait for it, or look at `batchrun status`; the lock goes with that process",
                        exit_code=Exit.BUSY,
                    ) from None
            os.close(fd)
            time.sleep(0.02)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Gives the lock back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_held_elsewhere(self) -> bool:
        """Whether a run holds the job now. Takes nothing and creates nothing."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False
