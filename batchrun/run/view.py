"""Read-only queries on a job's store, also while a run writes to it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import msgspec
import orjson

from batchrun.errors import BatchrunError, Exit
from batchrun.records import Chunk

__all__ = ["DATABASE", "FORMAT", "Intent", "View", "is_job", "storage_error"]

DATABASE = "state.db"

FORMAT = 2
"""Version of the tables; a job of another version is refused, never guessed at."""

_CHUNK = "first_line,offset,size,lines,rows,entries"


class Intent(msgspec.Struct, frozen=True):
    """A row that was sent and is not settled. ``open``: its last send's end is unknown."""

    line: int
    custom_id: str
    sends: int
    attempts: int
    open: bool
    reserved_usd: Decimal


class View:
    """Read-only queries on a job, also while a run writes to it."""

    def __init__(self, directory: Path) -> None:
        path = directory / DATABASE
        if not path.exists():
            raise _no_job(directory)
        try:
            self._db = _open_to_read(path)
            if self._db.execute("SELECT 1 FROM sqlite_master WHERE name='job'").fetchone() is None:
                raise _no_job(directory)  # killed before its first commit
            found = self.get("format")
        except sqlite3.Error as error:
            raise storage_error(error) from error
        if found != FORMAT:
            self.close()
            raise BatchrunError(
                f"{path} has format {found}, this batchrun reads format {FORMAT}",
                hint="use the batchrun that made it",
                exit_code=Exit.INPUT,
            )

    def close(self) -> None:
        """Closes the connection."""
        self._db.close()

    def get(self, key: str) -> Any:  # noqa: ANN401 - JSON
        """Returns the JSON value kept under ``key``, or None."""
        row = self._db.execute("SELECT value FROM job WHERE key=?", (key,)).fetchone()
        return None if row is None else orjson.loads(row[0])

    def rows(self, up_to_line: int | None = None) -> int:
        """Counts the rows of the input (blank lines are none), at most up to a line that ends a ``limit``."""
        if up_to_line is None:
            return int(self._db.execute("SELECT coalesce(sum(rows),0) FROM chunk").fetchone()[0])
        whole = "SELECT coalesce(sum(rows),0) FROM chunk WHERE first_line+lines-1<=?"
        part = f"SELECT {_CHUNK} FROM chunk WHERE first_line<=? AND first_line+lines-1>?"  # noqa: S608 - constants
        total = int(self._db.execute(whole, (up_to_line,)).fetchone()[0])
        for found in self._db.execute(part, (up_to_line, up_to_line)):
            chunk = Chunk(*found)
            kinds = chunk.entries[4 : (up_to_line - chunk.first_line + 1) * 13 : 13]
            total += len(kinds) - kinds.count(0)
        return total

    def chunks(self) -> Iterator[Chunk]:
        """Yields the chunks in input order."""
        last = 0
        query = f"SELECT {_CHUNK} FROM chunk WHERE first_line>? ORDER BY first_line LIMIT 16"  # noqa: S608 - constants
        while True:
            found = self._db.execute(query, (last,)).fetchall()
            if not found:
                return
            for row in found:
                yield Chunk(*row)
            last = found[-1][0]

    def chunk_of(self, line: int) -> Chunk:
        """Returns the chunk that holds ``line``."""
        where = "WHERE first_line<=? ORDER BY first_line DESC LIMIT 1"
        return Chunk(*self._db.execute(f"SELECT {_CHUNK} FROM chunk {where}", (line,)).fetchone())  # noqa: S608 - constants

    def last_line(self) -> int:
        """Returns the number of the last line known, 0 if there is none."""
        row = self._db.execute("SELECT first_line+lines-1 FROM chunk ORDER BY first_line DESC LIMIT 1").fetchone()
        return 0 if row is None else int(row[0])

    def end(self) -> int:
        """Returns the byte of the input at which the first line not known begins, a newline behind the last known."""
        row = self._db.execute("SELECT offset+size+1 FROM chunk ORDER BY first_line DESC LIMIT 1").fetchone()
        return 0 if row is None else int(row[0])

    def settled_in(self, first: int, last: int) -> set[int]:
        """Returns the lines from ``first`` to ``last`` that have an outcome."""
        query = "SELECT line FROM outcome WHERE line BETWEEN ? AND ?"
        return {line for (line,) in self._db.execute(query, (first, last))}

    def is_settled(self, line: int) -> bool:
        """Whether ``line`` has an outcome."""
        return self._db.execute("SELECT 1 FROM outcome WHERE line=?", (line,)).fetchone() is not None

    def settled(self, up_to_line: int) -> tuple[int, int]:
        """Counts (succeeded, failed) rows up to a line."""
        query = "SELECT count(*), coalesce(sum(status),0) FROM outcome WHERE line<=?"
        total, succeeded = self._db.execute(query, (up_to_line,)).fetchone()
        return succeeded, total - succeeded

    def has_priorities(self) -> bool:
        """Whether any row has a priority other than 0."""
        return self._db.execute("SELECT 1 FROM priority LIMIT 1").fetchone() is not None

    def pending_of_priority(self, sign: Literal[1, -1], up_to_line: int) -> Iterator[int]:
        """Yields lines without an outcome whose priority is above (1) or below (-1) 0, the largest priority first."""
        bound = "priority>0" if sign > 0 else "priority<0"
        query = (
            f"SELECT priority, line FROM priority WHERE {bound} AND (priority<? OR (priority=? AND line>?))"  # noqa: S608
            " AND line<=? AND NOT EXISTS (SELECT 1 FROM outcome WHERE outcome.line=priority.line)"
            " ORDER BY priority DESC, line LIMIT 256"
        )
        priority, line = 2**63 - 1, 0
        while found := self._db.execute(query, (priority, priority, line, up_to_line)).fetchall():
            priority, line = found[-1]
            for _, number in found:
                yield number

    def prioritised_in(self, first: int, last: int) -> set[int]:
        """Returns the lines from ``first`` to ``last`` whose priority is not 0."""
        return {
            line for (line,) in self._db.execute("SELECT line FROM priority WHERE line BETWEEN ? AND ?", (first, last))
        }

    def has_prefixes(self) -> bool:
        """Whether any rows are in a group whose prompts begin alike."""
        return self._db.execute("SELECT 1 FROM prefix LIMIT 1").fetchone() is not None

    def pending_of_prefixes(self, up_to_line: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields (line, path) of the rows in groups that have no outcome, in the order in which to send them."""
        query = (
            "SELECT place, line, path FROM prefix WHERE place>? AND line<=?"
            " AND NOT EXISTS (SELECT 1 FROM outcome WHERE outcome.line=prefix.line) ORDER BY place LIMIT 256"
        )
        place = 0
        while found := self._db.execute(query, (place, up_to_line)).fetchall():
            place = found[-1][0]
            for _, line, path in found:
                yield line, tuple(map(int, path.split()))

    def prefixed_in(self, first: int, last: int) -> set[int]:
        """Returns the lines from ``first`` to ``last`` that are in a group."""
        query = "SELECT line FROM prefix WHERE line BETWEEN ? AND ?"
        return {line for (line,) in self._db.execute(query, (first, last))}

    def intents(self, *, open_only: bool = False) -> list[Intent]:
        """Returns the rows sent and not settled, in input order."""
        where = "WHERE open=1 " if open_only else ""
        query = f"SELECT line,custom_id,sends,attempts,open,reserved FROM send {where}ORDER BY line"  # noqa: S608 - constants
        return [
            Intent(line, custom_id, sends, attempts, bool(is_open), Decimal(reserved))
            for line, custom_id, sends, attempts, is_open, reserved in self._db.execute(query)
        ]

    def failed_rows(self, up_to_line: int) -> Iterator[tuple[int, str, bool]]:
        """Yields (line, kind, settled without a send) of the failed rows; they may be reopened meanwhile."""
        query = "SELECT line,kind,unsent FROM outcome WHERE status=0 AND line>? AND line<=? ORDER BY line LIMIT 1000"
        last = 0
        while found := self._db.execute(query, (last, up_to_line)).fetchall():
            last = found[-1][0]
            yield from found

    def records(self, which: Literal["succeeded", "failed", "all"]) -> Iterator[bytes]:
        """Yields the finished lines of settled rows in input order, without newlines."""
        where = {"succeeded": " AND status=1", "failed": " AND status=0", "all": ""}[which]
        query = (
            f"SELECT outcome.line, data FROM outcome JOIN record USING(line) WHERE outcome.line>?{where}"  # noqa: S608
            " ORDER BY outcome.line LIMIT 256"
        )
        last = 0  # in pages: a reader that dawdles must not keep the writer's log from being folded back
        while found := self._db.execute(query, (last,)).fetchall():
            last = found[-1][0]
            for _, data in found:
                yield data


def is_job(path: Path) -> bool:
    """Whether a directory holds a job; one that was killed before its first commit is none yet."""
    database = path / DATABASE
    if not database.exists() or database.stat().st_size == 0:
        return False
    try:
        with contextlib.closing(_open_to_read(database)) as db:
            return db.execute("SELECT 1 FROM sqlite_master WHERE name='job'").fetchone() is not None
    except sqlite3.Error:  # whoever opens it says what is wrong
        return True


def storage_error(error: BaseException) -> BatchrunError:
    """Returns what a failed read or write of the store is to a person: exit 74."""
    return BatchrunError(
        f"storage failed: {error}",
        hint="free space or mend the disk, then `batchrun resume`: what was shown as done is safe",
        exit_code=Exit.STORAGE,
    )


def _no_job(directory: Path) -> BatchrunError:
    return BatchrunError(f"there is no job at {directory}", hint="start one with `batchrun submit INPUT`")


def _open_to_read(path: Path) -> sqlite3.Connection:
    """Opens a database read-only. Where its directory cannot be written, as it is: nobody can be writing to it."""
    where = path.absolute().as_uri()
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        db = sqlite3.connect(f"{where}?{mode}", uri=True, check_same_thread=False)
        try:
            db.execute("PRAGMA busy_timeout=5000")
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            db.close()
            if mode != "mode=ro" or path.with_name(f"{path.name}-wal").exists():
                raise
        else:
            return db
    raise AssertionError("unreachable")
