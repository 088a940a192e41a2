"""The state machine over all decisions: what to send now, when to look again, what a call's end means.

Read it as a story: calls are offered, wait in the lane of their model, and go out through the scope (origin, model)
that has room; ``settle`` turns every end into what becomes of each row. Time and randomness are arguments.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from decimal import Decimal
from math import inf
from typing import Literal

from batchrun.errors import Exit
from batchrun.plan.budget import Budget
from batchrun.plan.limit import START
from batchrun.plan.prefix import Entry
from batchrun.plan.retry import back_off, judge
from batchrun.plan.scope import Flight, Lane, Origin, Scope
from batchrun.plan.steps import Done, Flow, Idle, Note, Send, Settlement, Sleep, Step, Stop
from batchrun.records import Call, Fault, Reply, Row

__all__ = ["Done", "Flow", "Idle", "Note", "Schedule", "Send", "Settlement", "Sleep", "Step", "Stop"]

AHEAD = 16
"""Calls wanted beyond twice the window: a batch of commits may free many slots at once."""
HELD_AT_MOST = 4_096
"""Calls held ahead of sending, so that memory does not grow with the input."""
LEVEL_S = 300.0
"""A level of priority is worth so long a wait: higher goes first, and nothing starves."""
NOTHING = Decimal(0)
IDLE = Idle()

FATAL: dict[str | None, Exit] = {
    "auth": Exit.PERMISSION,
    "account": Exit.CONFIGURATION,
    "redirect": Exit.CONFIGURATION,
    "tls": Exit.UNREACHABLE,
}


class _Trouble:
    """What is remembered of a call that failed, until it is settled."""

    __slots__ = ("billed", "failed_at", "failures", "suspect")

    def __init__(self) -> None:
        self.failures = 0
        self.failed_at = 0.0
        self.billed = False
        """Its next send repeats one that may have been billed, so it needs leave of the retry budget."""
        self.suspect = False
        """It failed again though others were answered in between: the row is to blame, not the server."""


class Schedule:
    """Decides what a run does next. One call is one attempt; a waiting retry holds no slot.

    Promises, after every step: in flight ≤ limit at the time of a send; spent + reserved ≤ budget; every row that was
    offered ends in exactly one settlement as succeeded or failed, or stays pending when the run stops.

    ``worst`` prices a call when it is about to go out, by what is known just then; without it, what the call says it
    reserves is reserved. What it raises passes through ``next``, and leaves the call queued.
    """

    def __init__(
        self, flow: Flow, rng: random.Random, now: float, worst: Callable[[Call], Decimal] | None = None
    ) -> None:
        self._flow = flow
        self._rng = rng
        self._worst = worst
        self._budget = Budget(flow.budget_usd, flow.spent_usd)
        self._ceiling = flow.concurrency or flow.max_concurrency
        self._origins = [Origin(flow, now, number) for number in range(flow.origins)]
        self._lanes: dict[str, Lane] = {}
        self._waiting: list[tuple[float, int, Call]] = []
        self._flights: dict[Call, Flight] = {}
        self._trouble: dict[Call, _Trouble] = {}
        self._ready = 0
        self._grouped = False
        """Whether any call's prompt begins like another's."""
        self._order = 0
        self._closed = False
        self._failed = flow.failed
        self._may_fail = _may_fail(flow)
        self._notes: list[Note] = []
        self._unreachable_since: float | None = None
        """Since when no connection has come about; None once anything was heard."""
        self._last_trouble = ""
        self._binding: str | Scope = "input"
        self.stop: Stop | None = None

    # ------------------------------------------------------------ calls in

    def wants(self, now: float) -> int:
        """Returns how many more calls it would like to be offered, to keep every scope busy."""
        del now
        if self.stop is not None or self._closed:
            return 0
        if not self._lanes:
            return 2 * min(START, self._ceiling) + AHEAD
        short = max(2 * min(lane.room, self._ceiling) + AHEAD - len(lane.ready) for lane in self._lanes.values())
        held = self._ready + len(self._waiting) + sum(lane.prefixes.held for lane in self._lanes.values())
        return max(0, min(short, HELD_AT_MOST - held))

    def offer(self, now: float, calls: Iterable[Call]) -> None:
        """Takes calls to be made. Each of their rows will be in exactly one settlement."""
        for call in calls:
            call.ready_at = now
            self._grouped = self._grouped or bool(call.prefix)
            model = call.rows[0].model
            if model not in self._lanes:
                self._lanes[model] = Lane(self._flow, self._rng, now, self._origins)
            self._make_ready(now, call, fresh=True)

    def fail_unsent(self, rows: int) -> None:
        """Counts rows that failed without a send: they too are among those that may fail."""
        self._failed += rows

    def close(self) -> None:
        """No more calls will be offered."""
        self._closed = True

    # ------------------------------------------------------------ the next step

    def next(self, now: float) -> Step:
        """Says what to do now. With ``Send``, the slot, the rate and the reservation are taken."""
        if self._waiting and self._waiting[0][0] <= now:
            self._return_waiting(now)
        if self._grouped:
            self._hold_followers(now)
        self._check_stops(now)
        if self.stop is not None:
            return IDLE if self._flights else Done(self.stop)
        if not self._ready:
            return self._nothing_ready(now)
        lane, scope, opens_at = self._choose(now)
        if lane is not None and scope is not None:
            call = lane.ready[0][3]
            if self._worst is not None:
                call.reserved_usd = self._worst(call)
            if self._budget.fits(call.reserved_usd):
                return self._send(now, lane, scope)
            return self._over_budget(now, call)
        if self._out_of_patience(now):
            return IDLE if self._flights else Done(self.stop)
        return self._sleep(opens_at)

    def _check_stops(self, now: float) -> None:
        """Stops at the deadline, and where too many rows have failed; not when nothing is left to send."""
        if self.stop is not None or not (self._ready or self._waiting or not self._closed or self._led):
            return
        if self._flow.deadline_at is not None and now >= self._flow.deadline_at:
            self.drain(now, Stop("deadline", Exit.STOPPED, "the deadline has passed"))
        elif self._failed > self._may_fail:
            self.drain(now, Stop("max-failures", Exit.STOPPED, f"{self._failed} rows have failed"))

    def _nothing_ready(self, now: float) -> Step:
        if self._led:
            self._binding = "prompt cache"
            return self._sleep(inf)
        self._binding = "input"
        if self._waiting:
            if self._unreachable_since is None or self._flights:
                return self._sleep(inf)
            # Too few rows to open a breaker: their retries are all that is left to hear from the endpoint.
            self._binding = "endpoint unreachable"
            patient_until = self._unreachable_since + self._flow.patience_s
            if now < patient_until:
                return self._sleep(patient_until)
            self._give_up(now)
            return Done(self.stop)
        return Done(None) if self._closed and not self._flights else IDLE

    def _sleep(self, until: float) -> Step:
        """Returns the earliest moment at which something may change without a reply."""
        if self._waiting:
            until = min(until, self._waiting[0][0])
        if self._flow.deadline_at is not None:
            until = min(until, self._flow.deadline_at)
        if self._grouped:
            until = min(until, *(lane.prefixes.due_at for lane in self._lanes.values()))
        return Sleep(until) if until < inf else IDLE

    def _choose(self, now: float) -> tuple[Lane | None, Scope | None, float]:
        """Finds the most urgent call that can go, and the scope with the most room; else when one may open."""
        if len(self._flights) >= self._ceiling:
            self._binding = "concurrency"
            return None, None, inf
        best: tuple[Lane | None, Scope | None] = (None, None)
        best_key: tuple[float, int, int] | None = None
        soonest = inf
        for lane in self._lanes.values():
            if not lane.ready:
                continue
            key = lane.ready[0][:3]
            if best_key is not None and key >= best_key:
                continue
            expected, most = lane.charge(lane.ready[0][3])
            home = lane.prefixes.home(now, lane.ready[0][3]) if len(lane.scopes) > 1 else None
            room = -inf
            for scope in lane.scopes:
                opens_at = scope.opens_at(now, expected, most)
                if opens_at > now:
                    if opens_at <= soonest:
                        soonest, self._binding = opens_at, scope
                    continue
                share = inf if scope is home else 1.0 - scope.limit.in_flight / scope.limit.window
                if share > room:
                    room, best, best_key = share, (lane, scope), key
        return *best, soonest

    def _send(self, now: float, lane: Lane, scope: Scope) -> Send:
        call = heapq.heappop(lane.ready)[3]
        self._ready -= 1
        self._budget.reserve(call.reserved_usd)
        flight = self._flights[call] = lane.flight(scope, call)
        scope.send(now, flight)
        lane.prefixes.sent(now, call, scope.limit.rtt_s)
        call.sends += 1
        call.sent_at = now
        return Send(call, scope.origin)

    def _over_budget(self, now: float, call: Call) -> Step:
        """Waits for what is in flight to settle; where nothing is, the budget is used up."""
        self._binding = "budget"
        if self._flights:
            return self._sleep(inf)
        self.drain(now, Stop("budget", Exit.STOPPED, self._budget.shortfall(call.reserved_usd)))
        return Done(self.stop)

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
        self._release_followers(now, call, flight, processed=isinstance(result, Reply) or result.usage is not None)
        if result.quotas is not None:
            flight.scope.learn(now, result.quotas, call.sent_at, flight)
        if isinstance(result, Reply):
            return self._answered(now, call, flight, result, cost_usd)
        return self._faulted(now, call, flight, result, cost_usd, adapted=adapted)

    def _answered(self, now: float, call: Call, flight: Flight, reply: Reply, cost_usd: Decimal | None) -> Settlement:
        lost_usd = self._budget.settle(call.reserved_usd, cost_usd)
        call.attempts += 1
        usage = reply.usage
        tokens = None if usage is None else (usage.input_tokens, usage.output_tokens)
        lane = self._lane(call)
        lane.used(now, call, flight, tokens)
        flight.scope.limit.answered(now, call.sent_at, sum(tokens) if tokens else 0)
        lane.retries.succeeded()
        self._server_works(now, call, flight)
        if all(row.custom_id in reply.outputs for row in call.rows):
            self._trouble.pop(call, None)
            return Settlement(succeeded=call.rows, lost_usd=lost_usd)
        return self._answered_in_part(now, call, reply, lost_usd)

    def _answered_in_part(self, now: float, call: Call, reply: Reply, lost_usd: Decimal) -> Settlement:
        """Rows that the reply leaves out are asked again, each alone; a reply without any is like one unread."""
        answered = tuple(row for row in call.rows if row.custom_id in reply.outputs)
        fault = Fault("garbled", "the reply has no answer for this row", reply.status, maybe_processed=True)
        if not answered:
            after = self._after_fault(now, call, fault)
            return Settlement((), after.failed, after.again, after.held, lost_usd, fault)
        self._trouble.pop(call, None)
        missing = tuple(row for row in call.rows if row.custom_id not in reply.outputs)
        if call.attempts >= self._flow.max_attempts:
            self._failed += len(missing)
            return Settlement(answered, missing, lost_usd=lost_usd, fault=fault)
        if self.stop is not None:
            return Settlement(answered, held=missing, lost_usd=lost_usd, fault=fault)
        alone = tuple(_part(call, (row,)) for row in missing)
        for part in alone:  # at once: the server works, and this is no retry of what it did not answer for them
            self._make_ready(now, part, fresh=False)
        return Settlement(answered, again=alone, lost_usd=lost_usd, fault=fault)

    def _faulted(
        self, now: float, call: Call, flight: Flight, fault: Fault, cost_usd: Decimal | None, *, adapted: bool
    ) -> Settlement:
        billed = fault.maybe_processed or cost_usd is not None
        lost_usd = self._budget.settle(call.reserved_usd, cost_usd if billed else NOTHING)
        usage = fault.usage
        tokens = None if usage is None else (usage.input_tokens, usage.output_tokens)
        self._lane(call).used(now, call, flight, tokens)
        in_outage = flight.scope.breaker.opened_at is not None
        self._feel(now, call, flight, fault, adapted=adapted)
        if adapted:
            self._make_ready(now, call, fresh=False)
            return Settlement(again=(call,), lost_usd=lost_usd, fault=fault)
        if fault.maybe_processed and not in_outage:
            call.attempts += 1  # an outage never fails a row, so what fails while one is known is not counted
        after = self._after_fault(now, call, fault)
        return Settlement((), after.failed, after.again, after.held, lost_usd, fault)

    def _feel(self, now: float, call: Call, flight: Flight, fault: Fault, *, adapted: bool) -> None:
        """Lets the scope's controllers take the fault for what it says about the server."""
        scope = flight.scope
        if fault.kind == "rate_limited" or (fault.kind == "overloaded" and not fault.maybe_processed):
            self._server_works(now, call, flight)
            if scope.refused(now, call.sent_at, flight, fault.retry_after_s):
                self._note(now, "pause", f"paused {scope.pause_s:.1f} s: {fault.kind}")
            return
        scope.limit.ended(now)
        if adapted or fault.kind in ("rejected", "too_large", "fatal", "garbled"):
            self._server_works(now, call, flight)  # the row or the account does not
            return
        self._last_trouble = fault.detail
        if not fault.connected and self._unreachable_since is None:
            self._unreachable_since = call.sent_at
        if flight.probe:
            scope.breaker.probed(now, succeeded=False)
        elif scope.breaker.opened_at is None and not self._suspect(call, scope) and scope.failed(now, call.sent_at):
            self._note(now, "breaker", f"open: {fault.detail}")

    def _suspect(self, call: Call, scope: Scope) -> bool:
        """Says whether the row is to blame: it failed before, and the server answered others since."""
        trouble = self._trouble.get(call)
        if trouble is None:
            return False
        trouble.suspect = trouble.suspect or (trouble.billed and scope.answered_at > trouble.failed_at)
        return trouble.suspect

    def _server_works(self, now: float, call: Call, flight: Flight) -> None:
        """Takes an answer of any kind as a sign of life; one from before an outage does not end it."""
        self._unreachable_since = None
        if flight.scope.works(now, call.sent_at, flight):
            self._note(now, "breaker", "closed: a probe was answered")

    def _after_fault(self, now: float, call: Call, fault: Fault) -> Settlement:
        """Decides over all rows of ``call``; queues what is asked again."""
        verdict = judge(fault, len(call.rows), call.attempts, self._flow.max_attempts)
        if verdict == "fail":
            self._trouble.pop(call, None)
            self._failed += len(call.rows)
            return Settlement(failed=call.rows)
        if verdict == "stop":
            self.drain(now, Stop(fault.stop or "account", FATAL.get(fault.stop, Exit.CONFIGURATION), fault.detail))
        if self.stop is not None:
            return Settlement(held=call.rows)
        if verdict == "split":
            self._trouble.pop(call, None)
            half = (len(call.rows) + 1) // 2
            parts = (_part(call, call.rows[:half]), _part(call, call.rows[half:]))
            for part in parts:
                self._make_ready(now, part, fresh=False)
            return Settlement(again=parts)
        self._ask_again(now, call, fault)
        return Settlement(again=(call,))

    def _ask_again(self, now: float, call: Call, fault: Fault) -> None:
        """Lets the call wait, without a slot, for its back-off or for the server's hint."""
        trouble = self._trouble.setdefault(call, _Trouble())
        waited_s = call.sent_at - trouble.failed_at if trouble.failures else 0.0
        trouble.failures += 1
        trouble.failed_at = now
        trouble.billed = fault.maybe_processed
        self._wait(now + back_off(self._rng, trouble.failures, fault.retry_after_s, waited_s), call)

    def release(self, now: float, call: Call) -> None:
        """The call was not sent after all: slot, rate and money are given back, and it may go again."""
        flight = self._flights.pop(call)
        flight.scope.unsent(now, flight)
        self._release_followers(now, call, flight, processed=False)
        self._lane(call).used(now, call, flight, None)
        self._budget.release(call.reserved_usd)
        call.sends -= 1
        self._make_ready(now, call, fresh=False)

    def unpack(self, now: float, call: Call) -> None:
        """The call was not sent: its rows are asked one by one instead, since the server answers only the first."""
        self.release(now, call)
        lane = self._lane(call)
        lane.ready.remove(next(entry for entry in lane.ready if entry[3] is call))
        heapq.heapify(lane.ready)
        self._ready -= 1
        for row in call.rows:
            self._make_ready(now, _part(call, (row,)), fresh=False)

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
        return min(self._ceiling, sum(lane.room for lane in self._lanes.values()) or START)

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
        return self._binding if isinstance(self._binding, str) else self._binding.describe()

    @property
    def told_rpm(self) -> int | None:
        """Requests per minute that servers told of, all scopes together; None where none did."""
        scopes = [scope.requests.told_per_minute for lane in self._lanes.values() for scope in lane.scopes]
        told = [per_minute for per_minute in scopes if per_minute is not None]
        return round(sum(told)) if told else None

    def notes(self) -> list[Note]:
        """Returns what happened since it was asked last."""
        notes, self._notes = self._notes, []
        for lane in self._lanes.values():
            for scope in lane.scopes:
                notes += [Note(change.at, "limit", str(change)) for change in scope.limit.changes]
                scope.limit.changes.clear()
        return sorted(notes, key=lambda note: note.at_now)

    # ------------------------------------------------------------ small parts

    def _lane(self, call: Call) -> Lane:
        return self._lanes[call.rows[0].model]

    def _make_ready(self, now: float, call: Call, *, fresh: bool) -> None:
        """Queues by urgency: a level of priority is worth minutes of waiting, being a retry half a level."""
        urgency = call.ready_at - LEVEL_S * (call.priority if fresh else call.priority + 0.5)
        self._order += 1
        self._admit(now, self._lane(call), [(urgency, int(fresh), self._order, call)])

    @property
    def _led(self) -> bool:
        """Whether calls are held for the sake of the prompt cache: then somebody before each is out, or may go."""
        return self._grouped and any(lane.prefixes.held for lane in self._lanes.values())

    def _hold_followers(self, now: float) -> None:
        """Takes what would come too early for the prompt cache, since that was let go, from the head of each lane."""
        for lane in self._lanes.values():
            self._admit(now, lane, lane.prefixes.overdue(now))
            while lane.ready and not lane.prefixes.admit(now, lane.ready[0]):
                heapq.heappop(lane.ready)
                self._ready -= 1

    def _release_followers(self, now: float, call: Call, flight: Flight, *, processed: bool) -> None:
        """Makes ready what had to wait for this call, as urgent as before: ahead of what was offered later."""
        if call.prefix:
            lane = self._lane(call)
            self._admit(now, lane, lane.prefixes.ended(now, call, flight.scope, processed=processed))

    def _admit(self, now: float, lane: Lane, entries: Iterable[Entry]) -> None:
        """Makes calls ready, but for those that are held for the sake of the prompt cache."""
        for entry in entries:
            if lane.prefixes.admit(now, entry):
                self._ready += 1
                heapq.heappush(lane.ready, entry)

    def _wait(self, until: float, call: Call) -> None:
        self._order += 1
        heapq.heappush(self._waiting, (until, self._order, call))

    def _return_waiting(self, now: float) -> None:
        """Makes ready whose wait is over, as far as the retry budget allows; the others wait on."""
        while self._waiting and self._waiting[0][0] <= now:
            call = heapq.heappop(self._waiting)[2]
            wait_s = self._lane(call).retries.take(now) if self._trouble[call].billed else 0.0
            if wait_s > 0.0:
                self._wait(now + wait_s, call)
            else:
                self._make_ready(now, call, fresh=False)

    def _out_of_patience(self, now: float) -> bool:
        """Stops the run where all that could be sent has been unreachable for longer than the patience."""
        patience_s = self._flow.patience_s
        for lane in self._lanes.values():
            for scope in lane.scopes if lane.ready else ():
                opened_at = scope.breaker.opened_at
                if opened_at is None or now - opened_at < patience_s:
                    return False
        self._give_up(now)
        return True

    def _give_up(self, now: float) -> None:
        detail = f"no answer for {self._flow.patience_s:g} s; last: {self._last_trouble}"
        self.drain(now, Stop("unreachable", Exit.UNREACHABLE, detail))

    def _note(self, now: float, what: Literal["limit", "pause", "breaker", "stop", "notice"], text: str) -> None:
        self._notes.append(Note(now, what, text))


def _part(call: Call, rows: tuple[Row, ...]) -> Call:
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


def _may_fail(flow: Flow) -> float:
    """Returns how many rows may fail before the run stops."""
    share = inf if flow.max_failure_share is None else flow.max_failure_share * flow.total
    return min(share, inf if flow.max_failures is None else flow.max_failures)
