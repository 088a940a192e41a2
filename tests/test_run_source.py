"""The pinned input: every line indexed once, found by offset, verified when read, compared when it may have changed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchrun.errors import BatchrunError, Exit
from batchrun.intake.shapes import Shaper, Shaping
from batchrun.report.tally import Tally
from batchrun.run.files import make_private_dir
from batchrun.run.source import Indexer, RowReader, Scan, input_as_json, scan
from batchrun.run.store import Store
from tests.operations import settled

SHAPER = Shaper(Shaping(model="m"))


def row(custom_id: object, text: str = "hi", **more: object) -> bytes:
    return json.dumps({"id": custom_id, "prompt": text, **more}).encode()


def index(store: Store, data: bytes, *, known: bool = False) -> tuple[Scan, int]:
    with store.transaction() as db:
        indexer = Indexer(store if known else None, lambda chunk: store.add_chunk(db, chunk))

        def on_line(line: object, shaped: object) -> None:
            if indexer.take(line, shaped) and getattr(shaped, "priority", 0):
                db.execute("INSERT INTO priority VALUES (?,?)", (shaped.line, shaped.priority))

        found = scan(io.BytesIO(data), SHAPER, on_line)
        indexer.finish(found.lines)
    return found, indexer.added


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    job = tmp_path / "j.batchrun"
    make_private_dir(job)
    opened = Store(job, Tally())
    yield opened
    opened.close()


def reader(store: Store, tmp_path: Path, data: bytes, up_to: int | None = None) -> RowReader:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    return RowReader(path, store, SHAPER, store.last_line() if up_to is None else up_to)


def pending(rows: RowReader) -> list[tuple[int, str]]:
    return [(r.line, r.custom_id) for r in rows.pending()]


def test_rows_are_found_again_by_offset_in_input_order(store: Store, tmp_path: Path) -> None:
    data = b"\n".join([row("a"), b"", row("b", "x" * 5_000), b"  \r", row("c")])
    found, added = index(store, data)
    assert (found.rows, found.lines, added) == (3, 5, 3)
    assert pending(reader(store, tmp_path, data)) == [(1, "a"), (3, "b"), (5, "c")]


def test_settled_rows_are_not_read_again(store: Store, tmp_path: Path) -> None:
    data = b"\n".join(row(f"r{n}") for n in range(1, 3_001))
    index(store, data)
    store.apply([settled(line) for line in range(1, 2_990)])
    assert pending(reader(store, tmp_path, data)) == [(n, f"r{n}") for n in range(2_990, 3_001)]


def test_larger_priority_comes_first_and_input_order_within(store: Store, tmp_path: Path) -> None:
    priorities = {2: 5, 4: -1, 5: 9, 6: 5}
    data = b"\n".join(row(f"r{n}", priority=priorities.get(n, 0)) for n in range(1, 8))
    index(store, data)
    assert [line for line, _ in pending(reader(store, tmp_path, data))] == [5, 2, 6, 1, 3, 7, 4]


def test_rows_that_begin_alike_come_group_by_group_after_priority_and_before_the_rest(
    store: Store, tmp_path: Path
) -> None:
    data = b"\n".join(row(f"r{n}", priority={2: 1, 4: -1}.get(n, 0)) for n in range(1, 3_011))
    index(store, data)
    with store.transaction() as db:
        store.add_prefixes(db, [(3_000, (1,)), (7, (1,)), (5, (1, 2)), (2_000, (1, 2))])
    with store.transaction() as db:  # those of rows that were appended: their groups are others
        store.add_prefixes(db, [(3_010, (1,)), (3_009, (1,))])
    store.apply([settled(7), settled(1)])
    rows = reader(store, tmp_path, data)
    found = [(r.line, r.prefix) for r in rows.pending()]
    assert found[:6] == [(2, ()), (3_000, (1,)), (5, (1, 2)), (2_000, (1, 2)), (3_010, (5,)), (3_009, (5,))]
    rest = sorted(set(range(1, 3_011)) - {1, 2, 4, 5, 7, 2_000, 3_000, 3_009, 3_010})
    assert found[6:] == [(line, ()) for line in [*rest, 4]]
    limited = RowReader(tmp_path / "in.jsonl", store, SHAPER, 2_500)
    assert [line for line, _ in pending(limited)][:4] == [2, 5, 2_000, 3]
    plain = RowReader(tmp_path / "in.jsonl", store, SHAPER, 3_010, by_prefix=False)
    assert [line for line, _ in pending(plain)] == [2, 3, *range(5, 7), *range(8, 3_011), 4]


def test_a_limit_ends_the_job_at_its_line(store: Store, tmp_path: Path) -> None:
    data = b"\n".join(row(f"r{n}", priority=n) for n in range(1, 8))
    index(store, data)
    assert sorted(line for line, _ in pending(reader(store, tmp_path, data, up_to=3))) == [1, 2, 3]
    assert store.rows(3) == 3


def test_a_line_that_changed_after_it_was_pinned_is_never_sent(store: Store, tmp_path: Path) -> None:
    data = b"\n".join(row(f"r{n}") for n in range(1, 50))
    index(store, data)
    rows = reader(store, tmp_path, data.replace(b'"r33"', b'"r99"'))
    with pytest.raises(BatchrunError, match="line 33 of the input has changed") as caught:
        pending(rows)
    assert caught.value.exit_code == Exit.INPUT


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda lines: [*lines[:6], row("other"), *lines[7:]], "line 7 of the input has changed"),
        (lambda lines: lines[:6], "line 7 is gone, the job knows 9 lines"),
        (lambda lines: [row("new"), *lines], "line 1 of the input has changed"),
        (lambda lines: [*lines[:3], b"", *lines[3:]], "line 4 of the input has changed"),
    ],
)
def test_a_changed_input_is_named_by_its_first_line_that_differs(store: Store, changed: object, says: str) -> None:
    lines = [row(f"r{n}") for n in range(1, 10)]
    index(store, b"\n".join(lines))
    with pytest.raises(BatchrunError, match=says):
        index(store, b"\n".join(changed(lines)), known=True)  # type: ignore[operator]
    assert store.last_line() == 9


def test_rows_appended_at_the_end_are_new_rows_and_nothing_else_is_touched(store: Store, tmp_path: Path) -> None:
    old = b"\n".join(row(f"r{n}") for n in range(1, 2_000))
    index(store, old)
    grown = old + b"\n" + row("new-1") + b"\n" + row("new-2") + b"\n"
    assert index(store, grown, known=True)[1] == 2
    assert pending(reader(store, tmp_path, grown))[-3:] == [(1999, "r1999"), (2000, "new-1"), (2001, "new-2")]


def test_an_appended_row_may_not_repeat_an_old_id(store: Store) -> None:
    index(store, row("a") + b"\n" + row("b"))
    found, _ = index(store, row("a") + b"\n" + row("b") + b"\n" + row("a"), known=True)
    assert [(bad.line, bad.why) for bad in found.bad] == [(3, "repeats custom_id `a`, first seen on line 1")]


@pytest.mark.parametrize("second", [1, "1"])
def test_repeated_ids_are_named_with_both_lines(second: object) -> None:
    found = scan(io.BytesIO(b"\n".join([row("1"), row("x"), row(second), row(second)])), SHAPER)
    assert [(bad.line, bad.why) for bad in found.bad] == [
        (3, "repeats custom_id `1`, first seen on line 1"),
        (4, "repeats custom_id `1`, first seen on line 1"),
    ]


def test_an_id_may_not_be_what_another_line_gets_by_default() -> None:
    found = scan(io.BytesIO(b'"one"\n' + row("line-1")), SHAPER)
    assert [bad.line for bad in found.bad] == [2]


def test_all_bad_lines_are_counted_and_the_first_twenty_kept_in_order() -> None:
    lines = [b"{" if n % 2 else row("same") for n in range(1, 101)]
    found = scan(io.BytesIO(b"\n".join(lines)), SHAPER)
    assert found.bad_count == 50 + 49
    assert [bad.line for bad in found.bad] == [1, *range(3, 22)]
    assert found.rows == 100


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(st.just(b""), st.just(b"\t\r"), st.integers(0, 40_000).map(lambda size: b"x" * size)), max_size=40
    ),
    st.booleans(),
)
def test_every_row_of_any_input_is_found_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, fillings: list[bytes], ends_with_newline: bool
) -> None:
    lines = [
        filling if not filling.strip() else row(f"r{n}", filling.decode()) for n, filling in enumerate(fillings, 1)
    ]
    data = b"\n".join(lines) + (b"\n" if ends_with_newline else b"")
    folder = tmp_path_factory.mktemp("any")
    make_private_dir(folder / "j.batchrun")
    store = Store(folder / "j.batchrun", Tally())
    try:
        index(store, data)
        rows = reader(store, folder, data)
        expected = [(n, f"r{n}") for n, line in enumerate(lines, 1) if line.strip()]
        assert pending(rows) == expected
        assert [(rows.row(n).line, rows.row(n).custom_id) for n, _ in expected] == expected
        assert store.rows() == len(expected)
        assert index(store, data, known=True)[1] == 0
    finally:
        store.close()


def test_a_failed_line_is_given_back_as_it_was_or_as_text() -> None:
    from batchrun.records import Line

    assert input_as_json(Line(1, 0, b'\xef\xbb\xbf {"n": 1.0}\r')) == b'{"n": 1.0}'
    assert json.loads(input_as_json(Line(1, 0, b'{"n": \xff'))) == '{"n": \\xff'
    assert len(input_as_json(Line(1, 0, b"{" + b"x" * 200_000))) <= 64 * 1024 + 2
