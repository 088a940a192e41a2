"""Random histories of replies, faults, kills and resumes over the whole of a run, in virtual time.

Everything is real but the network, the clock and the writer's thread: rows are pinned, scheduled, settled in a store on
disk, projected. A history is a list of runs of one job, each broken in its own way; the last one is left in peace.
After each run, and at each send, the promises must hold.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import selectors
import signal
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batchrun.config import load
from batchrun.errors import BatchrunError
from batchrun.job import commands, pinning, running, standing
from batchrun.records import BadRow, Fault, HttpRequest, HttpResponse, Standing
from batchrun.run import engine, files, store
from batchrun.run.store import Store
from batchrun.run.view import View
from tests.faults.machine import LONG, in_memory

BILL = Decimal("0.000025")
"""Of each request that the server works on: 5 tokens in, and all 10 out that it may say."""

TIMEOUT_S = 20.0
ANYIO_RUN = anyio.run

FATES = {
    "answered": 30,
    "refused": 6,  # 429
    "busy": 3,  # 503
    "broken": 3,  # 500, billed or not
    "lost": 4,  # the connection broke after the request was sent
    "slow": 3,  # no answer within the timeout
    "garbled": 2,  # 200, billed, and no JSON
    "rejected": 2,  # 400: the row's own fault
    "unreachable": 3,  # refused before anything was sent
    "bad key": 0.3,  # stops the run
}


class Killed(BaseException):
    """The process is gone."""


@dataclass(frozen=True)
class Ending:
    """How a run is broken: at the n-th step that it takes, or after so many seconds."""

    how: Literal["kill at step", "kill at time", "signal", "disk fails", "disk fails afterwards", "peace"]
    step: int = 0
    time_s: float = 0.0


@dataclass(frozen=True)
class History:
    """A job and what happens to it."""

    rows: int
    in_flight: int
    max_attempts: int
    cap: int | None
    """In bills."""
    on_doubt: Literal["resend", "fail"]
    grace_s: float
    seed: int
    endings: list[Ending]


def endings() -> st.SearchStrategy[Ending]:
    steps, times = st.integers(1, 150), st.floats(0, 60, width=16)
    return st.one_of(
        st.builds(lambda n: Ending("kill at step", step=n), steps),
        st.builds(lambda s: Ending("kill at time", time_s=s), times),
        st.builds(lambda s: Ending("signal", time_s=s), times),
        st.builds(lambda n: Ending("disk fails", step=n), steps),
        st.builds(lambda n: Ending("disk fails afterwards", step=n), steps),
    )


HISTORIES = st.builds(
    History,
    rows=st.integers(1, 24),
    in_flight=st.integers(1, 6),
    max_attempts=st.integers(1, 4),
    cap=st.none() | st.integers(5, 60),
    on_doubt=st.sampled_from(["resend", "resend", "fail"]),
    grace_s=st.sampled_from([2 * TIMEOUT_S, TIMEOUT_S / 4]),
    seed=st.integers(0, 1 << 32),
    endings=st.lists(endings(), max_size=5),
)


# ---------------------------------------------------------------- a world in virtual time


class Loop(asyncio.SelectorEventLoop):
    """Skips the time in which nothing happens."""

    def __init__(self, world: World) -> None:
        loop = self

        class Skipping(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                found = super().select(0)
                if not found and timeout is None:
                    raise AssertionError("everything waits, and nothing will come")
                if not found and timeout:
                    world.now += timeout
                return found

        super().__init__(Skipping())
        loop.time = lambda: world.now  # type: ignore[method-assign]


class World:
    """A server that bills, a clock, and a process that may die; what is wrong is noted in ``wrongs``."""

    def __init__(self, history: History, root: Path) -> None:
        self.history = history
        self.root = root
        self.job = root / "in.batchrun"
        self.dice = random.Random(history.seed)
        self.now = 1000.0
        self.wall_offset = 1.7e9
        self.arrivals: Counter[int] = Counter()
        self.billed: Counter[int] = Counter()
        self.out = 0
        self.cap: Decimal | None = None
        self.kills = 0
        self.broken_disk = False
        self.wrongs: list[str] = []
        self.begin(Ending("peace"))

    def begin(self, ending: Ending) -> None:
        """A new process."""
        self.ending = ending
        self.steps = 0
        self.dead = False
        self.out = 0
        self.main: asyncio.Task[Any] | None = None
        self.engine: engine.Engine | None = None
        self.broken_disk = False
        self.peaceful = ending.how == "peace"

    def reached(self, place: str) -> None:
        """A step of the run: where it breaks, if it does."""
        self.steps += 1
        if self.dead:
            raise Killed
        if self.ending.how == "kill at step" and self.steps == self.ending.step:
            self.die()
            raise Killed
        if place == ("commit" if self.ending.how == "disk fails" else "committed") and (
            self.ending.how.startswith("disk") and self.steps >= self.ending.step
        ):
            self.broken_disk = True
            raise OSError(errno.EIO, "the disk is broken")

    def die(self) -> None:
        """From here on nothing is durable any more, and nobody acts."""
        self.dead = True
        self.kills += 1
        if self.main is not None:
            self.main.cancel()

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        if self.dice.random() < 0.02:  # somebody sets the clock
            self.wall_offset += self.dice.uniform(-1e5, 1e5)
        return self.now + self.wall_offset

    def make_engine(self, **how: Any) -> engine.Engine:
        self.engine = engine.Engine(**how, clock=self.monotonic, wall=self.wall)
        return self.engine

    def run(self, main: Any, **_: object) -> Any:
        """Stands for ``anyio.run``."""

        async def lead() -> Any:
            self.main = asyncio.current_task()
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(self.unhandled)
            if self.ending.how == "kill at time":
                loop.call_later(self.ending.time_s, self.die)
            if self.ending.how == "signal":
                loop.call_later(self.ending.time_s, signal.raise_signal, signal.SIGTERM)
            return await main()

        old = signal.signal(signal.SIGTERM, lambda *_: None)  # one that comes after the run harms nobody
        try:
            return ANYIO_RUN(lead, backend_options={"loop_factory": lambda: Loop(self)})
        finally:
            self.main = None
            signal.signal(signal.SIGTERM, old)

    def unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What no callback caught must not happen in a living process."""
        if not self.dead:
            self.wrongs.append(str(context))

    # ------------------------------------------------------------ the server

    async def send(self, request: HttpRequest, timeout_s: float) -> HttpResponse | Fault:
        line = int(json.loads(request.content)["messages"][-1]["content"][1:])
        self.check_send(line)
        fate = "answered"
        if not self.peaceful:
            fate = self.dice.choices(list(FATES), list(FATES.values()))[0]
        if fate in ("answered", "slow", "garbled") or (fate in ("broken", "lost") and self.dice.random() < 0.7):
            self.billed[line] += 1
            if self.cap is not None and BILL * self.billed.total() > self.cap:
                self.wrongs.append(f"billed {self.billed.total()} past the cap at line {line}")
        self.out += 1
        try:
            await asyncio.sleep(timeout_s if fate == "slow" else self.dice.expovariate(2.0))
        finally:
            self.out -= 1
        return answer(fate, line)

    def check_send(self, line: int) -> None:
        """Checks what must be so whenever a request leaves."""
        self.arrivals[line] += 1
        if self.dead:
            self.wrongs.append("sent by the dead")
        if self.out >= self.history.in_flight:
            self.wrongs.append(f"{self.out + 1} in flight")
        view = View(self.job)
        if line not in {intent.line for intent in view.intents(open_only=True)}:
            self.wrongs.append(f"line {line} was sent without a durable intent")
        if view.is_settled(line):
            self.wrongs.append(f"line {line} was sent though it is settled")
        view.close()

    async def aclose(self) -> None: ...

    # ------------------------------------------------------------ the console

    def update(self, standing: Standing) -> None:
        """Progress shows nothing as done that is not durable."""
        if self.dead:
            return
        view = View(self.job)
        succeeded, failed = view.settled(1 << 40)
        view.close()
        if standing.succeeded > succeeded or standing.failed > failed:
            self.wrongs.append(f"shown {standing.succeeded}+{standing.failed}, durable {succeeded}+{failed}")

    def notice(self, text: str) -> None: ...

    warn = debug = notice

    def start(self, total: int) -> None: ...

    def stop(self) -> None: ...

    def bad_lines(self, bad: list[BadRow], count: int) -> None: ...


def answer(fate: str, line: int) -> HttpResponse | Fault:
    """Returns what the client hands back."""
    said = {
        "model": "m",
        "choices": [{"index": 0, "message": {"content": f"echo:p{line}"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 10},
    }
    error = b'{"error":{"message":"no","code":"x"}}'
    answers: dict[str, HttpResponse | Fault] = {
        "answered": HttpResponse(200, {}, json.dumps(said).encode()),
        "refused": HttpResponse(429, {"retry-after-ms": "800"}, error),
        "busy": HttpResponse(503, {}, error),
        "broken": HttpResponse(500, {}, error),
        "lost": Fault("network", "the connection broke", maybe_processed=True),
        "slow": Fault("timeout", "no answer in time", maybe_processed=True),
        "garbled": HttpResponse(200, {}, b"<html>"),
        "rejected": HttpResponse(400, {}, error),
        "unreachable": Fault("network", "connection refused", maybe_processed=False, connected=False),
        "bad key": HttpResponse(401, {}, error),
    }
    return answers[fate]


class LoopStore(Store):
    """A store that commits some milliseconds later; the dead commit nothing."""

    world: World

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Any] = []

    def commit(self, operations: Any) -> asyncio.Future[None]:
        future = self._loop.create_future()
        if self.world.dead:
            future.set_exception(BatchrunError("dead"))
            future.exception()
        else:
            self._waiting.append((operations, future))
            self._loop.call_later(self.world.dice.choice((0.0, 0.001, 0.02)), self._flush)
        return future

    def _flush(self) -> None:
        group, self._waiting = self._waiting, []
        with suppress(Killed):
            if group and not self.world.dead:
                self._tell(group, self._commit_group(group))
                return
        for _, future in group:
            if not future.done():
                future.set_exception(BatchrunError("dead"))
                future.exception()

    def stop(self) -> None:
        if getattr(self, "_waiting", None):
            self._flush()

    def salvage(self, operations: Any) -> bool:
        return not self.world.dead and super().salvage(operations)


# ---------------------------------------------------------------- the promises


def submit(world: World, ending: Ending) -> int | None:
    """Runs a process to whatever end; returns its exit code, None where it was killed."""
    world.begin(ending)
    history = world.history
    flags = {
        "model": "m",
        "max_tokens": "10",
        "concurrency": str(history.in_flight),
        "max_attempts": str(history.max_attempts),
        "budget": None if world.cap is None else f"{world.cap:f}",
        "price_in": "1",
        "price_out": "2",
        "timeout": str(TIMEOUT_S),
        "grace": str(history.grace_s),
        "patience": "2m",
        "on_doubt": history.on_doubt,
    }
    told, given_now = load(flags, {"BATCHRUN_BASE_URL": "http://127.0.0.1:9"}, world.root)
    try:
        outcome = commands.submit(str(world.root / "in.jsonl"), told, given_now, {"OPENAI_API_KEY": "k" * 20}, world)
    except BatchrunError as error:
        return None if world.dead else int(error.exit_code)
    except BaseException:  # Killed, or a group of them where several tasks died
        if not world.dead:
            raise
        return None
    return None if world.dead else outcome.exit_code


def check(world: World, records: dict[int, bytes], code: int | None) -> dict[int, bytes]:
    """Checks a job after a run; returns its records."""
    assert world.wrongs == []
    if not (world.job / "state.db").exists():
        assert world.arrivals.total() == 0, "the job is gone though it was paid for"
        return {}
    view = View(world.job)
    lines = sorted(view.settled_in(0, 1 << 40))
    found = dict(zip(lines, view.records("all"), strict=True))
    intents = view.intents()
    open_now = [intent for intent in intents if intent.open]
    succeeded, failed = view.settled(1 << 40)
    view.close()
    assert records.items() <= found.items(), "a record is gone or changed"
    assert {json.loads(record)["line"] for record in found.values()} == set(found)
    assert not {intent.line for intent in intents} & set(found), "settled, and yet on its way"
    assert set(world.arrivals) <= set(found) | {intent.line for intent in intents}, "a row was forgotten"
    assert len(open_now) <= world.history.in_flight
    summary = standing.status(world.job)
    assert (summary["rows"]["succeeded"], summary["rows"]["failed"]) == (succeeded, failed)
    assert sum(summary["rows"][name] for name in ("succeeded", "failed", "pending", "in_doubt")) == world.history.rows
    never_left = summary["requests"]["sent"] - world.arrivals.total()
    assert 0 <= never_left <= (world.kills + len(world.history.endings)) * world.history.in_flight
    times = [time_s for time_s in summary["latency_s"].values() if time_s is not None]
    assert all(0 <= time_s <= TIMEOUT_S * 1.1 for time_s in times), "the wall clock's steps show"
    assert summary["elapsed_s"] >= 0
    if world.cap is not None:
        spent = summary["spent_usd"] + sum((intent.reserved_usd for intent in open_now), Decimal(0))
        assert BILL * world.billed.total() <= spent <= world.cap, "billed ≤ counted ≤ cap"
    if code is not None and world.engine is not None and world.history.grace_s > TIMEOUT_S:  # all could land
        assert world.out == world.engine._schedule.in_flight == world.engine._schedule.reserved_usd == 0, (
            "a slot leaked"
        )
        assert open_now == [] or world.broken_disk
    if code in (0, 1):
        assert succeeded + failed == world.history.rows
    return found


def play(history: History) -> list[int | None]:
    """Lives through a history; returns the exit codes of its broken runs."""
    with tempfile.TemporaryDirectory(dir=in_memory()) as directory, pytest.MonkeyPatch.context() as patch:
        world = World(history, Path(directory))
        rows = "".join(json.dumps({"id": f"r{n}", "prompt": f"p{n}"}) + "\n" for n in range(1, history.rows + 1))
        (world.root / "in.jsonl").write_text(rows)
        for module in (files, store, engine, pinning, running, standing):
            patch.setattr(module, "reached", world.reached)
        clock = SimpleNamespace(monotonic=world.monotonic, time=world.wall)
        patch.setattr(running, "time", clock)
        patch.setattr(commands, "time", clock)
        patch.setattr(anyio, "run", world.run)
        patch.setattr(anyio.to_thread, "run_sync", at_once)
        patch.setattr(running, "Engine", world.make_engine)
        patch.setattr(running.Run, "_client", lambda self, limit: world)
        patch.setattr(commands, "Store", type("WorldStore", (LoopStore,), {"world": world}))
        if history.cap is not None:
            world.cap = BILL * history.cap
        records: dict[int, bytes] = {}
        codes = []
        for ending in history.endings:
            code = submit(world, ending)
            codes.append(code)
            records = check(world, records, code)
            if world.broken_disk:
                assert code in (None, 74), code
        if world.cap is not None:  # enough for every row and doubt there can be
            world.cap += BILL * 1000
        code = submit(world, Ending("peace"))
        records = check(world, records, code)
        assert code in (0, 1)
        assert set(records) == set(range(1, history.rows + 1))
        check_files(world, records)
        return codes


async def at_once(work: Any, *args: Any, **_: Any) -> Any:
    """Stands for a worker thread."""
    await asyncio.sleep(0)
    return work(*args)


def check_files(world: World, records: dict[int, bytes]) -> None:
    """Checks what people read of a finished job: every id once, in order, and why it failed if it did."""
    succeeded = [json.loads(line) for line in (world.job / "results.jsonl").read_bytes().splitlines()]
    failed = [json.loads(line) for line in (world.job / "errors.jsonl").read_bytes().splitlines()]
    for rows in (succeeded, failed):
        assert [row["line"] for row in rows] == sorted(row["line"] for row in rows)
    ids = [row["custom_id"] for row in succeeded + failed]
    assert sorted(ids) == sorted(f"r{line}" for line in records)
    for row in succeeded:
        assert row["output"] == f"echo:p{row['line']}"
        assert world.billed[row["line"]] >= 1
    for row in failed:
        kind = row["error"]["kind"]
        if kind not in ("rejected", "in_doubt"):  # it was asked as often as it may be
            assert row["attempts"] >= world.history.max_attempts, row


@settings(
    max_examples=2000 if LONG else 50,
    deadline=None,
    derandomize=not LONG,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(HISTORIES)
@example(History(1, 1, 1, 5, "resend", 40.0, 2, [Ending("disk fails afterwards", step=15)]))  # durable, yet untold
@pytest.mark.timeout(1800)
def test_after_any_history_each_row_is_settled_once_within_the_cap_and_nothing_is_forgotten(history: History) -> None:
    play(history)


@pytest.mark.parametrize("how", ["kill at step", "kill at time", "signal", "disk fails", "disk fails afterwards"])
def test_a_run_is_broken_in_each_way_so_that_the_law_does_not_hold_for_want_of_breaks(how: Any) -> None:
    endings = [Ending(how, step=step, time_s=step / 20) for step in (30, 45, 60)]
    codes = play(History(20, 3, 3, None, "resend", 40.0, 7, endings))
    assert codes == {"kill": [None] * 3, "signal": [143] * 3, "disk": [74] * 3}[how.split(" ")[0]]
