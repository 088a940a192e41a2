"""Requests and tokens per minute: how much may go out now, and how long the next call has to wait."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from batchrun.records import Quota

__all__ = ["Expectation", "KnownQuota", "Mark", "Pace", "Sample", "even_pace"]

SHARE = 0.98
"""Of a known limit: the rest absorbs clock and rounding differences between the server and us."""
MINUTE_S = 60.0
OWN_BURST_S = 0.05
"""A late timer may catch up by so much of a limit that the user set; no more, since no burst is known to be let in."""
REORDERED_S = 0.1
"""Calls sent within one to two times this may arrive in another order: they wait for a commit and a connection."""


class Pace:
    """A bucket of ``rate`` units a second, filling up to ``burst``; it may go into debt for one large call.

    A call may go when the bucket holds its units, or is full where the call is larger than the bucket: so
    nothing waits for ever.
    """

    __slots__ = ("_at", "_level", "burst", "rate")

    def __init__(self, now: float, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._at = now

    def level(self, now: float) -> float:
        """Returns the units there are now; negative while in debt, above ``burst`` only by what was given back."""
        if now > self._at:
            if self._level < self.burst:
                self._level = min(self.burst, self._level + (now - self._at) * self.rate)
            self._at = now
        return self._level

    def wait_s(self, now: float, units: float) -> float:
        """Returns the seconds until a call of ``units`` may go; 0.0 is now."""
        missing = min(units, self.burst) - self.level(now)
        return missing / self.rate if missing > 1e-9 else 0.0

    def take(self, now: float, units: float) -> None:
        """Charges ``units``; negative gives back what was charged too much."""
        self._level = self.level(now) - units

    def between(self, now: float, low: float, high: float) -> None:
        """Corrects the level to what is known of the truth."""
        self._level = max(low, min(high, self.level(now)))

    def turn(self, now: float, rate: float, burst: float) -> None:
        """Goes on at another rate."""
        self.level(now)
        self.rate, self.burst = rate, burst
        self._level = min(burst, self._level)


def even_pace(now: float, per_minute: int | None) -> Pace | None:
    """Returns the pace of a limit that the user set, spread evenly; None where none is set."""
    if per_minute is None:
        return None
    rate = SHARE * per_minute / MINUTE_S
    return Pace(now, rate, max(1.0, rate * OWN_BURST_S))


class Mark(NamedTuple):
    """Where a call stands in all that was sent: up to and with it, and what the server saw no later than it."""

    sent: float
    surely_seen: float


class KnownQuota:
    """One quota per minute: what the user set (``own``), and what the server's headers tell of its bucket (``told``).

    The user's limit is spread evenly, and may be shared with other scopes. The server's own bucket is used as far as it
    is filled (a full one may be emptied at once) but never overdrawn.
    """

    __slots__ = (
        "_basis", "_before", "_before_last", "_fullest", "_group_at", "_least_scale", "_scale", "_sent", "own", "told",
    )  # fmt: skip

    LEARN_FROM = 0.05
    """Of the limit: so much must have been charged between two replies before they say how the server charges."""

    def __init__(self, now: float, own: Pace | None, *, least_scale: float | None = None) -> None:
        """``least_scale``: the least share of a call's most that a server may charge; None: it counts calls."""
        self._sent = 0.0
        self._group_at = now
        self._before = self._before_last = 0.0
        """All that was sent before this group of sends, and before the last."""
        self._least_scale = least_scale
        self._scale = 1.0
        self._basis: tuple[float, float, float] | None = None
        self._fullest = 0.0
        """The most that the bucket was seen to hold: it may be smaller than the limit of a whole minute."""
        self.told: Pace | None = None
        self.own = own

    def wait_s(self, now: float, units: float, most: float) -> float:
        """Returns the seconds until a call may go out: ``units`` are expected of it, ``most`` it may be charged."""
        wait = self.own.wait_s(now, units) if self.own else 0.0
        return max(wait, self.told.wait_s(now, self._needed(most))) if self.told else wait

    def take(self, now: float, units: float, most: float) -> Mark:
        """Charges a send; returns its mark, for ``learn``."""
        if self.own:
            self.own.take(now, units)
        if self.told:
            self.told.take(now, most * self._scale)
        age_s = now - self._group_at
        if age_s > REORDERED_S:
            self._before_last = self._before if age_s <= 2 * REORDERED_S else self._sent
            self._group_at, self._before = now, self._sent
        self._sent += most
        return Mark(self._sent, self._before_last + most)

    def give_back(self, now: float, units: float, most: float) -> None:
        """Undoes the charge of a call that the server did not take."""
        self.correct(now, -units)
        if self.told:
            self.told.take(now, -most * self._scale)

    def correct(self, now: float, units: float) -> None:
        """Charges the difference to what was expected, once the true use is known."""
        if self.own:
            self.own.take(now, units)

    def exhausted(self, now: float, most: float) -> bool:
        """Says whether the server's bucket, as far as it is known, does not hold such a call."""
        return self.told is not None and self.told.wait_s(now, self._needed(most)) > 0.0

    def _needed(self, most: float) -> float:
        """The server's bucket must hold all that this call may be charged, whatever calls are charged on average."""
        return most * max(1.0, self._scale)

    @property
    def told_per_minute(self) -> float | None:
        """What the server told that it allows; None where it told nothing."""
        return None if self.told is None else self.told.rate / SHARE * MINUTE_S

    def learn(self, now: float, quota: Quota, sent_at: float, mark: Mark) -> None:
        """Takes a reply's headers as the truth of the server's bucket at some moment between ``sent_at`` and now.

        What was sent after the call is not in ``remaining`` yet. Nor, perhaps, is what was sent just before it and may
        have arrived later: that counts for the least that the bucket can hold. The most is with what flowed in since.
        """
        if quota.limit is None or quota.limit <= 0:
            return
        rate, burst = quota.limit / MINUTE_S, float(quota.limit)
        remaining = quota.limit if quota.remaining is None else max(0, min(quota.limit, quota.remaining))
        if quota.reset_s is not None and quota.reset_s > MINUTE_S * 1.05:
            # A bucket per minute is full again within the minute: this one refills more slowly (a day's, an hour's).
            rate = max(quota.limit - remaining, 1) / quota.reset_s
        first = self.told is None
        if self.told is None:
            self.told = Pace(now, SHARE * rate, burst)
        self.told.turn(now, SHARE * rate, burst)
        if quota.remaining is not None:
            if self._least_scale is not None:
                self._learn_scale(sent_at, remaining, rate, quota.limit, mark.sent, self._least_scale)
            low = remaining - (self._sent - mark.surely_seen) * self._scale
            high = remaining - (self._sent - mark.sent) * self._scale + rate * (now - sent_at)
            self.told.between(now, low, low if first else max(low, high))

    def _learn_scale(self, at: float, remaining: float, rate: float, limit: int, mark: float, least: float) -> None:
        """Compares what the server took between two replies with what may have been charged at most.

        So a server that charges max_tokens at admission, one that charges the true use, and one that counts tokens
        in its own way are all used to the full.
        """
        self._fullest = max(self._fullest, remaining)
        if self._basis is None:
            self._basis = (at, remaining, mark)
            return
        then, before, first = self._basis
        if mark - first < self.LEARN_FROM * limit:
            return
        self._basis = (at, remaining, mark)
        charged = (before - remaining + rate * (at - then)) / (mark - first)
        if charged > 0.0 and max(before, remaining) < self._fullest:  # a full bucket does not show what flowed over
            self._scale += 0.5 * (max(least, min(4.0, charged)) - self._scale)


class Sample:
    """A call's place in the order of sending: its share of the allowed output is entered there when it is known."""

    __slots__ = ("share",)

    def __init__(self) -> None:
        self.share: float | None = None


class Expectation:
    """How much of the output that a request allows is really used: the running 90th percentile.

    Sampled in the order of sending, because the first replies back are the short ones; the maximum is assumed until
    fifty are known.
    """

    __slots__ = ("_counted", "_known", "_open", "_ranked_at", "share")

    KEPT = 500
    ENOUGH = 50
    PERCENTILE = 0.9
    OPEN_AT_MOST = 2_000
    """A straggler holds back those behind it, but no more than so many."""

    def __init__(self) -> None:
        self._open: deque[Sample] = deque()
        self._known: deque[float] = deque(maxlen=self.KEPT)
        self._counted = 0
        self._ranked_at = 0
        self.share = 1.0

    def sent(self) -> Sample:
        """Returns the place of a call that goes out now."""
        sample = Sample()
        self._open.append(sample)
        return sample

    def ended(self, sample: Sample, share: float | None) -> None:
        """Enters what the call used of what it allowed; None where that will never be known."""
        sample.share = -1.0 if share is None else share
        while self._open and (self._open[0].share is not None or len(self._open) > self.OPEN_AT_MOST):
            known = self._open.popleft().share
            if known is not None and known >= 0.0:
                self._known.append(known)
                self._counted += 1
        if self._counted >= self.ENOUGH and self._counted - self._ranked_at >= self.ENOUGH:
            self._ranked_at = self._counted
            ranked = sorted(self._known)
            self.share = ranked[int(self.PERCENTILE * (len(ranked) - 1))]
