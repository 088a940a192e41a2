"""`make bench-regress`: has batchrun become slower, by its ratios to the naive aiohttp loop of the same run?

Ratios carry from one machine to another where rows/s do not. The committed ones are in baseline.json; more than 15%
worse than those, in rows/s or in CPU, is a failure. ``--update`` writes what is measured as the new ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from server import BenchServer
from throughput import NAIVE, OURS, contenders, in_turn, make_input, ratios, show, spread, surroundings, told

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--update", action="store_true", help=f"write {BASELINE.name}")
    options = parser.parse_args()
    print(told(surroundings()))
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, BenchServer(delay_ms=50) as server:
        source = Path(folder) / "rows.jsonl"
        make_input(source, options.rows, prompt_bytes=3_800)
        for in_flight in (100, 1000):
            commands = contenders(source, server.url, in_flight, None)
            pair = {name: commands[name] for name in (OURS, NAIVE)}
            figures = in_turn(pair, options.rows, options.rounds, source.parent)
            show(figures, f"{in_flight} in flight")
            rate, cpu, _ = ratios(figures[OURS], figures[NAIVE])
            print(f"  batchrun to the loop: rows/s × {spread(rate, 2)}, CPU × {spread(cpu, 2)}", flush=True)
            found[str(in_flight)] = {
                "rows_per_s": round(statistics.median(rate), 3),
                "cpu": round(statistics.median(cpu), 3),
            }
    if options.update:
        BASELINE.write_text(json.dumps(found, indent=1) + "\n")
        print(f"\nwritten to {BASELINE}")
        return
    baseline = json.loads(BASELINE.read_text())
    worse = []
    for in_flight, now in found.items():
        before = baseline[in_flight]
        changes = {"rows/s": now["rows_per_s"] / before["rows_per_s"] - 1, "CPU": before["cpu"] / now["cpu"] - 1}
        print(f"\n{in_flight} in flight, ratios against the committed ones (less is worse):", end="")
        print(*(f" {what} {change:+.0%}" for what, change in changes.items()), sep=",")
        worse += [f"{what} at {in_flight} in flight" for what, change in changes.items() if change < -TOLERANCE]
    if worse:
        sys.exit(f"worse by more than {TOLERANCE:.0%}: {', '.join(worse)}")


if __name__ == "__main__":
    main()
