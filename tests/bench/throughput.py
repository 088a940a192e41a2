"""`make bench` and `make bench-peers`: rows/s, CPU and memory of a whole job, beside others', side by side in one run.

First the server's own ceiling. Then every contender, a whole process over the same input and the same local server, in
turn, several rounds; medians are quoted with their spread. batchrun does all it always does: intents and outcomes
fsynced, pacing and retries on. Last, what durability costs: the same job with its directory in memory and on disk.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from server import BenchServer

HERE = Path(__file__).parent
BATCHRUN = str(Path(sys.executable).with_name("batchrun"))
MEMORY = Path("/dev/shm")
WORDS = ("the", "order", "arrived", "late", "and", "its", "box", "was", "damaged", "please", "tell", "me", "how")
OURS = "batchrun"
COUNTED = "batchrun, prompts counted"
NAIVE = "aiohttp loop, keeps nothing"
PEERS = {
    NAIVE: "aiohttp",
    "aiohttp loop, counts, appends": "aiohttp-counting",
    "cookbook-style loop": "cookbook",
    "openai SDK, keeps nothing": "openai",
    "openai SDK on aiohttp": "openai-aiohttp",
    "flexllm": "flexllm",
    "saturate": "saturate",
    "async-batch-llm": "async-batch-llm",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of a process."""

    rows_per_s: float
    cpu_s_per_1000: float
    peak_mb: float


def make_input(path: Path, rows: int, prompt_bytes: int) -> None:
    """Writes an OpenAI batch file of rows of about ``prompt_bytes``, each different, always the same."""
    rng = random.Random(7)
    text = " ".join(rng.choices(WORDS, k=200_000))
    with path.open("w") as out:
        for number in range(rows):
            at = rng.randrange(len(text) - prompt_bytes)
            message = {"role": "user", "content": f"{number}: {text[at : at + prompt_bytes]}"[:prompt_bytes]}
            body = {"model": "bench-model", "messages": [message], "max_tokens": 100}
            line = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(json.dumps(line) + "\n")


def measure(command: Sequence[str], rows: int) -> Figures:
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


def in_turn(commands: Mapping[str, Sequence[str]], rows: int, rounds: int, *kept: Path) -> dict[str, list[Figures]]:
    """Measures every command once a round.

    What an earlier one left in the folders ``kept`` is removed before, and what it left unwritten is written: a disk
    that is still busy with the last contender would make the next one slow.
    """
    figures: dict[str, list[Figures]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            for path in (path for folder in kept for path in folder.glob("kept*")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
            figures[name].append(measure(command, rows))
    return figures


def submit(source: Path, url: str, in_flight: int, job: Path) -> list[str]:
    flags = ["--base-url", url, "--concurrency", str(in_flight), "--no-progress", "--quiet", "--job", str(job)]
    return [BATCHRUN, "submit", str(source), *flags]


def peer(name: str, source: Path, url: str, in_flight: int, python: str = sys.executable) -> list[str]:
    output = source.with_name("kept-peer")
    return [python, str(HERE / "peers.py"), name, str(source), url, str(in_flight), str(output)]


def contenders(source: Path, url: str, in_flight: int, peers: str | None) -> dict[str, list[str]]:
    """Returns the command of each contender; ``peers`` is the Python that has the peers, or None for the few."""
    ours = submit(source, url, in_flight, source.with_name("kept"))
    few = [NAIVE, "openai SDK, keeps nothing"]
    names = [name for name in PEERS if name != few[1]] if peers else few
    others = {name: peer(PEERS[name], source, url, in_flight, peers or sys.executable) for name in names}
    return {OURS: ours, COUNTED: [*ours, "--tpm", "100000000000"], **others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--prompt-bytes", type=int, default=3_800)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--only", nargs="+", help="words of the contenders to run")
    parser.add_argument("--peers", metavar="PYTHON", help="measure all peers, run by this Python, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("build/bench/throughput.json"))
    options = parser.parse_args()
    around = surroundings()
    document: dict[str, Any] = {"rows": options.rows, "delay_ms": options.delay_ms, "surroundings": [around]}
    print(f"{options.rows:,} rows of {options.prompt_bytes:,} bytes; a server that takes {options.delay_ms:g} ms")
    print(f"{options.rounds} rounds in turn: median (least–most)")
    print(told(around))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "rows.jsonl"
        make_input(source, options.rows, options.prompt_bytes)
        document["ceiling"] = ceilings(folder, options)
        with BenchServer(delay_ms=options.delay_ms) as server:
            for in_flight in options.in_flight:
                commands = contenders(source, server.url, in_flight, options.peers)
                if options.only:
                    commands = {n: c for n, c in commands.items() if any(word in n for word in options.only)}
                figures = in_turn(commands, options.rows, options.rounds, folder)
                show(figures, f"{in_flight} in flight: {in_flight / options.delay_ms * 1000:,.0f} rows/s at most")
                compare(figures)
                document[str(in_flight)] = plain(figures)
            if not options.peers and MEMORY.is_dir():
                document["durability"] = durability(source, server.url, options)
    document["surroundings"].append(surroundings())
    print(f"\n{told(document['surroundings'][-1])}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {options.out}")


def ceilings(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Measures the server with the barest client: what no contender can exceed here."""
    source = folder / "ceiling.jsonl"
    make_input(source, 2 * options.rows, options.prompt_bytes)
    found = {}
    print(f"\nthe server's own ceiling, requests/s of a bare client:\n  {'':32}{'requests/s':>24}")
    for delay_ms, in_flight in ((0.0, 100), (0.0, 1000), (options.delay_ms, 100), (options.delay_ms, 1000)):
        with BenchServer(delay_ms=delay_ms) as server:
            command = peer("floor", source, server.url, in_flight)
            rates = [float(subprocess.check_output(command)) for _ in range(options.rounds)]
        name = f"{delay_ms:g} ms, {in_flight} in flight"
        print(f"  {name:32}{spread(rates, 0):>24}", flush=True)
        found[name] = rates
    source.unlink()
    return found


def durability(source: Path, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the same job with its directory in memory and on the disk of the input."""
    in_flight = options.in_flight[-1]
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        commands = {
            "job directory in memory": submit(source, url, in_flight, Path(memory) / "kept"),
            "job directory on disk": submit(source, url, in_flight, source.with_name("kept")),
        }
        figures = in_turn(commands, options.rows, options.rounds, source.parent, Path(memory))
    show(figures, f"durability's price, {in_flight} in flight")
    rate, _, _ = ratios(figures["job directory on disk"], figures["job directory in memory"])
    price = [1 - ratio for ratio in rate]
    print(f"  the disk costs {spread([100 * p for p in price], 1)} % of the rows/s, round by round")
    return plain(figures)


def show(figures: Mapping[str, list[Figures]], title: str) -> None:
    print(f"\n{title}\n  {'':32}{'rows/s':>24}{'CPU s per 1000':>22}{'peak MB':>10}")
    for name, runs in figures.items():
        print(f"  {name:32}{spread([r.rows_per_s for r in runs], 0):>24}", end="")
        print(f"{spread([r.cpu_s_per_1000 for r in runs], 2):>22}{max(r.peak_mb for r in runs):>10.0f}", flush=True)


def compare(figures: Mapping[str, list[Figures]]) -> None:
    """Prints batchrun's ratio to each of the others, of the same round, and names the best peer that is a tool."""
    if OURS not in figures:
        return
    print(f"  {'batchrun to':32}{'rows/s':>24}{'CPU':>22}{'memory':>10}")
    for name, runs in figures.items():
        if name != OURS:
            rate, cpu, memory = ratios(figures[OURS], runs)
            print(f"  {name:32}{spread(rate, 2):>24}{spread(cpu, 2):>22}{statistics.median(memory):>10.2f}", flush=True)
    tools = [name for name in figures if name.split(",")[0] not in {"batchrun", "aiohttp loop"}]
    if tools:
        best = max(tools, key=lambda name: statistics.median(run.rows_per_s for run in figures[name]))
        rate, _, memory = ratios(figures[OURS], figures[best])
        print(f"  the best peer is {best}: × {statistics.median(rate):.1f} its rows/s", end="")
        print(f" with {statistics.median(memory):.0%} of its memory", flush=True)


def ratios(ours: Sequence[Figures], theirs: Sequence[Figures]) -> tuple[list[float], list[float], list[float]]:
    """Returns ours ÷ theirs for rows/s, CPU and memory, round by round."""
    pairs = list(zip(ours, theirs, strict=True))
    return (
        [a.rows_per_s / b.rows_per_s for a, b in pairs],
        [a.cpu_s_per_1000 / b.cpu_s_per_1000 for a, b in pairs],
        [a.peak_mb / b.peak_mb for a, b in pairs],
    )


def plain(figures: Mapping[str, list[Figures]]) -> dict[str, list[dict[str, float]]]:
    return {name: [asdict(run) for run in runs] for name, runs in figures.items()}


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def surroundings(seconds: float = 1.0) -> dict[str, Any]:
    """Returns the load averages and what uses more than 5% of a core, for which it looks for ``seconds``."""
    before = cpu_ticks()
    time.sleep(seconds)
    per_tick = 100 / os.sysconf("SC_CLK_TCK") / seconds
    shares = [
        (name, (ticks - before.get(pid, ("", ticks))[1]) * per_tick) for pid, (name, ticks) in cpu_ticks().items()
    ]
    busy = sorted((pair for pair in shares if pair[1] > 5), key=lambda pair: -pair[1])
    return {"load_average": os.getloadavg(), "cpus": os.cpu_count(), "busy": [[n, round(s)] for n, s in busy[:8]]}


def cpu_ticks() -> dict[int, tuple[str, int]]:
    """Returns name and ticks of CPU of each process, where /proc tells; this one apart."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = stat.read_text().partition("(")[2].rpartition(") ")
        except OSError:
            continue
        if (pid := int(stat.parent.name)) != os.getpid():
            found[pid] = (name, sum(map(int, fields.split()[11:13])))
    return found


def told(around: Mapping[str, Any]) -> str:
    load = ", ".join(f"{average:.1f}" for average in around["load_average"])
    busy = ", ".join(f"{name} {share}%" for name, share in around["busy"]) or "nothing"
    return f"load average {load} on {around['cpus']} CPUs; else running: {busy}"


if __name__ == "__main__":
    main()
