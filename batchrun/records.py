"""The vocabulary: plain records that every stage shares. Imports nothing of ours.

Units are in the names: ``_s`` seconds, ``_usd`` exact dollars (Decimal), ``tokens`` counts. ``at`` is wall-clock
seconds since the epoch, for people; ``now`` elsewhere is monotonic seconds, for decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

Endpoint: TypeAlias = Literal["chat", "responses", "completions", "embeddings", "messages", "generate"]

FaultKind: TypeAlias = Literal[
    "rate_limited",  # refused, not processed: 429 and its kin
    "overloaded",  # 503, 529, 498: refused, not processed; 408, 409, 500, 502, 504: maybe_processed
    "timeout",  # the attempt's deadline passed; may have been processed
    "network",  # no connection (not processed), or one lost midway (may have been)
    "too_large",  # this row can never fit
    "rejected",  # this row can never succeed
    "fatal",  # no row can succeed: key, credit, model; stop the run
    "garbled",  # a 200 that cannot be read; may have been billed
]


class Hot(msgspec.Struct, frozen=True, gc=False):
    """A record made for every row. No cycle can hold one, so the garbage collector is spared them."""


# ---------------------------------------------------------------- rows in


class Line(NamedTuple):
    """One physical line of the input: ``data`` without its 0x0A, ``number`` from 1, ``offset`` in bytes."""

    number: int
    offset: int
    data: bytes


class Row(msgspec.Struct):
    """One request. ``line`` (physical, from 1) is its identity and its place in every order."""

    line: int
    custom_id: str
    endpoint: Endpoint
    model: str
    body: bytes
    """The request body, JSON, sent as these very bytes."""
    max_output: int | None
    """Output tokens that the request allows (already times ``n``); 0 for embeddings; None where it names no limit."""
    priority: int = 0
    metadata: bytes | None = None
    """The user's own metadata, raw JSON, never sent."""
    tokens: int = 0
    """Input tokens, estimated; set by the engine from a ``TokenCounter``."""
    prefix: tuple[int, ...] = ()
    """The groups of rows whose prompts begin alike, as the job numbers them, the widest first; empty: none."""


class BadRow(msgspec.Struct, frozen=True):
    """A line that is no request: ``why`` fits after "line N: "; ``hint`` says how to mend it."""

    line: int
    why: str
    hint: str | None = None
    custom_id: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive lines of the input, ``size`` bytes.

    ``entries`` holds 13 bytes a line: length (u32), class (u8; 0: blank, 1: a row), digest (8).
    """

    first_line: int
    offset: int
    size: int
    lines: int
    rows: int
    entries: bytes


# ---------------------------------------------------------------- plan

GroupKey: TypeAlias = tuple[str, ...]
"""What rows must share to travel together; its first two parts are endpoint and model."""

Bound: TypeAlias = Literal["tokens", "rows", "bytes", "input", "interval", "groups"]
"""What ended a batch: a part of its budget, no more rows to share it, none in time, or too many groups at once."""


class Batch(msgspec.Struct, frozen=True):
    """Rows packed together. ``tokens`` is input plus reserved output; ``bytes`` the sum of the bodies."""

    id: int
    key: GroupKey
    rows: tuple[Row, ...]
    tokens: int
    bytes: int
    bound: Bound


class Call(msgspec.Struct, eq=False):
    """One HTTP request to be made: one row in live mode, a whole batch's rows in packed mode."""

    rows: tuple[Row, ...]
    batch: int
    tokens: int
    """Input tokens, estimated."""
    reserved_usd: Decimal
    """Worst-case price; settled or released, never forgotten."""
    priority: int = 0
    sends: int = 0
    """Requests sent for it so far, all runs together."""
    attempts: int = 0
    """Sends that may have been processed; this is what ``--max-attempts`` bounds."""
    ready_at: float = 0.0
    """Monotonic second at which it became sendable for the first time."""
    sent_at: float = 0.0
    """Monotonic second of the current send."""
    opened: Opened | None = None
    """Its batch, where all of it travels in this call: told of with the first send, so that what is not sent is not."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """The groups of its row; none where the call is of many rows."""
        return self.rows[0].prefix if len(self.rows) == 1 else ()


# ---------------------------------------------------------------- wire


class HttpRequest(Hot, frozen=True, gc=False):
    """What a codec wants sent. ``url`` is absolute; ``headers`` are lower-case names, ready to go."""

    url: str
    headers: tuple[tuple[bytes, bytes], ...]
    content: bytes
    method: str = "POST"
    max_reply_bytes: int = 32 * 1024 * 1024
    """Decoded; a larger reply is given up."""


class HttpResponse(Hot, frozen=True, gc=False):
    """What came back. ``headers`` have lower-case names; ``content`` is decoded and capped."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class Usage(Hot, frozen=True, gc=False):
    """Tokens of one response. ``input_tokens`` includes cached ones and ``output_tokens`` reasoning ones, always."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0


class Quota(msgspec.Struct, frozen=True):
    """One quota as its headers tell it. ``reset_s`` is seconds from the reply until it is full (or refilled)."""

    limit: int | None = None
    remaining: int | None = None
    reset_s: float | None = None


class Quotas(msgspec.Struct, frozen=True):
    """What a reply's headers say of the limits per minute; each None where they are silent."""

    requests: Quota | None = None
    tokens: Quota | None = None


class Output(Hot, frozen=True, gc=False):
    """A row's answer. ``value`` is JSON: the text, vector or object that people want. ``body`` is the whole reply."""

    value: bytes
    body: bytes
    finish_reason: str | None = None
    usage: Usage | None = None
    cost_usd: Decimal | None = None
    """Only where the reply itself states what it cost."""
    usage_shared: bool = False


class Reply(Hot, frozen=True, gc=False):
    """A processed call: an Output per custom_id (some may be missing), and what it used in all."""

    outputs: Mapping[str, Output]
    usage: Usage | None
    model: str | None = None
    request_id: str | None = None
    status: int = 200
    service_tier: str | None = None
    quotas: Quotas | None = None
    extras: int = 0
    """Answers that match no row: ignored and counted."""


class Fault(msgspec.Struct, frozen=True):
    """A call that gave no answer. ``maybe_processed`` says whether it may have been worked on and billed."""

    kind: FaultKind
    detail: str
    status: int | None = None
    retry_after_s: float | None = None
    code: str | None = None
    param: str | None = None
    maybe_processed: bool = False
    connected: bool = True
    """False where no connection came about: nothing was sent, so an intent need not be feared."""
    stop: Literal["auth", "account", "tls", "redirect"] | None = None
    """For ``fatal``: which kind of stop, and so which exit code (77, 78, 69, 78)."""
    usage: Usage | None = None
    model: str | None = None
    request_id: str | None = None
    quotas: Quotas | None = None
    body: bytes = b""
    """At most 2 KB of what the server said."""


MAYBE_PROCESSED_STATUSES = frozenset({408, 409, 500, 502, 504})
"""Errors behind which a server may have worked all the same; others of the kind ``overloaded`` are refusals."""

# ---------------------------------------------------------------- kept: the store's operations


class Indexed(msgspec.Struct, frozen=True):
    """Lines that arrived while the run was on; they are in the copy of the input, durably. No part of a fold."""

    chunk: Chunk
    priorities: tuple[tuple[int, int], ...] = ()
    """(line, priority) of the rows whose priority is not 0."""
    models: tuple[str, ...] = ()
    """All models that rows have asked for so far, where a new one is among them; else none."""


class Opened(msgspec.Struct, frozen=True):
    """A batch was opened, under a budget of so many tokens, rows and bytes; where its rows share a call: sent."""

    batch: int
    rows: int
    tokens: int
    bytes: int
    budget_tokens: int
    budget_rows: int
    budget_bytes: int
    bound: Bound
    packing: str | None = None
    """In which shape its rows share a call; None where each has its own."""


class Sent(Hot, frozen=True, gc=False):
    """An intent: this line is about to be sent for the ``send``-th time, at worst for ``reserved_usd``."""

    line: int
    send: int
    attempt: int
    reserved_usd: Decimal
    at: float
    custom_id: str
    counts: bool = True
    """Whether it stands for its request: true of one row of each call."""


class Returned(msgspec.Struct, frozen=True):
    """A send that ended without an answer; the row stays pending."""

    line: int
    sends: int
    attempts: int
    kind: FaultKind
    code: str | None
    status: int | None
    detail: str
    service_s: float
    usage: Usage | None
    cost_usd: Decimal | None
    """What the failed attempt is known to have cost (usage came back); None where unknown or nothing."""
    lost_usd: Decimal
    """Reservation that stays spent because the send may have been billed; 0 where it was not processed."""
    model: str
    at: float
    counts: bool = True
    """Whether it stands for its request: true of one row of each call."""
    split: bool = False
    """Whether the rows of its call go on in several."""

    @property
    def refused(self) -> bool:
        """Whether the server answered that it did not process the call (429, 503 and their kin)."""
        if self.kind == "overloaded":
            return self.status is not None and self.status not in MAYBE_PROCESSED_STATUSES
        return self.kind == "rate_limited"


class Settled(Hot, frozen=True, gc=False, kw_only=True):
    """A row's one terminal record. ``record`` is its line of results.jsonl or errors.jsonl, without newline."""

    line: int
    custom_id: str
    status: Literal["succeeded", "failed"]
    record: bytes
    sends: int
    kind: str | None = None
    code: str | None = None
    detail: str | None = None
    model: str = ""
    usage: Usage | None = None
    cost_usd: Decimal | None = None
    """Exact price of the settling response; None where the price or the usage is unknown."""
    lost_usd: Decimal
    """Reservation that stays spent because a failing last send may have been billed."""
    estimated_tokens: int = 0
    finish_reason: str | None = None
    empty: bool = False
    """Succeeded, but with empty content or only reasoning."""
    queue_s: float = 0.0
    service_s: float = 0.0
    total_s: float = 0.0
    at: float
    unsent: bool = False
    """Settled without a send (invalid line, too large)."""
    saved_usd: Decimal = Decimal(0)
    """What reading from the provider's cache saved against full price; below 0 where writing to it cost more."""


class Reopened(msgspec.Struct, frozen=True):
    """A failed row was made pending again (--retry-failed)."""

    line: int
    kind: str | None
    unsent: bool
    at: float


class Sampled(msgspec.Struct, frozen=True):
    """How the run stood at ``at``: the timeline of the report. Counters are deltas since the sample before."""

    at: float
    elapsed_s: float
    in_flight: int
    limit: int
    done: int
    sent: int
    refused: int
    tokens: int
    paused_s: float
    binding: str


class Noted(msgspec.Struct, frozen=True):
    """Something a person may ask about later: a limit change, a pause, a breaker, a notice. ``text`` is one line."""

    at: float
    what: Literal["limit", "pause", "breaker", "notice", "doubt", "stop"]
    text: str


class Doubted(msgspec.Struct, frozen=True):
    """A send whose end is unknown because the run died. Its reservation stays spent."""

    line: int
    custom_id: str
    reserved_usd: Decimal
    resent: bool
    at: float


class RunStarted(msgspec.Struct, frozen=True):
    """A run of the job began."""

    run: int
    at: float
    rows: int
    """Rows of the job as known now (the input may have grown)."""


class RunEnded(msgspec.Struct, frozen=True):
    """A run ended. ``state`` and ``reason`` as in the summary."""

    run: int
    at: float
    elapsed_s: float
    state: Literal["complete", "stopped", "interrupted", "failed"]
    reason: str
    exit_code: int


Operation: TypeAlias = (
    Indexed | Opened | Sent | Returned | Settled | Reopened | Sampled | Noted | Doubted | RunStarted | RunEnded
)


class Fold(Protocol):
    """A fold over operations whose state can be kept: ``load(dump())`` is the same fold."""

    def add(self, operation: Operation) -> None:
        """Takes one operation into account."""

    def dump(self) -> dict[str, Any]:
        """Returns the state as plain JSON types; money as strings."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Replaces the state with what ``dump`` returned."""


class Prices(Protocol):
    """What tokens cost. Exact: Decimal dollars, no rounding."""

    def price(self, model: str, usage: Usage, *, service_tier: str | None = None) -> Decimal | None:
        """Returns the price of one response, or None where the model's price is unknown."""

    def worst(
        self, model: str, input_tokens: int, output_tokens: int, *, service_tier: str | None = None
    ) -> Decimal | None:
        """Returns a price that no response with at most these tokens exceeds, or None where unknown."""


class Standing(msgspec.Struct, frozen=True):
    """Where a run stands now, for progress and ``status``; numbers are of the whole job unless named otherwise."""

    total: int
    succeeded: int
    failed: int
    in_flight: int
    limit: int
    sent: int
    retried: int
    refused: int
    tokens: int
    cost_usd: Decimal
    spent_usd: Decimal
    budget_usd: Decimal | None
    rows_per_s: float
    tokens_per_s: float
    elapsed_s: float
    eta_s: float | None
    binding: str
    cost_unknown_rows: int = 0
    """Succeeded rows whose price or usage is unknown: ``cost_usd`` is without them."""
