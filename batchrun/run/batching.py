"""Rows on their way to the schedule: counted, priced at their worst, packed, a call made for each.

Runs on a thread, ahead of sending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal

import orjson

from batchrun.errors import BatchrunError, Exit
from batchrun.intake.tokens import Calibration
from batchrun.plan.pack import PackBudget, Packer
from batchrun.records import Batch, Call, Prices, Row
from batchrun.run.source import RowReader
from batchrun.run.store import Intent

__all__ = ["UNLIMITED_OUTPUT_TOKENS", "Prepared", "prepare", "worst_price"]

UNLIMITED_OUTPUT_TOKENS = 131_072
"""Output reserved under a budget for a row that names no limit: no current model writes more in one answer (128 Ki)."""


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
    budget: PackBudget,
) -> Iterator[Prepared]:
    """Yields the pending rows in batches, larger priority first."""
    before = {intent.line: intent for intent in intents}

    def prepared(batch: Batch) -> Prepared:
        return Prepared(batch, [call(row, batch.id) for row in batch.rows])

    def call(row: Row, batch: int) -> Call:
        known = before.get(row.line)
        sends, attempts = (known.sends, known.attempts) if known is not None else (0, 0)
        tokens = calibration.correct(row.model, row.tokens)
        return Call((row,), batch, tokens, Decimal(0), row.priority, sends, attempts)

    packer = Packer(budget)
    for rows in reader.pending():
        for row in rows:
            row.tokens = count(row)
            packer.add(row, calibration.correct(row.model, row.tokens) + (row.max_output or 0))
            while (batch := packer.pack()) is not None:
                yield prepared(batch)
    for batch in packer.flush():
        yield prepared(batch)


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
