"""The misbehaving server behaves as it says: the other tests' totals stand on its counts."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest

from batchrun.records import Fault, HttpRequest, HttpResponse
from batchrun.run.transport import Client, Http1Transport
from tests.faults.server import FaultServer, Reply, error, vector
from tests.support import wait_until


def post(server: FaultServer, path: str, body: Any) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=5) as response:
        return json.load(response)


async def at_once(server: FaultServer, count: int) -> list[HttpResponse | Fault]:
    client = Client(Http1Transport())
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    request = HttpRequest(f"{server.url}/v1/chat/completions", (), body)
    results = await asyncio.gather(*(client.send(request, 5.0) for _ in range(count)))
    await client.aclose()
    return list(results)


USERS = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a b"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}]


def test_each_endpoint_echoes_what_was_asked():
    with FaultServer() as server:
        for messages in (USERS, PARTS):
            said = post(server, "/v1/chat/completions", {"model": "m", "messages": messages, "n": 2})
            assert [choice["message"]["content"] for choice in said["choices"]] == ["echo:a b"] * 2
            said = post(server, "/v1/messages", {"model": "m", "messages": messages})
            assert said["content"][0]["text"] == "echo:a b"
        said = post(server, "/v1/completions", {"model": "m", "prompt": ["x", "y"]})
        assert [(choice["index"], choice["text"]) for choice in said["choices"]] == [(0, "echo:x"), (1, "echo:y")]
        said = post(server, "/v1/embeddings", {"model": "m", "input": ["x", "yy"]})
        assert [item["embedding"] for item in said["data"]] == [vector("x"), vector("yy")]
        for asked in ("a b", USERS):
            said = post(server, "/v1/responses", {"model": "m", "input": asked})
            assert said["output"][0]["content"][0]["text"] == "echo:a b"
        said = post(server, "/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "a b"}]}]})
        assert said["candidates"][0]["content"]["parts"][0]["text"] == "echo:a b"
        assert server.seen == {"a b": 7, "x": 2, "y": 1, "yy": 1}


def test_it_bills_what_it_worked_on_even_if_the_answer_is_lost():
    with FaultServer() as server:
        server.script([Reply(end="reset", raw=b""), error(429), Reply(500, billed=True), None])
        results = asyncio.run(at_once(server, 1)) + [asyncio.run(at_once(server, 1))[0] for _ in range(3)]
        assert [result.status for result in results] == [None, 429, 500, 200]
        assert [*server.billed.values()] == [3]
        assert [request.repeat for request in server.requests] == [1, 2, 3, 4]
        size = len(server.requests[0].body) // 4
        assert server.billed_tokens == [3 * size, 3]


def test_it_refuses_what_is_beyond_its_limit_in_flight():
    with FaultServer(delay_s=0.05, max_in_flight_allowed=4) as server:
        results = asyncio.run(at_once(server, 20))
        statuses = sorted(result.status or 0 for result in results)
        assert statuses == [200] * 4 + [429] * 16
        assert (server.refused, server.billed.total(), server.in_flight) == (16, 4, 0)


@pytest.mark.parametrize("told", [True, False])
def test_it_keeps_its_quota_of_requests(told):
    with FaultServer(requests_per_s=0.001, burst=3, quota_headers=told) as server:
        results = asyncio.run(at_once(server, 5))
        answered = [result for result in results if isinstance(result, HttpResponse)]
        assert sorted(result.status for result in answered) == [200] * 3 + [429] * 2
        assert all(("retry-after" in result.headers) == (told and result.status == 429) for result in answered)
        assert all(("x-ratelimit-remaining-requests" in result.headers) == told for result in answered)


def test_it_keeps_its_quota_of_tokens():
    with FaultServer(tokens_per_minute=32) as server:  # a request is 15 tokens: 14 in, 1 out
        results = asyncio.run(at_once(server, 4))
        assert sorted(result.status or 0 for result in results) == [200, 200, 429, 429]


def test_an_outage_refuses_connections_and_ends_on_the_same_port():
    with FaultServer() as server:
        url = server.url
        server.go_down()
        assert [result.kind for result in asyncio.run(at_once(server, 2)) if isinstance(result, Fault)] == [
            "network"
        ] * 2
        server.come_up()
        assert server.url == url
        assert [result.status for result in asyncio.run(at_once(server, 2))] == [200, 200]


@pytest.mark.parametrize("reply", [Reply(hold=True), Reply(delay_s=0.05), Reply(hold=True, drip_s=0.0)])
def test_a_client_that_did_not_wait_is_no_trouble_to_it(reply, caplog):
    with FaultServer() as server:
        server.script(lambda request, n: reply)
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}")
            server.wait_for_requests(1)
        wait_until(lambda: server.open_connections == 0)
        server.release()
        wait_until(lambda: not server._playing)
        assert server.in_flight == 0
    gc.collect()  # a task tells of its exception when it goes
    assert caplog.records == []
