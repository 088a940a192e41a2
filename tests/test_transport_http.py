"""What one attempt gives, whatever the server does: a reply, or a Fault that says if it may have been billed."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest
import uvloop

from batchrun.records import Fault, HttpRequest, HttpResponse
from batchrun.run import http1, transport
from batchrun.run.transport import Client, Http1Transport
from tests.faults.server import FaultServer, Reply

KEY = b"sk-sentinel-0123456789"
HEADERS = ((b"authorization", b"Bearer " + KEY), (b"content-type", b"application/json"))
CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
LONG_S = 5.0

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on each of the loops that we support."""
    return uvloop.run if request.param == "uvloop" else asyncio.run


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


def chat(url: str, body: bytes = CHAT) -> HttpRequest:
    return HttpRequest(f"{url}/v1/chat/completions", HEADERS, body)


async def send(
    server: FaultServer | str, timeout_s: float = LONG_S, body: bytes = CHAT, times: int = 1
) -> HttpResponse | Fault:
    """Sends the same request so many times, one after the other, and returns what the last one gave."""
    client = Client(Http1Transport())
    url = server if isinstance(server, str) else server.url
    results = [await client.send(chat(url, body), timeout_s) for _ in range(times)]
    await client.aclose()
    for result in results:
        assert KEY.decode() not in repr(result)
    return results[-1]


def replied(result: HttpResponse | Fault) -> HttpResponse:
    assert isinstance(result, HttpResponse), result
    return result


def failed(result: HttpResponse | Fault) -> tuple[str, bool, bool]:
    """Kind, connected, maybe_processed."""
    assert isinstance(result, Fault), result
    assert result.detail
    return result.kind, result.connected, result.maybe_processed


LOST = ("network", True, True)
LATE = ("timeout", True, True)
GARBLED = ("garbled", True, True)
UNSENT = ("network", False, False)


# ---------------------------------------------------------------- replies


def test_a_request_arrives_byte_for_byte_and_its_reply_comes_back(run, server):
    body = b'{"model":"m","messages":[{"role":"user","content":"\xc3\xbc"}],"seed":12345678901234567890.10}'
    response = replied(run(send(server, body=body)))
    (seen,) = server.requests
    assert (seen.method, seen.path, seen.body) == ("POST", "/v1/chat/completions", body)
    assert seen.headers["authorization"] == "Bearer " + KEY.decode()
    assert seen.headers["host"] == f"127.0.0.1:{server.port}"
    assert seen.headers["content-length"] == str(len(body))
    assert seen.headers["accept-encoding"] == "gzip, deflate"
    assert response.status == 200
    assert "echo:ü" in response.content.decode("unicode-escape")
    assert response.headers["x-request-id"] == "req_1"


@pytest.mark.parametrize("status", [302, 400, 401, 404, 429, 500, 503, 529])
def test_every_status_is_a_reply_with_its_headers_and_body(run, server, status):
    server.script([Reply(status, {"error": "why"}, {"Retry-After": "3", "X-Odd": "\xe9"})])
    response = replied(run(send(server)))
    assert (response.status, response.content) == (status, b'{"error": "why"}')
    assert response.headers["retry-after"] == "3"
    assert response.headers["x-odd"] == "\xe9"


def test_a_redirect_is_not_followed_and_the_key_stays(run, server):
    with FaultServer() as elsewhere:
        server.script([Reply(307, headers={"location": f"{elsewhere.url}/v1/chat/completions"})])
        response = replied(run(send(server)))
        assert response.headers["location"].startswith(elsewhere.url)
        assert (response.status, elsewhere.connections) == (307, 0)


def test_cookies_are_not_kept(run, server):
    server.script([Reply(headers={"set-cookie": "session=1"})])
    run(send(server, times=2))
    assert "cookie" not in server.requests[1].headers


def test_proxies_of_the_environment_are_ignored(run, server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert replied(run(send(server))).status == 200


def test_interim_replies_are_skipped(run, server):
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    server.script([Reply(raw=interim + HEAD + b"content-length: 2\r\n\r\n{}")])
    response = replied(run(send(server, times=2)))
    assert response.status == 200
    assert server.connections == 1


def test_chunks_are_joined_and_trailers_dropped(run, server):
    server.script(
        [Reply(raw=HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\nx-late: 1\r\n\r\n")]
    )
    response = replied(run(send(server)))
    assert response.content == b"{}"
    assert "x-late" not in response.headers


@pytest.mark.parametrize("head", [HEAD, HEAD + b"connection: close\r\n", HEAD.replace(b"1.1", b"1.0")])
def test_a_reply_without_a_length_ends_with_the_connection(run, server, head):
    server.script([Reply(raw=head + b"\r\n{}", end="close")])
    assert replied(run(send(server))).content == b"{}"


def test_a_reply_without_a_length_is_not_ended_by_a_reset(run, server):
    server.script([Reply(raw=HEAD + b"\r\n{}", delay_s=0.01, end="reset")])
    assert failed(run(send(server))) == LOST


def test_headers_repeated_are_all_seen_by_httpx_and_the_last_one_by_codecs(run, server):
    server.script([Reply(raw=HEAD + b"x-a: 1\r\nX-A: 2\r\ncontent-length: 2\r\n\r\n{}")])
    assert replied(run(send(server))).headers["x-a"] == "2"


def test_an_ordinary_httpx_client_can_use_the_transport(run, server):
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=Http1Transport(), base_url=server.url) as client:
            return await client.post("/v1/chat/completions", content=CHAT)

    assert run(main()).json()["choices"][0]["message"]["content"] == "echo:hi"


# ---------------------------------------------------------------- compressed replies


def compressed(encoding: str, data: bytes) -> Reply:
    return Reply(body=data, headers={"content-encoding": encoding})


RAW_DEFLATE = zlib.compress(b'{"a":1}', wbits=-15)


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(b'{"a":1}')),
        ("GZIP", gzip.compress(b'{"a"') + gzip.compress(b":1}")),
        ("deflate", zlib.compress(b'{"a":1}')),
        ("deflate", RAW_DEFLATE),
        ("identity", b'{"a":1}'),
    ],
)
def test_compressed_replies_are_decoded(run, server, encoding, data):
    server.script([compressed(encoding, data)])
    assert replied(run(send(server))).content == b'{"a":1}'


@pytest.mark.parametrize(
    ("encoding", "data"),
    [("gzip", gzip.compress(b'{"a":1}')[:-9]), ("gzip", b'{"a":1}'), ("deflate", b"\xff" * 9), ("br", b"\x00")],
)
def test_what_does_not_decode_is_garbled(run, server, encoding, data):
    server.script([compressed(encoding, data)])
    assert failed(run(send(server))) == GARBLED


def test_an_empty_body_may_call_itself_gzip(run, server):
    server.script([compressed("gzip", b"")])
    assert replied(run(send(server))).content == b""


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_cut_at_the_cap(run, server, encoding):
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    server.script([compressed(encoding, bomb)])
    assert failed(run(send(server))) == GARBLED


def test_a_decoder_never_holds_more_than_its_cap():
    decoder = http1.Decoder(b"gzip", 1000)
    bomb = gzip.compress(bytes(1 << 20))
    assert sum(len(decoder.feed(bomb[at : at + 7])) for at in range(0, len(bomb), 7)) == 1001


# ---------------------------------------------------------------- replies without an end


def test_an_endless_body_is_cut_at_the_cap(run, server):
    server.script([Reply(raw=HEAD + b"\r\n", endless=bytes(1 << 18))])
    assert failed(run(send(server))) == GARBLED


@pytest.mark.parametrize(
    ("raw", "endless"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n" * 512),
        (b"HTTP/1.1 200 OK\r\nx-a: ", b"b" * 4096),
        (b"HTTP/1.1 ", b"2" * 4096),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 64),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"x-a: b\r\n" * 512),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2;", b"x" * 4096),
    ],
)
def test_endless_heads_and_framing_are_cut(run, server, raw, endless):
    server.script([Reply(raw=raw, endless=endless)])
    assert failed(run(send(server))) == GARBLED


@pytest.mark.parametrize(
    "raw",
    [
        b"<html>no</html>",
        b"\x16\x03\x01\x02\x00",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_what_is_no_http_is_garbled(run, server, raw):
    server.script([Reply(raw=raw, end="close")])
    assert failed(run(send(server))) == GARBLED


# ---------------------------------------------------------------- the status outranks the body


def test_an_endless_error_page_is_cut_and_its_status_counts(run, server):
    server.script([Reply(raw=b"HTTP/1.1 503 No\r\nretry-after: 7\r\n\r\n", endless=b"<html>" * 10_000)])
    response = replied(run(send(server)))
    assert (response.status, response.headers["retry-after"]) == (503, "7")
    assert len(response.content) <= http1.MAX_ERROR_BYTES


def test_a_dripping_error_page_does_not_hold_its_slot_for_the_whole_timeout(run, server, monkeypatch):
    monkeypatch.setattr(http1, "ERROR_BODY_S", 0.05)
    server.script([Reply(429, b"x" * 1000, drip_s=0.0), Reply(429, b"", length=9, end="hang")])
    response = replied(run(send(server, times=2)))
    assert (response.status, response.content) == (429, b"")


@pytest.mark.parametrize(
    "reply",
    [
        Reply(500, b"oops", length=9, end="close"),
        Reply(500, b"oops", length=9, delay_s=0.01, end="reset"),
        Reply(500, b"\x00", {"content-encoding": "br"}),
        Reply(500, b"oops", {"content-encoding": "gzip"}),
    ],
)
def test_an_error_whose_body_is_cut_or_broken_is_still_that_error(run, server, reply):
    server.script([reply])
    result = run(send(server))
    # A reset may overtake the bytes before it: then nobody knows the status.
    assert (isinstance(result, Fault) and reply.end == "reset") or replied(result).status == 500


# ---------------------------------------------------------------- connections that are lost


@pytest.mark.parametrize(
    "reply",
    [
        Reply(raw=b"", end="close"),
        Reply(raw=b"", end="reset"),
        Reply(raw=HEAD, end="close"),
        Reply(body=b"{}", length=3, end="close"),
        Reply(body=b"{}", length=3, delay_s=0.01, end="reset"),
        Reply(raw=HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", end="close"),
    ],
)
def test_a_connection_lost_before_the_replys_end_may_have_been_billed(run, server, reply):
    server.script([reply])
    assert failed(run(send(server))) == LOST


def test_a_reset_before_the_request_was_read_is_a_network_fault(run, server):
    server.reset_on_accept = 100

    async def main() -> list[HttpResponse | Fault]:
        client = Client(Http1Transport())
        results = [await client.send(chat(server.url), LONG_S) for _ in range(100)]
        await client.aclose()
        return results

    # Where the reset came before anything was written, that is known.
    assert {failed(result) for result in run(main())} <= {LOST, UNSENT}
    assert server.requests == []


def test_a_kept_connection_that_dies_at_the_next_request_may_have_been_billed(run, server):
    server.script([None, Reply(raw=b"", end="reset")])
    assert failed(run(send(server, times=2))) == LOST
    assert server.connections == 1


def test_nobody_listening_is_known_to_be_unsent(run):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    assert failed(run(send(f"http://127.0.0.1:{port}"))) == UNSENT


def test_after_an_outage_the_same_client_goes_on(run, server):
    async def main() -> None:
        client = Client(Http1Transport())
        assert replied(await client.send(chat(server.url), LONG_S)).status == 200
        server.go_down()
        assert failed(await client.send(chat(server.url), LONG_S))[0] == "network"
        assert failed(await client.send(chat(server.url), LONG_S)) == UNSENT
        server.come_up()
        assert replied(await client.send(chat(server.url), LONG_S)).status == 200
        await client.aclose()

    run(main())


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_a_name_that_does_not_resolve_is_unsent(monkeypatch, error):
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    result = asyncio.run(send("http://nowhere.invalid"))
    assert failed(result) == UNSENT
    assert "nowhere.invalid" in result.detail


@pytest.mark.parametrize("polite", [True, False])
def test_a_large_body_that_is_refused_early_gives_the_refusal_or_a_lost_connection(run, polite):
    """A server may say 413 before it has read everything; if it then leaves at once, the reset may win."""

    def refuse() -> None:
        sock, _ = listening.accept()
        sock.recv(65_536)
        sock.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        while polite and sock.recv(1 << 20):
            pass
        sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=refuse)
        thread.start()
        result = run(send(f"http://127.0.0.1:{listening.getsockname()[1]}", body=bytes(20_000_000)))
        thread.join()
    if polite or isinstance(result, HttpResponse):
        assert replied(result).status == 413
    else:
        assert failed(result) == LOST


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize(
    "reply",
    [
        Reply(raw=b"", end="hang"),
        Reply(raw=HEAD, end="hang"),
        Reply(body=b"{}", length=3, end="hang"),
        Reply(body=b"{}" * 1000, drip_s=0.005),
        Reply(raw=b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 1000, drip_s=0.005),
    ],
)
def test_silence_and_dripping_end_at_the_deadline_of_the_whole_attempt(run, server, reply):
    server.script([reply])
    assert failed(run(send(server, timeout_s=0.2))) == LATE


def test_a_request_that_could_not_be_written_in_time_was_not_processed(run):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        result = run(send(f"http://127.0.0.1:{deaf.getsockname()[1]}", 0.1, body=bytes(20_000_000)))
    assert failed(result) == ("timeout", True, False)


def deaf_address() -> tuple[list[socket.socket], tuple[str, int]]:
    """Returns an address at which connecting takes for ever: its backlog is full."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for sock in waiting:
        sock.setblocking(False)
        sock.connect_ex(listening.getsockname())
    return [listening, *waiting], listening.getsockname()


def test_connecting_is_bounded_and_known_to_be_unsent(run, monkeypatch):
    monkeypatch.setattr(transport, "CONNECT_S", 0.1)
    sockets, (host, port) = deaf_address()
    assert failed(run(send(f"http://{host}:{port}"))) == UNSENT
    for sock in sockets:
        sock.close()


def test_an_address_that_does_not_answer_gives_way_and_is_tried_last_from_then_on(run, server, monkeypatch):
    monkeypatch.setattr(transport, "NEXT_ADDRESS_S", 0.05)
    sockets, deaf = deaf_address()
    good = ("127.0.0.1", server.port)

    async def main() -> list[Any]:
        http = Http1Transport()
        origin = (False, "many.invalid", 80)
        addresses = [deaf, good]
        http._addresses[origin] = (float("inf"), addresses)
        assert replied(await Client(http).send(chat("http://many.invalid"), LONG_S)).status == 200
        await http.aclose()
        return addresses

    assert run(main()) == [good, deaf]
    for sock in sockets:
        sock.close()


def test_replies_that_came_while_the_process_was_stopped_are_not_timeouts(run, server, monkeypatch):
    monkeypatch.setattr(http1, "OVERSLEPT_S", 0.05)
    server.script(lambda *_: Reply(hold=True))

    async def main() -> list[HttpResponse | Fault]:
        client = Client(Http1Transport())
        sends = [asyncio.ensure_future(client.send(chat(server.url), 0.2)) for _ in range(20)]
        await asyncio.to_thread(server.wait_for_requests, 20)
        server.release()
        time.sleep(0.3)  # noqa: ASYNC251 - the loop stands still, as under SIGSTOP
        results = await asyncio.gather(*sends)
        await client.aclose()
        return results

    assert [replied(result).status for result in run(main())] == [200] * 20


def test_a_deadline_missed_by_sleep_still_ends_the_attempt_after_a_grace(run, server, monkeypatch):
    monkeypatch.setattr(http1, "OVERSLEPT_S", 0.02)
    monkeypatch.setattr(http1, "GRACE_S", 0.05)
    server.script([Reply(raw=b"", end="hang")])

    async def main() -> HttpResponse | Fault:
        attempt = asyncio.ensure_future(send(server, timeout_s=0.2))
        await asyncio.to_thread(server.wait_for_requests, 1)
        time.sleep(0.25)  # noqa: ASYNC251 - the loop stands still, as under SIGSTOP
        return await attempt

    assert failed(run(main())) == LATE


# ---------------------------------------------------------------- requests that are never sent


@pytest.mark.parametrize("value", [b"a\r\nx-evil: 1", b"a\nb", b"a\rb", b"a\0b"])
def test_a_header_cannot_begin_another_line(run, server, value):
    async def main() -> HttpResponse | Fault:
        client = Client(Http1Transport())
        result = await client.send(HttpRequest(server.url, ((b"authorization", value),), b"{}"), LONG_S)
        await client.aclose()
        return result

    result = run(main())
    assert failed(result) == ("fatal", False, False)
    assert server.connections == 0
    assert "evil" not in result.detail


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://[::1", "127.0.0.1:80"])
def test_an_address_that_is_none_stops_the_run(run, url):
    result = run(send(url))
    assert failed(result) == ("fatal", False, False)
    assert isinstance(result, Fault)
    assert result.stop == "account"
