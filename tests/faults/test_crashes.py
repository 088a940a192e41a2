"""kill -9 at every step and at any moment: nothing shown is lost, nothing is doubled, no money goes past the cap."""

from __future__ import annotations

import random
import re
import signal
import tempfile
import time
from decimal import Decimal
from pathlib import Path

import pytest

import batchrun
from tests.faults.machine import LONG, check_whole, in_memory, kill_at_request, look
from tests.faults.server import FaultServer, Reply
from tests.support import Shell, chat_reply, parse, prompts, wait_until

POINTS = sorted(
    {
        name
        for path in Path(batchrun.__file__).parent.rglob("*.py")
        for name in re.findall(r'\breached\("(\w+)"\)', path.read_text())
        if path.name != "stream.py"  # tests/test_streams.py
    }
)
"""Every place where a run of a file can be broken."""

IN_FLIGHT = 4
ROWS = 12
USAGE = {"prompt_tokens": 8, "completion_tokens": 5}
BILL = Decimal("0.000013")
"""What the server bills for a request: all that the row allows, at a dollar per million tokens."""
PRICES = ("--price-in", "1", "--price-out", "1")


def billing(server: FaultServer, delay_s: float = 0.0) -> None:
    """Has every request that arrives billed, whether or not anybody is there for its answer."""
    server.script(lambda request, n: chat_reply(f"echo:{request.text}", usage=USAGE, delay_s=delay_s))


def billed(server: FaultServer) -> Decimal:
    return BILL * server.billed.total()


def test_every_place_where_a_run_may_be_broken_is_known_here() -> None:
    assert len(POINTS) == 14
    assert {"ingest", "intent", "send", "reply", "settle", "commit", "committed", "project", "replace"} <= set(POINTS)


LATER = {"commit": (5, 9), "committed": (4, 7), "replace": (2, 4), "rename": (3,), "send": (5,), "reply": (6,)}
"""A place is passed again and again: which other times are worth a try."""
EVERYWHERE = [(point, n) for point in POINTS for n in (1, *LATER.get(point, ()))]
BREAKS = [(*place, action) for action in ("kill", "raise", "exit") for place in EVERYWHERE]
if not LONG:
    firsts = [(point, 1, "kill") for point in POINTS]
    BREAKS = [*firsts, ("commit", 5, "kill"), ("committed", 4, "kill"), ("send", 5, "kill"), ("replace", 2, "kill")]
    BREAKS += [("committed", 4, "raise"), ("reply", 3, "raise"), ("settle", 2, "raise"), ("replace", 1, "exit")]


@pytest.mark.parametrize(("point", "n", "action"), BREAKS)
def test_a_run_broken_anywhere_is_resumed_and_each_row_is_answered_once(
    shell: Shell, server: FaultServer, point: str, n: int, action: str
) -> None:
    billing(server)
    shell.write("in.jsonl", prompts(ROWS, max_tokens=5))
    cap = ("--budget", "0.002", *PRICES)
    args = shell.submission(server, "--concurrency", str(IN_FLIGHT), *cap)
    if point == "doubts":  # there must be some
        server.script(lambda request, number: Reply(hold=True) if number > 3 else None)
        process = shell.start(*args)
        server.wait_for_requests(7)
        process.kill()
        shell.end(process)
        billing(server)
    ran = shell.run(*args, env={"BATCHRUN_FAILPOINT": f"{point}:{n}:{action}"})
    assert ran.code == {"kill": -signal.SIGKILL, "exit": 70, "raise": 74}[action], ran.err
    job = shell.root / "in.batchrun"
    before = look(job)
    assert len(before.in_doubt) <= IN_FLIGHT
    sent_lines = {int(request.text[1:]) for request in server.requests}
    assert sent_lines <= before.records.keys() | before.in_doubt | before.waiting, "a send without a durable intent"
    done = shell.submit(server, "--concurrency", str(IN_FLIGHT), *cap).told(0)
    assert done.rows == {"total": ROWS, "succeeded": ROWS, "failed": 0, "pending": 0, "in_doubt": 0}
    check_whole(shell, ROWS)
    after = look(job)
    assert before.records.items() <= after.records.items(), "a record that was shown has changed"
    assert (after.in_doubt, after.waiting) == (set(), set())
    repeats = len(server.requests) - ROWS
    assert 0 <= repeats <= len(before.in_doubt) + IN_FLIGHT * (point == "doubts")
    assert billed(server) <= done.summary["spent_usd"] <= Decimal("0.002")


def slow_disk(root: Path) -> dict[str, str]:
    """Returns the environment of a run that takes its disk for a slow one: its thread writes, not its event loop."""
    (root / "slow").mkdir()
    (root / "slow" / "sitecustomize.py").write_text("import batchrun.run.store as store\nstore._QUICK_S = 0.0\n")
    return {"PYTHONPATH": str(root / "slow")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_any_moment_lose_nothing_double_nothing_and_stay_within_the_cap(server: FaultServer) -> None:
    kills, per_kill, in_flight = (200, 40, 20) if LONG else (20, 40, 20)
    rows = kills * per_kill
    with tempfile.TemporaryDirectory(dir=in_memory()) as directory:
        shell = Shell(Path(directory))
        try:
            kill_again_and_again(shell, server, kills, rows, in_flight)
        finally:
            shell.close()


def kill_again_and_again(shell: Shell, server: FaultServer, kills: int, rows: int, in_flight: int) -> None:
    dice = random.Random(20260)
    billing(server, delay_s=0.01)
    shell.write("in.jsonl", prompts(rows, max_tokens=5))
    # Enough for half of the rows: the cap is met on the way, and then lifted.
    cap = BILL * (rows // 2)
    job = shell.root / "in.batchrun"
    slow = slow_disk(shell.root)
    shown: dict[int, bytes] = {}
    doubts = killed = capped = 0
    most_repeats = 0
    began = time.monotonic()
    while killed < kills:
        args = shell.submission(server, "--concurrency", str(in_flight), "--budget", str(cap), *PRICES)
        already = set(server.seen)
        first = len(server.requests)
        process = shell.start(*args, env=slow if killed % 2 else {})
        if dice.random() < 0.2:  # at a moment of the clock: also while it starts, takes rows in, or writes files
            time.sleep(dice.random() * 0.6)
            process.kill()
        else:
            kill_at_request(server, process, first + dice.randrange(1, 50))
        ran = shell.end(process)
        billing(server, delay_s=0.01)
        wait_until(lambda: server.in_flight == 0)
        assert billed(server) <= cap
        standing = look(job)
        assert shown.items() <= standing.records.items(), "what was shown is gone or changed"
        shown = standing.records
        assert len(standing.in_doubt) <= in_flight
        repeats = sum(request.text in already for request in server.requests[first:])
        assert repeats <= in_flight
        most_repeats = max(most_repeats, repeats)
        if ran.code == -signal.SIGKILL:
            killed += 1
            doubts += len(standing.in_doubt)
        else:
            assert ran.code == 3, ran.err  # the cap
            capped += 1
            cap += BILL * (rows // 4)
    cap *= 2
    done = shell.submit(server, "--concurrency", str(in_flight), "--budget", str(cap), *PRICES).told(0)
    assert done.rows == {"total": rows, "succeeded": rows, "failed": 0, "pending": 0, "in_doubt": 0}
    check_whole(shell, rows)
    assert shown.items() <= look(job).records.items()
    repeats = len(server.requests) - rows
    assert 0 < repeats <= doubts <= kills * in_flight
    assert billed(server) <= done.summary["spent_usd"] <= cap
    report = parse((job / "report.json").read_bytes())
    assert report["cost_usd"] == BILL * rows
    print(
        f"{kills} kills in {time.monotonic() - began:.0f} s: {rows} rows, 0 lost, 0 doubled, {repeats} repeats"
        f" ({repeats / kills:.1f} a kill, most {most_repeats}, in doubt {doubts}), stopped by the cap {capped} times,"
        f" billed {billed(server)} of {cap}"
    )
