"""OpenAI's wire format and its compatibles': chat, responses, completions, embeddings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import orjson

from batchrun.providers.base import Codec, Reader, Wire, count, join, raw_items, raw_members, text_value
from batchrun.providers.faults import Broken, ErrorBody, as_dict, read_error
from batchrun.records import Endpoint, Fault, HttpRequest, Output, Row, Usage

__all__ = ["PATHS", "READERS", "OpenAI"]

PATHS: Mapping[Endpoint, str] = {
    "chat": "/chat/completions",
    "responses": "/responses",
    "completions": "/completions",
    "embeddings": "/embeddings",
}

_LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
_OTHER = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
# Codes with which servers say "I do not know this parameter": OpenAI, then pydantic 2 and 1 (vLLM, Mistral).
_UNKNOWN_PARAMETER = frozenset({"unsupported_parameter", "unknown_parameter", "extra_forbidden", "value_error.extra"})
_UNKNOWN_PARAMETER_TEXT = re.compile(
    r"unrecogni[sz]ed|unknown|unsupported|unexpected|extra (?:inputs|fields)"
    r"|not (?:supported|permitted|allowed)",
    re.IGNORECASE,
)
_LIMIT_NAME_TEXT = re.compile(r"\b(max_tokens|max_completion_tokens)\b")


class OpenAI(Codec):
    """OpenAI and its compatibles. Learns per model which name its output limit goes by."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self._spelling: dict[str, str] = {}
        self._tried: set[tuple[str, str]] = set()

    def encode(self, rows: tuple[Row, ...]) -> HttpRequest:
        """Returns the request for the one row: its very bytes, unless its model has the other limit name."""
        (row,) = rows
        body = row.body
        if self._spelling and row.endpoint == "chat" and (name := self._spelling.get(row.model)):
            body = _respelled(body, name)
        return HttpRequest(self._urls[row.endpoint], self._headers, body)

    def adapt(self, rows: tuple[Row, ...], fault: Fault) -> bool:
        """Returns True where ``fault`` refuses the limit's name, and its model now goes by the other one.

        True too for rows that were in flight when that was learned. A name is taken up once per model.
        """
        (row,) = rows
        refused = _refused_limit_name(fault)
        if row.endpoint != "chat" or refused is None or not raw_members(row.body).keys() & _OTHER.keys():
            return False
        name = _OTHER[refused]
        if self._spelling.get(row.model) == name:
            return True
        if (row.model, name) in self._tried:
            return False
        self._tried.add((row.model, name))
        self._spelling[row.model] = name
        return True


def _refused_limit_name(fault: Fault) -> str | None:
    """Returns which limit name a 400 or 422 does not know; None also where only its value is refused."""
    if fault.kind != "rejected" or fault.status not in (400, 422):
        return None
    if fault.code in _UNKNOWN_PARAMETER and fault.param in _LIMIT_NAMES:
        return fault.param
    # Older servers say it in prose only. Of two names the first is the refused one ("Use … instead").
    named = _LIMIT_NAME_TEXT.search(fault.detail)
    return named[1] if named and _UNKNOWN_PARAMETER_TEXT.search(fault.detail) else None


def _respelled(body: bytes, name: str) -> bytes:
    """Returns ``body`` with its output limit under ``name``; all values keep their bytes."""
    members = raw_members(body)
    other = _OTHER[name]
    if other not in members:
        return body
    limit = members.pop(other)
    members.setdefault(name, limit)
    return b"{" + b",".join(orjson.dumps(key) + b":" + bytes(value) for key, value in members.items()) + b"}"


# ---------------------------------------------------------------- readers


def read_chat(row: Row, doc: dict[str, Any], body: bytes, headers: Mapping[str, str]) -> Output | Broken:
    """Reads a chat completion: its text, else refusal, else tool calls; a list of these for n > 1."""
    usage = usage_of(doc)
    choices = doc.get("choices")
    if not isinstance(choices, list) or not choices:
        return Broken("the reply has no choices", usage=usage)
    parse = b'"response_format"' in row.body and wants_json(row.body, "response_format")
    values = []
    for place, choice in enumerate(choices):
        if not isinstance(choice, dict):
            return Broken("a choice of the reply is no object", usage=usage)
        if choice.get("error") and (error := read_error(choice)):  # OpenRouter: it broke off midway
            return Broken(error.message, error, usage, processed=True)
        message = choice.get("message")
        if not isinstance(message, dict):
            return Broken("a choice of the reply has no message", usage=usage)
        values.append(_chat_value(message, place, body, parse=parse))
    return Output(
        values[0] if len(values) == 1 else join(values),
        body,
        "refusal" if _refuses(choices[0]["message"]) else _finish(choices[0]),
        usage,
        stated_cost(doc, body, headers),
    )


def _refuses(message: dict[str, Any]) -> bool:
    """Whether the model declined: it then says `stop`, as if it had answered."""
    return bool(message.get("refusal")) and not message.get("content")


def _chat_value(message: dict[str, Any], place: int, body: bytes, *, parse: bool) -> bytes:
    content = message.get("content")
    if isinstance(content, list):  # Mistral's reasoning models answer in parts
        content = "".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    if isinstance(content, str) and content:
        return text_value(content, parse=parse)
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal:
        return orjson.dumps(refusal)
    if message.get("tool_calls"):
        choice = raw_members(raw_items(raw_members(body)["choices"])[place])
        return bytes(raw_members(choice["message"])["tool_calls"])
    return b'""'


def read_completion(row: Row, doc: dict[str, Any], body: bytes, headers: Mapping[str, str]) -> Output | Broken:
    """Reads a text completion: its text; a list of texts for several choices."""
    del row
    usage = usage_of(doc)
    choices = doc.get("choices")
    if not isinstance(choices, list) or not choices:
        return Broken("the reply has no choices", usage=usage)
    texts = [as_dict(choice).get("text") for choice in choices]
    if not all(isinstance(text, str) for text in texts):
        return Broken("a choice of the reply has no text", usage=usage)
    return Output(
        orjson.dumps(texts[0] if len(texts) == 1 else texts),
        body,
        _finish(choices[0]),
        usage,
        stated_cost(doc, body, headers),
    )


def read_embeddings(row: Row, doc: dict[str, Any], body: bytes, headers: Mapping[str, str]) -> Output | Broken:
    """Reads embeddings, digit for digit: the vector; a list of vectors for an array of several inputs."""
    usage = usage_of(doc)
    data = doc.get("data")
    if not isinstance(data, list) or not data:
        return Broken("the reply has no data", usage=usage)
    try:
        items = msgspec.json.decode(body, type=_Vectors).data
    except msgspec.ValidationError:
        return Broken("an item of the reply has no embedding", usage=usage)
    if sorted(item.index for item in items) == list(range(len(items))):
        items.sort(key=lambda item: item.index)  # a server without indices answers in order
    vectors = [bytes(item.embedding) for item in items]
    asked = _inputs(row.body)
    if asked != len(vectors):
        return Broken(f"the reply has {len(vectors)} vectors for {asked} inputs", usage=usage)
    return Output(
        vectors[0] if len(vectors) == 1 else join(vectors),
        body,
        usage=usage,
        cost_usd=stated_cost(doc, body, headers),
    )


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw
    index: int = 0


class _Vectors(msgspec.Struct):
    data: list[_Vector]


def _inputs(body: bytes) -> int:
    """Returns how many vectors a body asks for: a text or one array of token numbers is one input."""
    given = raw_members(body).get("input")
    items = raw_items(given) if given is not None else []
    return len(items) if items and bytes(items[0])[:1] in (b'"', b"[", b"{") else 1


def read_response(row: Row, doc: dict[str, Any], body: bytes, headers: Mapping[str, str]) -> Output | Broken:
    """Reads a /responses reply: its text, else refusal, else function calls. A failed one is an error."""
    usage = usage_of(doc)
    status = doc.get("status")
    if status in ("failed", "cancelled"):
        # A code that is not known here concerns the request (images, policies): again would not help.
        error = read_error(doc) or ErrorBody(f"the response is {status}", number=500)
        return Broken(error.message, error, usage, otherwise=400 if error.words else 500)
    if status in ("queued", "in_progress"):
        why = f'the response is still {status}: "background" requests are not collected, remove it from the row'
        return Broken(why, ErrorBody(why, "background", "background", number=400), usage, processed=True)
    items = doc.get("output")
    if not isinstance(items, list):
        return Broken("the reply has no output", usage=usage)
    parts = [part for item in items for part in _message_parts(item)]
    text = "".join(_texts(parts, "output_text", "text"))
    refusal = "".join(_texts(parts, "refusal", "refusal"))
    if text:
        parse = b'"format"' in row.body and wants_json(row.body, "text", "format")
        value = text_value(text, parse=parse)
    elif refusal:
        value = orjson.dumps(refusal)
    else:
        calls = [at for at, item in enumerate(items) if as_dict(item).get("type") == "function_call"]
        value = b'""'
        if calls:
            raw = raw_items(raw_members(body)["output"])
            value = join([bytes(raw[at]) for at in calls])
    reason = as_dict(doc.get("incomplete_details")).get("reason") if status == "incomplete" else None
    finish = reason or ("refusal" if refusal and not text else status)
    return Output(value, body, finish if isinstance(finish, str) else None, usage, stated_cost(doc, body, headers))


def _message_parts(item: object) -> list[Any]:
    message = as_dict(item)
    content = message.get("content")
    return content if message.get("type") == "message" and isinstance(content, list) else []


def _texts(parts: Iterable[Any], kind: str, key: str) -> Iterable[str]:
    for part in parts:
        if isinstance(part, dict) and part.get("type") == kind and isinstance(part.get(key), str):
            yield part[key]


READERS: Mapping[Endpoint, Reader] = {
    "chat": read_chat,
    "responses": read_response,
    "completions": read_completion,
    "embeddings": read_embeddings,
}


# ---------------------------------------------------------------- what rows ask for, what replies cost


def wants_json(body: bytes, *path: str) -> bool:
    """Returns whether a request asks for JSON: ``type`` at ``path`` is json_object or json_schema."""
    members = raw_members(body)
    for step in path:
        members = raw_members(members.get(step, b"null"))
    return bytes(members.get("type", b"")) in (b'"json_object"', b'"json_schema"')


def _finish(choice: dict[str, Any]) -> str | None:
    reason = choice.get("finish_reason")
    return reason if isinstance(reason, str) else None


def usage_of(doc: dict[str, Any]) -> Usage | None:
    """Returns the tokens of a reply, or None where it does not say how many went in and came out.

    input = prompt_tokens | input_tokens, cached ones within; output = completion_tokens | output_tokens.
    Where total_tokens exceeds their sum, the rest is reasoning that the server counts beside its output
    (xAI, Gemini's compatible endpoint), and is added. Embeddings put nothing out.
    """
    usage = doc.get("usage")
    if not isinstance(usage, dict):
        return None
    get = usage.get
    given = _count(get("prompt_tokens"), get("input_tokens"))
    out = _count(get("completion_tokens"), get("output_tokens"))
    total = _count(get("total_tokens"))
    if out is None:
        if total is None and "data" not in doc:
            return None
        out = max(0, total - given) if total is not None and given is not None else 0
    if given is None:
        if total is None:
            return None
        given = max(0, total - out)
    came_in = get("prompt_tokens_details") or get("input_tokens_details")
    came_out = get("completion_tokens_details") or get("output_tokens_details")
    cached = written = reasoning = None
    if isinstance(came_in, dict):
        cached, written = _count(came_in.get("cached_tokens")), _count(came_in.get("cache_write_tokens"))
    if isinstance(came_out, dict):
        reasoning = _count(came_out.get("reasoning_tokens"))
    if cached is None:
        cached = _count(get("prompt_cache_hit_tokens"))  # DeepSeek
    beside = max(0, total - given - out) if total is not None else 0
    return Usage(given, out + beside, min(cached or 0, given), written or 0, max(reasoning or 0, beside))


def _count(*values: object) -> int | None:
    """Returns the first that is a count."""
    for value in values:
        if (number := count(value)) is not None:
            return number
    return None


class _Costs(msgspec.Struct):
    cost: Decimal
    is_byok: bool | None = None


class _Costed(msgspec.Struct):
    usage: _Costs


def stated_cost(doc: dict[str, Any], body: bytes, headers: Mapping[str, str]) -> Decimal | None:
    """Returns the dollars that the reply itself states, digit for digit: usage.cost or LiteLLM's header.

    OpenRouter's cost is its fee alone where the upstream's key is the user's own (``is_byok``): not stated.
    LiteLLM's zero means a price that it does not know.
    """
    usage = doc.get("usage")
    if isinstance(usage, dict) and usage.get("cost") is not None:
        try:
            costs = msgspec.json.decode(body, type=_Costed).usage
        except msgspec.ValidationError:
            return None  # Perplexity's is an object, another's may be prose
        return None if costs.is_byok else _dollars(costs.cost)
    header = headers.get("x-litellm-response-cost")
    if header is None:
        return None
    try:
        cost = Decimal(header)
    except InvalidOperation:
        return None
    return _dollars(cost) or None


def _dollars(cost: Decimal) -> Decimal | None:
    """Returns a cost that can be one: no server's nonsense may fill a file with its digits."""
    sane = cost.is_finite() and cost >= 0 and int(cost.as_tuple().exponent) >= -30 and cost.adjusted() < 9
    return cost if sane else None
