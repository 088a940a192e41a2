"""Rows whose prompts begin alike are found by sorted keys: nested groups, and how much a cache would serve."""

from __future__ import annotations

import random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.intake.prefixes import LEAST_BYTES, Member, Shared, group, key_of, prompt_bytes
from batchrun.records import Endpoint, Row
from batchrun.run.prefixes import Prefixes

TEXT = "".join(chr(97 + n % 26) for n in range(100_000))


def row(
    line: int, *texts: str, endpoint: Endpoint = "chat", model: str = "m", priority: int = 0, **more: object
) -> Row:
    messages = [{"role": "user", "content": text} for text in texts]
    body = orjson.dumps({**more, "model": model, "messages": messages, "temperature": 0.5})
    return Row(line, f"r{line}", endpoint, model, body, 10, priority)


def members(*rows: Row) -> list[Member]:
    keys = [key for each in rows if (key := key_of(each)) is not None]
    return list(group(sorted(keys, key=lambda key: (key.chain, -key.line), reverse=True)))


def document(number: int, size: int = 10_000) -> str:
    return f"document {number}: {TEXT[:size]}"


@pytest.mark.parametrize(
    "each",
    [
        row(1, "short"),
        row(1, document(1, LEAST_BYTES - 500)),
        row(1, document(1), priority=3),
        row(1, document(1), endpoint="embeddings"),
        row(1, document(1), endpoint="messages"),
    ],
)
def test_what_no_cache_would_hold_has_no_key(each: Row):
    assert key_of(each) is None


def test_a_request_of_anthropics_is_cached_as_far_as_it_says_so():
    def marked(line: int, after: str) -> Row:
        content = [{"type": "text", "text": document(1), "cache_control": {"type": "ephemeral"}}, {"text": after}]
        body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": content}]})
        return Row(line, f"r{line}", "messages", "m", body, 10)

    whole = key_of(row(1, document(1), endpoint="messages", cache_control={"type": "ephemeral"}))
    assert whole is not None
    alike = [marked(line, document(2) if line < 3 else document(line)) for line in range(1, 6)]
    assert {each.path for each in members(*alike)} == {(1,)}  # what two have in common beyond the mark is not cached


def test_a_prompt_is_read_as_providers_do_whatever_the_order_of_its_fields():
    one = orjson.dumps({"messages": [{"role": "user", "content": "q"}], "seed": 1, "tools": [1], "model": "m"})
    two = orjson.dumps({"model": "m", "max_tokens": 5, "tools": [1], "messages": [{"role": "user", "content": "q"}]})
    assert prompt_bytes(one) == prompt_bytes(two) == b'"m"[1][{"role":"user","content":"q"}]'


def test_rows_about_one_document_are_a_group_and_the_others_are_in_none():
    found = members(*(row(n, document(n % 3) + f" q{n}") for n in range(9)), row(10, document(99)), row(11, "short"))
    by_document = [[each.line % 3 for each in found][at : at + 3] for at in (0, 3, 6)]
    assert sorted(by_document) == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert [each.path for each in found] == [(1,)] * 3 + [(2,)] * 3 + [(3,)] * 3
    assert [each.shared > 0 for each in found] == [False, True, True] * 3
    assert [each.line for each in found[:3]] == sorted(each.line for each in found[:3])


def test_documents_under_one_system_prompt_are_groups_within_a_group():
    system = TEXT[:20_000]
    found = members(*(row(n, system, document(n % 4)) for n in range(8)))
    assert [each.path for each in found] == [(1,), (1,), (1, 2), (1, 2), (1, 3), (1, 3), (1, 4), (1, 4)]
    begun = [each.shared for each in found]
    assert begun[0] == 0
    assert all(18_000 <= shared <= 20_200 for shared in begun[2::2])
    assert all(27_000 <= shared <= 31_000 for shared in begun[3::2])


def test_of_prompts_that_continue_each_other_the_longest_leads_all():
    turns = [document(n, 5_000) for n in range(6)]
    found = members(*(row(n, *turns[:n]) for n in range(1, 7)))
    assert [each.line for each in found] == [6, 5, 4, 3, 2, 1]
    assert {each.path[0] for each in found} == {1}


@pytest.mark.parametrize("other", [{"model": "n"}, {"endpoint": "responses"}, {"tools": [{"name": "t"}]}])
def test_what_a_provider_caches_apart_is_no_group(other: dict[str, object]):
    assert members(row(1, document(1)), row(2, document(1), **other)) == []  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_every_row_that_shares_is_in_a_group_and_groups_lie_within_each_other(seed: int):
    rng = random.Random(seed)
    texts: list[bytes] = []
    for _ in range(rng.randint(1, 60)):
        stem = rng.choice(texts)[: rng.randint(0, 30_000)] if texts and rng.random() < 0.8 else b""
        texts.append(stem + rng.randbytes(rng.randint(1, 10_000)).hex().encode())
    rows = [row(n, text.decode()) for n, text in enumerate(texts)]
    found = members(*rows)
    prompts = {each.line: prompt_bytes(each.body) for each in rows}

    def common(a: bytes, b: bytes) -> int:
        return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    assert len({each.line for each in found}) == len(found)
    seen: list[int] = []
    for each in found:
        before = max((common(prompts[each.line], prompts[line]) for line in seen), default=0)
        assert each.shared <= before
        seen.append(each.line)
    alone = {each.line for each in rows} - {each.line for each in found}
    for line in alone:  # but for the model and the brackets before the text, which are in the first block too
        assert all(common(prompts[line], prompts[other]) < LEAST_BYTES for other in prompts if other != line)
    paths = [each.path for each in found]
    for number in {number for path in paths for number in path}:
        at = [index for index, path in enumerate(paths) if number in path]
        assert len(at) >= 2
        assert at == list(range(at[0], at[-1] + 1))
        assert len({path[: path.index(number)] for path in (paths[index] for index in at)}) == 1


def test_an_input_tells_what_it_shares_in_bytes_and_whether_grouping_pays():
    def shared(*rows: Row) -> Shared:
        prefixes = Prefixes()
        for each in rows:
            prefixes.add(each)
        found = prefixes.find()
        assert len(list(prefixes.members())) == found.rows
        prefixes.close()
        return found

    assert shared(*(row(n, "short") for n in range(1_000))) == Shared(bytes=1_000 * len(row(1, "short").body))
    many = shared(*(row(n, document(n % 5) + f"{n}") for n in range(100)))
    assert (many.rows, many.groups, many.pays) == (100, 5, True)
    assert 0.85 < many.share < 0.95
    few = shared(*(row(n, document(n % 5) + f"{n}") for n in range(30)))
    assert (few.groups, few.pays) == (5, False)  # cents
    little = shared(*(row(n, document(n % 5, 5_000) + document(n, 1_000) * 60) for n in range(100)))
    assert (little.groups, little.pays) == (5, False)  # less than a tenth


def test_more_keys_than_are_kept_in_memory_are_found_all_the_same():
    prefixes = Prefixes()
    for n in range(9_000):
        prefixes.add(row(n, document(n % 3_000, 5_000)))
    found = prefixes.find()
    assert (found.rows, found.groups) == (9_000, 3_000)
    lines = [line for line, _ in prefixes.members()]
    assert all(len({line % 3_000 for line in lines[at : at + 3]}) == 1 for at in range(0, 9_000, 3))
    prefixes.close()
