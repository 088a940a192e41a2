"""The disk fails, fills up or turns read-only: nothing is sent after it, nothing that was shown is lost, exit 74."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.machine import LONG, Ext4, build_shim, check_whole, grow, look, tmpfs
from tests.faults.server import FaultServer, Reply
from tests.support import Ran, Shell, chat_reply, prompts, wait_until

ROWS = 4


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


def submit_on_failing_disk(shell: Shell, server: FaultServer, shim: Path, job: str, fail: str) -> tuple[Ran, list[str]]:
    """Runs a job of its own, one request at a time; returns what it did and the shim's events."""
    log = shell.root / f"{job}.log"
    env = {"LD_PRELOAD": str(shim), "SHIM_UNDER": str(shell.root), "SHIM_LOG": str(log), "SHIM_FAIL": fail}
    ran = shell.submit(server, "--concurrency", "1", "--job", job, env=env)
    return ran, log.read_text().splitlines()


def check_fail_stop(shell: Shell, server: FaultServer, shim: Path, job: str, fail: str) -> int:
    """Breaks one run, and continues it on a disk that works. Returns how often something was sent twice."""
    ran, events = submit_on_failing_disk(shell, server, shim, job, fail)
    assert "X" in events, "the disk never failed"
    after = events[events.index("X") :]
    assert "P" not in after, f"{fail}: {after.count('P')} requests were sent after the disk had failed"
    assert ran.told(74).err.count("storage failed") + ran.err.count("the system refused") >= 1, ran.err
    before = look(shell.root / job)
    assert events.count("P") <= len(before.records) + len(before.in_doubt)
    done = shell.submit(server, "--job", job).told(0)
    assert done.rows["succeeded"] == ROWS
    check_whole(shell, ROWS, job)
    assert before.records.items() <= look(shell.root / job).records.items()
    sent: int = done.summary["requests"]["sent"]
    assert sent - ROWS <= len(before.in_doubt) <= 1
    return sent - ROWS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sync", "write"])
def test_from_the_nth_call_on_that_the_disk_fails_nothing_more_is_sent(
    shell: Shell, server: FaultServer, shim: Path, kind: str
) -> None:
    shell.write("in.jsonl", prompts(ROWS))
    ran, events = submit_on_failing_disk(shell, server, shim, "whole", "none:0")
    ran.told(0)
    assert events.count("P") == ROWS
    # Files that are written anew each time (what people read) come last, so every step of a run is among these.
    calls = sum(event[0] == kind[0].upper() for event in events)
    assert calls > 20
    step = {"sync": 1, "write": 4}[kind] if LONG else calls // 6
    nth = list(range(1, calls + 1, step))
    with ThreadPoolExecutor(2) as two:
        list(two.map(lambda n: check_fail_stop(shell, server, shim, f"{kind}-{n}", f"{kind}:{n}"), nth))
    print(f"{kind}: {len(nth)} of {calls} places, exit 74 and no send after each")
