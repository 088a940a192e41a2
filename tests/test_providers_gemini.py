"""Gemini's native wire format."""

from __future__ import annotations

import orjson
import pytest

from batchrun.providers.presets import make_provider, resolve
from batchrun.records import Fault, HttpResponse, Output, Reply, Row, Usage

PROVIDER = make_provider(resolve("gemini", None), "AIza")
BASE = "https://generativelanguage.googleapis.com/v1beta"
BODY = b'{"contents":[],"generationConfig":{"temperature":0.10}}'


def row(model="gemini-x", body=BODY):
    return Row(1, "a", "generate", model, body, 5)


def decode(content, r=None) -> Reply | Fault:
    return PROVIDER.decode((r or row(),), HttpResponse(200, {}, orjson.dumps(content)))


def output(content, r=None) -> Output:
    got = decode(content, r)
    assert isinstance(got, Reply), got
    return got.outputs["a"]


def generated(*candidates, **more):
    return {
        "candidates": [
            {"content": {"role": "model", "parts": list(parts)}, "finishReason": "STOP", "index": i}
            for i, parts in enumerate(candidates)
        ],
        "modelVersion": "gemini-x-001",
        "responseId": "r-1",
        **more,
    }


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("gemini-x", "models/gemini-x"),
        ("models/gemini-x", "models/gemini-x"),
        ("tunedModels/mine", "tunedModels/mine"),
        ("a/b?c#d é", "models/a%2Fb%3Fc%23d%20%C3%A9"),
        ("../../x", "models/..%2F..%2Fx"),
        ("models/../files", "models/..%2Ffiles"),
    ],
)
def test_the_model_travels_in_the_url_as_one_segment_and_the_body_is_untouched(model, path):
    request = PROVIDER.encode((row(model),))
    assert request.url == f"{BASE}/{path}:generateContent"
    assert request.content is BODY
    assert dict(request.headers)[b"x-goog-api-key"] == b"AIza"


def test_the_text_is_read_without_thoughts():
    usage = {
        "promptTokenCount": 100,
        "cachedContentTokenCount": 60,
        "candidatesTokenCount": 10,
        "thoughtsTokenCount": 30,
        "totalTokenCount": 140,
    }
    parts = [{"text": "hm", "thought": True}, {"text": "a"}, {"text": "b"}]
    got = decode(generated(parts, usageMetadata=usage))
    assert isinstance(got, Reply)
    assert got.outputs["a"].value == b'"ab"'
    assert got.outputs["a"].finish_reason == "STOP"
    assert (got.model, got.request_id) == ("gemini-x-001", "r-1")
    assert got.usage == Usage(100, 40, 60, 0, 30)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"promptTokenCount": 5, "toolUsePromptTokenCount": 7, "candidatesTokenCount": 1}, Usage(12, 1)),
        ({"promptTokenCount": 5}, Usage(5, 0)),
        ({"candidatesTokenCount": 5}, None),
        ({}, None),
        (None, None),
    ],
)
def test_usage_is_normalised_and_unknown_stays_unknown(usage, expected):
    assert output(generated([{"text": "x"}], usageMetadata=usage)).usage == expected


def test_function_calls_and_several_candidates():
    call = {"name": "f", "args": {"n": 1.5}}
    assert output(generated([{"thought": True, "text": "hm"}, {"functionCall": call}])).value == (orjson.dumps([call]))
    assert output(generated([{"text": "a"}], [{"text": "b"}])).value == b'["a","b"]'


@pytest.mark.parametrize("candidate", [{"finishReason": "MAX_TOKENS"}, {"content": {}, "finishReason": "MAX_TOKENS"}])
def test_a_candidate_without_parts_is_kept_empty(candidate):
    got = output({"candidates": [candidate]})
    assert (got.value, got.finish_reason) == (b'""', "MAX_TOKENS")


def test_json_that_was_asked_for_is_the_parsed_value():
    body = b'{"generationConfig":{"responseMimeType":"application/json"}}'
    assert output(generated([{"text": '{"n": 1.0}'}]), row(body=body)).value == b'{"n": 1.0}'


def test_a_blocked_prompt_is_the_rows_own_failure_and_its_tokens_count():
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}}
    got = decode(blocked)
    assert isinstance(got, Fault)
    assert (got.kind, got.code, got.maybe_processed, got.usage) == ("rejected", "SAFETY", False, None)
    got = decode({**blocked, "usageMetadata": {"promptTokenCount": 9}})
    assert isinstance(got, Fault)
    assert (got.kind, got.maybe_processed, got.usage) == ("rejected", True, Usage(9, 0))


def test_a_reply_without_candidates_is_garbled():
    got = decode({"usageMetadata": {"promptTokenCount": 9}})
    assert isinstance(got, Fault)
    assert (got.kind, got.maybe_processed, got.usage) == ("garbled", True, Usage(9, 0))
