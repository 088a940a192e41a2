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
from decimal import Decimal
from math import inf
from typing import Protocol

import msgspec

from batchrun.plan.schedule import Done, Flow, Note, Schedule, Send, Settlement, Sleep, Step, Stop
from batchrun.plan.servers import Outage, Server, ServerModel, Work
from batchrun.records import Call, Fault, Reply

__all__ = ["Decider", "Outage", "Result", "ServerModel", "Work", "simulate"]


class Result(msgspec.Struct):
    """How a simulated run went."""

    duration_s: float = 0.0
    succeeded: int = 0
    """Rows; likewise ``failed``."""
    failed: int = 0
    sends: int = 0
    refused: int = 0
    """Sends answered with 429."""
    faulted: int = 0
    """Sends that found no server, were broken off, or answered with an error."""
    cost_usd: Decimal = Decimal(0)
    unpriced: int = 0
    """Answered rows whose price is not known."""
    input_tokens: int = 0
    output_tokens: int = 0
    max_in_flight: int = 0
    stop: Stop | None = None
    """None: it ran to its end, or to ``until_s``."""
    bound_s: dict[str, float] = msgspec.field(default_factory=dict)
    """What was binding → for how many seconds."""
    notes: list[Note] = msgspec.field(default_factory=list)
    answered: Counter[int] = msgspec.field(default_factory=Counter)
    """Second → calls answered in it; likewise ``sent`` and ``refusals``."""
    used: Counter[int] = msgspec.field(default_factory=Counter)
    """Second → tokens of the calls answered in it; likewise ``used_input``, input tokens alone."""
    used_input: Counter[int] = msgspec.field(default_factory=Counter)
    sent: Counter[int] = msgspec.field(default_factory=Counter)
    refusals: Counter[int] = msgspec.field(default_factory=Counter)
    trace: str = ""
    """Digest of every step: the same seed gives the same bytes."""

    @property
    def binding(self) -> str:
        """What was binding for most of the time."""
        return max(self.bound_s, key=lambda what: self.bound_s[what], default="input")


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


def simulate(
    flow: Flow,
    model: ServerModel,
    work: Iterable[Work],
    *,
    seed: int = 0,
    until_s: float = inf,
    decider: Callable[[Flow, random.Random, float], Decider] = Schedule,
) -> Result:
    """Runs ``work`` to its end, or until ``until_s``, against a server like ``model``; returns how it went.

    ``work`` is drawn as the schedule wants it, so it may be as long as a file, or endless. Several endpoints
    (``flow.origins``) are as many servers of the same model.
    """
    rng = random.Random(f"client {seed}")  # noqa: S311 - a simulation, not a secret
    return _Run(decider(flow, rng, 0.0), model, iter(work), seed, max(1, flow.origins)).run(until_s)


class _Run:
    """One simulation: events in the order of their time, then of their making."""

    def __init__(self, decider: Decider, model: ServerModel, work: Iterator[Work], seed: int, servers: int) -> None:
        self._schedule = decider
        self._network_s = model.network_s
        self._servers = [
            Server(model, self, random.Random(f"server {seed} {number}"), self._settle)  # noqa: S311 - as above
            for number in range(servers)
        ]
        self._work = work
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        self._known: dict[Call, Work] = {}
        self._result = Result()
        self._digest = hashlib.blake2b(digest_size=16)

    def at(self, when: float, action: Callable[..., None], *subject: object) -> None:
        """Plans an event."""
        self._order += 1
        heapq.heappush(self._events, (when, self._order, action, subject))

    def run(self, until_s: float) -> Result:
        """Runs to the end."""
        now, result = 0.0, self._result
        while now < until_s and (wake := self._send_all(now)) is not None:
            then = min(wake, self._events[0][0] if self._events else inf)
            binding = self._schedule.binding
            result.bound_s[binding] = result.bound_s.get(binding, 0.0) + then - now
            now = then
            if self._events and self._events[0][0] <= now:
                _, _, action, subject = heapq.heappop(self._events)
                action(now, *subject)
        result.duration_s = now
        result.notes = self._schedule.notes()
        result.trace = self._digest.hexdigest()
        return result

    def _send_all(self, now: float) -> float | None:
        """Sends what may go out now; returns when to look again, or None at the end."""
        schedule, result = self._schedule, self._result
        wanted = schedule.wants(now)
        if wanted:
            self._offer(now, wanted)
        while isinstance(step := schedule.next(now), Send):
            result.sends += 1
            result.sent[int(now)] += 1
            self._digest.update(f"{now!r} send {step.call.rows[0].line} {step.origin}\n".encode())
            self.at(now + self._network_s, self._servers[step.origin].arrive, self._known[step.call])
        result.max_in_flight = max(result.max_in_flight, schedule.in_flight)
        if isinstance(step, Done):
            result.stop = step.stop
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

    def _settle(self, now: float, work: Work, answer: Reply | Fault) -> None:
        result, second = self._result, int(now)
        cost_usd = work.cost_usd if isinstance(answer, Reply) else None
        settlement = self._schedule.settle(now, work.call, answer, cost_usd=cost_usd)
        result.succeeded += len(settlement.succeeded)
        result.failed += len(settlement.failed)
        if isinstance(answer, Reply):
            result.answered[second] += 1
            result.used[second] += work.call.tokens + work.output_tokens
            result.used_input[second] += work.call.tokens
            result.input_tokens += work.call.tokens
            result.output_tokens += work.output_tokens
            result.unpriced += len(settlement.succeeded) if cost_usd is None else 0
            result.cost_usd += cost_usd or Decimal(0)
        elif answer.kind == "rate_limited":
            result.refused += 1
            result.refusals[second] += 1
        else:
            result.faulted += 1
        del self._known[work.call]
        for call in settlement.again:
            self._known[call] = work if call is work.call else work.part(call)
        self._digest.update(f"{now!r} {type(answer).__name__} {work.call.rows[0].line}\n".encode())
