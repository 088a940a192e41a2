"""Gemini's native wire format: models/{model}:generateContent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from batchrun.providers.base import Codec, Reader, count, join, raw_items, raw_members, text_value
from batchrun.providers.faults import Broken, ErrorBody, as_dict
from batchrun.records import Endpoint, Output, Row, Usage

__all__ = ["READERS", "Gemini"]


class Gemini(Codec):
    """Gemini. The model travels in the URL, escaped as one path segment, and not in the body."""

    def _url(self, row: Row) -> str:
        kind, slash, name = row.model.partition("/")
        if not slash or kind not in ("models", "tunedModels"):
            kind, name = "models", row.model
        return f"{self._urls[row.endpoint]}/{kind}/{quote(name, safe='')}:generateContent"


def read_generated(row: Row, doc: dict[str, Any], body: bytes, headers: Mapping[str, str]) -> Output | Broken:
    """Reads a generateContent reply: its text without thoughts, else function calls; a list for several."""
    del headers
    usage = usage_of(doc)
    candidates = doc.get("candidates")
    if not isinstance(candidates, list) or not candidates:
        blocked = as_dict(doc.get("promptFeedback")).get("blockReason")
        if not isinstance(blocked, str):
            return Broken("the reply has no candidates", usage=usage)
        why = f"the prompt was blocked: {blocked}"
        return Broken(why, ErrorBody(why, blocked, number=400), usage)
    parse = b"application/json" in row.body and _wants_json(row.body)
    values = [_value(as_dict(c), place, body, parse=parse) for place, c in enumerate(candidates)]
    reason = as_dict(candidates[0]).get("finishReason")
    return Output(
        values[0] if len(values) == 1 else join(values),
        body,
        reason if isinstance(reason, str) else None,
        usage,
    )


def _value(candidate: dict[str, Any], place: int, body: bytes, *, parse: bool) -> bytes:
    parts = as_dict(candidate.get("content")).get("parts")
    texts, calls = [], []
    for at, part in enumerate(parts if isinstance(parts, list) else ()):
        if not isinstance(part, dict) or part.get("thought") is True:
            continue
        if isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif "functionCall" in part:
            calls.append(at)
    text = "".join(texts)
    if text or not calls:
        return text_value(text, parse=parse)
    raw = raw_members(raw_items(raw_members(body)["candidates"])[place])
    raw_parts = raw_items(raw_members(raw["content"])["parts"])
    return join([bytes(raw_members(raw_parts[at])["functionCall"]) for at in calls])


READERS: Mapping[Endpoint, Reader] = {"generate": read_generated}


def _wants_json(body: bytes) -> bool:
    members = raw_members(body)
    config = raw_members(members.get("generationConfig") or members.get("generation_config") or b"null")
    wanted = config.get("responseMimeType") or config.get("response_mime_type") or b""
    return bytes(wanted) == b'"application/json"'


def usage_of(doc: dict[str, Any]) -> Usage | None:
    """Returns the tokens of a reply: output = candidates + thoughts; tool-use prompts add to the input."""
    usage = as_dict(doc.get("usageMetadata"))
    given = count(usage.get("promptTokenCount"))
    if given is None:
        return None
    given += count(usage.get("toolUsePromptTokenCount")) or 0
    thought = count(usage.get("thoughtsTokenCount")) or 0
    # A count of nothing is left out by the server's JSON, so a missing one is 0 here.
    out = (count(usage.get("candidatesTokenCount")) or 0) + thought
    cached = count(usage.get("cachedContentTokenCount")) or 0
    return Usage(given, out, min(cached, given), 0, thought)
