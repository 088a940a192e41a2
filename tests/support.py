"""Runs the installed command as a user does: a shell's directory, a clean environment, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.faults.server import FaultServer, Reply, Request

__all__ = [
    "COMMAND",
    "KEY",
    "KEYS",
    "SUMMARY",
    "Ran",
    "Shell",
    "chat_reply",
    "keys_in",
    "once",
    "parse",
    "prompts",
    "wait_until",
]

COMMAND = str(Path(sys.executable).with_name("batchrun"))

KEY = "sk-sentinel-7f3a91c2e5d84b60"
"""The key that every shell holds. The fixture ``shell`` looks for it in all that a test leaves behind."""

KEYS = {
    "openai": KEY,
    "anthropic": "sk-ant-sentinel03-9d1c47e2b8a65f30",
    "gemini": "AIzaSentinelQ5h8Wm2Xr7Tn4Vk0",
    "file": "sk-file-sentinel/4b7+1e=a2c9",
}
"""Keys of every family. None of them is found in any file that the whole suite leaves behind."""


def keys_in(data: bytes) -> list[str]:
    """Returns the families whose key is in ``data``."""
    return [family for family, key in KEYS.items() if key.encode() in data or quote(key, safe="").encode() in data]


SUMMARY = {
    "job": None,
    "state": None,
    "reason": None,
    "exit_code": None,
    "rows": ["total", "succeeded", "failed", "pending", "in_doubt"],
    "in_doubt_ids": None,
    "requests": ["sent", "retried", "refused"],
    "batches": None,
    "tokens": ["input", "output", "cached", "reasoning"],
    "cost_usd": None,
    "cost_unknown_rows": None,
    "elapsed_s": None,
    "rows_per_s": None,
    "latency_s": ["p50", "p90", "p95", "p99", "max"],
    "binding": None,
    "results": None,
    "errors": None,
}
"""The summary's keys in their order, with those of the objects inside it."""


def parse(line: bytes | str) -> Any:
    """Returns a JSON text with its numbers exact."""
    return json.loads(line, parse_float=Decimal)


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: bytes
    err: str
    took_s: float

    @property
    def summary(self) -> dict[str, Any]:
        """The one object on stdout."""
        assert self.out.count(b"\n") == 1, (self.code, self.out[:2000], self.err[-2000:])
        found: dict[str, Any] = parse(self.out)
        return found

    @property
    def rows(self) -> dict[str, int]:
        """The summary's counts of rows."""
        found: dict[str, int] = self.summary["rows"]
        return found

    def told(self, code: int) -> Ran:
        """Returns itself if the exit code is ``code``; the message says what happened instead."""
        assert self.code == code, f"exit {self.code}, not {code}\n{self.out.decode()[-2000:]}\n{self.err[-3000:]}"
        assert "Traceback" not in self.err
        return self


class Shell:
    """A directory to work in and an environment that holds ``PATH``, a key, and nothing else."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env: dict[str, str] = {"PATH": os.environ["PATH"], "OPENAI_API_KEY": KEY}
        self.said: list[bytes] = []
        """All that commands printed."""
        self._started: list[subprocess.Popen[bytes]] = []

    def write(self, name: str, rows: Iterable[Mapping[str, Any] | str | bytes] | bytes) -> Path:
        """Writes a file: bytes as they are, else a line for each row (bytes and texts are raw lines)."""
        path = self.root / name
        if not isinstance(rows, bytes):
            lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
            rows = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
        path.write_bytes(rows)
        return path

    def start(self, *args: str, env: Mapping[str, str] | None = None, **how: Any) -> subprocess.Popen[bytes]:
        """Starts the command; ``env`` is added to the shell's, an empty value takes a variable out."""
        full = {name: value for name, value in (self.env | dict(env or {})).items() if value}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        how = pipes | {"cwd": self.root, "env": full} | how
        process = subprocess.Popen([COMMAND, *args], **how)
        self._started.append(process)
        return process

    def end(self, process: subprocess.Popen[bytes], timeout_s: float = 60.0, data: bytes | None = None) -> Ran:
        """Waits for a started command."""
        began = time.monotonic()
        out, err = process.communicate(data, timeout=timeout_s)
        self.said += [out or b"", err or b""]
        return Ran(process.returncode, out or b"", (err or b"").decode("utf-8", "replace"), time.monotonic() - began)

    def run(self, *args: str, data: bytes | None = None, timeout_s: float = 60.0, **how: Any) -> Ran:
        """Runs the command to its end, with ``data`` as its standard input."""
        if data is not None:
            how["stdin"] = subprocess.PIPE
        return self.end(self.start(*args, **how), timeout_s, data)

    def submit(self, server: FaultServer, *args: str, source: str = "in.jsonl", **how: Any) -> Ran:
        """Submits ``in.jsonl`` to the server, and asks for a summary."""
        return self.run(*self.submission(server, *args, source=source), **how)

    def submission(self, server: FaultServer, *args: str, source: str = "in.jsonl") -> Sequence[str]:
        """Returns the arguments of such a submission."""
        return "submit", source, "--base-url", server.url, "--model", "m", "--json", *args

    def results(self, job: str = "in.batchrun", name: str = "results.jsonl") -> list[dict[str, Any]]:
        """Returns the lines of a job's file."""
        return [parse(line) for line in (self.root / job / name).read_bytes().split(b"\n") if line]

    def errors(self, job: str = "in.batchrun") -> list[dict[str, Any]]:
        """Returns a job's failed rows."""
        return self.results(job, "errors.jsonl")

    def close(self) -> None:
        """Kills what is still running."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def prompts(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Returns simple rows ``r1`` … with the prompts ``p1`` …"""
    return [{"id": f"r{n}", "prompt": f"p{n}"} | fields for n in range(1, count + 1)]


def chat_reply(
    text: str | None = "fine",
    *,
    finish: str = "stop",
    usage: Mapping[str, Any] | None = None,
    model: str = "m",
    billed: bool | None = None,
    delay_s: float = 0.0,
    **message: Any,
) -> Reply:
    """Returns a chat completion; without ``usage`` it has none."""
    said = {"role": "assistant", "content": text} | message
    body: dict[str, Any] = {
        "id": "c-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "message": said, "finish_reason": finish}],
    }
    if usage is not None:
        body["usage"] = usage
    return Reply(200, body, delay_s=delay_s, billed=billed)


def once(bad: Callable[[Request], Reply | None]) -> Callable[[Request, int], Reply | None]:
    """Returns a script that asks ``bad`` about the first request of each body only."""
    return lambda request, _: bad(request) if request.repeat == 1 else None


def wait_until(true: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Returns once ``true()`` is; fails after ``timeout_s``."""
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, f"not within {timeout_s} s"
        time.sleep(0.01)
