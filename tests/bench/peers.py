"""What batchrun is measured beside: the loop that people write first, and the SDK that they write it with.

Run as ``python tests/bench/peers.py aiohttp|openai INPUT URL IN_FLIGHT``. Each sends every row of an OpenAI batch file,
keeps the answers in memory, and stores nothing: less than a bulk runner must do.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


async def naive_aiohttp(path: str, url: str, in_flight: int) -> int:
    """All rows gathered at once under a semaphore."""
    import aiohttp

    limit = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def one(row: dict[str, Any]) -> str:
            async with limit, session.post(f"{url}/v1/chat/completions", json=row["body"]) as response:
                return (await response.json())["choices"][0]["message"]["content"]

        return len(await asyncio.gather(*map(one, rows(path))))


async def openai_sdk(path: str, url: str, in_flight: int) -> int:
    """The same through the openai SDK with its defaults, retries off."""
    from openai import AsyncOpenAI

    limit = asyncio.Semaphore(in_flight)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def one(row: dict[str, Any]) -> str | None:
            async with limit:
                reply = await client.chat.completions.create(**row["body"])
            return reply.choices[0].message.content

        return len(await asyncio.gather(*map(one, rows(path))))


PEERS = {"aiohttp": naive_aiohttp, "openai": openai_sdk}

if __name__ == "__main__":
    name, source, server, concurrency = sys.argv[1:]
    print(asyncio.run(PEERS[name](source, server, int(concurrency))))
