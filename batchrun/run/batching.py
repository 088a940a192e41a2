"""Rows on their way to the schedule: counted, priced at their worst, packed, a call made for each.

Runs on a thread, ahead of sending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from math import inf
from time import monotonic

import msgspec
import orjson
from msgspec.structs import replace

from batchrun.config import Settings
from batchrun.errors import BatchrunError, Exit
from batchrun.intake.tokens import Calibration
from batchrun.plan.pack import PackBudget, Packer
from batchrun.providers.packing import Packing
from batchrun.records import Batch, Call, Endpoint, Opened, Prices, Row
from batchrun.run.source import RowReader
from batchrun.run.stream import Queue
from batchrun.run.view import Intent

__all__ = ["UNLIMITED_OUTPUT_TOKENS", "Batching", "Packers", "Prepared", "worst_price"]

UNLIMITED_OUTPUT_TOKENS = 131_072
"""Output reserved under a budget for a row that names no limit: no current model writes more in one answer (128 Ki)."""


class Prepared(msgspec.Struct, frozen=True):
    """A batch with its calls, ready to be offered."""

    batch: Batch
    calls: list[Call]
    opened: Opened | None
    """How it is told of when it is opened; None where it is told of with its call."""


LIVE = PackBudget(100_000, 1_000, 16 * 1024 * 1024)
"""A batch in live mode: the window of rows that is opened next. Nothing but memory depends on its size."""


class Packers:
    """Packs rows into batches: those that can share a call by the shape that is there for it, others as live windows.

    ``packings`` tells the shape by endpoint. Batches are numbered from 1; each comes with how it is told of. The same
    rows and tokens give the same batches, whether they are to be sent or only estimated.
    """

    def __init__(self, settings: Settings, packings: Mapping[Endpoint, Packing]) -> None:
        self._packings = packings
        self._live = Packer(_budget(settings, LIVE))
        self._packers = {
            endpoint: Packer(_budget(settings, PackBudget(packing.max_tokens, packing.max_rows, packing.max_bytes)))
            for endpoint, packing in packings.items()
        }
        self._number = 0

    def add(
        self, row: Row, tokens: int, before: tuple[int, int] = (0, 0), at: float = 0.0
    ) -> Iterator[tuple[Batch, Opened]]:
        """Takes a row in; yields the batches that are ready.

        ``before``: its sends and attempts of earlier runs. ``at``: the second at which it arrived.
        """
        packing = self._packings.get(row.endpoint)
        shared = packing.key(row) if packing is not None else None
        if packing is None or shared is None:
            packing, packer = None, self._live
            packer.add(row, tokens)
        else:
            packer = self._packers[row.endpoint]
            # Rows of one call have one count of sends, so those of earlier runs keep to their like.
            packer.add(row, tokens, packing.size(row), (*shared, str(row.priority), str(before)), at)
        while (batch := packer.pack()) is not None:
            yield self._opened(batch, packer, packing)

    @property
    def oldest_at(self) -> float:
        """When the row arrived that has waited for longest for others to share its call; infinity where none does."""
        return min((packer.oldest_at for packer in self._packers.values()), default=inf)

    def flush(self, until: float = inf) -> Iterator[tuple[Batch, Opened]]:
        """Yields what is left in batches: all that travel alone, and of others the groups whose oldest came by then."""
        for endpoint, packer in self._packers.items():
            for batch in packer.flush(until):
                yield self._opened(batch, packer, self._packings[endpoint])
        for batch in self._live.flush():
            yield self._opened(batch, self._live, None)

    def _opened(self, batch: Batch, packer: Packer, packing: Packing | None) -> tuple[Batch, Opened]:
        self._number += 1
        batch = replace(batch, id=self._number)
        budget, name = packer.budget, None if packing is None else packing.name
        used = (len(batch.rows), batch.tokens, batch.bytes)
        return batch, Opened(batch.id, *used, budget.tokens, budget.rows, budget.bytes, batch.bound, name)


def _budget(settings: Settings, usual: PackBudget) -> PackBudget:
    """Returns a batch's budget: what the user said, else what is usual for its way of travelling."""
    return PackBudget(
        settings.batch_tokens or usual.tokens, settings.batch_rows or usual.rows, settings.batch_bytes or usual.bytes
    )


class Batching:
    """Makes batches of the pending rows, and calls of batches: one for all its rows where they share it, or one each.

    ``packings`` tells by endpoint in which shape rows can share a call; a row that cannot travels alone.
    """

    def __init__(
        self,
        reader: RowReader,
        intents: Iterable[Intent],
        *,
        count: Callable[[Row], int],
        calibration: Calibration,
        settings: Settings,
        packings: Mapping[Endpoint, Packing],
        arriving: Queue | None = None,
    ) -> None:
        """``arriving``: rows that come while the run is on, behind those of ``reader``."""
        self._reader = reader
        self._arriving = arriving
        self._interval_s = settings.flush_interval_s or 0.0
        self._held = 0
        self._before = {intent.line: (intent.sends, intent.attempts) for intent in intents}
        self._count = count
        self._calibration = calibration
        self._packers = Packers(settings, packings)

    def __iter__(self) -> Iterator[Prepared]:
        """Yields the pending rows in batches, larger priority first."""
        for row in self._reader.pending():
            yield from self._add(row, 0.0)
        if self._arriving is not None:
            yield from self._as_they_arrive(self._arriving)
        yield from self._flush(inf)

    def _as_they_arrive(self, queue: Queue) -> Iterator[Prepared]:
        """Yields batches for as long as rows come: full ones at once, others when their oldest row has waited so long.

        All that waits is looked at before a batch goes out that is not full. A row that travels alone never waits.
        """
        while True:
            oldest_at = self._packers.oldest_at
            count = queue.wait(oldest_at + self._interval_s, self._held)
            if count is None:
                return
            for _ in range(count):
                row, at = queue.pop()
                yield from self._add(row, at)
            # Where nothing came though it is not time yet, nothing can come.
            due = monotonic() - self._interval_s
            yield from self._flush(due if count or oldest_at <= due else inf)

    def _add(self, row: Row, at: float) -> Iterator[Prepared]:
        row.tokens = self._count(row)
        tokens = self._calibration.correct(row.model, row.tokens) + (row.max_output or 0)
        self._held += 1
        for batch, opened in self._packers.add(row, tokens, self._sent(row), at):
            yield self._prepared(batch, opened)

    def _flush(self, until: float) -> Iterator[Prepared]:
        for batch, opened in self._packers.flush(until):
            yield self._prepared(batch, opened)

    def _prepared(self, batch: Batch, opened: Opened) -> Prepared:
        self._held -= len(batch.rows)
        if opened.packing is None:
            return Prepared(batch, [self._call(batch.id, (row,)) for row in batch.rows], opened)
        call = self._call(batch.id, batch.rows)
        call.opened = opened
        return Prepared(batch, [call], None)

    def _call(self, batch: int, rows: tuple[Row, ...]) -> Call:
        first = rows[0]
        tokens = sum(self._calibration.correct(row.model, row.tokens) for row in rows)
        return Call(rows, batch, tokens, Decimal(0), first.priority, *self._sent(first))

    def _sent(self, row: Row) -> tuple[int, int]:
        """Returns a row's sends and attempts of earlier runs."""
        return self._before.get(row.line, (0, 0))


def worst_price(prices: Prices, calibration: Calibration) -> Callable[[Call], Decimal]:
    """Returns what prices a call at its worst, by what is known of its models just then.

    Input: under the worst ratio of actual to estimated tokens that any reply has shown, with a margin; before there are
    replies, the body's bytes, since no tokenizer makes more tokens than bytes. Output: all that the row allows.
    Raises: BatchrunError(78) where the price is unknown, so that the budget could not be kept.
    """

    def worst(call: Call) -> Decimal:
        return sum((_worst(row) for row in call.rows), Decimal(0))

    def _worst(row: Row) -> Decimal:
        most_input = calibration.most(row.model, row.tokens) or max(len(row.body), row.tokens)
        most_output = UNLIMITED_OUTPUT_TOKENS if row.max_output is None else row.max_output
        price = prices.worst(row.model, most_input, most_output, service_tier=_service_tier(row))
        if price is None:
            raise BatchrunError(
                f"--budget needs a price, and none is known for what line {row.line} asks of `{row.model}`",
                hint="give --price-in and --price-out, or take the service tier out of the row",
                exit_code=Exit.CONFIGURATION,
            )
        return price

    return worst


def _service_tier(row: Row) -> str | None:
    """The tier that a row asks for: a dearer one costs more than the list price."""
    if b'"service_tier"' not in row.body:
        return None
    tier = orjson.loads(row.body).get("service_tier")
    return tier if isinstance(tier, str) and tier not in ("auto", "default") else None
