from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.server import FaultServer
from tests.support import Shell, keys_in

AUTH = ("authorization", "x-api-key", "x-goog-api-key")


# A suite that was started in the background inherits ignored signals, and its commands would inherit them in turn.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.fixture
def server() -> Iterator[FaultServer]:
    """A server, to which a key is sent in its own header only: never in a path, a body or another header."""
    with FaultServer() as running:
        yield running
        for request in running.requests:
            rest = {name: value for name, value in request.headers.items() if name not in AUTH}
            assert keys_in(request.path.encode() + request.body + repr(rest).encode()) == []
            assert sum(name in request.headers for name in AUTH) <= 1


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell with a key, which must be found nowhere afterwards: in no file, in nothing that was printed."""
    opened = Shell(tmp_path)
    yield opened
    opened.close()
    assert leaks(tmp_path) == []
    assert keys_in(b"".join(opened.said)) == []


@pytest.fixture(scope="session", autouse=True)
def no_key_is_left_anywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Searches the directories of the whole suite once more at its end, with all that was written since."""
    yield
    assert leaks(tmp_path_factory.getbasetemp()) == []


def leaks(root: Path) -> list[str]:
    """Returns the files below ``root`` that hold a key, but for those that are meant to: ``*.secret``."""
    written = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".secret")
    return [str(path) for path in written if keys_in(path.read_bytes())]
