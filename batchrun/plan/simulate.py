"""Runs the product's own ``Schedule`` against a model of a server, in virtual time: hours in seconds, seeded.

It serves the tests, ``make bench-flow`` and ``batchrun estimate --simulate``. The loop is the engine's, without a
world: ask ``next``, send, deliver what the server answers, ``settle``.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from math import exp, inf
from typing import Literal, Protocol

from batchrun.plan.schedule import Done, Flow, Note, Schedule, Send, Settlement, Sleep, Step, Stop
from batchrun.records import Call, Fault, Output, Quota, Quotas, Reply, Usage

__all__ = ["Decider", "Outage", "Result", "ServerModel", "Work", "simulate"]

OUTPUT = Output(value=b'""', body=b"{}")


@dataclass(frozen=True, slots=True)
class Outage:
    """From ``start`` to ``end`` (seconds) the server refuses connections, hangs, or answers 500."""

    start: float
    end: float
    mode: Literal["refuse", "hang", "error"] = "refuse"


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What is assumed of a server. Rates are per second, times are seconds; None is no such limit."""

    latency_s: float = 1.0
    """Median service time of a call of average size, alone."""
    spread: float = 0.3
    """Standard deviation of the service time's logarithm."""
    network_s: float = 0.02
    """One way; refusals take nothing more."""
    calls_per_s: float | None = None
    """A token bucket on requests, full at the start."""
    burst_calls: float = 10.0
    tokens_per_s: float | None = None
    """A token bucket on tokens, full at the start."""
    burst_tokens: float = 10_000.0
    counts_max_tokens: bool = False
    """Charges input + the allowed output when it admits a call, and nothing later; else the true use."""
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
    """Answers carry limit, remaining and reset."""
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


@dataclass(frozen=True, slots=True)
class Work:
    """A call and what will come of it: the output tokens that it will use, and its price where that is known."""

    call: Call
    output_tokens: int
    cost_usd: Decimal | None = None
    size: float = 1.0
    """Its service time relative to the average."""


@dataclass(slots=True)
class Result:
    """How a simulated run went."""

    duration_s: float = 0.0
    succeeded: int = 0
    failed: int = 0
    sends: int = 0
    refused: int = 0
    """Sends answered with 429 and the like."""
    unreachable: int = 0
    """Sends that found no server, or none that answered."""
    cost_usd: Decimal = Decimal(0)
    input_tokens: int = 0
    output_tokens: int = 0
    max_in_flight: int = 0
    stop: Stop | None = None
    bound_s: Counter[str] = field(default_factory=Counter)
    """What was binding → for how many seconds."""
    notes: list[Note] = field(default_factory=list)
    answered: Counter[int] = field(default_factory=Counter)
    """Second → calls answered in it."""
    tokens: Counter[int] = field(default_factory=Counter)
    """Second → tokens of the calls answered in it."""
    sent: Counter[int] = field(default_factory=Counter)
    """Second → sends in it."""
    refusals: Counter[int] = field(default_factory=Counter)
    """Second → refusals in it."""
    trace: str = ""
    """Digest of every step: the same seed gives the same bytes."""

    @property
    def binding(self) -> str:
        """What was binding for most of the time."""
        return max(self.bound_s, key=lambda what: self.bound_s[what], default="input")


def simulate(
    flow: Flow,
    model: ServerModel,
    work: Iterable[Work],
    *,
    seed: int = 0,
    until_s: float = inf,
    decider: Callable[[Flow, random.Random, float], Decider] = Schedule,
) -> Result:
    """Runs ``work`` to its end, or until ``until_s``, against a server like ``model``; returns how it went."""
    rng = random.Random(f"client {seed}")  # noqa: S311 (a simulation, not a secret)
    return _Run(decider(flow, rng, 0.0), model, iter(work), seed, until_s).run()


class Decider(Protocol):
    """What decides a simulated run: a ``Schedule``, or something to compare it with."""

    @property
    def in_flight(self) -> int:
        """Calls that are out now."""

    @property
    def binding(self) -> str:
        """What keeps the run from being faster."""

    def wants(self, now: float) -> int:
        """See ``Schedule.wants``."""

    def offer(self, now: float, calls: Iterable[Call]) -> None:
        """See ``Schedule.offer``."""

    def close(self) -> None:
        """See ``Schedule.close``."""

    def next(self, now: float) -> Step:
        """See ``Schedule.next``."""

    def settle(self, now: float, call: Call, result: Reply | Fault, *, cost_usd: Decimal | None = None) -> Settlement:
        """See ``Schedule.settle``."""

    def notes(self) -> list[Note]:
        """See ``Schedule.notes``."""


class _Bucket:
    """A server's token bucket: refuses what it does not hold, and never goes into debt at admission."""

    __slots__ = ("at", "capacity", "level", "rate")

    def __init__(self, rate: float, capacity: float) -> None:
        self.rate = rate
        self.capacity = capacity
        self.level = capacity
        self.at = 0.0

    def missing_s(self, now: float, units: float, factor: float) -> float:
        """Returns the seconds until it would hold ``units``."""
        rate = self.rate * factor
        self.level = min(self.capacity, self.level + (now - self.at) * rate)
        self.at = now
        missing = min(units, self.capacity) - self.level
        return missing / rate if missing > 1e-9 else 0.0

    def quota(self, factor: float) -> Quota:
        limit = round(self.rate * factor * 60)
        full_s = (self.capacity - self.level) / (self.rate * factor)
        return Quota(limit, max(0, int(self.level)), full_s)


class _Server:
    """The state of a ``ServerModel``; calls its answers back through the run's events."""

    def __init__(self, model: ServerModel, run: _Run, seed: int) -> None:
        self.model = model
        self._run = run
        self._rng = random.Random(f"server {seed}")  # noqa: S311 (a simulation, not a secret)
        self._requests = _Bucket(model.calls_per_s, model.burst_calls) if model.calls_per_s else None
        self._tokens = _Bucket(model.tokens_per_s, model.burst_tokens) if model.tokens_per_s else None
        self._serving = 0
        # Processor sharing: a clock of service given to each call, and the calls by the reading at which they end.
        self._clock = 0.0
        self._clock_at = 0.0
        self._sharing: list[tuple[float, int, Work]] = []
        self._version = 0

    def arrive(self, now: float, work: Work, order: int) -> None:
        model = self.model
        for outage in model.outages:
            if outage.start <= now < outage.end:
                if outage.mode == "refuse":
                    self._reply(now, work, UNREACHABLE)
                elif outage.mode == "error":
                    self._reply(now + model.network_s, work, BROKEN)
                else:
                    self._reply(now - model.network_s * 2 + model.timeout_s, work, HUNG)
                return
        refusal = self._refusal(now, work)
        if refusal is not None:
            self._reply(now, work, refusal)
            return
        self._serving += 1
        service_s = model.latency_s * work.size * exp(self._rng.gauss(0.0, model.spread))
        if model.full_speed is None:
            self._run.at(now + service_s, "served", (work, self._quotas(now)))
            return
        self._advance(now)
        heapq.heappush(self._sharing, (self._clock + service_s, order, work))
        self._plan()

    def serve(self, now: float, work: Work, quotas: Quotas | None) -> None:
        """The service of ``work`` ends; ``quotas`` are what they were when it was admitted."""
        self._serving -= 1
        if self._rng.random() < self.model.error_share:
            self._reply(now, work, BROKEN)
            return
        call = work.call
        outputs = {row.custom_id: OUTPUT for row in call.rows}
        self._reply(now, work, Reply(outputs, Usage(call.tokens, work.output_tokens), quotas=quotas))

    def share(self, now: float, version: int) -> None:
        """The next of the calls that share the server ends, unless another came or went since this was planned."""
        if version == self._version:
            self._advance(now)
            self.serve(now, heapq.heappop(self._sharing)[2], self._quotas(now))
            self._plan()

    def _refusal(self, now: float, work: Work) -> Fault | None:
        factor = self.model.factor(now)
        if self.model.in_flight is not None and self._serving >= max(1, int(self.model.in_flight * factor)):
            return Fault("rate_limited", "too many requests in flight", 429)
        units = self._units(work)
        wait = self._requests.missing_s(now, 1.0, factor) if self._requests else 0.0
        if self._tokens:
            wait = max(wait, self._tokens.missing_s(now, units, factor))
        if wait > 0.0:
            hint = wait if self.model.hints else None
            return Fault("rate_limited", "too fast", 429, retry_after_s=hint, quotas=self._quotas(now))
        if self._requests:
            self._requests.level -= 1.0
        if self._tokens:
            self._tokens.level -= units
        return None

    def _units(self, work: Work) -> float:
        if self.model.counts_max_tokens:
            return float(work.call.tokens + sum(row.max_output or 0 for row in work.call.rows))
        return float(work.call.tokens + work.output_tokens)

    def _quotas(self, now: float) -> Quotas | None:
        if not self.model.headers:
            return None
        factor = self.model.factor(now)
        return Quotas(
            self._requests.quota(factor) if self._requests else None,
            self._tokens.quota(factor) if self._tokens else None,
        )

    def _reply(self, now: float, work: Work, answer: Reply | Fault) -> None:
        self._run.at(now + self.model.network_s, "answer", (work, answer))

    def _speed(self, now: float) -> float:
        """Returns how fast each of the calls now in service runs; 1.0 is alone."""
        n, knee = len(self._sharing), self.model.full_speed or 1
        speed = 1.0 / (1.0 + n / knee) if self.model.batching else min(1.0, knee / n)
        if self.model.thrashes_at is not None and n > self.model.thrashes_at:
            speed *= (self.model.thrashes_at / n) ** 2
        return speed * self.model.factor(now)

    def _advance(self, now: float) -> None:
        if self._sharing:
            self._clock += (now - self._clock_at) * self._speed(self._clock_at)
        self._clock_at = now

    def _plan(self) -> None:
        self._version += 1
        if self._sharing:
            left = max(0.0, self._sharing[0][0] - self._clock)
            self._run.at(self._clock_at + left / self._speed(self._clock_at), "share", self._version)


UNREACHABLE = Fault("network", "connection refused", connected=False)
BROKEN = Fault("overloaded", "internal error", 500, maybe_processed=True)
HUNG = Fault("timeout", "no answer", maybe_processed=True)


class _Run:
    """One simulation: events in the order of their time, then of their making."""

    def __init__(self, decider: Decider, model: ServerModel, work: Iterator[Work], seed: int, until_s: float) -> None:
        self._schedule = decider
        self._model = model
        self._server = _Server(model, self, seed)
        self._work = work
        self._until = until_s
        self._events: list[tuple[float, int, str, object]] = []
        self._order = 0
        self._known: dict[Call, Work] = {}
        self._result = Result()
        self._digest = hashlib.blake2b(digest_size=16)

    def at(self, when: float, what: str, subject: object) -> None:
        """Plans an event."""
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what, subject))

    def run(self) -> Result:
        now = 0.0
        while (wake := self._send_all(now)) is not None:
            if self._events and self._events[0][0] <= wake:
                now = self._advance(now, self._events[0][0])
                _, order, what, subject = heapq.heappop(self._events)
                self._happen(now, order, what, subject)
            elif wake < inf:
                now = self._advance(now, wake)
            else:  # pragma: no cover (a schedule that waits for nothing is a bug; say so rather than hang)
                raise RuntimeError(f"stuck at {now}")
            if now >= self._until:
                break
        self._result.duration_s = now
        self._result.notes += self._schedule.notes()
        self._result.trace = self._digest.hexdigest()
        return self._result

    def _send_all(self, now: float) -> float | None:
        """Sends what may go out now; returns when to look again, or None at the end."""
        schedule = self._schedule
        wanted = schedule.wants(now)
        if wanted:
            self._offer(now, wanted)
        while isinstance(step := schedule.next(now), Send):
            work = self._known[step.call]
            self._result.sends += 1
            self._result.sent[int(now)] += 1
            self._digest.update(f"{now!r} send {step.call.rows[0].line}\n".encode())
            self.at(now + self._model.network_s, "arrive", work)
        self._result.max_in_flight = max(self._result.max_in_flight, schedule.in_flight)
        if isinstance(step, Done):
            self._result.stop = step.stop
            return None
        return step.until if isinstance(step, Sleep) else inf

    def _offer(self, now: float, wanted: int) -> None:
        calls = []
        for work in self._work:
            self._known[work.call] = work
            calls.append(work.call)
            if len(calls) == wanted:
                break
        else:
            self._schedule.close()
        self._schedule.offer(now, calls)

    def _advance(self, now: float, then: float) -> float:
        self._result.bound_s[self._schedule.binding] += then - now  # type: ignore[assignment]
        return then

    def _happen(self, now: float, order: int, what: str, subject: object) -> None:
        if what == "arrive":
            assert isinstance(subject, Work)
            self._server.arrive(now, subject, order)
        elif what == "served":
            assert isinstance(subject, tuple)
            self._server.serve(now, *subject)
        elif what == "share":
            assert isinstance(subject, int)
            self._server.share(now, subject)
        else:
            assert isinstance(subject, tuple)
            self._settle(now, *subject)

    def _settle(self, now: float, work: Work, answer: Reply | Fault) -> None:
        result, second = self._result, int(now)
        cost = work.cost_usd if isinstance(answer, Reply) else None
        settlement = self._schedule.settle(now, work.call, answer, cost_usd=cost)
        result.succeeded += len(settlement.succeeded)
        result.failed += len(settlement.failed)
        if isinstance(answer, Reply):
            assert answer.usage is not None
            result.answered[second] += 1
            result.tokens[second] += answer.usage.input_tokens + answer.usage.output_tokens
            result.input_tokens += answer.usage.input_tokens
            result.output_tokens += answer.usage.output_tokens
            result.cost_usd += cost or Decimal(0)
        elif answer.kind == "rate_limited":
            result.refused += 1
            result.refusals[second] += 1
        else:
            result.unreachable += 1
        if not settlement.again:
            del self._known[work.call]
        self._digest.update(f"{now!r} {type(answer).__name__} {work.call.rows[0].line}\n".encode())
