"""What a fault means for its rows, when to ask again, and when to leave a dead server alone."""

from __future__ import annotations

import random
from typing import Literal, TypeAlias

from batchrun.records import Fault

__all__ = ["Breaker", "RetryBudget", "Verdict", "back_off", "judge"]

Verdict: TypeAlias = Literal["again", "split", "fail", "stop"]

LONGEST_BACK_OFF_S = 60.0
GROWTH = 1.25
"""A wait is at least this many times the one before it, so that full jitter never shrinks it."""
HINT_MARGIN = 0.1
"""A hinted wait is stretched by up to this share: never early, and a refused cohort does not come back as one."""


def judge(fault: Fault, rows: int, attempts: int, max_attempts: int) -> Verdict:
    """Decides over a call that ended in ``fault``.

    ``attempts`` counts the sends that may have been processed, this one included where it may have been. A fault
    that says that a row can never succeed splits a call of several rows, so that only the bad row fails.
    """
    if fault.kind == "fatal":
        return "stop"
    if fault.kind in ("rejected", "too_large"):
        return "split" if rows > 1 else "fail"
    if fault.maybe_processed and attempts >= max_attempts:
        # One row may be what the server stumbles over: the others must not fail with it.
        return "split" if rows > 1 else "fail"
    return "again"


def back_off(rng: random.Random, failures: int, hint_s: float | None, waited_s: float) -> float:
    """Returns the seconds to wait: ``uniform(0, min(60, 2^failures))``, or a server's hint plus up to 10%.

    ``failures`` counts this call's failed sends in a row, from 1; ``waited_s`` is how long it really waited before
    the send that failed now. Without a hint the wait grows every time, until it reaches a minute.
    """
    if hint_s is not None:
        return hint_s * (1.0 + HINT_MARGIN * rng.random())
    jittered = rng.uniform(0.0, min(LONGEST_BACK_OFF_S, 2.0 ** min(failures, 10)))
    return min(LONGEST_BACK_OFF_S, max(jittered, GROWTH * waited_s))


class RetryBudget:
    """How many possibly billed retries may be asked for: a tenth of the successes, and ten a minute in any case.

    When it is empty a row waits; it is never dropped.
    """

    __slots__ = ("_at", "_level")

    PER_SUCCESS = 0.1
    FLOOR = 10.0
    CEILING = 1_000.0
    SHORTEST_WAIT_S = 0.1
    REFILL_S = 6.0
    """Below the floor one more is granted every so many seconds, so that nothing waits for ever."""

    def __init__(self, now: float) -> None:
        self._level = self.FLOOR
        self._at = now

    def succeeded(self) -> None:
        """Earns a share of a retry."""
        self._level = min(self.CEILING, self._level + self.PER_SUCCESS)

    def take(self, now: float) -> float:
        """Takes one retry and returns 0.0, or takes nothing and returns the seconds until one may be there."""
        if self._level < self.FLOOR:
            self._level = min(self.FLOOR, self._level + (now - self._at) / self.REFILL_S)
        self._at = now
        if self._level >= 1.0:
            self._level -= 1.0
            return 0.0
        return max(self.SHORTEST_WAIT_S, (1.0 - self._level) * self.REFILL_S)


class Breaker:
    """Opens when a server is gone; then one probe at a time goes out, and only a probe's success closes it.

    Fed with faults that say something about the server (connect errors, timeouts, 5xx), never with refusals.
    """

    __slots__ = ("_failing_since", "_fails", "_probes", "_recent", "_rng", "_run", "opened_at", "probe_at", "probing")

    CONSECUTIVE = 10
    WINDOW = 20
    FAILURES_IN_WINDOW = 16
    PROBE_AFTER_S = (1.0, 2.0, 4.0, 8.0, 15.0)
    JITTER = 0.1

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._run = 0
        self._failing_since = 0.0
        self._recent = 0
        self._fails = 0
        self._probes = 0
        self.opened_at: float | None = None
        self.probe_at = 0.0
        self.probing = False
        """The one probe is out."""

    def succeeded(self, sent_at: float) -> None:
        """Takes a success into account while closed.

        Answers to what was sent before the failures began still come in when the server is gone: they say nothing.
        """
        if self._fails and sent_at >= self._failing_since:
            self._run = 0
            self._push(0)

    def failed(self, now: float, sent_at: float) -> bool:
        """Takes a failure into account while closed; returns whether it opens the breaker."""
        if self._run == 0:
            self._failing_since = sent_at
        self._run += 1
        self._push(1)
        if self._run < self.CONSECUTIVE and self._fails < self.FAILURES_IN_WINDOW:
            return False
        self.opened_at = now
        self._probes = 0
        self._plan_probe(now)
        return True

    def probed(self, now: float, *, succeeded: bool) -> None:
        """Takes the probe's end: closes, or plans the next probe later than the last."""
        self.probing = False
        if not succeeded:
            self._plan_probe(now)
            return
        self.opened_at = None
        self._run = self._recent = self._fails = 0

    def _plan_probe(self, now: float) -> None:
        wait = self.PROBE_AFTER_S[min(self._probes, len(self.PROBE_AFTER_S) - 1)]
        self._probes += 1
        self.probe_at = now + wait * (1.0 + self.JITTER * self._rng.uniform(-1.0, 1.0))

    def _push(self, failed: int) -> None:
        """Shifts one outcome into the window of the last twenty, kept as bits."""
        self._recent = ((self._recent << 1) | failed) & ((1 << self.WINDOW) - 1)
        self._fails = self._recent.bit_count()
