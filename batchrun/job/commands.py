"""What `submit`, `resume` and `check` do. Reading commands are in standing.py and estimating.py."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchrun.config import CONTENT, Settings, overlay
from batchrun.errors import BatchrunError, Exit
from batchrun.job.access import key_for, preset_for, shaper_for
from batchrun.job.locate import job_directory
from batchrun.job.pinning import open_any, pin, readable
from batchrun.job.running import Outcome, Run
from batchrun.job.settings import from_json
from batchrun.records import BadRow
from batchrun.report.tally import Tally
from batchrun.run.progress import Console
from batchrun.run.source import scan
from batchrun.run.store import JobLock, Store, View, make_private_dir

__all__ = ["CheckResult", "check", "resume", "submit"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What ``check`` found. ``bad`` are the first twenty bad lines."""

    rows: int
    bad: list[BadRow]
    bad_count: int
    endpoints: dict[str, int]
    models: dict[str, int]

    @property
    def exit_code(self) -> Exit:
        """65 if a line is bad, else 0."""
        return Exit.INPUT if self.bad_count else Exit.OK


def check(input_path: str, settings: Settings, environ: Mapping[str, str]) -> CheckResult:
    """Validates every line as ``submit`` would, and sends nothing."""
    shaper = shaper_for(preset_for(settings, environ, need_key=False), settings)
    with open_any(input_path) as stream:
        found = scan(stream, shaper)
    return CheckResult(found.rows, found.bad, found.bad_count, dict(found.endpoints), dict(found.models))


def submit(
    input_path: str, settings: Settings, given: frozenset[str], environ: Mapping[str, str], console: Console
) -> Outcome:
    """Starts the job of an input, or continues it. ``given``: the names of the settings that were set now."""
    started = time.monotonic()
    job = job_directory(input_path, settings)
    if input_path != "-":
        with readable(input_path):
            Path(input_path).open("rb").close()
    if (job / "state.db").exists():
        with contextlib.closing(View(job)) as view:
            kept = view.get("settings")
        if kept is not None:
            remembered = from_json(kept)
            for name in sorted(given & CONTENT):
                if getattr(remembered, name) != getattr(settings, name):
                    raise BatchrunError(
                        f"--{name.replace('_', '-')} differs from what this job was made with",
                        hint="requests of one job are made alike: start another with --job DIR",
                    )
            settings = overlay(remembered, settings, given | {"limit"})
    return _run(job, settings, environ, console, started, input_path=input_path)


def resume(
    job: Path, settings: Settings, given: frozenset[str], environ: Mapping[str, str], console: Console
) -> Outcome:
    """Continues a stopped job with what it remembers; what is given now wins."""
    started = time.monotonic()
    with contextlib.closing(View(job)) as view:
        kept = view.get("settings")
    if kept is None:
        raise BatchrunError(
            f"the job at {job} never began", hint="run `batchrun submit INPUT` again", exit_code=Exit.INPUT
        )
    return _run(job, overlay(from_json(kept), settings, given), environ, console, started, input_path=None)


def _run(
    job: Path,
    settings: Settings,
    environ: Mapping[str, str],
    console: Console,
    started: float,
    *,
    input_path: str | None,
) -> Outcome:
    if settings.mode in ("packed", "deferred"):
        raise BatchrunError(
            f"--mode {settings.mode} is not there yet",
            hint="leave --mode out: rows are sent live, one per call",
        )
    preset = preset_for(settings, environ)
    key = key_for(preset, settings, environ)
    fresh = not job.exists()
    if not job.parent.is_dir():
        raise BatchrunError(f"there is no directory {job.parent}", hint="make it first, or choose another --job DIR")
    try:
        make_private_dir(job)
    except OSError as error:
        raise BatchrunError(
            f"cannot make the job directory {job}: {error.strerror}",
            hint="choose another place with --job DIR",
        ) from None
    lock = JobLock(job)
    lock.acquire()
    try:
        tally = Tally()
        store = Store(job, tally)
        try:
            shaper = shaper_for(preset, settings)
            try:
                pin(store, job, input_path, shaper, settings, console)
            except BatchrunError:
                fresh = fresh or store.get("source") is None
                raise
            fresh = False
            return Run(job, store, tally, preset, key, shaper, settings, console, started).outcome()
        finally:
            store.close()
            if fresh:  # nothing was sent or kept: leave no trace of a job that never began
                shutil.rmtree(job, ignore_errors=True)
    finally:
        lock.release()
