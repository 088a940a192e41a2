"""Request bodies as each endpoint has them: paths, system prompts, output limits; and raw JSON to build them of.

Bodies are put together from raw spans of the input, never dumped again, so that numbers keep their digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import orjson

from batchrun.records import Endpoint

__all__ = [
    "MAX_TOKENS_NAMES",
    "PATHS",
    "SYSTEM_ROLES",
    "BadLine",
    "Members",
    "add_system",
    "check_content",
    "check_count",
    "check_messages",
    "elements",
    "gemini_config",
    "has_system",
    "join",
    "max_output",
    "name_of",
    "splice",
    "split",
]

Members: TypeAlias = dict[str, bytes]
"""The members of a JSON object: name → raw JSON value."""

PATHS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "messages",
    "/chat/completions": "chat",
    "/responses": "responses",
    "/completions": "completions",
    "/embeddings": "embeddings",
    "/messages": "messages",
}

MAX_TOKENS_NAMES: Mapping[Endpoint, tuple[str, ...]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
    "completions": ("max_tokens",),
    "embeddings": (),
    "messages": ("max_tokens",),
    "generate": ("maxOutputTokens", "max_output_tokens"),
}

SYSTEM_ROLES = ("system", "developer")
_MESSAGES_HINT = 'expected "messages": [{"role": "user", "content": "…"}]'

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


class BadLine(Exception):  # noqa: N818 - it is the line that is bad
    """A line is no request: ``why`` fits after "line N: "; ``hint`` says how to mend it."""

    def __init__(self, why: str, hint: str | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint


# ---------------------------------------------------------------- raw JSON


def split(raw: bytes) -> Members:
    """Returns the members of a valid JSON object; of equal names the last, as every parser has it."""
    return {name: bytes(value) for name, value in _object.decode(raw).items()}


def elements(raw: bytes) -> list[bytes]:
    """Returns the elements of a valid JSON array."""
    return [bytes(value) for value in _array.decode(raw)]


def join(members: Members) -> bytes:
    """Returns the JSON object of these members."""
    return b"{" + b",".join([orjson.dumps(name) + b":" + raw for name, raw in members.items()]) + b"}"


def splice(raw: bytes, members: Members, *, empty: bool) -> bytes:
    """Returns the object ``raw`` with members in front of its own, whose bytes stay as they are."""
    return join(members)[:-1] + (b"}" if empty else b"," + raw[1:])


def name_of(value: object) -> str:
    """Returns what kind of JSON value this is, for people."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "an array"
        case _:
            return "an object"


# ---------------------------------------------------------------- content


def check_content(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Raises BadLine where a parsed body asks nothing, or asks for a stream."""
    if body.get("stream") not in (None, False):
        raise BadLine("asks for a stream", "leave `stream` out: answers are kept when they are complete")
    match endpoint:
        case "chat" | "messages":
            check_messages(body.get("messages"))
        case "completions":
            _check_present(body, "prompt")
        case "embeddings":
            _check_present(body, "input")
        case "generate":
            _check_present(body, "contents")
        case "responses":
            pass  # a stored prompt or an earlier response can stand in for `input`


def check_messages(messages: object) -> None:
    """Raises BadLine unless these are messages: an array, not empty, of objects that have a role."""
    if messages is None:
        raise BadLine("has no `messages`", _MESSAGES_HINT)
    if type(messages) is not list:
        raise BadLine(f"`messages` is {name_of(messages)}, expected an array", _MESSAGES_HINT)
    if not messages:
        raise BadLine("`messages` is empty", _MESSAGES_HINT)
    for at, message in enumerate(messages):
        if type(message) is not dict:
            raise BadLine(f"`messages[{at}]` is {name_of(message)}, expected an object", _MESSAGES_HINT)
        if type(message.get("role")) is not str:
            raise BadLine(f"`messages[{at}]` has no `role`", _MESSAGES_HINT)


def _check_present(body: Mapping[str, Any], name: str) -> None:
    if body.get(name) is None:
        raise BadLine(f"has no `{name}`")
    if body[name] == []:
        raise BadLine(f"`{name}` is empty")


# ---------------------------------------------------------------- system prompts


def has_system(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Whether a parsed body tells the model how to behave already."""
    match endpoint:
        case "chat":
            return _tells(body.get("messages"))
        case "responses":
            return body.get("instructions") is not None or _tells(body.get("input"))
        case "messages":
            return body.get("system") is not None
        case "generate":
            return (body.get("systemInstruction") or body.get("system_instruction")) is not None
        case _:
            return False


def add_system(endpoint: Endpoint, members: Members, system: bytes) -> None:
    """Adds a system prompt, raw JSON, to a body's members; BadLine where the endpoint has no place for it."""
    match endpoint:
        case "chat":
            message = b'{"role":"system","content":' + system + b"}"
            members["messages"] = b"[" + message + b"," + members["messages"][1:]
        case "responses":
            members["instructions"] = system
        case "messages":
            members["system"] = system
        case "generate":
            members["systemInstruction"] = b'{"parts":[{"text":' + system + b"}]}"
        case _:
            raise BadLine(f"a system prompt has no place in {endpoint}", "leave `system` and --system out")


def _tells(messages: object) -> bool:
    return isinstance(messages, list) and any(
        isinstance(message, dict) and message.get("role") in SYSTEM_ROLES for message in messages
    )


# ---------------------------------------------------------------- limits


def max_output(endpoint: Endpoint, body: Mapping[str, Any]) -> int | None:
    """Returns the output tokens that a parsed body allows, all its answers together; None where it names no limit.

    max tokens × n; for completions max tokens × max(n, best_of) × prompts. BadLine where these are no counts.
    """
    if endpoint == "embeddings":
        return 0
    if endpoint == "generate":
        _, config = gemini_config(body)
        most = _count(config, MAX_TOKENS_NAMES[endpoint])
        answers = _count(config, ("candidateCount", "candidate_count")) or 1
        return None if most is None else most * answers
    # Scoring with `echo` asks completions for no new token at all.
    most = _count(body, MAX_TOKENS_NAMES[endpoint], least=0 if endpoint == "completions" else 1)
    if endpoint in ("messages", "responses"):
        return most
    answers = _count(body, ("n",)) or 1
    if endpoint == "completions":
        answers = max(answers, _count(body, ("best_of",)) or 1)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            answers *= len(prompt)
    return None if most is None else most * answers


def gemini_config(body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns a Gemini body's generationConfig, and what the body calls it; BadLine where it is no object."""
    name = "generation_config" if "generation_config" in body else "generationConfig"
    config = body.get(name) or {}
    if not isinstance(config, dict):
        raise BadLine(f"`{name}` is {name_of(config)}, expected an object")
    return name, config


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """Returns a count of tokens or answers; BadLine unless it is an integer of at least ``least``."""
    # A count beyond this is no count, and would not fit where it is kept.
    if type(value) is not int or not least <= value <= 2**31:
        raise BadLine(f"`{name}` must be a positive integer")
    return value


def _count(values: Mapping[str, Any], names: Sequence[str], *, least: int = 1) -> int | None:
    for name in names:
        value = values.get(name)
        if value is not None:
            return check_count(name, value, least=least)
    return None
