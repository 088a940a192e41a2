"""Simple rows → bodies: which of their fields are request parameters, and where an endpoint takes their text."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from batchrun.intake.bodies import (
    SYSTEM_ROLES,
    BadLine,
    Members,
    add_system,
    check_count,
    check_messages,
    elements,
    join,
    name_of,
    split,
)
from batchrun.records import Endpoint

__all__ = ["PARAMETERS", "Content", "embeds", "gemini_parameters", "native_body"]

# Fields of a simple row that are request parameters of its endpoint; all others are the user's metadata.
# Sources: the OpenAI, Anthropic and Gemini API references; vLLM's extra sampling parameters.
_SAMPLING = {
    *("frequency_penalty", "ignore_eos", "logit_bias", "logprobs", "min_p", "min_tokens", "n"),
    *("presence_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "stream"),
    *("stream_options", "structured_outputs", "top_k", "top_p", "user"),
}
# Sent to endpoints that may not know them too: a refusal is better than an answer in another form.
_FORM = {"reasoning_effort", "response_format", "stream", "tool_choice", "tools", "top_p"}
PARAMETERS: Mapping[Endpoint, frozenset[str]] = {
    "chat": frozenset(
        {
            *_SAMPLING | _FORM,
            *("audio", "chat_template_kwargs", "function_call", "functions", "guided_choice"),
            *("guided_grammar", "guided_json", "guided_regex", "max_completion_tokens", "modalities"),
            *("parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
            *("safety_identifier", "service_tier", "store", "top_logprobs", "verbosity", "web_search_options"),
        }
    ),
    "responses": frozenset(
        {
            *_FORM,
            *("conversation", "include", "instructions", "max_output_tokens", "max_tool_calls"),
            *("parallel_tool_calls", "previous_response_id", "prompt_cache_key", "prompt_cache_retention"),
            *("reasoning", "safety_identifier", "service_tier", "store", "text", "top_logprobs"),
            *("truncation", "user"),
        }
    ),
    "completions": frozenset({*_SAMPLING, "best_of", "echo", "suffix"}),
    "embeddings": frozenset(
        {
            *("dimensions", "encoding_format", "input_type", "output_dimension", "output_dtype"),
            *("truncate_prompt_tokens", "user"),
        }
    ),
    "messages": frozenset(
        {
            *_FORM,
            *("cache_control", "container", "context_management", "mcp_servers", "output_config"),
            *("service_tier", "stop", "stop_sequences", "thinking", "top_k"),
        }
    ),
    "generate": frozenset(
        {
            *_FORM,
            *("cachedContent", "cached_content", "frequency_penalty", "generationConfig"),
            *("generation_config", "labels", "n", "presence_penalty", "safetySettings", "safety_settings"),
            *("seed", "stop", "systemInstruction", "system_instruction", "toolConfig", "tool_config", "top_k"),
        }
    ),
}

CONFIG_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "n": "candidateCount",
    "seed": "seed",
    "stop": "stopSequences",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "max_tokens": "maxOutputTokens",
}
"""What goes into Gemini's generationConfig: the field's usual name → Gemini's."""


_MAX_TOKENS: Mapping[Endpoint, str] = {
    "responses": "max_output_tokens",
    "completions": "max_tokens",
    "messages": "max_tokens",
}
_DATA_URL = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)
_EMBEDDERS = re.compile(r"embed|(?:^|[/_:-])(?:bge|e5|gte)-", re.IGNORECASE)
_NULL = b"null"


class Content(NamedTuple):
    """What a simple row asks: the field that holds it, parsed and raw."""

    source: str
    value: Any
    raw: bytes


def native_body(
    endpoint: Endpoint,
    content: Content,
    value: Mapping[str, Any],
    raws: Members,
    *,
    max_tokens_name: str,
    parameters: Container[str],
) -> Members:
    """Returns a simple row's body as its endpoint wants it, before any option is added.

    ``value`` and ``raws`` are the row, parsed and raw; what goes into the body is taken out of ``raws``, and
    what stays is no part of the request. ``parameters`` are the other fields that do go into it.
    """
    members: Members = {}
    model = raws.pop("model", _NULL)
    if model != _NULL and endpoint != "generate":
        members["model"] = model
    system = raws.pop("system", _NULL)
    if system != _NULL and type(value["system"]) is not str and endpoint != "messages":
        raise BadLine(f"`system` is {name_of(value['system'])}, expected a string")
    if system != _NULL and content.source == "messages" and endpoint != "responses":
        content = _prepend_system(content, system)
        system = _NULL
    members |= _carry(endpoint, content)
    members |= _take_parameters(endpoint, value, raws, max_tokens_name, parameters)
    if system != _NULL:
        add_system(endpoint, members, system)
    return members


def _take_parameters(
    endpoint: Endpoint, value: Mapping[str, Any], raws: Members, max_tokens_name: str, parameters: Container[str]
) -> Members:
    taken: Members = {}
    if endpoint != "embeddings":
        if (raw := raws.pop("max_tokens", _NULL)) != _NULL:
            check_count("max_tokens", value["max_tokens"], least=0 if endpoint == "completions" else 1)
            taken[max_tokens_name if endpoint == "chat" else _MAX_TOKENS.get(endpoint, "max_tokens")] = raw
        if (raw := raws.pop("temperature", _NULL)) != _NULL:
            if type(value["temperature"]) not in (int, float):
                raise BadLine(f"`temperature` is {name_of(value['temperature'])}, expected a number")
            taken["temperature"] = raw
    for name in [name for name in raws if name in parameters]:
        taken[name] = raws.pop(name)
    if endpoint == "generate":
        return gemini_parameters(taken)
    if endpoint == "messages" and (stop := taken.pop("stop", None)) is not None:
        taken.setdefault("stop_sequences", _array_of(stop))
    return taken


def gemini_parameters(members: Members) -> Members:
    """Returns request parameters as Gemini has them: most live in generationConfig, whose own values win."""
    config: Members = {}
    others: Members = {}
    for name, raw in members.items():
        if name in CONFIG_NAMES:
            config[CONFIG_NAMES[name]] = _array_of(raw) if name == "stop" else raw
        else:
            others[name] = raw
    if config:
        name = "generation_config" if "generation_config" in others else "generationConfig"
        others[name] = join(config | split(others.get(name, b"{}")))
    return others


def _array_of(raw: bytes) -> bytes:
    return b"[" + raw + b"]" if raw.startswith(b'"') else raw


def _prepend_system(content: Content, system: bytes) -> Content:
    check_messages(content.value)
    message = b'{"role":"system","content":' + system + b"}"
    value = [{"role": "system", "content": orjson.loads(system)}, *content.value]
    return Content("messages", value, b"[" + message + b"," + content.raw[1:])


def _carry(endpoint: Endpoint, content: Content) -> Members:
    source, value, raw = content
    if source == "messages":
        check_messages(value)
        return carry_messages(endpoint, value, raw)
    if source == "contents":
        return {"contents": raw}
    if isinstance(value, str):
        return carry_text(endpoint, raw)
    if isinstance(value, list) and endpoint in ("completions", "embeddings", "responses"):
        return carry_text(endpoint, raw)
    hint = "--endpoint completions takes an array of prompts" if isinstance(value, list) else None
    raise BadLine(f"`{source}` is {name_of(value)}, but {endpoint} takes a string", hint)


# ---------------------------------------------------------------- text goes where the endpoint takes it


@lru_cache(maxsize=256)
def embeds(model: str) -> bool:
    """Whether a model's name says that it embeds: text-embedding-3-small, BAAI/bge-m3, e5-large, gte-base."""
    return _EMBEDDERS.search(model) is not None


def carry_text(endpoint: Endpoint, text: bytes) -> Members:
    """Returns the body's member for one prompt, given as raw JSON string."""
    match endpoint:
        case "chat" | "messages":
            return {"messages": b'[{"role":"user","content":' + text + b"}]"}
        case "responses" | "embeddings":
            return {"input": text}
        case "completions":
            return {"prompt": text}
        case "generate":
            return {"contents": b'[{"role":"user","parts":[{"text":' + text + b"}]}]"}


def carry_messages(endpoint: Endpoint, messages: Sequence[Mapping[str, Any]], raw: bytes) -> Members:
    """Returns the body's members for a conversation in chat form, given parsed and raw.

    Anthropic and Gemini take system messages apart from the others, and Gemini has its own form for both.
    """
    match endpoint:
        case "chat":
            return {"messages": raw}
        case "responses":
            return {"input": raw}
        case "messages":
            return _anthropic_messages(messages, raw)
        case "generate":
            return _gemini_contents(messages, raw)
        case _:
            raise BadLine(
                f"has `messages`, but {endpoint} takes plain text", "write `prompt` or `input`, or --endpoint chat"
            )


def _anthropic_messages(messages: Sequence[Mapping[str, Any]], raw: bytes) -> Members:
    if not any(message["role"] in SYSTEM_ROLES for message in messages):
        return {"messages": raw}
    spans = elements(raw)
    told = {at for at, message in enumerate(messages) if message["role"] in SYSTEM_ROLES}
    rest = [span for at, span in enumerate(spans) if at not in told]
    if not rest:
        raise BadLine("has only system messages", "add a message with role user")
    contents = [split(spans[at]).get("content", b'""') for at in sorted(told)]
    if len(contents) == 1:
        system = contents[0]
    else:
        system = b"[" + b",".join(filter(None, map(_anthropic_blocks, contents))) + b"]"
    return {"system": system, "messages": b"[" + b",".join(rest) + b"]"}


def _anthropic_blocks(content: bytes) -> bytes:
    """Returns content, a string or an array of blocks, as the inside of an array of blocks."""
    if content.startswith(b"["):
        return content[1:-1].strip()
    return b'{"type":"text","text":' + content + b"}"


def _gemini_contents(messages: Sequence[Mapping[str, Any]], raw: bytes) -> Members:
    system: list[bytes] = []
    contents: list[bytes] = []
    for message, span in zip(messages, elements(raw), strict=True):
        role = message["role"]
        content = split(span).get("content", b'""')
        parts = _gemini_parts(message.get("content"), content)
        if role in SYSTEM_ROLES:
            system.append(parts)
        elif role in ("user", "assistant", "model"):
            name = b"user" if role == "user" else b"model"
            contents.append(b'{"role":"' + name + b'","parts":[' + parts + b"]}")
        else:
            raise BadLine(f"has a message with role {role!r}, which Gemini does not take", "roles: user, assistant")
    if not contents:
        raise BadLine("has only system messages", "add a message with role user")
    members = {"contents": b"[" + b",".join(contents) + b"]"}
    if system:
        members["systemInstruction"] = b'{"parts":[' + b",".join(system) + b"]}"
    return members


def _gemini_parts(content: object, raw: bytes) -> bytes:
    if isinstance(content, str):
        return b'{"text":' + raw + b"}"
    if not isinstance(content, list):
        raise BadLine("has a message whose `content` is neither a string nor an array of parts")
    return b",".join(_gemini_part(part, span) for part, span in zip(content, elements(raw), strict=True))


def _gemini_part(part: object, raw: bytes) -> bytes:
    if isinstance(part, str):
        return b'{"text":' + raw + b"}"
    if isinstance(part, dict):
        if isinstance(part.get("text"), str):
            return b'{"text":' + split(raw)["text"] + b"}"
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if isinstance(url, str) and (data := _DATA_URL.match(url)):
            return orjson.dumps({"inlineData": {"mimeType": data[1], "data": data[2]}})
    raise BadLine("has a content part that Gemini does not take", "text and images as data: URLs are translated")
