"""The reply to a call of many rows, taken apart: whose answer is whose, and who used what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Literal

import msgspec

from batchrun.providers.base import load, no_object, raw_members
from batchrun.providers.faults import Broken, as_dict, read_error
from batchrun.providers.grouping import PackingName
from batchrun.providers.openai import stated_cost, usage_of
from batchrun.providers.parts import NOTHING, Answer, Head, members_start, take_choices, take_result, take_vector
from batchrun.providers.sharing import share_cost, share_usage
from batchrun.records import HttpResponse, Output, Reply, Row, Usage

__all__ = ["Unpacked", "unpack"]


class Unpacked(msgspec.Struct, frozen=True):
    """What a reply holds."""

    reply: Reply
    whose: Literal["rows", "first", "nobody"]
    """Whose the answers are; ``first``: there is but the first row's, and nothing names it; ``nobody``: it cannot be
    told, and then no row has one."""


_NONE = msgspec.Raw()


class _Top(msgspec.Struct):
    """What a reply says of the whole call."""

    object: msgspec.Raw = _NONE
    id: msgspec.Raw = _NONE
    created: msgspec.Raw = _NONE
    model: msgspec.Raw = _NONE
    system_fingerprint: msgspec.Raw = _NONE
    service_tier: msgspec.Raw = _NONE
    usage: msgspec.Raw = _NONE
    error: msgspec.Raw = _NONE


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw = _NONE
    index: msgspec.Raw = _NONE


class _Vectors(_Top):
    data: list[_Vector | None] = msgspec.field(default_factory=list)


class _Choices(_Top):
    choices: list[msgspec.Raw] = msgspec.field(default_factory=list)


class _Results(_Top):
    results: list[msgspec.Raw] = msgspec.field(default_factory=list)


class _Index(msgspec.Struct):
    index: msgspec.Raw = _NONE


class _Marked(msgspec.Struct):
    custom_id: msgspec.Raw = _NONE
    index: msgspec.Raw = _NONE


_vectors = msgspec.json.Decoder(_Vectors)
_choices = msgspec.json.Decoder(_Choices)
_results = msgspec.json.Decoder(_Results)
_index = msgspec.json.Decoder(_Index)
_marked = msgspec.json.Decoder(_Marked)

_HEAD = ("object", "id", "created", "model", "system_fingerprint", "service_tier")
_HEAD_BYTES = 300
"""A longer member of the head is left out: it would be written down once for every row."""


def unpack(name: PackingName, rows: tuple[Row, ...], response: HttpResponse) -> Unpacked | Broken:
    """Returns what a 2xx answers to several rows, or why it answers none of them. Never raises."""
    try:
        return _unpack(name, rows, response)
    except (RecursionError, msgspec.MsgspecError, ValueError):
        return _broken(response, "the reply is nested too deeply")


def _unpack(name: PackingName, rows: tuple[Row, ...], response: HttpResponse) -> Unpacked | Broken:
    decoder, missing = _SHAPES[name]
    try:
        top = _decode(decoder, response.content)
    except msgspec.ValidationError:
        return _broken(response, missing)
    if top is None or bytes(top.error) not in NOTHING or bytes(top.object) == b'"error"':
        return _broken(response, missing)
    if isinstance(top, _Vectors):
        items = [item.embedding if item else _NONE for item in top.data]
        marks, named, each = [_whole_number(item.index) if item else None for item in top.data], False, 1
    elif isinstance(top, _Choices):
        items = top.choices
        each = _answers_a_row(rows[0]) if name == "completions" else 1
        marks, named = [_index_of(item) for item in items], False
    else:
        assert isinstance(top, _Results)  # noqa: S101 - there are three
        items, each = top.results, 1
        marks, named = _marks(rows, items)
    if not items:
        return _broken(response, missing)
    head = _head(top)
    found = _find(marks, len(rows), each, named=named)
    if found is None:
        return Unpacked(_reply(rows, {}, top, head, response), "nobody")
    take = _TAKERS[name]
    answers = {}
    for place, row in enumerate(rows):
        numbers = [found[mark] for mark in range(place * each, place * each + each) if mark in found]
        answer = take(row, [items[number] for number in numbers], head) if len(numbers) == each else None
        if answer is not None:
            answers[place] = answer
    reply = _reply(rows, answers, top, head, response, extras=len(items) - len(found))
    alone = not named and answers.keys() == {0} and len(items) == each
    return Unpacked(reply, "first" if alone else "rows")


def _decode(decoder: msgspec.json.Decoder[Any], content: bytes) -> _Top | None:
    """Returns the parsed reply on one line, mended where text in it is broken; None where it is no JSON."""
    body = content.removeprefix(b"\xef\xbb\xbf").strip()
    if b"\n" in body or b"\r" in body:
        body = body.replace(b"\r", b" ").replace(b"\n", b" ")
    try:
        parsed: _Top = decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        body, doc = load(content)
        if doc is None:
            return None
        parsed = decoder.decode(body)
    return parsed


def _broken(response: HttpResponse, why: str) -> Broken:
    """Returns why a reply without answers is none, as the codec of single ones has it."""
    body, doc = load(response.content)
    if not isinstance(doc, dict):
        return no_object(doc, body, response.headers)
    usage = usage_of(doc)
    error = read_error(doc) if doc.get("error") or doc.get("object") == "error" else None
    return Broken(why, usage=usage) if error is None else Broken(error.message, error, usage)


# ---------------------------------------------------------------- whose answer is whose


def _find(marks: list[int | None], rows: int, each: int, *, named: bool) -> dict[int, int] | None:
    """Returns which item bears each mark, or None where it cannot be told whose answers they are.

    The k-th answer of a row is marked ``row * each + k``; of equal marks the first counts, others match no row. Where
    none is marked, the order tells, if there are as many as were asked for, or only the first row's.
    """
    asked = rows * each
    if each > 1 and len(marks) < asked:
        return None  # of servers that ignore ``n``, too
    if all(mark is None for mark in marks):
        return {mark: mark for mark in range(len(marks))} if len(marks) in (asked, each) else None
    if not named and len(marks) > each and all(mark is None or mark < each for mark in marks):
        return None  # every prompt's answers are counted from 0
    found: dict[int, int] = {}
    for number, mark in enumerate(marks):
        if mark is not None and 0 <= mark < asked:
            found.setdefault(mark, number)
    return found


def _marks(rows: tuple[Row, ...], items: list[msgspec.Raw]) -> tuple[list[int | None], bool]:
    """Returns (each result's row, by custom_id or else index; whether any bears a custom_id)."""
    place = {row.custom_id: number for number, row in enumerate(rows)}
    marks: list[int | None] = []
    named = False
    for item in items:
        try:
            mark = _marked.decode(item)
        except msgspec.ValidationError:
            marks.append(None)  # a bare text
            continue
        custom_id = bytes(mark.custom_id)
        if custom_id in NOTHING:
            marks.append(_whole_number(mark.index))
            continue
        named = True
        _, told = load(custom_id)
        marks.append(place.get(told if isinstance(told, str) else str(told), -1))
    return marks, named


def _index_of(item: msgspec.Raw) -> int | None:
    try:
        return _whole_number(_index.decode(item).index)
    except msgspec.ValidationError:
        return None


def _whole_number(raw: msgspec.Raw) -> int | None:
    """Returns an index; -1, which is nobody's, where it is none; None where there is none."""
    text = bytes(raw)
    if text in NOTHING:
        return None
    return int(text) if text.isdigit() and len(text) < 10 else -1


def _answers_a_row(row: Row) -> int:
    """Returns how many choices each prompt of a call was to have."""
    n = _whole_number(raw_members(row.body).get("n", _NONE))
    return n if n is not None and n > 0 else 1


# ---------------------------------------------------------------- the reply


def _head(top: _Top) -> Head:
    members = {}
    for name in _HEAD:
        raw = bytes(getattr(top, name))
        if raw and len(raw) <= _HEAD_BYTES:
            body, doc = load(raw)
            if doc is not None:
                members[name] = body
    return Head(members, members_start(members) + (b"," if members else b""))


def _reply(
    rows: tuple[Row, ...],
    answers: dict[int, Answer],
    top: _Top,
    head: Head,
    response: HttpResponse,
    extras: int = 0,
) -> Reply:
    """Returns the Reply; what is told for the call as a whole is shared out among the rows that were answered."""
    told = {name: load(raw)[1] for name, raw in head.members.items()}
    usage_raw, used = load(bytes(top.usage))
    doc = {"usage": used, "data": None} if isinstance(top, _Vectors) else {"usage": used}
    total = usage_of(doc)
    cost = stated_cost(doc, b'{"usage":' + usage_raw + b"}", response.headers) if answers else None
    places = sorted(answers)
    own = [answers[place].usage for place in places]
    shared = total if not any(own) else None
    inputs = [max(1, rows[place].tokens) for place in places]
    outputs = [len(answers[place].value) for place in places]
    parts: Sequence[Usage | None] = own if shared is None or not own else share_usage(shared, inputs, outputs)
    costs: Sequence[Decimal | None] = [answers[place].cost_usd for place in places]
    if cost is not None and not any(price is not None for price in costs):
        costs = share_cost(cost, inputs if shared is None else [p.input_tokens + p.output_tokens for p in parts if p])
    known = [usage for usage in own if usage is not None]
    if total is None and known and len(known) == len(rows):
        total = Usage(*(sum(fields) for fields in zip(*map(_fields, known), strict=True)))
    model, tier = told.get("model"), told.get("service_tier") or as_dict(used).get("service_tier")
    identity = response.headers.get("x-request-id") or response.headers.get("request-id") or told.get("id")
    return Reply(
        {
            rows[place].custom_id: _output(rows[place], answers[place], part, price, shared=shared is not None)
            for place, part, price in zip(places, parts, costs, strict=True)
        },
        total,
        model if isinstance(model, str) else None,
        identity if isinstance(identity, str) else None,
        response.status,
        tier if isinstance(tier, str) else None,
        extras=extras,
    )


def _output(row: Row, answer: Answer, usage: Usage | None, cost_usd: Decimal | None, *, shared: bool) -> Output:
    """Returns a row's Output. Its body states the row's share of the usage, as a single reply would its own."""
    tail = b"}"
    if shared and usage is not None:
        given, said = usage.input_tokens, usage.output_tokens
        if row.endpoint == "embeddings":
            tail = b',"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (given, given + said)
        else:
            told = (given, said, given + said)
            tail = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}' % told
    return Output(answer.value, answer.body + tail, answer.finish_reason, usage, cost_usd, shared)


def _fields(usage: Usage) -> tuple[int, ...]:
    return (
        usage.input_tokens,
        usage.output_tokens,
        usage.cached_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
    )


_SHAPES: dict[PackingName, tuple[msgspec.json.Decoder[Any], str]] = {
    "embeddings": (_vectors, "the reply has no data"),
    "completions": (_choices, "the reply has no choices"),
    "vllm-chat": (_choices, "the reply has no choices"),
    "gateway-batch": (_results, "the reply has no results"),
    "gateway-chat": (_results, "the reply has no results"),
}
_TAKERS: dict[PackingName, Callable[[Row, Sequence[msgspec.Raw], Head], Answer | None]] = {
    "embeddings": take_vector,
    "completions": take_choices,
    "vllm-chat": take_choices,
    "gateway-batch": take_result,
    "gateway-chat": take_result,
}
