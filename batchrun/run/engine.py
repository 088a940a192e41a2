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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

import anyio
import anyio.abc

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
    Opened,
    Operation,
    Prices,
    Reply,
    Sampled,
    Sent,
    Standing,
)
from batchrun.run import settle
from batchrun.run.batching import Prepared
from batchrun.run.progress import Console
from batchrun.run.source import RowReader, input_as_json
from batchrun.run.store import Store

__all__ = ["Client", "Counters", "Engine"]

_TICK_S = 0.2
"""Progress is refreshed this often."""

_SAMPLE_S = 5.0
"""The report's timeline has a point this often."""

_SIGNALS: Mapping[signal.Signals, Exit] = {
    signal.SIGINT: Exit.SIGINT,
    signal.SIGTERM: Exit.SIGTERM,
    signal.SIGHUP: Exit.SIGHUP,
}


class Client(Protocol):
    """Sends one request. Outcomes are values: whatever goes wrong on the way is a Fault."""

    async def send(self, request: HttpRequest, timeout_s: float) -> HttpResponse | Fault:
        """Returns what came back within ``timeout_s``, or why nothing did."""

    async def aclose(self) -> None:
        """Closes all connections."""


@dataclass(slots=True)
class Counters:
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


class Engine:
    """Runs the pending rows of one job to the end, or to a stop.

    ``batches`` yields what to send and may block: it is advanced on a thread. ``secret`` is the key, taken out of
    whatever is written. Returns from ``run`` only when nothing is in flight and all that came back is durable.
    """

    def __init__(
        self,
        *,
        store: Store,
        reader: RowReader,
        batches: Iterator[Prepared],
        schedule: Schedule,
        provider: Provider,
        client: Client,
        prices: Prices,
        calibration: Calibration,
        counters: Counters,
        console: Console,
        timeout_s: float,
        grace_s: float,
        batch_tokens: int,
        budget_usd: Decimal | None,
        secret: str | None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._reader = reader
        self._batches = batches
        self._schedule = schedule
        self._provider = provider
        self._client = client
        self._prices = prices
        self._calibration = calibration
        self._counters = counters
        self._console = console
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._batch_tokens = batch_tokens
        self._budget_usd = budget_usd
        self._secret = (secret or "").encode()
        self._clock = clock
        self._wall = wall
        self._parked: list[asyncio.Future[Call | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._commits: set[asyncio.Future[None]] = set()
        self._uncommitted: list[Operation] = []
        self._error: BatchrunError | None = None
        self.left_at_once = False
        self._rates = _Rates()

    # ---------------------------------------------------------------- the life of a run

    async def run(self) -> Stop | None:
        """Runs to the end. Returns why it stopped early, or None. Raises: BatchrunError (storage, changed input)."""
        loop = self._loop = asyncio.get_running_loop()
        self._finished = anyio.Event()
        self._hungry = anyio.Event()
        self._started = self._sampled = self._clock()
        self._rates.note(self._started, self._counters)
        self._sample_base = _copy(self._counters)
        self._store.start(loop)
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._feed)
                self._tasks.start_soon(self._tick)
                self._pump()
                await self._finished.wait()
                self._tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:  # a defect: say what happened, not that something did
            raise group.exceptions[0] from None
        finally:
            for handle in (self._timer, self._grace):
                if handle is not None:
                    handle.cancel()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            with anyio.CancelScope(shield=True):
                await self._client.aclose()
            self._keep([self._sample(), *self._notes()])
            self._store.stop()
            await asyncio.gather(*self._commits, return_exceptions=True)
            self._console.update(self._standing())
        if self._error is not None:
            if self._error.exit_code == Exit.STORAGE:
                self._store.salvage(self._uncommitted)
            raise self._error
        return self._schedule.stop

    def _on_signal(self, number: signal.Signals) -> None:
        if self._schedule.stop is None:
            in_flight = self._schedule.in_flight
            self._console.warn(
                f"{number.name}: sending nothing more; {in_flight} in flight may land for {self._grace_s:g} s"
                " (again to leave at once)"
            )
            self._schedule.drain(self._clock(), Stop("interrupted", _SIGNALS[number], f"{number.name} received"))
            self._pump()
        else:
            self._leave()

    def _leave(self) -> None:
        """Stops waiting for what is in flight; those rows are in doubt, as their open intents say."""
        self.left_at_once = True
        self._finished.set()

    def _fail(self, error: BatchrunError) -> None:
        """Fail-stop: nothing more is sent; what is in flight may still land."""
        if self._error is None:
            self._error = error
            self._schedule.drain(self._clock(), Stop("storage", error.exit_code, error.message))
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
            if isinstance(decision, Send):
                self._hand_out(decision.call)
                continue
            if isinstance(decision, Sleep):
                self._wake_at(now, decision.until)
            elif isinstance(decision, Done):
                self._finished.set()
            elif isinstance(decision, Idle):
                pass
            break
        if schedule.stop is not None:
            if self._grace is None:
                self._grace = self._loop.call_later(self._grace_s, self._leave)
        elif schedule.wants(now) > 0:
            self._hungry.set()

    def _wake_at(self, now: float, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, until - now), self._pump)

    def _hand_out(self, call: Call) -> None:
        if self._parked:
            self._parked.pop().set_result(call)
        else:
            self._tasks.start_soon(self._work, call)

    async def _work(self, call: Call) -> None:
        """A worker: serves calls one after the other for as long as the run lasts."""
        while True:
            await self._serve(call)
            place: asyncio.Future[Call] = self._loop.create_future()
            self._parked.append(place)  # type: ignore[arg-type]
            self._pump()
            call = await place

    async def _serve(self, call: Call) -> None:
        request = self._provider.encode(call.rows)
        at = self._wall()
        intents = [
            Sent(row.line, call.sends, call.attempts, call.reserved_usd if first else _ZERO, at, row.custom_id)
            for first, row in zip((True, *(False for _ in call.rows)), call.rows, strict=False)
        ]
        try:
            await self._store.commit(intents)
        except BatchrunError as error:
            self._schedule.release(self._clock(), call)
            self._fail(error)
            return
        self._counters.sent += 1
        self._counters.retried += call.sends > 1
        started = self._clock()
        answer = await self._client.send(request, self._timeout_s)
        result = answer if isinstance(answer, Fault) else self._provider.decode(call.rows, answer)
        now = self._clock()
        adapted = isinstance(result, Fault) and self._provider.adapt(call.rows, result)
        costs = self._costs(call, result)
        known = [cost for cost in costs.values() if cost is not None]
        total = sum(known, _ZERO) if len(known) == len(costs) and costs else None
        settlement = self._schedule.settle(now, call, result, cost_usd=total, adapted=adapted)
        timing = settle.Timing(call, started, now, self._wall())
        self._keep(self._operations(call, result, settlement, costs, timing))

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
        counters = self._counters
        operations: list[Operation] = []
        secret = self._secret
        if isinstance(result, Reply):
            for row in settlement.succeeded:
                output = result.outputs[row.custom_id]
                cost = costs[row.line]
                operations.append(settle.succeeded(row, call, result, output, cost, timing, secret))
                counters.succeeded += 1
                if cost is None:
                    counters.cost_unknown_rows += 1
                else:
                    counters.cost_usd += cost
                if output.usage is not None:
                    counters.tokens += output.usage.input_tokens + output.usage.output_tokens
        fault = settlement.fault
        if fault is None:
            return operations
        if not fault.maybe_processed and fault.connected and fault.kind in ("rate_limited", "overloaded"):
            counters.refused += 1
        lost, cost = settlement.lost_usd, costs.get(call.rows[0].line)
        if cost is not None:
            counters.cost_usd += cost
        for row in settlement.failed:
            line = input_as_json(self._reader.line(row.line))
            operations.append(settle.failed(row, line, call, fault, cost, lost, timing, secret))
            counters.failed += 1
            lost, cost = _ZERO, None  # of a call, once
        for waiting in (
            *settlement.again,
            *([Call(settlement.held, 0, 0, _ZERO)] if settlement.held else ()),
        ):
            counted = waiting if waiting.sends else call
            for row in waiting.rows:
                operations.append(settle.returned(row, counted, fault, cost, lost, timing, secret))
                lost, cost = _ZERO, None
        return operations

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

        commit = self._store.commit(operations)
        self._commits.add(commit)
        commit.add_done_callback(done)

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
                if self._schedule.wants(now) <= 0:
                    self._hungry = anyio.Event()
                    await self._hungry.wait()
                    continue
                prepared = await anyio.to_thread.run_sync(next, self._batches, None)
                if prepared is None:
                    break
                batch, now = prepared.batch, self._clock()
                for call in prepared.calls:
                    call.ready_at = now
                opened = Opened(batch.id, len(batch.rows), batch.tokens, batch.bytes, self._batch_tokens)
                self._keep([opened])
                self._schedule.offer(now, prepared.calls)
                self._pump()
        except BatchrunError as error:
            self._fail(error)
        self._schedule.close()
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
        self._sample_base = _copy(counters)
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
            eta_s=left / rows_per_s if rows_per_s > 0 else None,
            binding=self._schedule.binding,
            cost_unknown_rows=counters.cost_unknown_rows,
        )


_ZERO = Decimal(0)


def _copy(counters: Counters) -> Counters:
    return Counters(**{name: getattr(counters, name) for name in Counters.__slots__})


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
