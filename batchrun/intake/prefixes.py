"""Which rows' prompts begin alike for so long that a provider's prompt cache would serve them: found by sorting keys.

A row's key is a chain of digests: of its prompt's first 1,024 tokens, of its first 1,280, and so on. So two keys have
as many digests in common as their prompts have blocks, and in sorted order those that share most are neighbours: rows
under one system prompt, and among them those about one document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from batchrun.records import Row

__all__ = ["LEAST_BYTES", "Key", "Member", "Shared", "group", "key_of", "prompt_bytes"]

LEAST_BYTES = 4_096
"""1,024 tokens, the least that OpenAI, Anthropic and Gemini cache, at the usual four bytes a token."""
MOST_BYTES = 4 * 1024 * 1024
"""Further into a prompt no row is compared: a million tokens, the longest context there is."""
_STEP_BYTES, _STEP_PART = 1_024, 8
"""A block is 256 tokens, further in an eighth of what is before it: keys stay short, and miss little."""
_DEEPEST = 4
"""Groups within groups: instructions, a document, a chapter; beyond that a wait of its own gains nothing."""
_DIGEST_BYTES = 8
_WORTH_SHARE = 0.1
_WORTH_BYTES = 400_000

_FIELDS = (
    "model", "prompt_cache_key", "tools", "functions", "response_format", "text",
    "system", "instructions", "systemInstruction", "system_instruction",
    "messages", "input", "contents", "prompt",
)  # fmt: skip
"""What a provider reads before it writes, in the order in which it caches: tools, then system, then messages."""

_MARK = b'"cache_control"'

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def prompt_bytes(body: bytes, *, marked: bool = False) -> bytes:
    """Returns what a body asks as a cache sees it: raw JSON, in the order in which providers read it.

    ``marked``: as the Anthropic API has it, up to the last ``cache_control``, unless the body itself has one.
    """
    members = _members.decode(body)
    prompt = b"".join([members[name] for name in _FIELDS if name in members])
    return prompt[: max(0, prompt.rfind(_MARK))] if marked and "cache_control" not in members else prompt


class Key(NamedTuple):
    """A row's key: ``chain`` sorts it beside those that begin alike; ``bytes`` are those of its whole body."""

    chain: bytes
    line: int
    model: str
    bytes: int


def key_of(row: Row) -> Key | None:
    """Returns a row's key; None where no cache would hold what it shares: it is short, or nothing of it is cached.

    Embeddings have no prompt cache. The Anthropic API caches what a request marks with ``cache_control``, and nothing
    else. A row with a priority has an order of its own.
    """
    body = row.body
    if len(body) < LEAST_BYTES or row.endpoint == "embeddings" or row.priority:
        return None
    marked = row.endpoint == "messages"
    if marked and _MARK not in body:
        return None
    chain = _chain(prompt_bytes(body, marked=marked), f"{row.endpoint}\n{row.model}\n".encode())
    return Key(chain, row.line, row.model, len(body)) if chain else None


def _chain(prompt: bytes, scope: bytes) -> bytes:
    digest = blake2b(scope, digest_size=_DIGEST_BYTES)
    view = memoryview(prompt)
    links: list[bytes] = []
    at = 0
    for end in _boundaries(len(prompt)):
        digest.update(view[at:end])
        links.append(digest.digest())
        at = end
    return b"".join(links)


def _boundaries(size: int) -> Iterator[int]:
    """Yields where the blocks end that ``size`` bytes fill."""
    end = LEAST_BYTES
    while end <= min(size, MOST_BYTES):
        yield end
        end += max(_STEP_BYTES, end // _STEP_PART)


_ENDS = (0, *_boundaries(MOST_BYTES))
"""Digests in common → bytes in common."""


def _common(a: bytes, b: bytes) -> int:
    """Returns how many digests two chains have in common."""
    most = min(len(a), len(b))
    for at in range(0, most, _DIGEST_BYTES):
        if a[at : at + _DIGEST_BYTES] != b[at : at + _DIGEST_BYTES]:
            return at // _DIGEST_BYTES
    return most // _DIGEST_BYTES


# ---------------------------------------------------------------- groups


class Member(NamedTuple):
    """A row of a group. ``path`` are the numbers, from 1, of that group and of those around it, the widest first."""

    line: int
    path: tuple[int, ...]
    model: str
    shared: int
    """Bytes that its prompt has in common with that of a row before it."""


def group(keys: Iterable[Key]) -> Iterator[Member]:
    """Yields the rows that share, in the order in which to send them; ``keys`` come sorted by falling chain.

    The first row of a group begins the cache that serves the others. Falling, so that of prompts that continue each
    other the longest is first, and holds all the others. Where a row has a tenth more in common with the next one than
    with its group, a group within that group begins: the questions about one document, under instructions for all.
    """
    count = 0
    around: list[tuple[int, int]] = []
    """(number, digests in common) of the groups that are open, the widest first."""
    behind = 0
    following = iter(keys)
    key = next(following, None)
    while key is not None:
        then = next(following, None)
        ahead = 0 if then is None else _common(key.chain, then.chain)
        while around and around[-1][1] > behind:
            number, _ = around.pop()
            if behind > (around[-1][1] if around else 0):
                around.append((number, behind))  # it goes on, with less in common
        shared = _ENDS[around[-1][1]] if around else 0
        if _ENDS[ahead] - shared > _WORTH_SHARE * _ENDS[ahead] and len(around) < _DEEPEST:
            count += 1
            around.append((count, ahead))
        if around:
            yield Member(key.line, tuple(number for number, _ in around), key.model, shared)
        key, behind = then, ahead


class Shared(msgspec.Struct):
    """What the rows of an input share."""

    rows: int = 0
    """In groups."""
    groups: int = 0
    bytes: int = 0
    """Of all bodies, in groups or not."""
    shared: dict[str, int] = msgspec.field(default_factory=dict)
    """Model → bytes that a cache would read once the first row of each group has begun it."""

    def add(self, member: Member) -> None:
        """Takes a row of a group in."""
        self.rows += 1
        self.groups = max(self.groups, member.path[-1])
        self.shared[member.model] = self.shared.get(member.model, 0) + member.shared

    @property
    def share(self) -> float:
        """The share of the input that a cache would read."""
        return sum(self.shared.values()) / self.bytes if self.bytes else 0.0

    @property
    def pays(self) -> bool:
        """Whether it is worth it to send groups together and to wait for the first reply of each.

        What it costs is a round trip for each group, mostly spent on other groups, so it need not save much: a tenth of
        the input, but at least 100,000 tokens, which are cents at usual prices. Less is not worth even that wait.
        """
        return self.share >= _WORTH_SHARE and sum(self.shared.values()) >= _WORTH_BYTES
