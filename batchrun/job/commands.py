"""What `submit`, `resume` and `check` do. Reading commands are in standing.py and estimating.py."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchrun.config import CONTENT, Settings, overlay
from batchrun.errors import BatchrunError, Exit
from batchrun.job.access import endpoints_for, key_for, preset_for, shaper_for
from batchrun.job.locate import job_directory
from batchrun.job.pinning import SPOOL, open_any, pin, readable
from batchrun.job.running import Outcome, Run
from batchrun.job.settings import from_json
from batchrun.records import BadRow
from batchrun.report.tally import Tally
from batchrun.run.files import JobLock, make_private_dir
from batchrun.run.progress import Console
from batchrun.run.source import scan
from batchrun.run.store import Store
from batchrun.run.view import DATABASE, View, is_job

__all__ = ["CheckResult", "check", "resume", "submit"]


class CheckResult(msgspec.Struct, frozen=True):
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
    """Starts the job of an input, or continues it. ``given``: the names of the settings that flags set now."""
    started = time.monotonic()
    _check_stream(input_path, settings, given)
    job = job_directory(input_path, settings)
    if input_path != "-":
        _check_readable(Path(input_path))
    remembered = _remembered(job)
    if remembered is not None:
        for name in sorted(given & CONTENT):
            if getattr(remembered, name) != getattr(settings, name):
                raise BatchrunError(
                    f"--{name.replace('_', '-')} differs from what this job was made with",
                    hint="requests of one job are made alike: start another with --job DIR",
                )
        settings = overlay(remembered, settings, given | {"limit"})
    if input_path == "-" and settings.flush_interval_s is not None and (settings.max_failures or "").endswith("%"):
        raise BatchrunError(
            "--max-failures can be no share of a stream: nobody knows how many rows there will be",
            hint="give a number of rows, as in --max-failures 100",
        )
    return _run(job, settings, environ, console, started, input_path=input_path)


def _check_stream(input_path: str, settings: Settings, given: frozenset[str]) -> None:
    """Refuses flags that the input gives no sense to. Raises: BatchrunError(2)."""
    for name, flag in (("flush_interval_s", "--flush-interval"), ("max_queue", "--max-queue")):
        if name in given and input_path != "-":
            raise BatchrunError(
                f"{flag} is for stdin, and INPUT is {input_path}",
                hint="leave it out, or pipe the rows: … | batchrun submit - --flush-interval 2 --job DIR",
            )
    if settings.flush_interval_s is None and "max_queue" in given:
        raise BatchrunError("--max-queue is for streams", hint="add --flush-interval SECONDS, or leave it out")


def _check_readable(path: Path) -> None:
    """Says at once that an input cannot be read; a pipe is not opened for that, its writer would notice."""
    with readable(path):
        path.stat()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _remembered(job: Path) -> Settings | None:
    """Returns the settings of a job that has sent something; None where there is none: then all is still open."""
    if not is_job(job):
        return None
    with contextlib.closing(View(job)) as view:
        kept = view.get("settings") if view.get("runs") else None
    return None if kept is None else from_json(kept)


def resume(
    job: Path, settings: Settings, given: frozenset[str], environ: Mapping[str, str], console: Console
) -> Outcome:
    """Continues a stopped job with what it remembers; what is given now wins."""
    started = time.monotonic()
    remembered = _remembered(job)
    if remembered is None:
        raise BatchrunError(
            f"the job at {job} never began", hint="run `batchrun submit INPUT` again", exit_code=Exit.INPUT
        )
    return _run(job, overlay(remembered, settings, given), environ, console, started, input_path=None)


def _run(
    job: Path,
    settings: Settings,
    environ: Mapping[str, str],
    console: Console,
    started: float,
    *,
    input_path: str | None,
) -> Outcome:
    if settings.mode == "deferred":
        raise BatchrunError("--mode deferred is not there yet", hint="use --mode auto, live or packed")
    preset = preset_for(settings, environ)
    key = key_for(preset, settings, environ)
    if settings.provider is None and not settings.base_urls:
        settings = replace(settings, provider=preset.name)  # a resume must not depend on which keys are set then
    if settings.proxy_env and preset.name != "sim":
        from batchrun.run.proxied import proxy_for

        for endpoint in endpoints_for(settings):  # what cannot be used is told before a job is made
            proxy_for(endpoint.base_url, allow_http=settings.allow_http)
    shaper = shaper_for(preset, settings)
    tally = Tally()
    with _opened(job, tally) as store:
        stream = pin(store, job, input_path, shaper, settings, console)
        return Run(job, store, tally, preset, key, shaper, settings, console, started, stream).outcome()


@contextlib.contextmanager
def _opened(job: Path, tally: Tally) -> Iterator[Store]:
    """Opens a job, made if need be, as its only run. One that was made here and never began leaves no trace.

    Raises: BatchrunError: the directory is not ours to use (2), or another run holds it (75).
    """
    made = _make(job)
    lock = JobLock(job)
    lock.acquire()
    try:
        with contextlib.closing(Store(job, tally)) as store:
            fresh, made = made, False  # whatever fails from here on: what may have been paid for stays
            try:
                yield store
            except BaseException:
                made = fresh and not store.get("runs")
                raise
    finally:
        if made:
            for name in (*(f"{DATABASE}{of}" for of in ("", "-journal", "-wal", "-shm")), SPOOL, "lock"):
                (job / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody put something there
                job.rmdir()
        lock.release()


def _make(job: Path) -> bool:
    """Makes the job directory unless it is there. Returns whether it was made. Raises: BatchrunError(2)."""
    if not job.parent.is_dir():
        raise BatchrunError(f"there is no directory {job.parent}", hint="make it first, or choose another --job DIR")
    try:
        make_private_dir(job)
    except FileExistsError:
        if not job.is_dir():
            raise BatchrunError(f"{job} is a file", hint="choose another place with --job DIR") from None
        if any(job.iterdir()) and not (is_job(job) or (job / "lock").exists()):
            raise BatchrunError(
                f"{job} holds other things and no job", hint="choose an empty or new directory with --job DIR"
            ) from None
        return False
    except OSError as error:
        raise BatchrunError(
            f"cannot make the job directory {job}: {error.strerror}", hint="choose another place with --job DIR"
        ) from None
    return True
