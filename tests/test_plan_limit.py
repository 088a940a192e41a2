"""The control law: trajectories and reasons."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from math import inf

import pytest

from batchrun.plan.limit import Limit, LimitChange
from batchrun.plan.measure import Meetings, Round
from batchrun.plan.schedule import Flow
from tests.planning import BUSY, Play, call, fault


class Lab:
    """A limit and a server that answers by ``serve(in service) → seconds``, or refuses where that is None."""

    def __init__(self, serve: Callable[[int], float | None], *, ceiling: int = 256, fixed: int | None = None) -> None:
        self.limit = Limit(0.0, ceiling, fixed)
        self.serve = serve
        self.now = 0.0
        self.events: list[tuple[float, int, bool, float, int, int]] = []
        self.serving = 0
        self.paused_until = 0.0
        self.changes: list[LimitChange] = []
        self.answers: list[float] = []
        self.refusals: list[float] = []
        self.tokens = 100

    def run(self, seconds: float, *, offered: float = inf) -> None:
        """Lets time pass with always more to send, or no more than ``offered`` in flight."""
        end = self.now + seconds
        while self.now < end:
            while self.now >= self.paused_until and self.limit.in_flight < offered:
                opens_at = self.limit.opens_at(self.now)
                if opens_at > self.now:
                    break
                self.send()
            wake = max(self.paused_until, self.now + 1e-6) if self.now < self.paused_until else inf
            opens_at = self.limit.opens_at(self.now) if wake == inf and self.limit.in_flight < offered else inf
            then = min(end, wake, opens_at, self.events[0][0] if self.events else inf)
            self.now = max(self.now, then)
            if self.events and self.events[0][0] <= self.now:
                self.land()
            self.listen()

    def send(self) -> None:
        others = self.limit.in_flight
        self.limit.sent(self.now)
        service_s = self.serve(self.serving)
        self.serving += service_s is not None
        lands = self.now + (0.01 if service_s is None else service_s)
        event = (lands, self.limit.sends, service_s is not None, self.now, others, self.limit.sends)
        heapq.heappush(self.events, event)

    def land(self) -> None:
        _, _, answered, sent_at, others, order = heapq.heappop(self.events)
        if answered:
            self.serving -= 1
            self.answers.append(self.now)
            self.limit.answered(self.now, sent_at, self.tokens)
        else:
            self.refusals.append(self.now)
            pause_s = self.limit.refused(self.now, sent_at, others, order)
            self.paused_until = max(self.paused_until, self.now + pause_s)

    def listen(self) -> None:
        self.changes += self.limit.changes
        self.limit.changes.clear()

    @property
    def windows(self) -> list[int]:
        return [self.changes[0].old, *(change.new for change in self.changes)] if self.changes else []

    def why(self) -> list[str]:
        return [str(change) for change in self.changes]


def always(service_s: float) -> Callable[[int], float | None]:
    rng = random.Random(5)
    return lambda _: service_s * rng.uniform(0.8, 1.2)


def up_to(limit: int, service_s: float) -> Callable[[int], float | None]:
    rng = random.Random(5)
    return lambda serving: None if serving >= limit else service_s * rng.uniform(0.8, 1.2)


# ---------------------------------------------------------------- start


def test_the_window_doubles_while_that_pays() -> None:
    lab = Lab(always(1.0))
    lab.run(20)
    assert lab.windows == [16, 32, 64, 128, 256]
    assert {change.why for change in lab.changes} == {"slow start"}


def test_it_stops_at_the_knee_where_more_gains_nothing() -> None:
    lab = Lab(lambda serving: 0.5 * max(1.0, (serving + 1) / 40))
    lab.run(20)
    assert lab.windows[:5] == [16, 32, 64, 128, 64]
    assert lab.why()[3] == "128 → 64 no gain from more"


def test_a_window_that_is_not_used_does_not_grow() -> None:
    lab = Lab(always(1.0))
    lab.run(60, offered=10)
    assert lab.windows == []


def test_the_ceiling_is_the_end_of_it() -> None:
    lab = Lab(always(1.0), ceiling=20)
    lab.run(15)
    assert lab.windows == [16, 20]


def test_a_fixed_concurrency_is_never_changed() -> None:
    lab = Lab(up_to(4, 1.0), fixed=8)
    lab.run(30)
    assert lab.windows == []
    assert lab.limit.window == 8
    lab.limit.restart(lab.now)
    assert lab.limit.window == 8


# ---------------------------------------------------------------- cut


def test_a_cohort_of_a_hundred_refusals_makes_one_cut() -> None:
    """A hundred calls in flight are refused within 50 ms."""
    play = Play(Flow(max_concurrency=128))
    play.offer(*map(call, range(2_000)))
    while play.schedule.limit < 128:
        play.wait(1)
        play.end_all()
    while len(play.out) < 100:
        play.wait(0.05)
    before = len(play.limits)
    for each in play.out[:100]:
        play.now += 0.0005
        play.end(each, BUSY)
    play.wait(2)
    assert len(play.limits) == before + 1
    assert play.limits[-2:] == [128, 64]
    assert play.why[-1] == "limit: 128 → 64 rate_limited"


def test_calls_sent_before_a_cut_say_nothing_about_the_window_after_it() -> None:
    play = Play(Flow(max_concurrency=64))
    play.offer(*map(call, range(100)))
    play.wait(1)
    early, late = play.out[:8], play.out[8:]
    for each in early:
        play.end(each, BUSY)
    play.wait(1.2)
    cut = list(play.limits)
    assert cut == [16, 8]
    for each in late:
        play.end(each, BUSY)
    play.wait(0.05)
    assert play.limits == cut


def test_an_in_flight_limit_is_found_to_the_call_and_named() -> None:
    lab = Lab(up_to(24, 1.0))
    lab.run(120)
    assert lab.windows[:3] == [16, 32, 24]
    assert lab.limit.kind == "in-flight"
    assert lab.limit.rate is None
    assert any(line.endswith("rate_limited: server limits in-flight") for line in lab.why())
    since = len([at for at in lab.answers if at > 30]) / 90
    assert since >= 0.97 * 24
    assert len([at for at in lab.refusals if at > 30]) <= 0.01 * since * 90


def test_a_rate_limit_is_found_and_named() -> None:
    rng, level, at = random.Random(3), 10.0, 0.0
    lab: Lab

    def bucket(_: int) -> float | None:
        nonlocal level, at
        level, at = min(10.0, level + (lab.now - at) * 20), lab.now
        if level < 1:
            return None
        level -= 1
        return rng.uniform(0.3, 2.0)

    lab = Lab(bucket)
    lab.run(240)
    assert lab.limit.kind == "rate"
    assert lab.limit.rate == pytest.approx(20, rel=0.15)
    assert any(line.endswith("rate_limited: server limits the rate") for line in lab.why())
    assert len([at for at in lab.answers if at > 120]) >= 0.95 * 20 * 120
    assert len([at for at in lab.refusals if at > 120]) <= 0.025 * 20 * 120


def test_repeated_long_hints_never_freeze_the_limit_and_never_collapse_it() -> None:
    """Every refusal asks for 30 s, longer than any cool-down; between them the window climbs again."""
    play = Play(Flow(max_concurrency=64))
    for round_of_hints in range(6):
        for _ in range(120):
            wanted = play.schedule.wants(play.now)
            play.offer(*(call(10_000 * round_of_hints + line) for line in range(wanted)))
            play.wait(1, tick=0.1)
            play.end_all()
        play.wait(1)
        assert len(play.out) > 1
        for each in list(play.out):
            play.end(each, fault("rate_limited", hint_s=30))
    told = [why for why in play.why if why.startswith("limit") and "slow start" not in why]
    cuts = [place for place, why in enumerate(told) if "rate_limited" in why]
    assert len(cuts) == 5
    assert all("climbing" in told[place + 1] for place in cuts)
    assert min(play.limits) >= 16


def test_the_kind_follows_a_server_that_changes() -> None:
    size = 32
    lab = Lab(lambda serving: None if serving >= size else 1.0)
    lab.run(60)
    assert lab.limit.kind == "in-flight"
    size = 12
    lab.run(60)
    assert lab.limit.window in (11, 12, 13)
    size = 60
    lab.run(60)
    assert 54 <= lab.limit.window <= 66


def test_an_outage_is_followed_by_a_quarter_of_the_window_and_doublings() -> None:
    lab = Lab(always(1.0))
    lab.run(12)
    assert lab.limit.window == 256
    lab.limit.restart(lab.now)
    lab.run(20)
    assert lab.windows[-3:] == [64, 128, 256]
    assert lab.changes[-1].why == "back after an outage"
    lab.limit.restart(lab.now)
    lab.run(0.5)
    lab.limit.restart(lab.now)
    lab.run(20)
    assert lab.windows[-4:] == [16, 64, 128, 256] or lab.windows[-5:] == [16, 32, 64, 128, 256]


def test_errors_say_nothing_about_a_limit() -> None:
    lab = Lab(always(1.0))
    lab.run(1)
    for _ in range(8):
        lab.limit.ended(lab.now)
    assert lab.limit.window == 16


# ---------------------------------------------------------------- climb and rest


def test_a_climb_that_gains_nothing_is_taken_back() -> None:
    """A refusal now and then on a server that has its knee at 40: the window must not run away from it."""
    refuse = iter([False] * 3_000 + [True] + [False] * 10**6)
    lab = Lab(lambda serving: None if next(refuse) else 0.5 * max(1.0, (serving + 1) / 40))
    lab.run(400)
    assert max(lab.windows) <= 128
    assert any("no gain from more" in line for line in lab.why())
    assert lab.limit.window <= 80


def test_a_climb_that_gains_goes_on_past_its_check() -> None:
    """One refusal by chance, at 128 of a server that could do twice that."""
    refuse = iter([False] * 300 + [True] + [False] * 10**6)
    lab = Lab(lambda serving: None if next(refuse) else 1.0)
    lab.run(120)
    assert lab.limit.window == 256
    assert not any("no gain" in line for line in lab.why())


def test_less_is_kept_where_it_gains() -> None:
    """A server that thrashes beyond 40: from 64 the way leads down."""
    lab = Lab(lambda serving: 0.5 * max(1.0, (serving + 1) / 40) ** 2.5, ceiling=60)
    lab.run(400)
    assert any(line.endswith("trying less") for line in lab.why())
    assert 28 <= lab.limit.window <= 50


def test_at_rest_nothing_is_tried_often() -> None:
    lab = Lab(lambda serving: 0.5 * max(1.0, (serving + 1) / 40))
    lab.run(3_600)
    trials = [line for line in lab.why() if "trying" in line]
    assert 6 <= len(trials) <= 20
    assert any(line.endswith("trying more") for line in trials)
    assert any(line.endswith("trying less") for line in trials)


def test_at_the_ceiling_only_less_is_tried() -> None:
    lab = Lab(always(0.5), ceiling=16)
    lab.run(300)
    assert {line.split(" ", 3)[3] for line in lab.why()} == {"trying less", "no gain from less"}


def test_without_tokens_calls_are_what_counts() -> None:
    lab = Lab(lambda serving: 0.5 * max(1.0, (serving + 1) / 40))
    lab.tokens = 0
    lab.run(120)
    assert lab.windows[:5] == [16, 32, 64, 128, 64]


def test_where_the_pace_rules_the_window_follows_round_trips() -> None:
    level, at, slow = 5.0, 0.0, 1.0
    lab: Lab
    rng = random.Random(3)

    def bucket(_: int) -> float | None:
        nonlocal level, at
        level, at = min(5.0, level + (lab.now - at) * 20), lab.now
        if level < 1:
            return None
        level -= 1
        return slow * rng.uniform(0.2, 1.8)

    lab = Lab(bucket)
    lab.run(120)
    assert lab.limit.kind == "rate"
    before = lab.limit.window
    slow = 3.0
    lab.run(120)
    assert lab.limit.window > 1.8 * before
    assert len([at for at in lab.answers if at > lab.now - 60]) >= 0.9 * 20 * 60


# ---------------------------------------------------------------- measures


def test_a_round_measures_throughput_by_littles_law() -> None:
    measured = Round(0.0, 1.0, 10.0)
    assert not measured.answered(0.5, 1.0, 10)
    whole = False
    for step in range(1, 41):
        measured.passed(step * 0.1, 10)
        whole = measured.answered(step * 0.1, 1.0, 10)
    assert whole
    shown = measured.result(4.0)
    assert shown.calls_s == pytest.approx(10.0)
    assert shown.tokens_s == pytest.approx(100.0)
    assert shown.gain_over(shown) == 0.0
    assert shown.counted_s == pytest.approx(31 / 3)


def test_the_kind_is_not_judged_before_there_is_a_round_trip() -> None:
    met = Meetings()
    for at in range(9):
        met.judge(at, 0.0, others=20 - at, admitted=20, after=0)
    assert met.kind is None


def test_a_refusal_with_fewer_in_service_than_were_let_in_says_a_rate() -> None:
    met = Meetings()
    met.judge(0.0, 1.0, others=64, admitted=64, after=0)
    met.judge(5.0, 1.0, others=50, admitted=50, after=0)
    assert met.kind is None
    met.judge(5.1, 1.0, others=40, admitted=40, after=0)
    assert met.kind == "rate"


def test_three_steady_meetings_say_in_flight_and_one_against_it_makes_it_unknown() -> None:
    met = Meetings()
    for at in (0.0, 0.1, 5.0, 10.0):  # the second is the first again
        met.judge(at, 1.0, others=64, admitted=64, after=0)
        assert met.kind == ("in-flight" if at == 10.0 else None)
    met.judge(15.0, 1.0, others=30, admitted=30, after=0)
    assert met.kind is None


def test_scattered_meetings_say_a_rate_even_if_none_is_against_in_flight() -> None:
    met = Meetings()
    for at, count in ((0.0, 40), (5.0, 44), (10.0, 50)):
        met.judge(at, 1.0, others=count, admitted=count, after=0)
    assert met.kind == "rate"
    for at, count in ((15.0, 50), (20.0, 50), (25.0, 50)):
        met.judge(at, 1.0, others=count, admitted=count, after=0)
    assert met.kind == "rate"
    for at in (30.0, 35.0):
        met.judge(at, 1.0, others=50, admitted=50, after=0)
    assert met.kind == "in-flight"


@pytest.mark.parametrize("counts", [(2, 2, 2), (50, 52, 55)])
def test_what_cannot_be_told_stays_unknown(counts: tuple[int, ...]) -> None:
    met = Meetings()
    for at, count in enumerate(counts):
        met.judge(5.0 * at, 1.0, others=count, admitted=count, after=0)
    assert met.kind is None
