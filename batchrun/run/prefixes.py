"""Finds the groups of an input's rows whose prompts begin alike, in flat memory: SQLite sorts their keys on disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from batchrun.intake.prefixes import Key, Shared, group, key_of
from batchrun.records import Row
from batchrun.run.source import scratch

__all__ = ["Prefixes"]


class Prefixes:
    """Takes rows in while an input is scanned, and then tells its groups. A row too short for a key costs nothing."""

    def __init__(self) -> None:
        self._db: sqlite3.Connection | None = None
        self._pending: list[Key] = []
        self._bytes = 0

    def add(self, row: Row) -> None:
        """Takes a row in."""
        self._bytes += len(row.body)
        if (key := key_of(row)) is not None:
            self._pending.append(key)
            if len(self._pending) >= 4096:
                self._flush()

    def _flush(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = scratch()
            self._db.execute("CREATE TABLE key (chain BLOB, line INTEGER, model TEXT, bytes INTEGER)")
            self._db.execute("CREATE TABLE member (place INTEGER PRIMARY KEY, line INTEGER, path TEXT)")
        self._db.executemany("INSERT INTO key VALUES (?,?,?,?)", self._pending)
        self._pending.clear()
        return self._db

    def find(self) -> Shared:
        """Finds the groups, once all rows are in. Returns what they share."""
        found = Shared(bytes=self._bytes)
        if self._db is None and not self._pending:
            return found
        db = self._flush()
        keys = map(Key._make, db.execute("SELECT chain,line,model,bytes FROM key ORDER BY chain DESC, line"))

        def members() -> Iterator[tuple[int, str]]:
            for member in group(keys):
                found.add(member)
                yield member.line, " ".join(map(str, member.path))

        db.executemany("INSERT INTO member (line,path) VALUES (?,?)", members())
        return found

    def members(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields (line, path) of the rows in groups, in the order in which to send them, after ``find``."""
        if self._db is not None:
            for line, path in self._db.execute("SELECT line,path FROM member ORDER BY place"):
                yield line, tuple(map(int, path.split()))

    def close(self) -> None:
        """Lets go of what was kept on disk."""
        if self._db is not None:
            self._db.close()
