from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.server import FaultServer
from tests.support import KEY, Shell


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell with a key, which must be found nowhere afterwards: in no file, in nothing that was printed."""
    opened = Shell(tmp_path)
    yield opened
    opened.close()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".secret"]
    assert [str(path) for path in written if KEY.encode() in path.read_bytes()] == []
    assert KEY.encode() not in b"".join(opened.said)
