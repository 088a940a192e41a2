"""Anthropic's wire format."""

from __future__ import annotations

import orjson
import pytest

from batchrun.providers.presets import make_provider, resolve
from batchrun.records import Fault, HttpResponse, Output, Reply, Row, Usage

PROVIDER = make_provider(resolve("anthropic", None), "sk-ant")
BODY = b'{"model":"c","max_tokens":5,"messages":[],"temperature":0.10}'
ROW = Row(1, "a", "messages", "c", BODY, 5)


def message(*blocks, **more):
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "c-1",
        "content": list(blocks),
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 10, "output_tokens": 3},
        **more,
    }


def text(said):
    return {"type": "text", "text": said}


def reply(content, row=ROW, provider=PROVIDER) -> Reply:
    headers = {"request-id": "req_1"}
    got = provider.decode((row,), HttpResponse(200, headers, orjson.dumps(content)))
    assert isinstance(got, Reply), got
    return got


def output(content, row=ROW) -> Output:
    return reply(content, row).outputs["a"]


def test_the_rows_very_bytes_are_sent_with_key_and_version():
    request = PROVIDER.encode((ROW,))
    headers = dict(request.headers)
    assert request.content is BODY
    assert request.url == "https://api.anthropic.com/v1/messages"
    assert headers[b"x-api-key"] == b"sk-ant"
    # The version that takes temperature, top_p and top_k.
    assert headers[b"anthropic-version"] == b"2023-06-01"
    assert b"authorization" not in headers


def test_an_extra_header_can_ask_for_another_version():
    provider = make_provider(
        resolve("anthropic", None), "k", [("Anthropic-Version", "2026-10-21"), ("anthropic-beta", "x")]
    )
    headers = provider.encode((ROW,)).headers
    versions = [value for name, value in headers if name == b"anthropic-version"]
    assert versions == [b"2026-10-21"]
    assert dict(headers)[b"anthropic-beta"] == b"x"


def test_text_blocks_become_one_text():
    got = reply(message({"type": "thinking", "thinking": "hm"}, text("a"), text("b")))
    assert got.outputs["a"].value == b'"ab"'
    assert (got.model, got.request_id, got.outputs["a"].finish_reason) == ("c-1", "req_1", "end_turn")


def test_tool_use_blocks_are_the_value_where_there_is_no_text():
    tool = {"type": "tool_use", "id": "t", "name": "f", "input": {"n": 1.5}}
    assert output(message(tool, stop_reason="tool_use")).value == orjson.dumps([tool])
    assert output(message(text("so"), tool)).value == b'"so"'


@pytest.mark.parametrize("reason", ["max_tokens", "refusal", "model_context_window_exceeded", "stop_sequence"])
def test_empty_and_refused_messages_are_kept_with_their_reason(reason):
    got = output(message(stop_reason=reason))
    assert (got.value, got.finish_reason) == (b'""', reason)


def test_input_tokens_stand_beside_the_cached_ones_and_are_added_up():
    usage = {
        "input_tokens": 10,
        "cache_creation_input_tokens": 200,
        "cache_read_input_tokens": 3000,
        "output_tokens": 50,
        "output_tokens_details": {"thinking_tokens": 40},
        "service_tier": "priority",
    }
    got = reply(message(text("x"), usage=usage))
    assert got.usage == Usage(3210, 50, 3000, 200, 40)
    assert got.service_tier == "priority"
    nulls = {"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": None}
    assert output(message(text("x"), usage=nulls)).usage == Usage(1, 2)


@pytest.mark.parametrize("usage", [None, {}, {"input_tokens": 1}, {"output_tokens": 1}])
def test_missing_usage_stays_unknown(usage):
    assert output(message(text("x"), usage=usage)).usage is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"output_config":{"format":{"type":"json_schema","schema":{}}}}',
        b'{"output_format":{"type":"json_schema","schema":{}}}',
    ],
)
def test_structured_output_is_the_parsed_value(body):
    row = Row(1, "a", "messages", "c", body, 5)
    assert output(message(text('{"n": 1.0}')), row).value == b'{"n": 1.0}'
    assert output(message(text('{"n": 1.0}'))).value == b'"{\\"n\\": 1.0}"'


@pytest.mark.parametrize("content", [b"{}", b'{"content":"x"}', b"<html>"])
def test_a_reply_without_content_is_garbled(content):
    got = PROVIDER.decode((ROW,), HttpResponse(200, {}, content))
    assert isinstance(got, Fault)
    assert (got.kind, got.maybe_processed) == ("garbled", True)


def test_messages_are_read_from_an_openai_compatible_gateway_too():
    gateway = make_provider(resolve("litellm", None), "sk-x")
    assert gateway.encode((ROW,)).url == "http://localhost:4000/v1/messages"
    assert reply(message(text("x")), provider=gateway).outputs["a"].value == b'"x"'
