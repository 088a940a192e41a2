"""Anthropic's wire format: /v1/messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchrun.providers.base import Reader, count, join, raw_items, raw_members, text_value
from batchrun.providers.faults import Broken, as_dict
from batchrun.records import Endpoint, Output, Row, Usage

__all__ = ["READERS", "VERSION"]

# The newer version (2026-10-21) refuses temperature, top_p and top_k, which a row may set; this one takes
# rows of both kinds. One version for all keeps a job's answers alike; an extra header can say otherwise.
VERSION = b"2023-06-01"


def read_message(row: Row, doc: dict[str, Any], body: bytes, headers: Mapping[str, str]) -> Output | Broken:
    """Reads a message: its text blocks as one text, else its tool_use blocks."""
    del headers
    usage = usage_of(doc)
    blocks = doc.get("content")
    if not isinstance(blocks, list):
        return Broken("the reply has no content", usage=usage)
    texts, tools = [], []
    for at, block in enumerate(map(as_dict, blocks)):
        if block.get("type") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif block.get("type") == "tool_use":
            tools.append(at)
    text = "".join(texts)
    if not text and tools:
        raw = raw_items(raw_members(body)["content"])
        value = join([bytes(raw[at]) for at in tools])
    else:
        value = text_value(text, parse=b'"json_schema"' in row.body and _wants_json(row.body))
    reason = doc.get("stop_reason")
    return Output(value, body, reason if isinstance(reason, str) else None, usage)


READERS: Mapping[Endpoint, Reader] = {"messages": read_message}


def _wants_json(body: bytes) -> bool:
    """Returns whether a request asks for JSON: ``output_config.format`` (``output_format`` in the beta)."""
    members = raw_members(body)
    config = raw_members(members.get("output_config", b"null"))
    wanted = raw_members(config.get("format", members.get("output_format", b"null")))
    return bytes(wanted.get("type", b"")) == b'"json_schema"'


def usage_of(doc: dict[str, Any]) -> Usage | None:
    """Returns the tokens of a reply: input_tokens stands beside cache reads and writes: all three add up."""
    usage = as_dict(doc.get("usage"))
    given, out = count(usage.get("input_tokens")), count(usage.get("output_tokens"))
    if given is None or out is None:
        return None
    read = count(usage.get("cache_read_input_tokens")) or 0
    written = count(usage.get("cache_creation_input_tokens")) or 0
    thought = count(as_dict(usage.get("output_tokens_details")).get("thinking_tokens")) or 0
    return Usage(given + read + written, out, read, written, thought)
