from __future__ import annotations

import orjson
import pytest

from batchrun.errors import BatchrunError, Exit
from batchrun.intake.shapes import Shaper, Shaping
from batchrun.records import BadRow, Line, Row

USER = {"role": "user", "content": "x"}
ASKING = {
    "chat": {"messages": [USER]},
    "responses": {"input": "x"},
    "completions": {"prompt": "x"},
    "embeddings": {"input": "x"},
    "messages": {"messages": [USER]},
}
URLS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
}


def shape(line, **shaping):
    return Shaper(Shaping(**shaping)).shape(Line(2, 0, orjson.dumps(line)))


def filled(endpoint, body, **shaping):
    """The body that a batch line's body becomes, without what it had."""
    line = {"key": "a", "request": body} if endpoint == "generate" else {"url": URLS[endpoint], "body": body}
    row = shape(line, **{"model": "m", **shaping})
    assert isinstance(row, Row), row
    return {name: value for name, value in orjson.loads(row.body).items() if body.get(name) != value}


@pytest.mark.parametrize(
    ("endpoint", "added"),
    [
        ("chat", {"max_completion_tokens": 5, "temperature": 0.5}),
        ("responses", {"max_output_tokens": 5, "temperature": 0.5}),
        ("completions", {"max_tokens": 5, "temperature": 0.5}),
        ("embeddings", {}),
        ("messages", {"max_tokens": 5, "temperature": 0.5}),
    ],
)
def test_options_are_added_under_the_endpoints_own_names(endpoint, added):
    assert filled(endpoint, ASKING[endpoint], max_tokens=5, temperature="0.5", params={"user": '"u"'}) == {
        "model": "m",
        "user": "u",
        **added,
    }


@pytest.mark.parametrize(
    ("endpoint", "own"),
    [
        ("chat", {"max_tokens": 9}),
        ("chat", {"max_completion_tokens": 9}),
        ("responses", {"max_output_tokens": 9}),
        ("completions", {"max_tokens": 9}),
        ("messages", {"max_tokens": 9}),
        ("embeddings", {}),
    ],
)
def test_a_rows_own_values_win(endpoint, own):
    body = {"model": "own", **ASKING[endpoint], **own, "temperature": 0, "user": "mine"}
    assert filled(endpoint, body, max_tokens=5, temperature="0.5", params={"user": '"u"'}) == {}


def test_a_simple_rows_own_values_win():
    row = shape(
        {"prompt": "x", "model": "own", "system": "own", "max_tokens": 9, "temperature": 0, "user": "mine"},
        model="m",
        system="s",
        max_tokens=5,
        temperature="0.5",
        params={"user": '"u"', "seed": "1"},
    )
    assert orjson.loads(row.body) == {
        "seed": 1,
        "model": "own",
        "messages": [{"role": "system", "content": "own"}, USER],
        "max_completion_tokens": 9,
        "temperature": 0,
        "user": "mine",
    }


def test_older_servers_are_told_max_tokens():
    assert filled("chat", ASKING["chat"], max_tokens=5, max_tokens_name="max_tokens") == {"model": "m", "max_tokens": 5}
    row = shape({"prompt": "x", "max_tokens": 7}, model="m", max_tokens_name="max_tokens")
    assert orjson.loads(row.body)["max_tokens"] == 7


def test_an_options_digits_reach_the_body_as_they_were_written():
    row = shape(
        {"url": URLS["chat"], "body": ASKING["chat"]},
        model="m",
        temperature="0.10",
        params={"seed": " 123456789012345678901234567890", "top_p": "1.0"},
    )
    assert row.body == (
        b'{"model":"m","temperature":0.10,"seed":123456789012345678901234567890,"top_p":1.0,'
        b'"messages":[{"role":"user","content":"x"}]}'
    )


def test_a_model_of_null_is_none():
    row = shape({"url": URLS["chat"], "body": {"model": None, **ASKING["chat"]}}, model="m")
    assert orjson.loads(row.body) == {"model": "m", **ASKING["chat"]}
    assert row.body.count(b"model") == 1


def test_the_simulators_model_stands_in_last():
    assert shape({"prompt": "x"}, default_model="sim").model == "sim"
    assert shape({"prompt": "x"}, default_model="sim", model="m").model == "m"
    assert shape({"prompt": "x", "model": "own"}, default_model="sim", model="m").model == "own"


@pytest.mark.parametrize(
    ("endpoint", "added"),
    [
        ("chat", {"messages": [{"role": "system", "content": "s"}, USER]}),
        ("responses", {"instructions": "s"}),
        ("messages", {"system": "s", "max_tokens": 4096}),
    ],
)
def test_the_system_option_goes_where_the_endpoint_takes_it(endpoint, added):
    assert filled(endpoint, ASKING[endpoint], system="s") == {"model": "m", **added}


@pytest.mark.parametrize(
    ("endpoint", "own"),
    [
        ("chat", {"messages": [{"role": "system", "content": "own"}, USER]}),
        ("chat", {"messages": [USER, {"role": "developer", "content": "own"}]}),
        ("responses", {"input": "x", "instructions": "own"}),
        ("responses", {"input": [{"role": "system", "content": "own"}, USER]}),
        ("messages", {"messages": [USER], "system": "own", "max_tokens": 1}),
        ("generate", {"contents": [{}], "systemInstruction": {"parts": []}}),
        ("generate", {"contents": [{}], "system_instruction": {"parts": []}}),
    ],
)
def test_a_rows_own_system_prompt_wins(endpoint, own):
    assert filled(endpoint, {"model": "own", **own}, system="s") == {}


@pytest.mark.parametrize("endpoint", ["completions", "embeddings"])
def test_a_system_prompt_has_no_place_in_plain_text(endpoint):
    bad = shape({"url": URLS[endpoint], "body": ASKING[endpoint]}, model="m", system="s")
    assert isinstance(bad, BadRow)
    assert bad.why == f"a system prompt has no place in {endpoint}"
    with pytest.raises(BatchrunError, match="--system has no place") as caught:
        Shaper(Shaping(endpoint=endpoint, system="s"))
    assert caught.value.exit_code == Exit.USAGE


@pytest.mark.parametrize(
    ("own", "config"),
    [
        ({}, {"temperature": 0.5, "maxOutputTokens": 5, "topP": 1}),
        ({"generationConfig": {"temperature": 1}}, {"temperature": 1, "maxOutputTokens": 5, "topP": 1}),
        (
            {"generation_config": {"max_output_tokens": 9, "top_p": 0}},
            {"max_output_tokens": 9, "top_p": 0, "temperature": 0.5},
        ),
        ({"generationConfig": {"temperature": 1, "maxOutputTokens": 9, "topP": 0}}, None),
    ],
)
def test_geminis_options_go_into_its_config_one_by_one(own, config):
    name = next(iter(own), "generationConfig")
    added = filled(
        "generate",
        {"contents": [{"parts": []}], **own},
        temperature="0.5",
        max_tokens=5,
        params={"top_p": "1", "labels": '{"a":"b"}'},
    )
    assert added == {"labels": {"a": "b"}, **({} if config is None else {name: config})}


def test_geminis_model_stays_out_of_the_body():
    row = shape({"prompt": "x"}, model="models/gemini-2.5-flash", family="gemini", system="s")
    assert row.model == "gemini-2.5-flash"
    assert orjson.loads(row.body) == {
        "contents": [{"role": "user", "parts": [{"text": "x"}]}],
        "systemInstruction": {"parts": [{"text": "s"}]},
    }


def test_anthropic_is_told_max_tokens_even_where_nobody_names_any():
    assert filled("messages", ASKING["messages"]) == {"model": "m", "max_tokens": 4096}
    assert filled("messages", ASKING["messages"], max_tokens=5, params={"max_tokens": "7"})["max_tokens"] == 5
    assert filled("messages", ASKING["messages"], params={"max_tokens": "7"}) == {"model": "m", "max_tokens": 7}


@pytest.mark.parametrize(
    ("endpoint", "body", "most"),
    [
        ("chat", {}, None),
        ("chat", {"max_tokens": 10}, 10),
        ("chat", {"max_completion_tokens": 10, "max_tokens": 99, "n": 3}, 30),
        ("chat", {"n": 3}, None),
        ("responses", {"max_output_tokens": 10}, 10),
        ("completions", {"max_tokens": 10}, 10),
        ("completions", {"max_tokens": 10, "n": 2, "best_of": 4}, 40),
        ("completions", {"max_tokens": 10, "prompt": ["a", "b", "c"], "n": 2}, 60),
        ("completions", {"max_tokens": 10, "prompt": [1, 2, 3]}, 10),
        ("completions", {"max_tokens": 10, "prompt": [[1], [2]]}, 20),
        ("completions", {"max_tokens": 0, "echo": True}, 0),
        ("embeddings", {}, 0),
        ("messages", {"max_tokens": 10}, 10),
    ],
)
def test_the_output_that_a_body_allows(endpoint, body, most):
    row = shape({"url": URLS[endpoint], "body": {"model": "m", **ASKING[endpoint], **body}})
    assert row.max_output == most


def test_the_output_that_an_option_allows_counts_as_the_bodys():
    assert shape({"prompt": "x", "n": 3}, model="m", max_tokens=10).max_output == 30
    assert shape({"url": URLS["chat"], "body": ASKING["chat"]}, model="m", max_tokens=10).max_output == 10
    assert shape({"prompt": "x"}, model="m", max_tokens=10, params={"n": "2"}).max_output == 20
    assert shape({"prompt": "x"}, model="m", family="gemini", max_tokens=10).max_output == 10
    assert shape({"key": "a", "request": {"contents": [{}]}}, model="m", max_tokens=10).max_output == 10


@pytest.mark.parametrize(
    "shaping",
    [
        {"params": {"top_p": "high"}},
        {"params": {"top_p": ""}},
        {"params": {"stream": "true"}},
        {"params": {"messages": "[]"}},
        {"params": {"model": '"m"'}},
        {"temperature": '"warm"'},
        {"temperature": "warm"},
        {"temperature": "true"},
        {"endpoint": "responses", "speaks": frozenset({"chat"})},
        {"template": "{{ a"},
    ],
)
def test_options_that_can_work_for_no_row_are_usage_errors(shaping):
    with pytest.raises(BatchrunError) as caught:
        Shaper(Shaping(**shaping))
    assert caught.value.exit_code == Exit.USAGE


def test_a_column_that_is_called_like_an_option_of_another_endpoint_does_not_hide_it():
    row = shape({"prompt": "x", "dimensions": "2x3"}, model="m", params={"dimensions": "5"})
    assert orjson.loads(row.body)["dimensions"] == 5
    assert row.metadata == b'{"dimensions":"2x3"}'
