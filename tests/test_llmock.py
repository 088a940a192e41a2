"""Against a server that nobody here wrote, which enforces real quotas and grades its client."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import Shell, wait_until

SERVER = str(Path(sys.executable).with_name("llmock"))


@contextmanager
def llmock(*flags: str) -> Iterator[str]:
    """Runs the server; gives its URL once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [SERVER, "serve", "--port", str(port), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url))
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return verdict(url) is not None
    except OSError:
        return False


def verdict(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/_llmock/verdict") as response:
        found: dict[str, Any] = json.load(response)
    return found


def script(url: str, *behaviors: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{url}/_llmock/scenario",
        json.dumps({"behaviors": behaviors}).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request).close()


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"c{n}", "messages": [{"role": "user", "content": f"Say something about {n}."}], "max_tokens": 60}
        for n in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "flags"),
    [
        ("", ["--base-url", "{url}", "--model", "gpt-4o-mini"]),
        ("anthropic", ["--provider", "anthropic", "--base-url", "{url}/anthropic", "--model", "claude-sonnet-4-5"]),
    ],
)
def test_a_quota_is_kept_from_its_headers_alone_and_the_verdict_is_clean(
    shell: Shell, path: str, flags: list[str]
) -> None:
    shell.write("in.jsonl", chats(140))
    with llmock("--rpm", "120", "--tpm", "40000") as url:
        ran = shell.run("submit", "in.jsonl", "--json", *(flag.format(url=url) for flag in flags)).told(0)
        graded = verdict(url)
    assert ran.rows == {"total": 140, "succeeded": 140, "failed": 0, "pending": 0, "in_doubt": 0}
    assert ran.summary["requests"]["refused"] <= 7
    assert graded["attempts"] == ran.summary["requests"]["sent"]
    assert (graded["passed"], graded["findings"]) == (True, [])
    assert {row["status"] for row in shell.results()} == {"succeeded"}


def test_a_known_quota_is_used_up_without_a_single_refusal(shell: Shell) -> None:
    shell.write("in.jsonl", chats(70))
    with llmock("--rpm", "1200", "--tpm", "60000") as url:
        flags = ["--base-url", url, "--model", "gpt-4o-mini", "--rpm", "1200", "--tpm", "60000"]
        ran = shell.run("submit", "in.jsonl", "--json", *flags).told(0)
        graded = verdict(url)
    assert ran.summary["requests"] == {"sent": 70, "retried": 0, "refused": 0}
    assert graded["findings"] == []


def test_injected_faults_are_ridden_out_as_the_grader_wants_it(shell: Shell) -> None:
    shell.write("in.jsonl", chats(12))
    with llmock() as url:
        script(
            url,
            {"type": "fail", "status": 429, "retry_after": 0.4, "times": 2},
            {"type": "fail", "status": 503, "times": 2},
            {"type": "fail", "status": 500, "times": 2},
        )
        ran = shell.run("submit", "in.jsonl", "--json", "--base-url", url, "--model", "gpt-4o-mini").told(0)
        graded = verdict(url)
    assert ran.rows["succeeded"] == 12
    assert graded["faults_injected"] >= 2
    assert graded["findings"] == []


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        ({"input": "a text to embed"}, ["--model", "text-embedding-3-small"]),
        ({"input": "say something"}, ["--model", "gpt-4o-mini", "--endpoint", "responses"]),
        ({"prompt": "say something"}, ["--model", "gemini-2.5-flash", "--provider", "gemini"]),
    ],
)
def test_every_family_answers(shell: Shell, row: dict[str, Any], flags: list[str]) -> None:
    shell.write("in.jsonl", [row | {"id": f"r{n}"} for n in range(5)])
    with llmock() as url:
        base = f"{url}/gemini" if "gemini" in flags else url
        ran = shell.run("submit", "in.jsonl", "--json", "--base-url", base, *flags).told(0)
        assert verdict(url)["findings"] == []
    assert ran.rows["succeeded"] == 5
    assert all(result["output"] and result["usage"]["input_tokens"] > 0 for result in shell.results())
