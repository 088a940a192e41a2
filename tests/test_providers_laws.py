"""Laws that hold for any reply: decoding never raises, and what it returns can be kept."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.providers.presets import make_provider, resolve
from batchrun.records import Fault, HttpResponse, Reply, Row

PROVIDERS = {
    "chat": make_provider(resolve("openai", None), "k"),
    "responses": make_provider(resolve("groq", None), "k"),
    "completions": make_provider(resolve(None, "http://localhost:9"), None),
    "embeddings": make_provider(resolve("sim", None), None),
    "messages": make_provider(resolve("anthropic", None), "k"),
    "generate": make_provider(resolve("gemini", None), "k"),
}
BODIES = (
    b'{"input":["a","b"],"max_tokens":1}',
    (
        b'{"input":"a","response_format":{"type":"json_object"},"text":{"format":{"type":"json_object"}},'
        b'"output_format":{"type":"json_schema"},"generationConfig":{"responseMimeType":"application/json"}}'
    ),
)

# fmt: off
WORDS = [
    "choices", "message", "content", "refusal", "tool_calls", "finish_reason", "text", "data", "index",
    "embedding", "usage", "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details",
    "cached_tokens", "cost", "output", "type", "status", "incomplete_details", "reason", "error", "code",
    "param", "detail", "details", "metadata", "headers", "raw", "loc", "msg", "violations", "quotaId",
    "retryDelay", "object", "id", "model", "modelVersion", "service_tier", "candidates", "parts", "thought",
    "functionCall", "promptFeedback", "blockReason", "usageMetadata", "promptTokenCount", "output_text",
    "function_call", "tool_use", "failed", "queued", "incomplete", "input_tokens", "output_tokens", "429",
    "37s", "json", "max_tokens", "max_completion_tokens", "unsupported_parameter", "insufficient_quota",
]
# fmt: on

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=8)
)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=30,
)
choice = st.fixed_dictionaries({}, optional=dict.fromkeys(("message", "text", "error", "content"), documents))
shaped = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(choice, max_size=2) | documents,
        "data": st.lists(st.fixed_dictionaries({"embedding": documents, "index": documents}), max_size=3),
        "output": st.lists(st.fixed_dictionaries({"type": st.sampled_from(WORDS), "content": documents})),
        "content": st.lists(st.fixed_dictionaries({"type": st.sampled_from(WORDS), "text": documents})),
        "candidates": st.lists(st.fixed_dictionaries({"content": documents}), max_size=2),
        "usage": documents,
        "usageMetadata": documents,
        "error": documents,
        "status": st.sampled_from(WORDS),
    },
)


def to_json(document) -> bytes:
    return json.dumps(document).encode()


contents = (
    st.binary(max_size=200)
    | st.binary(max_size=60).map(lambda b: b'{"choices":[{"message":{"content":"' + b + b'"}}]}')
    | (documents | shaped).map(to_json)
    | shaped.map(to_json).flatmap(lambda b: st.integers(0, len(b)).map(lambda n: b[:n]))
)
header_names = st.sampled_from(
    ["retry-after", "retry-after-ms", "date", "x-should-retry", "location", "content-type", "x-request-id",
     "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens", "x-ratelimit-reset",
     "anthropic-ratelimit-tokens-limit", "anthropic-ratelimit-tokens-reset", "x-litellm-response-cost"]
)  # fmt: skip
headers_of = st.dictionaries(
    header_names,
    st.text(max_size=30) | st.sampled_from(["true", "false", "0", "-1", "inf", "text/event-stream", "1s"]),
)


@pytest.mark.parametrize("endpoint", PROVIDERS)
@settings(deadline=None, max_examples=150)
@given(
    status=st.just(200) | st.integers(100, 999),
    headers=headers_of,
    content=contents,
    body=st.sampled_from(BODIES),
)
def test_decoding_never_raises_and_what_it_returns_can_be_kept(endpoint, status, headers, content, body):
    provider = PROVIDERS[endpoint]
    row = Row(1, "a", endpoint, "m", body, None)
    got = provider.decode((row,), HttpResponse(status, headers, content))
    if isinstance(got, Reply):
        assert 200 <= status < 300
        assert list(got.outputs) == ["a"]
        output = got.outputs["a"]
        for line in (output.value, output.body):
            assert b"\n" not in line
            assert b"\r" not in line
            # It can still be read from inside a record.
            orjson.loads(b'{"response":{"body":' + line + b"}}")
        usage, cost = output.usage, output.cost_usd
        assert cost is None or (cost.is_finite() and cost >= 0)
    else:
        assert isinstance(got, Fault)
        assert len(got.body) <= 2048
        assert "\n" not in got.detail
        assert got.detail
        assert len(got.detail) <= 900
        assert (got.kind == "fatal") == (got.stop is not None)
        assert got.retry_after_s is None or 0 < got.retry_after_s < float("inf")
        usage = got.usage
        assert provider.adapt((row,), got) in (True, False)
    if usage is not None:
        assert min(usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens) >= 0
        assert usage.cached_tokens <= usage.input_tokens


@settings(deadline=None)
@given(st.text(max_size=200), st.text(max_size=20))
def test_a_text_comes_back_as_it_was_said(said, reason):
    content = orjson.dumps(
        {"choices": [{"message": {"content": said}, "finish_reason": reason}]}, option=orjson.OPT_INDENT_2
    )
    got = PROVIDERS["chat"].decode((Row(1, "a", "chat", "m", b"{}", None),), HttpResponse(200, {}, content))
    assert isinstance(got, Reply)
    assert orjson.loads(got.outputs["a"].value) == said
    assert orjson.loads(got.outputs["a"].body) == orjson.loads(content)
