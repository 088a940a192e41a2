"""Rows on their way to the schedule: counted, priced at their worst, packed, a call made for each.

Runs on a thread, ahead of sending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal

from batchrun.intake.tokens import Calibration
from batchrun.plan.pack import PackBudget, Packer
from batchrun.records import Batch, Call, Prices, Row
from batchrun.run.source import RowReader
from batchrun.run.store import Intent

__all__ = ["UNLIMITED_OUTPUT_TOKENS", "Prepared", "prepare"]

UNLIMITED_OUTPUT_TOKENS = 131_072
"""Output reserved under a budget for a row that names no limit: no current model writes more in one answer (128 Ki)."""

_MARGIN = Decimal("1.1")
"""Input reserved over the count: the bundled vocabulary is not every model's own."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch with a call for each of its rows, ready to be offered."""

    batch: Batch
    calls: list[Call]


def prepare(
    reader: RowReader,
    intents: Iterable[Intent],
    *,
    count: Callable[[Row], int],
    calibration: Calibration,
    prices: Prices | None,
    budget: PackBudget,
) -> Iterator[Prepared]:
    """Yields the pending rows in batches, larger priority first. ``prices`` is given where money must be reserved."""
    before = {intent.line: intent for intent in intents}

    def call(row: Row, batch: int) -> Call:
        tokens = calibration.correct(row.model, row.tokens)
        reserved = Decimal(0)
        if prices is not None:
            worst = prices.worst(row.model, _most_input(row, tokens, calibration), _most_output(row))
            reserved = worst if worst is not None else reserved
        known = before.get(row.line)
        sends, attempts = (known.sends, known.attempts) if known is not None else (0, 0)
        return Call((row,), batch, tokens, reserved, row.priority, sends, attempts)

    packer = Packer(budget)
    for rows in reader.pending():
        for row in rows:
            row.tokens = count(row)
            packer.add(row, calibration.correct(row.model, row.tokens) + (row.max_output or 0))
            while (batch := packer.pack()) is not None:
                yield Prepared(batch, [call(r, batch.id) for r in batch.rows])
    for batch in packer.flush():
        yield Prepared(batch, [call(r, batch.id) for r in batch.rows])


def _most_input(row: Row, tokens: int, calibration: Calibration) -> int:
    """Input that the provider will not exceed: the count under the worst ratio seen of the model, with a margin."""
    return int(max(tokens, row.tokens * calibration.highest(row.model)) * _MARGIN) + 16


def _most_output(row: Row) -> int:
    return UNLIMITED_OUTPUT_TOKENS if row.max_output is None else row.max_output
