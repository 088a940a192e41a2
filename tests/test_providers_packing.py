"""Calls of many rows: what is sent, whose answer is whose, and that what they used adds up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from decimal import Decimal

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchrun.config import SimSettings
from batchrun.providers.packing import PackedProvider, Packing, make_packed, packing_for
from batchrun.providers.presets import make_provider, resolve
from batchrun.providers.sharing import share_cost, share_usage, shares
from batchrun.records import Fault, HttpRequest, HttpResponse, Reply, Row, Usage
from batchrun.run.sim import SimTransport
from batchrun.run.transport import Client, Http1Transport
from tests.faults.server import FaultServer, vector
from tests.test_providers_laws import documents, headers_of

ENDPOINTS = {
    "embeddings": "embeddings",
    "completions": "completions",
    "vllm-chat": "chat",
    "gateway-batch": "chat",
    "gateway-chat": "chat",
}


def packing(name: str, preset="openai", **changes) -> Packing:
    found = packing_for(resolve(preset, None), ENDPOINTS[name], name, "packed")
    assert found is not None
    return replace(found, **changes)


def packed(name: str) -> PackedProvider:
    preset = resolve("openai", None)
    provider = make_packed(make_provider(preset, "sk-test"), packing(name), preset)
    assert isinstance(provider, PackedProvider)
    return provider


def rows(endpoint: str, *bodies: bytes | dict, tokens: int = 1) -> tuple[Row, ...]:
    return tuple(
        Row(
            line,
            f"id-{line}",
            endpoint,
            "m",
            body if isinstance(body, bytes) else orjson.dumps(body),
            None,
            tokens=tokens,
        )
        for line, body in enumerate(bodies, 1)
    )


def texts(count: int) -> tuple[Row, ...]:
    return rows("embeddings", *({"model": "m", "input": f"text {n}"} for n in range(count)))


def prompts(count: int, **more) -> tuple[Row, ...]:
    return rows("completions", *({"model": "m", "prompt": f"prompt {n}", **more} for n in range(count)))


def chats(count: int, **more) -> tuple[Row, ...]:
    bodies = ({"model": "m", "messages": [{"role": "user", "content": f"q{n}"}], **more} for n in range(count))
    return rows("chat", *bodies)


def answer(name: str, asked: tuple[Row, ...], content: object, headers=None, provider=None) -> Reply | Fault:
    content = content if isinstance(content, bytes) else orjson.dumps(content)
    return (provider or packed(name)).decode(asked, HttpResponse(200, headers or {}, content))


def values(got: Reply | Fault) -> dict[str, object]:
    assert isinstance(got, Reply), got
    return {name: orjson.loads(output.value) for name, output in got.outputs.items()}


def item(index: int | None, number: float) -> dict:
    return {"object": "embedding", "embedding": [number]} | ({} if index is None else {"index": index})


def choice(index: int | None, text: str) -> dict:
    return {"text": text, "finish_reason": "stop"} | ({} if index is None else {"index": index})


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize(
    ("name", "bodies", "path", "content"),
    [
        (
            "embeddings",
            [
                b'{"model":"m","input":"a\\u00e9 \\"x\\"","dimensions":1.0}',
                '{ "model":"m", "dimensions":1.0, "input" : "ü\U0001f600" }'.encode(),
            ],
            "/embeddings",
            '{"model":"m","input":["a\\u00e9 \\"x\\"","ü\U0001f600"],"dimensions":1.0}'.encode(),
        ),
        (
            "completions",
            [
                b'{"model":"m","prompt":"a","seed":12345678901234567890123}',
                b'{"prompt":"b","seed":12345678901234567890123,"model":"m"}',
            ],
            "/completions",
            b'{"model":"m","prompt":["a","b"],"seed":12345678901234567890123}',
        ),
        (
            "vllm-chat",
            [
                b'{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":0.10}',
                b'{"model":"m","messages":[ {"role":"user","content":"b"} ],"temperature":0.10}',
            ],
            "/chat/completions/batch",
            (
                b'{"model":"m","messages":[[{"role":"user","content":"a"}],[ {"role":"user","content":"b"} ]],'
                b'"temperature":0.10}'
            ),
        ),
        (
            "gateway-chat",
            [
                b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":9,"temperature":0.10}',
                b'{"model":"m","messages":[{"role":"user","content":"b"}],"max_tokens":9,"temperature":0.10}',
            ],
            "/chat/completions",
            (
                b'{"model":"m","batch":[[{"role":"user","content":"a"}],[{"role":"user","content":"b"}]],'
                b'"max_tokens":9,"temperature":0.10}'
            ),
        ),
        (
            "gateway-batch",
            [
                b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_completion_tokens":9}',
                b'{"model":"m","messages":[{"role":"user","content":"b"}],"temperature":0.10,"n":1}',
            ],
            "/batch",
            (
                b'{"model":"m","batch_requests":[{"custom_id":"id-1","prompt":"a","max_tokens":9},'
                b'{"custom_id":"id-2","prompt":"b","temperature":0.10}]}'
            ),
        ),
    ],
)
def test_a_packed_body_is_made_of_the_rows_own_bytes(name, bodies, path, content):
    asked = rows(ENDPOINTS[name], *bodies)
    assert len({packing(name).key(row) for row in asked}) == 1
    provider = packed(name)
    request = provider.encode(asked)
    assert request.content == content
    assert request.url == f"https://api.openai.com/v1{path}"
    assert request.headers == provider.encode(asked[:1]).headers
    assert dict(request.headers)[b"authorization"] == b"Bearer sk-test"


def test_one_row_is_sent_and_read_by_the_provider_itself():
    (row,) = texts(1)
    provider, alone = packed("embeddings"), make_provider(resolve("openai", None), "sk-test")
    assert provider.encode((row,)) == alone.encode((row,))
    response = HttpResponse(200, {}, orjson.dumps({"data": [item(0, 1.5)], "usage": {"prompt_tokens": 3}}))
    assert provider.decode((row,), response) == alone.decode((row,), response)
    assert (provider.name, provider.origin, provider.family) == (alone.name, alone.origin, alone.family)
    assert (provider.endpoints, provider.max_tokens_name) == (alone.endpoints, alone.max_tokens_name)
    assert provider.counts_max_tokens == alone.counts_max_tokens


def test_packings_of_several_endpoints_stand_one_in_another():
    inner, preset = packed("embeddings"), resolve("openai", None)
    outer = make_packed(inner, packing("completions"), preset)
    assert isinstance(outer, PackedProvider)
    assert outer.encode(texts(2)) == inner.encode(texts(2))
    assert outer.encode(prompts(2)) == packed("completions").encode(prompts(2))
    assert values(answer("", texts(2), {"data": [item(1, 1), item(0, 0)]}, provider=outer)) == {
        "id-1": [0],
        "id-2": [1],
    }
    assert not outer.adapt(texts(2), Fault("rejected", "no", 400))
    answer("", prompts(2), {"choices": [choice(0, "only")]}, provider=outer)
    assert (outer.only_first, inner.only_first) == (True, False)
    answer("", texts(3), {"data": [item(None, 1), item(None, 2)]}, provider=inner)
    assert inner.only_first
    assert make_packed(inner, packing("completions"), preset).only_first


def test_a_learnt_limit_name_is_used_in_packed_calls_too():
    asked, provider = chats(2, max_tokens=5), packed("vllm-chat")
    error = {"message": "Unsupported parameter", "code": "unsupported_parameter", "param": "max_tokens"}
    fault = provider.decode(asked, HttpResponse(400, {}, orjson.dumps({"error": error})))
    assert isinstance(fault, Fault)
    assert provider.adapt(asked, fault)
    assert orjson.loads(provider.encode(asked).content)["max_completion_tokens"] == 5
    assert not packed("gateway-batch").adapt(asked, fault)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
SYSTEM = [{"role": "system", "content": "be kind"}, *CHAT["messages"]]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("embeddings", {"model": "m", "input": ["a"]}),
        ("embeddings", {"model": "m", "input": [1, 2]}),
        ("embeddings", {"model": "m", "input": ""}),
        ("embeddings", {"model": "m"}),
        ("completions", {"model": "m", "prompt": ["a", "b"]}),
        ("completions", {"model": "m", "prompt": "a", "stream": True}),
        ("vllm-chat", CHAT | {"n": 2}),
        ("vllm-chat", CHAT | {"tools": [{"type": "function"}]}),
        ("vllm-chat", CHAT | {"stream": True}),
        ("gateway-chat", CHAT | {"n": 2}),
        ("gateway-batch", CHAT | {"messages": SYSTEM}),
        ("gateway-batch", CHAT | {"messages": PARTS}),
        ("gateway-batch", CHAT | {"top_p": 0.5}),
        ("gateway-batch", CHAT | {"max_tokens": 1, "max_completion_tokens": 2}),
        ("gateway-batch", CHAT | {"n": 2}),
    ],
)
def test_what_an_array_cannot_say_goes_alone(name, body):
    assert packing(name).key(rows(ENDPOINTS[name], body)[0]) is None


def test_rows_of_another_endpoint_or_beyond_the_servers_size_of_one_go_alone():
    (row,) = texts(1)
    assert packing("embeddings").key(row) == ("embeddings", "m", "model", '"m"')
    assert packing("completions").key(row) is None
    row.tokens = 8_193
    assert packing("embeddings").key(row) is None
    assert packing("embeddings", max_row_tokens=None).key(row) is not None


@pytest.mark.parametrize(
    ("name", "body", "change"),
    [
        ("embeddings", {"model": "m", "input": "a"}, {"dimensions": 2}),
        ("completions", {"model": "m", "prompt": "a"}, {"n": 2}),
        ("vllm-chat", CHAT, {"temperature": 0}),
        ("gateway-chat", CHAT, {"max_tokens": 5}),
    ],
)
def test_rows_share_a_call_only_if_they_agree_on_what_it_states_once(name, body, change):
    key = packing(name).key
    plain, other = rows(ENDPOINTS[name], body, body | change)
    reordered = rows(ENDPOINTS[name], dict(reversed(body.items())))[0]
    assert key(plain) == key(reordered) != key(other)
    assert key(other) is not None


def test_a_gateways_batch_requests_state_their_own_limits():
    key = packing("gateway-batch").key
    assert {key(row) for row in rows("chat", CHAT, CHAT | {"max_tokens": 3}, CHAT | {"temperature": 0})} == {
        ("chat", "m")
    }
    asked = rows("completions", {"model": "m", "prompt": "a"})
    assert replace(packing("gateway-batch"), endpoint="completions").key(asked[0]) == ("completions", "m")


any_text = st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable())


@settings(deadline=None)
@given(
    name=st.sampled_from(list(ENDPOINTS)), ids=st.lists(any_text, min_size=2, max_size=6, unique=True), said=any_text
)
def test_a_body_is_never_larger_than_the_sizes_of_its_rows(name, ids, said):
    body = {"embeddings": {"input": said}, "completions": {"prompt": said}}.get(
        name, {"messages": [{"role": "user", "content": said}], "max_tokens": 7}
    )
    asked = tuple(
        Row(n, id_, ENDPOINTS[name], "m", orjson.dumps(body | {"model": "m"}), None) for n, id_ in enumerate(ids)
    )
    assert all(packing(name).key(row) is not None for row in asked)
    request = packed(name).encode(asked)
    assert len(request.content) <= sum(packing(name).size(row) for row in asked)
    sent = orjson.loads(request.content)
    assert said.count("\0") == 0
    assert len(next(value for value in sent.values() if isinstance(value, list))) == len(ids)


# ---------------------------------------------------------------- where


@pytest.mark.parametrize(
    ("preset", "endpoint", "mode", "name", "limits"),
    [
        ("openai", "embeddings", "auto", "embeddings", (2_048, 300_000, 8_192)),
        ("mistral", "embeddings", "auto", "embeddings", (512, 16_384, 8_192)),
        ("sim", "embeddings", "auto", "embeddings", (2_048, 300_000, 8_192)),
        ("ollama", "embeddings", "auto", "embeddings", (256, 32_000, None)),
        ("litellm", "embeddings", "auto", None, None),
        ("litellm", "embeddings", "packed", "embeddings", (2_048, 300_000, None)),
        ("vllm", "completions", "auto", "completions", (1_024, 320_000, None)),
        ("sim", "completions", "auto", "completions", (1_024, 320_000, None)),
        ("together", "completions", "packed", None, None),
        ("openai", "completions", "auto", None, None),
        ("vllm", "chat", "auto", None, None),
        ("vllm", "chat", "packed", "vllm-chat", (1_024, 320_000, None)),
        ("holysheep", "chat", "auto", None, None),
        ("holysheep", "chat", "packed", "gateway-batch", (100, 320_000, None)),
        ("openai", "chat", "packed", None, None),
        ("openai", "responses", "packed", None, None),
        ("anthropic", "messages", "packed", None, None),
    ],
)
def test_calls_are_packed_where_arrays_are_known_to_be_taken(preset, endpoint, mode, name, limits):
    found = packing_for(resolve(preset, None), endpoint, None, mode)
    assert (found and found.name) == name
    if found is not None:
        assert (found.max_rows, found.max_tokens, found.max_row_tokens) == limits
        assert found.max_bytes == 32 * 1024 * 1024


def test_a_named_packing_is_that_one_or_none():
    custom = resolve(None, "http://localhost:9")
    assert packing_for(custom, "embeddings", None, "auto") is None
    for name, endpoint in ENDPOINTS.items():
        found = packing_for(custom, endpoint, name, "auto")
        assert found is not None
        assert found.name == name
    assert packing_for(custom, "embeddings", "completions", "packed") is None
    assert packing_for(resolve("gemini", None), "generate", "embeddings", "packed") is None


# ---------------------------------------------------------------- whose answer is whose


def test_answers_are_matched_by_index_whatever_their_order():
    data = [item(2, 2.5), item(0, 0.5), item(1, 1.5)]
    assert values(answer("embeddings", texts(3), {"data": data})) == {"id-1": [0.5], "id-2": [1.5], "id-3": [2.5]}


def test_results_are_matched_by_custom_id_whatever_their_order():
    results = [{"custom_id": f"id-{n}", "status": "succeeded", "output": {"text": f"a{n}"}} for n in (3, 1, 2)]
    got = answer("gateway-batch", chats(3), {"results": results})
    assert values(got) == {"id-1": "a1", "id-2": "a2", "id-3": "a3"}


def test_a_numeric_id_that_comes_back_as_a_number_is_its_rows():
    first, second = chats(2)
    asked = (replace(first, custom_id="7"), replace(second, custom_id='odd "id"/ü'))
    results = [{"custom_id": 'odd "id"/ü', "output": {"text": "b"}}, {"custom_id": 7, "output": {"text": "a"}}]
    assert values(answer("gateway-batch", asked, {"results": results})) == {"7": "a", 'odd "id"/ü': "b"}


def test_without_any_index_the_order_tells_if_the_count_is_right():
    assert values(answer("embeddings", texts(2), {"data": [item(None, 1), item(None, 2)]})) == {
        "id-1": [1],
        "id-2": [2],
    }
    results = [{"output": {"text": "a"}}, "b", {"text": "c"}, {"message": {"content": "d"}}]
    assert values(answer("gateway-chat", chats(4), {"results": results})) == dict(
        zip(("id-1", "id-2", "id-3", "id-4"), "abcd", strict=True)
    )


def test_missing_answers_are_left_out_and_extra_ones_counted():
    got = answer("embeddings", texts(3), {"data": [item(0, 0), item(2, 2), item(3, 3), item(-1, 4)]})
    assert values(got) == {"id-1": [0], "id-3": [2]}
    assert isinstance(got, Reply)
    assert got.extras == 2
    results = [{"custom_id": "id-2", "output": {"text": "b"}}, {"custom_id": "of nobody", "output": {"text": "x"}}]
    got = answer("gateway-batch", chats(2), {"results": results})
    assert values(got) == {"id-2": "b"}
    assert isinstance(got, Reply)
    assert got.extras == 1


def test_of_two_answers_to_a_row_the_first_counts():
    got = answer("embeddings", texts(3), {"data": [item(1, 1), item(1, 9), item(0, 0), item(2, 2)]})
    assert values(got) == {"id-1": [0], "id-2": [1], "id-3": [2]}
    assert isinstance(got, Reply)
    assert got.extras == 1
    twice = {"custom_id": "id-1", "output": {"text": "a"}}
    got = answer("gateway-batch", chats(2), {"results": [twice, twice]})
    assert values(got) == {"id-1": "a"}


def test_several_answers_to_each_prompt_are_counted_through():
    choices = [choice(index, f"t{index}") for index in (3, 0, 2, 1)]
    got = answer("completions", prompts(2, n=2), {"choices": choices})
    assert values(got) == {"id-1": ["t0", "t1"], "id-2": ["t2", "t3"]}
    assert isinstance(got, Reply)
    alone = orjson.loads(got.outputs["id-2"].body)
    assert [(c["index"], c["text"]) for c in alone["choices"]] == [(0, "t2"), (1, "t3")]


@pytest.mark.parametrize(
    ("name", "asked", "content"),
    [
        ("embeddings", texts(3), {"data": [item(None, 1), item(None, 2)]}),
        ("embeddings", texts(3), {"data": [item(0, 1), item(0, 2), item(0, 3)]}),
        ("completions", prompts(2, n=2), {"choices": [choice(0, "a"), choice(1, "b")]}),
        ("completions", prompts(2, n=2), {"choices": [choice(i, "a") for i in (0, 1, 0, 1)]}),
        ("gateway-chat", chats(3), {"results": ["a", "b"]}),
    ],
)
def test_answers_that_cannot_be_told_apart_are_nobodys(name, asked, content):
    provider = packed(name)
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    fault = answer(name, asked, content | {"usage": usage}, provider=provider)
    assert isinstance(fault, Fault)
    # Rejected, so that the call is halved; processed, so that it is paid for.
    assert (fault.kind, fault.maybe_processed, fault.usage) == ("rejected", True, Usage(9, 3))
    assert provider.only_first
    assert provider.notice == (
        "the server does not say which answer is whose in a call of several rows: going on with one row per call"
    )


@pytest.mark.parametrize(
    ("name", "asked", "content"),
    [
        ("completions", prompts(3), {"choices": [choice(0, "only")]}),
        ("completions", prompts(3), {"choices": [choice(None, "only")]}),
        ("embeddings", texts(3), {"data": [item(0, 1)]}),
        ("gateway-chat", chats(3), {"results": ["only"]}),
    ],
)
def test_a_server_that_answers_only_the_first_row_is_noticed_at_once(name, asked, content):
    provider = packed(name)
    assert not provider.only_first
    got = answer(name, asked, content, provider=provider)
    assert isinstance(got, Reply)
    assert list(got.outputs) == ["id-1"]
    assert provider.only_first
    assert (
        provider.notice == "the server answered only the first row of a call of several: going on with one row per call"
    )


def test_a_server_that_has_answered_several_rows_may_miss_one():
    provider = packed("embeddings")
    answer("embeddings", texts(2), {"data": [item(0, 0), item(1, 1)]}, provider=provider)
    answer("embeddings", texts(2), {"data": [item(0, 0)]}, provider=provider)
    assert not provider.only_first
    assert provider.notice is None
    provider = packed("gateway-batch")
    answer("gateway-batch", chats(2), {"results": [{"custom_id": "id-1", "output": {"text": "a"}}]}, provider=provider)
    assert not provider.only_first  # it names its answers


@pytest.mark.parametrize(
    "bad", [{"status": "failed"}, {"status": "error", "error": {"code": "x"}}, {"error": "no"}, {}]
)
def test_a_result_that_failed_is_left_to_be_asked_alone(bad):
    results = [{"custom_id": "id-1", "status": "succeeded", "output": {"text": "a"}}, {"custom_id": "id-2"} | bad]
    got = answer("gateway-batch", chats(2), {"results": results})
    assert values(got) == {"id-1": "a"}
    assert isinstance(got, Reply)
    assert got.extras == 0


# ---------------------------------------------------------------- what a row's answer looks like

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def test_vectors_keep_their_digits_and_stand_in_a_reply_of_their_own():
    content = (
        b'{"object":"list","model":"m-1","data":[\n{"object":"embedding","index":1,"embedding":[0.10, -1e-07,\n 2]},'
        b'{"object":"embedding","index":0,"embedding":"AAAA=="}],"usage":{"prompt_tokens":4,"total_tokens":4}}\n'
    )
    got = answer("embeddings", texts(2), content, {"x-request-id": "r"})
    assert isinstance(got, Reply)
    assert (got.model, got.request_id, got.usage, got.status) == ("m-1", "r", Usage(4, 0), 200)
    assert got.outputs["id-1"].value == b'"AAAA=="'
    assert got.outputs["id-2"].value == b"[0.10, -1e-07,  2]"
    assert got.outputs["id-2"].body == (
        b'{"object":"list","model":"m-1","data":[{"object":"embedding","index":0,"embedding":[0.10, -1e-07,  2]}],'
        b'"usage":{"prompt_tokens":2,"total_tokens":2}}'
    )
    assert got.outputs["id-2"].usage_shared


def test_a_conversation_of_several_is_read_like_one_alone():
    choices = [
        {"index": 0, "message": {"role": "assistant", "content": None, "refusal": "no"}, "finish_reason": "stop"},
        {"index": 1, "message": {"role": "assistant", "content": '{"a": 1.10}'}, "finish_reason": "length"},
    ]
    reply = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m-1", "choices": choices, "usage": USAGE}
    got = answer("vllm-chat", chats(2, response_format={"type": "json_object"}), reply)
    assert isinstance(got, Reply)
    first, second = got.outputs.values()
    assert (first.value, first.finish_reason) == (b'"no"', "refusal")
    assert (second.value, second.finish_reason) == (b'{"a": 1.10}', "length")
    share = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert orjson.loads(second.body) == reply | {"choices": [choices[1] | {"index": 0}], "usage": share}
    assert got.request_id == "c-1"


def test_a_gateways_result_keeps_its_members_and_gains_choices():
    results = [
        {"custom_id": "id-1", "status": "succeeded", "output": {"text": "a", "finish_reason": "stop"}, "usage": USAGE},
        {"custom_id": "id-2", "choices": [{"index": 0, "message": {"content": "b"}}], "usage": USAGE},
    ]
    got = answer("gateway-batch", chats(2), {"model": "m-1", "results": results})
    assert isinstance(got, Reply)
    body = orjson.loads(got.outputs["id-1"].body)
    assert body == results[0] | {
        "object": "chat.completion",
        "model": "m-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
    }
    for output in got.outputs.values():
        assert (output.usage, output.usage_shared) == (Usage(10, 5), False)
    assert got.usage == Usage(20, 10)
    prompt = rows("completions", {"model": "m", "prompt": "a"}, {"model": "m", "prompt": "b"})
    preset = resolve("openai", None)
    found = packing_for(preset, "completions", "gateway-batch", "packed")
    assert found is not None
    provider = make_packed(make_provider(preset, None), found, preset)
    assert values(answer("", prompt, {"results": results[:1]}, provider=provider)) == {"id-1": "a"}
    assert orjson.loads(provider.encode(prompt).content)["batch_requests"][1] == {"custom_id": "id-2", "prompt": "b"}


@pytest.mark.parametrize("number", [b"1e999", b"1E400", b"[[1e999]]"])
def test_a_vector_that_could_not_be_read_back_is_no_answer(number):
    content = b'{"data":[{"index":0,"embedding":[%b]},{"index":1,"embedding":[1e2,3]}]}' % number
    assert values(answer("embeddings", texts(2), content)) == {"id-2": [100, 3]}


def test_broken_text_in_a_reply_costs_nobody_his_answer():
    content = b'{"choices":[{"index":0,"text":"a\xff"},{"index":1,"text":"b\\ud800"},{"index":2,"text":"c"}]}'
    assert values(answer("completions", prompts(3), content)) == {"id-1": "a\ufffd", "id-2": "b\ufffd", "id-3": "c"}


# ---------------------------------------------------------------- what it used

counts = st.integers(0, 10**9)
weights = st.lists(st.integers(0, 10**6), min_size=1, max_size=40)


@given(counts, weights)
def test_shares_add_up_and_are_within_one_of_their_due(total, weights):
    parts = shares(total, weights)
    whole = sum(weights) or len(weights)
    due = weights if sum(weights) else [1] * len(weights)
    assert sum(parts) == total
    assert all(abs(part * whole - total * weight) < whole for part, weight in zip(parts, due, strict=True))


@given(counts, counts, st.data(), weights)
def test_the_shares_of_usage_add_up_field_by_field(given_, said, data, weights):
    cached = data.draw(st.integers(0, given_))
    written = data.draw(st.integers(0, given_ - cached))
    usage = Usage(given_, said, cached, written, data.draw(st.integers(0, said)))
    outputs = data.draw(st.lists(st.integers(0, 1000), min_size=len(weights), max_size=len(weights)))
    parts = share_usage(usage, weights, outputs)
    for field in ("input_tokens", "output_tokens", "cached_tokens", "cache_write_tokens", "reasoning_tokens"):
        assert sum(getattr(part, field) for part in parts) == getattr(usage, field)
    assert all(part.cached_tokens + part.cache_write_tokens <= part.input_tokens for part in parts)
    assert all(0 <= part.reasoning_tokens <= part.output_tokens for part in parts)


@given(st.decimals(0, 10**6, places=9) | st.decimals(0, 100, places=20), weights)
def test_the_shares_of_a_cost_add_up_to_the_last_digit(cost, weights):
    parts = share_cost(cost, weights)
    assert sum(parts, Decimal(0)) == cost
    assert all(part >= 0 for part in parts)


def test_what_is_no_cost_is_not_shared():
    for nonsense in (Decimal("NaN"), Decimal(-1)):
        with pytest.raises(ValueError, match="is no cost"):
            share_cost(nonsense, [1])


def test_usage_and_cost_of_a_call_are_shared_by_the_rows_sizes():
    asked = prompts(3)
    for row, tokens in zip(asked, (1, 2, 3), strict=True):
        row.tokens = tokens
    choices = [choice(0, "a"), choice(1, "b"), choice(2, "c")]
    usage = {"prompt_tokens": 13, "completion_tokens": 9, "total_tokens": 22, "cost": 0.00000001}
    got = answer("completions", asked, {"choices": choices, "usage": usage})
    assert isinstance(got, Reply)
    assert [output.usage for output in got.outputs.values()] == [Usage(2, 3), Usage(4, 3), Usage(7, 3)]
    assert [output.usage_shared for output in got.outputs.values()] == [True] * 3
    assert got.usage == Usage(13, 9)
    assert sum(output.cost_usd for output in got.outputs.values() if output.cost_usd) == Decimal("0.00000001")
    header = {"x-litellm-response-cost": "0.3"}
    costs = [output.cost_usd for output in answer("completions", asked, {"choices": choices}, header).outputs.values()]
    assert costs == [Decimal("0.05"), Decimal("0.1"), Decimal("0.15")]


def test_what_is_not_told_stays_unknown():
    got = answer("embeddings", texts(2), {"data": [item(0, 0), item(1, 1)]})
    assert isinstance(got, Reply)
    assert got.usage is None
    assert [(o.usage, o.usage_shared, o.cost_usd) for o in got.outputs.values()] == [(None, False, None)] * 2
    told = {"custom_id": "id-1", "output": {"text": "a"}, "usage": USAGE}
    untold = {"custom_id": "id-2", "output": {"text": "b"}}
    got = answer("gateway-batch", chats(2), {"results": [told, untold]})
    assert isinstance(got, Reply)
    assert [o.usage for o in got.outputs.values()] == [Usage(10, 5), None]
    assert got.usage is None


# ---------------------------------------------------------------- trouble


def refused(status: int, message: str, code: str | None = None, name="embeddings", provider=None) -> Fault:
    body = orjson.dumps({"error": {"message": message, "type": "invalid_request_error", "code": code}})
    asked = texts(2) if name == "embeddings" else prompts(2)
    fault = (provider or packed(name)).decode(asked, HttpResponse(status, {}, body))
    assert isinstance(fault, Fault)
    return fault


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (413, "Payload too large", None),
        (400, "Requested 300123 tokens, max 300000 tokens per request", "max_tokens_per_request"),
        (400, "Invalid 'input': array too long. Expected an array with maximum length 2048", None),
        (400, "Too many tokens in batch. Max is 16384 got 17555", None),
        (400, "Too many inputs in request, split into more batches.", "3210"),
        (429, "Request too large for m: Limit 1000, Requested 2000", "rate_limit_exceeded"),
    ],
)
def test_a_call_that_is_too_large_says_so(status, message, code):
    assert refused(status, message, code).kind == "too_large"


def test_other_refusals_are_what_they_are_for_one_row():
    assert refused(400, "This model's maximum context length is 8192 tokens").kind == "rejected"
    assert refused(422, "bad input").kind == "rejected"
    assert refused(429, "slow down", "rate_limit_exceeded").kind == "rate_limited"
    assert refused(401, "no such key").stop == "auth"
    assert refused(503, "busy").maybe_processed is False
    nowhere = packed("gateway-batch").decode(chats(2), HttpResponse(404, {}, b"not found"))
    assert isinstance(nowhere, Fault)
    assert nowhere.kind == "fatal"
    assert "https://api.openai.com/v1/batch" in nowhere.detail


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b"{}", b'{"data":[]}', b'{"data":{}}', b'{"data":[1]}'])
def test_a_200_without_answers_is_garbled(content):
    fault = packed("embeddings").decode(texts(2), HttpResponse(200, {}, content))
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.maybe_processed) == ("garbled", True)


def test_an_error_inside_a_200_is_an_error():
    error = {"error": {"message": "slow", "code": 429}, "usage": {"prompt_tokens": 1, "total_tokens": 1}}
    fault = answer("vllm-chat", chats(2), error)
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.detail) == ("rate_limited", "slow")


def test_a_server_that_fails_on_arrays_is_noticed_when_the_same_rows_fail_again():
    provider = packed("completions")
    first = refused(500, "oops", name="completions", provider=provider)
    assert (first.kind, provider.only_first) == ("overloaded", False)
    again = refused(500, "oops", name="completions", provider=provider)
    assert (again.kind, again.maybe_processed) == ("rejected", True)  # so that the call is halved
    assert provider.notice == "the server fails on calls of several rows: going on with one row per call"


def test_a_server_that_has_answered_several_rows_only_has_an_outage():
    provider = packed("embeddings")
    answer("embeddings", texts(2), {"data": [item(0, 0), item(1, 1)]}, provider=provider)
    assert [refused(500, "oops", provider=provider).kind for _ in range(3)] == ["overloaded"] * 3
    assert not provider.only_first


shaped = st.fixed_dictionaries(
    {},
    optional={
        "data": st.lists(st.fixed_dictionaries({}, optional={"embedding": documents, "index": st.integers(-1, 3)}))
        | documents,
        "choices": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "text": documents,
                    "message": st.fixed_dictionaries({}, optional={"content": documents}),
                    "index": st.integers(-1, 3),
                },
            )
        )
        | documents,
        "results": st.lists(
            st.text(max_size=3)
            | st.fixed_dictionaries(
                {},
                optional={
                    "custom_id": st.sampled_from(["id-1", "id-2", "id-3"]) | documents,
                    "status": documents,
                    "output": st.fixed_dictionaries({}, optional={"text": documents}) | documents,
                    "text": documents,
                    "message": documents,
                    "usage": documents,
                },
            )
        )
        | documents,
        "usage": st.just(USAGE) | documents,
        "error": st.none() | documents,
        "model": documents,
    },
)


@pytest.mark.parametrize("name", ENDPOINTS)
@settings(deadline=None, max_examples=200)
@given(
    status=st.just(200) | st.integers(100, 999),
    headers=headers_of,
    content=shaped.map(lambda doc: json.dumps(doc).encode())
    | shaped.map(lambda doc: json.dumps(doc).encode()).flatmap(lambda b: st.integers(0, len(b)).map(lambda n: b[:n]))
    | st.binary(max_size=50),
)
def test_decoding_never_raises_and_what_it_returns_can_be_kept(name, status, headers, content):
    asked = {"embeddings": texts(3), "completions": prompts(3)}.get(name, chats(3))
    got = packed(name).decode(asked, HttpResponse(status, headers, content))
    if isinstance(got, Fault):
        assert got.detail
        assert len(got.body) <= 2048
        return
    assert set(got.outputs) <= {row.custom_id for row in asked}
    for output in got.outputs.values():
        for line in (output.value, output.body):
            assert b"\n" not in line
            assert b"\r" not in line
            orjson.loads(b'{"response":{"body":' + line + b"}}")
        assert output.cost_usd is None or output.cost_usd >= 0
    used = [output.usage for output in got.outputs.values() if output.usage_shared]
    if used:
        assert got.usage is not None
        assert sum(usage.input_tokens for usage in used if usage) == got.usage.input_tokens
        assert sum(usage.output_tokens for usage in used if usage) == got.usage.output_tokens


# ---------------------------------------------------------------- over the wire, and simulated


async def ask(url: str, name: str, asked: tuple[Row, ...]) -> tuple[HttpRequest, Reply | Fault]:
    preset = resolve(None, url)
    found = packing_for(preset, asked[0].endpoint, name, "packed")
    assert found is not None
    provider = make_packed(make_provider(preset, None), found, preset)
    client = Client(Http1Transport())
    request = provider.encode(asked)
    response = await client.send(request, 5.0)
    await client.aclose()
    assert isinstance(response, HttpResponse), response
    return request, provider.decode(asked, response)


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_shape_goes_over_the_wire_and_comes_back_to_its_own_row(name):
    asked: tuple[Row, ...]
    expected: Callable[[int], object]
    if name == "embeddings":
        asked, expected = texts(5), lambda n: vector(f"text {n}")
    elif name == "completions":
        asked, expected = prompts(5, n=2), lambda n: [f"echo:prompt {n}"] * 2
    else:
        asked, expected = chats(5, max_tokens=9), lambda n: f"echo:q{n}"
    with FaultServer() as server:
        _, got = asyncio.run(ask(server.url, name, asked))
        assert values(got) == {f"id-{n + 1}": expected(n) for n in range(5)}
        assert len(server.requests) == 1
        assert len(server.seen) == 5
        assert isinstance(got, Reply)
        assert got.usage is not None
        used = [output.usage for output in got.outputs.values() if output.usage]
        assert sum(usage.input_tokens for usage in used) == got.usage.input_tokens


async def simulated(name: str, asked: tuple[Row, ...], **settings) -> Reply | Fault:
    preset = resolve("sim", None)
    found = packing_for(preset, asked[0].endpoint, name, "packed")
    assert found is not None
    provider = make_packed(make_provider(preset, None), found, preset)
    transport = SimTransport(SimSettings(latency_s=0.0, **settings))
    request = provider.encode(asked)
    response = await transport.handle_async_request(
        httpx.Request(request.method, request.url, headers=request.headers, content=request.content)
    )
    return provider.decode(asked, HttpResponse(response.status_code, dict(response.headers), response.content))


@pytest.mark.parametrize("name", ENDPOINTS)
def test_the_simulator_knows_every_shape_and_a_rows_answer_does_not_depend_on_its_company(name):
    asked = {"embeddings": texts(8), "completions": prompts(8, n=2)}.get(name, chats(8, max_tokens=3))
    together = values(asyncio.run(simulated(name, asked)))
    halves = values(asyncio.run(simulated(name, asked[:4]))) | values(asyncio.run(simulated(name, asked[4:])))
    assert together == halves
    assert len(together) == 8
    assert len({str(value) for value in together.values()}) > 1


def test_the_simulator_charges_every_rows_limit_and_fails_a_call_as_a_whole():
    asked = chats(10, max_tokens=100)
    for name in ("gateway-batch", "gateway-chat", "vllm-chat"):
        got = asyncio.run(simulated(name, asked, tpm=100_000))
        assert isinstance(got, Reply)
        assert got.quotas is not None
        assert got.quotas.tokens is not None
        prompt_tokens = len(packed(name).encode(asked).content) // 4
        assert got.quotas.tokens.remaining == 100_000 - 10 * 100 - prompt_tokens
    for seed in range(5):
        with contextlib.suppress(httpx.ReadError):  # a third of them
            assert isinstance(asyncio.run(simulated("gateway-batch", asked, error_rate=1.0, seed=seed)), Fault)
