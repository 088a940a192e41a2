"""Models of servers for the simulation: what they let in, how long they take, and how they fail."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from decimal import Decimal
from math import exp
from typing import Literal, Protocol

import msgspec

from batchrun.records import Call, Fault, Output, Quota, Quotas, Reply, Usage

__all__ = ["Clock", "Outage", "Server", "ServerModel", "Work"]

OUTPUT = Output(value=b'""', body=b"{}")
UNREACHABLE = Fault("network", "connection refused", connected=False)
BROKEN = Fault("overloaded", "internal error", 500, maybe_processed=True)
HUNG = Fault("timeout", "no answer", maybe_processed=True)


class Outage(msgspec.Struct, frozen=True):
    """From ``start`` to ``end`` (seconds) the server refuses connections, hangs, or answers 500."""

    start: float
    end: float
    mode: Literal["refuse", "hang", "error"] = "refuse"


class ServerModel(msgspec.Struct, frozen=True):
    """What is assumed of a server. Rates are per second, times are seconds; None is no such limit."""

    latency_s: float = 1.0
    """Median service time of a call of average size, alone."""
    spread: float = 0.3
    """Standard deviation of the service time's logarithm."""
    network_s: float = 0.02
    """One way; a refusal takes nothing more."""
    calls_per_s: float | None = None
    """A token bucket on requests, full at the start."""
    burst_calls: float = 10.0
    tokens_per_s: float | None = None
    """A token bucket on tokens, full at the start."""
    burst_tokens: float = 10_000.0
    counts_max_tokens: bool = False
    """Charges the input and the allowed output when it admits a call; else what the call will really use."""
    in_flight: int | None = None
    """Refuses what is more than this in service."""
    full_speed: int | None = None
    """Processor sharing with an unbounded queue: so many calls run at full speed, more share it."""
    batching: bool = False
    """Sharing is gradual: n calls together get n / (1 + n / full_speed)."""
    thrashes_at: int | None = None
    """Beyond so many calls the whole slows down in proportion."""
    hints: bool = False
    """Refusals carry Retry-After: the time until the bucket holds enough."""
    headers: bool = False
    """Answers carry limit, remaining and reset, as they were when the call was admitted."""
    error_share: float = 0.0
    """Of calls, answered with a 500 after their service time."""
    outages: tuple[Outage, ...] = ()
    steps: tuple[tuple[float, float], ...] = ()
    """(at, factor): from then on the capacity is ``factor`` times the original."""
    timeout_s: float = 60.0
    """The client's deadline for one attempt."""

    def factor(self, now: float) -> float:
        """Returns what share of its original capacity the server has now."""
        factor = 1.0
        for at, value in self.steps:
            if now >= at:
                factor = value
        return factor


class Work(msgspec.Struct, frozen=True):
    """A call and what will come of it: the output tokens that it will use, and its price where that is known."""

    call: Call
    output_tokens: int
    cost_usd: Decimal | None = None
    size: float = 1.0
    """Its service time relative to the average."""

    def part(self, call: Call) -> Work:
        """Returns what will come of some of its rows in a call of their own, each row taken alike."""
        rows, whole = len(call.rows), len(self.call.rows)
        cost_usd = None if self.cost_usd is None else self.cost_usd * rows / whole
        return Work(call, self.output_tokens * rows // whole, cost_usd, self.size)


class Clock(Protocol):
    """Where a server plans its events."""

    def at(self, when: float, action: Callable[..., None], *subject: object) -> None:
        """Calls ``action(when, *subject)`` at ``when``."""


class _Bucket:
    """A server's token bucket. It is never in debt; a call larger than the bucket needs a full one."""

    __slots__ = ("_at", "capacity", "level", "rate")

    def __init__(self, rate: float, capacity: float) -> None:
        self.rate = rate
        self.capacity = capacity
        self.level = capacity
        self._at = 0.0

    def missing_s(self, now: float, units: float, factor: float) -> float:
        """Returns the seconds until it would hold ``units``."""
        rate = self.rate * factor
        self.level = min(self.capacity, self.level + (now - self._at) * rate)
        self._at = now
        missing = min(units, self.capacity) - self.level
        return missing / rate if missing > 1e-9 else 0.0

    def quota(self, factor: float) -> Quota:
        """Returns what headers would tell; the limit is what the bucket holds."""
        full_s = (self.capacity - self.level) / (self.rate * factor)
        return Quota(round(self.rate * factor * 60), max(0, int(self.level)), full_s)


class Server:
    """A server like ``model``: gives every call that arrives one answer, through ``answer(now, work, result)``."""

    def __init__(
        self, model: ServerModel, clock: Clock, rng: random.Random, answer: Callable[[float, Work, Reply | Fault], None]
    ) -> None:
        self._model = model
        self._clock = clock
        self._rng = rng
        self._answer = answer
        self._requests = _Bucket(model.calls_per_s, model.burst_calls) if model.calls_per_s else None
        self._tokens = _Bucket(model.tokens_per_s, model.burst_tokens) if model.tokens_per_s else None
        self._serving = 0
        # Processor sharing: the service given to each call so far, and the calls by how much will have served them.
        self._given = 0.0
        self._given_at = 0.0
        self._sharing: list[tuple[float, int, Work, Quotas | None]] = []
        self._arrivals = 0
        self._version = 0

    def arrive(self, now: float, work: Work) -> None:
        """A call arrives."""
        model = self._model
        for outage in model.outages:
            if outage.start <= now < outage.end:
                self._fail(now, work, outage)
                return
        refusal = self._refusal(now, work)
        if refusal is not None:
            self._reply(now, work, refusal)
            return
        self._serving += 1
        service_s = model.latency_s * work.size * exp(self._rng.gauss(0.0, model.spread))
        if model.full_speed is None:
            self._clock.at(now + service_s, self._serve, work, self._quotas(now))
            return
        self._share_until(now)
        self._arrivals += 1
        heapq.heappush(self._sharing, (self._given + service_s, self._arrivals, work, self._quotas(now)))
        self._plan_next()

    def _fail(self, now: float, work: Work, outage: Outage) -> None:
        if outage.mode == "refuse":
            self._reply(now, work, UNREACHABLE)
        elif outage.mode == "error":
            self._reply(now + self._model.network_s, work, BROKEN)
        else:
            self._reply(now + self._model.timeout_s - 2 * self._model.network_s, work, HUNG)

    def _refusal(self, now: float, work: Work) -> Fault | None:
        """Refuses a call, or charges it."""
        factor = self._model.factor(now)
        if self._model.in_flight is not None and self._serving >= max(1, int(self._model.in_flight * factor)):
            return Fault("rate_limited", "too many requests in flight", 429)
        units = self._units(work)
        wait_s = self._requests.missing_s(now, 1.0, factor) if self._requests else 0.0
        if self._tokens:
            wait_s = max(wait_s, self._tokens.missing_s(now, units, factor))
        if wait_s > 0.0:
            hint_s = wait_s if self._model.hints else None
            return Fault("rate_limited", "too fast", 429, retry_after_s=hint_s, quotas=self._quotas(now))
        if self._requests:
            self._requests.level -= 1.0
        if self._tokens:
            self._tokens.level -= units
        return None

    def _units(self, work: Work) -> float:
        if self._model.counts_max_tokens:
            return float(work.call.tokens + sum(row.max_output or 0 for row in work.call.rows))
        return float(work.call.tokens + work.output_tokens)

    def _quotas(self, now: float) -> Quotas | None:
        if not self._model.headers:
            return None
        factor = self._model.factor(now)
        return Quotas(
            self._requests.quota(factor) if self._requests else None,
            self._tokens.quota(factor) if self._tokens else None,
        )

    def _serve(self, now: float, work: Work, quotas: Quotas | None) -> None:
        """The service of ``work`` ends; ``quotas`` are what they were when it was admitted."""
        self._serving -= 1
        if self._rng.random() < self._model.error_share:
            self._reply(now, work, BROKEN)
            return
        outputs = {row.custom_id: OUTPUT for row in work.call.rows}
        self._reply(now, work, Reply(outputs, Usage(work.call.tokens, work.output_tokens), quotas=quotas))

    def _reply(self, now: float, work: Work, result: Reply | Fault) -> None:
        self._clock.at(now + self._model.network_s, self._answer, work, result)

    # ------------------------------------------------------------ processor sharing

    def _speed(self, now: float) -> float:
        """Returns how fast each of the calls in service runs now; 1.0 is alone."""
        n, knee = len(self._sharing), self._model.full_speed or 1
        speed = 1.0 / (1.0 + n / knee) if self._model.batching else min(1.0, knee / n)
        if self._model.thrashes_at is not None and n > self._model.thrashes_at:
            speed *= (self._model.thrashes_at / n) ** 2
        return speed * self._model.factor(now)

    def _share_until(self, now: float) -> None:
        if self._sharing:
            self._given += (now - self._given_at) * self._speed(self._given_at)
        self._given_at = now

    def _plan_next(self) -> None:
        self._version += 1
        if self._sharing:
            left = max(0.0, self._sharing[0][0] - self._given)
            self._clock.at(self._given_at + left / self._speed(self._given_at), self._end_next, self._version)

    def _end_next(self, now: float, version: int) -> None:
        """The next of the calls that share ends, unless another came or went since this was planned."""
        if version == self._version:
            self._share_until(now)
            _, _, work, quotas = heapq.heappop(self._sharing)
            self._serve(now, work, quotas)
            self._plan_next()
