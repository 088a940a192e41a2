"""The report as one static HTML page: no script, nothing loaded from anywhere, every text escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from markupsafe import Markup

from batchrun.report.inert import sanitize
from batchrun.report.sections import Section, Table, money, seconds, sections

__all__ = ["html"]

_WIDTH = 600

# Every run writes this page at its end, so it is made without a template engine: loading one, and compiling the page
# for it, takes longer than all the rest of a small report. ``Markup.format`` escapes whatever is not Markup itself.
_FIGURE = Markup("<li><b>{1}</b><span>{0}</span></li>\n")
_OUTCOMES = Markup(
    '<figure>\n<svg viewBox="0 0 600 14" role="img" aria-label="rows by outcome" preserveAspectRatio="none">\n'
    "{bar}</svg>\n<figcaption>{labels}</figcaption>\n</figure>"
)
_SHARE = Markup(
    '<rect class="{outcome}" x="{x:.2f}" y="0" width="{width:.2f}" height="14"><title>{label}</title></rect>\n'
)
_CHARTS = Markup(
    "<figure>\n"
    '<svg viewBox="0 0 600 120" role="img" aria-label="requests in flight and their limit over time">\n'
    '<line class="axis" x1="0" y1="119.5" x2="600" y2="119.5"/>\n'
    '<polyline class="limit" points="{limit}"/>\n<polyline class="in-flight" points="{in_flight}"/>\n</svg>\n'
    "<figcaption>in flight (blue) under the limit (grey), at most {peak:,.4g}; over {elapsed}</figcaption>\n"
    "</figure>\n<figure>\n"
    '<svg viewBox="0 0 600 80" role="img" aria-label="rows per second and refusals over time">\n'
    '<line class="axis" x1="0" y1="79.5" x2="600" y2="79.5"/>\n{bars}</svg>\n'
    "<figcaption>rows a second (green) and refusals a second (red), at most {peak_rate:,.3g} together</figcaption>\n"
    "</figure>\n"
)
_BAR = Markup('<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>\n')
_FACT = Markup('<dt>{}</dt><dd class="foreign">{}</dd>\n')
_TABLE = Markup('<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n')
_ROW = Markup("<tr>{}</tr>\n")
_LINE = Markup('<li class="foreign">{}</li>\n')
_SECTION = Markup("<section>\n<h2>{title}</h2>\n{content}</section>\n")


def html(report: Mapping[str, Any]) -> str:
    """Returns the page. Its policy allows its own style sheet, by hash, and nothing else."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    charts = _charts(report)
    return Template(page).substitute(
        style_hash=f"sha256-{digest}",
        job=Markup.escape(sanitize(report["job"], 200)),
        figures=_each(_FIGURE, _figures(report)),
        outcomes=_outcomes(report["rows"]),
        sections=Markup().join(
            _section(section, charts if section.title == "Over time" else Markup()) for section in sections(report)
        ),
    )


def _each(form: Markup, items: Iterable[Sequence[object]]) -> Markup:
    """Returns a form filled in with each of the items, one after the other."""
    return Markup().join(form.format(*item) for item in items)


def _section(section: Section, charts: Markup) -> Markup:
    content = charts
    if section.facts:
        content += Markup("<dl>\n{}</dl>\n").format(_each(_FACT, section.facts))
    if section.table is not None and section.table.rows:
        content += _table(section.table)
    if section.lines:
        content += Markup("<ul>\n{}</ul>\n").format(_each(_LINE, [(line,) for line in section.lines]))
    return _SECTION.format(title=section.title, content=content)


def _table(table: Table) -> Markup:
    word, figure = Markup("<th>{}</th>"), Markup('<th class="figure">{}</th>')
    head = _cells(table.head, table.words, word, figure)
    word, figure = Markup('<td class="foreign">{}</td>'), Markup('<td class="figure">{}</td>')
    rows = [(_cells(row, table.words, word, figure),) for row in table.rows]
    return _TABLE.format(head=head, body=_each(_ROW, rows))


def _cells(row: Sequence[str], words: int, word: Markup, figure: Markup) -> Markup:
    """Returns cells: the first ``words`` of them are text, the others figures."""
    return Markup().join((word if at < words else figure).format(cell) for at, cell in enumerate(row))


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


def _outcomes(rows: Mapping[str, int]) -> Markup:
    """Returns the bar of outcomes, left to right; nothing where there is no row."""
    outcomes = [name for name in ("succeeded", "failed", "in_doubt", "pending") if rows[name]]
    total = sum(rows[outcome] for outcome in outcomes)
    labels = [f"{rows[outcome]:,} {outcome.replace('_', ' ')}" for outcome in outcomes]
    bar = Markup()
    x = 0.0
    for outcome, label in zip(outcomes, labels, strict=True):
        width = rows[outcome] / total * _WIDTH
        bar += _SHARE.format(outcome=outcome, x=x, width=width, label=label)
        x += width
    return _OUTCOMES.format(bar=bar, labels=", ".join(labels)) if outcomes else Markup()


def _charts(report: Mapping[str, Any]) -> Markup:
    """Returns the two charts over time; nothing where there is nothing over time."""
    points = report["timeline"]
    elapsed_s = points[-1]["elapsed_s"] if points else 0
    if not elapsed_s:
        return Markup()
    peak = max(*(point["limit"] for point in points), *(point["in_flight"] for point in points), 1)
    peak_rate = max((p["done"] + p["refused"]) / p["span_s"] for p in points if p["span_s"])
    bars: list[tuple[str, float, float, float, float]] = []
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
            bars.append((name, x, floor, width, height))
    return _CHARTS.format(
        limit=_line(points, "limit", peak, elapsed_s),
        in_flight=_line(points, "in_flight", peak, elapsed_s),
        peak=peak,
        peak_rate=peak_rate,
        elapsed=seconds(elapsed_s),
        bars=_each(_BAR, bars),
    )


def _line(points: Sequence[Mapping[str, Any]], name: str, peak: float, elapsed_s: float) -> str:
    places = []
    for point in points:
        y = 118 - point[name] / peak * 112
        # A point tells the mean of its span, so the line is level for as long.
        ends = (point["elapsed_s"] - point["span_s"], point["elapsed_s"])
        places += [f"{max(end, 0) / elapsed_s * _WIDTH:.1f},{y:.1f}" for end in ends]
    return " ".join(places)
