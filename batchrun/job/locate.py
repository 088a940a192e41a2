"""Where a job is: beside its input, or where it was told."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from batchrun.config import Settings
from batchrun.errors import BatchrunError
from batchrun.run.view import DATABASE, is_job

__all__ = ["SUFFIX", "job_directory", "locate"]

SUFFIX = ".batchrun"


def job_directory(input_path: str, settings: Settings) -> Path:
    """Returns the job directory of an input: ``--job``, else ``NAME.batchrun`` beside it."""
    if settings.job is not None:
        return settings.job
    if input_path == "-":
        raise BatchrunError("stdin needs --job DIR", hint="the job directory keeps a copy, so that resume works")
    path = Path(input_path)
    name = path.name
    for suffix in (".gz", ".zst"):
        name = name.removesuffix(suffix)
    return path.with_name(Path(name).stem + SUFFIX)


def locate(argument: str | None, settings: Settings, *, cwd: Path) -> Path:
    """Returns an existing job directory: JOB's (a directory, or an input's path), or the latest one in ``cwd``."""
    if argument is None and settings.job is None:
        jobs = [path.parent for path in cwd.glob(f"*{SUFFIX}/{DATABASE}")]
        if not jobs:
            raise BatchrunError("there is no job here", hint="name one, or start one with `batchrun submit INPUT`")
        return max(jobs, key=_modified)
    path = settings.job if argument is None or settings.job is not None else Path(argument)
    assert path is not None  # noqa: S101 - one of the two is given
    for candidate in (path, job_directory(str(path), replace(settings, job=None))):
        if is_job(candidate):
            return candidate
    raise BatchrunError(f"there is no job at {path}", hint="start one with `batchrun submit INPUT`")


def _modified(job: Path) -> float:
    return max(path.stat().st_mtime for path in job.glob(f"{DATABASE}*"))
