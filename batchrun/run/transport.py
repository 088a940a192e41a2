"""The only HTTP client: httpx's transport interface over bare connections, and its exceptions as Faults.

httpx's own pool scans all its connections for every request and so slows down with concurrency; this one keeps a stack
per origin. Its Request and Response cost as much as the rest of an attempt: what the engine sends goes without them
(``attempt``), by httpx's URLs, TLS settings and exceptions all the same. No redirect is followed, no cookie kept, no
proxy taken from the environment (`run.proxied` does, for who asks), nothing sent twice: one call is one attempt.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TypeAlias

import httpx

from batchrun.records import Fault, HttpRequest, HttpResponse
from batchrun.run.http1 import MAX_REPLY_BYTES, Answer, Connection

__all__ = ["Client", "Http1Transport", "TLSRefused", "connect_error", "fault", "fd_budget", "tls_context"]

CONNECT_S = 10.0
"""Name, address and TLS handshake together."""
NEXT_ADDRESS_S = 3.0
"""An address that has not answered by then gives way to the host's next: broken IPv6 paths are common."""
ADDRESSES_S = 30.0
"""How long a host's addresses are remembered: a thousand connections are not a thousand look-ups."""
IDLE_S = 4.0
"""Unused connections are closed before common servers do it (uvicorn, node: 5 s): of a request written while
the server closes, nobody knows whether it was processed."""
DEFAULT_S = 600.0
"""For requests that name no timeout."""
SPARE_FDS = 64
"""Descriptors that are not for connections: store, files, pipes, libraries."""
_MAX_TARGETS = 1_000

Origin: TypeAlias = tuple[bool, str, int]
"""TLS, host, port."""
Address: TypeAlias = tuple[str, int]
"""IP address, port."""


class TLSRefused(httpx.ConnectError):
    """The server is not who it should be, or speaks no TLS that we accept; nothing was sent."""


# ---------------------------------------------------------------- the seam


class Client:
    """Sends requests through one transport: ours, or any of httpx's kind (a proxy's, the simulated provider)."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport
        self._attempt = transport.attempt if isinstance(transport, Http1Transport) else self._by_way_of_httpx

    async def send(self, request: HttpRequest, timeout_s: float) -> HttpResponse | Fault:
        """Makes one attempt and returns what came of it, by ``timeout_s`` from now at the latest.

        Never raises for what a network or a server does.
        """
        try:
            return await self._attempt(request, timeout_s)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            return fault(error)

    async def _by_way_of_httpx(self, request: HttpRequest, timeout_s: float) -> HttpResponse:
        """Tells the transport the bounds as httpx's ``timeout`` extension, as ``Http1Transport`` reads it."""
        response = await self._transport.handle_async_request(
            httpx.Request(
                request.method,
                request.url,
                headers=request.headers,
                content=request.content,
                extensions={
                    "timeout": {"connect": min(CONNECT_S, timeout_s), "read": timeout_s},
                    "max_reply_bytes": request.max_reply_bytes,
                },
            )
        )
        content = await response.aread()
        return _received(response.status_code, ((n.lower(), v) for n, v in response.headers.raw), content)

    async def aclose(self) -> None:
        """Closes the transport; attempts that are still under way end as Faults."""
        await self._transport.aclose()


def fault(error: httpx.RequestError | httpx.InvalidURL) -> Fault:  # noqa: PLR0911 - a return for each kind
    """Translates a failed attempt. Details name the host and what happened, never a header.

    ``maybe_processed`` is False only where the server cannot have had the whole request.
    """
    detail = str(error) or type(error).__name__
    match error:
        case TLSRefused():
            return Fault("fatal", detail, stop="tls", connected=False)
        case httpx.InvalidURL() | httpx.UnsupportedProtocol() | httpx.LocalProtocolError() | httpx.ProxyError():
            return Fault("fatal", detail, stop="account", connected=False)
        case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.PoolTimeout():
            return Fault("network", detail, connected=False)
        case httpx.WriteTimeout():
            return Fault("timeout", detail)
        case httpx.TimeoutException():
            return Fault("timeout", detail, maybe_processed=True)
        case httpx.DecodingError() | httpx.RemoteProtocolError():
            return Fault("garbled", detail, maybe_processed=True)
        case _:
            return Fault("network", detail, maybe_processed=True)


def fd_budget(connections: int) -> int:
    """Returns how many of ``connections`` the limit on open files allows; raises the soft limit for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = connections + SPARE_FDS
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == unlimited else max(1, min(connections, soft - SPARE_FDS))


# ---------------------------------------------------------------- the transport


class Http1Transport(httpx.AsyncBaseTransport):
    """HTTP/1.1 over a pool of kept-alive connections, for one event loop.

    ``limit`` guards against a caller that forgets its own: one connection more is ``httpx.PoolTimeout``.
    ``tls`` defaults to the roots in SSL_CERT_FILE or SSL_CERT_DIR, else certifi's; host names are checked.

    Of the ``timeout`` extension, ``connect`` bounds the connection and ``read`` the whole attempt, from the
    call to the reply's last byte. Replies come decoded, without the headers that said how they were encoded.
    Raises ``TLSRefused``, ``httpx.ConnectError``, ``httpx.ConnectTimeout``, and what `run.http1` names.
    """

    def __init__(self, *, limit: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._limit = limit
        self._tls = tls
        self._idle: defaultdict[Origin, deque[Connection]] = defaultdict(deque)
        self._connecting = 0
        self._open: set[Connection] = set()
        self._alive: set[Connection] = set()
        self._addresses: dict[Origin, tuple[float, list[Address]]] = {}
        self._all_lost: asyncio.Future[None] | None = None
        self._targets: dict[tuple[str, str, tuple[tuple[bytes, bytes], ...]], tuple[Origin, bytes]] = {}
        """Of a request but for its content: where it goes, and how it begins."""

    async def attempt(self, request: HttpRequest, timeout_s: float) -> HttpResponse:
        """Makes one attempt, without httpx's objects. Cancelling it closes its connection."""
        key = (request.method, request.url, request.headers)
        target = self._targets.get(key)
        if target is None:
            if len(self._targets) >= _MAX_TARGETS:  # rows name models, and some providers have an URL for each
                self._targets.clear()
            made = httpx.Request(request.method, request.url, headers=request.headers)
            made.headers.pop("content-length", None)
            target = self._targets[key] = (_origin(made.url), _head(made))
        origin, head = target
        content = request.content
        answer = await self._exchange(
            origin,
            b"%bContent-Length: %d\r\n\r\n" % (head, len(content)),
            content,
            CONNECT_S,
            timeout_s,
            request.max_reply_bytes,
        )
        return _received(answer.status, answer.headers, answer.content)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Makes one attempt. Cancelling it closes its connection."""
        timeout = request.extensions.get("timeout", {})
        answer = await self._exchange(
            _origin(request.url),
            _head(request) + b"\r\n",
            request.content,
            timeout.get("connect") or CONNECT_S,
            timeout.get("read") or DEFAULT_S,
            request.extensions.get("max_reply_bytes", MAX_REPLY_BYTES),
        )
        return httpx.Response(answer.status, headers=answer.headers, content=answer.content)

    async def _exchange(
        self, origin: Origin, head: bytes, body: bytes, connect_s: float, total_s: float, cap: int
    ) -> Answer:
        loop = asyncio.get_running_loop()
        started = loop.time()
        connection = self._take(origin, started)
        if connection is None:
            connection = await self._connect(loop, origin, min(connect_s, total_s))
        try:
            answer = await connection.exchange(head, body, started + total_s, cap)
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle[origin].append(connection)
        return answer

    async def aclose(self) -> None:
        """Closes every connection and waits until their sockets are gone."""
        for connection in list(self._open):
            connection.close()
        if self._alive:
            self._all_lost = asyncio.get_running_loop().create_future()
            await self._all_lost

    # ------------------------------------------------------------ pool

    def _take(self, origin: Origin, now: float) -> Connection | None:
        """Returns the connection used last, as the likeliest to be alive; closes those unused for long."""
        idle = self._idle[origin]
        while idle and now - idle[0].idle_since > IDLE_S:
            idle.popleft().close()
        while idle:
            connection = idle.pop()
            if connection.fresh():
                return connection
            connection.close()
        return None

    def _close_an_idle_one(self) -> bool:
        """Makes room: connections that another endpoint needs no more must not keep this one waiting."""
        for idle in self._idle.values():
            if idle:
                idle.popleft().close()
                return True
        return False

    def _closed(self, connection: Connection) -> None:
        self._open.discard(connection)

    def _lost(self, connection: Connection) -> None:
        self._alive.discard(connection)
        if self._all_lost is not None and not self._alive and not self._all_lost.done():
            self._all_lost.set_result(None)

    # ------------------------------------------------------------ connecting

    async def _connect(self, loop: asyncio.AbstractEventLoop, origin: Origin, timeout_s: float) -> Connection:
        """Returns a new connection, which counts towards the limit from the moment that it is begun."""
        secure, host, port = origin
        full = self._limit is not None and len(self._open) + self._connecting >= self._limit
        if full and not self._close_an_idle_one():
            raise httpx.PoolTimeout(f"all {self._limit} connections are in use")
        tls = self._tls_context() if secure else None
        self._connecting += 1
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._dial(loop, origin, tls)
        except (OSError, UnicodeError) as error:
            raise connect_error(error, f"{host}:{port}", timeout_s) from None
        finally:
            self._connecting -= 1
        if not connection.usable:
            raise httpx.ConnectError(f"{host}:{port} closed the connection at once")
        self._open.add(connection)
        self._alive.add(connection)
        return connection

    async def _dial(self, loop: asyncio.AbstractEventLoop, origin: Origin, tls: ssl.SSLContext | None) -> Connection:
        """Connects to the first of the host's addresses that answers: the last good one, then the system's order."""
        _, host, port = origin
        expires, addresses = self._addresses.get(origin, (0.0, []))
        if expires < loop.time():
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = [(str(address[0]), int(address[1])) for _, _, _, _, address in found]
            self._addresses[origin] = (loop.time() + ADDRESSES_S, addresses)
        server_hostname = host if tls is not None else None
        failure: OSError = OSError(errno.EADDRNOTAVAIL, "no address")
        for attempt, address in enumerate(list(addresses), start=1):
            try:
                async with asyncio.timeout(NEXT_ADDRESS_S if attempt < len(addresses) else None):
                    _, connection = await loop.create_connection(
                        lambda: Connection(loop, self._closed, self._lost),
                        *address,
                        ssl=tls,
                        server_hostname=server_hostname,
                    )
            except ssl.SSLCertVerificationError:
                raise  # an answer, if not the hoped-for one
            except OSError as error:  # TimeoutError is one
                failure = error
            else:
                if attempt > 1:
                    addresses.remove(address)
                    addresses.insert(0, address)
                return connection
        self._addresses.pop(origin, None)
        raise failure

    def _tls_context(self) -> ssl.SSLContext:
        """Returns the run's one TLS context; loading roots takes tens of milliseconds: only when needed."""
        if self._tls is None:
            self._tls = tls_context()
        return self._tls


def tls_context() -> ssl.SSLContext:
    """Returns a context that trusts the roots in SSL_CERT_FILE or SSL_CERT_DIR, else certifi's, and checks names.

    Raises:
        TLSRefused: They cannot be loaded.
    """
    try:
        tls = httpx.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise TLSRefused(f"the trusted certificates (SSL_CERT_FILE, SSL_CERT_DIR) cannot be loaded: {error}") from None
    tls.set_alpn_protocols(["http/1.1"])
    return tls


def connect_error(  # noqa: PLR0911 - a return for each kind
    error: OSError | UnicodeError, where: str, timeout_s: float
) -> httpx.TransportError:
    """Translates a failed connect. A handshake cut off is the network's doing, a refused one is not."""
    match error:
        case TimeoutError():
            return httpx.ConnectTimeout(f"no connection to {where} within {timeout_s:g} s")
        case ssl.SSLCertVerificationError():
            return TLSRefused(f"{where} is not trusted: {error.verify_message}")
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError() | ssl.SSLSyscallError():
            return httpx.ConnectError(f"{where} ended the TLS handshake")
        case ssl.SSLError():
            return TLSRefused(f"no TLS with {where}: {error.reason or 'handshake failed'}")
        case socket.gaierror():
            return httpx.ConnectError(f"the name {where} does not resolve: {error.strerror}")
        case OSError():
            return httpx.ConnectError(f"no connection to {where}: {os.strerror(error.errno or errno.EIO)}")
        case UnicodeError():
            return httpx.ConnectError(f"the name {where} cannot be looked up")


# ---------------------------------------------------------------- httpx's objects, to bytes and back


def _origin(url: httpx.URL) -> Origin:
    """Returns where to connect. Raises ``httpx.UnsupportedProtocol`` for what is neither http nor https."""
    if url.scheme not in ("http", "https") or not url.raw_host:
        raise httpx.UnsupportedProtocol("the URL must begin with http:// or https:// and name a host")
    secure = url.scheme == "https"
    return secure, url.raw_host.decode("ascii"), url.port or (443 if secure else 80)


def _head(request: httpx.Request) -> bytes:
    """Returns the request's head but for the empty line that ends it.

    Raises ``httpx.LocalProtocolError`` for a value that begins a new line.
    """
    lines = [b"%b %b HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    lines += [b"%b: %b" % header for header in request.headers.raw]
    if "accept-encoding" not in request.headers:
        lines.append(b"Accept-Encoding: gzip, deflate")
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or b"\0" in head:
        raise httpx.LocalProtocolError("a header holds a line break")
    return head + b"\r\n"


def _received(status: int, headers: Iterable[tuple[bytes, bytes]], content: bytes) -> HttpResponse:
    """Returns a reply as codecs read it: of headers of one name, the last."""
    return HttpResponse(status, {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}, content)
