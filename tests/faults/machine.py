"""The machine under a job, made to fail: a disk that refuses calls, fills up, turns read-only or loses its power.

What needs root, a C compiler or a kernel's feature skips its test with a reason where that is missing.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from batchrun.run.view import View, is_job
from tests.faults.server import FaultServer
from tests.support import Shell

__all__ = [
    "LONG",
    "Ext4",
    "MemoryGroup",
    "Standing",
    "build_shim",
    "check_whole",
    "grow",
    "in_memory",
    "kill_at_request",
    "look",
    "mounted",
    "tmpfs",
]

LONG = os.environ.get("FAULTS") == "long"
"""Whether the long versions run: minutes instead of seconds."""


# ---------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Standing:
    """What anybody who looks is told of a job, by lines."""

    records: dict[int, bytes]
    in_doubt: set[int]
    waiting: set[int]


def look(job: Path) -> Standing:
    """Returns how a job stands in its store; nothing where it has not begun."""
    if not is_job(job):
        return Standing({}, set(), set())
    view = View(job)
    try:
        records = {int(json.loads(record)["line"]): record for record in view.records("all")}
        intents = view.intents()
        return Standing(records, {i.line for i in intents if i.open}, {i.line for i in intents if not i.open})
    finally:
        view.close()


def kill_at_request(server: FaultServer, process: subprocess.Popen[bytes], number: int) -> None:
    """Kills a process at the moment at which its request ``number`` has arrived, before it is answered."""
    usual = server._script

    def script(request, n):
        if n >= number:
            process.send_signal(signal.SIGKILL)
        return usual(request, n)

    server._script = script


def check_whole(shell: Shell, rows: int, job: str = "in.batchrun") -> None:
    """Checks that a finished job has each of the rows r1 … exactly once, in order, and none failed."""
    assert [row["custom_id"] for row in shell.results(job)] == [f"r{n}" for n in range(1, rows + 1)]
    assert [row["output"] for row in shell.results(job)] == [f"echo:p{n}" for n in range(1, rows + 1)]
    assert shell.errors(job) == []


# ---------------------------------------------------------------- a disk that refuses


def build_shim(directory: Path) -> Path:
    """Compiles shim.c; skips the test where that, or preloading it, does not work."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler to stand between the process and its disk")
    shim = directory / "shim.so"
    source = Path(__file__).with_name("shim.c")
    built = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl", "-lpthread"], check=False, capture_output=True
    )
    if built.returncode:
        pytest.skip(f"the C compiler cannot build shim.c: {built.stderr[-200:]!r}")
    return shim


# ---------------------------------------------------------------- mounts


def _run(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@contextmanager
def mounted(at: Path, *options: str | Path) -> Iterator[Path]:
    """Mounts something on a new directory ``at``, and takes it away again."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and root to mount a file system")
    at.mkdir()
    if not _run("mount", *options, at):
        pytest.skip(f"mounting is not allowed here: mount {' '.join(map(str, options))}")
    try:
        yield at
    finally:
        _run("umount", "-l", at)


@contextmanager
def tmpfs(at: Path, kib: int) -> Iterator[Path]:
    """A file system of so many KiB; ``grow`` makes it large."""
    with mounted(at, "-t", "tmpfs", "-o", f"size={kib}k", "none") as disk:
        yield disk


def grow(at: Path, mib: int = 64) -> None:
    """Gives a small file system room."""
    assert _run("mount", "-o", f"remount,size={mib}m", at)


def in_memory() -> Path:
    """Returns a directory whose files cost no disk time, if there is one."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path("/tmp")


class Ext4:
    """An ext4 of its own, on a loop device, whose power can be cut and which can turn read-only.

    The power cut is the kernel's own (``EXT4_IOC_SHUTDOWN`` without flushing the log, what xfstests calls godown):
    from that instant nothing more reaches the device, and every call fails. What the page cache held is lost, and the
    next mount replays the journal. So whatever relied on an fsync that was never made is gone. A device that
    reorders or tears what it was told to keep is beyond it: that is what the replayed write log is for.
    """

    def __init__(self, directory: Path, mib: int = 64) -> None:
        self._image = directory / "disk.img"
        self.at = directory / "disk"
        self._mib = mib

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not sys.platform.startswith("linux"):
            pytest.skip("needs Linux and root to mount an ext4 of its own")
        with self._image.open("wb") as image:
            image.truncate(self._mib << 20)
        self.at.mkdir()
        if not _run("mkfs.ext4", "-q", "-F", self._image):
            pytest.skip("needs mkfs.ext4")
        if not self._mount():
            pytest.skip("mounting a loop device is not allowed here")
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "-l", self.at)
        self._image.unlink()

    def _mount(self) -> bool:
        return _run("mount", "-o", "loop,errors=remount-ro", self._image, self.at)

    def cut_power(self) -> None:
        """From now on nothing reaches the disk."""
        shutdown, without_flush = 0x8004587D, struct.pack("I", 2)
        fd = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, shutdown, without_flush)
        except OSError as error:
            pytest.skip(f"this kernel cannot shut an ext4 down: {error}")
        finally:
            os.close(fd)

    def turn_read_only(self) -> None:
        """What an ext4 does when it finds itself damaged: files that are open for writing fail from now on."""
        device = os.path.realpath(f"/sys/dev/block/{os.major(self._device)}:{os.minor(self._device)}")
        trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("this kernel cannot damage an ext4 on request")
        with suppress(OSError), trigger.open("w") as file:
            file.write("1")

    @property
    def _device(self) -> int:
        return self.at.stat().st_dev

    def restart(self) -> None:
        """The power comes back: whoever had files open is gone, the journal is replayed."""
        assert _run("umount", self.at), "something still holds the disk"
        _run("e2fsck", "-p", self._image)
        assert self._mount()


class MemoryGroup:
    """A control group whose processes the kernel kills when they use more memory than they may."""

    def __init__(self, name: str) -> None:
        first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        old = (first / "cgroup.procs").exists()
        self._at = (first if old else second) / name
        self._limit = self._at / ("memory.limit_in_bytes" if old else "memory.max")
        self._usage = self._at / ("memory.usage_in_bytes" if old else "memory.current")

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not sys.platform.startswith("linux"):
            pytest.skip("needs Linux and root to make a control group")
        try:
            self._at.mkdir()
        except OSError as error:
            pytest.skip(f"control groups cannot be made here: {error}")
        if not self._limit.exists():
            self._at.rmdir()
            pytest.skip("the memory controller is not on here")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._at.rmdir()

    def take(self, pid: int) -> None:
        """Counts a process's memory, from now on, here."""
        (self._at / "cgroup.procs").write_text(str(pid))

    def used(self) -> int:
        """Bytes in use."""
        return int(self._usage.read_text())

    def allow(self, size: int) -> None:
        """Has the kernel kill what would use more bytes."""
        self._limit.write_text(str(size))
