"""OpenAI's wire format: what is sent, what the replies mean, what they cost, and how a limit's name is learned."""

from __future__ import annotations

from decimal import Decimal

import orjson
import pytest

from batchrun.providers.presets import make_provider, resolve
from batchrun.records import Fault, HttpResponse, Output, Reply, Row, Usage

PROVIDER = make_provider(resolve("openai", None), "sk-test")
CUSTOM = make_provider(resolve(None, "http://localhost:9/v1"), None)


def row(endpoint="chat", body=b'{"model":"m","messages":[]}', line=1):
    return Row(line, f"id-{line}", endpoint, "m", body, None)


def reply(r, content, headers=None, status=200, provider=PROVIDER) -> Reply | Fault:
    content = content if isinstance(content, bytes) else orjson.dumps(content)
    return provider.decode((r,), HttpResponse(status, headers or {}, content))


def output(r, content, headers=None) -> Output:
    got = reply(r, content, headers)
    assert isinstance(got, Reply), got
    assert list(got.outputs) == [r.custom_id]
    return got.outputs[r.custom_id]


def chat(*messages, **more):
    choices = [
        {"index": i, "message": {"role": "assistant", **m}, "finish_reason": "stop"} for i, m in enumerate(messages)
    ]
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "m-1", "choices": choices, **more}


USAGE = {
    "prompt_tokens": 812,
    "completion_tokens": 30,
    "total_tokens": 842,
    "prompt_tokens_details": {"cached_tokens": 768, "cache_write_tokens": 10},
    "completion_tokens_details": {"reasoning_tokens": 20},
}


# ---------------------------------------------------------------- requests


def test_the_rows_very_bytes_are_sent_to_its_endpoint():
    body = b'{ "model":"m", "messages":[], "seed":123456789012345678901234567890, "x":1.10 }'
    for endpoint, path in {
        "chat": "/chat/completions",
        "responses": "/responses",
        "completions": "/completions",
        "embeddings": "/embeddings",
    }.items():
        request = PROVIDER.encode((row(endpoint, body),))
        assert request.content is body
        assert (request.method, request.url) == ("POST", f"https://api.openai.com/v1{path}")


def test_requests_name_the_client_and_carry_the_key_once():
    headers = dict(PROVIDER.encode((row(),)).headers)
    assert headers[b"authorization"] == b"Bearer sk-test"
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"user-agent"].startswith(b"batchrun/")
    assert headers[b"accept-encoding"] == b"gzip, deflate"


def test_without_a_key_no_authorization_is_sent():
    assert b"authorization" not in dict(CUSTOM.encode((row(),)).headers)


# ---------------------------------------------------------------- replies


def test_a_chat_reply_becomes_its_text_with_usage_model_tier_and_request_id():
    content = orjson.dumps(chat({"content": "refund", "refusal": None}, usage=USAGE, service_tier="flex"))
    got = reply(row(), content, {"x-request-id": "req_1"})
    usage = Usage(812, 30, 768, 10, 20)
    assert got == Reply({"id-1": Output(b'"refund"', content, "stop", usage)}, usage, "m-1", "req_1", 200, "flex", None)


def test_the_replys_own_id_stands_in_for_a_request_id():
    got = reply(row(), chat({"content": "x"}))
    assert isinstance(got, Reply)
    assert (got.request_id, got.usage) == ("chatcmpl-1", None)


@pytest.mark.parametrize(
    ("message", "value"),
    [
        ({"content": 'a\n"b" \u2028 ü'}, orjson.dumps('a\n"b" \u2028 ü')),
        ({"content": None, "refusal": "I cannot"}, b'"I cannot"'),
        ({"content": "", "refusal": None}, b'""'),
        ({"content": None}, b'""'),
        ({}, b'""'),
        ({"content": "so", "tool_calls": [{"id": "c"}]}, b'"so"'),
        ({"content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "hi"}]}, b'"hi"'),
        ({"content": None, "reasoning_content": "hm"}, b'""'),
    ],
)
def test_the_value_is_the_text_or_the_refusal(message, value):
    assert output(row(), chat(message)).value == value


def test_tool_calls_keep_their_bytes():
    calls = b'[ {"id":"c1","function":{"name":"f","arguments":"{}"},"n":1.10} ]'
    content = b'{"choices":[{"message":{"content":null,"tool_calls":%b},"finish_reason":"tool_calls"}]}' % calls
    got = output(row(), content)
    assert (got.value, got.finish_reason) == (calls, "tool_calls")


def test_several_choices_become_a_list():
    assert output(row(), chat({"content": "a"}, {"content": "b"})).value == b'["a","b"]'
    several = output(row(), chat({"content": "a"}, {"tool_calls": [{"id": 1}]}))
    assert several.value == b'["a",[{"id":1}]]'


@pytest.mark.parametrize("reason", ["length", "content_filter", "eos", None])
def test_the_finish_reason_is_the_providers_word(reason):
    content = {"choices": [{"message": {"content": "x"}, "finish_reason": reason}]}
    assert output(row(), content).finish_reason == reason


def test_a_missing_finish_reason_is_tolerated():
    assert output(row(), b'{"choices":[{"message":{"content":"x"}}]}').finish_reason is None


WANTS_JSON = b'{"messages":[],"response_format":{"type":"json_schema","json_schema":{}}}'


@pytest.mark.parametrize(
    ("body", "text", "value"),
    [
        (WANTS_JSON, '{"n": 1.10,\n "big": 123456789012345678901}', b'{"n": 1.10,  "big": 123456789012345678901}'),
        (b'{"response_format":{"type":"json_object"}}', ' {"a":[]}\n', b'{"a":[]}'),
        (WANTS_JSON, "null", b"null"),
        (WANTS_JSON, '{"cut": "off', b'"{\\"cut\\": \\"off"'),
        # A line break inside a string is no JSON: the text stays as it was said.
        (WANTS_JSON, '{"a":"x\ny"}', b'"{\\"a\\":\\"x\\ny\\"}"'),
        (b'{"response_format":{"type":"text"}}', '{"a":1}', b'"{\\"a\\":1}"'),
        (b'{"messages":[{"content":"\\"response_format\\" json_object"}]}', '{"a":1}', b'"{\\"a\\":1}"'),
    ],
)
def test_json_that_was_asked_for_is_the_parsed_value_digit_for_digit(body, text, value):
    assert output(row(body=body), chat({"content": text})).value == value


def test_the_body_is_one_line_with_its_digits_and_without_what_stands_around_it():
    content = b'\xef\xbb\xbf\n\n  {"choices":[\r\n{"message":{"content":"x"}}],\n"created":1.50,"n":1e400000}\n'
    # 1e400000 is no number that a reader could hold, so that reply is garbled; without it the digits stay.
    assert isinstance(reply(row(), content), Fault)
    got = output(row(), content.replace(b',"n":1e400000', b""))
    assert got.body == b'{"choices":[  {"message":{"content":"x"}}], "created":1.50}'


def test_blank_lines_before_the_json_are_no_trouble():
    assert output(row(), b"\n\n\n" + orjson.dumps(chat({"content": "x"}))).value == b'"x"'


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"\ude00 x", "\ufffd x"),
        (rb"\ud83d\ude00 \ud800", "\U0001f600 \ufffd"),
        (rb"\\ud800 \" \ud800", '\\ud800 " \ufffd'),
        (b"caf\xe9", "caf\ufffd"),
    ],
)
def test_a_paid_reply_with_broken_text_is_kept_with_replacement_characters(said, kept):
    got = output(row(), b'{"choices":[{"message":{"content":"' + said + b'"}}]}')
    assert orjson.loads(got.value) == kept
    assert orjson.loads(got.body)["choices"][0]["message"]["content"] == kept


def test_completions_give_their_texts():
    r = row("completions", b'{"prompt":"x"}')
    assert output(r, {"choices": [{"text": "a", "finish_reason": "length"}]}).value == b'"a"'
    assert output(r, {"choices": [{"text": "a"}, {"text": ""}]}).value == b'["a",""]'
    assert isinstance(reply(r, {"choices": [{"message": {"content": "x"}}]}), Fault)


# ---------------------------------------------------------------- embeddings

VECTOR = b"[0.0123456789012345678, -1.0e-7,1]"


def embeddings(*vectors, places=None):
    places = range(len(vectors)) if places is None else places
    data = b",".join(b'{"index":%d,"embedding":%b}' % pair for pair in zip(places, vectors, strict=True))
    return b'{"object":"list","data":[' + data + b'],"usage":{"prompt_tokens":5,"total_tokens":5}}'


@pytest.mark.parametrize("given", [b'"text"', b'["text"]', b"[1,2,3]", b"[[1,2,3]]"])
def test_an_embedding_keeps_its_digits(given):
    got = output(row("embeddings", b'{"input":' + given + b"}"), embeddings(VECTOR))
    assert (got.value, got.usage, got.finish_reason) == (VECTOR, Usage(5, 0), None)


@pytest.mark.parametrize("given", [b'["a","b"]', b"[[1],[2]]"])
def test_embeddings_of_several_inputs_come_in_the_order_of_the_inputs(given):
    r = row("embeddings", b'{"input":' + given + b"}")
    assert output(r, embeddings(b"[1]", b"[2]", places=(1, 0))).value == b"[[2],[1]]"
    assert output(r, embeddings(b"[1]", b"[2]", places=(0, 0))).value == b"[[1],[2]]"


def test_embeddings_as_base64_are_their_text():
    assert output(row("embeddings", b'{"input":"a"}'), embeddings(b'"AAA="')).value == b'"AAA="'


def test_a_reply_with_too_few_or_broken_vectors_is_garbled():
    r = row("embeddings", b'{"input":["a","b"]}')
    for content in (embeddings(b"[1]"), b'{"data":[]}', b'{"data":[{},{}]}', b'{"data":[1,2]}', b'{"data":{}}'):
        got = reply(r, content)
        assert isinstance(got, Fault)
        assert (got.kind, got.maybe_processed) == ("garbled", True)


# ---------------------------------------------------------------- responses


def response(*items, status="completed", **more):
    return {"id": "resp_1", "model": "m-1", "status": status, "error": None, "output": list(items), **more}


def message(*texts):
    return {"type": "message", "content": [{"type": "output_text", "text": t} for t in texts]}


RESPONSES_USAGE = {
    "input_tokens": 100,
    "output_tokens": 50,
    "total_tokens": 150,
    "input_tokens_details": {"cached_tokens": 64},
    "output_tokens_details": {"reasoning_tokens": 40},
}


def test_a_response_becomes_its_output_text():
    got = output(
        row("responses"),
        response({"type": "reasoning", "summary": []}, message("a", "b"), message("c"), usage=RESPONSES_USAGE),
    )
    assert (got.value, got.finish_reason) == (b'"abc"', "completed")
    assert got.usage == Usage(100, 50, 64, 0, 40)


def test_an_incomplete_response_is_kept_with_its_reason():
    content = response(message("cut"), status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    got = output(row("responses"), content)
    assert (got.value, got.finish_reason) == (b'"cut"', "max_output_tokens")


def test_a_response_without_text_gives_its_refusal_or_function_calls():
    refusal = {"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}
    assert output(row("responses"), response(refusal)).value == b'"no"'
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    assert output(row("responses"), response({"type": "reasoning"}, call)).value == orjson.dumps([call])
    assert output(row("responses"), response()).value == b'""'


def test_a_response_in_a_json_format_is_the_parsed_value():
    body = b'{"text":{"format":{"type":"json_schema","schema":{}}}}'
    assert output(row("responses", body), response(message('{"a": 1.0}'))).value == b'{"a": 1.0}'
    body = b'{"text":{"format":{"type":"text"}}}'
    assert output(row("responses", body), response(message("1"))).value == b'"1"'


@pytest.mark.parametrize(
    ("code", "kind", "maybe"),
    [
        ("server_error", "overloaded", True),
        ("vector_store_timeout", "overloaded", True),
        ("rate_limit_exceeded", "rate_limited", False),
        ("invalid_prompt", "rejected", False),
        ("image_too_large", "rejected", False),
    ],
)
def test_a_failed_response_inside_a_200_is_a_fault_that_keeps_its_usage(code, kind, maybe):
    failed = response(status="failed", usage=None)
    failed["error"] = {"code": code, "message": "broke"}
    got = reply(row("responses"), failed)
    assert isinstance(got, Fault)
    assert (got.kind, got.code, got.detail, got.maybe_processed) == (kind, code, "broke", maybe)
    assert (got.usage, got.model, got.request_id) == (None, "m-1", "resp_1")
    got = reply(row("responses"), {**failed, "usage": RESPONSES_USAGE})
    assert isinstance(got, Fault)
    # Tokens were spent, so it was processed, whatever its code.
    assert (got.kind, got.usage, got.maybe_processed) == (kind, Usage(100, 50, 64, 0, 40), True)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_failed_response_without_an_error_may_have_been_processed(status):
    got = reply(row("responses"), response(status=status))
    assert isinstance(got, Fault)
    assert (got.kind, got.maybe_processed) == ("overloaded", True)


def test_a_background_response_is_rejected_rather_than_paid_for_again():
    got = reply(row("responses"), response(status="queued"))
    assert isinstance(got, Fault)
    assert (got.kind, got.maybe_processed) == ("rejected", True)
    assert "background" in got.detail


def test_a_choice_that_broke_off_is_a_fault_that_keeps_its_usage():
    content = chat({"content": "par"}, usage=USAGE)
    content["choices"][0] |= {"finish_reason": "error", "error": {"code": 502, "message": "upstream died"}}
    got = reply(row(), content)
    assert isinstance(got, Fault)
    assert (got.kind, got.detail, got.maybe_processed) == ("overloaded", "upstream died", True)
    assert got.usage == Usage(812, 30, 768, 10, 20)


# ---------------------------------------------------------------- usage and cost


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 2}, Usage(10, 2)),
        # DeepSeek: hits and misses make up the prompt
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "prompt_cache_hit_tokens": 8,
                "prompt_cache_miss_tokens": 2,
            },
            Usage(10, 2, 8),
        ),
        # reasoning beside the output: xAI, and Gemini's compatible endpoint without details
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "total_tokens": 42,
                "completion_tokens_details": {"reasoning_tokens": 30},
            },
            Usage(10, 32, 0, 0, 30),
        ),
        ({"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 42}, Usage(10, 32, 0, 0, 30)),
        ({"prompt_tokens": 10, "total_tokens": 12}, Usage(10, 2)),
        ({"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": None}, Usage(10, 2)),
        (
            {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 99}},
            Usage(10, 2, 10),
        ),
        ({"prompt_tokens": 0, "completion_tokens": 0}, Usage(0, 0)),
        # unknown stays unknown
        (None, None),
        ({}, None),
        ([], None),
        ({"prompt_tokens": 10}, None),
        ({"prompt_tokens": None, "completion_tokens": None}, None),
        ({"prompt_tokens": -1, "completion_tokens": 2}, None),
        ({"prompt_tokens": 1.5, "completion_tokens": True}, None),
    ],
)
def test_usage_is_normalised_and_unknown_stays_unknown(usage, expected):
    assert output(row(), chat({"content": "x"}, usage=usage)).usage == expected


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (b"0.00021", "0.00021"),
        (b"0.000210000000000000000001", "0.000210000000000000000001"),
        (b"1e-7", "1E-7"),
        (b"0", "0"),
        (b"null", None),
        (b"-0.1", None),
        (b'{"total_cost":0.1}', None),
        (b'0.1,"is_byok":true', None),
        (b'0.1,"is_byok":false', "0.1"),
    ],
)
def test_a_stated_cost_keeps_all_its_decimals(cost, expected):
    content = b'{"choices":[{"message":{"content":"x"}}],"usage":{"cost":' + cost + b"}}"
    assert output(row(), content).cost_usd == (Decimal(expected) if expected else None)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("0.000123", "0.000123"),
        ("1.2e-05", "0.000012"),
        ("0.0", None),
        ("None", None),
        ("nan", None),
        ("-1", None),
    ],
)
def test_litellm_states_its_cost_in_a_header(header, expected):
    got = output(row(), chat({"content": "x"}), {"x-litellm-response-cost": header})
    assert got.cost_usd == (Decimal(expected) if expected else None)


# ---------------------------------------------------------------- the limit's name


def refusal(content, status=400) -> Fault:
    got = reply(row(), content, status=status)
    assert isinstance(got, Fault)
    assert got.kind == "rejected"
    return got


def error(message, **fields):
    return refusal({"error": {"message": message, "type": "invalid_request_error", **fields}})


NOT_MAX_TOKENS = error(
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    code="unsupported_parameter",
    param="max_tokens",
)
NOT_MAX_COMPLETION_TOKENS = error("Unrecognized request argument supplied: max_completion_tokens")


def fresh():
    return make_provider(resolve("openai", None), "sk-test")


def test_a_refused_max_tokens_is_spelt_otherwise_for_that_model_and_keeps_all_bytes():
    provider = fresh()
    r = row(body=b'{"model": "m", "seed":1.10, "max_tokens": 5e0 ,"messages":[ ]}')
    other = Row(2, "b", "chat", "other", r.body, 5)
    assert provider.adapt((r,), NOT_MAX_TOKENS)
    sent = provider.encode((r,)).content
    assert sent == b'{"model":"m","seed":1.10,"messages":[ ],"max_completion_tokens":5e0}'
    assert provider.encode((other,)).content is other.body


@pytest.mark.parametrize(
    "told",
    [
        NOT_MAX_COMPLETION_TOKENS,
        error("Unknown field max_completion_tokens"),
        error("property 'max_completion_tokens' is unsupported"),
        error("no", code="unknown_parameter", param="max_completion_tokens"),
        refusal(
            {"detail": [{"loc": ["body", "max_completion_tokens"], "msg": "Extra", "type": "extra_forbidden"}]},
            422,
        ),
        error(
            "[{'type': 'extra_forbidden', 'loc': ('body', 'max_completion_tokens'), "
            "'msg': 'Extra inputs are not permitted'}]"
        ),
    ],
)
def test_older_servers_are_given_max_tokens(told):
    provider = fresh()
    r = row(body=b'{"max_completion_tokens":5}')
    assert provider.adapt((r,), told)
    assert provider.encode((r,)).content == b'{"max_tokens":5}'


def test_rows_that_were_in_flight_when_the_name_was_learned_are_asked_again_too():
    provider = fresh()
    rows = [row(body=b'{"max_tokens":5}', line=n) for n in range(1, 101)]
    assert all(provider.adapt((r,), NOT_MAX_TOKENS) for r in rows)
    assert {provider.encode((r,)).content for r in rows} == {b'{"max_completion_tokens":5}'}


def test_a_server_that_refuses_both_names_ends_the_asking():
    provider = fresh()
    r = row(body=b'{"max_tokens":5}')
    sends = 0
    while sends < 10:
        sends += 1
        sent = provider.encode((r,)).content
        told = NOT_MAX_COMPLETION_TOKENS if b"completion" in sent else NOT_MAX_TOKENS
        if not provider.adapt((r,), told):
            break
    assert sends == 3


def test_a_row_with_both_names_loses_the_refused_one():
    provider = fresh()
    r = row(body=b'{"max_tokens":5,"max_completion_tokens":7}')
    assert provider.adapt((r,), NOT_MAX_TOKENS)
    assert provider.encode((r,)).content == b'{"max_completion_tokens":7}'


@pytest.mark.parametrize(
    ("r", "told"),
    [
        # the value, not the name
        (
            row(body=b'{"max_tokens":5}'),
            error("max_tokens is too large: 5", code="invalid_value", param="max_tokens"),
        ),
        (row(body=b'{"max_tokens":5}'), error("Unsupported value: 'temperature'", code="unsupported_value")),
        (row(body=b'{"max_tokens":5}'), error("context", code="context_length_exceeded")),
        # a row that has no such limit, or is no chat
        (row(body=b'{"messages":[{"content":"max_tokens"}]}'), NOT_MAX_TOKENS),
        (row("completions", b'{"max_tokens":5}'), NOT_MAX_TOKENS),
    ],
)
def test_other_refusals_teach_nothing(r, told):
    provider = fresh()
    assert not provider.adapt((r,), told)
    assert provider.encode((r,)).content is r.body
