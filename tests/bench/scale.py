"""`make bench-scale`: what a long job costs, beside what was aimed at. ``--rows 1000000`` takes a quarter of an hour.

``--half`` leaves out what only a whole job shows, for ten million rows: half of them are sent, then the job is killed.

Every step is a process of its own, measured once: a long job is its own average. When rows were sent is told by the
server, which is asked twenty times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server import BenchServer
from throughput import BATCHRUN, make_input, submit, surroundings, told

POLL_S = 0.05
CHECK_POLL_S = 0.005


@dataclass(slots=True)
class Process:
    """One process, measured: seconds to the first request and to the end, peak memory, rows asked for over time."""

    seconds: float = 0.0
    peak_mb: float = 0.0
    first_send_s: float | None = None
    peak_at_first_send_mb: float = 0.0
    seen: list[tuple[float, int]] = field(default_factory=list)

    def rate(self, begin: float, end: float) -> float:
        """Returns the rows/s between two shares of the rows, 0 to 1."""
        total = self.seen[-1][1]
        times = [next(at for at, count in self.seen if count >= max(1, share * total)) for share in (begin, end)]
        counts = [next(count for _, count in self.seen if count >= max(1, share * total)) for share in (begin, end)]
        return (counts[1] - counts[0]) / (times[1] - times[0]) if times[1] > times[0] else float("nan")


def run(command: Sequence[str], server: BenchServer | None = None, *, kill_at: int | None = None) -> Process:
    """Runs a command and watches it; ``kill_at`` is after how many requests it is killed. Exits when it fails."""
    measured = Process()
    if server is not None:
        server.stats(reset=True)
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG if server else 0)
            now = time.perf_counter() - began
            if server is not None:
                count = server.stats()["requests"]
                measured.seen.append((now, count))
                if count and measured.first_send_s is None:
                    measured.first_send_s = now
                    measured.peak_at_first_send_mb = peak_mb(process.pid)
                if kill_at is not None and count >= kill_at:
                    process.kill()
            if ended:
                break
            time.sleep(CHECK_POLL_S if measured.first_send_s is None else POLL_S)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode and kill_at is None:
            output.seek(0)
            sys.exit(f"{command[:3]} ended with {process.returncode}: {output.read().decode()[-2000:]}")
    measured.seconds = now
    measured.peak_mb = usage.ru_maxrss / 1024
    return measured


def peak_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return float("nan")
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), float("nan"))


def sending(sent: Process, note: Callable[[str, str, str], None]) -> None:
    """Notes how fast rows were sent, from the first to the last of them."""
    note("sending, rows/s", f"{sent.rate(0.0, 1.0):,.0f}", "≥ 1,500 (goal 4,000)")
    first, last = sent.rate(0.0, 0.1), sent.rate(0.9, 1.0)
    note("first 10%, last 10%, rows/s", f"{first:,.0f}, {last:,.0f}", "no slower at the end")


def measured(rows: int, options: argparse.Namespace, folder: Path) -> list[tuple[str, str, str]]:
    """Returns lines of the table for a job of so many rows: what, how much, what was aimed at."""
    source, job, half = folder / "rows.jsonl", folder / "job", folder / "half"
    make_input(source, rows, options.prompt_bytes)
    found: list[tuple[str, str, str]] = []

    def note(what: str, value: str, reach: str = "") -> None:
        found.append((what, value, reach))
        print(f"  {what:48}{value:>24}   {reach}", flush=True)

    print(f"\n{rows:,} rows of {source.stat().st_size / rows:,.0f} bytes, {options.in_flight} in flight")
    checked = run([BATCHRUN, "check", str(source), "--quiet"])
    note("check, rows/s", f"{rows / checked.seconds:,.0f}")
    note("check, peak MB", f"{checked.peak_mb:.0f}")
    with BenchServer(delay_ms=options.delay_ms) as server:
        if options.half:
            job = half
        else:
            whole = run(submit(source, server.url, options.in_flight, job), server)
            note("whole job, rows/s", f"{rows / whole.seconds:,.0f}")
            note("run, peak MB", f"{whole.peak_mb:.0f}", "≤ 120; 1M ≤ 1.2 × 100k")
            sending(whole, note)
        killed = run(submit(source, server.url, options.in_flight, half), server, kill_at=rows // 2)
        assert killed.first_send_s is not None
        note("ingest to first send, rows/s", f"{rows / killed.first_send_s:,.0f}", "≥ 60,000 (1M rows of 1 kB)")
        note("ingest, peak MB", f"{killed.peak_at_first_send_mb:.0f}")
        if options.half:
            note("killed half way, peak MB", f"{killed.peak_mb:.0f}", "≤ 120")
            sending(killed, note)
        resumed = run([BATCHRUN, "resume", str(half), "--quiet"], server, kill_at=1)
        assert resumed.first_send_s is not None
        note("resume after kill -9 half way, s to first send", f"{resumed.first_send_s:.2f}", "≤ 3 (1M)")
        note("resume, peak MB", f"{resumed.peak_at_first_send_mb:.0f}")
    reported = run([BATCHRUN, "report", str(job)])
    note("report, s", f"{reported.seconds:.2f}", "≤ 15 (1M)")
    note("report, peak MB", f"{reported.peak_mb:.0f}", "flat")
    written = folder / "results.jsonl"
    projected = run([BATCHRUN, "results", str(job), "--output", str(written)])
    with written.open("rb") as lines:
        count = sum(1 for _ in lines)
    least = rows // 2 - options.in_flight if options.half else rows  # of a job killed half way, what was in flight
    assert least <= count <= rows, f"results are missing: {count:,} are there"
    note("results, rows/s", f"{count / projected.seconds:,.0f}", "≥ 50,000")
    note("results, peak MB", f"{projected.peak_mb:.0f}", "flat")
    for what, reach in (("status", "≤ 0.3"), ("--help", "≤ 0.15")):
        command = [BATCHRUN, what, str(job)] if what == "status" else [BATCHRUN, what]
        times = [run(command).seconds for _ in range(7)]
        note(
            f"{what}, s (median of 7, least, most)",
            f"{statistics.median(times):.2f} ({min(times):.2f}–{max(times):.2f})",
            reach,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    parser.add_argument("--half", action="store_true", help="no whole job: ingest, half of it, resume and report")
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--prompt-bytes", type=int, default=850)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--folder", type=Path, help="where input and jobs are put [a temporary directory]")
    parser.add_argument("--out", type=Path, default=Path("build/bench/scale.json"))
    options = parser.parse_args()
    document: dict[str, Any] = {"surroundings": [surroundings()]}
    print(told(document["surroundings"][0]))
    for rows in options.rows:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            document[str(rows)] = {what: [value, reach] for what, value, reach in measured(rows, options, folder)}
        finally:
            shutil.rmtree(folder)
    document["surroundings"].append(surroundings())
    print(f"\n{told(document['surroundings'][-1])}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
