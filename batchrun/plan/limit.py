"""How much a server really allows: the window of calls in flight and the pace, found by trying, with reasons.

The law, in the order in which it acts. *Start*: double while that pays. *Cut*: a refusal says what kind of limit was
met, and where it is. *Climb*: from a cut upward, in steps that begin at 1% and grow while nothing is refused. *Rest*:
where nothing is ever refused, try a little more and a little less now and then, and keep what raises the throughput.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Literal

import msgspec

from batchrun.plan.measure import Meetings, Round, Throughput
from batchrun.plan.pace import Pace

__all__ = ["Limit", "LimitChange"]

START = 16
PAYS = 0.15
"""Doubling goes on while calls/s or tokens/s rise by this share."""
USED = 0.8
"""A cap must have been used to this share before it grows."""
HEADROOM = 1.4
"""Where the pace rules, the window is so many times what the pace fills."""
BELOW = 0.95
"""After a cut the pace is this share of what was let in, so that the next refusal is a while off."""
YIELD = 0.95
"""A further cut leaves at most this share of the pace, and no less than half."""
RECENT = 40
"""Sends by which the pace of what is let in is measured; at least ten."""
FIRST_STEP, LAST_STEP = 0.01, 0.25
FIRST_STEP_UNKNOWN = 0.08
"""While the kind of limit is not known, it is sought faster."""
RETURNING_STEP = 6
"""A climb that begins below the old window, because a return was cut, begins with steps of 8%."""
CHECK_EVERY = 0.2
"""A climb by this share has to show for itself: 30% of it as throughput."""
WORTH = 0.3
UP, DOWN = 1.25, 0.8
RAISED = 0.05
"""More or less concurrency is kept where it raises throughput by this share."""
REST_S, REST_GROWTH, LONGEST_REST_S = 20.0, 1.5, 600.0
LONGEST_COOL_DOWN_S = 1.0
WORTH_TELLING = 0.1
"""Of the window: smaller steps of a climb are not told."""


class LimitChange(msgspec.Struct, frozen=True):
    """The window went from ``old`` to ``new`` at ``at``, and why."""

    at: float
    old: int
    new: int
    why: str

    def __str__(self) -> str:
        return f"{self.old} → {self.new} {self.why}"


class _Cut(msgspec.Struct):
    """A cohort of refusals that is coming in. ``admitted`` were out beside it and have not been refused."""

    at: float
    refused_sent_at: float
    order: int
    others: int
    admitted: int
    after: int
    """Of the admitted, those that were sent after the first refused call."""


class Limit:
    """The window and the pace of one scope. ``changes`` are those that nobody has read and cleared yet.

    Only refusals and measured throughput move it: timeouts and errors say nothing about a limit, and latency alone is
    no signal, because batching slows each call while the whole gains.
    """

    def __init__(self, now: float, ceiling: int, fixed: int | None = None) -> None:
        self.in_flight = 0
        self.sends = 0
        self.rtt_s = 0.0
        """Smoothed time from send to answer; 0.0 before the first."""
        self.changes: list[LimitChange] = []
        self._ceiling = ceiling
        self._fixed = fixed is not None
        self._window = float(fixed if fixed is not None else min(START, ceiling))
        self._told = self.window
        self._pace: Pace | None = None
        self._phase: Literal["start", "climb", "rest", "return"] = "start"
        self._round = Round(now, 0.0, self._window)
        self._meetings = Meetings()
        self._cut: _Cut | None = None
        self._cut_at = -inf
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._step = 0
        self._base: tuple[float, Throughput] | None = None
        """The window from which this climb or trial began, and what it gave."""
        self._rested: Throughput | None = None
        """What the window gave while nothing was tried."""
        self._trial: float | None = None
        self._next_trial = UP
        self._rest_s = REST_S
        self._rest_until = 0.0
        self._return_to = 0.0

    # ------------------------------------------------------------ what it allows

    @property
    def window(self) -> int:
        """Calls that may be in flight."""
        return int(self._window + 1e-9)

    @property
    def rate(self) -> float | None:
        """Calls a second that may be sent, where that was found to be limited."""
        return self._pace.rate if self._pace else None

    @property
    def kind(self) -> Literal["in-flight", "rate"] | None:
        """What the server limits; None while that is not known."""
        return self._meetings.kind

    def opens_at(self, now: float) -> float:
        """Returns when the next call may go out: now, later, or ``inf`` for after some call has ended."""
        if self._cut is not None:
            self._finish_cut(now, self._cut)
        if self.in_flight >= self.window:
            return inf
        return now + self._pace.wait_s(now, 1.0) if self._pace else now

    # ------------------------------------------------------------ what it sees

    def sent(self, now: float) -> None:
        """A call went out."""
        self._count(now, 1)
        self.sends += 1
        self._recent.append(now)
        if self._pace:
            self._pace.take(now, 1.0)

    def ended(self, now: float) -> None:
        """A call ended in a way that says nothing about a limit."""
        self._count(now, -1)

    def answered(self, now: float, sent_at: float, tokens: int) -> None:
        """A call was answered; at the end of a round this may move the caps."""
        self._count(now, -1)
        service_s = now - sent_at
        weight = 2.0 / (self._window + 9.0) if self.rtt_s else 1.0
        self.rtt_s += weight * (service_s - self.rtt_s)
        if self._round.answered(now, service_s, tokens) and not self._fixed:
            self._end_round(now)

    def refused(self, now: float, sent_at: float, others: int, order: int) -> float:
        """A call was refused that was sent as number ``order``, beside ``others``.

        Returns the seconds for which nothing more should be sent. One cut for a cohort: what was sent before a cut
        says nothing about the window after it, only that it was not in service either.
        """
        self._count(now, -1)
        if self._fixed:
            return self._cool_down_s(now - sent_at)
        if sent_at > self._cut_at:
            self._cut_at = now
            self._cut = _Cut(now, sent_at, order, others, self.in_flight, self.sends - order)
            return self._cool_down_s(now - sent_at)
        if self._cut is not None:
            self._cut.admitted -= 1
            self._cut.after -= order > self._cut.order
        return 0.0

    def restart(self, now: float) -> None:
        """The server is back after an outage: begin with a quarter of the window, double back to all of it."""
        if not self._fixed:
            self._recent.clear()
            self._return_to = max(self._window, self._return_to)
            self._phase = "return"
            self._move(now, self._window / 4, "back after an outage")

    # ------------------------------------------------------------ cut

    def _cool_down_s(self, refusal_s: float) -> float:
        """Long enough for the rest of the cohort to come back, and for a bucket to fill a little."""
        fill_s = 0.0 if self.kind == "in-flight" else 0.2 * self.rtt_s
        return min(LONGEST_COOL_DOWN_S, max(refusal_s, fill_s))

    def _finish_cut(self, now: float, cut: _Cut) -> None:
        """The cohort is in: what was in service tells the kind of limit, and the caps follow from it."""
        self._cut = None
        self._step = RETURNING_STEP if self._phase == "return" else 0
        self._phase, self._base, self._trial, self._return_to = "climb", None, None, 0.0
        self._meetings.judge(cut.at, self.rtt_s, others=cut.others, admitted=cut.admitted, after=cut.after)
        let_in_s = self._let_in_s(cut)
        held = max(cut.admitted, self._window / 2)
        if self.kind == "in-flight":
            self._pace = None
            self._move(now, held, "rate_limited: server limits in-flight")
            return
        if self._pace:
            self._turn(now, min(YIELD * self._pace.rate, max(self._pace.rate / 2, let_in_s or inf)))
        elif let_in_s or self.kind == "rate":
            self._turn(now, let_in_s or self._window / self.rtt_s)
        if self.kind == "rate":
            self._follow_pace(now, "rate_limited: server limits the rate")
        else:
            filled = self._pace.rate * self.rtt_s + 1.5 if self._pace else 0.0
            self._move(now, max(held, filled), "rate_limited")

    def _let_in_s(self, cut: _Cut) -> float:
        """Returns a little less than the calls a second that were let in before the cut; 0.0 if too few say."""
        times = [at for at in self._recent if at < cut.refused_sent_at]
        self._recent.clear()
        if len(times) < RECENT / 4 or times[-1] - times[0] < self.rtt_s or self.rtt_s == 0.0:
            return 0.0
        counted = BELOW * (len(times) - 1) / (times[-1] - times[0])
        return max(counted, cut.admitted / self.rtt_s / 2)  # what is in service came in within a round trip

    def _turn(self, now: float, rate: float) -> None:
        """Sets the pace; a late timer may catch up by a twentieth of a second."""
        burst = 1.0 + 0.05 * rate
        if self._pace is None:
            self._pace = Pace(now, rate, burst)
        self._pace.turn(now, rate, burst)

    def _follow_pace(self, now: float, why: str, *, small: bool = False) -> None:
        """Where a rate is limited, the window only gives it room."""
        self._move(now, HEADROOM * (self.rate or 0.0) * self.rtt_s + 2.0, why, small=small)

    # ------------------------------------------------------------ rounds

    def _count(self, now: float, change: int) -> None:
        self._round.passed(now, self.in_flight)
        self.in_flight += change

    def _end_round(self, now: float) -> None:
        shown = self._round.result(now)
        used = shown.in_flight >= USED * self.window
        paced = self._pace is not None and shown.counted_s >= USED * self._pace.rate
        self._round = Round(now, self.rtt_s, self._window)
        if self._phase == "return":
            self._return(now)
        elif self._phase == "climb" and self.kind == "rate":
            self._climb_pace(now, paced=paced)
        elif self._phase == "climb" and (used or paced):
            self._climb(now, shown)
        elif self._phase == "start" and used:
            self._double(now, shown)
        elif self._phase == "rest" and used:
            self._try(now, shown)

    def _double(self, now: float, shown: Throughput) -> None:
        """Start: doubles while that pays; the knee is half of where it no longer did."""
        if self._base is not None and shown.best_gain_over(self._base[1]) < PAYS:
            self._rest(now, self._base[0])
        elif self._window >= self._ceiling:
            self._rest(now, self._window)
        else:
            self._base = (self._window, shown)
            self._move(now, 2 * self._window, "slow start")

    def _climb(self, now: float, shown: Throughput) -> None:
        """After a cut: 1%, doubled every second clean round up to 25%, on the caps that there are."""
        window, before = self._base or (self._window, shown)
        grown = self._window / window - 1.0
        if grown >= CHECK_EVERY and min(shown.answers, before.answers) >= RECENT:
            if shown.best_gain_over(before) < WORTH * grown:
                self._rest(now, window)
                return
            window, before = self._window, shown
        self._base = (window, before)
        step = self._next_step()
        if self._pace:
            self._turn(now, self._pace.rate * step)
        self._move(now, self._window * step, "climbing", small=True)

    def _climb_pace(self, now: float, *, paced: bool) -> None:
        """Where the pace rules it needs no check: what is let in is throughput."""
        if self._pace and paced:
            self._turn(now, self._pace.rate * self._next_step())
        self._follow_pace(now, "climbing", small=True)

    def _next_step(self) -> float:
        doublings = self._step if self.kind is None else self._step // 2
        first = FIRST_STEP_UNKNOWN if self.kind is None else FIRST_STEP
        self._step += 1
        return 1.0 + min(LAST_STEP, first * 2.0**doublings)

    def _return(self, now: float) -> None:
        """After an outage: back to the old window in doublings."""
        if self._window >= self._return_to:
            self._phase, self._return_to, self._step, self._base = "climb", 0.0, 0, None
        else:
            self._move(now, min(self._return_to, 2 * self._window), "back after an outage")

    def _rest(self, now: float, window: float) -> None:
        self._phase, self._base, self._trial, self._rested = "rest", None, None, None
        self._rest_until = now + self._rest_s
        self._move(now, window, "no gain from more")

    def _try(self, now: float, shown: Throughput) -> None:
        """Rest: tries a quarter more and a fifth less in turn, and keeps what raises the throughput."""
        if self._trial is not None and self._base is not None:
            if shown.gain_over(self._base[1]) < RAISED:
                self._move(now, self._base[0], "no gain from " + ("more" if self._trial == UP else "less"))
                self._rest_longer(now, DOWN if self._trial == UP else UP)
                return
            self._rest_s = REST_S
        else:
            shown = self._rested = shown.blended(self._rested)
            if now < self._rest_until:
                return
        self._trial = self._trial or self._next_trial
        tried = min(float(self._ceiling), max(1.0, self._window * self._trial))
        if tried == self._window:
            self._rest_longer(now, DOWN if self._trial == UP else UP)
            return
        self._base, self._rested = (self._window, shown), None
        self._move(now, tried, "trying " + ("more" if self._trial == UP else "less"))

    def _rest_longer(self, now: float, next_trial: float) -> None:
        self._trial, self._next_trial = None, next_trial
        self._rest_until = now + self._rest_s
        self._rest_s = min(LONGEST_REST_S, REST_GROWTH * self._rest_s)

    def _move(self, now: float, window: float, why: str, *, small: bool = False) -> None:
        """Sets the window, measures anew, and tells of it; of a small step only once they add up."""
        self._window = min(float(self._ceiling), max(1.0, window))
        self._round = Round(now, self.rtt_s, self._window)
        if self.window != self._told and not (small and abs(self.window - self._told) < WORTH_TELLING * self._told):
            self.changes.append(LimitChange(now, self._told, self.window, why))
            self._told = self.window
