"""The product's own schedule against models of servers, in virtual time. The full table is `make bench-flow`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice
from math import exp

import pytest

from batchrun.errors import Exit
from batchrun.plan.schedule import Flow
from batchrun.plan.simulate import Outage, Result, ServerModel, Work, simulate
from batchrun.records import Call, Row

SLOTS = ServerModel(in_flight=64, latency_s=1.2)
RATE = ServerModel(calls_per_s=50, burst_calls=10)


def workload(seed: int = 1, *, price: Decimal | None = Decimal("0.001"), model: str = "m") -> Iterator[Work]:
    rng = random.Random(seed)
    line = 0
    while True:
        line += 1
        tokens, output = int(400 * exp(rng.gauss(0, 0.5))) + 1, min(512, int(150 * exp(rng.gauss(0, 0.6))) + 1)
        row = Row(line, str(line), "chat", model, b"{}", 512, tokens=tokens)
        yield Work(Call((row,), 0, tokens, price or Decimal(0)), output, price, size=0.4 + 0.6 * output / 175)


def run(model: ServerModel, flow: Flow = Flow(), *, seed: int = 1, until_s: float = 300) -> Result:  # noqa: B008
    return simulate(flow, model, workload(seed), seed=seed, until_s=until_s)


def per_s(result: Result, start: int, end: int) -> float:
    return sum(result.answered[second] for second in range(start, end)) / (end - start)


def refused(result: Result, start: int) -> float:
    late = {second: count for second, count in result.refusals.items() if second >= start}
    return sum(late.values()) / sum(count for second, count in result.sent.items() if second >= start)


def again_after(result: Result, capacity: float, at: int) -> float:
    return next((s - at for s in range(at, at + 200) if per_s(result, s, s + 5) >= 0.9 * capacity), float("inf"))


def test_a_job_ends_with_what_it_took() -> None:
    result = simulate(Flow(rpm=600), ServerModel(), islice(workload(), 500))
    assert (result.succeeded, result.failed, result.sends, result.refused, result.stop) == (500, 0, 500, 0, None)
    assert result.cost_usd == Decimal("0.500")
    assert result.unpriced == 0
    assert result.duration_s == pytest.approx(500 / (0.98 * 10), rel=0.06)
    assert result.binding == "requests per minute"
    assert result.input_tokens == sum(work.call.tokens for work in islice(workload(), 500))


def test_a_job_ends_on_a_server_that_queues() -> None:
    result = simulate(Flow(), ServerModel(full_speed=8), islice(workload(), 50))
    assert (result.succeeded, result.refused) == (50, 0)


def test_no_rows_take_no_time() -> None:
    result = simulate(Flow(), ServerModel(), [])
    assert (result.duration_s, result.sends, result.binding) == (0.0, 0, "input")


def test_prices_that_are_not_known_are_counted_apart() -> None:
    result = simulate(Flow(), ServerModel(), islice(workload(price=None), 20))
    assert (result.cost_usd, result.unpriced) == (0, 20)


def test_a_budget_stops_a_simulated_run_too() -> None:
    result = simulate(Flow(budget_usd=Decimal("0.1")), ServerModel(), islice(workload(), 500))
    assert result.stop is not None
    assert (result.stop.reason, result.succeeded) == ("budget", 100)


def test_the_same_seed_gives_the_same_trace_byte_for_byte() -> None:
    one, same, other = (run(RATE, seed=seed, until_s=60) for seed in (1, 1, 2))
    assert one.trace == same.trace
    assert one.notes == same.notes
    assert one.trace != other.trace


@pytest.mark.parametrize(
    ("model", "capacity", "binding"),
    [
        (RATE, 50, "server rate limit"),
        (ServerModel(calls_per_s=50, burst_calls=50, hints=True), 50, None),
        (ServerModel(calls_per_s=5, burst_calls=5, latency_s=2), 5, "server rate limit"),
        (SLOTS, 64 / 1.24 / exp(0.045), "server in-flight limit ≈ 64"),
        (ServerModel(in_flight=8, latency_s=1.5), 8 / 1.54 / exp(0.045), "server in-flight limit ≈ 8"),
        (ServerModel(full_speed=64, latency_s=2), 32 / exp(0.045), "concurrency"),
        (ServerModel(full_speed=96, latency_s=2, batching=True), 34.9 / exp(0.045), "concurrency"),
        (ServerModel(tokens_per_s=30_000, burst_tokens=60_000, latency_s=2), 47.6, None),
    ],
)
def test_what_the_server_allows_is_found_and_used(model: ServerModel, capacity: float, binding: str | None) -> None:
    result = run(model)
    assert per_s(result, 120, 300) >= 0.95 * capacity
    assert refused(result, 120) <= (0.01 if capacity >= 45 else 0.025)
    assert result.sends <= 1.10 * result.succeeded
    assert result.max_in_flight <= 256
    assert binding is None or binding in result.binding or any(what.startswith(binding) for what in result.bound_s)


def test_a_server_that_thrashes_beyond_150_is_not_driven_over_its_knee() -> None:
    result = run(ServerModel(full_speed=10**6, thrashes_at=150, latency_s=3.0))
    assert per_s(result, 120, 300) >= 0.88 * 50 / exp(0.045)


@pytest.mark.parametrize(("mode", "most_sends"), [("refuse", 50), ("hang", 64 + 20), ("error", 50)])
def test_an_outage_is_ridden_out(mode: str, most_sends: int) -> None:
    outage = Outage(100, 220, mode)  # type: ignore[arg-type]
    result = run(ServerModel(in_flight=64, latency_s=1.2, outages=(outage,), timeout_s=30), until_s=320)
    assert result.failed == 0
    assert sum(result.sent[second] for second in range(100, 220)) <= most_sends
    assert again_after(result, 64 / 1.24 / exp(0.045), 220) <= 40
    assert [note.text.split(":")[0] for note in result.notes if note.what == "breaker"] == ["open", "closed"]


def test_an_outage_longer_than_the_patience_ends_the_run() -> None:
    gone = ServerModel(outages=(Outage(10, 1e9),))
    result = run(gone, Flow(patience_s=120), until_s=1_000)
    assert result.stop is not None
    assert (result.stop.exit_code, result.failed) == (Exit.UNREACHABLE, 0)
    assert 120 <= result.duration_s - 10 <= 150


def test_more_capacity_is_found_within_a_minute() -> None:
    result = run(ServerModel(calls_per_s=50, burst_calls=10, steps=((100, 2.5),)))
    assert again_after(result, 125, 100) <= 60


@pytest.mark.parametrize(
    ("flow", "model", "capacity"),
    [
        (Flow(rpm=3_000), ServerModel(calls_per_s=50, burst_calls=5), 50),
        (Flow(tpm=600_000), ServerModel(tokens_per_s=10_000, burst_tokens=20_000), None),
        (Flow(), ServerModel(calls_per_s=5, burst_calls=300, headers=True, hints=True), 5),
        (
            Flow(),
            ServerModel(tokens_per_s=10_000, burst_tokens=600_000, headers=True, hints=True, counts_max_tokens=True),
            10_000 / 966,
        ),
    ],
)
def test_a_known_quota_is_used_to_the_full_and_nothing_is_refused(
    flow: Flow, model: ServerModel, capacity: float | None
) -> None:
    result = run(model, flow)
    assert result.refused == 0
    used = per_s(result, 120, 300) / capacity if capacity else sum(result.used[s] for s in range(120, 300)) / 1.8e6
    assert used >= 0.96


def test_two_endpoints_are_both_used() -> None:
    result = simulate(Flow(origins=2), ServerModel(in_flight=16), workload(), until_s=120)
    assert per_s(result, 60, 120) >= 0.9 * 32 / 1.04 / exp(0.045)


def test_partial_errors_fail_no_row() -> None:
    result = run(ServerModel(calls_per_s=50, error_share=0.02), until_s=120)
    assert result.failed == 0
    assert result.faulted > 50


def test_virtual_hours_are_played_to_their_end() -> None:
    result = simulate(Flow(rpm=60), ServerModel(latency_s=10.0), islice(workload(), 6_000))
    assert (result.succeeded, result.refused) == (6_000, 0)
    assert result.duration_s == pytest.approx(6_000 / 0.98, rel=0.01)


def test_a_bucket_that_holds_less_than_a_minute_is_used_to_the_full_and_does_not_slow_down() -> None:
    server = ServerModel(latency_s=0.3, spread=0.0, calls_per_s=40, burst_calls=10, headers=True, hints=True)
    result = run(server, until_s=400)
    assert min(per_s(result, 60, 120), per_s(result, 330, 390)) >= 0.95 * 40
    assert result.refused <= 0.01 * result.sends


def test_a_call_of_several_rows_that_is_given_up_goes_on_in_halves() -> None:
    """Every row is answered or fails once; what a part costs is its rows' share of the whole."""
    rows = [Row(line, str(line), "embeddings", "m", b"{}", 0, tokens=10) for line in range(1, 1_001)]
    calls = [Call(tuple(rows[start : start + 100]), 0, 1_000, Decimal(1)) for start in range(0, 1_000, 100)]
    flaky = ServerModel(latency_s=0.5, error_share=0.5)
    result = simulate(Flow(max_attempts=2), flaky, (Work(call, 0, Decimal(1)) for call in calls), seed=3)
    assert result.succeeded + result.failed == 1_000
    assert 10 < result.sends < 1_000
    assert result.cost_usd == Decimal(result.succeeded) / 100
