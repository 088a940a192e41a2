"""The only task group: asks the schedule what to do, does it, and keeps what came of it.

The loop is: the schedule decides (``Send``), the intent is made durable, the request goes out on a worker task, the
answer is decoded, the schedule settles it, the outcome is made durable. No more tasks exist than requests may be in
flight.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Protocol

import anyio
import anyio.abc
import msgspec
from msgspec.structs import replace

from batchrun.errors import BatchrunError, Exit
from batchrun.intake.tokens import Calibration
from batchrun.plan.schedule import Done, Idle, Schedule, Send, Settlement, Sleep, Stop
from batchrun.providers.base import Provider
from batchrun.records import (
    Call,
    Fault,
    HttpRequest,
    HttpResponse,
    Noted,
    Operation,
    Output,
    Prices,
    Reply,
    Returned,
    Row,
    Sampled,
    Sent,
    Settled,
    Standing,
    Usage,
)
from batchrun.run import settle
from batchrun.run.batching import Prepared
from batchrun.run.failpoint import reached
from batchrun.run.progress import Console
from batchrun.run.redact import Redactor
from batchrun.run.source import RowReader, input_as_json
from batchrun.run.store import Store
from batchrun.run.stream import Stream
from batchrun.run.turns import Turns

__all__ = ["Client", "Counters", "Engine"]

_ROWS_A_ROUND = 16
"""Answers that are taken up in one round of the loop, where no crowd waits. Each round ends with a commit: fewer cost a
slow processor more than they save in waiting."""

_TICK_S = 0.2
"""Progress is refreshed this often."""

_SAME_SIGNAL_S = 0.05
"""A second signal sooner than this is the first one's echo."""

_HELD_BYTES = 64 * 1024 * 1024
"""Bodies held and not yet answered: beyond this no batch is opened, however many calls there is room for."""

_SAMPLE_S = 5.0
"""The report's timeline has a point this often."""

_SIGNALS: Mapping[signal.Signals, Exit] = {
    signal.SIGINT: Exit.SIGINT,
    signal.SIGTERM: Exit.SIGTERM,
    signal.SIGHUP: Exit.SIGHUP,
}


_HURRIED = frozenset({"interrupted", "deadline", "failed"})
"""Reasons to stop that give what is in flight no more than the grace."""


class Client(Protocol):
    """Sends one request. Outcomes are values: whatever goes wrong on the way is a Fault."""

    async def send(self, request: HttpRequest, timeout_s: float) -> HttpResponse | Fault:
        """Returns what came back within ``timeout_s``, or why nothing did."""

    async def aclose(self) -> None:
        """Closes all connections."""


class Counters(msgspec.Struct):
    """What progress shows, kept on the event loop; starts from what earlier runs left."""

    total: int
    succeeded: int
    failed: int
    sent: int
    retried: int
    refused: int
    tokens: int
    cost_usd: Decimal
    cost_unknown_rows: int

    def add(self, operation: Operation) -> None:
        """Takes into account what has become durable."""
        if isinstance(operation, Settled):
            if operation.status == "succeeded":
                self.succeeded += 1
                self.cost_unknown_rows += operation.cost_usd is None
            else:
                self.failed += 1
        elif isinstance(operation, Returned):
            self.refused += operation.refused and operation.counts
        else:
            return
        if operation.cost_usd is not None:
            self.cost_usd += operation.cost_usd
        if operation.usage is not None:
            self.tokens += operation.usage.input_tokens + operation.usage.output_tokens


class Engine:
    """Runs the pending rows of one job to the end, or to a stop.

    ``providers`` is one codec per endpoint, by the schedule's number for it. ``batches`` yields what to send and may
    block: it is advanced on a thread. ``secret`` is the key, taken out of whatever is written. ``stream`` is an input
    that is taken in meanwhile. Returns from ``run`` only when nothing is in flight and all that came back is durable.
    """

    def __init__(
        self,
        *,
        store: Store,
        reader: RowReader,
        batches: Iterator[Prepared],
        schedule: Schedule,
        providers: Sequence[Provider],
        client: Client,
        prices: Prices,
        calibration: Calibration,
        counters: Counters,
        console: Console,
        timeout_s: float,
        grace_s: float,
        budget_usd: Decimal | None,
        deadline_at: float | None,
        secret: str | None,
        stream: Stream | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._reader = reader
        self._batches = batches
        self._schedule = schedule
        self._providers = providers
        self._client = client
        self._prices = prices
        self._calibration = calibration
        self._counters = counters
        self._console = console
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._budget_usd = budget_usd
        self._deadline_at = deadline_at
        self._redactor = Redactor(secret)
        self._stream = stream
        self._clock = clock
        self._wall = wall
        self._parked: list[asyncio.Future[Send]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._held_bytes = 0
        self._told: set[str] = set()
        self._commits: set[asyncio.Future[None]] = set()
        self._uncommitted: list[Operation] = []
        self._error: Exception | None = None
        self._signalled_at: float | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.left_at_once = False
        self._rates = _Rates()

    # ---------------------------------------------------------------- the life of a run

    async def run(self) -> Stop | None:
        """Runs to the end. Returns why it stopped early, or None. Raises: BatchrunError (storage, changed input)."""
        loop = self._loop = asyncio.get_running_loop()
        self._finished = anyio.Event()
        self._hungry = anyio.Event()
        self._turns = Turns(loop, _ROWS_A_ROUND)
        self._started = self._sampled = self._clock()
        self._rates.note(self._started, self._counters)
        self._sample_base = replace(self._counters)
        self._store.start(loop)
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # not under nohup
        for number in heeded:
            loop.add_signal_handler(number, self._on_signal, number)
        if self._deadline_at is not None:
            self._deadline = loop.call_later(max(0.0, self._deadline_at - self._started), self._on_deadline)
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._feed)
                self._tasks.start_soon(self._tick)
                if self._stream is not None:
                    self._tasks.start_soon(self._receive, self._stream)
                self._pump()
                try:
                    await self._finished.wait()
                finally:
                    if self._stream is not None:
                        self._stream.stop()
                self._tasks.cancel_scope.cancel()
        finally:
            for handle in (self._timer, self._grace, self._deadline):
                if handle is not None:
                    handle.cancel()
            with anyio.CancelScope(shield=True):
                await self._client.aclose()
            self._keep([self._sample(), *self._notes()])
            self._store.stop()
            await asyncio.gather(*self._commits, return_exceptions=True)
            await asyncio.sleep(0)  # their callbacks have counted
            for number in heeded:
                loop.remove_signal_handler(number)
            self._console.update(self._standing())
        if self._error is not None:
            if isinstance(self._error, BatchrunError) and self._error.exit_code == Exit.STORAGE:
                self._store.salvage(self._uncommitted)
            raise self._error
        return self._schedule.stop

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal drains, a later one leaves. At once it is the same one: wrappers double them."""
        now = self._clock()
        first, self._signalled_at = self._signalled_at is None, self._signalled_at or now
        if not first:
            if now - self._signalled_at >= _SAME_SIGNAL_S:
                self.left_at_once = True
                self._finished.set()
            return
        self._console.warn(
            f"{number.name}: sending nothing more; {self._schedule.in_flight} in flight may land for"
            f" {self._grace_s:g} s (again to leave at once)"
        )
        self._schedule.drain(now, Stop("interrupted", _SIGNALS[number], f"{number.name} received"))
        self._pump()

    def _on_deadline(self) -> None:
        """The schedule sends nothing after it; what is still in flight then gets the grace and no more."""
        self._schedule.drain(self._clock(), Stop("deadline", Exit.STOPPED, "the deadline has passed"))
        self._pump()

    def _fail(self, error: BatchrunError) -> None:
        """Fail-stop: nothing more is sent; what is in flight may still land."""
        self._break(error, error.exit_code)

    def _break(self, error: Exception, exit_code: Exit = Exit.SOFTWARE) -> None:
        if self._error is None:
            self._error = error
            self._schedule.drain(self._clock(), Stop("failed", exit_code, str(error)))
            self._pump()

    # ---------------------------------------------------------------- deciding and doing

    def _pump(self) -> None:
        """Does what the schedule says until it says to wait."""
        now = self._clock()
        schedule = self._schedule
        while True:
            try:
                decision = schedule.next(now)
            except BatchrunError as error:  # a call that cannot be priced
                self._fail(error)
                return
            match decision:
                case Send():
                    self._hand_out(decision)
                    continue
                case Sleep(until):
                    self._wake_at(now, until)
                case Done():
                    self._finished.set()
                case Idle():
                    pass  # a reply, or the next batch, asks again
            break
        if schedule.stop is not None:
            # Where nobody is in a hurry, what is in flight has its own time to land: it is being paid for.
            hurried = schedule.stop.reason in _HURRIED or self._signalled_at is not None
            if self._grace is None and hurried:
                # What has not landed by then is in doubt, as its open intents say.
                self._grace = self._loop.call_later(self._grace_s, self._finished.set)
        elif schedule.wants(now) > 0 and self._held_bytes < _HELD_BYTES:
            self._hungry.set()

    def _wake_at(self, now: float, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, until - now), self._pump)

    def _hand_out(self, send: Send) -> None:
        if self._stream is not None:
            self._stream.queue.sent(send.call.rows)
        if self._parked:
            self._parked.pop().set_result(send)
        else:
            self._tasks.start_soon(self._work, send)

    async def _work(self, send: Send) -> None:
        """A worker: serves calls one after the other for as long as the run lasts."""
        while True:
            try:
                await self._serve(send.call, self._providers[send.origin])
            except Exception as error:  # noqa: BLE001 - a defect: what others have in flight has been paid for
                self._break(error)
            place: asyncio.Future[Send] = self._loop.create_future()
            self._parked.append(place)
            self._pump()
            send = await place

    async def _serve(self, call: Call, provider: Provider) -> None:
        if len(call.rows) > 1 and provider.only_first:
            self._schedule.unpack(self._clock(), call)
            return
        try:
            reached("intent")
            request = provider.encode(call.rows)
        except Exception:
            self._schedule.release(self._clock(), call)
            raise
        if not await self._intend(call):
            return
        started = self._clock()
        try:
            reached("send")
            answer = await self._client.send(request, self._timeout_s)
            reached("reply")
            ended = self._clock()
            if (turn := self._turns.next(len(call.rows))) is not None:
                await turn
            if isinstance(answer, Fault):
                result: Reply | Fault = self._redactor.fault(answer)
            else:
                result = provider.decode(call.rows, self._redactor.response(answer))
            adapted = isinstance(result, Fault) and provider.adapt(call.rows, result)
            self._tell(provider.notice)
            costs = self._costs(call, result)
        except Exception:
            unread = Fault("garbled", "batchrun could not read the reply", maybe_processed=True)
            self._schedule.settle(self._clock(), call, unread)  # its intent stays open: the row is in doubt
            raise
        now = self._clock()
        known = [cost for cost in costs.values() if cost is not None]
        total = sum(known, _ZERO) if costs and len(known) == len(costs) else None
        settlement = self._schedule.settle(now, call, result, cost_usd=total, adapted=adapted)
        self._held_bytes -= sum(len(row.body) for row in (*settlement.succeeded, *settlement.failed))
        timing = settle.Timing(call, started, ended, self._wall())
        reached("settle")
        self._keep(self._operations(call, result, settlement, costs, timing))

    async def _intend(self, call: Call) -> bool:
        """Makes a call's intents durable. Returns whether it may be sent."""
        at, reserved = self._wall(), call.reserved_usd
        intents: list[Operation] = []
        if call.opened is not None:
            intents.append(call.opened)
            call.opened = None
        for row in call.rows:
            counts = row is call.rows[0]
            intents.append(Sent(row.line, call.sends, call.attempts, reserved, at, row.custom_id, counts))
            reserved = _ZERO  # of a call, once
        try:
            await self._store.commit(intents)
        except BatchrunError as error:
            self._schedule.release(self._clock(), call)
            self._fail(error)
            return False
        self._counters.sent += 1
        self._counters.retried += call.sends > 1
        return True

    # ---------------------------------------------------------------- keeping

    def _costs(self, call: Call, result: Reply | Fault) -> dict[int, Decimal | None]:
        """Returns what each row's answer cost by its line; for a Fault that states its usage, by the first row's."""
        if isinstance(result, Fault):
            if result.usage is None:
                return {}
            return {call.rows[0].line: self._prices.price(call.rows[0].model, result.usage)}
        costs: dict[int, Decimal | None] = {}
        for row in call.rows:
            output = result.outputs.get(row.custom_id)
            if output is None:
                continue
            cost = None
            if output.usage is not None:
                cost = self._prices.price(row.model, output.usage, service_tier=result.service_tier)
                self._calibration.observe(row.model, row.tokens, output.usage.input_tokens)
            costs[row.line] = output.cost_usd if cost is None else cost
        return costs

    def _operations(
        self,
        call: Call,
        result: Reply | Fault,
        settlement: Settlement,
        costs: Mapping[int, Decimal | None],
        timing: settle.Timing,
    ) -> list[Operation]:
        """Returns what is to be kept of a call that ended: an operation for each of its rows."""
        operations: list[Operation] = []
        lost = settlement.lost_usd  # of a call, once: its first row bears it
        if isinstance(result, Reply):
            for row in settlement.succeeded:
                output = result.outputs[row.custom_id]
                cost = costs[row.line]
                saved = self._saved(row, result, output, cost)
                operations.append(settle.succeeded(row, call, result, output, cost, lost, timing, saved))
                lost = _ZERO
        fault = settlement.fault
        if fault is None:
            return operations
        cost = costs.get(call.rows[0].line) if isinstance(result, Fault) else None
        for row in settlement.failed:
            operations.append(settle.failed(row, self._input(row), call, fault, cost, lost, timing))
            lost, cost = _ZERO, None
        waiting = [(row, again) for again in settlement.again for row in again.rows]
        counts, split = not settlement.failed, settlement.again not in ((), (call,))
        for row, counted in waiting + [(row, call) for row in settlement.held]:
            operations.append(settle.returned(row, counted, fault, cost, lost, timing, counts=counts, split=split))
            lost, cost, counts = _ZERO, None, False
        return operations

    def _saved(self, row: Row, reply: Reply, output: Output, cost: Decimal | None) -> Decimal:
        """Returns what the provider's cache took off the price of an answer; 0 where that is unknown."""
        usage = output.usage
        if cost is None or usage is None or not (usage.cached_tokens or usage.cache_write_tokens):
            return _ZERO
        uncached = Usage(usage.input_tokens, usage.output_tokens, reasoning_tokens=usage.reasoning_tokens)
        full = self._prices.price(row.model, uncached, service_tier=reply.service_tier)
        return _ZERO if full is None else full - cost

    def _input(self, row: Row) -> bytes:
        """Returns a row's input line as JSON; null, and the run stops, where the input is no longer what it was."""
        try:
            return input_as_json(self._reader.line(row.line))
        except BatchrunError as error:
            self._fail(error)
            return b"null"

    def _keep(self, operations: list[Operation]) -> None:
        """Hands operations to the store without waiting: the next intent waits behind them."""
        if not operations:
            return

        def done(future: asyncio.Future[None]) -> None:
            self._commits.discard(future)
            error = None if future.cancelled() else future.exception()
            if isinstance(error, BatchrunError):
                self._uncommitted.extend(operations)
                self._fail(error)
            else:  # only what is durable is shown as done
                for operation in operations:
                    self._counters.add(operation)

        commit = self._store.commit(operations)
        self._commits.add(commit)
        commit.add_done_callback(done)

    def _tell(self, notice: str | None) -> None:
        """Says once what a codec has noticed of its server."""
        if notice is not None and notice not in self._told:
            self._told.add(notice)
            self._console.notice(notice)

    def _notes(self) -> list[Operation]:
        offset = self._wall() - self._clock()
        notes = self._schedule.notes()
        for note in notes:
            self._console.debug(note.text) if note.what != "notice" else self._console.notice(note.text)
        return [Noted(note.at_now + offset, note.what, note.text) for note in notes]

    # ---------------------------------------------------------------- feeding

    async def _feed(self) -> None:
        """Opens the next batch whenever the schedule has room, until there are none or the run stops."""
        try:
            while self._schedule.stop is None:
                now = self._clock()
                full = self._held_bytes >= _HELD_BYTES
                if self._schedule.wants(now) <= 0 or full:
                    self._hungry = anyio.Event()
                    await self._hungry.wait()
                    continue
                prepared = await anyio.to_thread.run_sync(next, self._batches, None, abandon_on_cancel=True)
                if prepared is None:
                    break
                batch, now = prepared.batch, self._clock()
                for call in prepared.calls:
                    call.ready_at = now
                self._held_bytes += sum(len(row.body) for row in batch.rows)
                if prepared.opened is not None:
                    self._keep([prepared.opened])
                self._schedule.offer(now, prepared.calls)
                self._pump()
        except BatchrunError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a defect: what is in flight has been paid for
            self._break(error)
        self._schedule.close()
        self._pump()

    async def _receive(self, stream: Stream) -> None:
        """Takes in what arrives until the input ends or the run stops; what has been read is durable then."""

        def keep(operations: Sequence[Operation], rows: int) -> None:
            anyio.from_thread.run(self._take_in, operations, rows)

        try:
            await anyio.to_thread.run_sync(stream.receive, keep)
        except BatchrunError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a defect: what is in flight has been paid for
            self._break(error)

    async def _take_in(self, operations: Sequence[Operation], rows: int) -> None:
        await self._store.commit(operations)
        self._counters.total += rows
        for operation in operations:
            self._counters.add(operation)
        if failed := sum(isinstance(operation, Settled) for operation in operations):
            self._schedule.fail_unsent(failed)
            self._pump()

    # ---------------------------------------------------------------- telling

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(_TICK_S)
            now = self._clock()
            self._rates.note(now, self._counters)
            self._console.update(self._standing())
            notes = self._notes()
            if now - self._sampled >= _SAMPLE_S:
                notes.append(self._sample())
            self._keep(notes)

    def _sample(self) -> Sampled:
        now = self._clock()
        counters, base = self._counters, self._sample_base
        self._sample_base = replace(counters)
        since, self._sampled = now - self._sampled, now
        return Sampled(
            at=self._wall(),
            elapsed_s=since,
            in_flight=self._schedule.in_flight,
            limit=self._schedule.limit,
            done=counters.succeeded + counters.failed - base.succeeded - base.failed,
            sent=counters.sent - base.sent,
            refused=counters.refused - base.refused,
            tokens=counters.tokens - base.tokens,
            paused_s=since if self._schedule.binding.startswith(("paused", "breaker")) else 0.0,
            binding=self._schedule.binding,
        )

    def _standing(self) -> Standing:
        counters = self._counters
        rows_per_s, tokens_per_s = self._rates.per_second()
        left = counters.total - counters.succeeded - counters.failed
        return Standing(
            total=counters.total,
            succeeded=counters.succeeded,
            failed=counters.failed,
            in_flight=self._schedule.in_flight,
            limit=self._schedule.limit,
            sent=counters.sent,
            retried=counters.retried,
            refused=counters.refused,
            tokens=counters.tokens,
            cost_usd=counters.cost_usd,
            spent_usd=self._schedule.spent_usd,
            budget_usd=self._budget_usd,
            rows_per_s=rows_per_s,
            tokens_per_s=tokens_per_s,
            elapsed_s=self._clock() - self._started,
            eta_s=left / rows_per_s if rows_per_s > 0 and (self._stream is None or self._stream.ended) else None,
            binding=self._schedule.binding,
            cost_unknown_rows=counters.cost_unknown_rows,
        )


_ZERO = Decimal(0)


class _Rates:
    """Rows and tokens per second over the last half minute."""

    _WINDOW_S = 30.0

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()

    def note(self, now: float, counters: Counters) -> None:
        self._points.append((now, counters.succeeded + counters.failed, counters.tokens))
        while self._points[-1][0] - self._points[0][0] > self._WINDOW_S:
            self._points.popleft()

    def per_second(self) -> tuple[float, float]:
        (then, rows, tokens), (now, rows_now, tokens_now) = self._points[0], self._points[-1]
        since = now - then
        return ((rows_now - rows) / since, (tokens_now - tokens) / since) if since > 0 else (0.0, 0.0)
