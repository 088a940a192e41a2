"""Retry hints and quotas, in every spelling that servers use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.providers.headers import (
    anthropic_quotas,
    exhausted_s,
    go_duration_s,
    openai_quotas,
    retry_after_s,
)
from batchrun.records import Quota, Quotas

DATE = "Mon, 30 Nov 2026 10:00:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after": " 3 "}, 3.0),
        ({"retry-after": "3600"}, 3600.0),
        ({"retry-after-ms": "120"}, 0.12),
        ({"retry-after-ms": "1500.5", "retry-after": "2"}, 1.5005),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0),
        ({"retry-after-ms": "0", "retry-after": "2"}, 2.0),
        ({"retry-after": "Mon, 30 Nov 2026 10:00:09 GMT", "date": DATE}, 9.0),
        ({"retry-after": "Monday, 30-Nov-26 10:01:00 GMT", "date": DATE}, 60.0),
        # A date that is past, or that no server clock stands beside, is no hint.
        ({"retry-after": "Mon, 30 Nov 2026 09:59:59 GMT", "date": DATE}, None),
        ({"retry-after": "Mon, 30 Nov 2026 10:00:09 GMT"}, None),
        ({"retry-after": "Mon, 30 Nov 2026 10:00:09 GMT", "date": "yesterday"}, None),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1e3"}, None),
        ({"retry-after": "1_000"}, None),
        ({"retry-after": "٣"}, None),
        ({"retry-after": "2, 2"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "9" * 400}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_in_all_its_spellings_and_nonsense_is_ignored(headers, seconds):
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("120ms", 0.12),
        ("1h2m3.5s", 3723.5),
        ("2m59.56s", 179.56),
        ("37s", 37.0),
        ("1.5µs", 1.5e-6),
        ("20ns", 2e-8),
        ("0s", 0.0),
        ("", None),
        ("5", None),
        ("s", None),
        ("-1s", None),
        ("1s later", None),
        ("1d", None),
        ("9" * 60 + "h", float("9" * 60) * 3600),
    ],
)
def test_go_durations_are_read_whole_or_not_at_all(text, seconds):
    assert go_duration_s(text) == (pytest.approx(seconds) if seconds is not None else None)


def test_openai_quotas_are_read_with_resets_in_seconds():
    quotas = openai_quotas(
        {
            "x-ratelimit-limit-requests": "10000",
            "x-ratelimit-remaining-requests": "9999",
            "x-ratelimit-reset-requests": "6ms",
            "x-ratelimit-limit-tokens": "2000000",
            "x-ratelimit-remaining-tokens": "0",
            "x-ratelimit-reset-tokens": "6m0s",
        }
    )
    assert quotas == Quotas(Quota(10000, 9999, 0.006), Quota(2000000, 0, 360.0))


def test_a_quota_of_minus_one_is_no_quota():
    assert (
        openai_quotas(
            {
                "x-ratelimit-limit-tokens": "-1",
                "x-ratelimit-remaining-tokens": "-1",
                "x-ratelimit-reset-tokens": "-1",
            }
        )
        is None
    )
    partly = openai_quotas({"x-ratelimit-limit-tokens": "500", "x-ratelimit-remaining-tokens": "-1"})
    assert partly == Quotas(None, Quota(500, None, None))


def test_quotas_that_name_the_minute_are_read_and_those_of_a_day_or_month_are_not():
    quotas = openai_quotas(
        {
            "x-ratelimit-limit-req-minute": "60",
            "x-ratelimit-remaining-req-minute": "59",
            "x-ratelimit-limit-tokens-minute": "50000",
            "x-ratelimit-remaining-tokens-minute": "41000",
            "x-ratelimit-limit-tokens-month": "4000000",
            "x-ratelimit-limit-requests-day": "14400",
        }
    )
    assert quotas == Quotas(Quota(60, 59, None), Quota(50000, 41000, None))


def test_requests_counted_by_the_day_set_no_pace_until_they_are_used_up():
    headers = {
        "x-ratelimit-limit-requests": "14400",
        "x-ratelimit-remaining-requests": "14370",
        "x-ratelimit-reset-requests": "2m59.56s",
        "x-ratelimit-limit-tokens": "18000",
        "x-ratelimit-remaining-tokens": "17997",
        "x-ratelimit-reset-tokens": "7.66s",
    }
    tokens = Quota(18000, 17997, 7.66)
    assert openai_quotas(headers, daily_requests=True) == Quotas(None, tokens)
    headers["x-ratelimit-remaining-requests"] = "0"
    quotas = openai_quotas(headers, daily_requests=True)
    assert quotas == Quotas(Quota(14400, 0, 179.56), tokens)
    assert exhausted_s(quotas, headers) == 179.56


def anthropic(**kinds):
    headers = {"date": DATE}
    for kind, (limit, remaining, reset) in kinds.items():
        name = f"anthropic-ratelimit-{kind.replace('_', '-')}"
        headers |= {f"{name}-limit": limit, f"{name}-remaining": remaining, f"{name}-reset": reset}
    return headers


def test_of_anthropic_token_quotas_the_tightest_counts_with_its_rfc_3339_reset():
    quotas = anthropic_quotas(
        anthropic(
            requests=("1000", "999", "2026-11-30T10:00:01Z"),
            tokens=("540000", "500000", "2026-11-30T10:00:05Z"),
            input_tokens=("450000", "440000", "2026-11-30T10:00:02Z"),
            output_tokens=("90000", "9000", "2026-11-30T11:00:54+01:00"),
        )
    )
    assert quotas == Quotas(Quota(1000, 999, 1.0), Quota(90000, 9000, 54.0))


def test_among_untouched_token_quotas_none_binds_so_the_largest_counts():
    quotas = anthropic_quotas(anthropic(input_tokens=("450000", "450000", ""), output_tokens=("90000", "90000", "")))
    assert quotas == Quotas(None, Quota(450000, 450000, None))


def test_a_reset_that_has_passed_by_the_servers_clock_is_zero_and_one_without_a_clock_unknown():
    headers = anthropic(requests=("5", "0", "2026-11-30T09:59:59Z"))
    assert anthropic_quotas(headers) == Quotas(Quota(5, 0, 0.0), None)
    del headers["date"]
    assert anthropic_quotas(headers) == Quotas(Quota(5, 0, None), None)


@pytest.mark.parametrize("reset", ["30", "1796032830", "1796032830000"])
def test_the_unnamed_trio_tells_seconds_epoch_or_milliseconds(reset):
    headers = {
        "date": DATE,
        "x-ratelimit-limit": "20",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": reset,
    }
    assert exhausted_s(None, headers) == 30.0
    assert exhausted_s(None, {**headers, "x-ratelimit-remaining": "1"}) is None


text = st.text(max_size=40) | st.from_regex(r"-?[0-9.]{1,20}(ms|s|m|h)?", fullmatch=True)


@given(st.dictionaries(st.sampled_from([*anthropic(tokens=("", "", "")), "retry-after", "date"]), text), text)
def test_hints_are_finite_and_positive_whatever_the_headers(headers, reset):
    headers["x-ratelimit-remaining-tokens"] = "0"
    headers["x-ratelimit-reset-tokens"] = reset
    quotas = openai_quotas(headers)
    anthropic_quotas(headers)
    for seconds in (retry_after_s(headers), exhausted_s(quotas, headers)):
        assert seconds is None or 0 < seconds < float("inf")
