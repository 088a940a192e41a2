from __future__ import annotations

import math

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.records import RunStarted, Sampled
from batchrun.report.histogram import Histogram
from batchrun.report.timeline import MAX_POINTS, Timeline

UNHURRIED = settings(deadline=None)  # a shared machine may pause for longer than any deadline

durations = st.lists(st.floats(min_value=1e-4, max_value=1e6), min_size=1, max_size=200)


def filled(values):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


@UNHURRIED
@given(durations, st.floats(min_value=0, max_value=100))
def test_a_percentile_is_within_half_a_percent_of_the_value_of_its_rank(values, percent):
    exact = sorted(values)[max(1, math.ceil(percent / 100 * len(values))) - 1]
    assert filled(values).percentile(percent) == pytest.approx(exact, rel=0.005)


@UNHURRIED
@given(durations)
def test_count_min_max_and_mean_are_exact_and_percentiles_stay_between(values):
    histogram = filled(values)
    assert (histogram.count, histogram.min, histogram.max) == (len(values), min(values), max(values))
    assert histogram.mean() == pytest.approx(math.fsum(values) / len(values), rel=1e-6, abs=1e-6)
    assert histogram.percentile(100) == max(values)
    assert all(min(values) <= histogram.percentile(p) <= max(values) for p in (0, 50, 99, 99.9))


@UNHURRIED
@given(durations, st.randoms(use_true_random=False))
def test_a_histogram_does_not_depend_on_the_order_of_what_it_counted(values, random):
    shuffled = values.copy()
    random.shuffle(shuffled)
    assert filled(values).dump() == filled(shuffled).dump()


def test_what_is_no_duration_counts_as_zero_and_what_is_endless_is_bounded():
    histogram = filled([-1.0, math.nan, 0.0, math.inf])
    assert (histogram.count, histogram.min) == (4, 0.0)
    assert histogram.percentile(50) < 0.0002
    assert histogram.max == 1e8
    assert len(histogram.dump()["bins"]) < 3000


def test_nothing_counted_has_no_percentile():
    assert (Histogram().percentile(50), Histogram().mean()) == (None, None)


def sample(at, **changed):
    values = {"at": at, "elapsed_s": at, "in_flight": 8, "limit": 16, "done": 5, "sent": 6, "refused": 1}
    return Sampled(**{**values, "tokens": 700, "paused_s": 0.25, "binding": "concurrency", **changed})


samples = st.lists(
    st.tuples(st.floats(0, 3), st.integers(0, 99), st.integers(0, 9), st.sampled_from("abc")), max_size=700
)


@UNHURRIED
@given(samples)
def test_merging_samples_keeps_every_sum_right_and_their_number_bounded(steps):
    timeline = Timeline()
    timeline.start(0.0)
    at = 0.0
    for step, done, refused, binding in steps:
        at += step
        timeline.add(sample(at, done=done, refused=refused, binding=binding))
    points = timeline.points
    assert len(points) <= MAX_POINTS
    assert sum(point.done for point in points) == sum(step[1] for step in steps)
    assert sum(point.refused for point in points) == sum(step[2] for step in steps)
    assert sum(point.sent for point in points) == 6 * len(steps)
    assert sum(point.paused_s for point in points) == pytest.approx(0.25 * len(steps))
    assert sum(point.span_s for point in points) == pytest.approx(at, abs=0.001 * len(steps) + 0.001)
    assert sum(timeline.bindings.values()) == pytest.approx(at, abs=0.001 * len(steps) + 0.001)
    assert all(0 <= point.in_flight <= 8 and point.limit == 16 for point in points)


@UNHURRIED
@given(samples)
def test_a_timeline_goes_on_from_its_dump_as_if_it_had_never_been_kept(steps):
    straight, kept = Timeline(), Timeline()
    at = 0.0
    for i, (step, done, refused, binding) in enumerate(steps):
        at += step
        one = sample(at, done=done, refused=refused, binding=binding)
        straight.add(one)
        kept.add(one)
        if i % 97 == 0:
            kept = Timeline.load(orjson.loads(orjson.dumps(kept.dump())))
    assert kept.points == straight.points
    assert kept.dump() == straight.dump()


def test_the_time_between_two_runs_is_on_no_ones_account():
    timeline = Timeline()
    for started in (RunStarted(1, 100.0, 5), RunStarted(2, 90_000.0, 5)):
        timeline.start(started.at)
        timeline.add(sample(started.at + 2))
    assert [point.span_s for point in timeline.points] == [2.0, 2.0]
    assert timeline.bindings == {"concurrency": 4.0}


def test_bindings_beyond_a_bound_share_one_name():
    timeline = Timeline()
    for i in range(100):
        timeline.add(sample(float(i), elapsed_s=0.0, binding=f"limit {i}"))
    assert len(timeline.bindings) <= 31
    assert timeline.bindings["other"] > 0
