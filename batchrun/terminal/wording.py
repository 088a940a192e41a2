"""A run in words: numbers for people, on one line each, inert in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from batchrun.records import Standing
from batchrun.report.inert import sanitize
from batchrun.report.sections import money, packing_facts, seconds

__all__ = [
    "estimate_listing",
    "inert",
    "listing",
    "progress_details",
    "progress_line",
    "progress_numbers",
    "progress_rows",
]

_LONGEST_LINE = 4_000
"""Characters: enough for any reason, too few for a reply of megabytes to fill a terminal."""


def inert(text: str) -> str:
    """Returns the text on one line, without anything that acts upon a terminal."""
    return str(sanitize(text, _LONGEST_LINE))


def progress_line(standing: Standing) -> str:
    """Returns how a run stands, as one plain line."""
    return inert(", ".join((progress_rows(standing), *progress_details(standing))))


def progress_rows(standing: Standing) -> str:
    """Returns how far a run has come."""
    done = standing.succeeded + standing.failed
    share = f" ({100 * done // standing.total}%)" if standing.total else ""
    eta = f", ETA {seconds(standing.eta_s)}" if standing.eta_s is not None else ""
    return f"{done:,}/{standing.total:,} rows{share}{eta}"


def progress_details(standing: Standing) -> list[str]:
    """Returns how fast it goes, what it has cost, and what bounds it."""
    details = [
        f"{standing.rows_per_s:,.1f} rows/s",
        f"{standing.tokens_per_s:,.0f} tokens/s",
        f"in flight {standing.in_flight:,}/{standing.limit:,}",
        _cost(standing),
        f"{standing.retried:,} retried",
    ]
    if standing.failed:
        details.append(f"{standing.failed:,} failed")
    if standing.binding:
        details.append(f"bound by {standing.binding}")
    return details


def progress_numbers(standing: Standing) -> dict[str, Any]:
    """Returns how a run stands, as JSON types and exact Decimals."""
    return {
        "rows": {"total": standing.total, "succeeded": standing.succeeded, "failed": standing.failed},
        "requests": {"sent": standing.sent, "retried": standing.retried, "refused": standing.refused},
        "in_flight": standing.in_flight,
        "limit": standing.limit,
        "tokens": standing.tokens,
        "cost_usd": standing.cost_usd,
        "cost_unknown_rows": standing.cost_unknown_rows,
        "spent_usd": standing.spent_usd,
        "budget_usd": standing.budget_usd,
        "rows_per_s": round(standing.rows_per_s, 3),
        "tokens_per_s": round(standing.tokens_per_s, 3),
        "elapsed_s": round(standing.elapsed_s, 3),
        "eta_s": None if standing.eta_s is None else round(standing.eta_s, 3),
        "binding": inert(standing.binding),
    }


def _cost(standing: Standing) -> str:
    if standing.budget_usd is not None:
        return f"{money(standing.spent_usd)} of {money(standing.budget_usd)}"
    if standing.cost_unknown_rows:
        known = f"{money(standing.cost_usd)} and " if standing.cost_usd else ""
        return f"{known}{standing.cost_unknown_rows:,} rows of unknown cost"
    return money(standing.cost_usd)


def listing(document: Mapping[str, Any]) -> str:
    """Returns a document of few entries as lines for people, inert: a name and its value each."""
    names = max((len(name) for name in document), default=0)
    lines = [f"{name.replace('_', ' '):<{names}}  {_plain(value)}" for name, value in document.items()]
    return "".join(f"{inert(line)}\n" for line in lines)


def estimate_listing(document: Mapping[str, Any]) -> str:
    """Returns an estimate as lines for people, with what packing would do in words.

    Nothing is said of packing and of the provider's cache where they do nothing.
    """
    told: dict[str, Any] = {}
    for name, value in document.items():
        if name == "packing":
            told |= {f"packing: {fact}": words for fact, words in packing_facts(value)} if value is not None else {}
        elif name != "cached" or value["tokens"]:
            told[name] = value
    return listing(told)


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_plain(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Decimal):
        return money(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    return "unknown" if value is None else str(value)
