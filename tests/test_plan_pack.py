from __future__ import annotations

import random
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.plan.pack import PackBudget, Packer
from batchrun.records import Batch, Row
from tests.planning import row

SIZES = st.lists(st.tuples(st.integers(0, 60), st.integers(2, 40)), max_size=200)
BUDGETS = st.builds(PackBudget, st.integers(1, 100), st.integers(1, 12), st.integers(2, 120))


def pack(packer: Packer, rows: list[tuple[Row, int]]) -> list[Batch]:
    batches = []
    for each, tokens in rows:
        packer.add(each, tokens)
        while (batch := packer.pack()) is not None:
            batches.append(batch)
    return [*batches, *packer.flush()]


def sized(sizes: list[tuple[int, int]]) -> list[tuple[Row, int]]:
    return [(row(line, size=size), tokens) for line, (tokens, size) in enumerate(sizes, 1)]


@settings(max_examples=300, deadline=None)
@given(SIZES, BUDGETS, st.integers(1, 64))
def test_every_row_is_in_exactly_one_batch_and_no_budget_is_passed(
    sizes: list[tuple[int, int]], budget: PackBudget, look_ahead: int
) -> None:
    batches = pack(Packer(budget, look_ahead), sized(sizes))
    assert sorted(each.line for batch in batches for each in batch.rows) == list(range(1, len(sizes) + 1))
    assert [batch.id for batch in batches] == list(range(1, len(batches) + 1))
    for batch in batches:
        assert batch.tokens == sum(sizes[each.line - 1][0] for each in batch.rows)
        assert batch.bytes == sum(sizes[each.line - 1][1] for each in batch.rows)
        assert len(batch.rows) <= budget.rows
        if len(batch.rows) > 1:
            assert batch.tokens <= budget.tokens
            assert batch.bytes <= budget.bytes
        assert [each.line for each in batch.rows] == sorted(each.line for each in batch.rows)


@settings(max_examples=100, deadline=None)
@given(SIZES, BUDGETS, st.integers(1, 64))
def test_the_oldest_row_always_seeds_the_next_batch(
    sizes: list[tuple[int, int]], budget: PackBudget, look_ahead: int
) -> None:
    waiting = set(range(1, len(sizes) + 1))
    for batch in pack(Packer(budget, look_ahead), sized(sizes)):
        lines = {each.line for each in batch.rows}
        assert min(waiting) in lines
        waiting -= lines


@settings(max_examples=50, deadline=None)
@given(SIZES, BUDGETS)
def test_the_same_input_gives_the_same_batches(sizes: list[tuple[int, int]], budget: PackBudget) -> None:
    assert pack(Packer(budget), sized(sizes)) == pack(Packer(budget), sized(sizes))


def test_a_row_over_the_budget_travels_alone() -> None:
    batches = pack(Packer(PackBudget(100, 9, 10**6)), sized([(40, 2), (101, 2), (60, 2), (30, 2)]))
    assert [[each.line for each in batch.rows] for batch in batches] == [[1, 3], [2], [4]]
    assert [batch.tokens > 100 for batch in batches] == [False, True, False]


def test_the_end_of_a_batch_is_chosen_exactly() -> None:
    """In order 60, 50, 30, 25, 10 would need three batches of 100; 60 + 30 + 10 fills one."""
    batches = pack(Packer(PackBudget(100, 9, 10**6)), sized([(60, 2), (50, 2), (30, 2), (25, 2), (10, 2)]))
    assert [batch.tokens for batch in batches] == [100, 75]


def test_bytes_are_chosen_exactly_where_they_are_scarcer() -> None:
    batches = pack(Packer(PackBudget(10**6, 9, 100)), sized([(1, 60), (1, 50), (1, 30), (1, 25), (1, 10)]))
    assert [batch.bytes for batch in batches] == [100, 75]


def test_groups_do_not_mix_and_the_one_open_for_longest_is_flushed_when_there_are_too_many() -> None:
    packer = Packer(PackBudget(100, 9, 10**6), max_groups=2)
    for line, model in enumerate("aabbc", 1):
        packer.add(row(line, model=model), 10)
    early = packer.pack()
    assert early is not None
    assert (early.key, [each.line for each in early.rows]) == (("chat", "a"), [1, 2])
    assert packer.pack() is None
    assert [batch.key for batch in packer.flush()] == [("chat", "b"), ("chat", "c")]


def test_many_kinds_of_rows_in_turn_still_fill_their_batches() -> None:
    packer = Packer(PackBudget(10**6, 50, 10**6), look_ahead=4)
    for line in range(1, 20_001):
        packer.add(row(line, model=str(line % 40)), 10)
    batches = list(packer.flush())
    assert len(batches) == 20_000 / 50
    assert sorted(each.line for batch in batches for each in batch.rows) == list(range(1, 20_001))


def test_where_too_many_bytes_wait_the_group_that_has_most_of_them_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrun.plan.pack.HELD_BYTES", 1_000)
    packer = Packer(PackBudget(10**6, 10**6, 400))
    for line, model in enumerate("abbcbabc", 1):
        packer.add(row(line, model=model), 1, 150)
        if line < 7:  # 900 bytes wait
            assert packer.pack() is None
    assert [(b.key[1], [r.line for r in b.rows], b.bound) for b in iter(packer.pack, None)] == [
        ("b", [2, 3], "bytes"),
        ("b", [5, 7], "groups"),
    ]
    assert [(b.key[1], [r.line for r in b.rows]) for b in packer.flush()] == [("a", [1, 6]), ("c", [4, 8])]


def test_a_group_flushed_at_once_for_its_own_successor_leaves_nothing_behind() -> None:
    packer = Packer(PackBudget(100, 9, 10**6), max_groups=1)
    packer.add(row(1, model="a"), 10)
    packer.add(row(2, model="b"), 10)
    packer.add(row(3, model="a"), 10)
    assert [[each.line for each in batch.rows] for batch in packer.flush()] == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [
        ([(40, 2), (60, 2), (50, 2), (50, 2)], ["tokens", "tokens"]),
        ([(1, 2)] * 20, ["rows", "rows", "input"]),
        ([(1, 2)] * 18, ["rows", "rows"]),  # the last one is full, though nothing comes after it
        ([(1, 300)] * 7, ["bytes", "bytes", "input"]),
        ([(101, 2)], ["tokens"]),
    ],
)
def test_a_batch_says_what_ended_it(sizes: list[tuple[int, int]], bounds: list[str]) -> None:
    packer = Packer(PackBudget(100, 9, 1_000), look_ahead=2)
    assert [batch.bound for batch in pack(packer, sized(sizes))] == bounds


def test_a_batch_that_made_room_for_another_group_says_so() -> None:
    packer = Packer(PackBudget(100, 9, 10**6), max_groups=1)
    for line, model in enumerate("aab", 1):
        packer.add(row(line, model=model), 10)
    assert [batch.bound for batch in packer.flush()] == ["groups", "input"]


def test_what_rows_must_share_is_an_argument() -> None:
    packer = Packer(PackBudget(100, 9, 10**6))
    packer.add(row(1), 10, key=("chat", "m", "10"))
    packer.add(row(2), 10, key=("chat", "m", "20"))
    assert [batch.key for batch in packer.flush()] == [("chat", "m", "10"), ("chat", "m", "20")]


def test_a_batch_comes_as_soon_as_its_look_ahead_is_there() -> None:
    packer, first = Packer(PackBudget(1_000, 64, 10**6), look_ahead=16), 0
    for line in range(1, 200):
        packer.add(row(line), 100)
        if packer.pack() is not None:
            first = line
            break
    assert first <= 26


@pytest.mark.parametrize(
    ("budget", "excess"), [(PackBudget(8_192, 64, 10**9), 0.015), (PackBudget(300_000, 2_048, 10**9), 0.02)]
)
def test_few_batches_more_than_the_lower_bound(budget: PackBudget, excess: float) -> None:
    rng = random.Random(1)
    sizes = [(min(8_192, int(rng.lognormvariate(6.8, 0.6))), 2) for _ in range(6_000)]
    bound = ceil(sum(tokens for tokens, _ in sizes) / budget.tokens)
    assert len(pack(Packer(budget), sized(sizes))) <= ceil(bound * (1 + excess))


def test_only_groups_whose_oldest_row_is_due_are_flushed() -> None:
    packer = Packer(PackBudget(100, 10, 10_000))
    assert packer.oldest_at == float("inf")
    for line, (model, at) in enumerate((("a", 3.0), ("b", 1.0), ("a", 4.0), ("b", 9.0)), 1):
        packer.add(row(line, model=model), 1, at=at)
    assert packer.oldest_at == 1.0
    assert [[each.line for each in batch.rows] for batch in packer.flush(2.0)] == [[2, 4]]
    assert packer.oldest_at == 3.0
    assert list(packer.flush(2.9)) == []
    assert [[each.line for each in batch.rows] for batch in packer.flush(3.0)] == [[1, 3]]
    assert packer.oldest_at == float("inf")


def test_the_oldest_row_of_an_open_batch_says_how_long_it_has_waited() -> None:
    packer = Packer(PackBudget(100, 3, 10_000), look_ahead=1)
    for line in range(1, 5):
        packer.add(row(line), 1, at=float(line))
        batch = packer.pack()
        assert packer.oldest_at == (4.0 if batch else 1.0)
    assert [[each.line for each in batch.rows] for batch in packer.flush()] == [[4]]
