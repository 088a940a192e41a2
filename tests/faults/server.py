"""A provider that misbehaves on request: a loopback server whose every byte a test can choose.

By default it answers like OpenAI, Anthropic or Gemini, with ``echo:`` and the last user text; it records what
came::

    with FaultServer() as server:
        server.script(lambda request, n: Reply(503) if n <= 3 else None)  # None: the default answer
        ...  # run something against server.url
        assert len(server.requests) == 13 and server.max_in_flight == 4

``script`` also takes a list, for the first requests in their order of arrival. The server runs in a thread of
its own and serves several thousand requests a second; its counters may be read from the test at any time.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import httptools
import uvloop

__all__ = ["FaultServer", "Reply", "Request", "anthropic_error", "error", "vector"]


@dataclass
class Request:
    """One request as it arrived. ``number`` counts from 1, and ``repeat`` those with the same body."""

    number: int
    repeat: int
    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    at: float
    """Monotonic second at which its last byte came."""
    in_flight: int
    """Requests being served at that moment, this one included."""
    connection: int
    """Which connection brought it, from 1."""

    @cached_property
    def json(self) -> Any:
        """The body, parsed; None where it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @cached_property
    def texts(self) -> list[str]:
        """What is asked: the last user text, or that of each row where the call has several."""
        body = self.json if isinstance(self.json, dict) else {}
        if "batch_requests" in body:
            return [asked["prompt"] for asked in body["batch_requests"]]
        if conversations(body):
            return [last_user_text(turns) for turns in conversations(body)]
        asked = body.get("input", body.get("prompt"))
        if isinstance(asked, str):
            return [asked]
        if isinstance(asked, list) and all(isinstance(item, str) for item in asked):
            return asked
        turns = asked or body.get("messages") or body.get("contents") or []
        return [last_user_text(turns)]

    @property
    def text(self) -> str:
        """The last user text."""
        return self.texts[-1] if self.texts else ""


def conversations(body: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the conversations of a call that has several: a gateway's ``batch``, vLLM's nested ``messages``."""
    asked = body.get("batch") or body.get("messages") or []
    return asked if asked and all(isinstance(turns, list) for turns in asked) else []


def last_user_text(turns: list[Any]) -> str:
    users = [turn for turn in turns if isinstance(turn, dict) and turn.get("role", "user") == "user"]
    content = (users[-1].get("content") or users[-1].get("parts") or "") if users else ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content


@dataclass
class Reply:
    """What to do with a request. The fields play in this order: wait, bytes, end."""

    status: int = 200
    body: bytes | str | Mapping[str, Any] | list[Any] | None = None
    """JSON where it is no text or bytes. None: the default answer if ``status`` is 200, else nothing."""
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None
    """The content-length to claim, if not the true one; -1 to claim none."""
    raw: bytes | None = None
    """The whole reply, verbatim, instead of all the above."""
    delay_s: float = 0.0
    hold: bool = False
    """Waits for ``FaultServer.release``."""
    drip_s: float | None = None
    """Sends a byte at a time, this far apart."""
    endless: bytes = b""
    """Repeated after the bytes for as long as the client listens."""
    end: Literal["keep", "close", "reset", "hang"] = "keep"
    """``reset`` is an RST; ``hang`` leaves the connection open and the request in service."""
    billed: bool | None = None
    """None: a 200 is, anything else is not."""


def error(status: int, code: str | None = None, message: str = "no", kind: str = "error", **headers: str) -> Reply:
    """Returns an error in OpenAI's shape; ``headers`` with underscores for hyphens."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return Reply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def anthropic_error(status: int, kind: str, message: str = "no", **headers: str) -> Reply:
    """Returns an error in Anthropic's shape."""
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    return Reply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def vector(text: str) -> list[float]:
    """Returns the embedding that the server gives for ``text``."""
    return [float(len(text)), zlib.crc32(text.encode()) % 1000 / 1000]


Script = Callable[[Request, int], Reply | None]


class FaultServer:
    """The server; ``with`` starts and stops it. Everything below is counted since the start.

    ``max_in_flight_allowed``: a request beyond it is refused with 429. ``requests_per_s`` with ``burst`` and
    ``tokens_per_minute`` (full at the start) are token buckets that refuse with 429; ``quota_headers`` tells
    their state in OpenAI's headers, and the wait in Retry-After.
    """

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        max_in_flight_allowed: int | None = None,
        requests_per_s: float | None = None,
        burst: float = 1.0,
        tokens_per_minute: float | None = None,
        quota_headers: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.delay_s = delay_s
        self.max_in_flight_allowed = max_in_flight_allowed
        self.quota_headers = quota_headers
        self.tls = tls
        self.requests: list[Request] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.connections = 0
        self.open_connections = 0
        self.billed: Counter[bytes] = Counter()
        """How often each body was worked on, whether or not the answer arrived."""
        self.billed_tokens = [0, 0]
        """Input and output tokens of all that was billed."""
        self.refused = 0
        """429s by the limits above."""
        self.reset_on_accept = 0
        """So many of the next connections are reset before anything is read."""
        self.port = 0
        self._script: Script = lambda request, n: None
        self._bodies: Counter[bytes] = Counter()
        self._buckets: dict[str, Bucket] = {}
        if requests_per_s is not None:
            self._buckets["requests"] = Bucket(requests_per_s, burst)
        if tokens_per_minute is not None:
            self._buckets["tokens"] = Bucket(tokens_per_minute / 60, tokens_per_minute)
        self._arrived = threading.Condition()
        self._clients: set[Client] = set()

    # ------------------------------------------------------------ for tests

    @property
    def url(self) -> str:
        """The server's origin, without a path."""
        return f"https://localhost:{self.port}" if self.tls else f"http://127.0.0.1:{self.port}"

    @property
    def seen(self) -> Counter[str]:
        """How often each text was asked."""
        return Counter(text for request in self.requests for text in request.texts)

    def script(self, script: Script | Iterable[Reply | None]) -> None:
        """Sets what is done with each request from now on; a list begins with the next one."""
        if callable(script):
            self._script = script
            return
        first, replies = len(self.requests) + 1, list(script)
        self._script = lambda _, n: replies[n - first] if n - first < len(replies) else None

    def wait_for_requests(self, count: int, timeout_s: float = 10.0) -> None:
        """Returns once ``count`` requests have arrived in all. Raises TimeoutError."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.requests) >= count, timeout_s):
                raise TimeoutError(f"{len(self.requests)} of {count} requests arrived")

    def release(self) -> None:
        """Lets every held reply go, and those to come."""
        self._loop.call_soon_threadsafe(self._released.set)

    def go_down(self) -> None:
        """An outage: connections are reset, new ones refused."""
        self._call(self._close())

    def come_up(self) -> None:
        """The outage's end, on the same port."""
        self._call(self._listen())

    def __enter__(self) -> Self:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-server", daemon=True)
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------ on the server's thread

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._released = asyncio.Event()
        self._playing: set[asyncio.Task[None]] = set()
        sock = socket.create_server(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        self._server = await self._loop.create_server(lambda: Client(self), sock=sock, ssl=self.tls, backlog=4096)

    async def _close(self) -> None:
        self._server.close()
        for client in list(self._clients):
            client.reset()
        for task in list(self._playing):
            task.cancel()
        while self._clients or self._playing:  # noqa: ASYNC110 - two turns of the loop
            await asyncio.sleep(0)

    def serve(self, client: Client, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        """Records a request and answers it, at once or in a task."""
        self.in_flight += 1
        client.serving += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self._bodies[body] += 1
        number = len(self.requests) + 1
        request = Request(
            number,
            self._bodies[body],
            method,
            path,
            headers,
            body,
            time.monotonic(),
            self.in_flight,
            client.number,
        )
        reply = self._refusal(request) or self._script(request, number) or Reply()
        if reply.billed or (reply.billed is None and reply.status == 200):
            self.billed[body] += 1
            for place, tokens in enumerate(usage(request)):
                self.billed_tokens[place] += tokens
        with self._arrived:
            self.requests.append(request)
            self._arrived.notify_all()
        data = self._bytes(request, reply)
        delay_s = reply.delay_s or (self.delay_s if reply.status == 200 else 0)
        if delay_s or reply.hold or reply.drip_s is not None or reply.endless:
            task = self._loop.create_task(self._play(client, reply, data, delay_s))
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)
        else:
            client.transport.write(data)
            client.done(reply.end)

    async def _play(self, client: Client, reply: Reply, data: bytes, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        if reply.hold:
            await self._released.wait()
        transport = client.transport
        if transport.is_closing():  # the client did not wait
            return
        if reply.drip_s is None:
            transport.write(data)
        else:
            for byte in data:
                transport.write(bytes([byte]))
                await asyncio.sleep(reply.drip_s)
                if transport.is_closing():
                    return
        while reply.endless and not transport.is_closing():
            transport.write(reply.endless)
            await asyncio.sleep(0.001 if transport.get_write_buffer_size() > 65_536 else 0)
        client.done(reply.end)

    def _refusal(self, request: Request) -> Reply | None:
        """Returns a 429 where a limit is exceeded; takes from the buckets where none is."""
        if self.max_in_flight_allowed is not None and self.in_flight > self.max_in_flight_allowed:
            self.refused += 1
            return error(429, "rate_limit_exceeded", "Too many requests in flight", "requests")
        amounts = {"requests": 1.0, "tokens": float(sum(usage(request)))}
        for name, bucket in self._buckets.items():
            wait_s = bucket.wait_s(amounts[name], request.at)
            if wait_s > 0:
                self.refused += 1
                hints = {"retry_after": f"{wait_s:.3f}"} if self.quota_headers else {}
                return error(429, "rate_limit_exceeded", f"Rate limit reached for {name}", name, **hints)
        for name, bucket in self._buckets.items():
            bucket.level -= amounts[name]
        return None

    def _bytes(self, request: Request, reply: Reply) -> bytes:
        """Returns the reply as it goes over the wire."""
        if reply.raw is not None:
            return reply.raw
        body = reply.body
        if body is None:
            body = answer(request) if reply.status == 200 else b""
        if isinstance(body, str):
            body = body.encode()
        elif not isinstance(body, bytes):
            body = json.dumps(body).encode()
        headers = {"content-type": "application/json", "x-request-id": f"req_{request.number}"}
        if reply.length != -1:
            headers["content-length"] = str(len(body) if reply.length is None else reply.length)
        if self.quota_headers:
            for name, bucket in self._buckets.items():
                headers[f"x-ratelimit-limit-{name}"] = f"{bucket.per_s * 60:.0f}"
                headers[f"x-ratelimit-remaining-{name}"] = f"{max(0, bucket.level):.0f}"
                headers[f"x-ratelimit-reset-{name}"] = f"{(bucket.size - bucket.level) / bucket.per_s:.3f}s"
        headers |= {name.lower(): value for name, value in reply.headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {reply.status} Status\r\n{lines}\r\n".encode("latin-1") + body


class Bucket:
    """A token bucket that holds ``size`` at most and gains ``per_s``."""

    def __init__(self, per_s: float, size: float) -> None:
        self.per_s = per_s
        self.size = self.level = size
        self.at: float | None = None

    def wait_s(self, amount: float, now: float) -> float:
        """Returns how long until ``amount`` is there; 0 if it is."""
        self.level = min(self.size, self.level + (now - (now if self.at is None else self.at)) * self.per_s)
        self.at = now
        return max(0.0, (amount - self.level) / self.per_s)


class Client(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: FaultServer) -> None:
        self.server = server
        self.parser = httptools.HttpRequestParser(self)
        self.serving = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.connections += 1
        self.server.open_connections += 1
        self.number = self.server.connections
        self.server._clients.add(self)
        if self.server.reset_on_accept > 0:
            self.server.reset_on_accept -= 1
            self.reset()

    def connection_lost(self, _: Exception | None) -> None:
        self.server.open_connections -= 1
        self.server.in_flight -= self.serving
        self.serving = 0
        self.server._clients.discard(self)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers: dict[str, str] = {}
        self.body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        method = self.parser.get_method().decode()
        self.server.serve(self, method, self.url.decode("latin-1"), self.headers, b"".join(self.body))

    def done(self, end: str) -> None:
        """Ends a request's service as its reply says."""
        if end == "hang" or not self.serving:
            return
        self.serving -= 1
        self.server.in_flight -= 1
        if end == "close":
            self.transport.close()
        elif end == "reset":
            self.reset()

    def reset(self) -> None:
        """Ends the connection by RST, so that what was not read yet is lost."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


# ---------------------------------------------------------------- the default answers


def usage(request: Request) -> tuple[int, int]:
    """Returns input and output tokens as counted here: one for 4 bytes of body, one for each word said."""
    output = 0 if request.path.endswith("/embeddings") else sum(1 + text.count(" ") for text in request.texts)
    return max(1, len(request.body) // 4), output


def answer(request: Request) -> dict[str, Any]:
    """Returns what the endpoint says when all is well."""
    path = request.path.split("?", 1)[0]
    known = next((make for suffix, make in ANSWERS.items() if path.endswith(suffix)), None)
    if known is None:
        return {"echo": request.text}
    body = request.json if isinstance(request.json, dict) else {}
    given, said = usage(request)
    texts = [f"echo:{text}" for text in request.texts]
    return {"id": "a-1", "created": 1, "model": body.get("model", "model-1")} | known(request, texts, given, said)


def chat(request: Request, texts: list[str], given: int, said: int) -> dict[str, Any]:
    if "batch" in request.json:
        return {"results": [result({}, text) for text in texts], "usage": totals(given, said)}
    message = {"role": "assistant", "content": texts[-1], "refusal": None}
    choices = [{"index": i, "message": message, "finish_reason": "stop"} for i in range(request.json.get("n", 1))]
    return {"object": "chat.completion", "choices": choices, "usage": totals(given, said)}


def chat_batch(request: Request, texts: list[str], given: int, said: int) -> dict[str, Any]:
    messages = [{"role": "assistant", "content": text} for text in texts]
    choices = [{"index": i, "message": message, "finish_reason": "stop"} for i, message in enumerate(messages)]
    return {"object": "chat.completion", "choices": choices, "usage": totals(given, said)}


def batch(request: Request, texts: list[str], given: int, said: int) -> dict[str, Any]:
    rows = request.json["batch_requests"]
    results = [result({"custom_id": row["custom_id"]}, text) for row, text in zip(rows, texts, strict=True)]
    for row, done in zip(rows, results, strict=True):
        done["usage"] = totals(len(row["prompt"]), 1 + row["prompt"].count(" "))
    return {"results": results}


def result(name: dict[str, str], text: str) -> dict[str, Any]:
    return name | {"status": "succeeded", "output": {"text": text}}


def completions(request: Request, texts: list[str], given: int, said: int) -> dict[str, Any]:
    n = request.json.get("n", 1)
    choices = [{"index": i, "text": texts[i // n], "finish_reason": "stop"} for i in range(len(texts) * n)]
    return {"object": "text_completion", "choices": choices, "usage": totals(given, said)}


def embeddings(request: Request, texts: list[str], given: int, said: int) -> dict[str, Any]:
    data = [{"object": "embedding", "index": i, "embedding": vector(text)} for i, text in enumerate(request.texts)]
    return {"object": "list", "data": data, "usage": {"prompt_tokens": given, "total_tokens": given}}


def responses(request: Request, texts: list[str], given: int, said: int) -> dict[str, Any]:
    content = [{"type": "output_text", "text": texts[-1], "annotations": []}]
    message = {"id": "m-1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    used = {"input_tokens": given, "output_tokens": said, "total_tokens": given + said}
    return {"object": "response", "created_at": 1, "status": "completed", "output": [message], "usage": used}


def messages(request: Request, texts: list[str], given: int, said: int) -> dict[str, Any]:
    said_now = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": texts[-1]}]}
    used = {"input_tokens": given, "output_tokens": said}
    return said_now | {"stop_reason": "end_turn", "stop_sequence": None, "usage": used}


def generate(request: Request, texts: list[str], given: int, said: int) -> dict[str, Any]:
    content = {"role": "model", "parts": [{"text": texts[-1]}]}
    used = {"promptTokenCount": given, "candidatesTokenCount": said, "totalTokenCount": given + said}
    return {"candidates": [{"index": 0, "content": content, "finishReason": "STOP"}], "usageMetadata": used}


def totals(given: int, said: int) -> dict[str, int]:
    return {"prompt_tokens": given, "completion_tokens": said, "total_tokens": given + said}


ANSWERS: dict[str, Callable[[Request, list[str], int, int], dict[str, Any]]] = {
    "/chat/completions/batch": chat_batch,
    "/batch": batch,
    "/chat/completions": chat,
    "/completions": completions,
    "/embeddings": embeddings,
    "/responses": responses,
    "/messages": messages,
    ":generateContent": generate,
}
