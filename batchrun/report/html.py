"""The report as one static HTML page: no script, nothing loaded from anywhere, every text escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchrun.report.inert import sanitize
from batchrun.report.sections import money, seconds, sections

__all__ = ["html"]

_WIDTH = 600


def html(report: Mapping[str, Any]) -> str:
    """Returns the page. Its policy allows its own style sheet, by hash, and nothing else."""
    from jinja2 import Environment, StrictUndefined  # loaded for this renderer alone

    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(page).render(
        style_hash=f"sha256-{digest}",
        job=sanitize(report["job"], 200),
        figures=_figures(report),
        shares=_shares(report["rows"]),
        chart=_chart(report),
        sections=sections(report),
    )


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows, latency = report["rows"], report["latency_s"]
    unknown = report["cost_unknown_rows"]
    packing = report["packing"]
    packed = [] if packing is None else [(f"calls for {packing['calls_one_by_one']:,} rows", f"{packing['calls']:,}")]
    return [
        (sanitize(report["reason"], 80), sanitize(report["state"], 20)),
        (f"of {rows['total']:,} rows succeeded", f"{rows['succeeded']:,}"),
        *packed,
        (f"known cost; {unknown:,} rows unknown" if unknown else "cost", money(report["cost_usd"])),
        (f"{report['rows_per_s']:.4g} rows/s", seconds(report["elapsed_s"])),
        (f"latency p50; p99 {seconds(latency['p99'])}", seconds(latency["p50"])),
    ]


def _shares(rows: Mapping[str, int]) -> list[dict[str, str]]:
    """Returns the bar of outcomes, left to right."""
    shares = []
    x = 0.0
    outcomes = ("succeeded", "failed", "in_doubt", "pending")
    total = sum(rows[outcome] for outcome in outcomes)
    for outcome in outcomes:
        if rows[outcome]:
            width = rows[outcome] / total * _WIDTH
            label = f"{rows[outcome]:,} {outcome.replace('_', ' ')}"
            shares.append({"outcome": outcome, "x": f"{x:.2f}", "width": f"{width:.2f}", "label": label})
            x += width
    return shares


def _chart(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what the two charts over time draw; None where there is nothing over time."""
    points = report["timeline"]
    elapsed_s = points[-1]["elapsed_s"] if points else 0
    if not elapsed_s:
        return None
    peak = max(*(point["limit"] for point in points), *(point["in_flight"] for point in points), 1)
    peak_rate = max((p["done"] + p["refused"]) / p["span_s"] for p in points if p["span_s"])
    bars = []
    for point in points:
        span_s = point["span_s"]
        if not span_s or not peak_rate:
            continue
        x = (point["elapsed_s"] - span_s) / elapsed_s * _WIDTH
        width = span_s / elapsed_s * _WIDTH
        floor = 79.0
        for name, count in (("rate", point["done"]), ("refused", point["refused"])):
            height = count / span_s / peak_rate * 75
            floor -= height
            sizes = {"x": x, "y": floor, "width": width, "height": height}
            bars.append({"of": name, **{size: f"{value:.2f}" for size, value in sizes.items()}})
    return {
        "limit": _line(points, "limit", peak, elapsed_s),
        "in_flight": _line(points, "in_flight", peak, elapsed_s),
        "peak": f"{peak:,.4g}",
        "peak_rate": f"{peak_rate:,.3g}",
        "elapsed": seconds(elapsed_s),
        "bars": bars,
    }


def _line(points: Sequence[Mapping[str, Any]], name: str, peak: float, elapsed_s: float) -> str:
    places = []
    for point in points:
        y = 118 - point[name] / peak * 112
        # A point tells the mean of its span, so the line is level for as long.
        ends = (point["elapsed_s"] - point["span_s"], point["elapsed_s"])
        places += [f"{max(end, 0) / elapsed_s * _WIDTH:.1f},{y:.1f}" for end in ends]
    return " ".join(places)
