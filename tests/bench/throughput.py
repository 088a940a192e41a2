"""`make bench`: rows/s, CPU and memory of a whole job, beside the naive loop and the SDK, side by side in one run.

Every contender is a whole process over the same input and the same local server, in turn, several rounds; medians are
quoted with their spread. batchrun does all it always does: intents and outcomes fsynced, pacing and retries on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from server import BenchServer

HERE = Path(__file__).parent
WORDS = ("the", "order", "arrived", "late", "and", "its", "box", "was", "damaged", "please", "tell", "me", "how")


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of a process."""

    rows_per_s: float
    cpu_s_per_1000: float
    peak_mb: float


def make_input(path: Path, rows: int, prompt_bytes: int) -> None:
    """Writes an OpenAI batch file of rows of about ``prompt_bytes``, each different, always the same."""
    rng = random.Random(7)
    with path.open("w") as out:
        for number in range(rows):
            words = rng.choices(WORDS, k=prompt_bytes // 5)
            message = {"role": "user", "content": f"{number}: {' '.join(words)}"[:prompt_bytes]}
            body = {"model": "bench-model", "messages": [message], "max_tokens": 100}
            line = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(json.dumps(line) + "\n")


def measure(command: list[str], rows: int) -> Figures:
    """Runs a command to its end and returns its figures, process start included."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen(command, stdout=told, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            told.seek(0)
            sys.exit(f"{command[:3]} ended with {process.returncode}: {told.read().decode()[-2000:]}")
    seconds = time.perf_counter() - began
    cpu = usage.ru_utime + usage.ru_stime
    return Figures(rows / seconds, cpu / rows * 1000, usage.ru_maxrss / 1024)


def contenders(source: Path, url: str, in_flight: int) -> dict[str, list[str]]:
    """Returns the command of each contender."""
    submit = [str(Path(sys.executable).with_name("batchrun")), "submit", str(source), "--base-url", url]
    flags = ["--concurrency", str(in_flight), "--no-progress", "--quiet"]
    peer = [sys.executable, str(HERE / "peers.py")]
    return {
        "batchrun": [*submit, *flags],
        "batchrun, every prompt counted": [*submit, *flags, "--tpm", "100000000000"],
        "aiohttp loop, nothing kept": [*peer, "aiohttp", str(source), url, str(in_flight)],
        "openai SDK, nothing kept": [*peer, "openai", str(source), url, str(in_flight)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--prompt-bytes", type=int, default=3_800)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--only", nargs="+", help="words of the contenders to run")
    parser.add_argument("--out", type=Path, default=Path("build/bench/throughput.json"))
    options = parser.parse_args()
    document: dict[str, object] = {"rows": options.rows, "delay_ms": options.delay_ms, "load_average": os.getloadavg()}
    print(f"{options.rows:,} rows of {options.prompt_bytes:,} bytes; a server that takes {options.delay_ms:g} ms")
    print(f"{options.rounds} rounds in turn: median (least–most); load average at the start {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, BenchServer(delay_ms=options.delay_ms) as server:
        source = Path(folder) / "rows.jsonl"
        make_input(source, options.rows, options.prompt_bytes)
        for in_flight in options.in_flight:
            commands = contenders(source, server.url, in_flight)
            if options.only:
                commands = {n: c for n, c in commands.items() if any(word in n for word in options.only)}
            figures: dict[str, list[Figures]] = {name: [] for name in commands}
            for _ in range(options.rounds):
                for name, command in commands.items():
                    shutil.rmtree(source.with_suffix(".batchrun"), ignore_errors=True)
                    figures[name].append(measure(command, options.rows))
            print(f"\n{in_flight} in flight (the server's ceiling: {in_flight / options.delay_ms * 1000:,.0f} rows/s)")
            print(f"  {'':32}{'rows/s':>24}{'CPU s per 1000':>22}{'peak MB':>10}")
            for name, runs in figures.items():
                print(f"  {name:32}{spread([r.rows_per_s for r in runs], 0):>24}", end="")
                print(f"{spread([r.cpu_s_per_1000 for r in runs], 2):>22}{max(r.peak_mb for r in runs):>10.0f}")
            document[str(in_flight)] = {name: [asdict(run) for run in runs] for name, runs in figures.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwritten to {options.out}")


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


if __name__ == "__main__":
    main()
