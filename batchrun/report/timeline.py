"""How a job went over time, in at most ``MAX_POINTS`` points however long it ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from batchrun.records import Sampled

__all__ = ["MAX_POINTS", "Point", "Timeline"]

MAX_POINTS = 120
_MAX_BINDINGS = 30


class Point(NamedTuple):
    """The ``span_s`` seconds up to ``at``: sums, but ``in_flight`` and ``limit`` are means over time."""

    at: float
    span_s: float
    in_flight: float
    limit: float
    done: int
    sent: int
    refused: int
    tokens: int
    paused_s: float
    binding: str


class Timeline:
    """Keeps samples; when they are too many, neighbours are merged in pairs: every sum stays right."""

    __slots__ = ("_last_at", "_pending", "_per_point", "bindings", "peak_in_flight", "peak_limit", "points")

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.bindings: dict[str, float] = {}
        """Seconds that each binding constraint held."""
        self.peak_in_flight = 0
        self.peak_limit = 0
        self._per_point = 1
        self._pending = 0
        self._last_at: float | None = None

    def start(self, at: float) -> None:
        """A run begins: the time since the run before is nobody's."""
        self._last_at = at

    def add(self, sample: Sampled) -> None:
        """Takes one sample into account. A wall clock that steps back gives a span of 0."""
        before = self._last_at if self._last_at is not None else sample.at - sample.elapsed_s
        span = round(max(0.0, sample.at - before), 3)
        self._last_at = sample.at
        self.peak_in_flight = max(self.peak_in_flight, sample.in_flight)
        self.peak_limit = max(self.peak_limit, sample.limit)
        binding = sample.binding[:60]
        if binding not in self.bindings and len(self.bindings) >= _MAX_BINDINGS:
            binding = "other"
        self.bindings[binding] = round(self.bindings.get(binding, 0.0) + span, 3)
        point = Point(
            round(sample.at, 1),
            span,
            float(sample.in_flight),
            float(sample.limit),
            sample.done,
            sample.sent,
            sample.refused,
            sample.tokens,
            round(sample.paused_s, 3),
            binding,
        )
        if self._pending:
            point = _merged(self.points.pop(), point)
        self.points.append(point)
        self._pending = (self._pending + 1) % self._per_point
        if len(self.points) > MAX_POINTS:
            self._halve()

    def _halve(self) -> None:
        points = self.points
        self.points = [
            _merged(*points[i : i + 2]) if i + 1 < len(points) else points[i] for i in range(0, len(points), 2)
        ]
        self._per_point *= 2
        # The odd one out at the end holds half of what a point now holds: the next samples join it.
        self._pending = self._per_point // 2 if len(points) % 2 else 0

    def dump(self) -> dict[str, Any]:
        """Returns the state as plain JSON types, by column."""
        names = list(self.bindings)
        index = {name: i for i, name in enumerate(names)}
        columns: list[list[Any]] = [list(column) for column in zip(*self.points, strict=True)]
        if columns:
            columns[-1] = [index[name] for name in columns[-1]]
        return {
            "columns": columns,
            "bindings": names,
            "seconds": list(self.bindings.values()),
            "peaks": [self.peak_in_flight, self.peak_limit],
            "per_point": self._per_point,
            "pending": self._pending,
            "last_at": self._last_at,
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Timeline:
        """Returns the timeline that ``dump`` described."""
        timeline = cls()
        names = state["bindings"]
        timeline.bindings = dict(zip(names, state["seconds"], strict=True))
        timeline.points = [Point._make((*row[:-1], names[row[-1]])) for row in zip(*state["columns"], strict=True)]
        timeline.peak_in_flight, timeline.peak_limit = state["peaks"]
        timeline._per_point = state["per_point"]
        timeline._pending = state["pending"]
        timeline._last_at = state["last_at"]
        return timeline


def _merged(a: Point, b: Point) -> Point:
    span = a.span_s + b.span_s
    share = b.span_s / span if span else 0.5
    return Point(
        b.at,
        round(span, 3),
        round(a.in_flight + (b.in_flight - a.in_flight) * share, 2),
        round(a.limit + (b.limit - a.limit) * share, 2),
        a.done + b.done,
        a.sent + b.sent,
        a.refused + b.refused,
        a.tokens + b.tokens,
        round(a.paused_s + b.paused_s, 3),
        a.binding if a.span_s > b.span_s else b.binding,
    )
