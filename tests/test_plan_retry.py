from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.plan.retry import Breaker, RetryBudget, back_off, judge
from batchrun.records import Fault, FaultKind
from tests.planning import BROKEN, BUSY, UNREACHABLE, fault


@pytest.mark.parametrize(
    ("what", "rows", "attempts", "verdict"),
    [
        (fault("fatal"), 1, 0, "stop"),
        (fault("rejected"), 1, 0, "fail"),
        (fault("rejected"), 8, 0, "split"),
        (fault("too_large"), 1, 0, "fail"),
        (fault("too_large"), 2, 0, "split"),
        (BUSY, 1, 99, "again"),
        (UNREACHABLE, 1, 99, "again"),
        (BROKEN, 1, 4, "again"),
        (BROKEN, 1, 5, "fail"),
        (fault("timeout", billed=True), 1, 5, "fail"),
        (fault("garbled", billed=True), 1, 4, "again"),
        (fault("garbled", billed=True), 1, 5, "fail"),
    ],
)
def test_a_fault_means_for_its_rows(what: Fault, rows: int, attempts: int, verdict: str) -> None:
    assert judge(what, rows, attempts, max_attempts=5) == verdict


@given(st.integers(1, 10**6), st.floats(0, 500), st.integers(0, 99))
def test_a_back_off_is_jittered_grows_and_is_never_longer_than_a_minute(n: int, waited_s: float, seed: int) -> None:
    delay = back_off(random.Random(seed), n, None, waited_s)
    assert 0 <= delay <= 60
    assert delay >= min(60, 1.25 * waited_s)


@given(st.floats(0, 10**5), st.integers(0, 99))
def test_a_hint_is_never_undercut_and_stretched_by_a_tenth_at_most(hint_s: float, seed: int) -> None:
    assert hint_s <= back_off(random.Random(seed), 3, hint_s, 0.0) <= 1.1 * hint_s


def test_full_jitter_spreads_over_the_whole_of_two_to_the_n() -> None:
    rng = random.Random(7)
    delays = [back_off(rng, 4, None, 0.0) for _ in range(1_000)]
    assert min(delays) < 0.5
    assert max(delays) > 15.5


def test_the_retry_budget_grants_ten_then_ten_a_minute_and_a_tenth_of_the_successes() -> None:
    budget = RetryBudget(0.0)
    assert [budget.take(0.0) for _ in range(10)] == [0.0] * 10
    assert budget.take(0.0) == pytest.approx(6.0)
    assert budget.take(3.0) == pytest.approx(3.0)
    assert budget.take(6.1) == 0.0
    for _ in range(10):
        budget.succeeded()
    assert budget.take(6.1) == 0.0
    assert sum(budget.take(1_000.0) == 0.0 for _ in range(30)) == 10


def test_successes_earn_retries_above_the_floor_up_to_a_ceiling() -> None:
    budget = RetryBudget(0.0)
    for _ in range(100_000):
        budget.succeeded()
    assert sum(budget.take(0.0) == 0.0 for _ in range(2_000)) == 1_000


class BreakerHand:
    def __init__(self) -> None:
        self.breaker = Breaker(random.Random(1))
        self.now = 0.0

    def fail(self, times: int = 1, **at: Any) -> bool:
        return [self.breaker.failed(self.now, at.get("sent_at", self.now)) for _ in range(times)][-1]


def test_ten_failures_in_a_row_open_the_breaker() -> None:
    hand = BreakerHand()
    assert not hand.fail(5)
    hand.breaker.succeeded(0.0)
    assert not hand.fail(9)
    assert hand.fail()
    assert hand.breaker.opened_at == 0.0


def test_sixteen_of_twenty_open_the_breaker() -> None:
    hand = BreakerHand()
    opened = []
    for _ in range(4):
        opened.append(hand.fail(4))
        hand.breaker.succeeded(0.0)
    assert opened == [False, False, False, True]


def test_answers_from_before_the_failures_began_do_not_keep_it_closed() -> None:
    hand = BreakerHand()
    opened = []
    for _ in range(10):
        opened.append(hand.fail(sent_at=5.0))
        hand.breaker.succeeded(4.9)
    assert opened == [False] * 9 + [True]


def test_probes_come_later_and_later_and_only_one_that_is_answered_closes_it() -> None:
    hand = BreakerHand()
    hand.fail(10)
    waits = []
    for _ in range(7):
        waits.append(hand.breaker.probe_at - hand.now)
        hand.now = hand.breaker.probe_at
        hand.breaker.probing = True
        hand.breaker.probed(hand.now, succeeded=False)
    expected = [1, 2, 4, 8, 15, 15, 15]
    assert all(0.9 * want <= wait <= 1.1 * want for want, wait in zip(expected, waits, strict=True))
    hand.breaker.probed(hand.now, succeeded=True)
    assert hand.breaker.opened_at is None
    assert not hand.fail(9)


@given(st.lists(st.sampled_from(["ok", "fail"]), max_size=200))
def test_the_breaker_opens_exactly_by_its_two_rules(history: list[str]) -> None:
    breaker = Breaker(random.Random(1))
    seen: list[bool] = []
    for event in history:
        if event == "ok":
            breaker.succeeded(0.0)
            if any(seen[-20:]):
                seen.append(False)
            continue
        seen.append(True)
        opened = breaker.failed(0.0, 0.0)
        assert opened == ((len(seen) >= 10 and all(seen[-10:])) or sum(seen[-20:]) >= 16)
        if opened:
            return


def test_kinds_are_all_judged() -> None:
    kinds: list[FaultKind] = [
        "rate_limited", "overloaded", "timeout", "network", "too_large", "rejected", "fatal", "garbled",
    ]  # fmt: skip
    assert {kind: judge(fault(kind), 1, 1, 5) for kind in kinds} == {
        "rate_limited": "again",
        "overloaded": "again",
        "timeout": "again",
        "network": "again",
        "too_large": "fail",
        "rejected": "fail",
        "fatal": "stop",
        "garbled": "again",
    }
