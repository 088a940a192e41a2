"""The simulated prompt cache: what it serves, from when on, for how long, and how each endpoint tells."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from batchrun.config import SimSettings
from batchrun.run import simcache
from batchrun.run.sim import SimTransport
from batchrun.run.simcache import PromptCache

DOCUMENT = " ".join(f"word{n}" for n in range(1_200))  # about 2,500 tokens


def chat(text: str, **more: Any) -> bytes:
    return orjson.dumps({**more, "model": "m", "messages": [{"role": "user", "content": text}]})


def read(cache: PromptCache, now: float, content: bytes, path: str = "/v1/chat/completions") -> int:
    """Asks once; the reply comes at once."""
    beginnings = cache.beginnings(path, "m", content)
    found = cache.read(now, beginnings)
    cache.write(now, beginnings)
    return found


def test_a_beginning_is_served_in_steps_of_128_tokens_from_1024_on():
    cache = PromptCache(300.0)
    first = chat(DOCUMENT + " first?")
    assert read(cache, 0.0, first) == 0
    found = read(cache, 1.0, chat(DOCUMENT + " second?"))
    assert found % 128 == 0
    assert len(DOCUMENT) // 4 - 128 < found <= len(first) // 4
    assert read(cache, 2.0, chat(DOCUMENT[:3_900])) == 0
    assert read(cache, 2.0, chat("other " + DOCUMENT)) == 0
    assert 1_024 <= read(cache, 3.0, chat(DOCUMENT[:4_200] + "x" * 2_000)) < 1_200


def test_it_is_there_once_the_reply_was_given_and_lives_on_with_each_use():
    cache = PromptCache(300.0)
    beginnings = cache.beginnings("/v1/chat/completions", "m", chat(DOCUMENT))
    assert cache.read(0.0, beginnings) == 0
    assert cache.read(1.0, beginnings) == 0  # the first is under way
    written = cache.write(2.0, beginnings)
    assert cache.read(301.0, beginnings) == written
    assert cache.read(600.0, beginnings) == written
    assert cache.read(901.0, beginnings) == 0


def test_models_endpoints_and_tools_are_cached_apart():
    cache = PromptCache(300.0)
    read(cache, 0.0, chat(DOCUMENT))
    assert cache.read(1.0, cache.beginnings("/v1/chat/completions", "n", chat(DOCUMENT))) == 0
    assert cache.read(1.0, cache.beginnings("/v1/responses", "m", chat(DOCUMENT))) == 0
    assert cache.read(1.0, cache.beginnings("/v1/chat/completions", "m", chat(DOCUMENT, tools=[{"a": 1}]))) == 0
    assert cache.beginnings("/v1/embeddings", "m", chat(DOCUMENT)) == []
    assert PromptCache(0.0).beginnings("/v1/chat/completions", "m", chat(DOCUMENT)) == []


def test_on_the_anthropic_api_only_what_is_marked_is_cached():
    def message(mark: bool, question: str, **more: Any) -> bytes:
        block = {"type": "text", "text": DOCUMENT} | ({"cache_control": {"type": "ephemeral"}} if mark else {})
        content = [block, {"type": "text", "text": question}]
        return orjson.dumps({**more, "model": "m", "messages": [{"role": "user", "content": content}]})

    path = "/v1/messages"
    assert PromptCache(300.0).beginnings(path, "m", message(False, "q")) == []
    cache = PromptCache(300.0)
    assert read(cache, 0.0, message(True, "q1" * 3_000), path) == 0
    assert len(DOCUMENT) // 4 - 128 < read(cache, 1.0, message(True, "q1" * 3_000), path) <= len(DOCUMENT) // 4 + 64
    whole = message(False, "q1" * 3_000, cache_control={"type": "ephemeral"})
    assert read(cache, 1.0, whole, path) <= len(DOCUMENT) // 4 + 64
    assert read(cache, 2.0, whole, path) > len(whole) // 4 - 200


def test_what_it_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simcache, "_MOST", 50)
    cache = PromptCache(300.0)
    for n in range(30):
        read(cache, n * 1.0, chat(f"{n} {DOCUMENT}"))
    assert len(cache._used_at) == 50
    assert read(cache, 31.0, chat(f"29 {DOCUMENT}")) > 1_024
    assert read(cache, 31.0, chat(f"3 {DOCUMENT}")) == 0


def ask_twice(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    transport = SimTransport(SimSettings(latency_s=0.0))

    async def ask() -> dict[str, Any]:
        request = httpx.Request("POST", f"http://sim.invalid{path}", json=body)
        answer: dict[str, Any] = orjson.loads((await transport.handle_async_request(request)).content)
        return answer["usage"]

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        return await ask(), await ask()

    return asyncio.run(both())


def test_each_endpoint_tells_of_the_cache_in_its_own_words():
    asked = [{"role": "user", "content": DOCUMENT}]
    first, second = ask_twice("/v1/chat/completions", {"model": "m", "messages": asked})
    assert "prompt_tokens_details" not in first
    assert 1_024 <= second["prompt_tokens_details"]["cached_tokens"] <= second["prompt_tokens"]
    first, second = ask_twice("/v1/responses", {"model": "m", "input": DOCUMENT})
    assert first["input_tokens_details"]["cached_tokens"] == 0
    assert 1_024 <= second["input_tokens_details"]["cached_tokens"] <= second["input_tokens"]
    marked = {"model": "m", "max_tokens": 9, "messages": asked, "cache_control": {"type": "ephemeral"}}
    first, second = ask_twice("/v1/messages", marked)
    assert first["cache_creation_input_tokens"] == second["cache_read_input_tokens"] >= 1_024
    assert (first["cache_read_input_tokens"], second["cache_creation_input_tokens"]) == (0, 0)
    in_all = [sum(count for name, count in usage.items() if name != "output_tokens") for usage in (first, second)]
    assert in_all[0] == in_all[1]
    _, second = ask_twice("/v1/embeddings", {"model": "m", "input": DOCUMENT})
    assert second.keys() == {"prompt_tokens", "total_tokens"}
