"""The state machine over all decisions: what to send now, when to look again, and what a call's end means.

Read it as a story: calls are offered, wait in a lane per model, and go out through the scope (origin, model) that has
room; ``settle`` turns every end into what becomes of each row. Time and randomness are arguments; nothing here waits.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from math import inf
from typing import Literal, TypeAlias

from batchrun.errors import Exit
from batchrun.plan.budget import Budget
from batchrun.plan.limit import START, Limit
from batchrun.plan.pace import KnownQuota, OutputEstimate
from batchrun.plan.retry import Breaker, RetryBudget, back_off, judge
from batchrun.records import Call, Fault, Quotas, Reply, Row

__all__ = ["Done", "Flow", "Idle", "Note", "Schedule", "Send", "Settlement", "Sleep", "Stop"]

LONGEST_PAUSE_S = 300.0
"""A hint beyond this holds back its row, not everybody."""
SHORTEST_PAUSE_S = 1.0
"""After a refusal without a hint: this, or a fifth of a round trip where that is shorter."""
HELD_AT_MOST = 4_096
"""Calls held ahead of sending, so that memory does not grow with the input."""
UNLIMITED_OUTPUT = 1_024
"""Output tokens to expect, before anything is known, of a request that names no limit."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What a run was told about its flow. ``deadline_at`` is monotonic seconds."""

    max_concurrency: int = 256
    concurrency: int | None = None
    """Fixed, where given."""
    rpm: int | None = None
    tpm: int | None = None
    max_attempts: int = 5
    patience_s: float = 900.0
    deadline_at: float | None = None
    budget_usd: Decimal | None = None
    spent_usd: Decimal = Decimal(0)
    """Of earlier runs: settled, lost and in doubt."""
    max_failures: int | None = None
    """Stop when *more* have failed."""
    failed: int = 0
    """Of earlier runs."""
    max_failure_share: float | None = None
    """Of ``total``."""
    total: int = 0
    counts_max_tokens: bool = False
    """The server charges max_tokens against its token quota when it admits a call."""
    origins: int = 1
    """Endpoints that the job may use: ``Send.origin`` is 0 … origins − 1."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this call now to this endpoint; its slot, rate and money are taken."""

    call: Call
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Sleep:
    """Nothing may go out before ``until``, unless a call ends or more are offered."""

    until: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Wait for a reply or for more calls."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a run ends before its rows do: a machine word, the exit code, and a line for people."""

    reason: str
    exit_code: Exit
    detail: str


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is in flight and nothing more will be sent."""

    stop: Stop | None


Step: TypeAlias = Send | Sleep | Idle | Done
IDLE = Idle()


@dataclass(frozen=True, slots=True)
class Settlement:
    """What became of a call's rows: each is in exactly one of the four."""

    succeeded: tuple[Row, ...] = ()
    failed: tuple[Row, ...] = ()
    """Given up: their terminal fault is ``fault``."""
    again: tuple[Call, ...] = ()
    """Already queued inside the schedule."""
    held: tuple[Row, ...] = ()
    """Pending, but not queued in this run."""
    lost_usd: Decimal = Decimal(0)
    """The reservation that stays spent for good."""
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person may ask about later. ``at_now`` is monotonic seconds."""

    at_now: float
    what: Literal["limit", "pause", "breaker", "stop", "notice"]
    text: str


FATAL: dict[str | None, tuple[str, Exit]] = {
    "auth": ("auth", Exit.PERMISSION),
    "account": ("account", Exit.CONFIGURATION),
    "redirect": ("redirect", Exit.CONFIGURATION),
    "tls": ("tls", Exit.UNREACHABLE),
    None: ("account", Exit.CONFIGURATION),
}


class _Flight:
    """What is remembered of a call while it is out."""

    __slots__ = ("others", "probe", "request_mark", "scope", "token_mark", "tokens")

    def __init__(self, scope: _Scope, tokens: float, others: int) -> None:
        self.others = others
        self.scope = scope
        self.tokens = tokens
        self.probe = False
        self.request_mark = 0.0
        self.token_mark = 0.0


class _Origin:
    """What one endpoint's scopes share: the limits that the user set."""

    __slots__ = ()


class _Scope:
    """The controller of one (origin, model): its window, its paces, its pause and its breaker."""

    __slots__ = (
        "binding", "breaker", "in_flight", "lane", "limit", "origin", "paused_until", "pause_s", "requests",
        "restart_at", "tokens",
    )  # fmt: skip

    def __init__(self, flow: Flow, rng: random.Random, now: float, lane: _Lane, origin: int) -> None:
        self.lane = lane
        self.origin = origin
        self.limit = Limit(now, flow.max_concurrency, flow.concurrency)
        self.requests = KnownQuota(now, flow.rpm, 1.0)
        self.tokens = KnownQuota(now, flow.tpm, 1.0)
        self.breaker = Breaker(rng)
        self.paused_until = now
        self.pause_s = 0.0
        self.binding = ""

    def opens_at(self, now: float, tokens: float) -> float:
        """Returns when a call of ``tokens`` may go out: now or earlier, later, or ``inf`` for after some reply."""
        if self.breaker.opened_at is not None:
            self.binding = "breaker open, probing"
            return inf if self.breaker.probing else max(self.breaker.probe_at, self.paused_until)
        if self.paused_until > now:
            self.binding = f"paused {self.pause_s:.0f} s by Retry-After" if self.pause_s >= 1 else "paused"
            return self.paused_until
        opens_at = self.limit.opens_at(now)
        if opens_at == inf:
            self.binding = "concurrency"
            return inf
        wait = opens_at - now
        if wait > 0.0:
            self.binding = "server rate limit"
        requests_wait = self.requests.wait_s(now, 1.0)
        if requests_wait > wait:
            self.binding = "requests per minute"
            wait = requests_wait
        tokens_wait = self.tokens.wait_s(now, tokens)
        if tokens_wait > wait:
            self.binding = "tokens per minute"
            wait = tokens_wait
        return now + wait

    def pause(self, now: float, hint_s: float | None, cool_down_s: float) -> float:
        """Holds everything back after a refusal; returns the seconds by which the pause grew."""
        pause_s = cool_down_s if hint_s is None else min(LONGEST_PAUSE_S, hint_s)
        if now + pause_s <= self.paused_until:
            return 0.0
        grown = now + pause_s - max(now, self.paused_until)
        self.paused_until = now + pause_s
        self.pause_s = pause_s
        return grown


class _Lane:
    """The calls of one model that may go out, and the scopes through which they may: one per endpoint."""

    __slots__ = ("model", "output", "ready", "retries", "scopes")

    def __init__(self, flow: Flow, rng: random.Random, now: float, model: str) -> None:
        self.model = model
        self.ready: list[tuple[int, int, int, Call]] = []
        """A heap: higher priority first, retries before new calls, then in order."""
        self.scopes = [_Scope(flow, rng, now, self, origin) for origin in range(flow.origins)]
        self.output = OutputEstimate()
        self.retries = RetryBudget(now)


class _Trouble:
    """What is remembered of a call that failed, until it is settled."""

    __slots__ = ("billed", "failed_at", "failures")

    def __init__(self) -> None:
        self.failures = 0
        self.failed_at = 0.0
        self.billed = False
        """Its next send repeats one that may have been billed, so it needs leave of the retry budget."""


class Schedule:
    """Decides what a run does next. One call is one attempt; a waiting retry holds no slot.

    Promises, after every step: in flight ≤ limit at the time of a send; spent + reserved ≤ budget; every offered row
    ends in exactly one settlement as succeeded or failed, or is still held here or by the caller when the run stops.
    """

    def __init__(self, flow: Flow, rng: random.Random, now: float) -> None:
        self._flow = flow
        self._rng = rng
        self._budget = Budget(flow.budget_usd, flow.spent_usd)
        self._lanes: dict[str, _Lane] = {}
        self._waiting: list[tuple[float, int, Call]] = []
        self._flights: dict[Call, _Flight] = {}
        self._trouble: dict[Call, _Trouble] = {}
        self._ready = 0
        self._order = 0
        self._closed = False
        self._failed = flow.failed
        self._notes: list[Note] = []
        self._binding = "input"
        self.stop: Stop | None = None
        del now  # scopes begin when their first call is offered

    # ------------------------------------------------------------ calls in

    def wants(self, now: float) -> int:
        """Returns how many more calls it would like to be offered, to keep every scope busy."""
        del now
        if self.stop is not None or self._closed:
            return 0
        held = self._ready + len(self._waiting)
        shortage = max(
            (2 * self._room(lane) + 16 - len(lane.ready) for lane in self._lanes.values()), default=32
        )
        return max(0, min(shortage, HELD_AT_MOST - held))

    def offer(self, now: float, calls: Iterable[Call]) -> None:
        """Takes calls to be made. Each of their rows will be in exactly one settlement."""
        for call in calls:
            if call.ready_at == 0.0:
                call.ready_at = now
            self._make_ready(now, call, fresh=True)

    def close(self) -> None:
        """No more calls will be offered."""
        self._closed = True

    # ------------------------------------------------------------ the next step

    def next(self, now: float) -> Step:
        """Says what to do now. With ``Send``, the slot, the rate and the reservation are taken."""
        while self._waiting and self._waiting[0][0] <= now:
            self._return_waiting(now)
        if self.stop is None and self._flow.deadline_at is not None and now >= self._flow.deadline_at:
            if self._ready or self._waiting or not self._closed:
                self.drain(now, Stop("deadline", Exit.STOPPED, "the deadline has passed"))
        if self.stop is not None:
            return IDLE if self._flights else Done(self.stop)
        wake = self._waiting[0][0] if self._waiting else inf
        if self._ready:
            found, opens_at = self._choose(now)
            if found is not None:
                call = found.lane.ready[0][3]
                if self._budget.fits(call.reserved_usd):
                    return self._send(now, found)
                self._binding = "budget"
                if not self._flights:
                    self.drain(now, Stop("budget", Exit.STOPPED, self._over_budget(call)))
                    return Done(self.stop)
                return IDLE
            if self._out_of_patience(now):
                return IDLE if self._flights else Done(self.stop)
            wake = min(wake, opens_at)
        elif not self._waiting:
            self._binding = "input"
            return Done(None) if self._closed and not self._flights else IDLE
        if self._flow.deadline_at is not None:
            wake = min(wake, self._flow.deadline_at)
        return Sleep(wake) if wake < inf else IDLE

    def _choose(self, now: float) -> tuple[_Scope | None, float]:
        """Finds the scope through which the most urgent call can go; else when the first may open."""
        best: _Scope | None = None
        best_key: tuple[int, int, int] | None = None
        soonest = inf
        if len(self._flights) >= (self._flow.concurrency or self._flow.max_concurrency):
            self._binding = "concurrency"
            return None, inf
        for lane in self._lanes.values():
            if not lane.ready:
                continue
            head = lane.ready[0]
            if best_key is not None and head[:3] >= best_key:
                continue
            tokens = self._charge(lane, head[3])
            room = -1.0
            for scope in lane.scopes:
                opens_at = scope.opens_at(now, tokens)
                if opens_at > now:
                    self._binding = scope.binding
                    soonest = min(soonest, opens_at)
                    continue
                share = 1.0 - scope.limit.in_flight / scope.limit.window
                if share > room:
                    room, best, best_key = share, scope, head[:3]
        return best, soonest

    def _send(self, now: float, scope: _Scope) -> Send:
        call = heapq.heappop(scope.lane.ready)[3]
        self._ready -= 1
        self._budget.reserve(call.reserved_usd)
        flight = _Flight(scope, self._charge(scope.lane, call), scope.limit.in_flight)
        flight.request_mark = scope.requests.take(now, 1.0)
        flight.token_mark = scope.tokens.take(now, flight.tokens)
        if scope.breaker.opened_at is not None:
            flight.probe = True
            scope.breaker.probe()
        self._flights[call] = flight
        scope.limit.sent(now)
        self._note_limit(now, scope)
        call.sends += 1
        call.sent_at = now
        return Send(call, scope.origin)

    # ------------------------------------------------------------ the end of a call

    def settle(
        self,
        now: float,
        call: Call,
        result: Reply | Fault,
        *,
        cost_usd: Decimal | None = None,
        adapted: bool = False,
    ) -> Settlement:
        """Says what becomes of every row of a call that ended.

        ``cost_usd`` is what the response is known to have cost; unknown, the reservation stays spent where the call
        may have been processed. ``adapted``: the codec has learned from this fault; ask again at once, as no attempt.
        """
        flight = self._flights.pop(call)
        if result.quotas is not None:
            self._learn(now, call, flight, result.quotas)
        if isinstance(result, Reply):
            return self._answered(now, call, flight, result, cost_usd)
        return self._faulted(now, call, flight, result, cost_usd, adapted=adapted)

    def _answered(
        self, now: float, call: Call, flight: _Flight, reply: Reply, cost_usd: Decimal | None
    ) -> Settlement:
        call.attempts += 1
        lost = self._budget.settle(call.reserved_usd, cost_usd)
        self._healthy(now, call, flight)
        used = reply.usage.input_tokens + reply.usage.output_tokens if reply.usage is not None else 0
        flight.scope.limit.answered(now, call.sent_at, used)
        self._note_limit(now, flight.scope)
        if reply.usage is not None:
            if not self._flow.counts_max_tokens:
                flight.scope.tokens.correct(now, used - flight.tokens)
            flight.scope.lane.output.sample(reply.usage.output_tokens, _max_output(call))
        missing = tuple(row for row in call.rows if row.custom_id not in reply.outputs)
        if not missing:
            self._trouble.pop(call, None)
            return Settlement(succeeded=call.rows, lost_usd=lost)
        fault = Fault("garbled", "the reply has no answer for this row", reply.status, maybe_processed=True)
        answered = tuple(row for row in call.rows if row.custom_id in reply.outputs)
        rest = self._part(call, missing) if answered else call
        after = self._after_fault(now, rest, fault)
        return Settlement(answered, after.failed, after.again, after.held, lost, fault)

    def _faulted(
        self,
        now: float,
        call: Call,
        flight: _Flight,
        fault: Fault,
        cost_usd: Decimal | None,
        *,
        adapted: bool,
    ) -> Settlement:
        scope = flight.scope
        if fault.maybe_processed or cost_usd is not None:
            lost = self._budget.settle(call.reserved_usd, cost_usd)
        else:
            lost = self._budget.settle(call.reserved_usd, Decimal(0))
            scope.tokens.correct(now, -flight.tokens)
        if adapted:
            scope.limit.ended(now)
            self._end_probe(now, flight, succeeded=True)
            self._make_ready(now, call, fresh=False)
            return Settlement(again=(call,), lost_usd=lost, fault=fault)
        outage = scope.breaker.opened_at is not None
        self._feel(now, call, flight, fault)
        if fault.maybe_processed and not outage:
            call.attempts += 1
        after = self._after_fault(now, call, fault)
        return Settlement((), after.failed, after.again, after.held, lost, fault)

    def _feel(self, now: float, call: Call, flight: _Flight, fault: Fault) -> None:
        """Lets the scope's controllers take the fault for what it says about the server."""
        scope = flight.scope
        refused = fault.kind == "rate_limited" or (fault.kind == "overloaded" and not fault.maybe_processed)
        if not refused:
            scope.limit.ended(now)
        if fault.kind in ("rejected", "too_large", "fatal", "garbled"):
            self._healthy(now, call, flight)  # the server works; the row or the account does not
        elif refused:
            self._end_probe(now, flight, succeeded=True)  # a server that refuses is alive
            cool_down_s = scope.limit.refused(now, call.sent_at, flight.others)
            if scope.pause(now, fault.retry_after_s, cool_down_s) >= 1.0:
                self._note(now, "pause", f"paused {scope.pause_s:.1f} s: {fault.kind}")
        elif flight.probe:
            self._end_probe(now, flight, succeeded=False)
        elif scope.breaker.opened_at is None and scope.breaker.failed(now):
            self._note(now, "breaker", f"open: {fault.detail}")

    def _after_fault(self, now: float, call: Call, fault: Fault) -> Settlement:
        """Decides over all rows of ``call``; queues what is asked again."""
        verdict = judge(fault, len(call.rows), call.attempts, self._flow.max_attempts)
        if verdict == "stop":
            reason, code = FATAL[fault.stop]
            self.drain(now, Stop(reason, code, fault.detail))
            return Settlement(held=call.rows)
        if verdict == "fail":
            self._trouble.pop(call, None)
            self._failed += len(call.rows)
            self._check_failures(now)
            return Settlement(failed=call.rows)
        if self.stop is not None:
            return Settlement(held=call.rows)
        if verdict == "split":
            half = (len(call.rows) + 1) // 2
            parts = (self._part(call, call.rows[:half]), self._part(call, call.rows[half:]))
            self._trouble.pop(call, None)
            for part in parts:
                self._make_ready(now, part, fresh=False)
            return Settlement(again=parts)
        self._ask_again(now, call, fault)
        return Settlement(again=(call,))

    def _ask_again(self, now: float, call: Call, fault: Fault) -> None:
        trouble = self._trouble.setdefault(call, _Trouble())
        trouble.failures += 1
        waited = call.sent_at - trouble.failed_at if trouble.failures > 1 else 0.0
        trouble.failed_at = now
        trouble.billed = fault.maybe_processed
        delay = back_off(self._rng, trouble.failures, fault.retry_after_s, waited)
        self._wait(now + delay, call)

    def release(self, now: float, call: Call) -> None:
        """The call was not sent after all: its slot, its rate and its money are given back, and it may go again."""
        flight = self._flights.pop(call)
        scope = flight.scope
        scope.limit.ended(now)
        self._budget.release(call.reserved_usd)
        scope.requests.correct(now, -1.0)
        scope.tokens.correct(now, -flight.tokens)
        if flight.probe:
            scope.breaker.withdrawn()
        call.sends -= 1
        self._make_ready(now, call, fresh=False)

    def drain(self, now: float, stop: Stop) -> None:
        """Sends nothing more; ``Done`` follows once nothing is in flight. The first reason to stop is kept."""
        if self.stop is None:
            self.stop = stop
            self._note(now, "stop", f"{stop.reason}: {stop.detail}")

    # ------------------------------------------------------------ how it stands

    @property
    def in_flight(self) -> int:
        """Calls that are out now."""
        return len(self._flights)

    @property
    def limit(self) -> int:
        """Calls that may be out now, over all scopes."""
        ceiling = self._flow.concurrency or self._flow.max_concurrency
        windows = sum(scope.limit.window for lane in self._lanes.values() for scope in lane.scopes)
        return min(ceiling, windows) if windows else min(ceiling, START)

    @property
    def spent_usd(self) -> Decimal:
        """Dollars known or feared to be spent, earlier runs included."""
        return self._budget.spent_usd

    @property
    def reserved_usd(self) -> Decimal:
        """Dollars set aside for what is in flight."""
        return self._budget.reserved_usd

    @property
    def binding(self) -> str:
        """What keeps the run from being faster, in words."""
        return self._binding

    def notes(self) -> list[Note]:
        """Returns what happened since it was asked last."""
        notes, self._notes = self._notes, []
        return notes

    # ------------------------------------------------------------ small parts

    def _lane(self, now: float, call: Call) -> _Lane:
        model = call.rows[0].model
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = _Lane(self._flow, self._rng, now, model)
        return lane

    def _make_ready(self, now: float, call: Call, *, fresh: bool) -> None:
        self._order += 1
        self._ready += 1
        heapq.heappush(self._lane(now, call).ready, (-call.priority, int(fresh), self._order, call))

    def _wait(self, until: float, call: Call) -> None:
        self._order += 1
        heapq.heappush(self._waiting, (until, self._order, call))

    def _return_waiting(self, now: float) -> None:
        """Lets the first waiting call be ready, if the retry budget allows it; else it waits on."""
        call = heapq.heappop(self._waiting)[2]
        trouble = self._trouble[call]
        wait = self._lane(now, call).retries.take(now) if trouble.billed else 0.0
        if wait > 0.0:
            self._wait(now + wait, call)
        else:
            self._make_ready(now, call, fresh=False)

    def _room(self, lane: _Lane) -> int:
        return sum(scope.limit.window for scope in lane.scopes)

    def _charge(self, lane: _Lane, call: Call) -> float:
        """Returns the tokens to charge for a call: its input and the output that is expected of it."""
        limit = _max_output(call)
        return call.tokens + (limit if self._flow.counts_max_tokens else lane.output.expect(limit))

    def _learn(self, now: float, call: Call, flight: _Flight, quotas: Quotas) -> None:
        if quotas.requests is not None:
            flight.scope.requests.learn(now, quotas.requests, call.sent_at, flight.request_mark)
        if quotas.tokens is not None:
            flight.scope.tokens.learn(now, quotas.tokens, call.sent_at, flight.token_mark)

    def _healthy(self, now: float, call: Call, flight: _Flight) -> None:
        """A processed call shows that the server works; replies from before an outage do not end it."""
        flight.scope.lane.retries.succeeded()
        if flight.probe:
            self._end_probe(now, flight, succeeded=True)
        elif flight.scope.breaker.opened_at is None:
            flight.scope.breaker.succeeded()

    def _end_probe(self, now: float, flight: _Flight, *, succeeded: bool) -> None:
        if flight.probe:
            flight.scope.breaker.probed(now, succeeded=succeeded)
            if succeeded:
                flight.scope.limit.restart(now)
                self._note_limit(now, flight.scope)
                self._note(now, "breaker", "closed: a probe was answered")

    def _part(self, call: Call, rows: tuple[Row, ...]) -> Call:
        """Returns a call for some rows of ``call``. It reserves as much as the whole: never too little."""
        return Call(
            rows=rows,
            batch=call.batch,
            tokens=sum(row.tokens for row in rows) or call.tokens * len(rows) // len(call.rows),
            reserved_usd=call.reserved_usd,
            priority=call.priority,
            sends=call.sends,
            attempts=call.attempts,
            ready_at=call.ready_at,
            sent_at=call.sent_at,
        )

    def _check_failures(self, now: float) -> None:
        flow, failed = self._flow, self._failed
        over = flow.max_failures is not None and failed > flow.max_failures
        if flow.max_failure_share is not None and failed > flow.max_failure_share * flow.total:
            over = True
        if over:
            self.drain(now, Stop("max-failures", Exit.STOPPED, f"{failed} rows have failed"))

    def _out_of_patience(self, now: float) -> bool:
        """Stops the run where every lane with calls has been unreachable for longer than the patience."""
        busy = [lane for lane in self._lanes.values() if lane.ready]
        for lane in busy:
            for scope in lane.scopes:
                opened_at = scope.breaker.opened_at
                if opened_at is None or now - opened_at < self._flow.patience_s:
                    return False
        self.drain(
            now,
            Stop("unreachable", Exit.UNREACHABLE, f"no answer for {self._flow.patience_s:.0f} s"),
        )
        return True

    def _over_budget(self, call: Call) -> str:
        return f"${self._budget.spent_usd} of ${self._flow.budget_usd} is spent; the next call may cost ${call.reserved_usd}"

    def _note_limit(self, now: float, scope: _Scope) -> None:
        if scope.limit.change is not None:
            self._note(now, "limit", str(scope.limit.change))
            scope.limit.change = None

    def _note(
        self, now: float, what: Literal["limit", "pause", "breaker", "stop", "notice"], text: str
    ) -> None:
        self._notes.append(Note(now, what, text))


def _max_output(call: Call) -> int:
    """Returns the output tokens that a call's rows allow together."""
    return sum(UNLIMITED_OUTPUT if row.max_output is None else row.max_output for row in call.rows)
