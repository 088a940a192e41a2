"""The store's operations as tests of the shell make them."""

from __future__ import annotations

from decimal import Decimal

from batchrun.records import Returned, Sent, Settled


def sent(line: int, send: int = 1, reserved: str = "0.5") -> Sent:
    return Sent(line, send, 0, Decimal(reserved), 1.0, f"id-{line}")


def settled(line: int, record: bytes = b"{}", status: str = "succeeded", cost: str = "0.25") -> Settled:
    return Settled(
        line=line,
        custom_id=f"id-{line}",
        status=status,  # type: ignore[arg-type]
        record=record,
        sends=1,
        kind=None if status == "succeeded" else "rejected",
        model="m",
        cost_usd=Decimal(cost),
        lost_usd=Decimal(0),
        estimated_tokens=1,
        finish_reason="stop",
        service_s=0.1,
        total_s=0.1,
        at=2.0,
    )


def returned(line: int, sends: int = 1, lost: str = "0") -> Returned:
    return Returned(line, sends, 0, "rate_limited", None, 429, "slow down", 0.1, None, None, Decimal(lost), "m", 2.0)
