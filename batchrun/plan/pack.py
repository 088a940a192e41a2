"""Rows + budgets → batches (first version: next fit; replaced by the real packer)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchrun.records import Batch, Row

__all__ = ["PackBudget", "Packer"]


@dataclass(frozen=True, slots=True)
class PackBudget:
    """Most tokens, rows and bytes of a batch."""

    tokens: int
    rows: int
    bytes: int


class Packer:
    """Packs rows on demand."""

    def __init__(self, budget: PackBudget, look_ahead: int = 64) -> None:
        self._budget = budget
        self._look_ahead = look_ahead
        self._rows: list[tuple[Row, int]] = []
        self._next = 1

    def add(self, row: Row, tokens: int) -> None:
        """Takes a row in."""
        self._rows.append((row, tokens))

    def pack(self) -> Batch | None:
        """Returns a full batch, or None while more rows may still improve it."""
        if sum(t for _, t in self._rows) < self._budget.tokens and len(self._rows) < self._budget.rows:
            return None
        return self._take()

    def _take(self) -> Batch:
        rows, tokens, size = [], 0, 0
        while self._rows:
            row, t = self._rows[0]
            if rows and (
                tokens + t > self._budget.tokens
                or len(rows) >= self._budget.rows
                or size + len(row.body) > self._budget.bytes
            ):
                break
            rows.append(row)
            tokens += t
            size += len(row.body)
            del self._rows[0]
        batch = Batch(self._next, (rows[0].endpoint, rows[0].model), tuple(rows), tokens, size)
        self._next += 1
        return batch

    def flush(self) -> Iterator[Batch]:
        """Yields what is left."""
        while self._rows:
            yield self._take()
