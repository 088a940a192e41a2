"""The simulated provider's prompt cache, as OpenAI describes its own: from 1,024 tokens on, in steps of 128."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import orjson

from batchrun.intake.prefixes import prompt_bytes

__all__ = ["PromptCache"]

_BYTES_PER_TOKEN = 4
"""As the simulator counts."""
_LEAST_BYTES = 1_024 * _BYTES_PER_TOKEN
_STEP_BYTES = 128 * _BYTES_PER_TOKEN
_MOST = 1 << 18
"""Beginnings remembered, some 30 MB; beyond that the least recently used one goes."""


class PromptCache:
    """Remembers how prompts began, for ``life_s`` after each use. What a reply begins is there once it was given."""

    def __init__(self, life_s: float) -> None:
        self._life_s = life_s
        self._used_at: OrderedDict[bytes, float] = OrderedDict()

    def beginnings(self, path: str, model: object, content: bytes) -> list[bytes]:
        """Returns a name for each beginning of a request that can be cached, the shortest first.

        On the Anthropic API that is what a request marks: up to its last ``cache_control``, or all of it where the
        request itself is marked. Embeddings have no cache.
        """
        if self._life_s <= 0 or len(content) < _LEAST_BYTES or path.endswith("/embeddings"):
            return []
        return list(_names(orjson.dumps([path, model]), prompt_bytes(content, marked=path.endswith("/messages"))))

    def read(self, now: float, beginnings: list[bytes]) -> int:
        """Returns how many tokens of a request are served from the cache; they live on."""
        found = 0
        for number, name in enumerate(beginnings, 1):
            used_at = self._used_at.get(name)
            if used_at is not None and now < used_at + self._life_s:
                found = number
        self._use(now, beginnings[:found])
        return _tokens(found)

    def write(self, now: float, beginnings: list[bytes]) -> int:
        """Remembers a request that was answered. Returns how many tokens it holds."""
        self._use(now, beginnings)
        return _tokens(len(beginnings))

    def _use(self, now: float, names: list[bytes]) -> None:
        for name in names:
            self._used_at[name] = now
            self._used_at.move_to_end(name)
        while len(self._used_at) > _MOST:
            self._used_at.popitem(last=False)


def _names(scope: bytes, prompt: bytes) -> Iterator[bytes]:
    digest = blake2b(scope, digest_size=12)
    start = 0
    for end in range(_LEAST_BYTES, len(prompt) + 1, _STEP_BYTES):
        digest.update(prompt[start:end])
        yield digest.digest()
        start = end


def _tokens(beginnings: int) -> int:
    return (_LEAST_BYTES + (beginnings - 1) * _STEP_BYTES) // _BYTES_PER_TOKEN if beginnings else 0
