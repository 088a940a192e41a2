"""Latencies in memory that does not grow: logarithmic bins, exact count, sum, smallest and largest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["Histogram"]

_GAMMA = 1.01
_PER_LOG = 1 / math.log(_GAMMA)
_MIDDLE = 2 * _GAMMA / (1 + _GAMMA)
_SMALLEST_S = 1e-4
_LARGEST_S = 1e8


class Histogram:
    """Durations in seconds: bin ``i = floor(ln x / ln 1.01)`` holds ``1.01^i <= x < 1.01^(i+1)``.

    A percentile is the relative middle of its bin, ``1.01^i * 2.02 / 2.01``: at most
    (1.01 - 1) / (1.01 + 1) = 0.4975% from the observation of that rank, as DDSketch (Masson et al.,
    VLDB 2019) shows. That holds from 0.1 ms on; what is shorter shares one bin. No percentile lies outside
    the exact smallest and largest.
    """

    __slots__ = ("_bins", "_first", "count", "max", "min", "sum_us")

    def __init__(self) -> None:
        self.count = 0
        self.sum_us = 0
        self.min = math.inf
        self.max = 0.0
        self._first = 0
        self._bins: list[int] = []

    def add(self, seconds: float) -> None:
        """Counts one duration; what is negative or no number counts as 0."""
        if not seconds > 0:
            seconds = 0.0
        elif seconds > _LARGEST_S:
            seconds = _LARGEST_S
        self.count += 1
        # Whole microseconds, because integers add up to the same sum in every order.
        self.sum_us += int(seconds * 1e6 + 0.5)
        self.min = min(self.min, seconds)
        self.max = max(self.max, seconds)
        place = math.floor(math.log(max(seconds, _SMALLEST_S)) * _PER_LOG) - self._first
        if 0 <= place < len(self._bins):
            self._bins[place] += 1
        else:
            self._widen(place)

    def _widen(self, place: int) -> None:
        if not self._bins:
            self._first += place
            self._bins = [1]
        elif place < 0:
            self._first += place
            self._bins[:0] = [1, *[0] * (-place - 1)]
        else:
            self._bins.extend([0] * (place - len(self._bins)))
            self._bins.append(1)

    def percentile(self, percent: float) -> float | None:
        """Returns the nearest-rank percentile in seconds, or None where nothing was counted."""
        if not self.count:
            return None
        rank = max(1, math.ceil(percent / 100 * self.count))
        if rank >= self.count:
            return self.max
        seen = 0
        for place, count in enumerate(self._bins):
            seen += count
            if seen >= rank:
                value = _GAMMA ** (self._first + place) * _MIDDLE
                return min(max(value, self.min), self.max)
        return self.max

    def mean(self) -> float | None:
        """Returns the mean in seconds, or None where nothing was counted."""
        return self.sum_us / self.count / 1e6 if self.count else None

    def dump(self) -> dict[str, Any]:
        """Returns the state as plain JSON types. Bins lie dense from ``first`` on: that copies fastest."""
        if not self.count:
            return {}
        return {
            "count": self.count,
            "sum_us": self.sum_us,
            "min": self.min,
            "max": self.max,
            "first": self._first,
            "bins": self._bins.copy(),
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Histogram:
        """Returns the histogram that ``dump`` described."""
        histogram = cls()
        if state:
            histogram.count = state["count"]
            histogram.sum_us = state["sum_us"]
            histogram.min = float(state["min"])
            histogram.max = float(state["max"])
            histogram._first = state["first"]
            histogram._bins = list(state["bins"])
        return histogram
