"""An input that is sent while it is still being written: read, checked, spooled, indexed, and only then handed on.

The spool is the copy in the job directory that later runs read from. Lines are durable in it before their index is, and
no row is handed on before that. So whatever happens, a row that was sent is in the index; a line that was read and not
indexed is at the end of the spool, where the next run finds it.
"""

from __future__ import annotations

import heapq
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from batchrun.errors import BatchrunError, Exit
from batchrun.intake.jsonl import GZIP_MAGIC, ZSTD_MAGIC, OversizedLine, read_lines
from batchrun.intake.shapes import Shaper
from batchrun.records import BadRow, Chunk, Indexed, Line, Operation, Row, Settled
from batchrun.run import settle
from batchrun.run.failpoint import reached
from batchrun.run.source import Indexer, Scan, Seen, input_as_json, repeated
from batchrun.run.view import View, storage_error

__all__ = ["Queue", "Stream"]

_BLOCK_BYTES = 64 * 1024
"""Read at once: what a pipe holds. No more than this is read beyond the rows that may wait."""

_LINGER_S = 0.02
"""What comes so soon after another line is kept with it: single lines cost at most 50 transactions a second."""

_QUEUE_BYTES = 32 * 1024 * 1024
"""Bodies that may wait, however few rows they are."""

Keep = Callable[[Sequence[Operation], int], None]
"""Makes operations durable, which take in so many rows. Raises: BatchrunError(74)."""


class Queue:
    """Rows that have arrived and are not sent yet, ``most`` of them at most; shared by the threads of a run.

    One thread puts them in, as ``arrived`` at first and as ``ready`` once they are durable; one takes them out by
    ``wait`` and ``pop``; the event loop says by ``sent`` that they wait no more.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[int, int] = {}
        """Line → bytes, from its arrival until it is sent."""
        self._bytes = 0
        self._ready: list[tuple[int, int, float, Row]] = []
        self._closed = False
        self.stopped = False

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be read."""
        return len(self._waiting) >= self._most or self._bytes >= _QUEUE_BYTES

    def arrived(self, row: Row) -> None:
        """A row waits from now on."""
        with self._changed:
            self._waiting[row.line] = len(row.body)
            self._bytes += len(row.body)

    def ready(self, rows: Iterable[Row], at: float) -> None:
        """Rows may be had; the first of them arrived at second ``at``."""
        with self._changed:
            for row in rows:
                heapq.heappush(self._ready, (-row.priority, row.line, at, row))
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Returns once more may be read, or nobody wants more."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or not self.is_full)

    def wait(self, until: float, held: int) -> int | None:
        """Returns how many rows can be had now; 0 at second ``until``, None where there will be no more.

        The caller holds ``held`` rows back for others to join them. It gets 0 at once where nobody can: where these are
        all that wait, and no more may be read.
        """
        with self._changed:
            while not self._ready:
                left_s = until - self._clock()
                if self.stopped or self._closed:
                    return None
                if left_s <= 0 or (self.is_full and held >= len(self._waiting)):
                    return 0
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            return len(self._ready)

    def pop(self) -> tuple[Row, float]:
        """Returns one of the rows that can be had, the most urgent, and the second at which it arrived."""
        with self._changed:
            _, _, at, row = heapq.heappop(self._ready)
        return row, at

    def sent(self, rows: Iterable[Row]) -> None:
        """Rows wait no more. Again it does nothing: what is asked again has been sent."""
        with self._changed:
            for row in rows:
                self._bytes -= self._waiting.pop(row.line, 0)
            self._changed.notify_all()

    def close(self) -> None:
        """No more rows will arrive."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody wants more rows: whoever waits need not."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


class Stream:
    """Takes an input in for as long as somebody writes it.

    It begins with the lines that the job knows already, if there are any: they are compared, what follows is new.
    """

    def __init__(
        self,
        fd: int,
        spool: Path,
        known: View,
        shaper: Shaper,
        queue: Queue,
        *,
        skip_invalid: bool,
        limit: int | None,
        go_on: str,
    ) -> None:
        """``limit``: rows of the job at most. ``go_on``: the command that goes on with what the job has."""
        self._fd = fd
        self._spool = spool
        self._known = known
        self._shaper = shaper
        self.queue = queue
        self._skip_invalid = skip_invalid
        self._left = None if limit is None else limit - known.rows()
        self._go_on = go_on
        self._models = dict.fromkeys(known.get("models") or ())
        self._woken, self._waker = os.pipe()
        self._rows: list[Row] = []
        self._refused: list[Settled] = []
        self._new_models = False
        self._pending_since: float | None = None
        """When the first line came that is not kept yet."""
        self._read_at = 0.0
        self._bad: BadRow | None = None
        self._enough = False
        self._is_cut = False
        self.found = Scan()
        """The bad lines that became failed rows."""
        self.ended = False
        """Whether all has been taken in that the job is to have."""

    def stop(self) -> None:
        """Lets ``receive`` end: what it has read is taken in, nothing more is read."""
        self.queue.stop()
        os.write(self._waker, b"\0")

    def close(self) -> None:
        """Gives back what it holds, after ``receive``."""
        os.close(self._woken)
        os.close(self._waker)

    def receive(self, keep: Keep) -> None:
        """Reads, on a thread of its own, until the input ends or ``stop`` is called.

        Raises: BatchrunError(65) for a line that is bad or not what it was: the rows before it are in the job, and a
        bad line is in the spool with what was read behind it. BatchrunError(74) where that cannot be written.
        """
        self._keep = keep
        self._seen = Seen()
        again = f"go on with what the job has: {self._go_on}; or start a new job with --job DIR"
        self._indexer = Indexer(self._known, self._commit, again)
        try:
            with self._spool.open("r+b", buffering=1 << 20) as self._out:
                self._out.seek(0, os.SEEK_END)
                self._receive()
        except OSError as error:
            raise storage_error(error) from error
        finally:
            self._seen.close()

    def _receive(self) -> None:
        last = 0
        for line in read_lines(self):
            if self._is_cut:  # the beginning of a line whose end was not read
                break
            self._take(line)
            last = line.number
        if self._is_cut:
            self._indexer.flush()
            self._out.flush()
            os.fsync(self._out.fileno())
        else:
            self._indexer.finish(last)
        if self._bad is not None:
            raise BatchrunError(
                f"line {self._bad.line} {self._bad.why}; the stream was read no further",
                hint=f"mend it in {self._spool}, or go on with what was read, and it as a failed row: "
                f"{self._go_on} --skip-invalid",
                exit_code=Exit.INPUT,
            )
        self.ended = self._enough or not self._is_cut
        if self.ended:
            self.queue.close()

    # ---------------------------------------------------------------- reading

    def read(self, _size: int = -1, /) -> bytes:
        """Returns what arrives next, once there is room for it; nothing at the end, or where no more is wanted."""
        while not (self._enough or self.queue.stopped):
            self._make_room()
            now = time.monotonic()
            linger_s = None
            if self._pending_since is not None:
                linger_s = self._pending_since + _LINGER_S - now
                if linger_s <= 0:
                    self._indexer.flush()
                    continue
            arrived, _, _ = select.select((self._fd, self._woken), (), (), linger_s)
            if self._fd in arrived and not self.queue.stopped:
                self._read_at = time.monotonic()
                try:
                    return os.read(self._fd, _BLOCK_BYTES)
                except BlockingIOError:  # a parent made it so, and somebody else was faster
                    continue
                except OSError as error:
                    raise BatchrunError(f"cannot read stdin: {error.strerror}", exit_code=Exit.INPUT) from error
        self._is_cut = True
        return b""

    def _make_room(self) -> None:
        if self.queue.is_full:
            self._indexer.flush()  # they may be what others wait for
            self.queue.wait_for_room()

    # ---------------------------------------------------------------- taking in

    def _take(self, line: Line | OversizedLine) -> None:
        if self._enough:
            self._write(line)  # for a later run
            return
        self._make_room()
        if line.number == 1 and isinstance(line, Line) and line.data.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
            raise BatchrunError(
                "stdin is compressed, which --flush-interval does not read",
                hint="decompress it on the way, as in `zcat FILE | batchrun submit - …`",
                exit_code=Exit.INPUT,
            )
        shaped = self._shaper.shape(line)
        if isinstance(shaped, Row) and (first := self._seen.first(shaped.custom_id, line.number)) != line.number:
            shaped = repeated(line.number, shaped.custom_id, first)
        if line.number > self._indexer.known_lines:
            self._write(line)
            if isinstance(shaped, BadRow) and not self._skip_invalid:
                self._bad, self._enough = shaped, True
                return
            self._add(line, shaped)
        self._indexer.take(line, shaped)

    def _write(self, line: Line | OversizedLine) -> None:
        """Writes a line to the spool; for one that nobody reads, a hole of its length."""
        if isinstance(line, Line):
            self._out.write(line.data)
        else:
            self._out.seek(line.length, os.SEEK_CUR)
        self._out.write(b"\n")  # also where the input ends without one: a last line without is one that was cut off

    def _add(self, line: Line | OversizedLine, shaped: Row | BadRow | None) -> None:
        if self._pending_since is None:
            self._pending_since = self._read_at
        if isinstance(shaped, Row):
            self._rows.append(shaped)
            self.queue.arrived(shaped)
            if shaped.model not in self._models:
                self._models[shaped.model] = None
                self._new_models = True
        elif shaped is not None:
            self.found.note_bad(shaped)
            data = input_as_json(line) if isinstance(line, Line) else b"null"
            self._refused.append(settle.invalid(shaped, data, time.time()))
        if shaped is not None and self._left is not None:
            self._left -= 1
            self._enough = self._left == 0

    def _commit(self, chunk: Chunk) -> None:
        """Keeps a piece of the input, and then lets its rows be had."""
        self._out.flush()
        os.fsync(self._out.fileno())
        reached("spooled")
        rows, refused, since = self._rows, self._refused, self._pending_since
        priorities = tuple((row.line, row.priority) for row in rows if row.priority)
        models = tuple(self._models) if self._new_models else ()
        self._rows, self._refused, self._pending_since, self._new_models = [], [], None, False
        self._keep([Indexed(chunk, priorities, models), *refused], chunk.rows)
        self.queue.ready(rows, self._read_at if since is None else since)
