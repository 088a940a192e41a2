"""A proxy is used only where it is asked for, carries no more than it must, and is held to the same bounds."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import trustme
import uvloop

from batchrun.errors import BatchrunError
from batchrun.records import Fault, HttpRequest, HttpResponse
from batchrun.run import proxied, transport
from batchrun.run.proxied import EnvironmentTransport, ProxiedTransport, proxy_for
from batchrun.run.transport import Client
from tests.faults.server import FaultServer, Reply, error
from tests.support import KEY, Shell, prompts

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
HEADERS = ((b"authorization", b"Bearer " + KEY.encode()),)
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


class Proxy:
    """A proxy on loopback: tunnels for CONNECT, passes other requests on; keeps the head of each that it was sent."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.answer = b""
        """What it says instead of doing its work."""
        self.heads: list[bytes] = []
        self.is_silent = False
        self.goes_to: int | None = None
        """The port on loopback that stands for every other host."""
        self.port = 0

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}" if self.tls else f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if self.is_silent:
                await asyncio.sleep(60)
            if self.answer:
                writer.write(self.answer)
                await writer.drain()
                return
            method, target, _ = head.split(b" ", 2)
            authority = target.removeprefix(b"http://").partition(b"/")[0].decode()
            host, _, port = authority.rpartition(":")
            if self.goes_to is not None:
                host, port = "127.0.0.1", str(self.goes_to)
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            if method == b"CONNECT":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                far_writer.write(head)
            both = (self._pipe(reader, far_writer), self._pipe(far_reader, writer))
            await asyncio.gather(*both)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as running:
        yield running


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secure(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    """A server whose certificate is trusted."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with FaultServer(tls=context) as server:
        yield server


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *map(str.lower, PROXIES), "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)


def send(
    proxy: Proxy, url: str, timeout_s: float = 5.0, times: int = 1, most: int = 1 << 25
) -> list[HttpResponse | Fault]:
    """Makes attempts one after the other through the proxy."""

    async def main() -> list[HttpResponse | Fault]:
        client = Client(ProxiedTransport(proxied.httpx.Proxy(proxy.url), limit=4))
        try:
            request = HttpRequest(f"{url}/v1/chat/completions", HEADERS, CHAT, max_reply_bytes=most)
            return [await client.send(request, timeout_s) for _ in range(times)]
        finally:
            await client.aclose()

    results = uvloop.run(main())
    assert KEY not in repr(results)
    return results


def told(result: HttpResponse | Fault) -> tuple[str, bool, bool]:
    assert isinstance(result, Fault), result
    return result.kind, result.connected, result.maybe_processed


# ---------------------------------------------------------------- through a tunnel


def test_https_goes_through_a_tunnel_in_which_the_proxy_sees_no_key(proxy, secure):
    results = send(proxy, secure.url, times=3)
    assert [result.status for result in results] == [200, 200, 200]
    assert [request.body for request in secure.requests] == [CHAT] * 3
    assert secure.requests[0].headers["authorization"] == f"Bearer {KEY}"
    (head,) = proxy.heads
    assert head.startswith(b"CONNECT localhost:")
    assert KEY.encode() not in head


def test_a_server_that_is_not_trusted_is_refused_behind_a_proxy_too(proxy, secure, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    (result,) = send(proxy, secure.url)
    assert (result.kind, result.stop, result.connected) == ("fatal", "tls", False)
    assert secure.requests == []


@pytest.mark.parametrize("answer", [b"HTTP/1.1 502 No\r\n\r\n", b"garbage\r\n\r\n"])
def test_what_a_proxy_cannot_do_was_not_processed(proxy, secure, answer):
    proxy.answer = answer
    (result,) = send(proxy, secure.url)
    assert told(result) == ("network", False, False)
    assert "proxy" in result.detail
    assert secure.requests == []


@pytest.mark.parametrize("status", [403, 407])
def test_what_a_proxy_forbids_stops_the_run(proxy, secure, status):
    proxy.answer = b"HTTP/1.1 %d No\r\n\r\n" % status
    (result,) = send(proxy, secure.url)
    assert told(result) == ("fatal", False, False)
    assert result.stop == "account"
    assert f"the proxy refused: {status}" in result.detail
    assert secure.requests == []


def test_roots_that_cannot_be_loaded_stop_the_run_behind_a_proxy_too(proxy, secure, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    (result,) = send(proxy, secure.url)
    assert (result.kind, result.stop, result.connected) == ("fatal", "tls", False)
    assert proxy.heads == []


def test_a_proxy_that_is_spoken_to_in_tls_is_checked_too(authority, secure):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(tls)
    with Proxy(tls=tls) as proxy:
        (result,) = send(proxy, secure.url)
        assert result.status == 200
        (head,) = proxy.heads
        assert KEY.encode() not in head
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(stranger)
    with Proxy(tls=stranger) as proxy:
        (result,) = send(proxy, secure.url)
        assert (result.kind, result.stop) == ("fatal", "tls")
        assert proxy.heads == []


def test_a_proxy_that_is_silent_or_not_there_is_known_to_have_sent_nothing(proxy, secure):
    proxy.is_silent = True
    assert told(*send(proxy, secure.url, timeout_s=0.2)) == ("network", False, False)
    proxy.port = 9
    assert told(*send(proxy, secure.url, timeout_s=0.5)) == ("network", False, False)


def test_the_deadline_of_an_attempt_holds_behind_a_proxy(proxy, secure):
    secure.script(lambda request, n: Reply(drip_s=0.02) if n == 1 else Reply(raw=b"", end="hang"))
    for result in send(proxy, secure.url, timeout_s=0.3, times=2):
        assert told(result) == ("timeout", True, True)
    assert len(secure.requests) == 2


def test_a_redirect_is_not_followed_and_no_cookie_is_kept_behind_a_proxy(proxy, secure):
    with FaultServer() as other:
        secure.script([Reply(307, b"", {"location": other.url, "set-cookie": "a=b"})])
        first, second = send(proxy, secure.url, times=2)
        assert (first.status, second.status) == (307, 200)
        assert other.connections == 0
    assert "cookie" not in secure.requests[1].headers


def test_replies_are_decoded_and_bounded_behind_a_proxy(proxy, secure, monkeypatch):
    import gzip

    monkeypatch.setattr(proxied, "MAX_ERROR_BYTES", 20_000)
    monkeypatch.setattr(proxied, "ERROR_BODY_S", 0.2)
    packed = {"content-encoding": "gzip"}
    secure.script(
        [
            Reply(200, gzip.compress(b"{}"), packed),
            Reply(200, gzip.compress(b"a" * 1_000_000), packed),
            Reply(200, endless=b"x" * 1000, length=-1),
            Reply(200, gzip.compress(b"{}" * 99)[:-9], packed),
            Reply(503, endless=b"x" * 1000, length=-1),
            Reply(503, b"busy", length=500, end="hang"),
            Reply(200, b"{", length=9, end="close"),
        ]
    )
    whole, bomb, endless, cut, error_page, slow, short = send(proxy, secure.url, times=7, most=50_000)
    assert (whole.content, whole.headers.get("content-encoding")) == (b"{}", None)
    assert [told(result)[0] for result in (bomb, endless, cut)] == ["garbled"] * 3
    assert (error_page.status, len(error_page.content) <= 20_000 + 65_536) == (503, True)
    assert (slow.status, slow.content) == (503, b"busy")
    assert told(short)[1:] == (True, True)


def test_a_lost_connection_behind_a_proxy_may_have_been_billed(proxy, secure):
    secure.script([Reply(raw=b"", end="reset"), Reply(raw=b"", end="close")])
    for result in send(proxy, secure.url, times=2):
        assert told(result)[1:] == (True, True)


# ---------------------------------------------------------------- which proxy


@pytest.mark.parametrize(
    ("environ", "url", "expected"),
    [
        ({}, "https://api.example/v1", None),
        ({"HTTPS_PROXY": "http://p:1"}, "https://api.example/v1", "p:1"),
        ({"https_proxy": "p:1"}, "https://api.example/v1", "p:1"),
        ({"ALL_PROXY": "http://p:1"}, "https://api.example/v1", "p:1"),
        ({"HTTP_PROXY": "http://p:1"}, "https://api.example/v1", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "example"}, "https://api.example/v1", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, "https://api.example/v1", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "other.example"}, "https://api.example/v1", "p:1"),
        ({"HTTP_PROXY": "http://p:1"}, "http://gpu-box:8000/v1", "p:1"),
    ],
)
def test_the_environment_says_which_proxy(monkeypatch, environ, url, expected):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    proxy = proxy_for(url, allow_http=True)
    assert (proxy and proxy.url.netloc.decode()) == expected


def test_each_of_several_servers_is_reached_in_its_own_way(monkeypatch, secure, proxy):
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    with FaultServer() as direct:

        async def main() -> list[HttpResponse | Fault]:
            transport = EnvironmentTransport([secure.url, direct.url], allow_http=False, limit=2)
            assert transport.proxies == [f"127.0.0.1:{proxy.port}"]
            client = Client(transport)
            results = [
                await client.send(HttpRequest(f"{url}/v1/x", HEADERS, CHAT), 5.0) for url in (secure.url, direct.url)
            ]
            await client.aclose()
            return results

        assert [result.status for result in asyncio.run(main())] == [200, 200]
        assert (len(secure.requests), len(direct.requests), len(proxy.heads)) == (1, 1, 1)


def test_plain_http_to_this_machine_goes_to_no_proxy_unless_http_is_allowed(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "http://elsewhere:3128")
    assert proxy_for("http://127.0.0.1:8000/v1", allow_http=False) is None
    assert proxy_for("http://127.0.0.1:8000/v1", allow_http=True) is not None


@pytest.mark.parametrize("address", ["socks5://me:hunter2@p:1", "http://me:hunter2@p:port", "http://", "ftp://p"])
def test_a_proxy_that_cannot_be_used_is_a_usage_error_that_shows_no_password(monkeypatch, address):
    monkeypatch.setenv("HTTPS_PROXY", address)
    with pytest.raises(BatchrunError, match="--proxy-env") as caught:
        proxy_for("https://api.example/v1", allow_http=False)
    assert "hunter2" not in f"{caught.value.message} {caught.value.hint}"


# ---------------------------------------------------------------- as a user sees it


def test_a_run_goes_through_the_proxy_of_the_environment_only_when_told_to(shell: Shell, proxy: Proxy, secure):
    shell.write("in.jsonl", prompts(20))
    env = {"HTTPS_PROXY": proxy.url.replace("//", "//me:hunter2@"), "SSL_CERT_FILE": str(shell.root / "ca.pem")}
    ran = shell.submit(secure, "--limit", "5", env=env).told(0)
    assert proxy.heads == []
    assert "proxy" not in ran.err
    ran = shell.submit(secure, "--limit", "10", "--proxy-env", env=env).told(0)
    assert ran.rows["succeeded"] == 10
    assert 0 < len(proxy.heads) <= 5
    assert ran.err.count("slower") == 1
    assert base64.b64encode(b"me:hunter2") in proxy.heads[0]
    ran = shell.run("resume", "--limit", "20", "--json", env=env).told(0)  # remembered
    assert ran.rows["succeeded"] == 20
    assert f"by way of the proxy 127.0.0.1:{proxy.port}" in ran.err
    left = b"".join(path.read_bytes() for path in (shell.root / "in.batchrun").iterdir())
    assert b"hunter2" not in left + b"".join(shell.said)


def test_plain_http_is_passed_on_by_a_proxy_and_its_own_refusal_fails_no_row(shell: Shell, proxy: Proxy, server):
    shell.write("in.jsonl", prompts(4))
    env = {"HTTP_PROXY": proxy.url}
    ran = shell.submit(server, "--proxy-env", "--job", "direct", env=env).told(0)
    assert proxy.heads == []
    assert "going directly" in ran.err
    shell.submit(server, "--proxy-env", "--allow-http", env=env).told(0)
    assert all(head.startswith(b"POST " + server.url.encode()) for head in proxy.heads)
    assert len(server.requests) == 8
    proxy.answer = b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n"
    ran = shell.submit(server, "--proxy-env", "--allow-http", "--job", "refused", env=env).told(78)
    assert ran.rows == {"total": 4, "succeeded": 0, "failed": 0, "pending": 4, "in_doubt": 0}
    assert "407" in ran.err


@pytest.mark.parametrize("key", [KEY, ""], ids=["with a key", "without a key"])
def test_plain_http_to_another_machine_needs_allow_http_which_a_job_remembers(shell: Shell, proxy: Proxy, server, key):
    shell.write("in.jsonl", prompts(4))
    proxy.goes_to = server.port
    env = {"HTTP_PROXY": proxy.url, "OPENAI_API_KEY": key}
    args = ["submit", "in.jsonl", "--base-url", "http://gpu-box.test:8000", "--model", "m", "--proxy-env", "--json"]
    ran = shell.run(*args, env=env).told(2)
    assert "plain http to `gpu-box.test`" in ran.err
    assert "--allow-http" in ran.err
    assert proxy.heads == []
    assert shell.run("check", *args[1:-2], env=env).code == 2
    assert shell.run(*args, "--allow-http", "--limit", "2", env=env).told(0).rows["succeeded"] == 2
    assert shell.run("resume", "--limit", "4", "--json", env=env).told(0).rows["succeeded"] == 4
    assert {request.headers["host"] for request in server.requests} == {"gpu-box.test:8000"}
    ran = shell.run("resume", "--no-allow-http", "--json", env=env)
    assert ran.code == 2


def test_a_proxy_that_cannot_be_used_is_told_before_a_job_is_made(shell: Shell, server):
    shell.write("in.jsonl", prompts(1))
    args = ["submit", "in.jsonl", "--base-url", "https://api.invalid", "--model", "m", "--proxy-env"]
    ran = shell.run(*args, env={"HTTPS_PROXY": "socks5://me:hunter2@p:1"}).told(2)
    assert "socks5" in ran.err
    assert "hunter2" not in ran.err
    assert [path.name for path in shell.root.iterdir()] == ["in.jsonl"]


def test_a_refusal_of_the_provider_behind_a_proxy_is_the_providers(shell: Shell, proxy: Proxy, secure):
    shell.write("in.jsonl", prompts(3))
    secure.script(lambda request, n: error(401, "invalid_api_key", "no"))
    env = {"HTTPS_PROXY": proxy.url, "SSL_CERT_FILE": str(shell.root / "ca.pem")}
    ran = shell.submit(secure, "--proxy-env", env=env).told(77)
    assert ran.rows["pending"] == 3


def test_connections_through_a_proxy_are_as_many_as_are_in_flight_at_most(shell: Shell, proxy: Proxy, secure):
    shell.write("in.jsonl", prompts(24))
    secure.delay_s = 0.05
    env = {"HTTPS_PROXY": proxy.url, "SSL_CERT_FILE": str(shell.root / "ca.pem")}
    shell.submit(secure, "--proxy-env", "--concurrency", "6", env=env).told(0)
    assert secure.max_in_flight == 6
    assert secure.connections <= 6


def test_the_pools_connections_are_closed_as_early_as_ours():
    made = ProxiedTransport(proxied.httpx.Proxy("http://127.0.0.1:9"), limit=3)
    assert made._opened()._pool._keepalive_expiry == transport.IDLE_S
