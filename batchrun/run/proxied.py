"""Requests through a proxy, for those who ask for it: httpx's own transport, held to the bounds of ours.

It is slower than `run.transport` with many requests in flight: httpx's pool looks at all its connections for
every request. What a proxy refuses was not processed by the provider, and counts as no connection to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.request
from collections.abc import Iterable, Mapping

import httpx

from batchrun.errors import BatchrunError
from batchrun.run.http1 import ERROR_BODY_S, MAX_ERROR_BYTES, MAX_REPLY_BYTES, Decoder
from batchrun.run.transport import (
    CONNECT_S,
    DEFAULT_S,
    IDLE_S,
    Http1Transport,
    TLSRefused,
    connect_error,
    tls_context,
)

__all__ = ["EnvironmentTransport", "ProxiedTransport", "proxy_for"]


def proxy_for(url: str, *, allow_http: bool) -> httpx.Proxy | None:
    """Returns the proxy that HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY mean for ``url``; None: go directly.

    Plain http to this machine goes directly unless ``allow_http``: a proxy would carry it, key and all, in the clear.

    Raises:
        BatchrunError: The proxy's address cannot be used. It is not repeated, as it may hold a password.
    """
    target = httpx.URL(url)
    proxies = urllib.request.getproxies_environment()
    address = proxies.get(target.scheme) or proxies.get("all")
    plain = target.scheme == "http" and not allow_http
    if not address or plain or urllib.request.proxy_bypass(target.netloc.decode("ascii")):
        return None
    hint = "write it as in HTTPS_PROXY=http://proxy.example:3128"
    try:
        proxy = httpx.Proxy(address if "://" in address else f"http://{address}")
    except (ValueError, httpx.InvalidURL):
        raise BatchrunError("--proxy-env: the proxy of the environment has no usable address", hint=hint) from None
    if proxy.url.scheme not in ("http", "https") or not proxy.url.host:
        raise BatchrunError(f"--proxy-env: a proxy of kind `{proxy.url.scheme}` is not supported", hint=hint)
    return proxy


class EnvironmentTransport(httpx.AsyncBaseTransport):
    """Sends to each of ``urls`` through the proxy that the environment means for it, or directly.

    ``proxies`` are those in use, as host and port. Raises what ``proxy_for`` raises.
    """

    def __init__(self, urls: Iterable[str], *, allow_http: bool, limit: int) -> None:
        self._direct = Http1Transport(limit=limit)
        self._proxied: dict[tuple[str, bytes], ProxiedTransport] = {}
        self.proxies: list[str] = []
        for url in map(httpx.URL, urls):
            if proxy := proxy_for(str(url), allow_http=allow_http):
                self._proxied[url.scheme, url.netloc] = ProxiedTransport(proxy, limit=limit)
                self.proxies.append(proxy.url.netloc.decode("ascii"))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Makes one attempt."""
        transport = self._proxied.get((request.url.scheme, request.url.netloc), self._direct)
        return await transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Closes every connection."""
        for transport in (self._direct, *self._proxied.values()):
            await transport.aclose()


class ProxiedTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 through ``proxy``, with at most ``limit`` connections.

    As of ``Http1Transport``: the ``timeout`` extension, what is raised, decoded and bounded replies; no redirect is
    followed, no cookie kept, nothing sent twice.
    """

    def __init__(self, proxy: httpx.Proxy, *, limit: int) -> None:
        self._proxy = proxy
        self._limits = httpx.Limits(max_connections=limit, max_keepalive_connections=limit, keepalive_expiry=IDLE_S)
        self._transport: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Makes one attempt, bounded as a whole: until the request is on its way by ``connect``, then by ``read``."""
        loop = asyncio.get_running_loop()
        timeout = request.extensions.get("timeout", {})
        started = loop.time()
        total_s = timeout.get("read") or DEFAULT_S
        connect_s = min(timeout.get("connect") or CONNECT_S, total_s)
        request.headers.setdefault("accept-encoding", "gzip, deflate")
        is_sent = False

        async def on_event(name: str, info: Mapping[str, object]) -> None:
            nonlocal is_sent
            # The request for a tunnel is none of ours: after it there is still nothing at the provider.
            if name == "http11.send_request_headers.started" and getattr(info["request"], "method", b"") != b"CONNECT":
                is_sent = True
                bound.reschedule(started + total_s)

        try:
            async with asyncio.timeout_at(started + connect_s) as bound:
                cap = request.extensions.get("max_reply_bytes", MAX_REPLY_BYTES)
                request.extensions = {"trace": on_event}
                response = await self._opened().handle_async_request(request)
                return await _whole(response, cap)
        except TimeoutError:
            if is_sent:
                raise httpx.ReadTimeout("the reply was not complete in time") from None
            raise httpx.ConnectTimeout(f"no connection through the proxy within {connect_s:g} s") from None
        except httpx.ProxyError as error:
            # What a proxy forbids it will forbid the next time too; what it cannot do now it may do later.
            forbids = str(error).startswith(("401", "403", "405", "407"))
            raise (httpx.ProxyError if forbids else httpx.ConnectError)(f"the proxy refused: {error}") from None
        except httpx.TransportError as error:
            if is_sent or isinstance(error, TLSRefused):
                raise
            raise _unsent(error, request.url) from None

    async def aclose(self) -> None:
        """Closes every connection."""
        if self._transport is not None:
            await self._transport.aclose()

    def _opened(self) -> httpx.AsyncHTTPTransport:
        """Returns httpx's transport, made with the first attempt, so that a failure to load roots is that one's."""
        if self._transport is None:
            tls, proxy = tls_context(), self._proxy
            if proxy.url.scheme == "https":
                proxy = httpx.Proxy(proxy.url, auth=proxy.auth, ssl_context=tls)
            self._transport = httpx.AsyncHTTPTransport(proxy=proxy, verify=tls, trust_env=False, limits=self._limits)
        return self._transport


def _unsent(error: httpx.TransportError, url: httpx.URL) -> httpx.TransportError:
    """Returns why there is no connection; a provider whose certificate is not trusted is refused as such."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return connect_error(cause, url.host, CONNECT_S)
        cause = cause.__cause__ or cause.__context__
    return httpx.ConnectError(f"no connection through the proxy: {error or type(error).__name__}")


async def _whole(response: httpx.Response, cap: int) -> httpx.Response:
    """Reads a reply to its end, within the bounds of `run.http1`: the status outranks the body where it is not 2xx."""
    if response.status_code == httpx.codes.PROXY_AUTHENTICATION_REQUIRED:
        await response.aclose()
        raise httpx.ProxyError("407 Proxy Authentication Required")
    headers = [(name.lower(), value) for name, value in response.headers.raw]
    encodings = [value for name, value in headers if name == b"content-encoding" and value != b"identity"]
    content = bytearray()
    try:
        if response.is_success:
            await _read(response, content, encodings, cap)
        else:
            with contextlib.suppress(TimeoutError, httpx.RequestError):
                async with asyncio.timeout(ERROR_BODY_S):
                    await _read(response, content, encodings, MAX_ERROR_BYTES)
    finally:
        await response.aclose()
    kept = [header for header in headers if header[0] not in (b"content-encoding", b"content-length")]
    return httpx.Response(response.status_code, headers=kept, content=bytes(content))


async def _read(response: httpx.Response, content: bytearray, encodings: list[bytes], cap: int) -> None:
    """Adds the decoded body to ``content``. Raises: httpx.DecodingError: it does not decode, or is beyond the cap."""
    decoder = Decoder(b",".join(encodings), cap) if encodings else None
    async for piece in response.aiter_raw():
        content += decoder.feed(piece) if decoder else piece
        if len(content) > cap:
            raise httpx.DecodingError(f"the reply is larger than {cap >> 20} MiB")
    if decoder:
        decoder.finish()
