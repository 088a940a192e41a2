"""The report's sections, once for all renderers: titles, facts and tables of sanitised words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec

from batchrun.report.inert import Foreign, sanitize
from batchrun.report.metrics import plain

__all__ = ["Section", "Table", "money", "packing_facts", "seconds", "sections"]

_NAME = 60
_MESSAGE = 200
_NONE = "–"
_SHOWN_NOTES = 20
_SPARK_POINTS = 48


class Table(msgspec.Struct, frozen=True):
    """Rows of cells; the first ``words`` columns are text, the others figures; ``Foreign`` ones not ours."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


class Section(msgspec.Struct, frozen=True):
    """A titled part of the report: facts (label and value), then a table, then plain lines."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    table: Table | None = None
    lines: Sequence[str] = ()


def money(usd: Decimal) -> str:
    """Returns dollars to 6 decimals; a tiny sum to 4 significant digits, so that none is shown as 0."""
    tiny = 0 < abs(usd) < Decimal("0.0001")
    digits = plain(round(usd, 3 - usd.adjusted() if tiny else 6))
    whole, _, decimals = digits.partition(".")
    return f"${int(whole):,}.{decimals:0<2}"


def seconds(value: float | None) -> str:
    """Returns a duration for people: ``840 ms``, ``4.2 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if value is None:
        return _NONE
    if value < 1:
        return f"{value * 1000:.3g} ms" if value else "0 s"
    if value < 99.95:
        return f"{value:.3g} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def sections(report: Mapping[str, Any]) -> list[Section]:
    """Returns the sections of a report in the order people read them; those without content are left out."""
    parts = (
        _rows(report),
        _packing(report),
        _cost(report),
        _tokens(report),
        _wasted(report),
        _doubts(report),
        _latency(report),
        _throughput(report),
        _over_time(report),
        _estimates(report),
        _failures(report),
        _faults(report),
        _answers(report),
        _runs(report),
        _notes(report),
        Section("Next", lines=[sanitize(hint, 4 * _MESSAGE) for hint in report["hints"]]),
    )
    return [part for part in parts if part.facts or part.lines or (part.table and part.table.rows)]


def _rows(report: Mapping[str, Any]) -> Section:
    rows = report["rows"]
    total = rows["total"]
    state = sanitize(report["state"], _NAME)
    reason = sanitize(report["reason"], _MESSAGE)
    ended = "" if report["exit_code"] is None else f" (exit code {report['exit_code']})"
    table = Table(
        ("outcome", "rows", "share"),
        [
            (name.replace("_", " "), _count(rows[name]), _share(rows[name], total))
            for name in ("succeeded", "failed", "pending", "in_doubt")
        ]
        + [("total", _count(total), "")],
    )
    facts: list[tuple[str, str]] = [("state", Foreign(f"{state}{ended}"))]
    if reason:
        facts.append(("reason", reason))
    if report["rows_unsent"]:
        facts.append(("failed unsent", f"{_count(report['rows_unsent'])} (invalid or too large: nothing was sent)"))
    if report["rows_reopened"]:
        facts.append(("asked again", f"{_count(report['rows_reopened'])} failed rows, by --retry-failed"))
    return Section("Rows", facts, table)


def _cost(report: Mapping[str, Any]) -> Section:
    facts = [("known cost", money(report["cost_usd"]))]
    unknown = report["cost_unknown_rows"]
    if unknown:
        facts.append(("unknown cost", f"{_plural(unknown, 'row')}, not in the sum above"))
    if report["spent_usd"] != report["cost_usd"]:
        facts.append(("counted as spent", f"{money(report['spent_usd'])} (with what may have been billed)"))
    if report["reserved_usd"]:
        facts.append(("reserved", f"{money(report['reserved_usd'])} (worst case of what is in flight)"))
    if report["budget_usd"] is not None:
        facts.append(("budget", money(report["budget_usd"])))
    rows = [
        (
            sanitize(model["model"], _NAME),
            _count(model["rows"]),
            _NONE if not model["cost_usd"] and model["cost_unknown_rows"] else money(model["cost_usd"]),
            _count(model["cost_unknown_rows"]),
            _count(model["usage_unknown_rows"]),
        )
        for model in report["models"]
    ]
    return Section("Cost", facts, Table(("model", "rows", "known cost", "cost unknown", "usage unknown"), rows))


def _tokens(report: Mapping[str, Any]) -> Section:
    names = ("input", "cached", "cache_write", "output", "reasoning")
    rows: list[tuple[str, ...]] = [
        (sanitize(model["model"], _NAME), *(_count(model["tokens"][name]) for name in names))
        for model in report["models"]
    ]
    if len(rows) > 1:
        sums = (sum(model["tokens"][name] for model in report["models"]) for name in names)
        rows.append(("total", *map(_count, sums)))
    table = Table(("model", "input", "cached", "cache write", "output", "reasoning"), rows)
    return Section("Tokens", _cached(report["cache"]), table)


def _cached(cache: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what share of the input the provider's cache served, and what that was worth."""
    saved = cache["saved_usd"]
    if not cache["share"] and not saved:
        return []
    against = f"{money(abs(saved))} {'less' if saved >= 0 else 'more'} than at full price"
    return [("cached", f"{cache['share'] or 0:.1%} of the input: {against}")]


def _wasted(report: Mapping[str, Any]) -> Section:
    wasted = report["wasted"]
    facts = []
    if wasted["sends"]:
        facts.append(("known", f"{money(wasted['cost_usd'])} for {_plural(wasted['sends'], 'send')}"))
    if wasted["lost_sends"]:
        sends = _plural(wasted["lost_sends"], "send")
        facts.append(("possible", f"at most {money(wasted['lost_usd'])} for {sends} that may have been billed"))
    if wasted["tokens"]:
        facts.append(("tokens", _count(wasted["tokens"])))
    none = ("none", "no send without an answer is known or feared to have cost anything")
    return Section("Wasted spend", facts or [none])


def _doubts(report: Mapping[str, Any]) -> Section:
    doubts = report["doubts"]
    now = report["rows"]["in_doubt"]
    if not doubts["rows"] and not now:
        return Section("In doubt")
    facts = [
        ("rows", f"{_count(doubts['rows'])}, whose send had an unknown end when a run died"),
        ("sent again", _count(doubts["resent"])),
        ("left failed", _count(doubts["left_failed"])),
        ("counted as spent", f"{money(doubts['reserved_usd'])}, their worst case"),
    ]
    if doubts["ids"]:
        facts.append(("ids", _listed(doubts["ids"], doubts["rows"])))
    if now:
        facts.append(("in doubt now", _listed(report["in_doubt_ids"], now)))
    return Section("In doubt", facts)


def _latency(report: Mapping[str, Any]) -> Section:
    names = ("p50", "p90", "p95", "p99", "max")
    rows = [
        (status, name, *(seconds(latency[part]) for part in names))
        for status, by_name in report["latency"].items()
        for name, latency in by_name.items()
        if latency["count"]
    ]
    return Section("Latency", table=Table(("rows", "part", *names), rows, words=2))


def _throughput(report: Mapping[str, Any]) -> Section:
    rates = report["throughput"]
    requests = report["requests"]
    started = report["runs"]["started"]
    return Section(
        "Throughput",
        [
            ("elapsed", f"{seconds(report['elapsed_s'])} in {_plural(started, 'run')}"),
            ("rows", f"{rates['rows_per_s']:.4g}/s"),
            ("tokens", f"{rates['input_tokens_per_s']:,.0f}/s in, {rates['output_tokens_per_s']:,.0f}/s out"),
            ("requests", f"{_count(requests['sent'])} sent, {rates['requests_per_s']:.4g}/s"),
            ("retried", _count(requests["retried"])),
            ("refused", _count(requests["refused"])),
        ],
    )


def _over_time(report: Mapping[str, Any]) -> Section:
    points = report["timeline"]
    if not points:
        return Section("Over time")
    rates = report["throughput"]
    spans = [point["span_s"] for point in points]
    refused = [p["refused"] for p in points]
    paused = [p["paused_s"] for p in points]
    rows = _rates([p["done"] for p in points], spans)
    facts = [
        (
            "in flight",
            f"{_spark([p['in_flight'] for p in points], spans)} peak {_count(rates['peak_in_flight'])}",
        ),
        ("limit", f"{_spark([p['limit'] for p in points], spans)} peak {_count(rates['peak_limit'])}"),
        ("rows/s", f"{_spark(rows, spans)} peak {max(rows):.3g}"),
        (
            "refused",
            f"{_spark(_rates(refused, spans), spans)} in all {_count(sum(refused))}",
        ),
        ("paused", f"{_spark(_rates(paused, spans), spans)} in all {seconds(rates['paused_s'])}"),
    ]
    bound = rates["bound_by_s"]
    total = sum(bound.values())
    table = Table(
        ("bound by", "time", "share"),
        [(sanitize(name, _NAME), seconds(held), _share(held, total)) for name, held in bound.items()],
    )
    return Section("Over time", facts, table)


def _packing(report: Mapping[str, Any]) -> Section:
    figures = report["packing"]
    return Section("Packing", () if figures is None else packing_facts(figures))


_BOUND = {
    "tokens": "by their tokens",
    "rows": "by their rows",
    "bytes": "by their bytes",
    "input": "for want of more rows",
    "interval": "as no more came within --flush-interval",
    "groups": "for too many kinds of rows in turn",
}


def packing_facts(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what packing did, or would do, for people: from the figures that a report and an estimate have."""
    calls, rows, saved = figures["calls"], figures["calls_one_by_one"], figures["calls_saved"]
    if saved > 0:
        facts = [("calls", f"{_count(calls)} instead of {_count(rows)} with one row per call: {_count(saved)} saved")]
    else:
        more = f"{_count(-saved)} more than" if saved else "as many as"
        facts = [("calls", f"{_count(calls)} for {_plural(rows, 'row')}: {more} with one row per call")]
    if figures["calls_repeated"]:
        split = figures["calls_split"]
        why = f"; {_plural(split, 'call')} went on in parts, for rows that failed or had no answer" if split else ""
        facts.append(("repeated", f"{_count(figures['calls_repeated'])} of them{why}"))
    shapes = ", ".join(sanitize(name, _NAME) for name in figures["shapes"])
    batches = f"{_count(figures['batches'])} of {figures['rows_per_batch']:,.1f} rows on average"
    facts.append(("batches", f"{batches} ({shapes})"))
    if figures["rows_alone"]:
        facts.append(("alone", f"{_plural(figures['rows_alone'], 'row')} that cannot share a call"))
    fill = sorted(figures["fill"].items(), key=lambda item: -item[1])
    facts.append(("fill", ", ".join(f"{share:.1%} of the {name}" for name, share in fill)))
    facts.append(("ended", ", ".join(f"{_count(count)} {_BOUND[name]}" for name, count in figures["bound_by"].items())))
    facts.append(("cost", _packed_cost(figures)))
    if figures["rpm"] is not None:
        each, one_by_one = seconds(figures["rpm_s"]), seconds(figures["rpm_one_by_one_s"])
        facts.append(("quota", f"{each} of {_count(figures['rpm'])} requests per minute instead of {one_by_one}"))
    return facts


def _packed_cost(figures: Mapping[str, Any]) -> str:
    same = "as with one row per call: prices are per token, and each row's are sent in full"
    extra, lost = figures["cost_usd"] - figures["cost_one_by_one_usd"], figures["cost_lost_usd"]
    parts = [f"{money(extra)} more, for calls that were split after they were billed"] if extra else []
    parts += [f"at most {money(lost)} more, for split calls that may have been billed"] if lost else []
    return f"{same}; but {', and '.join(parts)}" if parts else same


def _estimates(report: Mapping[str, Any]) -> Section:
    rows = [
        (
            sanitize(model["model"], _NAME),
            _count(estimate["rows"]),
            _count(estimate["estimated_tokens"]),
            _count(estimate["actual_tokens"]),
            f"{estimate['actual_per_estimated']:.3f}",
        )
        for model in report["models"]
        if (estimate := model["estimate"])["actual_per_estimated"] is not None
    ]
    table = Table(("model", "rows", "estimated", "actual", "ratio"), rows)
    return Section("Input tokens: estimate against actual", table=table)


def _failures(report: Mapping[str, Any]) -> Section:
    rows = []
    lines = []
    for failure in report["failures"]:
        kind = sanitize(failure["kind"], _NAME)
        rows.append((kind, _count(failure["rows"])))
        for example in failure["examples"]:
            name = sanitize(example["custom_id"] or "", _NAME)
            code = sanitize(example["code"] or kind, _NAME)
            lines.append(sanitize(f"line {example['line']}, {name}: {code}: {example['message']}", 2 * _MESSAGE))
    return Section("Failed rows", table=Table(("kind", "rows"), rows), lines=lines)


def _faults(report: Mapping[str, Any]) -> Section:
    rows = [
        (
            sanitize(fault["kind"], _NAME),
            sanitize(fault["code"] or str(fault["status"] or _NONE), _NAME),
            sanitize(fault["examples"][0]["message"], _MESSAGE) if fault["examples"] else "",
            _count(fault["sends"]),
        )
        for fault in report["faults"]
    ]
    return Section("Sends without an answer", table=Table(("kind", "code", "for example", "sends"), rows, words=3))


def _answers(report: Mapping[str, Any]) -> Section:
    rows = [(sanitize(name, _NAME), _count(count)) for name, count in report["finish_reasons"].items()]
    facts = (
        [("empty", f"{_plural(report['empty_outputs'], 'answer')} without content")] if report["empty_outputs"] else []
    )
    return Section("Answers", facts, Table(("finish reason", "rows"), rows))


def _runs(report: Mapping[str, Any]) -> Section:
    rows: list[tuple[str, ...]] = [
        (
            str(run["run"]),
            _moment(run["started_at"]),
            sanitize(run["state"] or "did not say its end", _NAME),
            sanitize(run["reason"] or "", _NAME),
            seconds(run["elapsed_s"]),
        )
        for run in report["runs"]["kept"]
    ]
    if report["state"] == "running" and rows:
        rows[-1] = (*rows[-1][:2], "running", *rows[-1][3:])
    return Section("Runs", table=Table(("run", "started", "state", "reason", "elapsed"), rows, words=4))


def _notes(report: Mapping[str, Any]) -> Section:
    notes = report["notes"]
    last = notes["last"][-_SHOWN_NOTES:]
    rows = [(_moment(note["at"]), note["what"], sanitize(note["text"], _MESSAGE)) for note in last]
    counts = [(name, _count(count)) for name, count in notes["counts"].items()]
    return Section("What happened", counts, Table(("last of it", "what", ""), rows, words=3))


# ---------------------------------------------------------------- words


def _count(value: int) -> str:
    return f"{value:,}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else _NONE


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _listed(ids: Sequence[str], count: int) -> Foreign:
    shown = ", ".join(sanitize(name, _NAME) for name in ids[:20])
    more = count - min(len(ids), 20)
    return Foreign(f"{shown} and {more:,} more" if more > 0 else shown)


def _rates(sums: Sequence[float], spans: Sequence[float]) -> list[float]:
    return [part / span if span else 0.0 for part, span in zip(sums, spans, strict=True)]


def _spark(values: Sequence[float], spans: Sequence[float]) -> str:
    """Returns a line of bars of equal time, each a mean over its time, the highest bar as high as the highest."""
    means = _evened(values, spans)
    top = max(means)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(mean / top * 8))] if top else "▁" for mean in means)


def _evened(values: Sequence[float], spans: Sequence[float]) -> list[float]:
    """Returns at most ``_SPARK_POINTS`` means; a bar in which no point has its middle repeats the one before."""
    total = sum(spans)
    bars = min(_SPARK_POINTS, len(values))
    if not total:
        return list(values[-bars:])
    sums = [0.0] * bars
    weights = [0.0] * bars
    begin = 0.0
    for value, span in zip(values, spans, strict=True):
        bar = min(bars - 1, int((begin + span / 2) / total * bars))
        sums[bar] += value * span
        weights[bar] += span
        begin += span
    means: list[float] = []
    for bar in range(bars):
        means.append(sums[bar] / weights[bar] if weights[bar] else means[-1] if means else 0.0)
    return means
