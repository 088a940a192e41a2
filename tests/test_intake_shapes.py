from __future__ import annotations

import json
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.intake.jsonl import OversizedLine
from batchrun.intake.shapes import Shaper, Shaping
from batchrun.records import BadRow, Line, Row

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = (
    st.integers(-(10**30), 10**30).map(str)
    | st.decimals(allow_nan=False, allow_infinity=False, places=25, min_value=-(10**9), max_value=10**9).map(str)
    | st.sampled_from(["1.0", "1e5", "1E+5", "-0", "-0.0", "0.10", "123456789012345678901234567890.5"])
)
RAW_VALUES = st.recursive(
    NUMBERS | TEXT.map(json.dumps) | st.sampled_from(["true", "false", "null", '"\\ud83d\\ude00"', '"\\u0000"']),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: "[ " + " ,".join(parts) + "]")
        | st.lists(st.tuples(TEXT.map(json.dumps), inner), max_size=3).map(
            lambda pairs: "{" + ",\t".join(f"{name} : {value}" for name, value in pairs) + " }"
        )
    ),
    max_leaves=8,
)


def shape(data, number=2, **shaping):
    if not isinstance(data, bytes):
        data = data.encode() if isinstance(data, str) else orjson.dumps(data)
    return Shaper(Shaping(**{"model": "gpt-5", **shaping})).shape(Line(number, 0, data))


def row_of(data, **shaping):
    row = shape(data, **shaping)
    assert isinstance(row, Row), row
    return row


def bad_of(data, **shaping):
    bad = shape(data, **shaping)
    assert isinstance(bad, BadRow), bad
    assert bad.line == shaping.get("number", 2)
    return bad


def batch_line(body, **fields):
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body, **fields}


# ---------------------------------------------------------------- batch lines


def test_an_openai_batch_line_is_sent_as_its_very_bytes():
    body = b'{ "model" : "gpt-4" ,\t"messages":[{"role":"user","content":"\\u0041"}], "temperature":1.0, "seed":1.0 }'
    row = row_of(b'{"custom_id":"t-17","method":"POST","url":"/v1/chat/completions","body":%b}\r' % body)
    assert row == Row(2, "t-17", "chat", "gpt-4", body, None)


@given(st.lists(st.tuples(TEXT.filter(lambda name: name != "stream").map(json.dumps), RAW_VALUES), max_size=4))
def test_any_body_that_lacks_nothing_travels_byte_identical(pairs):
    members = [f"{name}: {value}" for name, value in pairs]
    body = "{" + ", ".join([*members, '"model":"m"', ' "messages": [{"role":"user"}] ']) + "}"
    row = row_of('{"url":"/v1/chat/completions", "body":  ' + body + ' , "custom_id":"x"}')
    assert row.body == body.encode()


@given(RAW_VALUES)
def test_what_options_do_not_touch_keeps_its_bytes_when_a_body_is_filled(value):
    body = '{"messages":[{"role":"user","content":"x"}],"extra":' + value + "}"
    row = row_of(
        '{"url":"/v1/chat/completions","body":' + body + "}", system="s", max_tokens=5, temperature="1.0", model="m"
    )
    assert row.body.endswith(b'"extra":' + value.encode() + b"}") or b'"extra":' + value.encode() in row.body
    filled = json.loads(row.body, parse_float=str, parse_int=str)
    assert filled.pop("temperature") == "1.0"
    assert filled.pop("max_completion_tokens") == "5"
    assert filled.pop("model") == "m"
    assert filled.pop("messages") == [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert filled == {"extra": json.loads(value, parse_float=str, parse_int=str)}


@pytest.mark.parametrize(
    ("url", "endpoint", "body"),
    [
        ("/v1/chat/completions", "chat", {"messages": MESSAGES}),
        ("/chat/completions", "chat", {"messages": MESSAGES}),
        ("/v1/responses", "responses", {"input": "x"}),
        ("/v1/completions", "completions", {"prompt": ["x"]}),
        ("/v1/embeddings", "embeddings", {"input": ["x"]}),
        ("/v1/messages", "messages", {"messages": MESSAGES, "max_tokens": 9}),
    ],
)
def test_the_url_of_a_batch_line_decides_its_endpoint(url, endpoint, body):
    row = row_of({"custom_id": "a", "url": url, "body": {"model": "m", **body}})
    assert row.endpoint == endpoint
    assert row.body == orjson.dumps({"model": "m", **body})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}, "has no `body`"),
        (batch_line(None), "has no `body`"),
        (batch_line([]), "`body` is an array, expected an object"),
        ({"custom_id": "a", "body": {"messages": MESSAGES}}, "has a `body` but no `url`"),
        (batch_line({"messages": MESSAGES}, url="/v1/audio/speech"), '`url` is unknown: "/v1/audio/speech"'),
        (batch_line({"messages": MESSAGES}, url=5), "`url` is unknown: 5"),
        (
            batch_line({"messages": MESSAGES}, url="https://api.openai.com/v1/chat/completions"),
            '`url` names a host: "https://api.openai.com/v1/chat/completions"',
        ),
        (batch_line({"messages": MESSAGES}, url="//evil/v1/messages"), '`url` names a host: "//evil/v1/messages"'),
        (batch_line({"messages": MESSAGES}, method="GET"), '`method` is "GET", expected POST'),
        (batch_line({"messages": MESSAGES, "stream": True}), "asks for a stream"),
        (batch_line({"messages": []}), "`messages` is empty"),
        (batch_line({"messages": ["x"]}), "`messages[0]` is a string, expected an object"),
        (batch_line({"messages": [{"content": "x"}]}), "`messages[0]` has no `role`"),
        (batch_line({"messages": "x"}), "`messages` is a string, expected an array"),
        (batch_line({}), "has no `messages`"),
        (batch_line({}, url="/v1/embeddings"), "has no `input`"),
        (batch_line({"prompt": []}, url="/v1/completions"), "`prompt` is empty"),
        (batch_line({"messages": MESSAGES, "max_tokens": 0}), "`max_tokens` must be a positive integer"),
        (batch_line({"messages": MESSAGES, "max_tokens": "9"}), "`max_tokens` must be a positive integer"),
        (batch_line({"messages": MESSAGES, "n": 1.5}), "`n` must be a positive integer"),
        (batch_line({"messages": MESSAGES, "model": 5}), "`model` is 5, expected a name"),
        (batch_line({"messages": MESSAGES}, priority="high"), '`priority` is "high", expected an integer'),
        (batch_line({"messages": MESSAGES}, priority=True), "`priority` is true, expected an integer"),
        (batch_line({"messages": MESSAGES}, priority=2**63), f"`priority` is {2**63}, expected an integer"),
        ({"custom_id": "a", "params": "x"}, "`params` is a string, expected an object"),
        ({"key": "a", "request": {}}, "has no `contents`"),
        (
            {"key": "a", "request": {"contents": [{}], "generationConfig": [1]}},
            "`generationConfig` is an array, expected an object",
        ),
    ],
)
def test_a_batch_line_that_cannot_work_is_named(line, why):
    bad = bad_of(line)
    assert bad.why == why
    assert bad.custom_id == "a"


def test_two_endpoints_are_named():
    bad = bad_of(batch_line({"messages": MESSAGES}), endpoint="responses")
    assert bad.why == "is for chat, but --endpoint says responses"


def test_a_batch_line_without_url_goes_where_the_option_says():
    assert row_of({"custom_id": "a", "body": {"messages": MESSAGES}}, endpoint="chat").endpoint == "chat"


def test_an_endpoint_that_the_provider_does_not_have_is_named():
    bad = bad_of(batch_line({"messages": MESSAGES}), speaks=frozenset({"messages"}))
    assert bad.why == "is for chat, which this provider does not have"


def test_an_anthropic_batch_line_is_sent_as_its_very_bytes():
    params = b'{"model":"claude", "max_tokens": 1024,"messages":[{"role":"user","content":"x"}]}'
    row = row_of(b'{"custom_id":"a","params":%b}' % params)
    assert row == Row(2, "a", "messages", "claude", params, 1024)


def test_a_gemini_batch_line_is_sent_as_its_very_bytes_and_its_model_is_no_part_of_it():
    request = b'{"contents":[{"parts":[{"text":"x"}]}], "generation_config":{"max_output_tokens":7,"candidateCount":2}}'
    row = row_of(b'{"key":"a","request":%b}' % request, model="gemini-2.5-flash")
    assert row == Row(2, "a", "generate", "gemini-2.5-flash", request, 14)
    named = row_of({"key": "a", "request": {"model": "models/gemini-2.5-pro", "contents": [{}]}})
    assert named.model == "gemini-2.5-pro"


def test_what_stands_beside_a_batch_lines_body_is_the_users_and_what_stands_inside_is_the_bodys():
    body = {"model": "m", "messages": MESSAGES, "metadata": {"in": 1}}
    row = row_of(batch_line(body, metadata={"out": 1}, queue="eu", priority=-3))
    assert row.body == orjson.dumps(body)
    assert orjson.loads(row.metadata) == {"out": 1, "queue": "eu"}
    assert row.priority == -3


def test_a_file_may_mix_all_shapes():
    shaper = Shaper(Shaping(model="m"))
    lines = [
        batch_line({"messages": MESSAGES}),
        {"custom_id": "b", "params": {"messages": MESSAGES}},
        {"key": "c", "request": {"contents": [{}]}},
        {"messages": MESSAGES},
        {"prompt": "x"},
        {"input": "x"},
        "x",
    ]
    rows = [shaper.shape(Line(at, 0, orjson.dumps(line))) for at, line in enumerate(lines, 1)]
    assert [(row.custom_id, row.endpoint) for row in rows] == [
        ("a", "chat"),
        ("b", "messages"),
        ("c", "generate"),
        ("line-4", "chat"),
        ("line-5", "chat"),
        ("line-6", "responses"),
        ("line-7", "chat"),
    ]


# ---------------------------------------------------------------- simple rows


def test_a_request_body_by_itself_is_sent_as_its_very_bytes():
    body = b'{ "model":"m", "messages":[{"role":"user","content":"x"}],"top_p":1.0, "logit_bias":{"5":-1e2} }'
    assert row_of(body + b" \r").body == body


def test_an_id_is_no_part_of_the_request():
    row = row_of({"id": "a", "model": "m", "messages": MESSAGES})
    assert row.body == orjson.dumps({"model": "m", "messages": MESSAGES})


def test_parameters_go_into_the_body_and_all_else_rides_along():
    row = row_of(
        b'{"id":"a","prompt":"x","model":"m","temperature":0.10,"top_p":1.0,"seed":123456789012345678901234567890,'
        b'"max_tokens":5,"n":2,"system":"s","priority":7,"queue":"eu","price":1.10,"metadata":{"queue":"us","a":1e2}}'
    )
    assert row.body == (
        b'{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"x"}],'
        b'"max_completion_tokens":5,"temperature":0.10,"top_p":1.0,"seed":123456789012345678901234567890,"n":2}'
    )
    assert row.metadata == b'{"queue":"us","price":1.10,"a":1e2}'
    assert (row.priority, row.max_output) == (7, 10)


@given(RAW_VALUES, RAW_VALUES, RAW_VALUES)
def test_digits_survive_in_parameters_and_in_metadata(stop, logit_bias, extra):
    row = row_of(
        '{"prompt":"x", "stop" : ' + stop + ' ,"logit_bias":' + logit_bias + ', "note":' + extra + " }", model="m"
    )
    assert (
        row.body
        == (
            '{"model":"m","messages":[{"role":"user","content":"x"}],"stop":'
            + stop
            + ',"logit_bias":'
            + logit_bias
            + "}"
        ).encode()
    )
    assert row.metadata == ('{"note":' + extra + "}").encode()


@pytest.mark.parametrize(
    ("metadata", "extra", "kept"),
    [
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({}, {"b": 2}, {"b": 2}),
        ("note", {}, {"metadata": "note"}),
        ([1], {"b": 2}, {"metadata": [1], "b": 2}),
        (None, {"b": None}, {"b": None}),
        (None, {}, None),
    ],
)
def test_metadata_is_an_object_with_all_that_nothing_took(metadata, extra, kept):
    row = row_of({"prompt": "x", "metadata": metadata, **extra})
    assert (row.metadata and orjson.loads(row.metadata)) == kept
    assert b"metadata" not in row.body


def test_of_a_name_given_twice_the_last_counts_everywhere():
    row = row_of(b'{"prompt":"a","prompt":"b","model":"m","model":"n","id":1,"id":2,"q":1,"q":2}')
    assert row.body == b'{"model":"n","messages":[{"role":"user","content":"b"}]}'
    assert (row.custom_id, row.model, row.metadata) == ("2", "n", b'{"q":2}')
    batch = row_of(b'{"url":"/v1/chat/completions","body":{"messages":5,"n":7,"messages":[{"role":"user"}],"n":2}}')
    assert json.loads(batch.body) == {"model": "gpt-5", "messages": [{"role": "user"}], "n": 2}


def test_a_row_may_have_columns_called_url_body_params_and_request():
    row = row_of({"prompt": "x", "url": "https://source/", "body": "text", "params": {}, "request": 1})
    assert row.endpoint == "chat"
    assert orjson.loads(row.metadata) == {"url": "https://source/", "body": "text", "params": {}, "request": 1}


@pytest.mark.parametrize(
    ("line", "shaping", "endpoint", "body"),
    [
        ({"prompt": "x"}, {}, "chat", {"messages": [{"role": "user", "content": "x"}]}),
        ("x", {}, "chat", {"messages": [{"role": "user", "content": "x"}]}),
        ({"input": "x"}, {}, "responses", {"input": "x", "store": False}),
        ({"input": "x", "store": True}, {}, "responses", {"input": "x", "store": True}),
        ({"input": ["x", "y"]}, {"model": "text-embedding-3-small"}, "embeddings", {"input": ["x", "y"]}),
        ({"input": "x"}, {"model": "BAAI/bge-m3"}, "embeddings", {"input": "x"}),
        ("x", {"model": "intfloat/e5-large"}, "embeddings", {"input": "x"}),
        ({"prompt": "x"}, {"endpoint": "completions"}, "completions", {"prompt": "x"}),
        ({"input": ["x", "y"]}, {"endpoint": "completions"}, "completions", {"prompt": ["x", "y"]}),
        ("x", {"endpoint": "completions"}, "completions", {"prompt": "x"}),
        ({"prompt": "x"}, {"endpoint": "embeddings"}, "embeddings", {"input": "x"}),
        ({"prompt": "y", "input": "x"}, {"endpoint": "embeddings"}, "embeddings", {"input": "x"}),
        ({"prompt": "x"}, {"endpoint": "responses"}, "responses", {"input": "x", "store": False}),
        ({"messages": MESSAGES}, {"endpoint": "responses"}, "responses", {"input": MESSAGES, "store": False}),
        ({"input": "x"}, {"endpoint": "chat"}, "chat", {"messages": [{"role": "user", "content": "x"}]}),
        ({"messages": MESSAGES}, {}, "chat", {"messages": MESSAGES}),
    ],
)
def test_text_goes_where_the_endpoint_takes_it(line, shaping, endpoint, body):
    row = row_of(orjson.dumps(line), **shaping)
    assert row.endpoint == endpoint
    assert orjson.loads(row.body) == {"model": row.model, **body}


@pytest.mark.parametrize(
    ("line", "shaping", "why"),
    [
        ({"messages": MESSAGES}, {"endpoint": "completions"}, "has `messages`, but completions takes plain text"),
        ({"messages": MESSAGES}, {"endpoint": "embeddings"}, "has `messages`, but embeddings takes plain text"),
        ({"prompt": ["x"]}, {}, "`prompt` is an array, but chat takes a string"),
        ({"prompt": 5}, {}, "`prompt` is a number, but chat takes a string"),
        ({"input": []}, {"endpoint": "embeddings"}, "`input` is empty"),
        ({"messages": []}, {}, "`messages` is empty"),
        ({"messages": MESSAGES, "stream": True}, {}, "asks for a stream"),
        ({"prompt": "x", "system": 5}, {}, "`system` is a number, expected a string"),
        ({"prompt": "x", "system": "s"}, {"endpoint": "completions"}, "a system prompt has no place in completions"),
        ({"prompt": "x", "max_tokens": -1}, {}, "`max_tokens` must be a positive integer"),
        ({"prompt": "x", "max_tokens": 5.0}, {}, "`max_tokens` must be a positive integer"),
        ({"prompt": "x", "temperature": "warm"}, {}, "`temperature` is a string, expected a number"),
        ({"prompt": "x", "temperature": True}, {}, "`temperature` is a boolean, expected a number"),
        ({"prompt": "x"}, {"model": None}, "has no model"),
        ({"prompt": "x", "model": ""}, {}, '`model` is "", expected a name'),
        ({"text": "x"}, {}, "has no `messages`, `prompt` or `input`"),
        ({"prompt": None}, {}, "has no `messages`, `prompt` or `input`"),
        ({}, {}, "has no `messages`, `prompt` or `input`"),
        ({"contents": [{}]}, {}, "has no `messages`, `prompt` or `input`"),
    ],
)
def test_a_simple_row_that_cannot_work_is_named(line, shaping, why):
    assert bad_of(line, **shaping).why == why


def test_null_options_are_no_options():
    row = row_of(
        {"id": None, "key": "k", "prompt": "x", "model": None, "system": None, "max_tokens": None, "temperature": None}
    )
    assert row.custom_id == "k"
    assert orjson.loads(row.body) == {"model": "gpt-5", "messages": [{"role": "user", "content": "x"}]}


# ---------------------------------------------------------------- for Anthropic and Gemini


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("x", {"messages": [{"role": "user", "content": "x"}]}),
        ({"input": "x", "stop": "END"}, {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["END"]}),
        ({"messages": MESSAGES}, {"system": "Be brief.", "messages": MESSAGES[1:]}),
        (
            {"messages": MESSAGES, "system": "First."},
            {
                "system": [{"type": "text", "text": "First."}, {"type": "text", "text": "Be brief."}],
                "messages": MESSAGES[1:],
            },
        ),
        (
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": "d"}]}, *MESSAGES]},
            {
                "system": [{"type": "text", "text": "d"}, {"type": "text", "text": "Be brief."}],
                "messages": MESSAGES[1:],
            },
        ),
        (
            {"prompt": "x", "system": [{"type": "text", "text": "s"}]},
            {"messages": [{"role": "user", "content": "x"}], "system": [{"type": "text", "text": "s"}]},
        ),
    ],
)
def test_simple_rows_for_anthropic(line, body):
    row = row_of(orjson.dumps(line), family="anthropic", model="claude")
    assert (row.endpoint, row.max_output) == ("messages", 4096)
    assert orjson.loads(row.body) == {"model": "claude", "max_tokens": 4096, **body}


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("x", {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "Yo"}]},
            {
                "contents": [
                    {"role": "user", "parts": [{"text": "Hi"}]},
                    {"role": "model", "parts": [{"text": "Yo"}]},
                ],
                "systemInstruction": {"parts": [{"text": "Be brief."}]},
            },
        ),
        (
            {"prompt": "x", "system": "s", "max_tokens": 5, "temperature": 0.5, "stop": "END", "top_k": 3},
            {
                "contents": [{"role": "user", "parts": [{"text": "x"}]}],
                "systemInstruction": {"parts": [{"text": "s"}]},
                "generationConfig": {
                    "maxOutputTokens": 5,
                    "temperature": 0.5,
                    "stopSequences": ["END"],
                    "topK": 3,
                },
            },
        ),
        (
            {"contents": [{"parts": [{"text": "x"}]}], "generationConfig": {"temperature": 1}, "temperature": 0},
            {"contents": [{"parts": [{"text": "x"}]}], "generationConfig": {"temperature": 1}},
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "what?"},
                            "this",
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                        ],
                    }
                ]
            },
            {
                "contents": [
                    {
                        "role": "user",
                        "parts": [
                            {"text": "what?"},
                            {"text": "this"},
                            {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
                        ],
                    }
                ]
            },
        ),
    ],
)
def test_simple_rows_for_gemini(line, body):
    row = row_of(orjson.dumps(line), family="gemini", model="gemini-2.5-flash")
    assert (row.endpoint, row.model) == ("generate", "gemini-2.5-flash")
    assert orjson.loads(row.body) == body


@pytest.mark.parametrize(
    ("messages", "family", "why"),
    [
        (MESSAGES[:1], "anthropic", "has only system messages"),
        (MESSAGES[:1], "gemini", "has only system messages"),
        (
            [{"role": "user", "content": 5}],
            "gemini",
            "has a message whose `content` is neither a string nor an array of parts",
        ),
        ([{"role": "tool", "content": "x"}], "gemini", "has a message with role 'tool', which Gemini does not take"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://h/x.png"}}]}],
            "gemini",
            "has a content part that Gemini does not take",
        ),
    ],
)
def test_messages_that_cannot_be_translated_are_named(messages, family, why):
    assert bad_of({"messages": messages}, family=family).why == why


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("raw", "custom_id"),
    [
        ('"id":"a/b c \U0001f600"', "a/b c \U0001f600"),
        ('"id":17', "17"),
        ('"id":-3', "-3"),
        ('"id":123456789012345678901234567890', "123456789012345678901234567890"),
        ('"id":18446744073709551616', "18446744073709551616"),
        ('"custom_id":null,"id":"b"', "b"),
        ('"key":"k","custom_id":"c","id":"i"', "c"),
        ('"id":"' + "x" * 1024 + '"', "x" * 1024),
        ('"queue":"eu"', "line-2"),
    ],
)
def test_an_id_is_a_string_or_the_digits_of_an_integer(raw, custom_id):
    assert row_of("{" + raw + ',"prompt":"x"}').custom_id == custom_id


def test_ids_that_are_not_used_ride_along():
    assert row_of({"custom_id": "c", "id": 5, "prompt": "x"}).metadata == b'{"id":5}'


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ('""', "`id` is empty"),
        ("1.0", "`id` is 1.0, expected a string or an integer"),
        ("1e3", "`id` is 1000.0, expected a string or an integer"),
        ("true", "`id` is true, expected a string or an integer"),
        ('{"a":1}', "`id` is an object, expected a string or an integer"),
        ("[]", "`id` is an array, expected a string or an integer"),
        ('"' + "x" * 1025 + '"', "`id` is 1,025 characters long, at most 1,024 are allowed"),
        (r'"a\u0000b"', r'`id` holds a control character: "a\u0000b"'),
        (r'"a\nb"', r'`id` holds a control character: "a\nb"'),
        (r'"a\u009b\u202eb"', r'`id` holds a control character: "a\u009b\u202eb"'),
    ],
)
def test_an_id_that_is_none_is_named(raw, why):
    bad = bad_of('{"prompt":"x","id":' + raw + "}")
    assert (bad.why, bad.custom_id) == (why, None)


# ---------------------------------------------------------------- lines that are no JSON


@pytest.mark.parametrize("data", [b"", b" ", b"\r", b"\t \r"])
def test_a_blank_line_is_nothing(data):
    assert shape(data) is None


def test_a_bom_is_dropped_from_the_first_line_only():
    assert row_of(b'\xef\xbb\xbf{"prompt":"x"}', number=1).custom_id == "line-1"
    assert row_of(b'\xef\xbb\xbf"x"', number=1).endpoint == "chat"
    assert shape(b"\xef\xbb\xbf\r", number=1) is None
    assert bad_of(b'\xef\xbb\xbf{"prompt":"x"}').why.startswith("is no JSON")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_file_in_utf_16_or_32_is_named_with_a_way_to_mend_it(encoding):
    bad = bad_of(("\ufeff" * encoding.endswith("-be") + '{"prompt":"x"}').encode(encoding), number=1)
    assert bad.why == "is UTF-16 or UTF-32, expected UTF-8"
    assert "iconv" in bad.hint


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"prompt":"x"', "is no JSON: unexpected end of data at column 14"),
        (b'{"prompt":"\xff"}', "is not UTF-8 at byte 12"),
        (b'{"prompt":"\xed\xa0\x80"}', "is not UTF-8 at byte 12"),
        (rb'{"prompt":"\ud800"}', "is no JSON: no low surrogate in string at column 12"),
        (b'{"prompt":"x","n":NaN}', "is no JSON: unexpected character, expected a JSON value at column 19"),
        (b'{"prompt":"x","n":Infinity}', "is no JSON: unexpected character, expected a JSON value at column 19"),
        (b'{"prompt":"x","n":-Infinity}', "is no JSON: no digit after sign at column 20"),
        (b'{"prompt":"x","n":1e999}', "is no JSON: number is infinity when parsed as double at column 19"),
        (
            b'{"prompt":"x","n":' + b"9" * 5000 + b"}",
            "is no JSON: number is infinity when parsed as double at column 19",
        ),
        (b'{"prompt":"x"} {}', "is no JSON: unexpected content after document at column 16"),
        (b"[1]", "is an array, expected an object or a string"),
        (b"5", "is a number, expected an object or a string"),
        (b"null", "is null, expected an object or a string"),
        (b"true", "is a boolean, expected an object or a string"),
        (b"\x0b", "is no JSON: unexpected character, expected a JSON value at column 1"),
    ],
)
def test_a_line_that_is_no_json_is_named_and_never_replaced(data, why):
    assert bad_of(data).why == why


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_json_does_not_have_get_a_hint(number):
    assert "NaN and Infinity" in bad_of(b'{"prompt":"x","n":' + number + b"}").hint


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x7f", "\U0001f600"])
def test_odd_characters_travel_inside_text(inside):
    assert orjson.loads(row_of(orjson.dumps({"prompt": inside})).body)["messages"][0]["content"] == inside


@pytest.mark.parametrize("depth", [100, 900, 1000, 1020, 1100, 100_000])
def test_deep_nesting_is_a_row_or_a_bad_line_and_never_a_crash(depth):
    nested = b"[" * depth + b"]" * depth
    for line in (
        b'{"prompt":"x","deep":%b}' % nested,
        b'{"url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":%b}]}}' % nested,
        b'{"prompt":%b}' % nested,
    ):
        found = shape(line)
        assert isinstance(found, BadRow) or nested in found.body or found.metadata == b'{"deep":%b}' % nested
        if depth > 1024:
            assert isinstance(found, BadRow)


def test_nesting_deeper_than_the_stack_is_a_bad_line():
    def deeper(levels):
        return deeper(levels - 1) if levels else shape(b'{"prompt":"x","deep":' + b"[" * 900 + b"]" * 900 + b"}")

    found = deeper(sys.getrecursionlimit() - 200)
    assert found.why == "is nested too deeply"


def test_a_20_mb_line_is_a_row():
    text = b"x" * 20_000_000
    assert text in row_of(b'{"prompt":"' + text + b'"}').body


def test_an_oversized_line_is_a_bad_line():
    bad = Shaper(Shaping()).shape(OversizedLine(5, 100, 70_000_000))
    assert (bad.line, bad.why) == (5, "is 70,000,000 bytes long")


@given(st.binary(max_size=40) | RAW_VALUES.map(str.encode), st.sampled_from(["openai", "anthropic", "gemini"]))
def test_no_line_whatever_raises(data, family):
    found = shape(data, family=family)
    assert found is None or isinstance(found, BadRow | Row)


FIELDS = st.sampled_from(
    [
        *("custom_id", "id", "key", "method", "url", "body", "params", "request", "messages", "prompt", "input"),
        *("contents", "model", "system", "max_tokens", "temperature", "priority", "metadata", "stop", "n", "other"),
    ]
)


@given(
    st.dictionaries(
        FIELDS,
        RAW_VALUES | st.just(json.dumps(MESSAGES)) | st.just('"/v1/chat/completions"') | st.just('{"messages":[{}]}'),
    ),
    st.sampled_from(["openai", "anthropic", "gemini"]),
    st.sampled_from([None, "chat", "responses", "completions", "embeddings", "messages", "generate"]),
)
def test_any_object_is_a_row_with_a_valid_body_or_a_bad_line_with_a_reason(fields, family, endpoint):
    line = "{" + ",".join(f"{json.dumps(name)}:{raw}" for name, raw in fields.items()) + "}"
    found = shape(line, family=family, endpoint=endpoint, max_tokens=5, temperature="0.50")
    if isinstance(found, BadRow):
        assert found.why
    else:
        assert isinstance(orjson.loads(found.body), dict)
        assert found.metadata is None or isinstance(orjson.loads(found.metadata), dict)
