"""The job's input, pinned: scanned once, each line digested; afterwards rows are found by offset and verified."""

from __future__ import annotations

import os
import sqlite3
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import orjson

from batchrun.errors import BatchrunError, Exit
from batchrun.intake.jsonl import MAX_LINE_BYTES, OversizedLine, read_lines
from batchrun.intake.shapes import Shaper
from batchrun.records import BadRow, Chunk, Line, Row
from batchrun.run.view import View, storage_error

__all__ = ["Indexer", "RowReader", "Scan", "Seen", "repeated", "scan", "scratch"]

_ENTRY = struct.Struct("<IB8s")
_LENGTHS = struct.Struct("<I9x")
_BLANK, _ROW = 0, 1

_CHUNK_LINES = 1024
_CHUNK_BYTES = 1 << 20

_SHOWN = 20
"""Bad lines that a person is shown; the rest are counted."""


def _entry(line: Line | OversizedLine, kind: int) -> bytes:
    data = line.data if isinstance(line, Line) else b""
    length = len(data) if isinstance(line, Line) else line.length
    return _ENTRY.pack(length, kind, blake2b(data, digest_size=8).digest())


# ---------------------------------------------------------------- scanning


class Scan(msgspec.Struct):
    """What a pass over an input found. ``bad`` are the first twenty bad lines, in input order; ``bad_count`` all."""

    lines: int = 0
    rows: int = 0
    bad: list[BadRow] = msgspec.field(default_factory=list)
    bad_count: int = 0
    endpoints: Counter[str] = msgspec.field(default_factory=Counter)
    models: Counter[str] = msgspec.field(default_factory=Counter)

    def note_bad(self, bad: BadRow) -> None:
        """Counts a bad line; keeps it if it is among the first ones."""
        self.bad_count += 1
        self.bad.append(bad)
        if len(self.bad) > _SHOWN:
            self.bad.sort(key=lambda b: b.line)
            del self.bad[_SHOWN:]


def scratch() -> sqlite3.Connection:
    """Opens a database of this process alone: SQLite puts it on disk where it grows, and deletes it on closing."""
    db = sqlite3.connect("")
    for pragma in ("journal_mode=OFF", "synchronous=OFF"):
        db.execute(f"PRAGMA {pragma}")
    return db


class _Ids:
    """Finds repeated ids in flat memory: SQLite's sorter spills to disk, and costs a tenth of a unique index."""

    def __init__(self) -> None:
        self._db = scratch()
        self._db.execute("CREATE TABLE ids (line INTEGER PRIMARY KEY, hash INTEGER, id TEXT, offset INTEGER)")
        self._pending: list[tuple[int, int, str, int]] = []

    def add(self, line: Line | OversizedLine, custom_id: str) -> None:
        self._pending.append((line.number, hash(custom_id), custom_id, line.offset))
        if len(self._pending) >= 4096:
            self._flush()

    def _flush(self) -> None:
        self._db.executemany("INSERT INTO ids VALUES (?,?,?,?)", self._pending)
        self._pending.clear()

    def repeated(self) -> Iterator[tuple[int, int, str, int]]:
        """Yields (line, offset, id, line that has it first) for every repetition."""
        self._flush()
        self._db.execute("CREATE TABLE twice AS SELECT hash FROM ids GROUP BY hash HAVING count(*)>1")
        if self._db.execute("SELECT 1 FROM twice LIMIT 1").fetchone() is None:
            return
        query = (
            "SELECT line, offset, id, first FROM"
            " (SELECT line, offset, id, min(line) OVER (PARTITION BY id) AS first FROM ids"
            "  WHERE hash IN (SELECT hash FROM twice)) WHERE line>first ORDER BY line"
        )
        yield from self._db.execute(query)

    def close(self) -> None:
        self._db.close()


class Seen:
    """Tells at once whether an id was there before, for rows that are sent before the last one is known. Flat memory.

    Ids are known by 16 bytes of digest, in a private file that is deleted with the connection.
    """

    def __init__(self) -> None:
        self._db = scratch()
        self._db.isolation_level = None
        self._db.execute("PRAGMA cache_size=-32000")
        self._db.execute("CREATE TABLE ids (digest BLOB PRIMARY KEY, line INTEGER) WITHOUT ROWID")
        self._db.execute("BEGIN")  # for good: nothing is to be kept

    def first(self, custom_id: str, line: int) -> int:
        """Returns the line that has the id first: ``line`` itself if none had it before. Raises: BatchrunError(74)."""
        digest = blake2b(custom_id.encode(), digest_size=16).digest()
        try:
            if self._db.execute("INSERT OR IGNORE INTO ids VALUES (?,?)", (digest, line)).rowcount:
                return line
            return int(self._db.execute("SELECT line FROM ids WHERE digest=?", (digest,)).fetchone()[0])
        except sqlite3.Error as error:  # no room for temporary files
            raise storage_error(error) from error

    def close(self) -> None:
        """Forgets all."""
        self._db.close()


def repeated(line: int, custom_id: str, first: int) -> BadRow:
    """Returns what is wrong with a line whose id line ``first`` has."""
    why = f"repeats custom_id `{custom_id}`, first seen on line {first}"
    return BadRow(line, why, "ids must be unique", custom_id)


def scan(
    stream: BinaryIO,
    shaper: Shaper,
    on_line: Callable[[Line | OversizedLine, Row | BadRow | None], None] | None = None,
    on_repeat: Callable[[BadRow, int], None] | None = None,
) -> Scan:
    """Reads every line once, in flat memory, and finds all that is wrong with the input.

    ``on_line`` sees each line with what it is; ``on_repeat``, at the end, each line (and its
    offset) whose id an earlier one has.
    """
    found = Scan()
    ids = _Ids()
    shape = shaper.shape
    try:
        for line in read_lines(stream):
            shaped = shape(line)
            found.lines = line.number
            if isinstance(shaped, Row):
                found.rows += 1
                found.endpoints[shaped.endpoint] += 1
                found.models[shaped.model] += 1
                ids.add(line, shaped.custom_id)
            elif shaped is not None:
                found.rows += 1
                found.note_bad(shaped)
            if on_line is not None:
                on_line(line, shaped)
        for number, offset, custom_id, first in ids.repeated():
            bad = repeated(number, custom_id, first)
            found.note_bad(bad)
            if on_repeat is not None:
                on_repeat(bad, offset)
    finally:
        ids.close()
    found.bad.sort(key=lambda b: b.line)
    return found


class Indexer:
    """Builds the index of an input while it is scanned, and holds a known input against its index.

    Raises: BatchrunError(65) naming the first line that differs from what is known, or that is gone.
    """

    def __init__(self, known: View | None, write: Callable[[Chunk], None], mend: str | None = None) -> None:
        """``mend``: what a person may do about an input that is not what it was."""
        self._known = known.chunks() if known is not None else iter(())
        self.known_lines = known.last_line() if known is not None else 0
        self._expected = b""
        self._expected_from = 1
        self._write = write
        self._mend = mend
        self._entries: list[bytes] = []
        self._rows = 0
        self._first: Line | OversizedLine | None = None
        self._end = 0
        self.added = 0
        """Rows beyond those known."""

    def take(self, line: Line | OversizedLine, shaped: Row | BadRow | None) -> bool:
        """Takes the next line in. Returns whether it is new."""
        entry = _entry(line, _BLANK if shaped is None else _ROW)
        if line.number <= self.known_lines:
            self._compare(line.number, entry)
            return False
        if self._first is None:
            self._first = line
        self._entries.append(entry)
        self._end = line.offset + (len(line.data) if isinstance(line, Line) else line.length)
        if shaped is not None:
            self._rows += 1
            self.added += 1
        if len(self._entries) >= _CHUNK_LINES or self._end - self._first.offset >= _CHUNK_BYTES:
            self.flush()
        return True

    def _compare(self, number: int, entry: bytes) -> None:
        at = (number - self._expected_from) * 13
        if at >= len(self._expected):
            chunk = next(self._known)
            self._expected, self._expected_from, at = chunk.entries, chunk.first_line, 0
        if self._expected[at : at + 13] != entry:
            raise _changed(number, self._mend)

    def finish(self, last_line: int) -> None:
        """Writes what is left. ``last_line``: how many lines the input has now."""
        if last_line < self.known_lines:
            raise BatchrunError(
                f"the input was truncated: line {last_line + 1} is gone, the job knows {self.known_lines} lines",
                hint=self._mend or "restore the file, or start a new job with --job DIR",
                exit_code=Exit.INPUT,
            )
        self.flush()

    def flush(self) -> None:
        """Writes the lines since the last chunk, if there are any."""
        if self._first is None:
            return
        first = self._first
        self._write(
            Chunk(
                first.number,
                first.offset,
                self._end - first.offset,
                len(self._entries),
                self._rows,
                b"".join(self._entries),
            )
        )
        self._entries.clear()
        self._rows = 0
        self._first = None


def _changed(number: int, mend: str | None = None) -> BatchrunError:
    return BatchrunError(
        f"line {number} of the input has changed since the job began",
        hint=mend or "restore the file (rows may only be added at its end), or start a new job with --job DIR",
        exit_code=Exit.INPUT,
    )


# ---------------------------------------------------------------- reading


class RowReader:
    """Reads rows of a pinned input by offset; every line is verified against its digest as it is read.

    Raises: BatchrunError(65) naming the line that is not what it was.
    """

    def __init__(self, path: Path, view: View, shaper: Shaper, up_to_line: int, *, by_prefix: bool = True) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BatchrunError(
                f"cannot read the input {path}: {error.strerror}",
                hint="put it back where it was, or use `batchrun results` for what is done",
                exit_code=Exit.INPUT,
            ) from error
        self._view = view
        self._shaper = shaper
        self._up_to = up_to_line
        self._by_prefix = by_prefix and view.has_prefixes()
        self._chunk: Chunk | None = None
        """The one that a line was looked up in last."""

    def close(self) -> None:
        """Closes the input."""
        os.close(self._fd)

    def pending(self) -> Iterator[Row]:
        """Yields the rows without an outcome: larger priority first, then input order.

        Within priority 0 those come first whose prompts begin alike, group by group. Each is read when it is asked for.
        """
        prioritised = self._view.has_priorities()
        yield from self._of_priority(1)
        if self._by_prefix:
            for number, path in self._view.pending_of_prefixes(self._up_to):
                row = self.row(number)
                row.prefix = path
                yield row
        for chunk in self._view.chunks():
            if chunk.first_line > self._up_to:
                break
            last = min(chunk.first_line + chunk.lines - 1, self._up_to)
            skip = self._view.settled_in(chunk.first_line, last)
            if len(skip) >= chunk.rows:
                continue
            if prioritised:
                skip |= self._view.prioritised_in(chunk.first_line, last)
            if self._by_prefix:
                skip |= self._view.prefixed_in(chunk.first_line, last)
                if len(skip) >= chunk.rows:
                    continue
            yield from map(self._shape, self._lines(chunk, last, skip))
        yield from self._of_priority(-1)

    def _of_priority(self, sign: Literal[1, -1]) -> Iterator[Row]:
        yield from map(self.row, self._view.pending_of_priority(sign, self._up_to))

    def row(self, number: int) -> Row:
        """Returns the row on a line."""
        return self._shape(self.line(number))

    def line(self, number: int) -> Line:
        """Returns a line as it is in the input."""
        chunk = self._chunk
        if chunk is None or not chunk.first_line <= number < chunk.first_line + chunk.lines:
            chunk = self._chunk = self._view.chunk_of(number)
        before = number - chunk.first_line
        at = before * _ENTRY.size
        lengths = _LENGTHS.iter_unpack(memoryview(chunk.entries)[:at])
        offset = chunk.offset + sum(length for (length,) in lengths) + before
        length, _, digest = _ENTRY.unpack_from(chunk.entries, at)
        if length > MAX_LINE_BYTES:  # its digest is that of no bytes: nobody will read it
            return Line(number, offset, os.pread(self._fd, 1024, offset))
        data = os.pread(self._fd, length, offset)
        if blake2b(data, digest_size=8).digest() != digest:
            raise _changed(number)
        return Line(number, offset, data)

    def _lines(self, chunk: Chunk, last: int, skip: Container[int]) -> Iterator[Line]:
        """Yields the rows of a chunk up to line ``last`` but for those in ``skip``, read at one go and verified."""
        # An oversized line ends its chunk, and is bad: nobody asks for it.
        data = os.pread(self._fd, min(chunk.size, _CHUNK_BYTES + MAX_LINE_BYTES), chunk.offset)
        at = 0
        for index in range(last - chunk.first_line + 1):
            length, kind, digest = _ENTRY.unpack_from(chunk.entries, index * 13)
            number = chunk.first_line + index
            if kind == _ROW and number not in skip:
                piece = data[at : at + length]
                if blake2b(piece, digest_size=8).digest() != digest:
                    raise _changed(number)
                yield Line(number, chunk.offset + at, piece)
            at += length + 1

    def _shape(self, line: Line) -> Row:
        row = self._shaper.shape(line)
        if not isinstance(row, Row):  # it was a row when it was pinned: the shaping must differ
            raise _changed(line.number)
        return row


def input_as_json(line: Line, limit: int = 64 * 1024) -> bytes:
    """Returns an input line as one JSON value for errors.jsonl: itself, or a string of ``limit`` bytes of it."""
    data = line.data.removeprefix(b"\xef\xbb\xbf").strip()
    try:
        orjson.loads(data)
    except ValueError:
        return orjson.dumps(data[:limit].decode("utf-8", "backslashreplace"))
    return data.replace(b"\r", b" ")
