"""Connections: as many as calls in flight, kept and reused while they are good, never left behind."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import httpx
import pytest
import uvloop

from batchrun.records import Fault, HttpRequest, HttpResponse
from batchrun.run import transport
from batchrun.run.transport import Client, Http1Transport, fd_budget
from tests.faults.server import FaultServer, Reply

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on each of the loops that we support."""
    return uvloop.run if request.param == "uvloop" else asyncio.run


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


async def ask(client: Client, server: FaultServer) -> HttpResponse | Fault:
    return await client.send(HttpRequest(f"{server.url}/v1/chat/completions", (), CHAT), 5.0)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for the server's thread; the suite's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - it happens on another thread
        await asyncio.sleep(0.001)


def statuses(results: list[HttpResponse | Fault]) -> list[int | None]:
    return [result.status for result in results]


def test_every_call_in_flight_has_a_connection_and_the_next_ones_reuse_them(run, server):
    server.script(lambda *_: Reply(hold=True))

    async def main() -> None:
        client = Client(Http1Transport())
        wave = [asyncio.ensure_future(ask(client, server)) for _ in range(300)]
        await until(lambda: server.max_in_flight == 300)
        server.release()
        assert statuses(await asyncio.gather(*wave)) == [200] * 300
        assert statuses(await asyncio.gather(*(ask(client, server) for _ in range(300)))) == [200] * 300
        await client.aclose()

    run(main())
    assert (server.connections, len(server.requests)) == (300, 600)


def test_calls_one_after_the_other_share_the_connection_used_last(run, server):
    async def main() -> None:
        client = Client(Http1Transport())
        await asyncio.gather(*(ask(client, server) for _ in range(5)))
        for _ in range(5):
            await ask(client, server)
        await client.aclose()

    run(main())
    assert len({request.connection for request in server.requests[-5:]}) == 1


def test_connections_unused_for_long_are_closed(run, server, monkeypatch):
    monkeypatch.setattr(transport, "IDLE_S", 0.05)

    async def main() -> None:
        client = Client(Http1Transport())
        await asyncio.gather(*(ask(client, server) for _ in range(5)))
        opened = server.connections
        await asyncio.sleep(0.1)
        await ask(client, server)
        assert server.connections == opened + 1
        await until(lambda: server.open_connections == 1)
        await client.aclose()

    run(main())


@pytest.mark.parametrize("farewell", [b"", b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"])
def test_a_connection_that_the_server_closed_is_not_used_even_before_the_loop_has_noticed(run, server, farewell):
    async def main() -> list[HttpResponse | Fault]:
        client = Client(Http1Transport())
        results = [await ask(client, server)]
        (peer,) = server._clients
        server._loop.call_soon_threadsafe(peer.transport.write, farewell)
        server._loop.call_soon_threadsafe(peer.transport.close)
        while server.open_connections:
            time.sleep(0.001)  # noqa: ASYNC251 - the loop must not see the end come
        results.append(await ask(client, server))
        await client.aclose()
        return results

    assert statuses(run(main())) == [200, 200]
    assert [request.connection for request in server.requests] == [1, 2]


@pytest.mark.parametrize(
    "reply",
    [
        Reply(headers={"connection": "close"}),
        Reply(raw=b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}"),
        Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}" * 2),
        Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP"),
    ],
)
def test_a_connection_with_anything_left_over_is_not_used_again(run, server, reply):
    server.script([reply])

    async def main() -> list[HttpResponse | Fault]:
        client = Client(Http1Transport())
        results = [await ask(client, server), await ask(client, server)]
        await client.aclose()
        return results

    results = run(main())
    assert statuses(results) == [200, 200]
    assert server.connections == 2


def test_a_connection_on_which_an_idle_server_speaks_is_closed(run, server):
    async def main() -> None:
        client = Client(Http1Transport())
        await ask(client, server)
        (peer,) = server._clients
        server._loop.call_soon_threadsafe(peer.transport.write, b"HTTP/1.1 408 Late\r\ncontent-length: 0\r\n\r\n")
        await until(lambda: server.open_connections == 0)
        assert statuses([await ask(client, server)]) == [200]
        await client.aclose()

    run(main())
    assert server.connections == 2


def test_a_cancelled_call_closes_its_connection(run, server):
    server.script([Reply(hold=True)])

    async def main() -> None:
        client = Client(Http1Transport())
        call = asyncio.ensure_future(ask(client, server))
        await until(lambda: server.in_flight == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: server.open_connections == 0)
        assert statuses([await ask(client, server)]) == [200]
        await client.aclose()

    run(main())
    assert [request.connection for request in server.requests] == [1, 2]


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_a_cancel_scope_that_ends_closes_the_connection(server, use_uvloop):
    server.script([Reply(hold=True)])

    async def main() -> None:
        client = Client(Http1Transport())
        with anyio.move_on_after(0.1) as scope:
            await ask(client, server)
        assert scope.cancelled_caught
        await until(lambda: server.open_connections == 0)
        assert statuses([await ask(client, server)]) == [200]
        await client.aclose()

    anyio.run(main, backend_options={"use_uvloop": use_uvloop})


def test_a_call_cancelled_while_it_connects_leaves_nothing_behind(run, server):
    async def main() -> None:
        http = Http1Transport(limit=1)
        client = Client(http)
        call = asyncio.ensure_future(ask(client, server))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert statuses([await ask(client, server)]) == [200]
        await client.aclose()

    run(main())


def test_closing_ends_what_is_under_way_as_faults_and_leaves_no_connection(run, server):
    server.script(lambda *_: Reply(raw=b"HTTP/1.1 200 OK\r\n\r\n{", end="hang"))

    async def main() -> list[HttpResponse | Fault]:
        client = Client(Http1Transport())
        calls = [asyncio.ensure_future(ask(client, server)) for _ in range(10)]
        await until(lambda: server.in_flight == 10)
        await asyncio.sleep(0.01)
        await client.aclose()
        await until(lambda: server.open_connections == 0)
        return await asyncio.gather(*calls)

    for result in run(main()):
        assert isinstance(result, Fault)
        assert (result.kind, result.maybe_processed) == ("network", True)


def test_the_limit_refuses_a_connection_more_unsent(run, server):
    server.script([Reply(hold=True)] * 2)

    async def main() -> None:
        client = Client(Http1Transport(limit=2))
        calls = [asyncio.ensure_future(ask(client, server)) for _ in range(2)]
        await until(lambda: server.in_flight == 2)
        refused = await ask(client, server)
        assert isinstance(refused, Fault)
        assert (refused.kind, refused.connected, refused.maybe_processed) == ("network", False, False)
        server.release()
        assert statuses(await asyncio.gather(*calls)) == [200, 200]
        assert statuses([await ask(client, server)]) == [200]
        await client.aclose()

    run(main())
    assert server.max_in_flight == 2


def test_a_hundred_failures_do_not_use_up_the_limit(run, server):
    server.script([Reply(raw=b"", end="reset")] * 100)

    async def main() -> list[HttpResponse | Fault]:
        client = Client(Http1Transport(limit=1))
        results = [await ask(client, server) for _ in range(101)]
        await client.aclose()
        return results

    assert statuses(run(main())) == [None] * 100 + [200]


def test_two_origins_do_not_share_connections(run, server):
    async def main(other: FaultServer) -> None:
        client = Client(Http1Transport())
        for target in (server, other, server, other):
            await ask(client, target)
        await client.aclose()

    with FaultServer() as other:
        run(main(other))
        assert (server.connections, other.connections) == (1, 1)
        assert (len(server.requests), len(other.requests)) == (2, 2)


def test_the_limit_on_open_files_is_raised_or_lowers_the_limit_on_connections(monkeypatch):
    limits = [256, 512]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    assert (fd_budget(100), limits[0]) == (100, 256)
    assert (fd_budget(300), limits[0]) == (300, 300 + transport.SPARE_FDS)
    assert (fd_budget(1000), limits[0]) == (512 - transport.SPARE_FDS, 512)
    limits[:] = [256, resource.RLIM_INFINITY]
    assert (fd_budget(5000), limits[0]) == (5000, 5000 + transport.SPARE_FDS)
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert fd_budget(10**6) == 10**6


def test_a_timeout_that_nobody_names_is_the_default(run, server, monkeypatch):
    monkeypatch.setattr(transport, "DEFAULT_S", 0.05)
    server.script([Reply(raw=b"", end="hang")])

    async def main() -> None:
        async with Http1Transport() as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.handle_async_request(httpx.Request("GET", server.url))

    run(main())


def test_idle_connections_of_one_endpoint_make_room_for_another() -> None:
    async def alternate(one: str, two: str) -> list[int]:
        client = Client(Http1Transport(limit=3))
        try:
            statuses = []
            for url in (one, two, one, two):
                request = HttpRequest(f"{url}/v1/chat/completions", (), b'{"messages":[{"content":"x"}]}')
                answers = await asyncio.gather(*(client.send(request, 5.0) for _ in range(3)))
                statuses += [getattr(answer, "status", 0) for answer in answers]
            return statuses
        finally:
            await client.aclose()

    with FaultServer() as one, FaultServer() as two:
        assert asyncio.run(alternate(one.url, two.url)) == [200] * 12


def test_a_job_that_names_many_models_in_its_urls_leaves_no_more_heads_in_memory_than_allowed(run, server, monkeypatch):
    monkeypatch.setattr(transport, "_MAX_TARGETS", 3)

    async def main() -> None:
        http = Http1Transport()
        client = Client(http)
        for model in ("a", "b", "c", "d", "a"):
            request = HttpRequest(f"{server.url}/v1/{model}/chat/completions", ((b"x-model", model.encode()),), CHAT)
            assert isinstance(await client.send(request, 5.0), HttpResponse)
            assert len(http._targets) <= 3
        await client.aclose()

    run(main())
    asked = [(request.path, request.headers["x-model"]) for request in server.requests]
    assert asked == [(f"/v1/{model}/chat/completions", model) for model in ("a", "b", "c", "d", "a")]
