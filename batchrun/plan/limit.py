"""How much a server really allows: the window of calls in flight and the pace, found by trying, with reasons.

The law, in the order in which it acts. *Start*: double while that pays. *Cut*: a refusal says what kind of limit was
met, and where it is. *Climb*: from a cut upward in steps that begin at 1% and grow while nothing is refused. *Rest*:
where nothing is ever refused, try a little more and a little less now and then, and keep what raises the throughput.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Literal

from batchrun.plan.pace import Pace

__all__ = ["Limit", "LimitChange"]

START = 16
ROUND_TRIPS = 1.5
"""A round is measured for so many round trips, after one in which the last change works itself out."""
ROUND_S = 1.0
"""It is no shorter than this, so that a fast server is not tried many times a second."""
PAYS = 0.15
"""Doubling goes on while calls/s or tokens/s rise by this share."""
USED = 0.8
"""Only a cap that was used to this share says anything by its being held."""
STEADY, SCATTERED = 0.08, 0.12
"""Spread of the calls in service at the last three cuts: up to the one, the server limits those; beyond the other, a
rate."""
HEADROOM = 1.4
"""Where the pace rules, the window is this many times what it fills."""
BELOW = 0.95
"""After a cut the pace is this share of what was let in, so that the next refusal is a while off."""
YIELD = 0.95
"""A further cut of the pace leaves at most this share of it."""
FIRST_STEP, LAST_STEP = 0.01, 0.25
CHECK_EVERY = 0.2
"""A climb by this share has to show for itself: 30% of it as throughput."""
WORTH = 0.3
UP, DOWN = 1.25, 0.8
RAISED = 0.05
"""Less concurrency is kept where it raises throughput by this share."""
REST_S, REST_GROWTH, LONGEST_REST_S = 20.0, 1.5, 600.0
LONGEST_COOL_DOWN_S = 1.0


@dataclass(frozen=True, slots=True)
class LimitChange:
    """The window went from ``old`` to ``new``, and why."""

    old: int
    new: int
    why: str

    def __str__(self) -> str:
        return f"{self.old} → {self.new} {self.why}"


@dataclass(frozen=True, slots=True)
class _Flow:
    """What a round showed: throughput by Little's law, which is steadier than a count of ends."""

    calls_s: float
    tokens_s: float
    answers: int


class Limit:
    """The window and the pace of one scope. ``change`` is the last change, until its reader takes it away.

    Only refusals and measured throughput move it: timeouts and errors say nothing about a limit, and latency alone is
    no signal, because batching slows each call while the whole gains.
    """

    def __init__(self, now: float, ceiling: int, fixed: int | None = None) -> None:
        self.in_flight = 0
        self.rtt_s = 0.0
        self.kind: Literal["in-flight", "rate", None] = None
        self.change: LimitChange | None = None
        self._ceiling = ceiling
        self._fixed = fixed is not None
        self._window = float(fixed if fixed is not None else min(START, ceiling))
        self._pace: Pace | None = None
        self._phase: Literal["start", "climb", "rest", "return"] = "start"
        self._back_to = 0.0
        # the cut that is being made, and what the cuts before it met
        self._cut_at = -inf
        self._cutting = False
        self._admitted = 0
        self._refused_sent_at = 0.0
        self._recent: deque[float] = deque(maxlen=40)
        self._judged_at = -inf
        self._last_admitted = 0
        self._others = 0
        self._refused_order = self._after = 0
        self.sends = 0
        self._met: deque[tuple[int, bool]] = deque(maxlen=5)
        # climbing and resting
        self._step = 0
        self._anchor: tuple[float, _Flow] | None = None
        self._trial: float | None = None
        self._next_trial = UP
        self._rest_s = REST_S
        self._rest_until = 0.0
        self._area_at = now
        self._begin_round(now)

    # ------------------------------------------------------------ what it allows

    @property
    def window(self) -> int:
        """Calls that may be in flight."""
        return max(1, int(self._window + 1e-9))

    @property
    def rate(self) -> float | None:
        """Calls a second that may be sent, where the server limits a rate."""
        return self._pace.rate if self._pace else None

    def opens_at(self, now: float) -> float:
        """Returns when the next call may go out: now, later, or ``inf`` for after some call has ended."""
        if self._cutting:
            self._finish_cut(now)
        if self.in_flight >= self.window:
            return inf
        return now + self._pace.wait_s(now, 1.0) if self._pace else now

    # ------------------------------------------------------------ what it sees

    def sent(self, now: float) -> None:
        """A call went out."""
        self._count(now, 1)
        self._recent.append(now)
        self.sends += 1
        if self._pace:
            self._pace.take(now, 1.0)

    def ended(self, now: float) -> None:
        """A call ended in a way that says nothing about a limit."""
        self._count(now, -1)

    def answered(self, now: float, sent_at: float, tokens: int) -> None:
        """A call was answered; at the end of a round this may move the caps."""
        self._count(now, -1)
        service_s = now - sent_at
        gain = 2.0 / (self.window + 9.0)
        self.rtt_s = service_s if self.rtt_s == 0.0 else self.rtt_s + gain * (service_s - self.rtt_s)
        if self._fixed or now < self._measure_from:
            return
        self._answers += 1
        self._tokens += tokens
        self._service_s += service_s
        if now >= self._round_ends and self._answers >= max(8, min(40, self.window / 2)):
            self._end_round(now)

    def refused(self, now: float, sent_at: float, others: int, order: int) -> float:
        """A call was refused; returns the seconds for which nothing more should be sent.

        One cut for a cohort: calls sent before the cut say nothing about the window after it. They only show that
        they were not in service either.
        """
        self._count(now, -1)
        if self._fixed:
            return self._cool_down_s(now - sent_at)
        if sent_at <= self._cut_at:
            if self._cutting:
                self._admitted -= 1
                if order > self._refused_order:
                    self._after -= 1
            return 0.0
        self._cutting = True
        self._cut_at = now
        self._admitted = self.in_flight
        self._others = others
        self._refused_order = order
        self._after = self.sends - order
        self._refused_sent_at = sent_at
        return self._cool_down_s(now - sent_at)

    def restart(self, now: float) -> None:
        """The server is back after an outage: begin with a quarter of the window, double back to all of it."""
        if not self._fixed:
            self._back_to = max(self._window, self._back_to)
            self._phase = "return"
            self._move(now, self._window / 4, "back after an outage")

    # ------------------------------------------------------------ cut

    def _cool_down_s(self, refusal_s: float) -> float:
        """Long enough for the rest of the cohort to come back, and for a bucket to fill a little."""
        if self.kind == "in-flight":
            return min(LONGEST_COOL_DOWN_S, refusal_s)
        return min(LONGEST_COOL_DOWN_S, max(refusal_s, 0.2 * self.rtt_s))

    def _finish_cut(self, now: float) -> None:
        """The cohort is in: what was in service tells the kind of limit, and the caps follow from it."""
        self._cutting = False
        self._judge(self._admitted)
        rate = self._rate_met()
        self._phase, self._step, self._anchor, self._trial = "climb", 0, None, None
        if self.kind == "in-flight":
            self._pace = None
            self._move(now, max(self._admitted, self._window / 2), "rate_limited: server limits in-flight")
            return
        if self._pace:
            old = self._pace.rate
            self._set_pace(now, min(YIELD * old, max(old / 2, rate)) if rate else YIELD * old)
        elif rate:
            self._set_pace(now, rate)
        elif self.kind == "rate":
            self._set_pace(now, self._window / self.rtt_s)
        if self.kind == "rate":
            self._follow_pace(now, "rate_limited: server limits the rate")
        else:
            fill = self._pace.rate * self.rtt_s + 1.5 if self._pace else 0.0
            self._move(now, max(self._admitted, self._window / 2, fill), "rate_limited")

    def _judge(self, admitted: int) -> None:
        """Tells the kind of limit from what was in service when it was met, over the last three cuts."""
        independent = self.rtt_s > 0 and self._cut_at - self._judged_at >= self.rtt_s
        consistent = self._others >= self._last_admitted
        self._last_admitted = max(1, admitted - self._after)
        if consistent and not independent:
            return
        self._judged_at = self._cut_at
        self._met.append((max(1, admitted), consistent))
        counts = [count for count, _ in self._met]
        spread = (max(counts) - min(counts)) / (sum(counts) / len(counts))
        contradictions = [c for _, c in self._met][-3:].count(False)
        if contradictions >= 2:
            self.kind = "rate"
        elif self.kind == "in-flight" and not consistent:
            self.kind = None
        elif contradictions == 0 and len(self._met) >= 3:
            if spread > SCATTERED:
                self.kind = "rate"
            elif spread <= STEADY and min(counts) >= 4 and (self.kind is None or len(self._met) == 5):
                self.kind = "in-flight"

    def _rate_met(self) -> float:
        """Returns the calls a second that were let in before the refusal, 0.0 if too few say."""
        while self._recent and self._recent[-1] >= self._refused_sent_at:
            self._recent.pop()
        n = len(self._recent)
        span = self._recent[-1] - self._recent[0] if n else 0.0
        self._recent.clear()
        return BELOW * (n - 1) / span if n >= 10 and span >= self.rtt_s > 0 else 0.0

    def _set_pace(self, now: float, rate: float) -> None:
        rate = max(rate, 1.0 / 60.0)
        if self._pace is None:
            self._pace = Pace(now, rate, 1.0)
        self._pace.level(now)
        self._pace.rate = rate
        self._pace.burst = 1.0 + 0.05 * rate

    def _follow_pace(self, now: float, why: str) -> None:
        assert self._pace is not None
        self._move(now, HEADROOM * self._pace.rate * self.rtt_s + 2.0, why)

    # ------------------------------------------------------------ rounds

    def _begin_round(self, now: float) -> None:
        self._measure_from = now + self.rtt_s
        self._round_ends = self._measure_from + max(ROUND_S, ROUND_TRIPS * self.rtt_s)
        self._answers = 0
        self._tokens = 0
        self._service_s = 0.0
        self._area = 0.0

    def _count(self, now: float, change: int) -> None:
        if now > self._measure_from:
            self._area += self.in_flight * (now - max(self._area_at, self._measure_from))
        self._area_at = now
        self.in_flight += change

    def _end_round(self, now: float) -> None:
        span_s = now - self._measure_from
        mean = self._area / span_s
        per_s = mean / self._service_s
        flow = _Flow(per_s * self._answers, per_s * self._tokens, self._answers)
        used = mean >= USED * self.window
        paced = self._pace is not None and self._answers / span_s >= USED * self._pace.rate
        self._begin_round(now)
        if self._phase == "start":
            if used:
                self._double(now, flow)
        elif self._phase == "return":
            self._return(now)
        elif self._phase == "climb":
            self._climb(now, flow, used=used, paced=paced)
        elif used:
            self._try(now, flow)

    def _double(self, now: float, flow: _Flow) -> None:
        """Start: doubles while that pays; the knee is half of where it no longer did."""
        if self._anchor is not None:
            knee, before = self._anchor
            if max(flow.calls_s / before.calls_s, flow.tokens_s / max(before.tokens_s, 1e-9)) < 1.0 + PAYS:
                self._phase = "rest"
                self._rest_until = now + REST_S
                self._move(now, knee, "no gain from more")
                return
        if self._window >= self._ceiling:
            self._phase = "rest"
            self._rest_until = now + REST_S
            return
        self._anchor = (self._window, flow)
        self._move(now, 2 * self._window, "slow start")

    def _return(self, now: float) -> None:
        if self._window >= self._back_to:
            self._phase, self._back_to, self._step, self._anchor = "climb", 0.0, 0, None
        else:
            self._move(now, min(self._back_to, 2 * self._window), "back after an outage")

    def _climb(self, now: float, flow: _Flow, *, used: bool, paced: bool) -> None:
        """After a cut: 1%, doubled every second clean round up to 25%, on the cap that binds."""
        ruled = self.kind == "rate" and self._pace is not None
        if not (paced if ruled else used or paced):
            if ruled:
                self._follow_pace(now, "round trips changed")
            return
        if self._anchor is None:
            self._anchor = (self._window, flow)
        window, before = self._anchor
        grown = self._window / window - 1.0
        if not ruled and grown >= CHECK_EVERY and flow.answers >= 40 and before.answers >= 40:
            if max(flow.calls_s / before.calls_s, flow.tokens_s / before.tokens_s) < (1.0 + WORTH * grown):
                self._phase = "rest"
                self._rest_until = now + REST_S
                self._move(now, window, "no gain from more")
                return
            self._anchor = (self._window, flow)
        step = 1.0 + min(LAST_STEP, FIRST_STEP * 2.0 ** (self._step // 2))
        self._step += 1
        if self.kind is None:
            step = 1.0 + min(LAST_STEP, 4 * FIRST_STEP * 2.0**self._step)
        if self._pace is not None:
            self._set_pace(now, self._pace.rate * step)
        if ruled:
            self._follow_pace(now, "climbing")
        else:
            self._move(now, self._window * step, "climbing")

    def _try(self, now: float, flow: _Flow) -> None:
        """Rest: tries a quarter more and a fifth less in turn, and keeps what raises the throughput."""
        if self._trial is not None:
            assert self._anchor is not None
            window, before = self._anchor
            gain = flow.tokens_s / max(before.tokens_s, 1e-9) - 1.0
            if gain < (WORTH * (UP - 1.0) if self._trial == UP else RAISED):
                self._move(now, window, "no gain from " + ("more" if self._trial == UP else "less"))
                self._next_trial = DOWN if self._trial == UP else UP
                self._trial = None
                self._rest_until = now + self._rest_s
                self._rest_s = min(LONGEST_REST_S, REST_GROWTH * self._rest_s)
                return
            self._rest_s = REST_S
        elif now < self._rest_until:
            return
        else:
            self._trial = self._next_trial
        target = min(self._ceiling, max(1.0, self._window * self._trial))
        if target == self._window:
            self._next_trial = DOWN if self._trial == UP else UP
            self._trial = None
            self._rest_until = now + self._rest_s
            return
        self._anchor = (self._window, flow)
        self._move(now, target, "trying " + ("more" if self._trial == UP else "less"))

    def _move(self, now: float, window: float, why: str) -> None:
        old = self.window
        self._window = min(float(self._ceiling), max(1.0, window))
        self._begin_round(now)
        if self.window != old:
            self.change = LimitChange(old, self.window, why)
