"""The storage contract: durable before told, first outcome wins, fail-stop, one writer."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchrun.errors import BatchrunError, Exit
from batchrun.records import Chunk, Doubted, Indexed, Operation, Reopened
from batchrun.report.tally import Tally
from batchrun.run.files import JobLock, make_private_dir, replace_file
from batchrun.run.store import Store
from batchrun.run.view import View
from tests.operations import returned, sent, settled


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "j.batchrun"
    make_private_dir(path)
    return path


@pytest.fixture(params=["quick disk", "slow disk"])
def store(job: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "slow disk":
        monkeypatch.setattr("batchrun.run.store._QUICK_S", 0.0)  # none is quick enough
    opened = Store(job, Tally())
    yield opened
    opened.close()


def commit(store: Store, *groups: list[Operation]) -> list[BaseException | None]:
    async def run() -> list[BaseException | None]:
        store.start(asyncio.get_running_loop())
        try:
            return await asyncio.gather(*map(store.commit, groups), return_exceptions=True)
        finally:
            store.stop()

    return asyncio.run(run())


def test_what_was_committed_is_seen_by_another_connection_at_once(store: Store, job: Path) -> None:
    seen: list[list[int]] = []

    async def run() -> None:
        store.start(asyncio.get_running_loop())
        for line in (1, 2, 3):
            await store.commit([sent(line)])
            view = View(job)
            seen.append([intent.line for intent in view.intents(open_only=True)])
            view.close()
        store.stop()

    asyncio.run(run())
    assert seen == [[1], [1, 2], [1, 2, 3]]


def test_an_open_intent_survives_the_process_and_a_settled_one_does_not(job: Path) -> None:
    code = f"""
import os
from decimal import Decimal
from pathlib import Path
from batchrun.records import Sent
from batchrun.report.tally import Tally
from batchrun.run.store import Store
store = Store(Path({str(job)!r}), Tally())
store.apply([Sent(n, 1, 0, Decimal("0.5"), 1.0, f"id-{{n}}") for n in (1, 2, 3)])
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    store = Store(job, Tally())
    store.apply([settled(2)])
    doubts = store.intents(open_only=True)
    store.close()
    assert [(doubt.line, doubt.custom_id, doubt.reserved_usd) for doubt in doubts] == [
        (1, "id-1", Decimal("0.5")),
        (3, "id-3", Decimal("0.5")),
    ]


def test_the_first_outcome_of_a_row_wins(store: Store) -> None:
    store.apply([sent(1)])
    store.apply([settled(1, b'{"n":1}')])
    store.apply([settled(1, b'{"n":2}', status="failed")])
    assert list(store.records("all")) == [b'{"n":1}']
    assert store.settled(up_to_line=1) == (1, 0)


def test_a_refused_send_leaves_no_doubt_but_is_remembered(store: Store) -> None:
    store.apply([sent(7)])
    store.apply([returned(7, sends=1)])
    store.apply([sent(7, send=2)])
    store.apply([returned(7, sends=2)])
    (intent,) = store.intents()
    assert (intent.line, intent.sends, intent.open) == (7, 2, False)
    assert store.intents(open_only=True) == []


def test_records_come_back_in_input_order_whatever_the_order_of_settling(store: Store) -> None:
    lines = [5, 1, 900, 3, 70]
    failures = commit(store, *[[settled(line, b'{"line":%d}' % line)] for line in lines])
    assert failures == [None] * 5
    assert list(store.records("succeeded")) == [b'{"line":%d}' % line for line in sorted(lines)]


def test_more_rows_than_one_statement_takes_are_all_kept(store: Store) -> None:
    commit(store, [settled(line, b"%d" % line) for line in range(1, 2_223)])
    assert store.settled(up_to_line=5_000) == (2_222, 0)
    assert list(store.records("all")) == [b"%d" % line for line in range(1, 2_223)]


def test_the_loop_commits_while_the_disk_is_quick_and_goes_on_with_its_work_where_it_is_slow(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slow = 0.0, True
    writers: list[str] = []
    rounds: list[int] = []  # of the loop, during each commit
    seen = threading.Event()

    def disk(place: str) -> None:
        nonlocal clock
        if place == "commit":
            writers.append(threading.current_thread().name)
            clock += 0.02 if slow else 0.0002
            if writers[-1] == "batchrun-store":
                assert seen.wait(30), "the loop waits for the thread"
                seen.clear()

    monkeypatch.setattr("batchrun.run.store.time", SimpleNamespace(perf_counter=lambda: clock))
    monkeypatch.setattr("batchrun.run.store.reached", disk)
    store = Store(job, Tally())

    async def run() -> None:
        nonlocal slow
        store.start(asyncio.get_running_loop())
        for line in range(1, 121):
            slow = line <= 40
            done = store.commit([sent(line)])
            rounds.append(0)
            while not done.done():
                rounds[-1] += 1
                if rounds[-1] == 3:
                    seen.set()
                await asyncio.sleep(0)
            assert done.exception() is None
        store.stop()

    asyncio.run(run())
    store.close()
    here, there = writers.index("batchrun-store"), 120 - writers[::-1].index("batchrun-store")
    assert 1 < here < 10, "a few slow commits tell it"
    assert set(writers[here:there]) == {"batchrun-store"}
    assert set(writers[there:]) == {"MainThread"}, "quick ones tell it too"
    assert 40 < there < 100
    assert set(rounds[:here] + rounds[there:]) == {1}


@pytest.mark.parametrize(
    ("operations", "writer"),
    [
        ([settled(line) for line in range(1, 101)], "MainThread"),
        ([settled(line) for line in range(1, 1_001)], "batchrun-store"),
        ([settled(1, b"x" * 2_000_000)], "batchrun-store"),
        ([Indexed(Chunk(1, 0, 2, 1, 1, bytes(13)), ((1, 5),))], "batchrun-store"),
    ],
    ids=["little", "many", "large", "lines that arrived"],
)
def test_what_takes_long_to_write_is_left_to_the_thread(
    job: Path, monkeypatch: pytest.MonkeyPatch, operations: list[Operation], writer: str
) -> None:
    writers: list[str] = []
    monkeypatch.setattr("batchrun.run.store.time", SimpleNamespace(perf_counter=lambda: 0.0))
    store = Store(job, Tally())
    monkeypatch.setattr(
        "batchrun.run.store.reached",
        lambda place: writers.append(threading.current_thread().name) if place == "commit" else None,
    )

    async def run() -> None:
        store.start(asyncio.get_running_loop())
        await store.commit(operations)
        store.stop()

    asyncio.run(run())
    store.close()
    assert writers == [writer]


def test_the_loop_writes_nothing_while_the_thread_does(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[str] = []
    entered, gate = threading.Event(), threading.Event()

    def disk(place: str) -> None:
        if place == "commit":
            writers.append(threading.current_thread().name)
            if len(writers) == 1:
                entered.set()
                assert gate.wait(30)

    monkeypatch.setattr("batchrun.run.store.time", SimpleNamespace(perf_counter=lambda: 0.0))
    store = Store(job, Tally())
    monkeypatch.setattr("batchrun.run.store.reached", disk)

    async def run() -> None:
        store.start(asyncio.get_running_loop())
        many = store.commit([settled(line) for line in range(1, 200)])
        assert await asyncio.to_thread(entered.wait, 30)
        one = store.commit([sent(500)])
        for _ in range(10):
            await asyncio.sleep(0)
        assert not one.done()
        gate.set()
        await asyncio.gather(many, one)
        await store.commit([sent(501)])
        store.stop()

    asyncio.run(run())
    assert writers == ["batchrun-store", "batchrun-store", "MainThread"]
    assert [intent.line for intent in store.intents()] == [500, 501]
    assert store.settled(up_to_line=500) == (199, 0)
    store.close()


def test_a_round_that_gives_much_is_written_in_pieces(store: Store) -> None:
    seen: list[str] = []
    store._write.set_trace_callback(seen.append)
    calls: list[list[Operation]] = [[sent(2_048 * call + row) for row in range(1, 2_049)] for call in range(4)]
    assert commit(store, *calls) == [None] * 4
    store._write.set_trace_callback(None)
    assert seen.count("COMMIT") == 4  # nobody waits for more than two thousand of the others'
    assert len(store.intents()) == 4 * 2_048


def test_a_store_is_closed_though_the_loop_is_gone(job: Path) -> None:
    store = Store(job, Tally())

    loop = asyncio.new_event_loop()
    store.start(loop)
    store.commit([settled(1)]).add_done_callback(lambda _: None)
    loop.close()
    store.close()
    view = View(job)
    assert view.settled(up_to_line=1) == (1, 0)
    view.close()


def test_what_a_round_of_the_loop_gives_is_one_transaction_in_the_order_of_giving(store: Store) -> None:
    seen: list[str] = []
    store._write.set_trace_callback(seen.append)
    assert commit(store, [sent(1)], [settled(1, b"first")], [settled(1, b"second")], [sent(2)]) == [None] * 4
    store._write.set_trace_callback(None)
    assert [statement for statement in seen if statement in ("BEGIN IMMEDIATE", "COMMIT")] == [
        "BEGIN IMMEDIATE",
        "COMMIT",
    ]
    assert list(store.records("all")) == [b"first"]
    assert [intent.line for intent in store.intents()] == [2]


def test_the_kept_fold_is_that_of_the_operations_committed(store: Store, job: Path) -> None:
    operations = [sent(1), sent(2), returned(2, lost="0.5"), sent(2, 2), settled(1), settled(2, status="failed")]
    whole = Tally()
    for operation in operations:
        whole.add(operation)
        store.apply([operation])
    kept = Tally()
    view = View(job)
    kept.load(view.get("fold"))
    view.close()
    assert kept.dump() == whole.dump()
    assert kept.spent_usd == Decimal("1.0")


def test_a_reopened_row_has_no_outcome_and_starts_its_count_again(store: Store) -> None:
    store.apply([sent(4), settled(4, status="failed")])
    store.apply([Reopened(4, "rejected", unsent=False, at=3.0)])
    assert store.settled(up_to_line=9) == (0, 0)
    assert list(store.records("all")) == []
    assert store.intents() == []


def test_a_doubt_is_closed_once_it_is_told(store: Store) -> None:
    store.apply([sent(1)])
    store.apply([Doubted(1, "id-1", Decimal("0.5"), resent=True, at=2.0)])
    assert store.intents(open_only=True) == []
    assert [intent.sends for intent in store.intents()] == [1]


def test_after_a_failed_commit_every_later_one_fails_and_nothing_of_it_is_kept(store: Store, job: Path) -> None:
    pages = store._write.execute("PRAGMA page_count").fetchone()[0]
    store._write.execute(f"PRAGMA max_page_count={pages + 2}")  # a full disk, as SQLite sees it

    async def run() -> list[BaseException | None]:
        store.start(asyncio.get_running_loop())
        ends: list[BaseException | None] = []
        for group in ([sent(1)], [settled(2, b"x" * 100_000)], [sent(3)], [settled(1)]):
            ends += await asyncio.gather(store.commit(group), return_exceptions=True)
        store.stop()
        return ends

    first, *rest = asyncio.run(run())
    assert first is None
    assert [end.exit_code for end in rest if isinstance(end, BatchrunError)] == [Exit.STORAGE] * 3
    view = View(job)
    assert [intent.line for intent in view.intents()] == [1]
    assert view.settled(up_to_line=9) == (0, 0)
    view.close()


def test_what_a_failed_commit_held_back_can_be_kept_once_there_is_room(store: Store) -> None:
    pages = store._write.execute("PRAGMA page_count").fetchone()[0]
    store._write.execute(f"PRAGMA max_page_count={pages + 2}")
    lost = [settled(2, b"x" * 100_000)]
    (failure,) = commit(store, lost)
    assert isinstance(failure, BatchrunError)
    assert store.salvage(lost)  # a new connection has the whole disk again
    assert list(store.records("succeeded")) == [b"x" * 100_000]


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        job = tmp_path / "j.batchrun"
        make_private_dir(job)
        store = Store(job, Tally())
        store.apply([sent(1)])
        lock = JobLock(job)
        lock.acquire()
        with replace_file(job / "results.jsonl") as out:
            out.write(b"x")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in job.iterdir()}
        lock.release()
        store.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(job.stat().st_mode) == 0o700
    assert set(modes) == {"state.db", "state.db-wal", "state.db-shm", "lock", "results.jsonl"}
    assert set(modes.values()) == {0o600}


def test_a_second_lock_is_refused_and_a_dead_holder_leaves_none(job: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from batchrun.run.files import JobLock
JobLock(Path({str(job)!r})).acquire()
print("held", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert JobLock(job).is_held_elsewhere()
        with pytest.raises(BatchrunError, match=f"process {holder.pid}") as caught:
            JobLock(job).acquire()
        assert caught.value.exit_code == Exit.BUSY
        holder.kill()
    assert not JobLock(job).is_held_elsewhere()
    lock = JobLock(job)
    lock.acquire()
    lock.release()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with replace_file(path) as out:
        out.write(b"old")

    def half() -> None:
        with replace_file(path) as out:
            out.write(b"new, but only ha")
            raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_job_of_another_format_is_refused(store: Store, job: Path) -> None:
    store.put(format=99)
    with pytest.raises(BatchrunError, match="format 99"):
        View(job)


def test_a_view_works_while_a_transaction_is_open(store: Store, job: Path) -> None:
    store.apply([settled(1, b"{}")])
    with store.transaction() as db:
        db.execute("INSERT INTO priority VALUES (1, 5)")
        view = View(job)
        assert view.settled(up_to_line=1) == (1, 0)
        assert not view.has_priorities()
        view.close()
    assert store.has_priorities()
