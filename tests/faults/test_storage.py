"""The disk fails, fills up or turns read-only: nothing is sent after it, nothing that was shown is lost, exit 74."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.machine import LONG, Ext4, MemoryGroup, build_shim, check_whole, grow, look, tmpfs
from tests.faults.server import FaultServer, Reply, Request
from tests.support import Ran, Shell, chat_reply, prompts

ROWS = 4


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


# ---------------------------------------------------------------- the n-th call fails


SLOW_MS = 40
"""A disk on which a sync takes so long is waited for by a thread; a quick one by the event loop."""


def submit(shell: Shell, server: FaultServer, job: str, how: str, env: Mapping[str, str] | None = None) -> Ran:
    """Submits the rows one request at a time, as a file or as a stream."""
    args = ("--concurrency", "1", "--job", job)
    if how != "stream":
        return shell.submit(server, *args, env=env)
    data = (shell.root / "in.jsonl").read_bytes()
    return shell.submit(server, *args, "--flush-interval", "1", source="-", data=data, env=env)


def submit_on_failing_disk(
    shell: Shell, server: FaultServer, shim: Path, job: str, fail: str, how: str
) -> tuple[Ran, list[str]]:
    """Runs a job of its own; returns what it did and the shim's events."""
    log = shell.root / f"{job}.log"
    env = {"LD_PRELOAD": str(shim), "SHIM_UNDER": str(shell.root), "SHIM_LOG": str(log), "SHIM_FAIL": fail}
    if how == "file, slow disk":
        env["SHIM_SLOW"] = str(SLOW_MS)
    return submit(shell, server, job, how, env), log.read_text().splitlines()


def check_fail_stop(shell: Shell, server: FaultServer, shim: Path, job: str, fail: str, how: str) -> bool:
    """Breaks one run, and continues it on a disk that works. Returns whether the failure was noticed."""
    ran, events = submit_on_failing_disk(shell, server, shim, job, fail, how)
    first = next((index for index, event in enumerate(events) if event[0] == "X"), None)
    if first is None:  # how commits group varies a little: this run had fewer calls
        ran.told(0)
        return False
    if fail.endswith(":once") and ran.code == 0:
        # SQLite asks nobody whether its sync of a directory worked; all its later ones did.
        assert Path(events[first][2:]).is_dir(), events[first]
        return False
    late = events[first:].count("P")
    assert late == 0, f"{fail}: {late} requests were sent after the disk had failed"
    assert "storage failed" in ran.told(74).err or "the system refused" in ran.err, ran.err
    before = look(shell.root / job)
    assert events.count("P") <= len(before.records) + len(before.in_doubt)
    done = submit(shell, server, job, how).told(0)
    assert done.rows["succeeded"] == ROWS
    check_whole(shell, ROWS, job)
    assert before.records.items() <= look(shell.root / job).records.items()
    assert done.summary["requests"]["sent"] - ROWS <= len(before.in_doubt) <= 1
    return True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["file", "file, slow disk", "stream"])
@pytest.mark.parametrize("kind", ["sync", "write", "sync:once"])
def test_from_the_nth_call_on_that_the_disk_fails_nothing_more_is_sent(
    shell: Shell, server: FaultServer, shim: Path, kind: str, how: str
) -> None:
    shell.write("in.jsonl", prompts(ROWS))
    ran, events = submit_on_failing_disk(shell, server, shim, "whole", "nothing", how)
    ran.told(0)
    assert events.count("P") == ROWS
    calls = sum(event[0] == kind[0].upper() for event in events)
    assert calls > 20
    what, _, once = kind.partition(":")
    step = {"sync": 1, "write": 4}[what] if LONG else calls // 3
    fails = [":".join(filter(None, (what, str(n), once))) for n in range(1, calls, step)]
    with ThreadPoolExecutor(2) as two:
        names = [fail.replace(":", "-") for fail in fails]
        noticed = list(two.map(lambda job, fail: check_fail_stop(shell, server, shim, job, fail, how), names, fails))
    assert sum(noticed) >= len(noticed) - 2
    print(f"{kind}: {len(fails)} of {calls} places; exit 74 and no send after it at {sum(noticed)}")


# ---------------------------------------------------------------- full, damaged


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small", 512) as disk:
        yield disk


def check_full(shell: Shell, server: FaultServer, disk: Path, rows: int) -> None:
    """Runs into the end of a disk, gives it room, and goes on."""
    shell.write("in.jsonl", prompts(rows))
    job = disk / "j"
    ran = shell.submit(server, "--concurrency", "3", "--job", str(job))
    assert "storage failed" in ran.told(74).err or "No space left" in ran.err, ran.err
    before = look(job)
    assert len(before.in_doubt) <= 3
    assert {int(request.text[1:]) for request in server.requests} <= before.records.keys() | before.in_doubt
    assert shell.run("status", str(job), "--json").told(0).rows["succeeded"] == len(before.records)
    grow(disk)
    done = shell.submit(server, "--job", str(job)).told(0)
    assert done.rows == {"total": rows, "succeeded": rows, "failed": 0, "pending": 0, "in_doubt": 0}
    check_whole(shell, rows, str(job))
    assert before.records.items() <= look(job).records.items()
    assert len(server.requests) - rows <= len(before.in_doubt)


def test_a_disk_that_fills_up_while_replies_are_kept_stops_the_run(
    shell: Shell, server: FaultServer, small: Path
) -> None:
    server.script(lambda request, n: chat_reply(f"echo:{request.text}", refusal="x" * 3000))
    check_full(shell, server, small, rows=300)


def test_a_disk_too_full_for_the_results_file_keeps_every_answer(
    shell: Shell, server: FaultServer, small: Path
) -> None:
    rows, size = 40, 50_000

    def script(request: Request, n: int) -> Reply:
        if n == rows:  # room for this answer's commit, not for another copy of all
            about = os.statvfs(small)
            (small / "ballast").write_bytes(bytes(about.f_bavail * about.f_frsize - 12 * size))
        return chat_reply(f"echo:{request.text}", refusal="x" * size)

    server.script(script)
    grow(small, mib=16)
    check_full(shell, server, small, rows)
    assert len(server.requests) == rows


def test_a_disk_too_full_to_take_the_rows_in_sends_nothing_and_leaves_no_trace(
    shell: Shell, server: FaultServer, small: Path
) -> None:
    shell.write("in.jsonl", prompts(50_000))
    ran = shell.submit(server, "--job", str(small / "j"))
    assert "storage failed" in ran.told(74).err
    assert server.requests == []
    assert list(small.iterdir()) == []


def test_a_disk_that_turns_read_only_stops_the_run_and_can_still_be_read(
    shell: Shell, server: FaultServer, tmp_path: Path
) -> None:
    shell.write("in.jsonl", prompts(400))
    server.delay_s = 0.005
    with Ext4(tmp_path) as disk:
        job = disk.at / "j"
        args = shell.submission(server, "--concurrency", "3", "--job", str(job))
        process = shell.start(*args)
        server.wait_for_requests(40)
        disk.turn_read_only()
        assert "storage failed" in shell.end(process).told(74).err
        sent = len(server.requests)
        before = look(job)
        assert {int(request.text[1:]) for request in server.requests} <= before.records.keys() | before.in_doubt
        assert shell.run("results", str(job)).told(0).out.count(b"\n") == len(before.records) >= 37
        assert shell.submit(server, "--job", str(job)).code == 74
        assert len(server.requests) == sent
        disk.restart()
        done = shell.submit(server, "--job", str(job)).told(0)
        check_whole(shell, 400, str(job))
        assert done.summary["requests"]["sent"] - 400 <= len(before.in_doubt) <= 3


# ---------------------------------------------------------------- out of memory


def check_resumes(shell: Shell, server: FaultServer, in_flight: int, rows: int) -> None:
    """Continues a run that ran out of memory, with memory."""
    before = look(shell.root / "in.batchrun")
    assert len(before.in_doubt) <= in_flight
    assert {int(request.text[1:]) for request in server.requests} <= before.records.keys() | before.in_doubt
    server.script(lambda request, n: None)
    done = shell.submit(server).told(0)
    assert done.rows["succeeded"] == rows
    check_whole(shell, rows)
    assert before.records.items() <= look(shell.root / "in.batchrun").records.items()
    assert done.summary["requests"]["sent"] - rows <= len(before.in_doubt)


def test_a_run_that_the_kernel_kills_for_its_memory_loses_nothing(shell: Shell, server: FaultServer) -> None:
    rows, in_flight = 60, 8
    shell.write("in.jsonl", prompts(rows))
    with MemoryGroup("batchrun-fault-test") as group:
        process = shell.start(*shell.submission(server, "--concurrency", str(in_flight)))
        group.take(process.pid)
        server.script(lambda request, n: chat_reply("x" * (20 << 20)) if n > 12 else chat_reply(f"echo:{request.text}"))
        server.wait_for_requests(12)
        group.allow(group.used() + (8 << 20))
        assert shell.end(process).code == -signal.SIGKILL
    check_resumes(shell, server, in_flight, rows)
