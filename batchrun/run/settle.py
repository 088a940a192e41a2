"""How a settled row is written down: its line of results.jsonl or errors.jsonl, and the operation that keeps it."""

from __future__ import annotations

from decimal import Decimal

import orjson

from batchrun.records import BadRow, Call, Fault, Output, Reply, Returned, Row, Settled, Usage

__all__ = ["failed", "invalid", "money", "returned", "succeeded", "unsent"]

_NOTHING = Decimal(0)
_EMPTY_VALUES = (b'""', b"null", b"[]")

_DETAIL = 2_000
"""Characters of an error's message that are kept."""


def money(amount: Decimal) -> bytes:
    """Returns dollars as a JSON number with all their decimals, never in exponent form."""
    text = f"{amount:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.encode()


def _usage(usage: Usage | None, *, shared: bool) -> bytes:
    if usage is None:
        return b"null"
    text = (
        f'{{"input_tokens":{usage.input_tokens},"output_tokens":{usage.output_tokens},'
        f'"cached_tokens":{usage.cached_tokens}'
    )
    if usage.cache_write_tokens:
        text += f',"cache_write_tokens":{usage.cache_write_tokens}'
    if usage.reasoning_tokens:
        text += f',"reasoning_tokens":{usage.reasoning_tokens}'
    if shared:
        text += ',"usage_shared":true'
    return f"{text}}}".encode()


class Timing:
    """Seconds of a row: ``queue`` waiting (for a slot, the pace, a retry), ``service`` its last send, ``total`` all."""

    __slots__ = ("at", "queue_s", "service_s", "total_s")

    def __init__(self, call: Call, started: float, ended: float, at: float) -> None:
        self.service_s = max(0.0, ended - started)
        self.total_s = max(self.service_s, ended - call.ready_at)
        self.queue_s = self.total_s - self.service_s
        self.at = at


def succeeded(
    row: Row,
    call: Call,
    reply: Reply,
    output: Output,
    cost: Decimal | None,
    lost: Decimal,
    timing: Timing,
    saved: Decimal = _NOTHING,
) -> Settled:
    """Returns the operation that settles an answered row. ``lost``: what stays spent where its cost is unknown.

    ``saved``: what the provider's cache took off the price.
    """
    record = b"".join(
        (
            b'{"custom_id":',
            orjson.dumps(row.custom_id),
            b',"line":%d,"status":"succeeded","output":' % row.line,
            output.value,
            b',"model":',
            orjson.dumps(reply.model or row.model),
            b',"finish_reason":',
            orjson.dumps(output.finish_reason),
            b',"usage":',
            _usage(output.usage, shared=output.usage_shared),
            b',"cost_usd":',
            b"null" if cost is None else money(cost),
            b',"attempts":%d,"latency_s":' % call.sends,
            b"%.4f" % timing.service_s,
            b',"metadata":',
            (row.metadata or b"null").replace(b"\r", b" "),  # white space between its raw members
            b',"response":{"status_code":%d,"request_id":' % reply.status,
            orjson.dumps(reply.request_id),
            b',"body":',
            output.body,
            b'},"error":null}',
        )
    )
    return Settled(
        line=row.line,
        custom_id=row.custom_id,
        status="succeeded",
        record=record,
        sends=call.sends,
        model=row.model,
        usage=output.usage,
        cost_usd=cost,
        lost_usd=lost,
        estimated_tokens=call.tokens if len(call.rows) == 1 else row.tokens,
        finish_reason=output.finish_reason,
        empty=output.value in _EMPTY_VALUES,
        queue_s=timing.queue_s,
        service_s=timing.service_s,
        total_s=timing.total_s,
        at=timing.at,
        saved_usd=saved,
    )


def _failure(
    row_json: bytes,
    custom_id: str,
    line: int,
    sends: int,
    kind: str,
    code: str | None,
    message: str,
    status: int | None,
) -> bytes:
    error = {
        "kind": kind,
        "code": code and _clean(code),
        "message": _clean(message[:_DETAIL]),
        "status_code": status,
    }
    return b"".join(
        (
            b'{"custom_id":',
            orjson.dumps(custom_id),
            b',"line":%d,"status":"failed","attempts":%d,"error":' % (line, sends),
            orjson.dumps(error),
            b',"row":',
            row_json,
            b"}",
        )
    )


def _clean(text: str) -> str:
    """Spells out what is no Unicode (a lone surrogate in a broken reply): JSON cannot hold it."""
    return text.encode("utf-8", "backslashreplace").decode()


def failed(
    row: Row,
    row_json: bytes,
    call: Call,
    fault: Fault,
    cost: Decimal | None,
    lost: Decimal,
    timing: Timing,
) -> Settled:
    """Returns the operation that settles a row which was sent and given up. ``row_json`` is its input line."""
    record = _failure(row_json, row.custom_id, row.line, call.sends, fault.kind, fault.code, fault.detail, fault.status)
    return Settled(
        line=row.line,
        custom_id=row.custom_id,
        status="failed",
        record=record,
        sends=call.sends,
        kind=fault.kind,
        code=fault.code,
        detail=fault.detail,
        model=row.model,
        usage=fault.usage,
        cost_usd=cost,
        lost_usd=lost,
        estimated_tokens=call.tokens if len(call.rows) == 1 else row.tokens,
        queue_s=timing.queue_s,
        service_s=timing.service_s,
        total_s=timing.total_s,
        at=timing.at,
    )


def unsent(
    line: int,
    custom_id: str,
    row_json: bytes,
    kind: str,
    message: str,
    *,
    sends: int,
    lost: Decimal,
    at: float,
) -> Settled:
    """Returns the operation that settles a row as failed without a send now: invalid, or left in doubt."""
    return Settled(
        line=line,
        custom_id=custom_id,
        status="failed",
        record=_failure(row_json, custom_id, line, sends, kind, None, message, None),
        sends=sends,
        kind=kind,
        detail=message[:_DETAIL],
        lost_usd=lost,
        at=at,
        unsent=True,
    )


def invalid(bad: BadRow, row_json: bytes, at: float) -> Settled:
    """Returns the operation that settles a bad line as a failed row."""
    custom_id = bad.custom_id or f"line-{bad.line}"
    return unsent(bad.line, custom_id, row_json, "invalid", bad.why, sends=0, lost=_NOTHING, at=at)


def returned(
    row: Row,
    call: Call,
    fault: Fault,
    cost: Decimal | None,
    lost: Decimal,
    timing: Timing,
    *,
    counts: bool,
    split: bool,
) -> Returned:
    """Returns the operation of a send that ended without settling its row."""
    return Returned(
        line=row.line,
        sends=call.sends,
        attempts=call.attempts,
        kind=fault.kind,
        code=fault.code,
        status=fault.status,
        detail=fault.detail[:_DETAIL],
        service_s=timing.service_s,
        usage=fault.usage,
        cost_usd=cost,
        lost_usd=lost,
        model=row.model,
        at=timing.at,
        counts=counts,
        split=split,
    )
