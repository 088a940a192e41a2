"""The report as plain text for terminals, and the few lines that end a run."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from batchrun.report.inert import sanitize, width
from batchrun.report.sections import Table, money, seconds, sections

__all__ = ["final_summary", "text"]

_GAP = "  "
_SMALLEST_COLUMN = 8


def text(report: Mapping[str, Any], *, columns: int = 80, color: bool = False) -> str:
    """Returns the report, ending in a newline, in lines of at most ``columns``. ANSI only with ``color``."""
    lines = [_titled(f"batchrun report: {sanitize(report['job'], columns - 18)}", color=color)]
    for section in sections(report):
        lines += ["", _titled(section.title, color=color)]
        label = max((len(name) for name, _ in section.facts), default=0)
        for name, value in section.facts:
            lines += _wrapped(value, f"{_GAP}{name:<{label}}{_GAP}", columns)
        if section.table and section.table.rows:
            lines += [*[""] * bool(section.facts), *_table(section.table, columns)]
        for line in section.lines:
            lines += _wrapped(line, f"{_GAP}- ", columns)
    return "\n".join(lines) + "\n"


def final_summary(summary: Mapping[str, Any]) -> str:
    """Returns what a person wants to know when a run ends: at most 8 lines with their newlines, no ANSI."""
    rows, requests, tokens = summary["rows"], summary["requests"], summary["tokens"]
    latency = summary["latency_s"]
    counts = [f"{rows['succeeded']:,} succeeded", f"{rows['failed']:,} failed"]
    counts += [f"{rows[name]:,} {name.replace('_', ' ')}" for name in ("pending", "in_doubt") if rows[name]]
    cost = money(summary["cost_usd"])
    unknown = summary["cost_unknown_rows"]
    if unknown:
        cost += f", and {unknown:,} row{'s' * (unknown != 1)} of unknown cost"
    if summary["spent_usd"] != summary["cost_usd"]:
        cost += f"; {money(summary['spent_usd'])} counted as spent"
    if summary["budget_usd"] is not None:
        cost += f" of {money(summary['budget_usd'])} budget"
    time = f"{seconds(summary['elapsed_s'])}, {summary['rows_per_s']:.4g} rows/s"
    if latency["max"] is not None:
        time += f", latency p50 {seconds(latency['p50'])}, p99 {seconds(latency['p99'])}"
    sent = ", ".join(f"{requests[name]:,} {name}" for name in ("sent", "retried", "refused"))
    if (summary["calls_saved"] or 0) > 0:
        sent += f"; {summary['calls_saved']:,} saved by packing"
    lines = [
        sanitize(f"{summary['state']}: {summary['reason']}" if summary["reason"] else summary["state"], 220),
        f"rows      {rows['total']:,}: {', '.join(counts)}",
        f"requests  {sent}",
        f"tokens    {tokens['input']:,} in ({tokens['cached']:,} cached), {tokens['output']:,} out",
        f"cost      {cost}",
        f"time      {time}",
        f"results   {sanitize(summary['results'], 200)}",
    ]
    if rows["failed"]:
        lines[-1] += f"  errors  {sanitize(summary['errors'], 200)}"
    if (rows["pending"] or rows["in_doubt"]) and summary["state"] != "running":
        lines.append(f"go on     batchrun resume {sanitize(shlex.quote(summary['job']), 200)}")
    return "\n".join(lines) + "\n"


def _titled(title: str, *, color: bool) -> str:
    return f"\x1b[1m{title}\x1b[0m" if color else title


def _wrapped(value: str, lead: str, columns: int) -> list[str]:
    return textwrap.wrap(
        value,
        columns,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [lead.rstrip()]


def _table(table: Table, columns: int) -> Iterator[str]:
    rows = [table.head, *table.rows]
    widths = [max(width(row[i]) for row in rows) for i in range(len(table.head))]
    over = sum(widths) + len(_GAP) * len(widths) - columns
    while over > 0:
        widest = max(range(table.words), key=lambda i: widths[i])
        if widths[widest] <= _SMALLEST_COLUMN:
            break
        widths[widest] -= 1
        over -= 1
    for row in rows:
        cells = [_cell(cell, widths[i], right=i >= table.words) for i, cell in enumerate(row)]
        yield (_GAP + _GAP.join(cells)).rstrip()


def _cell(cell: str, size: int, *, right: bool) -> str:
    shown = cell
    while width(shown) > size:
        shown = f"{shown[:-2]}…"
    pad = " " * (size - width(shown))
    return f"{pad}{shown}" if right else f"{shown}{pad}"
