"""What a schedule is told, and what it answers: plain records, re-exported by ``schedule``."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal, TypeAlias

import msgspec

from batchrun.errors import Exit
from batchrun.records import Call, Fault, Hot, Row

__all__ = ["Done", "Flow", "Idle", "Note", "Send", "Settlement", "Sleep", "Step", "Stop"]


class Flow(msgspec.Struct, frozen=True):
    """What a run was told about its flow. ``deadline_at`` is monotonic seconds."""

    max_concurrency: int = 256
    """Ceiling of what is in flight, over all models and endpoints."""
    concurrency: int | None = None
    """Fixed, where given: then no limit is looked for."""
    rpm: int | None = None
    tpm: int | None = None
    max_attempts: int = 5
    patience_s: float = 900.0
    deadline_at: float | None = None
    budget_usd: Decimal | None = None
    spent_usd: Decimal = Decimal(0)
    """Of earlier runs: settled, lost and in doubt."""
    max_failures: int | None = None
    """Stop when *more* have failed."""
    failed: int = 0
    """Of earlier runs."""
    max_failure_share: float | None = None
    """Of ``total``; stop when more have failed."""
    total: int = 0
    counts_max_tokens: bool = False
    """The server charges max_tokens against its token quota when it admits a call."""
    origins: int = 1
    """Endpoints that the job may use: ``Send.origin`` is 0 … origins − 1."""


class Send(Hot, frozen=True, gc=False):
    """Send this call now to this endpoint; its slot, rate and money are taken."""

    call: Call
    origin: int = 0


class Sleep(msgspec.Struct, frozen=True):
    """Nothing may go out before ``until``, unless a call ends or more are offered."""

    until: float


class Idle(msgspec.Struct, frozen=True):
    """Wait for a reply or for more calls."""


class Stop(msgspec.Struct, frozen=True):
    """Why a run ends before its rows do: a machine word, the exit code, and a line for people."""

    reason: str
    exit_code: Exit
    detail: str


class Done(msgspec.Struct, frozen=True):
    """Nothing is in flight and nothing more will be sent."""

    stop: Stop | None


Step: TypeAlias = Send | Sleep | Idle | Done


class Settlement(Hot, frozen=True, gc=False):
    """What became of a call's rows: each is in exactly one of the four."""

    succeeded: tuple[Row, ...] = ()
    failed: tuple[Row, ...] = ()
    """Given up: their terminal fault is ``fault``."""
    again: tuple[Call, ...] = ()
    """Already queued inside the schedule."""
    held: tuple[Row, ...] = ()
    """Pending, but not queued in this run."""
    lost_usd: Decimal = Decimal(0)
    """The reservation that stays spent for good."""
    fault: Fault | None = None


class Note(msgspec.Struct, frozen=True):
    """Something a person may ask about later. ``at_now`` is monotonic seconds."""

    at_now: float
    what: Literal["limit", "pause", "breaker", "stop", "notice"]
    text: str
