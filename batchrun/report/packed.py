"""What packing did: its part of the fold, and the figures that reports and estimates tell under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Any

from batchrun.records import Opened, Returned, Sent

__all__ = ["MONEY", "Packed", "packing_figures"]

MONEY = Context(prec=100)
"""Wide enough that no sum of prices is ever rounded; the default 28 digits would round one."""


class Packed:
    """Counts the batches whose rows share a call, and what their calls saved and cost beyond one row per call."""

    __slots__ = (
        "batches", "bound", "budget_bytes", "budget_rows", "budget_tokens", "bytes", "joined", "rows", "rows_alone",
        "shapes", "split_calls", "split_lost_usd", "split_usd", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.batches = 0
        self.rows = 0
        self.tokens = 0
        self.bytes = 0
        self.budget_tokens = 0
        """Of all these batches together; likewise ``budget_rows`` and ``budget_bytes``."""
        self.budget_rows = 0
        self.budget_bytes = 0
        self.bound: dict[str, int] = {}
        """What ended a batch → batches."""
        self.shapes: dict[str, int] = {}
        """Packing → batches."""
        self.rows_alone = 0
        """Rows of other batches: each has a call of its own."""
        self.joined = 0
        """Rows that went out for the first time in the call of another row."""
        self.split_calls = 0
        """Calls that failed or were answered in part for the sake of some rows, and went on as several."""
        self.split_usd = Decimal(0)
        """Known cost of those that gave no answer."""
        self.split_lost_usd = Decimal(0)
        """Reservations of those, which stay spent because they may have been billed."""

    def opened(self, opened: Opened) -> None:
        """Takes a batch into account: one that was sent, if its rows share a call."""
        if opened.packing is None:
            self.rows_alone += opened.rows
            return
        self.batches += 1
        self.rows += opened.rows
        self.tokens += opened.tokens
        self.bytes += opened.bytes
        self.budget_tokens += opened.budget_tokens
        self.budget_rows += opened.budget_rows
        self.budget_bytes += opened.budget_bytes
        self.bound[opened.bound] = self.bound.get(opened.bound, 0) + 1
        self.shapes[opened.packing] = self.shapes.get(opened.packing, 0) + 1

    def rode_along(self, sent: Sent) -> None:
        """Takes a row into account that is sent in the call of another."""
        self.joined += sent.send == 1

    def split(self, returned: Returned) -> None:
        """Takes a call into account that goes on as several."""
        self.split_calls += 1
        self.split_usd = MONEY.add(self.split_usd, returned.cost_usd or 0)
        self.split_lost_usd = MONEY.add(self.split_lost_usd, returned.lost_usd)

    def dump(self) -> dict[str, Any]:
        """Returns the state as plain JSON types; money as strings."""
        state: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        state |= {name: str(state[name]) for name in _MONIES}
        return state | {name: state[name].copy() for name in _COUNTS}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Packed:
        """Returns what ``dump`` was of."""
        packed = cls()
        for name, value in state.items():
            setattr(packed, name, Decimal(value) if name in _MONIES else value.copy() if name in _COUNTS else value)
        return packed


_MONIES = ("split_usd", "split_lost_usd")
_COUNTS = ("bound", "shapes")


def packing_figures(
    packed: Packed, *, rows: int, calls: int, repeated: int, cost_usd: Decimal, rpm: int | None
) -> dict[str, Any] | None:
    """Returns what packing did beside one row per call; None where no batch was to share a call.

    ``rows`` were asked, in ``calls``, of which ``repeated`` repeat something. One row per call takes as many calls as
    there are rows, and repeats of its own, of which nobody knows: so no fewer calls than ``calls_saved`` were saved.
    Prices are per token and every row's tokens are sent in full, so the cost differs by what split calls cost, alone.
    ``rpm``: requests per minute that are known to be allowed.
    """
    if not packed.batches:
        return None
    used = {"tokens": packed.tokens, "rows": packed.rows, "bytes": packed.bytes}
    budget = {"tokens": packed.budget_tokens, "rows": packed.budget_rows, "bytes": packed.budget_bytes}
    fill = {name: part / budget[name] for name, part in used.items()}
    return {
        "shapes": dict(sorted(packed.shapes.items())),
        "batches": packed.batches,
        "rows_alone": packed.rows_alone,
        "rows_per_batch": packed.rows / packed.batches,
        **used,
        "budget": budget,
        "fill": fill,
        "binds": max(fill, key=lambda name: fill[name]),
        "bound_by": dict(sorted(packed.bound.items(), key=lambda item: (-item[1], item[0]))),
        "calls": calls,
        "calls_one_by_one": rows,
        "calls_saved": rows - calls,
        "calls_repeated": repeated,
        "calls_split": packed.split_calls,
        "cost_usd": cost_usd,
        "cost_one_by_one_usd": MONEY.subtract(cost_usd, packed.split_usd),
        "cost_lost_usd": packed.split_lost_usd,
        "rpm": rpm,
        "rpm_s": None if rpm is None else calls / rpm * 60,
        "rpm_one_by_one_s": None if rpm is None else rows / rpm * 60,
    }
