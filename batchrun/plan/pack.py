"""Rows + budgets → batches: arrival order, finished exactly by a subset sum over the rows just ahead.

Sorting by size would pile small rows into batches that the row limit ends, and let them wait; so rows are taken as
they come, and only the last part of a batch is chosen. Same input, same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf

import msgspec

from batchrun.records import Batch, Bound, GroupKey, Row

__all__ = ["PackBudget", "Packer"]

LEVELS = 2_048
"""Resolution of the subset sum: sizes are rounded up to so many parts of what is left, so no batch overflows."""
CHOSEN_SHARE = 0.6
"""At most this share of a budget is filled by choice; the rest in order."""
HELD_BYTES = 32 * 1024 * 1024
"""Bytes of rows that wait to be packed, or two batches' where that is more."""


class PackBudget(msgspec.Struct, frozen=True):
    """Most tokens, rows and bytes of a batch."""

    tokens: int
    rows: int
    bytes: int


class Packer:
    """Packs rows into batches, each row into exactly one.

    No batch exceeds a budget, except that of a single row which alone does (``batch.tokens`` then says so). The
    oldest row of a group always seeds its next batch, so nothing waits for more than ``look_ahead`` batches of its own.
    Memory is bounded: where more than ``HELD_BYTES`` wait, or more than ``max_groups`` kinds of rows, a group goes out
    as it is: of too many bytes the one that has most of them, of too many groups the one open for longest.
    """

    def __init__(
        self,
        budget: PackBudget,
        look_ahead: int = 64,
        max_groups: int = 512,
    ) -> None:
        self.budget = budget
        self._most_held = max(HELD_BYTES, 2 * budget.bytes)
        self._held = 0
        self._look_ahead = look_ahead
        self._max_groups = max_groups
        self._groups: dict[GroupKey, _Group] = {}
        self._touched: _Group | None = None
        self._packed: deque[Batch] = deque()
        self._next_id = 1

    def add(self, row: Row, tokens: int, size: int | None = None, key: GroupKey | None = None, at: float = 0.0) -> None:
        """Takes a row in: ``tokens`` for its input and its reserved output, ``size`` in bytes (its body's if None).

        Only rows of one ``key`` travel together; None: those of one endpoint and model. ``at`` is the second at which
        it arrived, no earlier than that of the row before it in its group.
        """
        if key is None:
            key = (row.endpoint, row.model)
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) == self._max_groups:
                self._flush(next(iter(self._groups)), "groups")
            group = self._groups[key] = _Group(self.budget, key)
        if size is None:
            size = len(row.body)
        group.add(_Item(row, tokens, size, at))
        self._touched = group
        self._held += size
        if self._held > self._most_held:
            self._flush(max(self._groups, key=lambda key: self._groups[key].bytes), "groups")

    def pack(self) -> Batch | None:
        """Returns the next batch, or None while more rows may still improve it."""
        if self._packed:
            return self._packed.popleft()
        if self._touched is not None and self._touched.fill(self._look_ahead):
            return self._close(self._touched, None)
        return None

    @property
    def oldest_at(self) -> float:
        """When the row that has waited for longest arrived; infinity where none waits."""
        return min((group.oldest_at for group in self._groups.values()), default=inf)

    def flush(self, until: float = inf) -> Iterator[Batch]:
        """Yields all that is left, well packed, of the groups whose oldest row arrived by ``until``."""
        for key, group in list(self._groups.items()):
            if group.oldest_at <= until:
                self._flush(key, "input" if until == inf else "interval")
        while self._packed:
            yield self._packed.popleft()

    def _flush(self, key: GroupKey, why: Bound) -> None:
        group = self._groups.pop(key)
        if self._touched is group:
            self._touched = None
        while group.fill(0):
            self._packed.append(self._close(group, why))

    def _close(self, group: _Group, flushed: Bound | None) -> Batch:
        """Returns the open batch. ``flushed``: why no row comes after those that are there; None: some may."""
        items = group.finish()
        tokens, size = sum(item.tokens for item in items), sum(item.bytes for item in items)
        share, bound = self._scarcest(len(items), tokens, size)
        if flushed is not None and share < 1 and group.is_empty:
            bound = flushed
        batch = Batch(self._next_id, group.key, tuple(item.row for item in items), tokens, size, bound)
        self._next_id += 1
        self._held -= size
        return batch

    def _scarcest(self, rows: int, tokens: int, size: int) -> tuple[float, Bound]:
        """Returns the part of the budget that is used up most, after its share."""
        budget = self.budget
        shares: tuple[tuple[float, Bound], ...] = (
            (tokens / budget.tokens, "tokens"),
            (rows / budget.rows, "rows"),
            (size / budget.bytes, "bytes"),
        )
        return max(shares, key=lambda part: part[0])


class _Item:
    __slots__ = ("at", "bytes", "row", "tokens")

    def __init__(self, row: Row, tokens: int, size: int, at: float) -> None:
        self.at = at
        self.row = row
        self.tokens = tokens
        self.bytes = size


class _Group:
    """The open batch of rows that may travel together, and the rows ahead of it."""

    __slots__ = ("_ahead", "_ahead_bytes", "_ahead_tokens", "_budget", "_bytes", "_taken", "_tokens", "key")

    def __init__(self, budget: PackBudget, key: GroupKey) -> None:
        self.key = key
        self._budget = budget
        self._taken: list[_Item] = []
        self._tokens = budget.tokens
        """What is left of the budget; likewise ``_bytes``."""
        self._bytes = budget.bytes
        self._ahead: deque[_Item] = deque()
        self._ahead_tokens = 0
        self._ahead_bytes = 0

    @property
    def oldest_at(self) -> float:
        """When its oldest row arrived: the one that seeds its open batch, or the next. Infinity where it has none."""
        waiting = self._taken or self._ahead
        return waiting[0].at if waiting else inf

    def add(self, item: _Item) -> None:
        self._ahead.append(item)
        self._ahead_tokens += item.tokens
        self._ahead_bytes += item.bytes

    def fill(self, look_ahead: int) -> bool:
        """Takes rows in order until the rest can be chosen from those ahead; says whether it came so far.

        At least ``look_ahead`` rows stay ahead of the open batch.
        """
        while len(self._ahead) > look_ahead:
            if self._taken and (self._is_choice() or not self._fits(self._ahead[0])):
                return True
            self._take(self._ahead.popleft())
            if len(self._taken) == self._budget.rows or self._tokens <= 0 or self._bytes <= 0:
                return True
        return look_ahead == 0 and bool(self._taken)

    @property
    def bytes(self) -> int:
        """Bytes of the open batch and of the rows ahead of it."""
        return self._budget.bytes - self._bytes + self._ahead_bytes

    @property
    def is_empty(self) -> bool:
        """Whether no row is ahead of the open batch."""
        return not self._ahead

    def finish(self) -> list[_Item]:
        """Chooses the rest of the open batch; returns its rows in order of arrival and opens the next."""
        for item in self._choose():
            self._take(item)
        taken = self._taken
        self._taken, self._tokens, self._bytes = [], self._budget.tokens, self._budget.bytes
        return taken

    def _is_choice(self) -> bool:
        """Whether little enough is left to be chosen well: not most of a budget, nor most of the rows ahead."""
        budget = self._budget
        return self._tokens <= min(CHOSEN_SHARE * budget.tokens, self._ahead_tokens / 2) or (
            self._bytes <= min(CHOSEN_SHARE * budget.bytes, self._ahead_bytes / 2)
        )

    def _fits(self, item: _Item) -> bool:
        return item.tokens <= self._tokens and item.bytes <= self._bytes

    def _take(self, item: _Item) -> None:
        self._taken.append(item)
        self._tokens -= item.tokens
        self._bytes -= item.bytes
        self._ahead_tokens -= item.tokens
        self._ahead_bytes -= item.bytes

    def _choose(self) -> list[_Item]:
        """Removes from the rows ahead those that fill what is left best, in the measure that is scarcer."""
        rows = self._budget.rows - len(self._taken)
        if rows <= 0 or self._tokens <= 0 or self._bytes <= 0:
            return []
        by_tokens = self._ahead_tokens * self._bytes >= self._ahead_bytes * self._tokens
        left = self._tokens if by_tokens else self._bytes
        unit = -(-left // LEVELS)
        fitting = [item for item in self._ahead if self._fits(item)]
        sizes = [-(-(item.tokens if by_tokens else item.bytes) // unit) for item in fitting]
        chosen = set(self._within(fitting, _best_subset(sizes, left // unit), rows))
        for place in self._within(fitting, (p for p in range(len(fitting)) if p not in chosen), rows, chosen):
            chosen.add(place)
        picked = [fitting[place] for place in sorted(chosen)]
        gone = set(map(id, picked))
        self._ahead = deque(item for item in self._ahead if id(item) not in gone)
        return picked

    def _within(
        self, items: list[_Item], places: Iterator[int], rows: int, before: set[int] | None = None
    ) -> Iterator[int]:
        """Yields those ``places`` whose items, taken one after the other, keep to all three budgets."""
        tokens, size = self._tokens, self._bytes
        for place in before or ():
            tokens -= items[place].tokens
            size -= items[place].bytes
            rows -= 1
        for place in places:
            item = items[place]
            if rows > 0 and item.tokens <= tokens and item.bytes <= size:
                rows -= 1
                tokens -= item.tokens
                size -= item.bytes
                yield place


def _best_subset(sizes: list[int], most: int) -> Iterator[int]:
    """Yields the places of a subset of ``sizes`` whose sum comes as near to ``most`` as any does, never above.

    Bit ``s`` of ``reach`` says that the sum ``s`` can be made of the sizes so far: one shift for each size.
    """
    mask = (1 << (most + 1)) - 1
    reach = 1
    before = []
    for size in sizes:
        before.append(reach)
        reach |= (reach << size) & mask
        if reach >> most:
            break
    total = reach.bit_length() - 1
    for place in range(len(before) - 1, -1, -1):
        if not (before[place] >> total) & 1:
            yield place
            total -= sizes[place]
