"""From the fold to documents: the ``--json`` summary, the report, and their exact JSON. Same bytes twice."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

import msgspec

from batchrun.report.histogram import Histogram
from batchrun.report.packed import packing_figures
from batchrun.report.tally import ModelTally, Tally

__all__ = ["JobStanding", "Tally", "dumps", "plain", "report", "summary"]

_PERCENTILES = (50, 90, 95, 99)


class JobStanding(msgspec.Struct, frozen=True):
    """What a report says of a job that the fold cannot know."""

    job: str
    """The job directory, as people should type it."""
    input: str
    state: Literal["complete", "stopped", "interrupted", "failed", "running"]
    reason: str
    exit_code: int | None
    """None while a run is on."""
    total: int
    pending: int
    results: str
    errors: str
    in_doubt_ids: Sequence[str] = ()
    """Rows whose send has an unknown end now; those of earlier runs are in the fold."""
    binding: str | None = None
    """What bounds the speed; None: whatever did for the longest time."""
    elapsed_s: float | None = None
    """All runs together; None: as the fold knows it."""
    reserved_usd: Decimal = Decimal(0)
    """Worst case of what is in flight."""
    budget_usd: Decimal | None = None
    succeeded: int | None = None
    """Within ``total``, which a limit may narrow; None: as the fold knows it. So is ``failed``."""
    failed: int | None = None
    rpm: int | None = None
    """Requests per minute that are known to be allowed: as the user set, or as the server told."""


def summary(tally: Tally, standing: JobStanding) -> dict[str, Any]:
    """Returns the ``--json`` summary: the contract's keys in their order, then further ones."""
    models = tally.models.values()
    elapsed_s = _elapsed_s(tally, standing)
    service = tally.answered["service"]
    return {
        "job": standing.job,
        "state": standing.state,
        "reason": standing.reason,
        "exit_code": standing.exit_code,
        "rows": {
            "total": standing.total,
            "succeeded": tally.succeeded if standing.succeeded is None else standing.succeeded,
            "failed": tally.failed if standing.failed is None else standing.failed,
            "pending": standing.pending,
            "in_doubt": len(standing.in_doubt_ids),
        },
        "in_doubt_ids": list(standing.in_doubt_ids),
        "requests": {"sent": tally.sent, "retried": tally.retried, "refused": tally.refused},
        "batches": tally.batches,
        "tokens": {
            "input": sum(model.input for model in models),
            "output": sum(model.output for model in models),
            "cached": sum(model.cached for model in models),
            "reasoning": sum(model.reasoning for model in models),
        },
        "cost_usd": tally.cost_usd,
        "cost_unknown_rows": tally.cost_unknown_rows,
        "elapsed_s": elapsed_s,
        "rows_per_s": _rate(_sent_rows(tally), elapsed_s),
        "latency_s": {
            **{f"p{percent}": service.percentile(percent) for percent in _PERCENTILES},
            "max": service.max if service.count else None,
        },
        "binding": standing.binding or _longest(tally.timeline.bindings),
        "results": standing.results,
        "errors": standing.errors,
        # Beyond the contract's keys: what a budget counts.
        "spent_usd": tally.spent_usd,
        "reserved_usd": standing.reserved_usd,
        "budget_usd": standing.budget_usd,
        "doubted": tally.doubted,
        "calls_saved": tally.asked - tally.sent if tally.packed.batches else None,
    }


def report(tally: Tally, standing: JobStanding) -> dict[str, Any]:
    """Returns the whole report: the summary's keys, then a key per section; all that renderers show."""
    head = summary(tally, standing)
    elapsed_s = head["elapsed_s"]
    tokens = head["tokens"]
    return {
        **head,
        "input": standing.input,
        "rows_unsent": tally.failed_unsent,
        "rows_reopened": tally.reopened,
        "models": [_model(name, tally.models[name]) for name in sorted(tally.models)],
        "cache": {"share": _ratio(tokens["cached"], tokens["input"]), "saved_usd": tally.saved_usd},
        "wasted": {
            "cost_usd": tally.wasted_usd,
            "sends": tally.wasted_sends,
            "tokens": tally.wasted_tokens,
            "lost_usd": tally.lost_usd,
            "lost_sends": tally.lost_sends,
        },
        "doubts": {
            "rows": tally.doubted,
            "resent": tally.doubts_resent,
            "left_failed": tally.doubted - tally.doubts_resent,
            "reserved_usd": tally.doubted_usd,
            "ids": list(tally.doubted_ids),
        },
        "latency": {
            "succeeded": {name: _latency(histogram) for name, histogram in tally.answered.items()},
            "failed": {name: _latency(histogram) for name, histogram in tally.unanswered.items()},
        },
        "throughput": {
            "rows_per_s": head["rows_per_s"],
            "requests_per_s": _rate(tally.sent, elapsed_s),
            "input_tokens_per_s": _rate(tokens["input"], elapsed_s),
            "output_tokens_per_s": _rate(tokens["output"], elapsed_s),
            "peak_in_flight": tally.timeline.peak_in_flight,
            "peak_limit": tally.timeline.peak_limit,
            "paused_s": math.fsum(point.paused_s for point in tally.timeline.points),
            "bound_by_s": dict(sorted(tally.timeline.bindings.items(), key=lambda item: (-item[1], item[0]))),
        },
        "timeline": _timeline(tally),
        "batching": {
            "batches": tally.batches,
            "rows": tally.batch_rows,
            "tokens": tally.batch_tokens,
            "bytes": tally.batch_bytes,
            "budget_tokens": tally.budget_tokens,
            "fill": _ratio(tally.batch_tokens, tally.budget_tokens),
            "rows_per_batch": _ratio(tally.batch_rows, tally.batches),
            "calls": tally.sent,
        },
        "packing": packing_figures(
            tally.packed,
            rows=tally.asked,
            calls=tally.sent,
            repeated=tally.retried,
            cost_usd=tally.cost_usd,
            rpm=standing.rpm,
        ),
        "failures": _ranked(tally.failures, "rows"),
        "faults": _ranked(tally.faults, "sends"),
        "finish_reasons": dict(sorted(tally.finish_reasons.items(), key=lambda item: (-item[1], item[0]))),
        "empty_outputs": tally.empty,
        "runs": _runs(tally),
        "notes": {
            "counts": dict(sorted(tally.note_counts.items())),
            "last": [{"at": at, "what": what, "text": text} for at, what, text in tally.notes],
        },
        "hints": _hints(tally, standing),
    }


def _sent_rows(tally: Tally) -> int:
    return tally.succeeded + tally.failed - tally.failed_unsent


def _elapsed_s(tally: Tally, standing: JobStanding) -> float:
    return tally.elapsed_s if standing.elapsed_s is None else standing.elapsed_s


def _model(name: str, model: ModelTally) -> dict[str, Any]:
    return {
        "model": name,
        "rows": model.rows,
        "tokens": {
            "input": model.input,
            "output": model.output,
            "cached": model.cached,
            "cache_write": model.cache_write,
            "reasoning": model.reasoning,
        },
        "cost_usd": model.cost_usd,
        "cost_unknown_rows": model.cost_unknown_rows,
        "usage_unknown_rows": model.usage_unknown_rows,
        "estimate": {
            "rows": model.estimated_rows,
            "estimated_tokens": model.estimated_tokens,
            "actual_tokens": model.actual_tokens,
            "actual_per_estimated": _ratio(model.actual_tokens, model.estimated_tokens),
        },
    }


def _latency(histogram: Histogram) -> dict[str, Any]:
    counted = histogram.count > 0
    return {
        "count": histogram.count,
        "min": histogram.min if counted else None,
        "mean": histogram.mean(),
        **{f"p{percent}": histogram.percentile(percent) for percent in _PERCENTILES},
        "max": histogram.max if counted else None,
    }


def _timeline(tally: Tally) -> list[dict[str, Any]]:
    points = []
    elapsed_s = 0.0
    for point in tally.timeline.points:
        elapsed_s += point.span_s
        points.append({"elapsed_s": round(elapsed_s, 3), **point._asdict()})
    return points


def _runs(tally: Tally) -> dict[str, Any]:
    kept = [{"reason": None, "exit_code": None, "elapsed_s": None, **run} for run in tally.runs]
    return {"started": tally.runs_started, "elapsed_s": tally.elapsed_s, "kept": kept}


def _ranked(entries: Mapping[str, Mapping[str, Any]], counted: str) -> list[dict[str, Any]]:
    ranked = sorted(entries.items(), key=lambda item: (-item[1]["count"], item[0]))
    return [
        {
            **{name: value for name, value in entry.items() if name not in {"count", "examples"}},
            counted: entry["count"],
            "examples": [dict(example) for example in entry["examples"]],
        }
        for _, entry in ranked
    ]


def _hints(tally: Tally, standing: JobStanding) -> list[str]:
    job, errors = shlex.quote(standing.job), shlex.quote(standing.errors)
    hints = []
    if standing.pending and standing.state != "running":
        hints.append(f"go on with the rest: batchrun resume {job}")
    if tally.failed:
        again = shlex.quote(standing.input) if standing.input != "-" else f"- --job {job}"
        hints.append(f"ask the failed rows again: batchrun submit {again} --retry-failed")
        hints.append(f"or mend them and submit them as a job of their own: jq -c .row {errors} > mended.jsonl")
    if tally.finish_reasons.get("length") or tally.finish_reasons.get("max_tokens"):
        hints.append("some answers were cut at their token limit: raise --max-tokens")
    if any(model.cost_unknown_rows > model.usage_unknown_rows for model in tally.models.values()):
        hints.append("some prices are unknown: give --price-in and --price-out, or [prices] in batchrun.toml")
    return hints


def _longest(seconds: Mapping[str, float]) -> str | None:
    return max(seconds, key=lambda name: (seconds[name], name), default=None)


def _rate(count: int, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# ---------------------------------------------------------------- JSON

# JSON escapes C0 controls itself. These would otherwise reach a terminal raw: DEL and C1 controls (which hold
# another CSI), bidi controls and invisible marks, line and paragraph separators, and lone surrogates.
_LOUD = re.compile("[\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")


def dumps(document: Mapping[str, Any]) -> bytes:
    """Returns one line of JSON, without a newline.

    Decimals are plain numbers with all their digits, never an exponent; floats are rounded to 6 decimals, and
    null where they are not finite. No character in it acts upon a terminal.
    """
    return _json(document).encode("utf-8")


def _json(value: object) -> str:  # noqa: PLR0911 - one return per JSON type
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _LOUD.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, Decimal):
        return plain(value) if value.is_finite() else "null"
    if isinstance(value, float):
        return plain(Decimal(repr(round(value, 6)))) if math.isfinite(value) else "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_json(str(key))}:{_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_json, value)) + "]"
    raise TypeError(f"{type(value).__name__} has no JSON form here")


def plain(number: Decimal) -> str:
    """Returns a finite number with all its digits, no exponent and no trailing zeros after the point."""
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
