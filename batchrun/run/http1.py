"""One HTTP/1.1 connection: a bare asyncio protocol parsed by httptools, with bounds on what a server may do.

Failures are httpx's exceptions, so that they can be told apart by type alone:

- ``ReadTimeout``: the deadline passed; the request may have been processed
- ``WriteTimeout``: the deadline passed with part of the request still here, so it cannot have been
- ``ReadError``: the connection was lost, or closed before the reply's end
- ``RemoteProtocolError``: what came is no HTTP, or its head or framing has no end
- ``DecodingError``: the body does not decode, or is larger than ``MAX_REPLY_BYTES``

The status outranks the body: a reply whose status is not 2xx is given as it stands when its body is cut,
endless or slow, because what the status says (wait, stop, fail) is worth more than the rest of an error page.
"""

from __future__ import annotations

import asyncio
import select
import socket
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import httptools
import httpx

__all__ = ["MAX_HEAD_BYTES", "MAX_REPLY_BYTES", "Answer", "Connection", "Decoder"]

MAX_REPLY_BYTES = 32 * 1024 * 1024
"""A 2xx body larger than this, decoded, is no answer."""
MAX_ERROR_BYTES = 1024 * 1024
"""Of other bodies this much is read."""
MAX_HEAD_BYTES = 64 * 1024
"""Status line, headers, and later framing beyond the size of the body itself."""
ERROR_BODY_S = 10.0
"""How long the body of a reply that is not 2xx is waited for."""
KEEP_ALIVE_S = 60
"""The kernel asks after a peer that is silent for so long, as often as it stays silent."""
OVERSLEPT_S = 1.0
"""A deadline that fires this late was missed because the process did not run, not by a slow server."""
GRACE_S = 2.0
"""What an overslept deadline gets, so that replies which came meanwhile are read first."""


class Answer(NamedTuple):
    """A whole reply: header names are lower-case, ``content`` is decoded and cut short only if not 2xx."""

    status: int
    headers: list[tuple[bytes, bytes]]
    content: bytes


class Decoder:
    """Undoes a content encoding piece by piece, never holding more than ``cap`` + 1 decoded bytes.

    Raises ``httpx.DecodingError`` for an encoding that nobody asked for and for bytes that do not decode.
    """

    def __init__(self, encoding: bytes, cap: int) -> None:
        self._encoding = encoding.strip().lower()
        if self._encoding not in (b"gzip", b"x-gzip", b"deflate"):
            raise httpx.DecodingError("the reply has a content encoding that was not asked for")
        self._left = cap + 1
        self._start = b""
        self._inflate: Any = None

    def feed(self, data: bytes) -> bytes:
        """Returns what ``data`` decodes to; together all calls return at most ``cap`` + 1 bytes."""
        if self._inflate is None:
            data = self._start + data
            if len(data) < 2:
                self._start = data
                return b""
            self._inflate = zlib.decompressobj(self._window(data))
        out = b""
        try:
            while data and self._left > 0:
                piece = self._inflate.decompress(data, self._left)
                self._left -= len(piece)
                out += piece
                data = self._inflate.unused_data
                if data:  # a stream may have several members
                    self._inflate = zlib.decompressobj(self._window(data))
        except zlib.error:
            raise httpx.DecodingError("the reply's compressed body is broken") from None
        return out

    def _window(self, data: bytes) -> int:
        """Returns zlib's code for the format. ``deflate`` is zlib's, but some servers mean the bare stream."""
        if self._encoding != b"deflate":
            return zlib.MAX_WBITS | 16
        return zlib.MAX_WBITS if data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0 else -zlib.MAX_WBITS

    def finish(self) -> None:
        """Raises ``httpx.DecodingError`` where the stream has not come to its end; no bytes at all are one."""
        ended = not self._start if self._inflate is None else self._inflate.eof
        if not ended:
            raise httpx.DecodingError("the reply's compressed body is cut short")


class Connection(asyncio.Protocol):
    """A keep-alive connection that carries one exchange at a time; made by ``loop.create_connection``.

    ``on_closed`` is called as soon as the connection is of no more use, and maybe again; ``on_lost`` once its
    socket is gone.
    """

    _transport: asyncio.Transport
    _timer: asyncio.TimerHandle

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_closed: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._on_closed = on_closed
        self._on_lost = on_lost
        self._connected = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._poll = select.poll()
        self._waiter: asyncio.Future[Answer] | None = None
        self._deadline = 0.0
        self.idle_since = 0.0
        """Monotonic second at which the last exchange ended."""
        self.usable = False
        """True while another exchange may be begun."""
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._received = 0
        self._wire_body = 0
        self._decoded = 0
        self._cap = MAX_REPLY_BYTES
        self._decoder: Decoder | None = None
        self._in_body = False
        self._framed = False
        self._complete = False
        self._keep_alive = False
        self._ended_by_server = False
        self._failure: httpx.RequestError | None = None

    # ------------------------------------------------------------ for the pool

    def fresh(self) -> bool:
        """True if an exchange may begin: the server has neither closed nor said anything since the last one.

        Asks the kernel, because an end that has arrived may not have been read yet; of a request written
        after it nobody knows whether it was processed.
        """
        return self.usable and not self._transport.is_closing() and not self._poll.poll(0)

    def exchange(
        self, head: bytes, body: bytes, deadline: float, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> asyncio.Future[Answer]:
        """Writes a request; the future gives its Answer, or an exception of the table above by ``deadline``.

        A cancelled future leaves the connection in an unknown state: ``close`` it.
        """
        self.usable = False
        self._deadline = deadline
        self._cap = max_reply_bytes
        self._waiter = self._loop.create_future()
        self._timer = self._loop.call_at(deadline, self._expire)
        self._transport.writelines((head, body))
        return self._waiter

    def close(self) -> None:
        """Closes at once, whatever is under way; safe to call again."""
        self.usable = False
        if self._waiter is not None:
            self._timer.cancel()
        if self._connected and not self._transport.is_closing():
            self._transport.abort()
        self._on_closed(self)

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the transport; the connection is usable from here on."""
        self._transport = cast("asyncio.Transport", transport)
        self._connected = True
        sock = transport.get_extra_info("socket")
        self._poll.register(sock.fileno(), select.POLLIN)
        # A model may think for ten minutes; middleboxes forget a silent connection sooner.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), KEEP_ALIVE_S)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        """Parses what came, within the bounds, and ends the exchange where it is whole or hopeless."""
        if self._waiter is None:
            self.close()  # nobody asked: an idle server says 408 before it leaves, or worse
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._keep_alive = False
            if not self._complete:
                self._failure = self._failure or httpx.RemoteProtocolError("the reply is not valid HTTP/1.1")
        if self._complete or self._failure is not None:
            self._end()
        elif self._received - self._wire_body > MAX_HEAD_BYTES + self._wire_body:
            self._failure = httpx.RemoteProtocolError("the reply's headers have no end")
            self._end()

    def eof_received(self) -> None:
        """Notes that the server ended the connection in good order; the transport then closes."""
        self._ended_by_server = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the exchange that was under way: well, if the reply is one that ends with the connection."""
        if self._waiter is not None:
            if exc is None and self._ended_by_server and self._in_body and not self._framed:
                self._complete = True
            else:
                when = "before the reply's end" if self._received else "before a reply came"
                self._failure = httpx.ReadError(f"the connection was lost {when}")
            self._end()
        self.close()
        self._parser = None  # it holds our methods: a cycle
        self._on_lost(self)

    # ------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        """Stops the parser at a second reply to one request: the first stands, the connection goes."""
        if self._complete:
            raise httpx.RemoteProtocolError("a reply that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header; trailers are dropped."""
        if not self._in_body:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Decides by the status how much of the body is wanted, and for how long."""
        self._status = self._parser.get_status_code()
        if self._status < 200:
            return
        self._in_body = True
        self._framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)
        if self._status >= 300:
            self._cap = MAX_ERROR_BYTES
            self._hurry(ERROR_BODY_S)
        encodings = [value for name, value in self._headers if name == b"content-encoding"]
        if encodings and encodings != [b"identity"]:
            self._headers = [h for h in self._headers if h[0] not in (b"content-encoding", b"content-length")]
            try:
                self._decoder = Decoder(b",".join(encodings), self._cap)
            except httpx.DecodingError as error:
                self._failure = error

    def on_body(self, body: bytes) -> None:
        """Decodes and keeps a piece of the body, up to the cap."""
        self._wire_body += len(body)
        if self._failure is not None:
            return
        try:
            piece = body if self._decoder is None else self._decoder.feed(body)
        except httpx.DecodingError as error:
            self._failure = error
            return
        self._decoded += len(piece)
        if max(self._decoded, self._wire_body) > self._cap:
            self._failure = httpx.DecodingError(f"the reply is larger than {self._cap >> 20} MiB")
        else:
            self._body.append(piece)

    def on_message_complete(self) -> None:
        """The reply is whole; an interim one (1xx) is forgotten."""
        if self._status < 200:
            self._headers = []
        else:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()

    # ------------------------------------------------------------ the end of an exchange

    def _hurry(self, seconds: float) -> None:
        """Moves the deadline to ``seconds`` from now, if that is earlier."""
        self._deadline = min(self._deadline, self._loop.time() + seconds)
        self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._expire)

    def _expire(self) -> None:
        """Ends the exchange, unless the deadline passed while the process was stopped or the machine slept.

        Then the replies of that time wait in the kernel, and some loops run timers before they read.
        """
        now = self._loop.time()
        if now - self._deadline > OVERSLEPT_S:
            self._deadline = now + GRACE_S
            self._timer = self._loop.call_at(self._deadline, self._expire)
            return
        if not self._received and self._transport.get_write_buffer_size():
            self._failure = httpx.WriteTimeout("the request could not be written in time")
        else:
            self._failure = httpx.ReadTimeout("the reply was not complete in time")
        self._end()

    def _end(self) -> None:
        """Resolves the future, and keeps the connection only if nothing is left over from this exchange."""
        waiter, self._waiter = cast("asyncio.Future[Answer]", self._waiter), None
        self._timer.cancel()
        if self._decoder is not None and self._failure is None:
            try:
                self._decoder.finish()
            except httpx.DecodingError as error:
                self._failure = error
        failure = None if self._in_body and self._status >= 300 else self._failure
        answer = Answer(self._status, self._headers, b"".join(self._body))
        if (
            self._keep_alive
            and self._failure is None
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        ):
            self.idle_since = self._loop.time()
            self.usable = True
        else:
            self.close()
        self._reset()
        if waiter.done():  # cancelled
            return
        if failure is None:
            waiter.set_result(answer)
        else:
            waiter.set_exception(failure)
