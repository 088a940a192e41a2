"""(status, headers, body) → the Fault that it is, for every line of the tables of trouble."""

from __future__ import annotations

import orjson
import pytest

from batchrun.providers.presets import make_provider, resolve
from batchrun.records import Fault, HttpResponse, Quota, Row

DATE = "Mon, 30 Nov 2026 10:00:00 GMT"
URL = "https://api.openai.com/v1/chat/completions"

OPENAI = make_provider(resolve("openai", None), "sk-test")
ANTHROPIC = make_provider(resolve("anthropic", None), "sk-test")
GEMINI = make_provider(resolve("gemini", None), "key")
ROWS = {
    "openai": (Row(1, "a", "chat", "m", b'{"model":"m","messages":[]}', None),),
    "anthropic": (Row(1, "a", "messages", "m", b'{"model":"m"}', 5),),
    "gemini": (Row(1, "a", "generate", "m", b'{"contents":[]}', 5),),
}


def fault(status, body=b"", headers=None, provider=OPENAI) -> Fault:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    result = provider.decode(ROWS[provider.family], HttpResponse(status, headers or {}, content))
    assert isinstance(result, Fault), result
    return result


def error(message="no", **fields):
    return {"error": {"message": message, "type": None, "param": None, "code": None, **fields}}


def seen(f: Fault):
    return f.kind, f.maybe_processed, f.stop


REFUSED_RATE = ("rate_limited", False, None)
REFUSED = ("overloaded", False, None)
FAILED = ("overloaded", True, None)
REJECTED = ("rejected", False, None)
TOO_LARGE = ("too_large", False, None)
AUTH = ("fatal", False, "auth")
ACCOUNT = ("fatal", False, "account")
REDIRECT = ("fatal", False, "redirect")
GARBLED = ("garbled", True, None)

TOO_BIG = "Request too large for gpt-5 in organization org-x on tokens per min (TPM): Limit 30000, Requested 31159."
RATE = "Rate limit reached for gpt-5 on tokens per min (TPM): Limit 30000, Used 29000, Requested 2000."
NEVER = "Rate limit reached for gpt-5 on tokens per min (TPM): Limit 30000, Used 0, Requested 31000."


@pytest.mark.parametrize(
    ("status", "body", "expected", "code"),
    [
        # again, slower: refused, not processed
        (429, error(RATE, type="tokens", code="rate_limit_exceeded"), REFUSED_RATE, "rate_limit_exceeded"),
        (429, error(type="requests", code="slow_down"), REFUSED_RATE, "slow_down"),
        (429, error("Resource Unavailable", code="resource_unavailable"), REFUSED_RATE, "resource_unavailable"),
        (429, b"", REFUSED_RATE, None),
        # a 429 that is no rate limit
        (429, error(type="insufficient_quota", code="insufficient_quota"), ACCOUNT, "insufficient_quota"),
        (429, error(type="insufficient_quota"), ACCOUNT, "insufficient_quota"),
        (429, error(code="credit_balance_exhausted"), ACCOUNT, "credit_balance_exhausted"),
        (429, error(code="organization_spend_limit_exceeded"), ACCOUNT, "organization_spend_limit_exceeded"),
        (429, error(code="project_spend_limit_exceeded"), ACCOUNT, "project_spend_limit_exceeded"),
        (
            429,
            error(code="organization_usage_limit_exceeded"),
            ACCOUNT,
            "organization_usage_limit_exceeded",
        ),
        (429, error(TOO_BIG, type="tokens", code="rate_limit_exceeded"), TOO_LARGE, "rate_limit_exceeded"),
        (429, error(NEVER, type="tokens", code="rate_limit_exceeded"), TOO_LARGE, "rate_limit_exceeded"),
        # the key, the wallet, the model: no row can succeed
        (401, error(code="invalid_api_key"), AUTH, "invalid_api_key"),
        (401, b"<html>", AUTH, None),
        (403, error(code="unsupported_country_region_territory"), AUTH, "unsupported_country_region_territory"),
        (402, error("Insufficient Balance", type="unknown_error"), ACCOUNT, "unknown_error"),
        (402, b"", ACCOUNT, None),
        (400, error("Budget has been exceeded!", type="budget_exceeded", code="400"), ACCOUNT, "budget_exceeded"),
        (404, error("The model `x` does not exist", code="model_not_found"), ACCOUNT, "model_not_found"),
        (404, error("The model `x` does not exist.", type="NotFoundError", code=404), ACCOUNT, "NotFoundError"),
        (404, error('model "x" not found, try pulling it first', type="api_error"), ACCOUNT, "api_error"),
        (404, error("No endpoints found for a/b.", code=404), ACCOUNT, "404"),
        (400, error("Model Not Exist", code="invalid_request_error"), ACCOUNT, "invalid_request_error"),
        (400, error("/chat/completions: Invalid model name passed in model=x", code="400"), ACCOUNT, "400"),
        # the row's own
        (400, error(type="invalid_request_error"), REJECTED, "invalid_request_error"),
        (400, error(code="context_length_exceeded"), REJECTED, "context_length_exceeded"),
        (400, error(code="content_filter"), REJECTED, "content_filter"),
        (403, error(code="content_filter"), REJECTED, "content_filter"),
        (404, error("Not here", code="previous_response_not_found"), REJECTED, "previous_response_not_found"),
        (422, {"detail": [{"loc": ["body", "top_k"], "msg": "too big", "type": "less_than"}]}, REJECTED, "less_than"),
        (418, b"", REJECTED, None),
        (413, b"<html>413</html>", TOO_LARGE, None),
        (413, error(TOO_BIG, code="rate_limit_exceeded"), TOO_LARGE, "rate_limit_exceeded"),
        # overload that refuses at the door
        (503, error(code="slow_down"), REFUSED, "slow_down"),
        (503, b"<html>", REFUSED, None),
        (529, error(type="overloaded_error"), REFUSED, "overloaded_error"),
        (500, error(type="overloaded_error"), REFUSED, "overloaded_error"),
        (498, error(code="capacity_exceeded"), REFUSED, "capacity_exceeded"),
        (425, b"", REFUSED, None),
        # trouble after the request was taken in
        *[(status, b"", FAILED, None) for status in (408, 409, 500, 502, 504, 507, 520, 524, 599)],
    ],
)
def test_a_status_and_its_code_say_what_kind_of_fault_it_is(status, body, expected, code):
    got = fault(status, body)
    assert (seen(got), got.code, got.status) == (expected, code, status)


def test_openrouter_in_flight_budget_passes_and_an_empty_wallet_does_not():
    passing = error("Budget in flight", code=402, metadata={"reason": "in_flight_budget_exhausted"})
    assert seen(fault(402, passing)) == REFUSED_RATE
    assert seen(fault(402, error("Insufficient credits", code=402))) == ACCOUNT


def test_openrouter_moderation_fails_the_row_and_keeps_the_run():
    flagged = error("moderated", code=403, metadata={"reasons": ["violence"], "flagged_input": "…"})
    assert seen(fault(403, flagged)) == REJECTED
    assert seen(fault(403, error("Key has no access", code=403))) == AUTH


def test_openrouter_says_when_in_the_metadata_headers():
    limited = error(
        "Rate limit exceeded: free-models-per-min",
        code=429,
        metadata={
            "headers": {
                "X-RateLimit-Limit": "20",
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": "1796032830000",
            }
        },
    )
    assert fault(429, limited, {"date": DATE}).retry_after_s == 30.0


def test_a_message_of_the_server_behind_a_gateway_is_shown():
    got = fault(400, error("Provider returned error", code=400, metadata={"raw": "temperature too high"}))
    assert got.detail == "Provider returned error: temperature too high"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html><h1>404 Not Found</h1></html>",
        b"404 page not found",
        {"detail": "Not Found"},
        {"error": "Not Found"},
        {"message": "no Route matched with those values"},
        error("Invalid URL (POST /v1/v1/chat/completions)", type="invalid_request_error"),
        {"type": "error", "error": {"type": "not_found_error", "message": "Not Found"}},
    ],
)
def test_a_path_that_is_not_there_stops_the_run_and_names_the_url(body):
    got = fault(404, body)
    assert seen(got) == ACCOUNT
    assert URL in got.detail
    assert "base URL" in got.detail


def test_a_redirect_is_not_followed_and_its_target_named_without_credentials():
    got = fault(308, b"", {"location": "https://user:pw@elsewhere.example:8443/v1/chat?token=secret"})
    assert seen(got) == REDIRECT
    assert got.detail == (f"HTTP 308 Permanent Redirect: {URL} redirects to https://elsewhere.example:8443/v1/chat")
    assert fault(302, b"", {"location": "/login"}).detail.endswith("redirects to /login")
    assert seen(fault(304)) == REDIRECT
    assert seen(fault(301, b"", {"location": "http://[bad"})) == REDIRECT


@pytest.mark.parametrize(
    ("status", "body", "said", "expected"),
    [
        (400, error(code="odd"), "true", FAILED),
        (500, b"", "false", ("rejected", True, None)),
        (503, b"", "false", REJECTED),
        # A limit that waiting does not lift is the account's: the rows stay pending.
        (429, error(code="some_new_spend_limit"), "false", ACCOUNT),
        # What is settled stays settled.
        (401, error(code="invalid_api_key"), "true", AUTH),
        (429, error(TOO_BIG), "true", TOO_LARGE),
        (429, error(code="insufficient_quota"), "true", ACCOUNT),
        (429, b"", "true", REFUSED_RATE),
        (429, b"", "maybe", REFUSED_RATE),
    ],
)
def test_x_should_retry_overrides(status, body, said, expected):
    assert seen(fault(status, body, {"x-should-retry": said})) == expected


@pytest.mark.parametrize(
    ("body", "message", "code", "param"),
    [
        (error("nested", type="t", param="p", code="c"), "nested", "c", "p"),
        (
            {"object": "error", "message": "flat", "type": "t", "param": None, "code": "1500"},
            "flat",
            "t",
            None,
        ),
        ({"object": "error", "message": "flat", "type": None, "param": "p", "code": 400}, "flat", "400", "p"),
        ([error("in an array", code=400, status="INVALID_ARGUMENT")], "in an array", "INVALID_ARGUMENT", None),
        (error("strings", type="None", param="None", code="400"), "strings", "400", None),
        ({"error": "a string"}, "a string", None, None),
        ({"error": "a string", "error_type": "validation"}, "a string", None, None),
        ({"detail": "a text"}, "a text", None, None),
        ({"detail": {"error": {"message": "deeper", "code": "c"}}}, "deeper", "c", None),
        (
            {
                "detail": [
                    {"loc": ["body", "max_completion_tokens"], "msg": "Extra inputs", "type": "extra_forbidden"},
                    {"loc": ["body", 0, "x"], "msg": "Missing", "type": "missing"},
                ]
            },
            "body.max_completion_tokens: Extra inputs; body.0.x: Missing",
            "extra_forbidden",
            "max_completion_tokens",
        ),
        (
            {
                "object": "error",
                "message": {"detail": [{"loc": ["body", "n"], "msg": "too big", "type": "le"}]},
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            },
            "body.n: too big",
            "invalid_request_error",
            "n",
        ),
        (error("two\nlines\r\n and \u2028more"), "two lines and more", None, None),
        (error(["no", "text"], code=True), "HTTP 400 Bad Request", None, None),
        (b"", "HTTP 400 Bad Request", None, None),
        (b"<!doctype html><title>oops</title>", "HTTP 400 Bad Request", None, None),
        (b"upstream connect error\n", "HTTP 400: upstream connect error", None, None),
        (b"[]", "HTTP 400 Bad Request", None, None),
        (b"null", "HTTP 400: null", None, None),
        (b"\x00\xff\xfe", "HTTP 400 Bad Request", None, None),
        (b"[" * 100_000, "HTTP 400 Bad Request", None, None),
        (b'{"error":' * 2000 + b"1" + b"}" * 2000, "HTTP 400 Bad Request", None, None),
    ],
)
def test_every_shape_of_error_body_is_read(body, message, code, param):
    got = fault(400, body)
    assert (got.detail, got.code, got.param, got.kind) == (message, code, param, "rejected")


def test_the_status_is_believed_before_a_body_that_is_no_json_and_two_kilobytes_are_kept():
    page = b"<html>" + b"x" * 1_000_000
    got = fault(502, page, {"x-request-id": "req_7"})
    assert seen(got) == FAILED
    assert got.body == page[:2048]
    assert got.detail == "HTTP 502 Bad Gateway"
    assert got.request_id == "req_7"


def test_a_number_in_the_text_is_no_status():
    assert seen(fault(400, error("you sent 429 messages, rate limit 503"))) == REJECTED
    assert seen(fault(400, error("Request too large"))) == REJECTED


def test_a_long_message_is_cut():
    assert len(fault(400, error("x" * 100_000)).detail) == 600


# ---------------------------------------------------------------- when


def test_a_refusal_carries_its_hint_and_an_hour_stays_an_hour():
    assert fault(429, b"", {"retry-after": "3600"}).retry_after_s == 3600.0
    assert fault(503, b"", {"retry-after-ms": "250", "retry-after": "9"}).retry_after_s == 0.25
    later = {"retry-after": "Mon, 30 Nov 2026 10:00:20 GMT", "date": DATE}
    assert fault(529, b"", later).retry_after_s == 20.0
    assert fault(401, b"", {"retry-after": "5"}).retry_after_s is None


def test_a_429_without_a_hint_waits_for_the_quota_that_is_used_up():
    headers = {
        "x-ratelimit-limit-requests": "500",
        "x-ratelimit-remaining-requests": "499",
        "x-ratelimit-reset-requests": "1h0m0s",
        "x-ratelimit-limit-tokens": "30000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m2.5s",
    }
    got = fault(429, error(RATE), headers)
    assert got.retry_after_s == 62.5
    assert got.quotas is not None
    assert got.quotas.tokens == Quota(30000, 0, 62.5)
    assert fault(429, error(RATE), {**headers, "retry-after": "3"}).retry_after_s == 3.0
    assert fault(429, error(RATE), {**headers, "x-ratelimit-remaining-tokens": "5"}).retry_after_s is None
    assert fault(503, b"", headers).retry_after_s is None


# ---------------------------------------------------------------- Anthropic, Gemini


def anthropic_error(kind, message="no", **more):
    return {
        "type": "error",
        "error": {"type": kind, "message": message, **more},
        "request_id": "req_011",
    }


@pytest.mark.parametrize(
    ("status", "body", "expected", "code"),
    [
        (400, anthropic_error("invalid_request_error"), REJECTED, "invalid_request_error"),
        (
            400,
            anthropic_error("invalid_request_error", "Your credit balance is too low to access the API."),
            ACCOUNT,
            "invalid_request_error",
        ),
        (401, anthropic_error("authentication_error"), AUTH, "authentication_error"),
        (402, anthropic_error("billing_error"), ACCOUNT, "billing_error"),
        (403, anthropic_error("permission_error"), AUTH, "permission_error"),
        (404, anthropic_error("not_found_error", "model: claude-none"), ACCOUNT, "not_found_error"),
        (404, anthropic_error("not_found_error", "File file_1 is gone"), REJECTED, "not_found_error"),
        (413, anthropic_error("request_too_large"), TOO_LARGE, "request_too_large"),
        (409, anthropic_error("conflict_error"), FAILED, "conflict_error"),
        (429, anthropic_error("rate_limit_error"), REFUSED_RATE, "rate_limit_error"),
        (
            429,
            anthropic_error("rate_limit_error", details={"error_code": "enforced_spend_limit_reached"}),
            ACCOUNT,
            "enforced_spend_limit_reached",
        ),
        (500, anthropic_error("api_error"), FAILED, "api_error"),
        (504, anthropic_error("timeout_error"), FAILED, "timeout_error"),
        (529, anthropic_error("overloaded_error"), REFUSED, "overloaded_error"),
    ],
)
def test_anthropic_errors(status, body, expected, code):
    got = fault(status, body, provider=ANTHROPIC)
    assert (seen(got), got.code, got.request_id) == (expected, code, "req_011")


def test_an_anthropic_429_waits_for_its_used_up_quota():
    headers = {
        "date": DATE,
        "anthropic-ratelimit-input-tokens-limit": "50000",
        "anthropic-ratelimit-input-tokens-remaining": "0",
        "anthropic-ratelimit-input-tokens-reset": "2026-11-30T10:00:41Z",
    }
    assert fault(429, anthropic_error("rate_limit_error"), headers, ANTHROPIC).retry_after_s == 41.0


def google_error(code, status, *details, message="no"):
    return {"error": {"code": code, "message": message, "status": status, "details": list(details)}}


RETRY_INFO = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "37.5s"}


def quota_failure(quota):
    return {
        "@type": "type.googleapis.com/google.rpc.QuotaFailure",
        "violations": [{"quotaMetric": "m", "quotaId": quota}],
    }


PER_MINUTE = quota_failure("GenerateRequestsPerMinutePerProjectPerModel-FreeTier")
PER_DAY = quota_failure("GenerateRequestsPerDayPerProjectPerModel-FreeTier")
BAD_KEY = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}


@pytest.mark.parametrize(
    ("status", "body", "expected", "code", "wait_s"),
    [
        (
            429,
            google_error(429, "RESOURCE_EXHAUSTED", PER_MINUTE, RETRY_INFO),
            REFUSED_RATE,
            "RESOURCE_EXHAUSTED",
            37.5,
        ),
        (
            429,
            google_error(429, "RESOURCE_EXHAUSTED", PER_DAY, RETRY_INFO),
            ACCOUNT,
            "RESOURCE_EXHAUSTED",
            None,
        ),
        (402, google_error(402, "FAILED_PRECONDITION"), ACCOUNT, "FAILED_PRECONDITION", None),
        (400, google_error(400, "INVALID_ARGUMENT", BAD_KEY), AUTH, "API_KEY_INVALID", None),
        (400, google_error(400, "INVALID_ARGUMENT"), REJECTED, "INVALID_ARGUMENT", None),
        (403, google_error(403, "PERMISSION_DENIED"), AUTH, "PERMISSION_DENIED", None),
        (
            404,
            google_error(404, "NOT_FOUND", message="models/x is not found for API version v1beta"),
            ACCOUNT,
            "NOT_FOUND",
            None,
        ),
        (500, google_error(500, "INTERNAL"), FAILED, "INTERNAL", None),
        (503, google_error(503, "UNAVAILABLE"), REFUSED, "UNAVAILABLE", None),
        (504, google_error(504, "DEADLINE_EXCEEDED"), FAILED, "DEADLINE_EXCEEDED", None),
    ],
)
@pytest.mark.parametrize("native", [True, False])
def test_gemini_errors_natively_and_as_the_compatible_endpoints_array(status, body, expected, code, wait_s, native):
    got = fault(status, body, provider=GEMINI) if native else fault(status, [body])
    assert (seen(got), got.code, got.retry_after_s) == (expected, code, wait_s)


# ---------------------------------------------------------------- inside a 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (error("upstream", code=429), REFUSED_RATE),
        (error("upstream", code="429"), REFUSED_RATE),
        (error("upstream", code=502), FAILED),
        (error("upstream", code=503), REFUSED),
        (error("no credits", code=402), ACCOUNT),
        (error("bad key", code=401), AUTH),
        (error("bad request", code=400), REJECTED),
        (error("who knows"), FAILED),
        (error("who knows", code=7), FAILED),
        (error("busy", code="rate_limit_exceeded"), REFUSED_RATE),
        (error("busy", type="overloaded_error"), REFUSED),
        (error("spent", code="insufficient_quota"), ACCOUNT),
        ({"error": "in words"}, FAILED),
        ([error("in an array", code=429)], REFUSED_RATE),
        ({"object": "error", "message": "flat", "type": "invalid_request_error", "code": 400}, REJECTED),
        (anthropic_error("overloaded_error"), REFUSED),
    ],
)
def test_an_error_inside_a_200_is_classified_like_a_status(body, expected):
    got = fault(200, body)
    assert (seen(got), got.status) == (expected, 200)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"<html>hello</html>",
        b"null",
        b"[]",
        b"42",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[{}]}',
        b'{"choices":[7]}',
        b'{"choices":{"message":1}}',
        b'{"choices":[{"message":{"content":"cut off',
        b'{"choices":[{"message":{"content":"x"}}],"n":NaN}',
        b'{"choices":[{"message":{"content":"x"}}]}]],[[{"choices":[]}',
        b'{"choices":[{"message":' + b"[" * 1000 + b"]" * 1000 + b"}]}",
        b"[" * 1_000_000,
        b'{"a":' * 1020 + b"1" + b"}" * 1020,
        b'{"n":' + b"9" * 5000 + b"}",
    ],
)
def test_a_200_that_cannot_be_read_is_garbled_and_may_have_been_billed(body):
    assert seen(fault(200, body)) == GARBLED


def test_an_event_stream_is_rejected_rather_than_paid_for_again():
    got = fault(200, b'data: {"choices":[]}\n\n', {"content-type": "text/event-stream; charset=utf-8"})
    assert seen(got) == ("rejected", True, None)
    assert "stream" in got.detail
