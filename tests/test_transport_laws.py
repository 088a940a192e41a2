"""Laws of the connection that hold for every way in which bytes may be cut, fed without a network."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.run.http1 import Answer, Connection, Decoder

BODY = b'{"choices":[{"message":{"content":"hello"}}]}'
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = (
    b"HTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
)
PACKER = zlib.compressobj(wbits=31)
PACKED = PACKER.compress(BODY) + PACKER.flush()
GZIP = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(PACKED), PACKED)


class Wire(asyncio.Transport):
    """A transport that only remembers whether it was closed."""

    closed = False

    def fileno(self) -> int:
        return 0

    def setsockopt(self, *_: object) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


def exchange(pieces: Iterable[bytes], *, ended: bool = False) -> tuple[Answer | httpx.RequestError | None, bool]:
    """Feeds the pieces of a reply, then perhaps the connection's end; returns what came of it, and if it is kept."""

    async def main() -> tuple[Answer | httpx.RequestError | None, bool]:
        loop = asyncio.get_running_loop()
        connection = Connection(loop, lambda _: None, lambda _: None)
        connection.connection_made(Wire())
        future = connection.exchange(b"", b"", loop.time() + 60)
        for piece in pieces:
            if not future.done():
                connection.data_received(piece)
        kept = connection.usable
        if ended:
            connection.eof_received()
            connection.connection_lost(None)
        connection.close()
        if not future.done():
            return None, kept
        error = future.exception()
        assert error is None or isinstance(error, httpx.RequestError)
        return error or future.result(), kept

    return asyncio.run(main())


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """Cuts ``data`` at these places."""
    at = [0, *sorted({place % len(data) for place in places} - {0}), len(data)]
    return [data[start:end] for start, end in pairwise(at)]


@given(st.sampled_from([PLAIN, CHUNKED, GZIP]), st.lists(st.integers(0, 10_000), max_size=12))
def test_a_reply_is_the_same_however_it_is_cut(data, places):
    answer, kept = exchange(cut(data, places))
    assert isinstance(answer, Answer)
    assert (answer.status, answer.content, kept) == (200, BODY, True)


@pytest.mark.parametrize("data", [PLAIN, CHUNKED, GZIP])
def test_a_connection_that_ends_at_any_byte_before_the_last_is_no_reply(data):
    for end in range(len(data)):
        answer, _ = exchange([data[:end]], ended=True)
        assert isinstance(answer, httpx.ReadError), end


@given(st.sampled_from([PLAIN, CHUNKED, GZIP]), st.binary(min_size=1, max_size=40))
def test_bytes_beyond_the_reply_never_change_it_and_cost_the_connection(data, extra):
    answer, kept = exchange([data + extra])
    assert isinstance(answer, Answer)
    assert answer.content == BODY
    assert not kept or not extra.strip(b"\r\n")


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_no_bytes_whatever_raise_anything_but_a_request_error(pieces):
    exchange(pieces, ended=True)
    exchange([b"HTTP/1.1 200 OK\r\n", *pieces], ended=True)
    exchange([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *pieces], ended=True)


@given(st.binary(max_size=2000), st.sampled_from([15, -15, 31]), st.lists(st.integers(0, 10_000), max_size=8))
def test_decoding_is_the_same_however_it_is_cut(data, window, places):
    packer = zlib.compressobj(wbits=window)
    packed = packer.compress(data) + packer.flush()
    decoder = Decoder(b"gzip" if window == 31 else b"deflate", 1 << 20)
    assert b"".join(decoder.feed(piece) for piece in cut(packed, places)) == data
    decoder.finish()
