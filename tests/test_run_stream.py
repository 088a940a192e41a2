"""What arrives is spooled, then indexed, then handed on; no more waits than may; nobody waits for what cannot come."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchrun.errors import BatchrunError, Exit
from batchrun.intake.shapes import Shaper, Shaping
from batchrun.records import Indexed, Operation, Row
from batchrun.report.tally import Tally
from batchrun.run.files import make_private_dir, private_file
from batchrun.run.source import RowReader, Seen
from batchrun.run.store import Store
from batchrun.run.stream import Queue, Stream
from tests.planning import row

SHAPER = Shaper(Shaping(model="m"))


class Arrival:
    """A stream over a pipe, whose operations are kept at once."""

    def __init__(self, job: Path, *, most: int = 1_000_000, limit: int | None = None) -> None:
        make_private_dir(job)
        self.job = job
        self.spool = job / "input.jsonl"
        private_file(self.spool).close()
        self.store = Store(job, Tally())
        self.reads, self.writes = os.pipe()
        self.queue = Queue(most)
        self.stream = Stream(
            self.reads,
            self.spool,
            self.store,
            SHAPER,
            self.queue,
            skip_invalid=True,
            limit=limit,
            go_on="batchrun resume j",
        )
        self.kept: list[Operation] = []
        self.keep_as = self.keep

    def keep(self, operations: Sequence[Operation], rows: int) -> None:
        (indexed,) = (o for o in operations if isinstance(o, Indexed))
        assert indexed.chunk.rows == rows
        self.store.apply(operations)
        self.kept += operations

    def receive(self, pieces: Sequence[bytes]) -> None:
        """Writes the pieces one after the other, ends the input, and takes all of it in."""

        def write() -> None:
            try:
                for piece in pieces:
                    os.write(self.writes, piece)
            except BrokenPipeError:
                pass
            os.close(self.writes)

        producer = threading.Thread(target=write)
        producer.start()
        try:
            self.stream.receive(self.keep_as)
        finally:
            os.close(self.reads)
            producer.join()

    def rows(self) -> list[Row]:
        found = []
        while count := self.queue.wait(0.0, 0):
            found += [self.queue.pop()[0] for _ in range(count)]
        return found

    def close(self) -> None:
        self.stream.close()
        self.store.close()


LINES = st.lists(
    st.one_of(
        st.just(b""),
        st.just(b"  \r"),
        st.just(b"{"),
        st.integers(0, 9).map(lambda n: json.dumps({"id": f"i{n}", "prompt": "x" * n * 30}).encode()),
        st.text("\u2028é\n\x85", max_size=4).map(lambda text: json.dumps(text, ensure_ascii=False).encode()),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.booleans(), st.integers(1, 200))
def test_however_the_bytes_arrive_spool_index_and_rows_are_those_of_the_whole(
    tmp_path: Path, texts: list[bytes], ends: bool, block: int
) -> None:
    data = b"\n".join(texts) + (b"\n" if ends else b"")
    arrival = Arrival(tmp_path / f"j{len(list(tmp_path.iterdir()))}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchrun.run.stream._BLOCK_BYTES", block)
        arrival.receive([data])
    whole = data if data.endswith(b"\n") or not data else data + b"\n"
    assert arrival.spool.read_bytes() == whole
    assert arrival.stream.ended
    seen: set[str] = set()
    wanted, bad = [], []
    for number, text in enumerate(data.split(b"\n"), 1):
        shaped = SHAPER.shape((number, 0, text)) if text else None  # type: ignore[arg-type]
        if isinstance(shaped, Row) and shaped.custom_id not in seen:
            wanted.append((number, shaped.custom_id, shaped.body))
            seen.add(shaped.custom_id)
        elif shaped is not None:
            bad.append(number)
    assert [(each.line, each.custom_id, each.body) for each in arrival.rows()] == wanted
    assert arrival.store.rows() == len(wanted) + len(bad)
    assert arrival.store.settled(10_000) == (0, len(bad))
    reader = RowReader(arrival.spool, arrival.store, SHAPER, arrival.store.last_line())
    assert [(each.line, each.custom_id) for each in reader.pending()] == [w[:2] for w in wanted]
    reader.close()
    assert arrival.store.end() == len(whole)
    arrival.close()


def test_lines_are_durable_in_the_spool_before_they_are_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival = Arrival(tmp_path / "j")
    durable = [0]
    monkeypatch.setattr("os.fsync", lambda fd: durable.append(os.fstat(fd).st_size))
    ends: list[tuple[int, int]] = []

    def keep(operations: Sequence[Operation], rows: int) -> None:
        (indexed,) = (o for o in operations if isinstance(o, Indexed))
        ends.append((indexed.chunk.offset + indexed.chunk.size, durable[-1]))
        arrival.keep(operations, rows)

    monkeypatch.setattr(arrival, "keep_as", keep)
    arrival.receive([b"".join(b'"prompt %d"\n' % n for n in range(5_000))])
    assert [end for end, synced in ends if end > synced] == []
    chunks = [o.chunk for o in arrival.kept if isinstance(o, Indexed)]
    assert sum(chunk.rows for chunk in chunks) == 5_000
    assert max(chunk.lines for chunk in chunks) <= 1_024
    arrival.close()


def test_rows_that_cannot_be_kept_are_not_handed_on(tmp_path: Path) -> None:
    arrival = Arrival(tmp_path / "j")

    def refuse(operations: Sequence[Operation], rows: int) -> None:
        raise BatchrunError("storage failed: no", exit_code=Exit.STORAGE)

    arrival.keep_as = refuse
    with pytest.raises(BatchrunError, match="storage failed"):
        arrival.receive([b'"a"\n"b"\n'])
    assert arrival.queue.wait(0.0, 0) == 0
    assert not arrival.stream.ended
    assert arrival.spool.read_bytes() == b'"a"\n"b"\n'
    arrival.close()


def test_models_are_kept_when_a_new_one_comes_and_the_last_line_always(tmp_path: Path) -> None:
    arrival = Arrival(tmp_path / "j", most=1)
    taken = threading.Thread(target=drain, args=(arrival.queue,))
    taken.start()
    models = ["m", "m", "n", "m", "o"]
    arrival.receive([b"".join(b'{"prompt":"x","model":"%s"}\n' % model.encode() for model in models)])
    taken.join()
    named = [o.models for o in arrival.kept if isinstance(o, Indexed)]
    assert named == [("m",), (), ("m", "n"), (), ("m", "n", "o")]
    assert arrival.store.get("models") == ["m", "n", "o"]
    assert arrival.store.get("last_line") == 5
    arrival.close()


def drain(queue: Queue) -> None:
    """Sends each row as soon as it may be had."""
    while queue.wait(inf, 0) is not None:
        queue.sent([queue.pop()[0]])


def test_a_limit_takes_in_so_many_rows_and_leaves_the_rest_in_the_spool(tmp_path: Path) -> None:
    arrival = Arrival(tmp_path / "j", limit=2)
    data = b'"a"\n\n"b"\n"c"\n"d'
    arrival.receive([data])
    assert [each.line for each in arrival.rows()] == [1, 3]
    assert (arrival.store.rows(), arrival.store.last_line(), arrival.stream.ended) == (2, 3, True)
    assert arrival.spool.read_bytes() == data[:-2]  # whole lines
    arrival.close()


def test_stop_takes_in_the_whole_lines_that_were_read_however_full_it_is(tmp_path: Path) -> None:
    arrival = Arrival(tmp_path / "j", most=2)
    os.write(arrival.writes, b'"a"\n"b"\n"c"\n"d"\n"e')
    ended = threading.Thread(target=arrival.stream.receive, args=(arrival.keep,))
    ended.start()
    assert arrival.queue.wait(inf, 0) == 2
    assert arrival.queue.is_full
    arrival.stream.stop()
    ended.join()
    assert (arrival.store.rows(), arrival.stream.ended) == (4, False)
    assert arrival.spool.read_bytes() == b'"a"\n"b"\n"c"\n"d"\n'
    os.close(arrival.writes)
    os.close(arrival.reads)
    arrival.close()


# ---------------------------------------------------------------- the queue


def test_the_most_urgent_row_is_had_first_and_arrival_breaks_ties() -> None:
    queue = Queue(10)
    rows = [row(line, priority=priority) for line, priority in ((1, 0), (2, 5), (3, -1), (4, 5))]
    queue.ready(rows[:3], 7.0)
    queue.ready(rows[3:], 8.0)
    assert queue.wait(0.0, 0) == 4
    assert [(each.line, at) for each, at in (queue.pop() for _ in rows)] == [(2, 7.0), (4, 8.0), (1, 7.0), (3, 7.0)]


def test_a_row_waits_until_it_is_sent_and_is_counted_once() -> None:
    queue = Queue(2)
    rows = [row(1), row(2)]
    for each in rows:
        queue.arrived(each)
    queue.ready(rows, 0.0)
    assert queue.is_full
    queue.pop()
    assert queue.is_full, "a row that was had has not been sent"
    queue.sent(rows[:1])
    queue.sent(rows[:1])
    assert not queue.is_full
    queue.arrived(row(3))
    assert queue.is_full


def test_few_rows_that_are_large_fill_it_too() -> None:
    queue = Queue(1_000)
    large = row(1, size=40_000_000)
    queue.arrived(large)
    assert queue.is_full
    queue.sent([large])
    assert not queue.is_full


def test_who_holds_all_that_waits_is_told_at_once_that_nothing_can_join_it() -> None:
    queue = Queue(2, clock=lambda: 0.0)
    rows = [row(1), row(2)]
    for each in rows:
        queue.arrived(each)
    queue.ready(rows, 0.0)
    assert queue.wait(inf, 0) == 2
    queue.pop(), queue.pop()
    assert queue.wait(inf, 2) == 0
    queue.stop()
    assert queue.wait(inf, 1) is None


def test_the_end_comes_after_all_rows_and_a_stop_wakes_whoever_waits() -> None:
    queue = Queue(1)
    queue.arrived(row(1))
    queue.ready([row(1)], 0.0)
    queue.close()
    assert queue.wait(inf, 0) == 1
    queue.pop()
    assert queue.wait(inf, 0) is None
    waiting = Queue(1)
    waiting.arrived(row(1))
    woken = [threading.Thread(target=waiting.wait_for_room), threading.Thread(target=waiting.wait, args=(inf, 0))]
    for thread in woken:
        thread.start()
    waiting.stop()
    for thread in woken:
        thread.join(10)
        assert not thread.is_alive()


def test_an_id_is_told_again_with_the_line_that_had_it_first() -> None:
    seen = Seen()
    assert [seen.first(name, line) for line, name in enumerate(["a", "b", "a", "é", "b", "a"], 1)] == [1, 2, 1, 4, 2, 1]
    seen.close()
