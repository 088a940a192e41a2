"""Makes sure that a job knows its input as it is: indexed once, compared if it may have changed, never changed."""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from batchrun.config import Settings
from batchrun.errors import BatchrunError, Exit
from batchrun.intake.jsonl import BLOCK_BYTES, OversizedLine, is_plain, open_input, spool
from batchrun.intake.prefixes import Shared
from batchrun.intake.shapes import Shaper
from batchrun.job.settings import to_json
from batchrun.records import BadRow, Line, Operation, Row
from batchrun.run import settle
from batchrun.run.failpoint import reached
from batchrun.run.files import private_file, rename, sync_dir
from batchrun.run.prefixes import Prefixes
from batchrun.run.progress import Console
from batchrun.run.source import Indexer, input_as_json, scan
from batchrun.run.store import Store
from batchrun.run.stream import Queue, Stream
from batchrun.run.view import View

__all__ = ["SPOOL", "grouped", "input_of", "may_group", "open_any", "pin", "readable"]

SPOOL = "input.jsonl"
"""The copy, in the job directory, of an input that cannot be read twice by offset."""


@contextlib.contextmanager
def open_any(input_path: str) -> Iterator[BinaryIO]:
    """Opens an input, decoded; ``-`` is stdin."""
    if input_path == "-":
        yield sys.stdin.buffer
        return
    with readable(input_path), open_input(Path(input_path)) as stream:
        yield stream


@contextlib.contextmanager
def readable(input_path: str | Path) -> Iterator[None]:
    """Says in a person's words that an input cannot be read. Raises: BatchrunError(2)."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise BatchrunError(
            f"cannot read {input_path}: {error.strerror}",
            hint="give the path of a JSONL file, or - for stdin",
        ) from None


def input_of(job: Path, store: View) -> Path:
    """Returns the file whose lines the job's index points at."""
    source = store.get("source")
    return job / SPOOL if source["spooled"] else _found(job, source["path"])


def _found(job: Path, path: str) -> Path:
    """Returns where an input is now: where it was, or beside its job if both were moved together."""
    beside = job.parent / Path(path).name
    return beside if not Path(path).exists() and beside.exists() else Path(path)


def pin(
    store: Store, job: Path, input_path: str | None, shaper: Shaper, settings: Settings, console: Console
) -> Stream | None:
    """Makes sure that the store knows the input as it is. ``input_path`` None: the one that the job remembers.

    Returns the stream where the input is to be taken in while it is sent.
    Raises: BatchrunError(65) for bad lines or an input that changed; then the job is as it was.
    """
    index = _Index(store, job, shaper, settings, console)
    source = store.get("source") if store.get("runs") else None
    if source is not None and source["path"] == "-":
        index.rest(source)
    if input_path == "-":
        if settings.flush_interval_s is not None:
            return index.stream(source)
        index.spool(sys.stdin.buffer, _STDIN)
        return None
    _pin_file(index, store, job, input_path)
    return None


def _pin_file(index: _Index, store: Store, job: Path, input_path: str | None) -> None:
    source = store.get("source")
    if input_path is not None:
        path = Path(input_path)
    else:
        path = _found(job, source["path"])
        if source["spooled"] and not path.is_file():
            return  # a pipe, or gone: the copy is what is sent
    with readable(path):
        found = path.stat()
    stamp = {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}
    if source is not None and {name: source.get(name) for name in stamp} == stamp and store.get("runs"):
        if source["path"] != str(path.absolute()):  # moved, or named another way
            store.put(source=source | {"path": str(path.absolute())})
        return
    about = {"path": str(path.absolute()), "spooled": not is_plain(path), **stamp}
    with readable(path), open_input(path) as stream:
        if about["spooled"]:
            index.spool(stream, about)
        else:
            index.take(stream, about)


_STDIN = {"path": "-", "spooled": True}


class _Index:
    """Takes an input into a store: all of it or nothing."""

    def __init__(self, store: Store, job: Path, shaper: Shaper, settings: Settings, console: Console) -> None:
        self._store = store
        self._job = job
        self._shaper = shaper
        self._settings = settings
        self._console = console

    def spool(self, stream: BinaryIO, source: dict[str, Any]) -> None:
        """Takes in what cannot be read twice, by way of a copy; the copy before it stays unless all goes well."""
        arriving = self._job / f"{SPOOL}.new"
        try:
            _copy(stream, arriving)
            if not is_plain(arriving):  # stdin may be compressed too
                packed = arriving.replace(arriving.with_suffix(".packed"))
                try:
                    with open_input(packed) as decoded:
                        _copy(decoded, arriving)
                finally:
                    packed.unlink()
            with arriving.open("rb") as copy:
                # Renamed before the index is committed: an index without its lines would be a job without its input.
                self.take(copy, source, lambda: rename(arriving, self._job / SPOOL))
        finally:
            arriving.unlink(missing_ok=True)

    def rest(self, source: dict[str, Any]) -> None:
        """Takes in the lines that an earlier run has read and not indexed; cuts off the beginning of one."""
        spooled = self._job / SPOOL
        end = self._store.end()
        if not spooled.exists() or spooled.stat().st_size <= end:
            return
        with spooled.open("r+b") as lines:
            _cut_to_whole_lines(lines, end)
            if lines.seek(0, os.SEEK_END) > end:
                lines.seek(0)
                self.take(lines, source)

    def stream(self, source: dict[str, Any] | None) -> Stream | None:
        """Begins to take stdin in, or goes on; None where the job has as many rows as it may."""
        store, settings, spooled = self._store, self._settings, self._job / SPOOL
        if source is None:
            private_file(spooled).close()
            sync_dir(self._job)
            with store.transaction() as db:
                store.clear(db)
                reached("ingest")
                store.keep(db, source=_STDIN, models=(), settings=to_json(settings))
        elif source["path"] != "-":
            raise BatchrunError(
                f"this job is that of {source['path']}, not of a stream", hint="start another one with --job DIR"
            )
        elif spooled.stat().st_size < store.end():  # a last line without its newline
            with spooled.open("ab") as lines:
                lines.write(b"\n")
        if settings.limit is not None and store.rows() >= settings.limit:
            return None
        return Stream(
            0,  # stdin, also where a parent had closed it
            spooled,
            store,
            self._shaper,
            Queue(settings.max_queue),
            skip_invalid=settings.skip_invalid,
            limit=settings.limit,
            go_on=f"batchrun resume {shlex.quote(str(self._job))}",
        )

    def take(self, stream: BinaryIO, source: dict[str, Any], before_commit: Callable[[], None] = lambda: None) -> None:
        """Scans a stream and keeps its index. Raises: BatchrunError(65) if it is invalid or not what it was."""
        store, settings = self._store, self._settings
        known = store if store.get("source") is not None and store.get("runs") else None
        with store.transaction() as db, contextlib.closing(Prefixes()) as prefixes:
            if known is None:  # nothing was ever sent: what an earlier start left may have been made otherwise
                store.clear(db)
            indexer = Indexer(known, lambda chunk: store.add_chunk(db, chunk))
            refused = _Refused(store, db)

            def on_line(line: Line | OversizedLine, shaped: Row | BadRow | None) -> None:
                if not indexer.take(line, shaped):
                    return
                if isinstance(shaped, Row):
                    self._place(db, shaped, prefixes)
                elif shaped is not None and settings.skip_invalid:
                    refused.add(shaped, input_as_json(line) if isinstance(line, Line) else b"null")

            def on_repeat(bad: BadRow, offset: int) -> None:
                if settings.skip_invalid and bad.line > indexer.known_lines:
                    stream.seek(offset)
                    refused.add(bad, input_as_json(Line(bad.line, offset, stream.readline().rstrip(b"\n"))))

            found = scan(stream, self._shaper, on_line, on_repeat)
            indexer.finish(found.lines)
            if found.bad_count and not settings.skip_invalid:
                self._console.bad_lines(found.bad, found.bad_count)
                raise BatchrunError(
                    f"{found.bad_count:,} of {found.rows:,} rows are invalid; nothing was sent",
                    hint="mend them, or run the rest with --skip-invalid",
                    exit_code=Exit.INPUT,
                )
            refused.flush()
            self._group(db, prefixes)
            reached("ingest")
            store.keep(db, source=source, models=dict(found.models), settings=to_json(settings))
            before_commit()
        if known is not None and indexer.added:
            self._console.notice(f"{indexer.added:,} new rows at the end of the input")
        if found.bad_count:
            self._console.bad_lines(found.bad, found.bad_count)

    def _place(self, db: sqlite3.Connection, row: Row, prefixes: Prefixes) -> None:
        """Notes what gives a new row another place than its line's."""
        if row.priority:
            db.execute("INSERT INTO priority VALUES (?,?)", (row.line, row.priority))
        elif may_group(self._settings):
            prefixes.add(row)

    def _group(self, db: sqlite3.Connection, prefixes: Prefixes) -> None:
        """Keeps the groups of new rows whose prompts begin alike, where that was asked for or pays."""
        shared = prefixes.find()
        if not grouped(self._settings, shared):
            return
        self._store.add_prefixes(db, prefixes.members())
        self._console.notice(
            f"{shared.rows:,} rows in {shared.groups:,} groups begin alike: sent group by group, so that the"
            f" provider's cache may serve {shared.share:.0%} of the input (--group-by none to leave them in order)"
        )


def may_group(settings: Settings) -> bool:
    """Whether rows may be sent by how their prompts begin: each in a call of its own, unless that is not wanted."""
    return settings.group_by != "none" and settings.mode != "packed"


def grouped(settings: Settings, shared: Shared) -> bool:
    """Whether rows that share so much are sent together."""
    return shared.rows > 0 and (shared.pays or settings.group_by == "prefix")


def _cut_to_whole_lines(lines: BinaryIO, end: int) -> None:
    """Cuts off what follows the last newline at or behind byte ``end``."""
    at = lines.seek(0, os.SEEK_END)
    while at > end:
        start = max(end, at - BLOCK_BYTES)
        lines.seek(start)
        newline = lines.read(at - start).rfind(b"\n")
        at = start if newline < 0 else start + newline + 1
        if newline >= 0:
            break
    lines.truncate(at)


def _copy(stream: BinaryIO, path: Path) -> None:
    with private_file(path) as out:
        spool(stream, out)
        out.flush()
        os.fsync(out.fileno())


class _Refused:
    """Settles bad lines as failed rows, some hundreds at a time."""

    def __init__(self, store: Store, db: sqlite3.Connection) -> None:
        self._store = store
        self._db = db
        self._pending: list[Operation] = []
        self._at = time.time()

    def add(self, bad: BadRow, row_json: bytes) -> None:
        self._pending.append(settle.invalid(bad, row_json, self._at))
        if len(self._pending) >= 500:
            self.flush()

    def flush(self) -> None:
        self._store.add(self._db, self._pending)
        self._pending.clear()
