"""Told before anything is spent: what a job would take, by sums and by running the real plan in virtual time."""

from __future__ import annotations

import time
from decimal import Decimal

from tests.support import Shell, parse, prompts


def test_an_estimate_tells_tokens_calls_and_the_range_of_the_cost(shell: Shell) -> None:
    shell.write("in.jsonl", prompts(50, max_tokens=100))
    flags = ["--model", "m", "--price-in", "1", "--price-out", "10", "--json"]
    told = parse(shell.run("estimate", "in.jsonl", *flags).told(0).out)
    assert (told["rows"], told["calls"], told["batches"]) == (50, 50, 1)
    assert told["tokens"]["output_max"] == 5_000
    assert told["cost_usd"]["min"] == Decimal(told["tokens"]["input"]) / 1_000_000
    assert told["cost_usd"]["expected"] - told["cost_usd"]["min"] == Decimal("0.025")
    assert told["cost_usd"]["max"] - told["cost_usd"]["min"] == Decimal("0.05")


def test_a_simulated_estimate_names_the_binding_limit_and_takes_no_time(shell: Shell) -> None:
    shell.write("in.jsonl", prompts(3_000, max_tokens=50))
    began = time.monotonic()
    flags = ["--model", "m", "--rpm", "100", "--sim-latency", "2", "--simulate", "--json"]
    told = parse(shell.run("estimate", "in.jsonl", *flags).told(0).out)
    assert time.monotonic() - began < 60
    assert told["binding"] == "requests per minute"
    assert 29 * 60 <= told["duration_s"] <= 32 * 60
    assert (told["simulated"]["sends"], told["simulated"]["refused"]) == (3_000, 0)


def test_a_simulated_estimate_keeps_the_budget_as_the_run_would(shell: Shell) -> None:
    shell.write("in.jsonl", prompts(100, max_tokens=1_000))
    flags = ["--model", "m", "--price-in", "1", "--price-out", "10", "--budget", "0.1", "--simulate", "--json"]
    told = parse(shell.run("estimate", "in.jsonl", *flags).told(0).out)
    assert told["simulated"]["stopped"].startswith("budget")
    assert 0 < told["simulated"]["succeeded"] < 100
    assert told["simulated"]["cost_usd"] <= Decimal("0.1")


def test_the_same_seed_tells_the_same_twice(shell: Shell) -> None:
    shell.write("in.jsonl", prompts(200, max_tokens=50))
    flags = ["--model", "m", "--sim-error-rate", "0.2", "--sim-seed", "7", "--simulate", "--json"]
    first, second = (shell.run("estimate", "in.jsonl", *flags).told(0).out for _ in range(2))
    assert first == second
    assert parse(first)["simulated"]["faulted"] > 10
