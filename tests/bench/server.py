"""A provider that costs next to nothing: the fast loopback server of the benchmarks.

Run as ``python tests/bench/server.py --port 0 --delay-ms 50 --reply-bytes 2000``; it prints its port and
serves until its stdin closes. Every POST gets the same ready-made answer of its endpoint after the delay (by
a sweep each millisecond, so an answer may be 1 ms late). ``GET /stats`` returns what was counted since
``GET /reset``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import subprocess
import sys
import urllib.request
from collections import deque
from typing import Any, Self

SWEEP_S = 0.001
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: req_1\r\ncontent-length: %d\r\n\r\n"


def answer(kind: str, reply_bytes: int) -> bytes:
    """Returns a whole HTTP response of about ``reply_bytes``, in the shape of the endpoint."""
    usage = {"prompt_tokens": 800, "completion_tokens": 20, "total_tokens": 820}
    body: dict[str, Any]
    if kind == "messages":
        body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "bench-model"}
        body |= {"content": [{"type": "text", "text": ""}], "stop_reason": "end_turn", "stop_sequence": None}
        body |= {"usage": {"input_tokens": 800, "output_tokens": 20}}
        place = body["content"][0]
        key = "text"
    elif kind == "embeddings":
        vector = {"object": "embedding", "index": 0, "embedding": [0.25] * max(1, reply_bytes // 6)}
        body = {"object": "list", "model": "bench-model", "data": [vector]}
        body |= {"usage": {"prompt_tokens": 800, "total_tokens": 800}}
        place, key = None, ""
    else:
        message = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1750000000}
        body |= {"model": "bench-model", "choices": [choice], "usage": usage, "system_fingerprint": "fp_1"}
        place, key = message, "content"
    if place is not None:
        place[key] = ("lorem ipsum dolor sit amet " * (reply_bytes // 27 + 1))[
            : max(1, reply_bytes - len(json.dumps(body)))
        ]
    content = json.dumps(body).encode()
    return OK % len(content) + content


class Counts:
    """What the server saw."""

    def __init__(self) -> None:
        self.requests = self.bytes = self.connections = self.in_flight = self.max_in_flight = 0


class Bench(asyncio.Protocol):
    """Finds the end of each request by its content-length, and answers it now or at a later sweep."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.server.counts.connections += 1

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer + data if self.buffer else data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            head = buffer[:end].lower()
            at = head.find(b"\r\ncontent-length:")
            length = int(head[at + 17 :].split(b"\r", 1)[0]) if at >= 0 else 0
            if len(buffer) < end + 4 + length:
                break
            buffer = buffer[end + 4 + length :]
            self.server.serve(self.transport, head, end + 4 + length)
        self.buffer = buffer


class Server:
    """The answers, the counts, and the requests whose answers are due later."""

    def __init__(self, delay_s: float, reply_bytes: int) -> None:
        self.delay_s = delay_s
        self.counts = Counts()
        self.loop = asyncio.get_running_loop()
        self.due: deque[tuple[float, Any, bytes]] = deque()
        self.sweeping = False
        self.chat = answer("chat", reply_bytes)
        self.others = {kind: answer(kind, reply_bytes) for kind in ("messages", "embeddings")}

    def serve(self, transport: Any, head: bytes, size: int) -> None:
        target = head.split(b" ", 2)[1]
        if head.startswith(b"get "):
            transport.write(self.stats(reset=target == b"/reset"))
            return
        reply = self.chat
        if not target.endswith(b"/chat/completions"):
            reply = self.others.get(target.rsplit(b"/", 1)[-1].decode(), reply)
        counts = self.counts
        counts.requests += 1
        counts.bytes += size
        if not self.delay_s:
            counts.max_in_flight = max(counts.max_in_flight, 1)
            transport.write(reply)
            return
        counts.in_flight += 1
        counts.max_in_flight = max(counts.max_in_flight, counts.in_flight)
        self.due.append((self.loop.time() + self.delay_s, transport, reply))
        if not self.sweeping:
            self.sweeping = True
            self.loop.call_later(self.delay_s, self.sweep)

    def sweep(self) -> None:
        now = self.loop.time()
        due = self.due
        while due and due[0][0] <= now:
            _, transport, reply = due.popleft()
            self.counts.in_flight -= 1
            if not transport.is_closing():
                transport.write(reply)
        self.sweeping = bool(due)
        if due:
            self.loop.call_later(max(SWEEP_S, due[0][0] - now), self.sweep)

    def stats(self, *, reset: bool) -> bytes:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seen = vars(self.counts) | {"cpu_s": used.ru_utime + used.ru_stime}
        if reset:
            self.counts.requests = self.counts.bytes = self.counts.connections = self.counts.max_in_flight = 0
        content = json.dumps(seen).encode()
        return OK % len(content) + content


class BenchServer:
    """The server in a process of its own: ``with BenchServer(delay_ms=50) as server: server.url``."""

    def __init__(self, *, delay_ms: float = 0, reply_bytes: int = 2000) -> None:
        self.arguments = ["--delay-ms", str(delay_ms), "--reply-bytes", str(reply_bytes)]

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, "--port", "0", *self.arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """Returns requests, bytes, connections, in_flight, max_in_flight and cpu_s (of its whole life)."""
        with urllib.request.urlopen(f"{self.url}/{'reset' if reset else 'stats'}") as response:
            seen: dict[str, Any] = json.load(response)
        return seen


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--reply-bytes", type=int, default=2000)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    loop = asyncio.get_running_loop()
    bench = Server(options.delay_ms / 1000, options.reply_bytes)
    server = await loop.create_server(lambda: Bench(bench), "127.0.0.1", options.port, backlog=4096)
    gc.freeze()
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
