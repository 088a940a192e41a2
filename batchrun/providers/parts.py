"""A row's own part of a packed reply, as the answer that it would have been alone.

Chat and text answers are put back into a single reply and read by the very reader of one. Vectors are cut out as they
are: no number in them is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

import msgspec
import orjson

from batchrun.providers.base import join, load, raw_members
from batchrun.providers.faults import Broken
from batchrun.providers.openai import READERS
from batchrun.records import Row, Usage

__all__ = ["NOTHING", "Answer", "Head", "members_start", "take_choices", "take_result", "take_vector"]

NOTHING = (b"", b"null", b"false", b'""', b"{}", b"[]")
"""Raw JSON that says nothing; also where a member is missing."""
_FAILED = frozenset({"failed", "failure", "error", "errored", "cancelled", "canceled", "expired", "rejected"})


class Answer(NamedTuple):
    """A row's own part of the reply. ``body`` is a single reply, still open at its end, as the usage is to follow."""

    value: bytes
    body: bytes
    finish_reason: str | None = None
    usage: Usage | None = None
    cost_usd: Decimal | None = None


class Head(NamedTuple):
    """What a single reply begins with: the call's own id, model and the like, as they were sent."""

    members: dict[str, bytes]
    start: bytes
    """The same as JSON, ready for a further member."""


def take_vector(row: Row, items: Sequence[msgspec.Raw], head: Head) -> Answer | None:
    """Takes an embedding as it is, and puts it into a reply of its own."""
    del row
    vector = bytes(items[0])
    if vector in NOTHING:
        return None
    if not _is_plain(vector):
        vector, doc = load(vector)
        if doc is None:
            return None
    return Answer(vector, head.start + b'"data":[{"object":"embedding","index":0,"embedding":' + vector + b"}]")


_HUGE = re.compile(rb"e\+?0*[1-9][0-9]{2}")


def _is_plain(value: bytes) -> bool:
    """Whether a valid JSON value can be read back wherever it is written: flat, its text whole, no 1e999 in it."""
    if not value.isascii() or value.find(b"[", 1) >= 0 or b"{" in value or b"E" in value:
        return False
    exponents = value.count(b"e")
    return exponents == 0 or exponents == value.count(b"e-") or _HUGE.search(value) is None


def take_choices(row: Row, items: Sequence[msgspec.Raw], head: Head) -> Answer | None:
    """Reads a row's choices, counted from 0 as in a reply of its own."""
    choices = []
    for number, item in enumerate(items):
        members = {name: bytes(raw) for name, raw in raw_members(item).items()}
        choices.append(members_start(members | {"index": b"%d" % number}) + b"}")
    return _read(row, head.start + b'"choices":' + join(choices))


def take_result(row: Row, items: Sequence[msgspec.Raw], head: Head) -> Answer | None:
    """Reads a gateway's result: its own members, with ``choices`` where it has none."""
    item = items[0]
    members = {name: bytes(raw) for name, raw in raw_members(item).items()}
    status, error = members.get("status", b""), members.get("error", b"")
    if error not in NOTHING or status.strip(b'"').lower().decode("utf-8", "replace") in _FAILED:
        return None
    if members.get("choices", b"") in NOTHING:
        choice = _choice(row, item, members)
        if choice is None:
            return None
        members["choices"] = b"[" + choice + b"]"
    kind = b'"chat.completion"' if row.endpoint == "chat" else b'"text_completion"'
    return _read(row, members_start({**head.members, "object": kind, **members}))


def _choice(row: Row, item: msgspec.Raw, members: dict[str, bytes]) -> bytes | None:
    """Returns the choice that a result amounts to: the text of its ``output``, or its own, or it is the text."""
    output = members.get("output", b"")
    inner = {name: bytes(raw) for name, raw in raw_members(output).items()} if output[:1] == b"{" else {}
    texts = (inner.get("text"), output, members.get("text"), bytes(item))
    text = next((text for text in texts if text is not None and text[:1] == b'"'), None)
    finish = inner.get("finish_reason") or members.get("finish_reason") or b"null"
    message = members.get("message") or (None if text is None else b'{"role":"assistant","content":' + text + b"}")
    if row.endpoint == "completions":
        message = text
    if message is None:
        return None
    said = b'"text":' if row.endpoint == "completions" else b'"message":'
    return b'{"index":0,' + said + message + b',"finish_reason":' + finish + b"}"


def _read(row: Row, single: bytes) -> Answer | None:
    """Reads a single reply, given open at its end, as if it had come alone; None where it holds no answer."""
    body, doc = load(single + b"}")
    if not isinstance(doc, dict):
        return None
    output = READERS[row.endpoint](row, doc, body, {})
    if isinstance(output, Broken):
        return None
    return Answer(output.value, body[:-1], output.finish_reason, output.usage, output.cost_usd)


def members_start(members: dict[str, bytes]) -> bytes:
    """Returns the start of a JSON object, open at its end."""
    return b"{" + b",".join(orjson.dumps(name) + b":" + raw for name, raw in members.items())
