"""The job's one truth: a SQLite file with one writer at a time: the event loop for what is soon done, else a thread.

A small commit takes a fraction of a millisecond where the disk is a good one, and one or two where it is handed to a
thread and back: each statement gives the interpreter's lock away and asks a busy loop for it again. So the loop itself
commits what one of its rounds gave, if that is little and the disk has been quick. All else is the thread's.

What must hold, whatever happens to the process or the machine:

- ``Store.commit`` resolves only once its operations are durable (WAL, synchronous=FULL), and operations are applied in
  the order in which they were given.
- An intent (``Sent``) is durable before its request leaves; so after a crash the open intents are exactly the sends
  whose end is unknown.
- A row has at most one outcome, and the first one wins.
- The fold kept beside the rows is that of exactly the operations committed.
- After a failed commit nothing more is accepted: every later ``commit`` fails with the same error.

Tables: ``job`` (settings, source, fold), ``chunk`` (where the input's lines are, and their digests), ``priority``
(rows whose priority is not 0), ``prefix`` (rows whose prompts begin alike: their groups and their place in the order of
sending), ``send`` (rows sent and not settled), ``outcome`` and ``record`` (settled rows; apart, so that walking the
outcomes of a million rows does not read their replies).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from batchrun.errors import BatchrunError
from batchrun.records import Chunk, Doubted, Fold, Indexed, Operation, Reopened, Returned, Sent, Settled
from batchrun.run.failpoint import reached
from batchrun.run.files import private_file, sync_dir
from batchrun.run.view import DATABASE, FORMAT, View, storage_error

__all__ = ["Store"]

_SCHEMA = """
CREATE TABLE job (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE chunk (
    first_line INTEGER PRIMARY KEY, offset INTEGER, size INTEGER, lines INTEGER, rows INTEGER, entries BLOB
);
CREATE TABLE priority (line INTEGER PRIMARY KEY, priority INTEGER);
CREATE INDEX by_priority ON priority (priority DESC, line);
CREATE TABLE prefix (place INTEGER PRIMARY KEY, line INTEGER, path TEXT);
CREATE UNIQUE INDEX prefix_of ON prefix (line);
CREATE TABLE send (
    line INTEGER PRIMARY KEY, custom_id TEXT, sends INTEGER, attempts INTEGER, open INTEGER, reserved TEXT
);
CREATE TABLE outcome (line INTEGER PRIMARY KEY, status INTEGER, kind TEXT, sends INTEGER, unsent INTEGER);
CREATE TABLE record (line INTEGER PRIMARY KEY, data BLOB);
"""

_GROUP = 2_000
"""Nothing is added to a transaction of so many operations: bounds the wait of the first of them."""
_QUICK_S = 0.002
"""The loop waits only for a disk on which a COMMIT takes less, on the average of about the last sixteen."""
_SMALL = 128
"""Most operations that the loop writes itself. More come together only where it is short of time: then a thread's work
beside it is worth more than what handing over costs."""
_SMALL_BYTES = 1024 * 1024
"""Most bytes of records that the loop writes itself."""
_AT_ONCE = 64
"""Most rows in one statement. SQLite keeps the prepared ones of every length: five kinds of them."""


class Store(View):
    """The writer. Before ``start`` it is used from the thread that opened it; after it, only ``commit`` writes."""

    def __init__(self, directory: Path, fold: Fold) -> None:
        self._path = path = directory / DATABASE
        fresh = not path.exists()
        try:
            if fresh:
                private_file(path).close()
            self._write = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, cached_statements=6 * _AT_ONCE
            )
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
            raise storage_error(error) from error
        super().__init__(directory)
        self.fold = fold
        self._empty = fold.dump()
        self._load_fold()
        self._given: list[_Entry] = []
        """What this round of the loop has given."""
        self._queue: queue.SimpleQueue[list[_Entry] | None] = queue.SimpleQueue()
        """To the thread: what rounds gave; None for the end."""
        self._queued = 0
        """Entries that the thread has, and the loop has not heard of again."""
        self._thread: threading.Thread | None = None
        self._commit_s = 0.0
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
                began = time.perf_counter()
                reached("commit")
                self._write.execute("COMMIT")
                self._commit_s += (time.perf_counter() - began - self._commit_s) / 16
                reached("committed")
            except BaseException:
                self.fold.load(self._kept)
                if self._write.in_transaction:
                    self._write.execute("ROLLBACK")
                with contextlib.suppress(sqlite3.Error):
                    self._load_fold()  # a commit that failed may have become durable all the same
                raise
        except (sqlite3.Error, OSError) as error:
            raise storage_error(error) from error
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

    def add_prefixes(self, db: sqlite3.Connection, members: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Adds (line, path of groups) of rows whose prompts begin alike, in order of sending, within a transaction.

        Rows that came later have groups of their own: there are never more groups than places, so that numbers from
        there on are new.
        """
        known = db.execute("SELECT coalesce(max(place),0) FROM prefix").fetchone()[0]
        values = ((line, " ".join(str(known + number) for number in path)) for line, path in members)
        db.executemany("INSERT INTO prefix (line,path) VALUES (?,?)", values)

    def _index(self, db: sqlite3.Connection, indexed: Indexed) -> None:
        """Takes in lines that arrived; they are all of the job as far as it is known by then."""
        self.add_chunk(db, indexed.chunk)
        db.executemany("INSERT INTO priority VALUES (?,?)", indexed.priorities)
        self.keep(db, last_line=indexed.chunk.first_line + indexed.chunk.lines - 1)
        if indexed.models:
            self.keep(db, models=indexed.models)

    def clear(self, db: sqlite3.Connection) -> None:
        """Forgets all rows, as part of a transaction: for a job of which nothing was ever sent."""
        for table in ("chunk", "priority", "prefix", "send", "outcome", "record"):
            db.execute(f"DELETE FROM {table}")  # noqa: S608 - constants
        self.fold.load(self._empty)

    def apply(self, operations: Sequence[Operation]) -> None:
        """Commits operations on the caller's thread; between ``start`` and ``stop``, ``commit`` is what to call."""
        with self.transaction() as db:
            self.add(db, operations)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes ready for ``commit``, which may be called from ``loop`` from now on."""
        self._loop = loop
        self._commit_s = 0.0  # what an ingest wrote at once says nothing of it
        self._thread = threading.Thread(target=self._run, name="batchrun-store", daemon=True)
        self._thread.start()

    def commit(self, operations: Sequence[Operation]) -> asyncio.Future[None]:
        """Returns a future that is done once the operations are durable, or holds BatchrunError(74)."""
        future = self._loop.create_future()
        if not self._given:
            self._loop.call_soon(self._write_given)
        self._given.append((operations, future))
        return future

    def _write_given(self) -> None:
        """Commits what the last round of the loop gave, here or on the thread."""
        group, self._given = self._given, []
        if not group:
            return
        if self._queued == 0 and self._commit_s < _QUICK_S and _is_small(group):
            self._tell(group, self._commit_group(group))
        else:
            self._hand_over(group)

    def _hand_over(self, group: Sequence[_Entry]) -> None:
        """Gives a group to the thread, in pieces of which each is enough for a transaction."""
        self._queued += len(group)
        piece: list[_Entry] = []
        size = 0
        for entry in group:
            piece.append(entry)
            size += len(entry[0])
            if size >= _GROUP:
                self._queue.put(piece)
                piece, size = [], 0
        if piece:
            self._queue.put(piece)

    def _tell(self, group: Sequence[_Entry], failure: BatchrunError | None) -> None:
        for _, future in group:
            if future.done():  # its waiter was cancelled
                continue
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

    def stop(self) -> None:
        """Commits what was given and ends the thread."""
        if self._thread is not None:
            group, self._given = self._given, []
            self._hand_over(group)
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
                raise storage_error(error) from error
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
        """The thread: one transaction for all that has queued up while the last one was being synced."""
        closing = False
        while not closing:
            group: list[_Entry] = []
            size = 0
            given = self._queue.get()
            while given is not None:
                group += given
                size += sum(len(operations) for operations, _ in given)
                if size >= _GROUP:
                    break
                try:
                    given = self._queue.get_nowait()
                except queue.Empty:
                    break
            closing = given is None
            if group:
                failure = self._commit_group(group)
                with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
                    self._loop.call_soon_threadsafe(self._written, group, failure)

    def _written(self, group: Sequence[_Entry], failure: BatchrunError | None) -> None:
        """The loop hears of what the thread has done."""
        self._queued -= len(group)
        self._tell(group, failure)

    def _commit_group(self, group: Sequence[_Entry]) -> BatchrunError | None:
        """Commits a group, unless an earlier one failed. Returns why it is not durable, or None."""
        if self._failure is None:
            try:
                self.apply([operation for operations, _ in group for operation in operations])
            except BatchrunError as error:
                self._failure = error
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be sent after it
                self._failure = storage_error(error)
        return self._failure

    def add(self, db: sqlite3.Connection, operations: Sequence[Operation]) -> None:
        """Adds operations as part of a transaction."""
        # By kind, not one by one: few statements are quicker, and on the thread each gives the interpreter's lock away.
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
            elif isinstance(operation, Indexed):
                self._index(db, operation)
                continue
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


def _is_small(group: Sequence[_Entry]) -> bool:
    """Says whether a group is written in moments. Lines that arrived are not: they bring what cannot be told."""
    if sum(len(operations) for operations, _ in group) > _SMALL:
        return False
    size = 0
    for operations, _ in group:
        for operation in operations:
            if isinstance(operation, Settled):
                size += len(operation.record)
            elif isinstance(operation, Indexed):
                return False
    return size <= _SMALL_BYTES


def _write_many(db: sqlite3.Connection, head: str, one: str, tail: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Writes rows in as few statements as can be."""
    for start in range(0, len(rows), _AT_ONCE):
        piece = rows[start : start + _AT_ONCE]
        db.execute(head + ",".join([one] * len(piece)) + tail, [value for row in piece for value in row])
