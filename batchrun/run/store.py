"""The job's one truth: a SQLite file, one writer on a thread of its own, read-only views beside it.

What must hold, whatever happens to the process or the machine:

- ``Store.commit`` resolves only once its operations are durable (WAL, synchronous=FULL), and operations are applied in
  the order in which they were given.
- An intent (``Sent``) is durable before its request leaves; so after a crash the open intents are exactly the sends
  whose end is unknown.
- A row has at most one outcome, and the first one wins.
- The fold kept beside the rows is that of exactly the operations committed.
- After a failed commit nothing more is accepted: every later ``commit`` fails with the same error.

Tables: ``job`` (settings, source, fold), ``chunk`` (where the input's lines are, and their digests), ``priority``
(rows whose priority is not 0), ``send`` (rows sent and not settled), ``outcome`` and ``record`` (settled rows; apart,
so that walking the outcomes of a million rows does not read their replies).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson

from batchrun.errors import BatchrunError, Exit
from batchrun.records import Doubted, Fold, Operation, Reopened, Returned, Sent, Settled
from batchrun.run.failpoint import reached

__all__ = [
    "DATABASE",
    "Chunk",
    "Intent",
    "JobLock",
    "Store",
    "View",
    "is_job",
    "make_private_dir",
    "private_file",
    "rename",
    "replace_file",
]

DATABASE = "state.db"

FORMAT = 1
"""Version of the tables; a job of another version is refused, never guessed at."""

_SCHEMA = """
CREATE TABLE job (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE chunk (
    first_line INTEGER PRIMARY KEY, offset INTEGER, size INTEGER, lines INTEGER, rows INTEGER, entries BLOB
);
CREATE TABLE priority (line INTEGER PRIMARY KEY, priority INTEGER);
CREATE INDEX by_priority ON priority (priority DESC, line);
CREATE TABLE send (
    line INTEGER PRIMARY KEY, custom_id TEXT, sends INTEGER, attempts INTEGER, open INTEGER, reserved TEXT
);
CREATE TABLE outcome (line INTEGER PRIMARY KEY, status INTEGER, kind TEXT, sends INTEGER, unsent INTEGER);
CREATE TABLE record (line INTEGER PRIMARY KEY, data BLOB);
"""

_CHUNK = "first_line,offset,size,lines,rows,entries"

_LOOKED_AT_S = 0.3
"""`status` holds the lock for an instant to see whether a run does; a run waits out that much."""

_GROUP = 2_000
"""Most operations in one transaction: bounds the wait of the first of them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive lines of the input, ``size`` bytes.

    ``entries`` holds 13 bytes a line: length (u32), class (u8; 0: blank, 1: a row), digest (8).
    """

    first_line: int
    offset: int
    size: int
    lines: int
    rows: int
    entries: bytes


@dataclass(frozen=True, slots=True)
class Intent:
    """A row that was sent and is not settled. ``open``: its last send's end is unknown."""

    line: int
    custom_id: str
    sends: int
    attempts: int
    open: bool
    reserved_usd: Decimal


# ---------------------------------------------------------------- files


def make_private_dir(path: Path) -> None:
    """Creates ``path`` with mode 0700 whatever the umask; its parent must exist. Raises: FileExistsError."""
    path.mkdir(mode=0o700)
    path.chmod(0o700)


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


def private_file(path: Path) -> BinaryIO:
    """Opens ``path`` for writing from scratch, mode 0600 whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(fd, 0o600)
    return os.fdopen(fd, "wb", buffering=1 << 20)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Writes a file that appears whole or not at all: temp → fsync → rename → fsync of the directory."""
    temporary = path.with_name(f".{path.name}.tmp")  # what a killed run left of it is written over
    try:
        with private_file(temporary) as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        reached("replace")
        rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def rename(source: Path, target: Path) -> None:
    """Renames within a directory, durably."""
    source.replace(target)
    reached("rename")
    sync_dir(target.parent)


def sync_dir(path: Path) -> None:
    """Makes the names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class JobLock:
    """Says that one run owns a job. Held by the kernel (flock), so a dead run leaves no stale lock.

    The file is not the database: SQLite's own locks on it must not be dropped by closing a second descriptor.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._fd: int | None = None

    def acquire(self) -> None:
        """Takes the lock at once. Raises: BatchrunError(75) if another run holds it."""
        until = time.monotonic() + _LOOKED_AT_S
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == self._path.stat().st_ino:
                    break
            except (BlockingIOError, FileNotFoundError):
                if time.monotonic() > until:
                    holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                    os.close(fd)
                    raise BatchrunError(
                        f"another run holds this job (process {holder or 'unknown'})",
                        hint="wait for it, or look at `batchrun status`; the lock goes with that process",
                        exit_code=Exit.BUSY,
                    ) from None
            os.close(fd)
            time.sleep(0.02)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Gives the lock back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_held_elsewhere(self) -> bool:
        """Whether a run holds the job now. Takes nothing and creates nothing."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


def _storage_error(error: BaseException) -> BatchrunError:
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


# ---------------------------------------------------------------- reading


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
            raise _storage_error(error) from error
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
        total = 0
        for chunk in self.chunks():
            last = chunk.first_line + chunk.lines - 1
            if last <= up_to_line:
                total += chunk.rows
                continue
            part = chunk.entries[4 : (up_to_line - chunk.first_line + 1) * 13 : 13]
            return total + len(part) - part.count(0)
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

    def pending_of_priority(self, sign: Literal[1, -1], up_to_line: int) -> Iterator[list[int]]:
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
            yield [number for _, number in found]

    def prioritised_in(self, first: int, last: int) -> set[int]:
        """Returns the lines from ``first`` to ``last`` whose priority is not 0."""
        return {
            line for (line,) in self._db.execute("SELECT line FROM priority WHERE line BETWEEN ? AND ?", (first, last))
        }

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


# ---------------------------------------------------------------- writing


class Store(View):
    """The writer. Before ``start`` it is used from the thread that opened it; after it, only ``commit`` writes."""

    def __init__(self, directory: Path, fold: Fold) -> None:
        self._path = path = directory / DATABASE
        fresh = not path.exists()
        try:
            if fresh:
                private_file(path).close()
            self._write = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
            if self._write.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":  # how SQLite says that it failed
                raise sqlite3.OperationalError(f"no write-ahead log can be made for {path}")
            for pragma in (
                "synchronous=FULL",
                "wal_autocheckpoint=4000",
                "cache_size=-16000",
            ):
                self._write.execute(f"PRAGMA {pragma}")
            if self._write.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                reached("create")
                start = f"INSERT INTO job VALUES ('format', '{FORMAT}')"  # noqa: S608 - a constant
                self._write.executescript(f"BEGIN;{_SCHEMA}{start};COMMIT;")
                sync_dir(directory)
        except (sqlite3.Error, OSError) as error:
            raise _storage_error(error) from error
        super().__init__(directory)
        self.fold = fold
        self._empty = fold.dump()
        self._load_fold()
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BatchrunError | None = None

    def _load_fold(self) -> None:
        kept = self.get("fold")
        self.fold.load(self._empty if kept is None else kept)
        self._kept = self._dumped = self.fold.dump()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One durable transaction on the caller's thread; the fold is taken back with it. Raises: BatchrunError(74)."""
        try:
            self._write.execute("BEGIN IMMEDIATE")
            try:
                yield self._write
                reached("commit")
                self._write.execute("COMMIT")
                reached("committed")
            except BaseException:
                self.fold.load(self._kept)
                if self._write.in_transaction:
                    self._write.execute("ROLLBACK")
                with contextlib.suppress(sqlite3.Error):
                    self._load_fold()  # a commit that failed may have become durable all the same
                raise
        except (sqlite3.Error, OSError) as error:
            raise _storage_error(error) from error
        self._kept = self._dumped

    def put(self, **values: Any) -> None:  # noqa: ANN401 - JSON
        """Keeps JSON values, durably."""
        with self.transaction() as db:
            self.keep(db, **values)

    def keep(self, db: sqlite3.Connection, **values: Any) -> None:  # noqa: ANN401 - JSON
        """Keeps JSON values as part of a transaction."""
        for key, value in values.items():
            db.execute("INSERT OR REPLACE INTO job VALUES (?,?)", (key, orjson.dumps(value)))

    def add_chunk(self, db: sqlite3.Connection, chunk: Chunk) -> None:
        """Adds a chunk to the index as part of a transaction."""
        values = (chunk.first_line, chunk.offset, chunk.size, chunk.lines, chunk.rows, chunk.entries)
        db.execute("INSERT INTO chunk VALUES (?,?,?,?,?,?)", values)

    def clear(self, db: sqlite3.Connection) -> None:
        """Forgets all rows, as part of a transaction: for a job of which nothing was ever sent."""
        for table in ("chunk", "priority", "send", "outcome", "record"):
            db.execute(f"DELETE FROM {table}")  # noqa: S608 - constants
        self.fold.load(self._empty)

    def apply(self, operations: Sequence[Operation]) -> None:
        """Commits operations on the caller's thread; only while the writer does not run."""
        with self.transaction() as db:
            self.add(db, operations)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the writer thread; ``commit`` may be called from ``loop`` from now on."""
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="batchrun-store", daemon=True)
        self._thread.start()

    def commit(self, operations: Sequence[Operation]) -> asyncio.Future[None]:
        """Returns a future that is done once the operations are durable, or holds BatchrunError(74)."""
        future = self._loop.create_future()
        self._queue.put((operations, future))
        return future

    def stop(self) -> None:
        """Commits what was given and ends the writer thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Folds the log back into the file and closes everything.

        Raises: BatchrunError(74) if the disk fails only now; what was committed is in the log and safe.
        """
        self.stop()
        super().close()
        try:
            self._write.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            if self._failure is None:
                raise _storage_error(error) from error
        finally:
            self._write.close()

    def salvage(self, operations: Sequence[Operation]) -> bool:
        """Tries once more to keep what a failed commit held back, on a connection of its own, after ``stop``.

        Returns whether it is kept now. The run has failed all the same: this only saves asking again.
        """
        try:
            self._write.close()
            self._write = sqlite3.connect(self._path, isolation_level=None)
            self._write.execute("PRAGMA synchronous=FULL")
            self._load_fold()
            self.apply([o for o in operations if isinstance(o, Settled) and not self.is_settled(o.line)])
        except (BatchrunError, sqlite3.Error):
            return False
        return True

    def _run(self) -> None:
        """The writer thread: one transaction for all that has queued up while the last one was being synced."""
        closing = False
        while not closing:
            group: list[_Entry] = []
            size = 0
            entry = self._queue.get()
            while entry is not None:
                group.append(entry)
                size += len(entry[0])
                if size >= _GROUP:
                    break
                try:
                    entry = self._queue.get_nowait()
                except queue.Empty:
                    break
            closing = entry is None
            if group:
                self._commit_group(group)

    def _commit_group(self, group: list[_Entry]) -> None:
        if self._failure is None:
            try:
                self.apply([operation for operations, _ in group for operation in operations])
            except BatchrunError as error:
                self._failure = error
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be sent after it
                self._failure = _storage_error(error)
        failure = self._failure
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
            self._loop.call_soon_threadsafe(_resolve, [future for _, future in group], failure)

    def add(self, db: sqlite3.Connection, operations: Sequence[Operation]) -> None:
        """Adds operations as part of a transaction."""
        # By kind, not one by one: a statement a row would pass the interpreter lock to and fro with the event loop.
        # Within a group, a row's send that also ended is no intent any more.
        settled: dict[int, Settled] = {}
        returned: dict[int, Returned] = {}
        sent: dict[int, Sent] = {}
        fold = self.fold.add
        for operation in operations:
            if isinstance(operation, Sent):
                sent[operation.line] = operation
            elif isinstance(operation, Settled):
                settled.setdefault(operation.line, operation)
                sent.pop(operation.line, None)
            elif isinstance(operation, Returned):
                returned[operation.line] = operation
                sent.pop(operation.line, None)
            elif isinstance(operation, Doubted):
                db.execute("UPDATE send SET open=0, reserved='0', attempts=attempts+1 WHERE line=?", (operation.line,))
            elif isinstance(operation, Reopened):
                db.execute("DELETE FROM outcome WHERE line=?", (operation.line,))
                db.execute("DELETE FROM record WHERE line=?", (operation.line,))
            fold(operation)
        if settled:
            _write_many(
                db,
                "INSERT INTO outcome VALUES ",
                "(?,?,?,?,?)",
                "ON CONFLICT DO NOTHING",
                [(o.line, int(o.status == "succeeded"), o.kind, o.sends, o.unsent) for o in settled.values()],
            )
            _write_many(
                db,
                "INSERT INTO record VALUES ",
                "(?,?)",
                "ON CONFLICT DO NOTHING",
                [(o.line, o.record) for o in settled.values()],
            )
            _write_many(db, "DELETE FROM send WHERE line IN (", "?", ")", [(line,) for line in settled])
        if returned:
            _write_many(
                db,
                "INSERT INTO send VALUES ",
                "(?,'',?,?,0,'0')",
                "ON CONFLICT(line) DO UPDATE SET sends=excluded.sends, attempts=excluded.attempts, open=0,"
                " reserved='0'",
                [(o.line, o.sends, o.attempts) for o in returned.values()],
            )
        if sent:
            _write_many(
                db,
                "INSERT INTO send VALUES ",
                "(?,?,?,?,1,?)",
                "ON CONFLICT(line) DO UPDATE SET sends=excluded.sends, attempts=excluded.attempts, open=1,"
                " reserved=excluded.reserved, custom_id=excluded.custom_id",
                [(o.line, o.custom_id, o.send, o.attempt, str(o.reserved_usd)) for o in sent.values()],
            )
        self._dumped = self.fold.dump()
        db.execute("INSERT OR REPLACE INTO job VALUES ('fold',?)", (orjson.dumps(self._dumped),))


_Entry = tuple[Sequence[Operation], "asyncio.Future[None]"]


def _resolve(futures: Sequence[asyncio.Future[None]], failure: BatchrunError | None) -> None:
    for future in futures:
        if future.done():  # its waiter was cancelled
            continue
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)


def _write_many(db: sqlite3.Connection, head: str, one: str, tail: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Runs one statement per 64, 16, 4 or 1 rows: few texts for SQLite's cache, few steps for the lock."""
    start, left = 0, len(rows)
    for size in (64, 16, 4, 1):
        while left >= size:
            values = [value for row in rows[start : start + size] for value in row]
            db.execute(head + ",".join([one] * size) + tail, values)
            start += size
            left -= size
