"""Which rows can share a call, and how many: the packings that are known, and where arrays are known to be taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import orjson

from batchrun.providers.base import raw_items, raw_members
from batchrun.providers.presets import Preset
from batchrun.records import Endpoint, GroupKey, Row

__all__ = ["FIELDS", "PATHS", "Packing", "PackingName", "limit_of", "packing_for", "prompt_of"]

PackingName: TypeAlias = Literal["embeddings", "completions", "vllm-chat", "gateway-batch", "gateway-chat"]
Members: TypeAlias = Mapping[str, msgspec.Raw]

PATHS: Mapping[PackingName, str] = {
    "embeddings": "/embeddings",
    "completions": "/completions",
    "vllm-chat": "/chat/completions/batch",
    "gateway-batch": "/batch",
    "gateway-chat": "/chat/completions",
}
FIELDS: Mapping[PackingName, str] = {
    "embeddings": "input",
    "completions": "prompt",
    "vllm-chat": "messages",
    "gateway-chat": "messages",
}
"""What becomes an array: all else in a body is stated once for the call. ``gateway-batch`` states it for each row."""

_CARRIES: Mapping[PackingName, frozenset[Endpoint]] = {
    "embeddings": frozenset({"embeddings"}),
    "completions": frozenset({"completions"}),
    "vllm-chat": frozenset({"chat"}),
    "gateway-batch": frozenset({"chat", "completions"}),
    "gateway-chat": frozenset({"chat"}),
}
_ONE_ANSWER = (b"1", b"null")
_NO = (b"false", b"null")
_TOOLS = ("tools", "functions")
_LIMITS = ("max_tokens", "max_completion_tokens")
_BATCHED = frozenset({"model", "messages", "prompt", "temperature", "n", "stream", *_LIMITS})
"""What a gateway's batch request has a place for, or what says nothing that it would not do anyway."""
_SLACK_BYTES = 16
"""Brackets of the array, and an output limit under its longer name."""
_REQUEST_BYTES = 64
"""Names and punctuation of one of a gateway's batch requests."""


class Packing(msgspec.Struct, frozen=True):
    """How rows of one endpoint share a call, and within what limits."""

    name: PackingName
    endpoint: Endpoint
    path: str
    """Follows the preset's base URL."""
    max_rows: int
    max_tokens: int
    max_bytes: int
    """Of the encoded body: no sum of ``size`` may exceed it."""
    max_row_tokens: int | None = None
    """What the server takes of a single row; one estimated above goes alone, so that it fails nobody else's call."""

    def key(self, row: Row) -> GroupKey | None:
        """Returns what rows must agree on to share a call, as raw JSON; None where this row must go alone."""
        if row.endpoint != self.endpoint or (self.max_row_tokens is not None and row.tokens > self.max_row_tokens):
            return None
        members = raw_members(row.body)
        if bytes(members.get("stream", b"false")) not in _NO:
            return None
        if self.name == "gateway-batch":
            return (row.endpoint, row.model) if _fits_request(row.endpoint, members) else None
        given = members.pop(FIELDS[self.name], None)
        if given is None or not self._is_one(bytes(given), members):
            return None
        shared = [(name, str(raw, "utf-8")) for name, raw in sorted(members.items())]
        return (row.endpoint, row.model, *(part for pair in shared for part in pair))

    def size(self, row: Row) -> int:
        """Returns bytes such that their sum over the rows of a call is never less than its encoded body."""
        if self.name == "gateway-batch":
            return len(row.body) + len(orjson.dumps(row.custom_id)) + _REQUEST_BYTES
        return len(row.body) + _SLACK_BYTES

    def _is_one(self, given: bytes, members: Members) -> bool:
        """Whether a row asks one thing that can be an item of an array."""
        if self.name in ("embeddings", "completions"):
            return given[:1] == b'"' and given != b'""'  # not an array already; servers refuse empty texts
        return (
            given[:1] == b"["
            and bytes(members.get("n", b"1")) in _ONE_ANSWER
            and not any(bytes(members.get(name, b"null")) != b"null" for name in _TOOLS)
        )


def _fits_request(endpoint: Endpoint, members: Members) -> bool:
    """Whether a gateway's batch request can say all that a body says."""
    return (
        members.keys() <= _BATCHED
        and bytes(members.get("n", b"1")) in _ONE_ANSWER
        and not all(name in members for name in _LIMITS)
        and prompt_of(endpoint, members) is not None
    )


def prompt_of(endpoint: Endpoint, members: Members) -> msgspec.Raw | None:
    """Returns the one text that a body asks: its prompt, or the only message, of the user; None where it is more."""
    if endpoint == "completions":
        text = members.get("prompt")
    else:
        messages = raw_items(members.get("messages", b"[]"))
        message = raw_members(messages[0]) if len(messages) == 1 else {}
        plain = message.keys() == {"role", "content"} and bytes(message["role"]) == b'"user"'
        text = message["content"] if plain else None
    return text if text is not None and bytes(text)[:1] == b'"' and bytes(text) != b'""' else None


def limit_of(members: Members) -> msgspec.Raw | None:
    """Returns the output limit of a body, whatever its name there."""
    return next((members[name] for name in _LIMITS if name in members), None)


# ---------------------------------------------------------------- where


class _Limits(NamedTuple):
    rows: int
    tokens: int
    row_tokens: int | None = None
    bytes: int = 32 * 1024 * 1024


_OPENAI_EMBEDDINGS = _Limits(2_048, 300_000, 8_192)
_EMBEDDINGS: Mapping[str, _Limits] = {
    "openai": _OPENAI_EMBEDDINGS,
    "sim": _OPENAI_EMBEDDINGS,
    "openrouter": _OPENAI_EMBEDDINGS,
    # "Too many inputs in request" beyond 512, "Too many tokens in batch. Max is 16384".
    "mistral": _Limits(512, 16_384, 8_192),
    "together": _Limits(2_048, 300_000),
    "fireworks": _Limits(2_048, 300_000),
    "vllm": _Limits(2_048, 300_000),
    # On a laptop a call must end within its timeout.
    "ollama": _Limits(256, 32_000),
}
"""Providers whose embeddings are known to take arrays."""
_PROMPTS = _Limits(1_024, 320_000)  # vLLM takes so many prompts
_GATEWAY = _Limits(100, 320_000)
_BY_NAME: Mapping[PackingName, _Limits] = {
    "embeddings": _Limits(2_048, 300_000),
    "completions": _PROMPTS,
    "vllm-chat": _PROMPTS,
    "gateway-batch": _GATEWAY,
    "gateway-chat": _GATEWAY,
}
_COMPLETIONS = frozenset({"vllm", "sim"})
_CHATS: Mapping[str, PackingName] = {"vllm": "vllm-chat", "holysheep": "gateway-batch", "sim": "gateway-batch"}


def packing_for(
    preset: Preset, endpoint: Endpoint, name: PackingName | None, mode: Literal["auto", "packed"]
) -> Packing | None:
    """Returns how rows of ``endpoint`` share calls at this provider; None where they go one by one.

    By ``name`` exactly that packing, where it carries the endpoint. Without: where arrays are known to be taken
    (embeddings; completions on vLLM); if ``packed`` was asked for, also chat where a packing of it is known, and
    embeddings anywhere.
    """
    if preset.family != "openai":
        return None
    if name is None:
        name = _known(preset, endpoint, mode)
    if name is None or endpoint not in _CARRIES[name]:
        return None
    limits = _EMBEDDINGS.get(preset.name, _BY_NAME[name]) if name == "embeddings" else _BY_NAME[name]
    return Packing(name, endpoint, PATHS[name], limits.rows, limits.tokens, limits.bytes, limits.row_tokens)


def _known(preset: Preset, endpoint: Endpoint, mode: Literal["auto", "packed"]) -> PackingName | None:
    match endpoint:
        case "embeddings" if preset.name in _EMBEDDINGS or mode == "packed":
            return "embeddings"
        case "completions" if preset.name in _COMPLETIONS:
            return "completions"
        case "chat" if mode == "packed":
            return _CHATS.get(preset.name)
    return None
