"""TLS: who is not who they should be gets no key, and stops the run."""

from __future__ import annotations

import asyncio
import datetime as dt
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

from batchrun.records import Fault, HttpRequest, HttpResponse
from batchrun.run.transport import Client, Http1Transport
from tests.faults.server import FaultServer, Reply

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
HEADERS = ((b"authorization", b"Bearer sk-sentinel"),)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on each of the loops that we support."""
    return uvloop.run if request.param == "uvloop" else asyncio.run


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusts the throwaway authority, in the way that users do."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))


def context(authority: trustme.CA, name: str = "localhost", **options: Any) -> ssl.SSLContext:
    """Returns a server's TLS context with a certificate for ``name``."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name, **options).configure_cert(made)
    return made


async def send(url: str, times: int = 1, timeout_s: float = 5.0) -> HttpResponse | Fault:
    client = Client(Http1Transport())
    for _ in range(times):
        result = await client.send(HttpRequest(f"{url}/v1/chat/completions", HEADERS, CHAT), timeout_s)
    await client.aclose()
    assert "sk-sentinel" not in repr(result)
    return result


def refused(result: HttpResponse | Fault) -> bool:
    assert isinstance(result, Fault), result
    return (result.kind, result.stop, result.connected, result.maybe_processed) == ("fatal", "tls", False, False)


def test_a_trusted_server_is_served_over_one_connection(run, authority, trusted):
    with FaultServer(tls=context(authority)) as server:
        result = run(send(server.url, times=5))
        assert result.status == 200
        assert (server.connections, len(server.requests)) == (1, 5)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="names the directory's files by openssl rehash")
def test_a_directory_of_authorities_is_honoured(run, authority, tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    with FaultServer(tls=context(authority)) as server:
        assert refused(run(send(server.url)))
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        subprocess.run(["openssl", "rehash", str(tmp_path)], check=True)
        assert run(send(server.url)).status == 200


def test_an_unknown_authority_is_refused_before_the_key_is_sent(run, trusted):
    with FaultServer(tls=context(trustme.CA())) as server:
        assert refused(run(send(server.url)))
        assert server.requests == []


def test_a_certificate_for_another_host_is_refused_before_the_key_is_sent(run, authority, trusted):
    with FaultServer(tls=context(authority, "elsewhere.example")) as server:
        assert refused(run(send(server.url)))
        assert server.requests == []


def test_a_certificate_that_expired_is_refused_before_the_key_is_sent(run, authority, trusted):
    yesterday = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    with FaultServer(tls=context(authority, not_after=yesterday)) as server:
        result = run(send(server.url))
        assert refused(result)
        assert "expired" in result.detail
        assert server.requests == []


def test_a_server_that_speaks_plain_http_is_refused_before_the_key_is_sent(run, trusted):
    with FaultServer() as server:
        assert refused(run(send(f"https://localhost:{server.port}")))
        assert server.requests == []


def test_roots_that_cannot_be_loaded_stop_the_run(run, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    with FaultServer() as server:
        assert refused(run(send(f"https://localhost:{server.port}")))
        assert server.connections == 0


def test_a_handshake_cut_off_is_the_networks_fault(run, trusted):
    with FaultServer() as server:
        server.reset_on_accept = 1
        result = run(send(f"https://localhost:{server.port}"))
    assert isinstance(result, Fault)
    assert (result.kind, result.connected, result.maybe_processed) == ("network", False, False)


def test_a_handshake_that_hangs_is_bounded(run, trusted):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        result = run(send(f"https://localhost:{deaf.getsockname()[1]}", timeout_s=0.1))
    assert isinstance(result, Fault)
    assert (result.kind, result.connected, result.maybe_processed) == ("network", False, False)


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_connection_lost_under_tls_may_have_been_billed(run, authority, trusted, end):
    with FaultServer(tls=context(authority)) as server:
        server.script([Reply(raw=b"", end=end), Reply(body=b"{}", length=3, end=end)])
        for _ in range(2):
            result = run(send(server.url))
            assert isinstance(result, Fault)
            assert (result.kind, result.connected, result.maybe_processed) == ("network", True, True)


def test_a_large_body_and_a_large_reply_survive_tls(run, authority, trusted):
    async def main(url: str) -> HttpResponse | Fault:
        client = Client(Http1Transport())
        result = await client.send(HttpRequest(url, HEADERS, b"x" * 5_000_000), 5.0)
        await client.aclose()
        return result

    with FaultServer(tls=context(authority)) as server:
        server.script([Reply(body=b"y" * 5_000_000)])
        assert run(main(server.url)).content == b"y" * 5_000_000
        assert server.requests[0].body == b"x" * 5_000_000


def test_only_http_1_1_is_negotiated(run, authority, trusted):
    tls = context(authority)
    tls.set_alpn_protocols(["h2", "http/1.1"])
    chosen: list[str | None] = []

    def accept() -> None:
        sock, _ = listening.accept()
        with tls.wrap_socket(sock, server_side=True) as wrapped:
            chosen.append(wrapped.selected_alpn_protocol())
            wrapped.recv(65_536)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept)
        thread.start()
        run(send(f"https://localhost:{listening.getsockname()[1]}"))
        thread.join()
    assert chosen == ["http/1.1"]
