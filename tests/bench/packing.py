"""`make bench-packing`: batches over the lower bound, and µs per row, for 30,000 rows in random order.

Next-fit (what a simple loop does) is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, exp
from pathlib import Path

from batchrun.plan.pack import PackBudget, Packer
from batchrun.plan.schedule import Flow
from batchrun.plan.simulate import ServerModel, Work, simulate
from batchrun.records import Call, Row

ROWS = 30_000
CHAT = PackBudget(tokens=8_192, rows=64, bytes=16 << 20)
Item = tuple[int, int]
"""Tokens and bytes."""


def log_normal(rng: random.Random) -> Item:
    tokens = int(800 * exp(rng.gauss(0, 0.6))) + int(400 * exp(rng.gauss(0, 0.5)))
    return min(tokens, 8_192), 4 * tokens


def sharegpt(rng: random.Random) -> Item:
    tokens = int(90 * exp(rng.gauss(0, 1.3))) + int(180 * exp(rng.gauss(0, 0.9)))
    return min(tokens, 8_192), 4 * tokens


def with_maximum(rng: random.Random) -> Item:
    tokens = int(300 * exp(rng.gauss(0, 0.9)))
    return min(tokens, 7_168) + 1_024, 4 * tokens


def bimodal(rng: random.Random) -> Item:
    tokens = rng.randint(150, 400) if rng.random() < 0.6 else rng.randint(3_000, 4_800)
    return tokens, 4 * tokens


def big(rng: random.Random) -> Item:
    tokens = min(8_192, int(2_700 * exp(rng.gauss(0, 0.45))))
    return tokens, 4 * tokens


def byte_bound(rng: random.Random) -> Item:
    tokens = int(200 * exp(rng.gauss(0, 0.5)))
    return tokens, int(tokens * 40 * exp(rng.gauss(0, 0.4)))


def embedding(rng: random.Random) -> Item:
    tokens = int(250 * exp(rng.gauss(0, 0.8)))
    return min(tokens, 8_192), 4 * tokens


@dataclass(frozen=True)
class Case:
    """A distribution of rows, its budget, and the excess to hold."""

    name: str
    draw: Callable[[random.Random], Item]
    budget: PackBudget = CHAT
    hold: float = 0.015


CASES = [
    Case("log-normal 800+400", log_normal),
    Case("ShareGPT-like", sharegpt),
    Case("prompt + max 1024", with_maximum),
    Case("bimodal", bimodal),
    Case("big (2.7 a batch)", big),
    Case("byte-bound", byte_bound, PackBudget(8_192, 64, 100_000)),
    Case("embedding limits", embedding, PackBudget(300_000, 2_048, 16 << 20), 0.001),
]


def lower_bound(items: list[Item], budget: PackBudget) -> int:
    """Sum, count and byte bounds, and Martello and Toth's L2 over the tokens."""
    capacity, sizes = budget.tokens, sorted((tokens for tokens, _ in items), reverse=True)
    total_bytes = sum(size for _, size in items)
    best = max(ceil(sum(sizes) / capacity), ceil(len(items) / budget.rows), ceil(total_bytes / budget.bytes))
    for least in sorted({size for size in sizes if size <= capacity / 2})[::8]:
        large = [size for size in sizes if size > capacity - least]
        middle = [size for size in sizes if capacity / 2 < size <= capacity - least]
        small = sum(size for size in sizes if least <= size <= capacity / 2)
        rest = max(0, ceil((small - (len(middle) * capacity - sum(middle))) / capacity))
        best = max(best, len(large) + len(middle) + rest)
    return best


def packed(items: list[Item], budget: PackBudget) -> tuple[int, float]:
    """Number of batches, and µs per row."""
    rows = [Row(line, str(line), "chat", "m", b"x" * size, 0) for line, (_, size) in enumerate(items, 1)]
    begun = time.perf_counter()
    packer, batches = Packer(budget), 0
    for row, (tokens, _) in zip(rows, items, strict=True):
        packer.add(row, tokens)
        while packer.pack() is not None:
            batches += 1
    batches += sum(1 for _ in packer.flush())
    return batches, (time.perf_counter() - begun) / len(items) * 1e6


def next_fit(items: list[Item], budget: PackBudget) -> int:
    batches, tokens, rows, size = 1, 0, 0, 0
    for item_tokens, item_bytes in items:
        if rows and (tokens + item_tokens > budget.tokens or rows == budget.rows or size + item_bytes > budget.bytes):
            batches, tokens, rows, size = batches + 1, 0, 0, 0
        tokens, rows, size = tokens + item_tokens, rows + 1, size + item_bytes
    return batches


def measure(case: Case, seed: int) -> Iterator[float]:
    rng = random.Random(f"{case.name} {seed}")
    items = [case.draw(rng) for _ in range(ROWS)]
    bound = lower_bound(items, case.budget)
    batches, micros = packed(items, case.budget)
    yield batches / bound - 1
    yield next_fit(items, case.budget) / bound - 1
    yield micros
    yield len(items) / batches


# ---------------------------------------------------------------- many rows in one call, in virtual time

GATEWAY_TOKENS = 320_000
CALL_S, ROW_S = 0.2, 0.0871
"""A call's service time: so much, and so much for each of its rows. Chosen so that the articles' own first two figures
(10,000 single calls one after the other, and 100 calls of 100 rows) come out as they say."""


def gateway_rows(seed: int) -> list[Row]:
    """10,000 rows of 800 input and 400 output tokens on average, log-normal."""
    rng = random.Random(seed)
    rows = []
    for line in range(1, 10_001):
        tokens = max(1, round(800 * exp(rng.gauss(-0.18, 0.6))))
        output = max(1, round(400 * exp(rng.gauss(-0.125, 0.5))))
        rows.append(Row(line, f"r{line}", "chat", "m", b"x" * 4 * tokens, output, tokens=tokens))
    return rows


def as_batches(rows: list[Row], budget: PackBudget) -> list[tuple[Row, ...]]:
    packer = Packer(budget)
    batches = []
    for row in rows:
        packer.add(row, row.tokens + (row.max_output or 0))
        while (batch := packer.pack()) is not None:
            batches.append(batch.rows)
    return batches + [batch.rows for batch in packer.flush()]


def took(batches: list[tuple[Row, ...]], flow: Flow) -> float:
    """Virtual seconds until the last answer, by the product's own schedule."""
    server = ServerModel(latency_s=1.0, spread=0.0, network_s=0.0, timeout_s=3_600)
    work = (
        Work(
            Call(rows, number, sum(row.tokens for row in rows), Decimal(0)),
            sum(row.max_output or 0 for row in rows),
            size=CALL_S + ROW_S * len(rows),
        )
        for number, rows in enumerate(batches)
    )
    return simulate(flow, server, work).duration_s


def gateway(seed: int) -> list[dict[str, object]]:
    rows = gateway_rows(seed)
    whole = sum(row.tokens + (row.max_output or 0) for row in rows)
    packed_rows = as_batches(rows, PackBudget(GATEWAY_TOKENS, len(rows), 1 << 40))
    one_each = [(row,) for row in rows]
    hundreds = [tuple(rows[at : at + 100]) for at in range(0, len(rows), 100)]
    ways = [
        ("one row per call, one at a time", one_each, Flow(concurrency=1), "10,000 / 2,847 s"),
        ("fixed batches of 100, one at a time", hundreds, Flow(concurrency=1), "100 / 892 s"),
        ("packed, one at a time", packed_rows, Flow(concurrency=1), "48 / 341 s"),
        ("packed, adaptive concurrency", packed_rows, Flow(), ""),
        ("one row per call, adaptive concurrency", one_each, Flow(), ""),
    ]
    print(f"\n10,000 rows, {whole:,} tokens, {GATEWAY_TOKENS:,} a call: at least {-(-whole // GATEWAY_TOKENS)} calls;")
    print(f"virtual time, a call takes {CALL_S} s + {ROW_S} s a row")
    print(f"{'':40}{'calls':>8}{'fill':>8}{'seconds':>10}  the articles' figures")
    table: list[dict[str, object]] = []
    for name, batches, flow, theirs in ways:
        fill = whole / (len(batches) * GATEWAY_TOKENS)
        seconds = took(batches, flow)
        print(f"{name:40}{len(batches):8,}{fill:8.1%}{seconds:10,.0f}  {theirs}")
        table.append({"way": name, "calls": len(batches), "fill": fill, "seconds": seconds})
    return table


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{'':22}{'next-fit':>10}{'batchrun':>10}{'hold':>9}{'µs/row':>9}{'rows/batch':>12}")
    report, missed = [], 0
    for case in CASES:
        excess, simple, micros, per_batch = measure(case, options.seed)
        missed += excess > case.hold
        missing = "   MISSED" if excess > case.hold else ""
        print(f"{case.name:22}{simple:10.2%}{excess:10.2%}{case.hold:9.1%}{micros:9.1f}{per_batch:12.1f}{missing}")
        report.append(
            {"case": case.name, "next_fit": simple, "excess": excess, "hold": case.hold, "us_per_row": micros}
        )
    table = gateway(options.seed)
    if options.json:
        options.json.write_text(json.dumps({"packing": report, "gateway": table}, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
