"""What holds for every history: in flight ≤ limit, spent + reserved ≤ budget, every row ends exactly once."""

from __future__ import annotations

import random
from collections import Counter
from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.plan.schedule import Done, Flow, Schedule, Send, Sleep
from batchrun.records import Call, Fault, Reply
from tests.planning import BROKEN, BUSY, UNREACHABLE, call, fault, reply

ENDS = ["answer"] * 6 + ["part", "busy", "hint", "broken", "timeout", "unreachable", "garbled", "rejected", "adapted"]


class History:
    """Plays a random history to its end, checking the laws after every step."""

    def __init__(self, seed: int, flow: Flow, calls: list[Call]) -> None:
        self.rng = random.Random(seed)
        self.flow = flow
        self.schedule = Schedule(flow, random.Random(seed + 1), 0.0)
        self.calls = list(calls)
        self.halvings = max((len(each.rows) - 1).bit_length() for each in calls) if calls else 0
        self.lines = {row.line for each in calls for row in each.rows}
        self.now = 0.0
        self.out: list[tuple[float, int, Call]] = []
        self.ended: Counter[int] = Counter()
        self.held: set[int] = set()
        self.faulty = True
        self.sends = 0

    def run(self) -> None:
        ceiling = self.flow.concurrency or self.flow.max_concurrency
        for step in range(100_000):
            self.faulty = step < 4_000  # in the end the server is well
            wanted = self.schedule.wants(self.now)
            if wanted:
                self.schedule.offer(self.now, self.calls[:wanted])
                del self.calls[:wanted]
            if not self.calls:
                self.schedule.close()
            before, limit = self.schedule.in_flight, self.schedule.limit
            said = self.schedule.next(self.now)
            self.check()
            if isinstance(said, Done):
                assert not self.out
                return
            if isinstance(said, Send):
                assert before < limit <= ceiling
                self.sends += 1
                if self.rng.random() < 0.02:
                    self.schedule.release(self.now, said.call)
                else:
                    self.out.append((self.now + self.rng.uniform(0.0, 3.0), self.sends, said.call))
                continue
            self.out.sort()
            until = said.until if isinstance(said, Sleep) else float("inf")
            assert self.out or until < float("inf")
            if self.out and self.out[0][0] <= until:
                self.now = max(self.now, self.out[0][0])
                self.settle(self.out.pop(0)[2])
            else:
                self.now = max(self.now, until)
            self.check()
        raise AssertionError("it does not end")

    def settle(self, ending: Call) -> None:
        what = self.rng.choice(ENDS) if self.faulty else "answer"
        result: Reply | Fault = {
            "busy": BUSY,
            "hint": fault("rate_limited", hint_s=self.rng.uniform(0.0, 20.0)),
            "broken": BROKEN,
            "timeout": fault("timeout", billed=True),
            "unreachable": UNREACHABLE,
            "garbled": fault("garbled", billed=True),
            "rejected": fault("rejected"),
            "adapted": fault("rejected"),
        }.get(what) or reply(ending, without=(ending.rows[-1].line,) if what == "part" else ())
        cost = ending.reserved_usd * Decimal(self.rng.random()) if self.rng.random() < 0.8 else None
        known = cost if isinstance(result, Reply) or result.maybe_processed else None
        end = self.schedule.settle(self.now, ending, result, cost_usd=known, adapted=what == "adapted")
        again = [row for each in end.again for row in each.rows]
        assert Counter(row.line for row in (*end.succeeded, *end.failed, *again, *end.held)) == Counter(
            row.line for row in ending.rows
        )
        self.ended.update(row.line for row in (*end.succeeded, *end.failed))
        self.held |= {row.line for row in end.held}
        # A call of many rows that keeps failing is halved down to the row at fault: an attempt more at each halving.
        assert all(each.attempts <= self.flow.max_attempts + self.halvings for each in end.again)

    def check(self) -> None:
        assert self.schedule.in_flight == len(self.out) or self.schedule.in_flight == len(self.out) + 1
        assert self.schedule.reserved_usd >= 0
        if self.flow.budget_usd is not None:
            assert self.schedule.spent_usd + self.schedule.reserved_usd <= self.flow.budget_usd


FLOWS = st.builds(
    Flow,
    max_concurrency=st.integers(1, 40),
    concurrency=st.none() | st.integers(1, 20),
    rpm=st.none() | st.integers(30, 6_000),
    tpm=st.none() | st.integers(3_000, 10**6),
    max_attempts=st.integers(1, 4),
    origins=st.integers(1, 2),
    counts_max_tokens=st.booleans(),
)


def some_calls(rng: random.Random, count: int) -> list[Call]:
    calls, line = [], 0
    for _ in range(count):
        size = rng.choice([1, 1, 1, 2, 5])
        lines = range(line + 1, line + 1 + size)
        worst = Decimal(rng.randint(1, 100)) / 1_000
        model = rng.choice("aab")
        outer = rng.randint(1, 3) + 10 * (model == "b")
        prefix = rng.choice([(), (), (outer,), (outer, 100 * outer + rng.randint(1, 3))])
        calls.append(call(*lines, model=model, priority=rng.choice([0, 0, 1]), worst=worst, prefix=prefix))
        line += size
    return calls


@settings(max_examples=60, deadline=None)
@given(FLOWS, st.integers(0, 10**6))
def test_every_row_ends_exactly_once_whatever_happens(flow: Flow, seed: int) -> None:
    history = History(seed, flow, some_calls(random.Random(seed), 60))
    history.run()
    assert history.schedule.stop is None
    assert set(history.ended) == history.lines
    assert set(history.ended.values()) == {1}
    assert history.schedule.reserved_usd == 0


@settings(max_examples=60, deadline=None)
@given(FLOWS, st.integers(0, 10**6), st.decimals(0, 3, places=3), st.none() | st.floats(0, 60), st.integers(0, 9))
def test_a_budget_is_never_passed_and_what_is_left_stays_pending(
    flow: Flow, seed: int, budget: Decimal, deadline_at: float | None, max_failures: int
) -> None:
    limits = {"budget_usd": budget, "deadline_at": deadline_at, "max_failures": max_failures}
    kept = {name: getattr(flow, name) for name in ("max_concurrency", "concurrency", "max_attempts", "origins")}
    history = History(seed, Flow(**kept, **limits), some_calls(random.Random(seed), 60))
    history.run()
    assert set(history.ended.values()) <= {1}
    assert not history.held & set(history.ended)
    assert history.schedule.stop is not None or set(history.ended) == history.lines
    assert history.schedule.reserved_usd == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_same_history_gives_the_same_steps(seed: int) -> None:
    runs = [History(seed, Flow(max_concurrency=20), some_calls(random.Random(seed), 40)) for _ in range(2)]
    for history in runs:
        history.run()
    assert runs[0].now == runs[1].now
    assert runs[0].sends == runs[1].sends
    assert [str(note) for note in runs[0].schedule.notes()] == [str(note) for note in runs[1].schedule.notes()]
