"""What reply headers say of time and limits: retry hints, quotas. The server's ``Date`` is the clock."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache

from batchrun.records import Quota, Quotas

__all__ = ["anthropic_quotas", "exhausted_s", "go_duration_s", "openai_quotas", "retry_after_s"]

_PART = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_DURATION = re.compile(rf"(?:(?:{_PART})(?:ns|us|µs|μs|ms|s|m|h))+")
_DURATION_PART = re.compile(rf"({_PART})(ns|us|µs|μs|ms|s|m|h)")
_NUMBER = re.compile(rf"{_PART}")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

# Epoch seconds passed 1e9 in 2001 and epoch milliseconds 1e12; no wait is that long.
_EPOCH_S = 1e9
_EPOCH_MS = 1e11

# Plain names (OpenAI, Groq, LiteLLM …); "-minute" (Mistral, Cerebras) names its window itself.
_REQUESTS = ("requests", "requests-minute", "req-minute")
_TOKENS = ("tokens", "tokens-minute")
_OPENAI_NAMES = {
    what: tuple((f"x-ratelimit-limit-{n}", f"x-ratelimit-remaining-{n}", f"x-ratelimit-reset-{n}") for n in names)
    for what, names in (("requests", _REQUESTS), ("tokens", _TOKENS))
}
_ANTHROPIC_NAMES = {
    what: tuple(tuple(f"anthropic-ratelimit-{n}-{part}" for part in ("limit", "remaining", "reset")) for n in names)
    for what, names in (("requests", ("requests",)), ("tokens", ("tokens", "input-tokens", "output-tokens")))
}


# ---------------------------------------------------------------- retry hints


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds that ``retry-after-ms``, else ``retry-after``, asks to wait; None for neither.

    Seconds may have fractions; a date is measured against the reply's own ``Date``, and ignored without one.
    Zero, negative, NaN, infinite and unreadable values are no hint. Nothing is capped: an hour is 3600.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if value is None:
        return None
    seconds = _number(value)
    if seconds is None:
        at, now = _http_date(value), _http_date(headers.get("date"))
        seconds = None if at is None or now is None else at - now
    return seconds if seconds is not None and seconds > 0 else None


def exhausted_s(quotas: Quotas | None, headers: Mapping[str, str]) -> float | None:
    """Returns the longest reset among quotas with nothing remaining: when a refused call may be sent again.

    Also reads the unnamed trio ``x-ratelimit-{limit,remaining,reset}`` (OpenRouter, Together).
    """
    known = [quotas.requests, quotas.tokens] if quotas else []
    if "x-ratelimit-reset" in headers:
        names = ("x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset")
        known.append(_quota(headers, names, headers.get("date")))
    waits = [q.reset_s for q in known if q is not None and q.remaining == 0 and q.reset_s]
    return max(waits, default=None)


# ---------------------------------------------------------------- quotas


def openai_quotas(headers: Mapping[str, str], *, daily_requests: bool = False) -> Quotas | None:
    """Returns what ``x-ratelimit-*`` says of the limits per minute, or None where there is none.

    ``daily_requests``: the request headers count a day (Groq): they matter once they are used up.
    """
    date = headers.get("date")
    requests = _first(headers, _OPENAI_NAMES["requests"], date)
    tokens = _first(headers, _OPENAI_NAMES["tokens"], date)
    if daily_requests and requests is not None and requests.remaining != 0:
        requests = None
    return None if requests is None and tokens is None else Quotas(requests, tokens)


def anthropic_quotas(headers: Mapping[str, str]) -> Quotas | None:
    """Returns what ``anthropic-ratelimit-*`` says; of several token quotas the one with least left."""
    date = headers.get("date")
    requests = _first(headers, _ANTHROPIC_NAMES["requests"], date)
    tokens = [q for names in _ANTHROPIC_NAMES["tokens"] if (q := _quota(headers, names, date)) is not None]
    tightest = min(tokens, key=_share_left, default=None)
    return None if requests is None and tightest is None else Quotas(requests, tightest)


def _share_left(quota: Quota) -> tuple[float, int]:
    # Among equally full ones the largest: while nothing is used, none of them binds.
    if not quota.limit or quota.remaining is None:
        return 1.0, -(quota.limit or 0)
    return quota.remaining / quota.limit, -quota.limit


def _first(headers: Mapping[str, str], names: Iterable[tuple[str, ...]], date: str | None) -> Quota | None:
    for trio in names:
        quota = _quota(headers, trio, date)
        if quota is not None:
            return quota
    return None


def _quota(headers: Mapping[str, str], names: tuple[str, ...], date: str | None) -> Quota | None:
    limit_text, remaining_text = headers.get(names[0]), headers.get(names[1])
    if limit_text is None and remaining_text is None:
        return None
    limit, remaining = _count(limit_text), _count(remaining_text)
    if limit is None and remaining is None:
        return None
    # A limit of nothing is a server's way to say that it has none (Azure: 0 and -1).
    return Quota(limit or None, remaining, _reset_s(headers.get(names[2]), date))


def _count(value: str | None) -> int | None:
    """Returns a whole number of at most 18 digits; None for -1 and all else that is no count."""
    return int(value) if value is not None and len(value) <= 18 and value.isascii() and value.isdigit() else None


def _reset_s(value: str | None, date: str | None) -> float | None:
    """Returns seconds until a reset told as a Go duration, as seconds, as an epoch (s, ms) or as RFC 3339."""
    if value is None:
        return None
    duration = go_duration_s(value)
    if duration is not None:
        return duration
    number = _number(value)
    if number is not None and number < _EPOCH_S:
        return number
    now = _http_date(date)
    if now is None:
        return None
    if number is not None:
        return max(0.0, (number / 1000 if number >= _EPOCH_MS else number) - now)
    at = _rfc3339(value)
    return None if at is None else max(0.0, at - now)


# ---------------------------------------------------------------- spellings of time


@lru_cache(maxsize=1024)
def go_duration_s(value: str) -> float | None:
    """Returns the seconds of a Go duration (``1h2m3.5s``, ``6m0s``, ``120ms``), or None for anything else."""
    if len(value) > 64 or not _DURATION.fullmatch(value):
        return None
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in _DURATION_PART.findall(value))
    return seconds if math.isfinite(seconds) else None


def _number(value: str | None) -> float | None:
    """Returns a finite number that is not negative, in plain decimal notation."""
    if value is None or len(value) > 64 or not _NUMBER.fullmatch(value := value.strip()):
        return None
    return float(value)


@lru_cache(maxsize=64)  # the Date of all replies within a second is the same
def _http_date(value: str | None) -> float | None:
    """Returns epoch seconds of an HTTP date (any RFC 5322 or obsolete spelling), or None."""
    if value is None or len(value) > 64:
        return None
    try:
        return _epoch(parsedate_to_datetime(value))
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


@lru_cache(maxsize=256)
def _rfc3339(value: str) -> float | None:
    if len(value) > 64:
        return None
    try:
        return _epoch(datetime.fromisoformat(value))
    except (ValueError, OverflowError):
        return None


def _epoch(at: datetime) -> float:
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
