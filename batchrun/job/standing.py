"""How a job stands, told from its store alone; also while a run is on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Literal

from batchrun.report import metrics
from batchrun.report.metrics import JobStanding
from batchrun.report.tally import Tally
from batchrun.run.failpoint import reached
from batchrun.run.files import JobLock, replace_file
from batchrun.run.view import Intent, View

__all__ = ["project", "report", "stand", "status", "write_results"]


def status(job: Path) -> dict[str, Any]:
    """Returns the summary of a job, also while it runs."""
    with contextlib.closing(View(job)) as view:
        tally = _tally(view)
        return metrics.summary(tally, _standing(job, view))


def report(job: Path) -> dict[str, Any]:
    """Returns the whole report of a job, also while it runs."""
    with contextlib.closing(View(job)) as view:
        tally = _tally(view)
        return metrics.report(tally, _standing(job, view))


def write_results(job: Path, which: Literal["succeeded", "failed", "all"], out: BinaryIO) -> None:
    """Writes the finished lines of settled rows in input order."""
    with contextlib.closing(View(job)) as view:
        _write_records(view, which, out)


def _write_records(view: View, which: Literal["succeeded", "failed", "all"], out: BinaryIO) -> None:
    for data in view.records(which):
        out.write(data)
        out.write(b"\n")


def _tally(view: View) -> Tally:
    tally = Tally()
    kept = view.get("fold")
    if kept is not None:
        tally.load(kept)
    return tally


def _standing(job: Path, view: View) -> JobStanding:
    """Returns how a job stands as another process sees it."""
    ended = view.get("ended")
    running = JobLock(job).is_held_elsewhere()
    if running:
        state, reason, exit_code = "running", "", None
    elif ended is None:
        state, reason, exit_code = "interrupted", "the last run died", None
    else:
        state, reason, exit_code = ended["state"], ended["reason"], ended["exit_code"]
    open_intents = view.intents(open_only=True)
    return stand(job, view, state, reason, exit_code, open_intents, running=running)


def stand(
    job: Path,
    view: View,
    state: str,
    reason: str,
    exit_code: int | None,
    open_intents: Sequence[Intent],
    *,
    running: bool = False,
) -> JobStanding:
    """Returns how a job stands with what only its caller knows: the state, and whether open intents are in flight."""
    last_line = view.get("last_line")
    total = view.rows(last_line)
    succeeded, failed = view.settled(last_line) if last_line is not None else (0, 0)
    doubts = [] if running else [intent.custom_id for intent in open_intents]
    source, settings = view.get("source") or {}, view.get("settings") or {}
    budget = settings.get("budget_usd")
    return JobStanding(
        job=str(job),
        input=source.get("path", ""),
        state=state,  # type: ignore[arg-type]
        reason=reason,
        exit_code=exit_code,
        total=total,
        succeeded=succeeded,
        failed=failed,
        pending=max(0, total - succeeded - failed - len(doubts)),
        results=str(job / "results.jsonl"),
        errors=str(job / "errors.jsonl"),
        in_doubt_ids=doubts,
        reserved_usd=sum((intent.reserved_usd for intent in open_intents), Decimal(0)),
        budget_usd=None if budget is None else Decimal(budget),
        rpm=_rpm(settings, view.get("told_rpm")),
    )


def _rpm(settings: Mapping[str, Any], told: int | None) -> int | None:
    """Returns the requests per minute that all endpoints together allow: what the user set for each, or they told."""
    own = settings.get("rpm")
    known = [told] if told is not None else []
    if own is not None:
        known.append(own * max(1, len(settings.get("base_urls") or ())))
    return min(known, default=None)


def project(job: Path, view: View, tally: Tally, standing: JobStanding) -> None:
    """Writes what people read: results, errors and reports. All of it can be written again from the store."""
    from batchrun.report.html import html

    reached("project")
    for name, which in (("results.jsonl", "succeeded"), ("errors.jsonl", "failed")):
        with replace_file(job / name) as out:
            _write_records(view, which, out)  # type: ignore[arg-type]
    document = metrics.report(tally, standing)
    with replace_file(job / "report.json") as out:
        out.write(metrics.dumps(document) + b"\n")
    with replace_file(job / "report.html") as out:
        out.write(html(document).encode())
