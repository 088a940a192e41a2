"""Error replies → Fault: every known shape of error body, classified by status and code, not by prose.

The few texts that are matched are documented and say what no field says; each stands next to its status.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from batchrun.providers.headers import exhausted_s, go_duration_s, retry_after_s
from batchrun.records import Fault, FaultKind, HttpResponse, Quotas, Usage

__all__ = ["Broken", "ErrorBody", "as_dict", "fault_of", "read_error"]

_KEPT_BYTES = 2048
_DETAIL_CHARS = 600


class _Verdict(NamedTuple):
    kind: FaultKind
    maybe_processed: bool = False
    stop: Literal["auth", "account", "tls", "redirect"] | None = None
    note: str = ""


_AUTH = _Verdict("fatal", stop="auth")
_ACCOUNT = _Verdict("fatal", stop="account")
_REJECTED = _Verdict("rejected")
_TOO_LARGE = _Verdict("too_large")
_RATE_LIMITED = _Verdict("rate_limited")
_REFUSED = _Verdict("overloaded")
_FAILED = _Verdict("overloaded", maybe_processed=True)

_BY_STATUS = {
    401: _AUTH,
    402: _ACCOUNT,
    403: _AUTH,
    407: _AUTH,
    408: _FAILED,
    409: _FAILED,
    413: _TOO_LARGE,
    425: _REFUSED,
    429: _RATE_LIMITED,
    498: _REFUSED,  # Groq: capacity_exceeded
    503: _REFUSED,
    529: _REFUSED,  # Anthropic: overloaded_error
}

_ANY = range(400, 600)
# Codes that outrank their status, in order: (codes, statuses that they are believed with, verdict).
_BY_CODE = (
    (
        frozenset({"in_flight_budget_exhausted"}),
        _ANY,
        _RATE_LIMITED,
    ),  # OpenRouter 402: passes as calls settle
    (
        frozenset(
            {
                "insufficient_quota",
                "credit_balance_exhausted",
                "organization_spend_limit_exceeded",
                "project_spend_limit_exceeded",
                "organization_usage_limit_exceeded",
                "billing_hard_limit_reached",
                "billing_not_active",
                "billing_error",  # Anthropic's type of a 402
                "enforced_spend_limit_reached",  # Anthropic, details.error_code of a 429
                "budget_exceeded",  # LiteLLM
            }
        ),
        _ANY,
        _ACCOUNT,
    ),
    (frozenset({"api_key_invalid", "invalid_api_key"}), _ANY, _AUTH),  # Gemini says it with a 400
    (
        # A 403 with these is about the prompt (OpenRouter's moderation), not about the key.
        frozenset({"content_filter", "content_policy_violation", "flagged_input"}),
        (400, 403, 422),
        _REJECTED,
    ),
    (frozenset({"model_not_found", "invalid_model", "model_not_available"}), (400, 404), _ACCOUNT),
    (frozenset({"overloaded_error"}), _ANY, _REFUSED),
)
# Documented texts that say what no field of their reply says: (status, text, verdict).
_BY_TEXT = (
    (400, re.compile(r"credit balance is too low", re.IGNORECASE), _ACCOUNT),  # Anthropic
    (400, re.compile(r"^Model Not Exist|Invalid model name passed in model="), _ACCOUNT),  # DeepSeek, LiteLLM
    (429, re.compile(r"\bRequest too large\b", re.IGNORECASE), _TOO_LARGE),  # OpenAI
)
_LIMIT_REQUESTED = re.compile(r"\bLimit:? ([0-9]{1,15})\b[^.]*\bRequested:? ([0-9]{1,15})\b")
_NO_SUCH_PATH = re.compile(r"^(Invalid URL\b.*|(404 )?(page )?not found\.?|)$", re.IGNORECASE | re.DOTALL)

# What an error inside a 200 would have been as a status.
_STATUS_OF = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "too_many_requests": 429,
    "slow_down": 429,
    "resource_exhausted": 429,
    "server_error": 500,
    "internal_error": 500,
    "internal_server_error": 500,
    "internal": 500,
    "api_error": 500,
    "overloaded_error": 529,
    "overloaded": 529,
    "engine_overloaded": 503,
    "service_unavailable": 503,
    "unavailable": 503,
    "capacity_exceeded": 498,
    "vector_store_timeout": 504,
    "timeout": 504,
    "timeout_error": 504,
    "deadline_exceeded": 504,
    "authentication_error": 401,
    "unauthenticated": 401,
    "permission_error": 403,
    "permission_denied": 403,
    "not_found_error": 404,
    "model_not_found": 404,
    "request_too_large": 413,
    "invalid_request_error": 400,
    "invalid_argument": 400,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "content_filter": 400,
}


class ErrorBody(msgspec.Struct, frozen=True):
    """What a server said went wrong, whatever its shape."""

    message: str
    code: str | None = None
    """The most telling of its code, reason, status word and type."""
    param: str | None = None
    words: frozenset[str] = frozenset()
    """All of these in lower case: what classification looks at."""
    number: int | None = None
    """A code that is a number, such as the HTTP status repeated."""
    retry_s: float | None = None
    """Google's RetryInfo."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Rate limit headers of the server behind a gateway (OpenRouter), lower case."""


class Broken(msgspec.Struct, frozen=True):
    """A 200 that holds no answer: garbled, or with ``error`` an error to be classified like a status."""

    why: str
    error: ErrorBody | None = None
    usage: Usage | None = None
    processed: bool = False
    """It was worked on, whether or not usage came back."""
    otherwise: int = 500
    """The status that an error of an unknown code counts as."""


def as_dict(value: object) -> dict[str, Any]:
    """Returns ``value`` where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- faults


def fault_of(
    response: HttpResponse, doc: object, quotas: Quotas | None, *, url: str, broken: Broken | None = None
) -> Fault:
    """Returns the Fault that a reply without an answer is.

    ``doc`` is its parsed body, or None where it is no JSON. ``broken`` is what the reader made of a 2xx.
    """
    status, headers = response.status, response.headers
    error = broken.error if broken else read_error(doc)
    usage = broken.usage if broken else None
    used = usage is not None and usage.input_tokens + usage.output_tokens > 0
    if broken is None:
        verdict = _classify(status, error, headers, url)
    elif error is None:
        verdict = _Verdict("garbled", maybe_processed=True)
    else:
        verdict = _classify(_inner_status(error, broken.otherwise), error, headers, url)
    said = as_dict(doc)
    return Fault(
        kind=verdict.kind,
        detail=_detail(response, error, broken, verdict.note),
        status=status,
        retry_after_s=_wait_s(verdict.kind, error, headers, quotas),
        code=error.code if error else None,
        param=error.param if error else None,
        maybe_processed=verdict.maybe_processed or used or (broken is not None and broken.processed),
        stop=verdict.stop,
        usage=usage,
        model=_text(said.get("model")),
        request_id=headers.get("x-request-id")
        or headers.get("request-id")
        or _text(said.get("request_id"))
        or _text(said.get("id")),
        quotas=quotas,
        body=response.content[:_KEPT_BYTES],
    )


def _wait_s(
    kind: FaultKind, error: ErrorBody | None, headers: Mapping[str, str], quotas: Quotas | None
) -> float | None:
    """Returns how long the server asks to wait: in Retry-After, in the body, or by a used-up quota's reset."""
    if kind not in ("rate_limited", "overloaded"):
        return None
    asked = retry_after_s(headers) or (error.retry_s if error else None)
    if asked or kind == "overloaded":
        return asked
    behind = {**error.headers, "date": headers.get("date", "")} if error and error.headers else {}
    return exhausted_s(quotas, headers) or exhausted_s(None, behind)


def _inner_status(error: ErrorBody, otherwise: int) -> int:
    if error.number is not None and 400 <= error.number <= 599:
        return error.number
    return next((_STATUS_OF[w] for w in sorted(error.words & _STATUS_OF.keys())), otherwise)


def _classify(status: int, error: ErrorBody | None, headers: Mapping[str, str], url: str) -> _Verdict:
    verdict = _by_code(status, error) or _by_status(status, error, headers, url)
    match headers.get("x-should-retry"):
        case "true" if verdict.kind == "rejected":
            # Counted as an attempt, or a server that always says so would be asked for ever.
            return _FAILED
        case "false" if verdict.kind == "rate_limited":
            # A limit that waiting does not lift: some quota of the account, under a code not known here.
            return _ACCOUNT
        case "false" if verdict.kind == "overloaded":
            return _Verdict("rejected", verdict.maybe_processed)
    return verdict


def _by_code(status: int, error: ErrorBody | None) -> _Verdict | None:
    """Returns the verdict of what outranks the status, or None."""
    if error is None:
        return None
    for codes, statuses, verdict in _BY_CODE:
        if status in statuses and error.words & codes:
            return verdict
    for at, text, verdict in _BY_TEXT:
        if status == at and text.search(error.message):
            return verdict
    if status == 429:
        sizes = _LIMIT_REQUESTED.search(error.message)
        if sizes and int(sizes[2]) > int(sizes[1]):
            return _TOO_LARGE
        if any("perday" in word for word in error.words):  # Gemini's QuotaFailure: not before tomorrow
            return _ACCOUNT
    return None


def _by_status(status: int, error: ErrorBody | None, headers: Mapping[str, str], url: str) -> _Verdict:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status in (404, 405):
        return _not_found(status, error, url)
    if status >= 400:
        return _REJECTED if status < 500 else _FAILED
    if status >= 300:
        return _Verdict("fatal", stop="redirect", note=f"{url} redirects to {_target(headers)}")
    return _Verdict("garbled", maybe_processed=True)


def _not_found(status: int, error: ErrorBody | None, url: str) -> _Verdict:
    """Tells an unknown model and a path that is not there (no row can succeed) from a row's own 404."""
    if status == 404 and error is not None and (error.param == "model" or "model" in error.message.lower()):
        return _ACCOUNT
    if error is None or not error.words or _NO_SUCH_PATH.match(error.message):
        note = f"nothing answers POST {url}; check the provider and the base URL"
        return _Verdict("fatal", stop="account", note=note)
    return _REJECTED


def _target(headers: Mapping[str, str]) -> str:
    """Returns where a redirect points, without credentials or query."""
    location = headers.get("location")
    if not location:
        return "nowhere (no Location)"
    try:
        parts = urlsplit(location)
    except ValueError:
        return "an unreadable Location"
    host = parts.netloc.rpartition("@")[2]
    return _one_line(f"{parts.scheme}://{host}{parts.path}" if host else parts.path)


def _detail(response: HttpResponse, error: ErrorBody | None, broken: Broken | None, note: str) -> str:
    said = error.message if error else ""
    if broken is not None and error is None:
        said = broken.why
    if not said and not note and response.status >= 400:
        said = _plain_text(response)
    if said and not note:
        return said
    try:
        phrase = f"HTTP {response.status} {HTTPStatus(response.status).phrase}"
    except ValueError:
        phrase = f"HTTP {response.status}"
    return ": ".join(part for part in (phrase, note, said) if part)


def _plain_text(response: HttpResponse) -> str:
    """Returns the start of a plain-text body; nothing of an HTML page, whose status says more."""
    start = response.content[:_DETAIL_CHARS].decode("utf-8", "replace")
    if not start.strip() or start.lstrip()[0] in "<{[" or "\0" in start:
        return ""
    return f"HTTP {response.status}: {_one_line(start)}"


# ---------------------------------------------------------------- error bodies


def read_error(doc: object) -> ErrorBody | None:
    """Returns what a parsed error body says, or None where it is no error in any known shape.

    Knows ``{"error":{…}}``, ``{"error":"…"}``, the flat ``{"object":"error",…}`` and ``{"message":…}``,
    ``{"detail":[…]}`` and ``{"detail":"…"}``, each also as the first element of an array.
    """
    if isinstance(doc, list):
        doc = doc[0] if doc else None
    if not isinstance(doc, dict):
        return None
    inner = doc.get("error")
    if isinstance(inner, dict):
        return _read(inner)
    if isinstance(inner, str):
        return _read({**doc, "message": inner})
    detail = doc.get("detail")
    if isinstance(detail, dict):
        return _read(as_dict(detail.get("error")) or detail)
    if detail is not None or "message" in doc:
        return _read(doc)
    return None


def _read(error: dict[str, Any]) -> ErrorBody:
    code, kind, param = error.get("code"), _word(error.get("type")), _word(error.get("param"))
    number = code if isinstance(code, int) and not isinstance(code, bool) else None
    word = _word(code)
    if word is not None and word.isascii() and word.isdigit() and len(word) < 10:
        number, word = int(word), None
    message = error.get("message")
    problems = as_dict(message).get("detail", error.get("detail"))  # Mistral nests it in the message
    said, where, what = _validation(problems)
    metadata, details = as_dict(error.get("metadata")), error.get("details")
    reason, retry_s, google = _google(details)
    telling = [
        word,
        reason,
        _word(as_dict(details).get("error_code")),
        _word(metadata.get("reason")),
        "flagged_input" if "flagged_input" in metadata else None,
        _word(error.get("status")),
        kind,
        what,
    ]
    text = message if isinstance(message, str) else said
    raw = metadata.get("raw")  # OpenRouter: what the server behind it said
    if isinstance(raw, str) and raw:
        text = f"{text}: {raw}"
    return ErrorBody(
        message=_one_line(text),
        code=next((w for w in telling if w), None) or (str(number) if number is not None else None),
        param=param or where,
        words=frozenset(w.lower() for w in (*telling, *google) if w),
        number=number,
        retry_s=retry_s,
        headers={
            k.lower(): v if isinstance(v, str) else str(v)
            for k, v in as_dict(metadata.get("headers")).items()
            if isinstance(v, str | int)
        },
    )


def _validation(detail: object) -> tuple[str, str | None, str | None]:
    """Returns (text, parameter, code) of FastAPI's ``detail``: a text, or a list of what is wrong where."""
    if isinstance(detail, str):
        return detail, None, None
    if not isinstance(detail, list):
        return "", None, None
    problems = [p for p in detail[:5] if isinstance(p, dict)]
    texts, where = [], None
    for problem in problems:
        loc = problem.get("loc")
        path = [str(step) for step in loc if isinstance(step, str | int)] if isinstance(loc, list) else []
        where = where or (path[-1] if path else None)
        texts.append(": ".join(part for part in (".".join(path), _text(problem.get("msg")) or "") if part))
    return "; ".join(texts), where, _word(problems[0].get("type")) if problems else None


def _google(details: object) -> tuple[str | None, float | None, list[str]]:
    """Returns (ErrorInfo's reason, RetryInfo's seconds, QuotaFailure's ids) of Google's ``details``."""
    reason, retry_s, quotas = None, None, []
    for item in details if isinstance(details, list) else ():
        detail = as_dict(item)
        reason = reason or _word(detail.get("reason"))
        delay = detail.get("retryDelay")
        if isinstance(delay, str):
            retry_s = go_duration_s(delay) or retry_s
        violations = detail.get("violations")
        for violation in violations if isinstance(violations, list) else ():
            quota = _word(as_dict(violation).get("quotaId"))
            if quota:
                quotas.append(quota)
    return reason, retry_s, quotas


def _word(value: object) -> str | None:
    """Returns a short non-empty string; LiteLLM writes "None" for nothing."""
    return value if isinstance(value, str) and value and value != "None" and len(value) <= 200 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _one_line(text: str) -> str:
    return " ".join(text[: 2 * _DETAIL_CHARS].split())[:_DETAIL_CHARS]
