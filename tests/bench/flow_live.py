"""`make bench-flow-live`: flow control over real sockets, for minutes; each figure at its hold, or exit 1.

The same law as `make bench-flow`, but through the installed command: a server with an in-flight limit of 24, one with
40 requests a second, an outage of two minutes, and llmock with quotas that nobody told the client.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.server import FaultServer  # noqa: E402 - run as a script

BATCHRUN = str(Path(sys.executable).with_name("batchrun"))


def run(url: str, rows: int, *flags: str) -> tuple[subprocess.Popen[bytes], tempfile.TemporaryDirectory[str]]:
    """Starts a job of so many rows against a server."""
    folder = tempfile.TemporaryDirectory()
    source = Path(folder.name) / "in.jsonl"
    with source.open("w") as out:
        for n in range(rows):
            out.write(json.dumps({"id": f"r{n}", "prompt": f"Say something about {n}.", "max_tokens": 60}) + "\n")
    command = [BATCHRUN, "submit", str(source), "--base-url", url, "--model", "gpt-4o-mini", "--json", "-q", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE), folder


def told(name: str, figure: float, hold: float, *, most: bool = False) -> bool:
    held = figure <= hold if most else figure >= hold
    print(f"  {name:58} {figure:8.3f}  {'≤' if most else '≥'} {hold:g}  {'' if held else 'MISSED'}", flush=True)
    return held


def limited(name: str, capacity: float, server: FaultServer, seconds: float) -> bool:
    """A server with a limit that the client must find: after 60 s its goodput, and what it refused."""
    with server:
        process, folder = run(server.url, int(capacity * (seconds + 60)) + 500)
        time.sleep(60)
        asked, refused, began = len(server.requests), server.refused, time.monotonic()
        time.sleep(seconds)
        asked, refused = len(server.requests) - asked, server.refused - refused
        goodput = (asked - refused) / (time.monotonic() - began)
        process.send_signal(signal.SIGINT)
        process.wait()
        folder.cleanup()
    ok = told(f"{name}: goodput / capacity after 60 s", goodput / capacity, 0.9)
    return told(f"{name}: share refused", refused / max(1, asked), 0.03, most=True) and ok


def outage(seconds: float) -> bool:
    """The listening socket is closed for two minutes: few attempts, no row failed, soon as fast as before."""
    with FaultServer(delay_s=0.2) as server:
        process, folder = run(server.url, 60_000, "--max-concurrency", "32")
        time.sleep(20)
        before = len(server.requests)
        time.sleep(10)
        usual = (len(server.requests) - before) / 10
        server.go_down()
        time.sleep(seconds)
        server.come_up()
        time.sleep(40)
        later = len(server.requests)
        time.sleep(10)
        again = (len(server.requests) - later) / 10
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
        summary = json.loads(out)
        folder.cleanup()
    faults = summary["requests"]["sent"] - summary["rows"]["succeeded"]
    ok = told(f"outage of {seconds:g} s: sends that found nobody", faults, 50 + 32, most=True)
    ok = told("outage: rows failed", summary["rows"]["failed"], 0, most=True) and ok
    return told("outage: speed 40 s later / before", again / usual, 0.9) and ok


def llmock(minutes: int) -> bool:
    """Quotas of 300 requests and 60,000 tokens a minute, found from headers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("llmock")), "serve", "--port", str(port), "--rpm", "300"]
    server = subprocess.Popen([*command, "--tpm", "60000", "--latency-ms", "150"], stdout=-3, stderr=-3)
    try:
        time.sleep(3)
        process, folder = run(f"http://127.0.0.1:{port}", 300 * (minutes + 2))
        time.sleep(60)
        base = stats(port)
        time.sleep(60 * minutes)
        now = stats(port)
        process.send_signal(signal.SIGINT)
        process.wait()
        folder.cleanup()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_llmock/verdict") as reply:
            verdict = json.load(reply)
    finally:
        server.kill()
    used = (now[0] - base[0]) / (300 * minutes)
    ok = told("llmock: use of the quota after the first minute", used, 0.95)
    ok = told("llmock: refused after the first minute", now[1] - base[1], 0, most=True) and ok
    return told("llmock: findings of its verdict", len(verdict["findings"]), 0, most=True) and ok


def stats(port: int) -> tuple[int, int]:
    """Returns (answered, refused) so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/_llmock/requests?limit=100000") as reply:
        seen = json.load(reply)
    records = seen["requests"] if isinstance(seen, dict) else seen
    refused = sum(record["status"] == 429 for record in records)
    return len(records) - refused, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=["in-flight", "rate", "outage", "llmock"])
    options = parser.parse_args()
    ok = True
    if "in-flight" in options.only:
        server = FaultServer(delay_s=0.5, max_in_flight_allowed=24)
        ok = limited("in-flight limit of 24", 24 / 0.5, server, 60) and ok
    if "rate" in options.only:
        server = FaultServer(delay_s=0.3, requests_per_s=40, burst=10)
        ok = limited("40 requests a second", 40, server, 60) and ok
    if "outage" in options.only:
        ok = outage(120) and ok
    if "llmock" in options.only:
        ok = llmock(3) and ok
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
