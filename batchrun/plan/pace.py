"""Requests and tokens per minute: how much may go out now, and how long the next call has to wait."""

from __future__ import annotations

from collections import deque

from batchrun.records import Quota

__all__ = ["KnownQuota", "OutputEstimate", "Pace"]

SHARE = 0.98
"""Of a known limit: the rest absorbs clock and rounding differences between the server and us."""
MINUTE_S = 60.0


class Pace:
    """A bucket of ``rate`` units a second holding at most ``burst``; it may go into debt for one large call.

    A call may go when the bucket holds its units, or is full where the call is larger than the bucket, so nothing
    waits for ever.
    """

    __slots__ = ("_at", "_level", "burst", "rate")

    def __init__(self, now: float, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._at = now

    def level(self, now: float) -> float:
        """Returns the units there are now; negative while in debt."""
        if now > self._at:
            self._level = min(self.burst, self._level + (now - self._at) * self.rate)
            self._at = now
        return self._level

    def wait_s(self, now: float, units: float) -> float:
        """Returns the seconds until a call of ``units`` may go; 0.0 is now."""
        missing = min(units, self.burst) - self.level(now)
        return missing / self.rate if missing > 1e-9 else 0.0

    def take(self, now: float, units: float) -> None:
        """Charges ``units``; negative gives back what was charged too much."""
        self._level = min(self.burst, self.level(now) - units)

    def clamp(self, now: float, low: float, high: float) -> None:
        """Corrects the level by what is known of the truth."""
        self._level = min(self.burst, max(low, min(high, self.level(now))))


class KnownQuota:
    """One quota per minute: what the user set, and what the server's headers say of its own bucket.

    The user's limit is spread evenly: no burst beyond a quarter of a second. The server's own bucket is used as far
    as it is filled (a full one may be emptied at once) but never overdrawn.
    """

    __slots__ = ("_sent", "own", "told")

    OWN_BURST_S = 0.25

    def __init__(self, now: float, per_minute: int | None, smallest_burst: float) -> None:
        self._sent = 0.0
        self.told: Pace | None = None
        self.own: Pace | None = None
        if per_minute is not None:
            rate = SHARE * per_minute / MINUTE_S
            self.own = Pace(now, rate, max(smallest_burst, rate * self.OWN_BURST_S))

    def wait_s(self, now: float, units: float) -> float:
        """Returns the seconds until ``units`` may go out."""
        wait = self.own.wait_s(now, units) if self.own else 0.0
        return max(wait, self.told.wait_s(now, units)) if self.told else wait

    def take(self, now: float, units: float) -> float:
        """Charges a send; returns its mark: all that was charged up to and with it, for ``learn``."""
        if self.own:
            self.own.take(now, units)
        if self.told:
            self.told.take(now, units)
        self._sent += units
        return self._sent

    def correct(self, now: float, units: float) -> None:
        """Charges (or, negative, gives back) the difference once a call's true use is known."""
        if self.own:
            self.own.take(now, units)
        if self.told:
            self.told.take(now, units)

    def learn(self, now: float, quota: Quota, sent_at: float, mark: float) -> None:
        """Takes a reply's headers as the truth of the server's bucket at some moment between ``sent_at`` and now.

        What was charged after ``mark`` may not be in ``remaining`` yet, so it is taken off; what has flowed in since
        is at least nothing and at most the rate times the call's age.
        """
        if not quota.limit or quota.limit <= 0:
            return
        rate = quota.limit / MINUTE_S
        remaining = quota.limit if quota.remaining is None else max(0, quota.remaining)
        if quota.reset_s is not None and quota.reset_s > MINUTE_S * 1.05:
            # A bucket per minute is full again within the minute: this one refills more slowly (a day's, an hour's).
            rate = max(quota.limit - remaining, 1) / quota.reset_s
        if self.told is None:
            self.told = Pace(now, SHARE * rate, float(quota.limit))
        self.told.rate = SHARE * rate
        self.told.burst = float(quota.limit)
        if quota.remaining is not None:
            low = remaining - (self._sent - mark)
            self.told.clamp(now, low, low + rate * (now - sent_at))


class OutputEstimate:
    """How much of the output that a request allows is really used: the running 90th percentile per model.

    Sampled in the order of sending, because the first replies back are the short ones; the maximum is assumed until
    fifty are known.
    """

    __slots__ = ("_sorted_at", "_samples", "_share", "_known")

    SAMPLES = 500
    ENOUGH = 50
    PERCENTILE = 0.9

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=self.SAMPLES)
        self._known = 0
        self._share = 1.0
        self._sorted_at = 0

    def expect(self, max_output: int) -> float:
        """Returns the output tokens to expect of a call that allows ``max_output``."""
        return max_output * self._share

    def sample(self, used: int, max_output: int) -> None:
        """Takes what one call used of what it allowed."""
        if max_output <= 0:
            return
        self._samples.append(min(1.0, used / max_output))
        self._known += 1
        if self._known >= self.ENOUGH and self._known - self._sorted_at >= self.ENOUGH:
            self._sorted_at = self._known
            ranked = sorted(self._samples)
            self._share = ranked[int(self.PERCENTILE * (len(ranked) - 1))]
