"""The simulated provider: an httpx transport that answers like OpenAI or Anthropic, with latency, quotas and faults.

Everything random comes from one seed and the request's own bytes, so the same job meets the same answers in whatever
order its requests happen to go out. Used by the demo and by tests, through the same client as any provider.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import httpx
import orjson

from batchrun.config import SimSettings
from batchrun.run.simcache import PromptCache

__all__ = ["SimTransport"]

_SAYING = (
    "the order was checked and a refund is on its way please allow three days thank you for your patience we have "
    "updated the account settings and everything should work again the parcel left our warehouse this morning"
)
_WORDS = _SAYING.split()

_SPREAD = 0.35
"""Standard deviation of the logarithm of the latency: p99 is about 2.3 × the median, as real providers show."""


class SimTransport(httpx.AsyncBaseTransport):
    """Answers chat, responses, completions, embeddings and messages requests after a simulated latency.

    Calls of several rows too: arrays of inputs and prompts, vLLM's chat batch, and gateways' two batch bodies. Each
    row of them gets its own answer, the call takes as long as its slowest row, and fails as a whole.

    Quotas are token buckets that start full, charge prompt + max_tokens at admission, and tell their state in headers,
    as providers do. ``error_rate`` of the sends fail: a third each with 500, with 503 and by a lost connection.
    Calls of one row have a prompt cache, whose reads their usage tells as each endpoint does.
    """

    def __init__(self, settings: SimSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._requests = _Bucket(settings.rpm, clock())
        self._tokens = _Bucket(settings.tpm, clock())
        self._cache = PromptCache(settings.cache_life_s)
        self._seen: dict[bytes, int] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answers one request. Raises: httpx.ReadError for a lost connection, httpx.ReadTimeout past the deadline."""
        content = request.content
        rng = self._random(content)
        body = orjson.loads(content)
        prompt_tokens, limit = _size(content, body)
        rows = _rows(request.url.path, body)
        most_tokens = prompt_tokens + _most_output(rows, limit)
        now = self._clock()
        wait_s = max(self._requests.wait(now, 1), self._tokens.wait(now, most_tokens))
        if wait_s > 0:
            return self._refusal(now, wait_s)
        self._requests.take(1)
        self._tokens.take(most_tokens)
        headers = self._quota_headers(now)
        beginnings = self._cache.beginnings(request.url.path, body.get("model"), content) if rows is None else []
        cached = self._cache.read(now, beginnings)
        latency_s = self._settings.latency_s * max(rng.lognormvariate(0.0, _SPREAD) for _ in rows or [None])
        deadline_s = request.extensions.get("timeout", {}).get("read") or 600.0
        await asyncio.sleep(min(latency_s, deadline_s))
        if latency_s > deadline_s:
            raise httpx.ReadTimeout("the simulated provider is slower than --timeout", request=request)
        if rng.random() < self._settings.error_rate:
            status = rng.choice((500, 503, 0))
            if status == 0:
                raise httpx.ReadError("the simulated provider dropped the connection", request=request)
            return _json(status, _error("server_error", f"simulated error {status}"), headers)
        if rows is None:
            written = self._cache.write(self._clock(), beginnings) - cached
            answer = _answer(request.url.path, body, (prompt_tokens, cached, written), limit, rng)
        else:
            asked = [(row, self._random(orjson.dumps(row), sent=0)) for row in rows]
            answer = _packed_answer(request.url.path, body, asked, prompt_tokens, limit)
        if answer is None:
            return _json(404, _error("not_found", f"the simulator has no {request.url.path}"), headers)
        return _json(200, answer, headers)

    def _random(self, content: bytes, sent: int | None = None) -> random.Random:
        """A generator for this send: depends on the seed, the request and how often it was sent, not on the order."""
        digest = blake2b(content, digest_size=16).digest()
        if sent is None and self._settings.error_rate:
            self._seen[digest] = sent = self._seen.get(digest, 0) + 1
        return random.Random(f"{self._settings.seed}:{sent or 0}:{digest.hex()}")  # noqa: S311 - a simulation

    def _refusal(self, now: float, wait_s: float) -> httpx.Response:
        headers = self._quota_headers(now) | {"retry-after-ms": str(int(wait_s * 1000) + 1)}
        return _json(429, _error("rate_limit_exceeded", "simulated rate limit reached"), headers)

    def _quota_headers(self, now: float) -> dict[str, str]:
        headers = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket.capacity is not None:
                level = bucket.level(now)
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.capacity)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(level)))
                headers[f"x-ratelimit-reset-{name}"] = f"{(bucket.capacity - level) / bucket.capacity * 60:.3f}s"
        return headers


class _Bucket:
    """A quota per minute that refills continuously; None: no limit."""

    def __init__(self, per_minute: int | None, now: float) -> None:
        self.capacity = per_minute
        self._level = float(per_minute or 0)
        self._at = now

    def level(self, now: float) -> float:
        if self.capacity is None:
            return 0.0
        self._level = min(self.capacity, self._level + (now - self._at) * self.capacity / 60)
        self._at = now
        return self._level

    def wait(self, now: float, amount: int) -> float:
        """Returns the seconds until ``amount`` is there. More than the whole bucket needs a full one."""
        if self.capacity is None:
            return 0.0
        missing = min(amount, self.capacity) - self.level(now)
        return max(0.0, missing / self.capacity * 60)

    def take(self, amount: int) -> None:
        self._level -= amount


def _json(status: int, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    return httpx.Response(status, content=orjson.dumps(body), headers={"content-type": "application/json", **headers})


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": code, "param": None, "code": code}}


def _size(content: bytes, body: dict[str, Any]) -> tuple[int, int]:
    """Returns (prompt tokens, most output tokens) as the simulator counts them: four bytes a token."""
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    limit = next((body[name] for name in names if isinstance(body.get(name), int)), 0)
    return max(1, len(content) // 4), limit


def _answer(
    path: str, body: dict[str, Any], prompt: tuple[int, int, int], limit: int, rng: random.Random
) -> dict[str, Any] | None:
    """Returns the reply's body in the shape of the endpoint, or None for an unknown path.

    ``prompt`` are its tokens: all, those read from the cache, and those newly written to it.
    """
    prompt_tokens, cached, written = prompt
    model = body.get("model")
    identity = f"{rng.getrandbits(64):016x}"
    text, count, finish = _text(rng, limit)
    usage = _usage(prompt_tokens, count)
    if cached:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    if path.endswith("/chat/completions"):
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        return {
            "id": f"chatcmpl-{identity}",
            "object": "chat.completion",
            "model": model,
            "choices": [choice],
            "usage": usage,
        }
    if path.endswith("/completions"):
        return {
            "id": f"cmpl-{identity}",
            "object": "text_completion",
            "model": model,
            "choices": [{"index": 0, "text": text, "finish_reason": finish}],
            "usage": usage,
        }
    if path.endswith("/embeddings"):
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
        return {"object": "list", "data": [_vector(0, rng)], "model": model, "usage": usage}
    if path.endswith("/responses"):
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {
            "type": "message",
            "id": f"msg_{identity}",
            "role": "assistant",
            "status": "completed",
            "content": content,
        }
        return {
            "id": f"resp_{identity}",
            "object": "response",
            "status": "completed" if finish == "stop" else "incomplete",
            "incomplete_details": None if finish == "stop" else {"reason": "max_output_tokens"},
            "model": model,
            "output": [message],
            "usage": {
                "input_tokens": prompt_tokens,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": count,
                "total_tokens": prompt_tokens + count,
            },
        }
    if path.endswith("/messages"):
        return {
            "id": f"msg_{identity}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [{"type": "text", "text": text}],
            "stop_reason": "max_tokens" if finish == "length" else "end_turn",
            "usage": {
                "input_tokens": prompt_tokens - cached - written,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": written,
                "output_tokens": count,
            },
        }
    return None


def _text(rng: random.Random, limit: int) -> tuple[str, int, str]:
    """Returns (text, its tokens, why it ended) of an answer of at most ``limit`` tokens; 0: no limit."""
    wanted = max(1, round(rng.lognormvariate(2.5, 0.6)))
    count = min(wanted, limit or wanted)
    start = rng.randrange(len(_WORDS))
    text = " ".join(_WORDS[(start + i) % len(_WORDS)] for i in range(count))
    return text, count, "length" if count < wanted else "stop"


def _vector(index: int, rng: random.Random) -> dict[str, Any]:
    vector = [round(rng.uniform(-1, 1), 6) for _ in range(8)]
    return {"object": "embedding", "index": index, "embedding": vector}


def _usage(given: int, said: int) -> dict[str, Any]:
    return {"prompt_tokens": given, "completion_tokens": said, "total_tokens": given + said}


# ---------------------------------------------------------------- several rows in a call


def _rows(path: str, body: dict[str, Any]) -> list[Any] | None:
    """Returns what each row of a call asks; None where the call is one row."""
    if path.endswith("/chat/completions/batch"):
        name = "messages"
    elif path.endswith("/chat/completions"):
        name = "batch"
    elif path.endswith("/batch"):
        name = "batch_requests"
    elif path.endswith("/completions"):
        name = "prompt"
    else:
        name = "input" if path.endswith("/embeddings") else ""
    rows = body.get(name)
    return rows if isinstance(rows, list) and rows and not isinstance(rows[0], int) else None


def _most_output(rows: list[Any] | None, limit: int) -> int:
    """Returns the most output tokens of a call: each row's own limit, or the call's for every row."""
    return sum(_row_limit(row, limit) for row in rows) if rows else limit


def _row_limit(row: object, limit: int) -> int:
    own = row.get("max_tokens") if isinstance(row, dict) else None
    return own if isinstance(own, int) else limit


def _packed_answer(
    path: str, body: dict[str, Any], asked: list[tuple[Any, random.Random]], prompt_tokens: int, limit: int
) -> dict[str, Any]:
    """Returns the reply to a call of several rows. What a row is told does not depend on the others."""
    model = body.get("model")
    if path.endswith("/embeddings"):
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
        data = [_vector(index, rng) for index, (_, rng) in enumerate(asked)]
        return {"object": "list", "data": data, "model": model, "usage": usage}
    if "batch_requests" in body or "batch" in body:
        results = [_result(row, _text(rng, _row_limit(row, limit))) for row, rng in asked]
        return {"model": model, "results": results}
    chat = path.endswith("/batch")
    each = 1 if chat else body.get("n") or 1
    said = [_text(rng, limit) for _, rng in asked for _ in range(each)]
    choices = [
        {
            "index": index,
            **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
            "finish_reason": finish,
        }
        for index, (text, _, finish) in enumerate(said)
    ]
    return {
        "object": "chat.completion" if chat else "text_completion",
        "model": model,
        "choices": choices,
        "usage": _usage(prompt_tokens, sum(count for _, count, _ in said)),
    }


def _result(row: object, said: tuple[str, int, str]) -> dict[str, Any]:
    """Returns a gateway's result: named where the row was, with usage of its own."""
    text, count, finish = said
    name = {"custom_id": row["custom_id"]} if isinstance(row, dict) else {}
    usage = _usage(max(1, len(orjson.dumps(row)) // 4), count)
    return {**name, "status": "succeeded", "output": {"text": text, "finish_reason": finish}, "usage": usage}
