from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.plan.pace import Expectation, KnownQuota, Mark, Pace, even_pace
from batchrun.records import Quota


def sendable(quota: KnownQuota, now: float, units: float = 1.0, most: int = 10_000) -> int:
    """How many calls go out at ``now``."""
    sent = 0
    while quota.wait_s(now, units, units) == 0.0 and sent < most:
        quota.take(now, units, units)
        sent += 1
    return sent


def over(quota: KnownQuota, start: float, end: float, units: float = 1.0) -> int:
    """How many calls go out from ``start`` to ``end``, each as soon as it may."""
    now, sent = start, 0
    while True:
        now += quota.wait_s(now, units, units)
        if now >= end:
            return sent
        quota.take(now, units, units)
        sent += 1


def test_what_the_user_set_is_spread_evenly_at_98_percent() -> None:
    quota = KnownQuota(0.0, even_pace(0.0, 200))
    assert sendable(quota, 0.0) == 1
    assert over(quota, 0.0, 600.0) == pytest.approx(0.98 * 2_000, abs=2)


def test_no_minute_holds_more_than_was_set() -> None:
    quota, times, now = KnownQuota(0.0, even_pace(0.0, 60)), [], 0.0
    while now < 600:
        now += max(quota.wait_s(now, 1.0, 1.0), 0.001)
        if quota.wait_s(now, 1.0, 1.0) == 0.0:
            quota.take(now, 1.0, 1.0)
            times.append(now)
    assert max(sum(start <= at < start + 60 for at in times) for start in times) <= 60


def test_a_call_larger_than_the_bucket_goes_when_it_is_full_and_leaves_a_debt() -> None:
    pace = Pace(0.0, rate=100.0, burst=500.0)
    assert pace.wait_s(0.0, 5_000.0) == 0.0
    pace.take(0.0, 5_000.0)
    assert pace.level(0.0) == -4_500.0
    assert pace.wait_s(0.0, 5_000.0) == 50.0
    assert pace.wait_s(50.0, 5_000.0) == 0.0


def test_what_is_given_back_is_not_lost_to_a_full_bucket() -> None:
    pace = Pace(0.0, rate=10.0, burst=10.0)
    pace.take(0.0, 10.0)
    pace.take(1.0, -30.0)
    assert pace.level(1.0) == 40.0
    assert pace.level(9.0) == 40.0


def test_time_never_runs_back() -> None:
    pace = Pace(10.0, rate=1.0, burst=5.0)
    pace.take(10.0, 5.0)
    assert pace.level(9.0) == 0.0
    assert pace.level(12.0) == 2.0


def test_a_full_bucket_that_the_headers_tell_of_is_emptied_and_never_overdrawn() -> None:
    quota = KnownQuota(0.0, None)
    assert quota.wait_s(0.0, 1.0, 1.0) == 0.0  # nothing is known yet
    marks = [quota.take(0.0, 1.0, 1.0) for _ in range(16)]
    quota.learn(0.5, Quota(200, 199, 0.3), 0.0, marks[0])
    assert sendable(quota, 0.5) == 200 - 16
    assert over(quota, 0.5, 60.5) == pytest.approx(0.98 * 200, abs=3)


def test_what_was_sent_just_before_may_have_arrived_after() -> None:
    quota = KnownQuota(0.0, None)
    for _ in range(5):
        quota.take(1.0, 1.0, 1.0)
    mark = quota.take(1.15, 1.0, 1.0)
    quota.learn(1.2, Quota(60, 10, 50.0), 1.15, mark)
    assert sendable(quota, 1.2) == 5  # the five may be on their way yet


def test_remaining_is_corrected_by_what_the_server_may_not_have_seen() -> None:
    quota = KnownQuota(0.0, None)
    first = quota.take(0.0, 1.0, 1.0)
    for _ in range(9):
        quota.take(0.1, 1.0, 1.0)
    quota.learn(0.2, Quota(60, 10, 50.0), 0.0, first)
    assert sendable(quota, 0.2) == 1  # 10 remaining − 9 on their way


def test_what_the_server_did_not_take_is_given_back() -> None:
    quota = KnownQuota(0.0, even_pace(0.0, 60))
    mark = quota.take(0.0, 1.0, 1.0)
    quota.learn(0.0, Quota(60, 1, 59.0), 0.0, mark)
    quota.take(5.0, 1.0, 1.0)
    quota.take(5.0, 1.0, 1.0)
    assert quota.wait_s(5.0, 1.0, 1.0) > 0.0
    for _ in range(2):
        quota.give_back(5.0, 1.0, 1.0)
    assert quota.wait_s(5.0, 1.0, 1.0) == 0.0


def test_another_user_of_the_same_key_is_noticed() -> None:
    quota = KnownQuota(0.0, None)
    mark = quota.take(0.0, 1.0, 1.0)
    quota.learn(0.0, Quota(600, 599, 0.1), 0.0, mark)
    mark = quota.take(1.0, 1.0, 1.0)
    quota.learn(1.0, Quota(600, 3, 59.7), 1.0, mark)
    assert sendable(quota, 1.0) == 3


def test_a_quota_of_a_day_refills_as_slowly_as_its_reset_says() -> None:
    quota = KnownQuota(0.0, None)
    mark = quota.take(0.0, 1.0, 1.0)
    quota.learn(0.0, Quota(200, 150, 21_600.0), 0.0, mark)  # 50 used are back in six hours
    assert sendable(quota, 0.0) == 150
    assert over(quota, 0.0, 3_600.0) == pytest.approx(0.98 * 50 / 6, abs=1)


@pytest.mark.parametrize("limit", [None, 0, -1])
def test_a_limit_that_is_none_is_ignored(limit: int | None) -> None:
    quota = KnownQuota(0.0, None)
    quota.learn(0.0, Quota(limit, 0, 1.0), 0.0, Mark(0.0, 0.0))
    assert quota.told is None
    assert not quota.exhausted(0.0, 1.0)


def test_a_limit_without_remaining_sets_the_rate_alone() -> None:
    quota = KnownQuota(0.0, None)
    quota.learn(0.0, Quota(60), 0.0, Mark(0.0, 0.0))
    assert sendable(quota, 0.0) == 60
    assert quota.exhausted(0.0, 1.0)
    assert quota.wait_s(0.0, 1.0, 1.0) == pytest.approx(1 / 0.98)


@pytest.mark.parametrize("share", [0.3, 1.0, 1.7])
def test_how_the_server_charges_tokens_is_learned_from_its_headers(share: float) -> None:
    """The server takes ``share`` of input + max_tokens; its bucket is used to the full and never overdrawn."""
    quota, level, now, most, used, refused = KnownQuota(0.0, None, least_scale=0.02), 60_000.0, 0.0, 1_000.0, 0.0, 0
    for step in range(2_000):
        wait_s = max(quota.wait_s(now, 0.0, most), 0.05)
        level, now = min(60_000.0, level + wait_s * 1_000), now + wait_s
        if quota.wait_s(now, 0.0, most) > 0.0:
            continue
        mark = quota.take(now, 0.0, most)
        if level < share * most:
            refused += step > 300
            quota.give_back(now, 0.0, most)
        else:
            level -= share * most
            used += share * most
        quota.learn(now, Quota(60_000, int(level), (60_000 - level) / 1_000), now, mark)
    assert refused == 0
    assert used >= 0.97 * (60_000 + 1_000 * now - level)


def test_a_charge_that_cannot_be_is_not_learned_from() -> None:
    quota = KnownQuota(0.0, None, least_scale=0.02)
    quota.learn(0.0, Quota(1_000, 100, 54.0), 0.0, quota.take(0.0, 0.0, 100.0))
    quota.learn(1.0, Quota(1_000, 900, 6.0), 1.0, quota.take(1.0, 0.0, 100.0))  # a fixed window began anew
    assert sendable(quota, 1.0, 100.0) == 9


def test_output_is_expected_at_its_maximum_until_fifty_are_known_then_at_the_90th_percentile() -> None:
    expectation = Expectation()
    samples = [expectation.sent() for _ in range(100)]
    for place, sample in enumerate(samples[:49]):
        expectation.ended(sample, place / 100)
    assert expectation.share == 1.0
    for place, sample in enumerate(samples[49:], 49):
        expectation.ended(sample, place / 100)
    assert expectation.share == pytest.approx(0.89)


def test_output_is_sampled_in_the_order_of_sending() -> None:
    """The first replies back are the short ones; they must not count before the long ones sent with them."""
    expectation = Expectation()
    long, *short = [expectation.sent() for _ in range(100)]
    for sample in short:
        expectation.ended(sample, 0.1)
    assert expectation.share == 1.0
    expectation.ended(long, 0.9)
    assert expectation.share == pytest.approx(0.1)


def test_a_straggler_holds_back_no_more_than_so_many() -> None:
    expectation = Expectation()
    expectation.sent()
    for _ in range(2_100):
        expectation.ended(expectation.sent(), 0.2)
    assert expectation.share == pytest.approx(0.2)


def test_what_never_ends_well_is_not_sampled() -> None:
    expectation = Expectation()
    for _ in range(200):
        expectation.ended(expectation.sent(), None)
    assert expectation.share == 1.0


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 50)), max_size=60), st.integers(60, 6_000))
def test_never_more_goes_out_than_rate_and_burst_allow(steps: list[tuple[float, float]], per_minute: int) -> None:
    quota, now, sent, largest = KnownQuota(0.0, even_pace(0.0, per_minute)), 0.0, 0.0, 0.0
    for pause_s, units in steps:
        now += pause_s
        if quota.wait_s(now, units, units) == 0.0:
            quota.take(now, units, units)
            sent += units
            largest = max(largest, units)
        assert sent <= per_minute / 60 * now + max(1.0, 0.05 * per_minute / 60) + largest + 1e-6
