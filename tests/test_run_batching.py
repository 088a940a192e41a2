"""Rows on their way to calls: which travel together, and how that is told."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from batchrun.config import Settings
from batchrun.providers.grouping import Packing
from batchrun.records import Batch, GroupKey, Opened, Row
from batchrun.run.batching import Packers


class Counting(Packing):
    """Counts how often it is asked about each row."""

    asked: ClassVar[Counter[int]] = Counter()

    def key(self, row: Row) -> GroupKey | None:
        self.asked[row.line] += 1
        return super().key(row)


EMBEDDINGS = Counting("embeddings", "embeddings", "/embeddings", 4, 1_000, 10_000)


def row(line: int, body: bytes = b'{"model":"m","input":"a"}', *, priority: int = 0) -> Row:
    return Row(line, f"r{line}", "embeddings", "m", body, 0, priority, tokens=10)


def packed(rows: list[Row], before: dict[int, tuple[int, int]] | None = None) -> list[tuple[Batch, Opened]]:
    packers = Packers(Settings(), {"embeddings": EMBEDDINGS})
    ready = [found for each in rows for found in packers.add(each, each.tokens, (before or {}).get(each.line, (0, 0)))]
    return [*ready, *packers.flush()]


def lines(batches: list[tuple[Batch, Opened]]) -> list[list[int]]:
    return [[each.line for each in batch.rows] for batch, _ in batches]


def test_what_a_row_shares_is_asked_once() -> None:
    EMBEDDINGS.asked.clear()
    packed([row(line) for line in range(1, 200)])
    assert set(EMBEDDINGS.asked.values()) == {1}
    assert len(EMBEDDINGS.asked) == 199


def test_a_batch_is_told_with_its_own_budget_and_way_of_travelling() -> None:
    array = b'{"model":"m","input":["a","b"]}'
    batches = packed([row(1), row(2, array), row(3), row(4), row(5), row(6)])
    assert lines(batches) == [[1, 3, 4, 5], [6], [2]]
    size = sum(EMBEDDINGS.size(row(line)) for line in (1, 3, 4, 5))
    assert [opened for _, opened in batches] == [
        Opened(1, 4, 40, size, 1_000, 4, 10_000, "rows", "embeddings"),
        Opened(2, 1, 10, size // 4, 1_000, 4, 10_000, "input", "embeddings"),
        Opened(3, 1, 10, len(array), 100_000, 1_000, 16 * 1024 * 1024, "input", None),
    ]


def test_rows_of_earlier_runs_and_of_other_priorities_keep_to_their_like() -> None:
    rows = [row(1), row(2), row(3, priority=1), row(4), row(5, priority=1)]
    assert lines(packed(rows, {2: (1, 0), 4: (1, 0)})) == [[1], [2, 4], [3, 5]]
