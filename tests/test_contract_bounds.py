"""What a server, a row or a machine may do to excess, as a user meets it: bounded, told, and never a crash."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchrun.run.files import JobLock
from tests.faults.server import FaultServer, Reply, error
from tests.support import Shell, chat_reply, prompts

# ---------------------------------------------------------------- servers

BODIES = {
    "html": Reply(502, "<html><h1>Bad gateway</h1>" + "x" * 100_000, {"content-type": "text/html"}),
    "empty": Reply(500, b""),
    "endless error": Reply(503, endless=b"y" * 4096, length=-1),
    "endless": Reply(200, endless=b" " * 65_536, length=-1),
    "bomb": Reply(200, gzip.compress(b" " * 100_000_000, 9), {"content-encoding": "gzip"}),
    "deep": Reply(200, b'{"choices":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep error": Reply(500, b"[" * 100_000),
    "digits": Reply(200, b'{"choices":' + b"7" * 100_000 + b"}"),
    "cut gzip": Reply(200, gzip.compress(b"{}" * 500)[:-8], {"content-encoding": "gzip"}),
}


def test_no_body_whatever_its_size_or_depth_costs_more_than_its_own_attempt(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [{"id": name, "prompt": name} for name in BODIES])
    server.script(lambda request, n: BODIES[request.text] if request.repeat == 1 else None)
    ran = shell.submit(server, "--concurrency", "3").told(0)
    assert [row["output"] for row in shell.results()] == [f"echo:{name}" for name in BODIES]
    assert server.seen == dict.fromkeys(BODIES, 2)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 600_000  # KiB; the bomb alone would be 100 MB
    assert len(ran.err) < 20_000


def test_a_limit_on_open_files_lowers_the_concurrency_with_a_notice(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(60))
    server.delay_s = 0.05
    few = 80

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    ran = shell.submit(server, "--concurrency", "40", preexec_fn=limit).told(0)
    assert ran.rows["succeeded"] == 60
    assert "open files" in ran.err
    assert 1 <= server.max_in_flight < 40
    assert server.connections <= server.max_in_flight


# ---------------------------------------------------------------- rows


def test_a_row_larger_than_every_budget_is_sent_alone_and_waits_for_no_impossible_bucket(
    shell: Shell, server: FaultServer
):
    shell.write("in.jsonl", [*prompts(3), {"id": "big", "prompt": "word " * 4_000, "priority": -1}])
    args = ["--batch-tokens", "50", "--batch-bytes", "2000", "--tpm", "3000", "--max-tokens", "5"]
    ran = shell.submit(server, *args, timeout_s=30).told(0)
    assert ran.rows["succeeded"] == 4
    assert len(server.requests) == 4


def estimated(shell: Shell, row: dict[str, object], *args: str) -> int:
    shell.write("one.jsonl", [row])
    found: int = shell.run("estimate", "one.jsonl", "--model", "gpt-4o", "--json", *args).summary["tokens"]["input"]
    return found


def test_what_is_odd_to_count_is_counted_in_bounded_time(shell: Shell):
    plain = estimated(shell, {"prompt": "hi"})
    special = estimated(shell, {"prompt": "hi<|endoftext|><|im_start|>"})
    assert special > plain + 4  # as ordinary text, not as one token each
    began = time.monotonic()
    assert estimated(shell, {"prompt": "a" * 1_000_000}) > 10_000
    assert time.monotonic() - began < 10
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 250_000}}
    picture = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]}
    assert plain < estimated(shell, picture) < 5_000
    tool = {"type": "function", "function": {"name": "f", "description": "word " * 200, "parameters": {}}}
    tools = {"messages": [{"role": "system", "content": "be " * 100}, {"role": "user", "content": "hi"}]}
    assert estimated(shell, tools) > plain + 90
    assert estimated(shell, tools | {"tools": [tool]}) > plain + 280


def test_an_unknown_models_tokens_are_counted_offline_with_one_notice(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(50))
    env = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), server.url) | {"TIKTOKEN_CACHE_DIR": str(shell.root / "none")}
    ran = shell.run("estimate", "in.jsonl", "--model", "nobody-knows-me", "--json", env=env).told(0)
    assert ran.summary["tokens"]["input"] > 50
    assert len(ran.err.splitlines()) == 1
    assert server.connections == 0
    assert not (shell.root / "none").exists()


URLS = [
    "/v1/chat/completions/",
    "/v1/chat/completions?key=1",
    "/v1/chat/completions#x",
    "/v1/chat/../files",
    "/V1/Chat/Completions",
    "//evil.example/v1/chat/completions",
    "http://evil.example/v1/chat/completions",
    "\\\\evil.example\\v1",
    "/v1/chat/completions\r\nx-evil: 1",
    "/v1/chat/completions ",
    "@evil.example/v1/chat/completions",
    "v1/chat/completions",
    "",
    None,
    7,
    ["/v1/chat/completions"],
]


def test_a_rows_url_is_one_of_a_few_paths_or_a_bad_line(shell: Shell, server: FaultServer):
    body = {"messages": [{"role": "user", "content": "x"}]}
    shell.write("in.jsonl", [{"custom_id": f"u{n}", "url": url, "body": body} for n, url in enumerate(URLS)])
    ran = shell.submit(server).told(65)
    named = {int(line.split(":")[0].removeprefix("line ")) for line in ran.err.splitlines() if line.startswith("line ")}
    assert named == set(range(1, len(URLS) + 1))
    assert server.connections == 0


# ---------------------------------------------------------------- the machine


DYING = """
import os, signal, subprocess, sys
from pathlib import Path
from batchrun.run.files import JobLock
JobLock(Path(sys.argv[1])).acquire()
print(subprocess.Popen(["sleep", "30"], close_fds=False).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_of_a_dead_run_holds_its_lock_no_longer(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", DYING, str(tmp_path)], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        assert run.wait(10) == -signal.SIGKILL
        try:
            os.kill(child, 0)
            lock = JobLock(tmp_path)
            lock.acquire()
            lock.release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_wall_clock_that_steps_back_and_forth_changes_nothing(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(60))
    jumpy = shell.root / "jumpy"
    jumpy.mkdir()
    (jumpy / "sitecustomize.py").write_text(
        "import itertools, time\n"
        "real, steps = time.time, itertools.cycle([86_400.0, -86_400.0, 0.0])\n"
        "time.time = lambda: real() + next(steps)\n"
    )
    server.script(lambda request, n: error(429, "rate_limit_exceeded", retry_after="0.2") if n in {3, 9} else None)
    args = ["--deadline", "1h", "--concurrency", "5", "--rpm", "60000"]
    ran = shell.submit(server, *args, env={"PYTHONPATH": str(jumpy)}).told(0)
    assert ran.rows["succeeded"] == 60
    assert server.seen.total() == 62
    assert 0 < ran.summary["elapsed_s"] < 60
    assert 0 <= ran.summary["latency_s"]["max"] < 60
    assert all(row["latency_s"] < 60 for row in shell.results())
    shell.run("report", env={"PYTHONPATH": str(jumpy)}).told(0)


def peak_kib(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_a_hundred_times_as_many_rows_take_hardly_more_memory_and_soon_send(shell: Shell, server: FaultServer):
    peaks, first = [], []
    server.script(lambda request, n: chat_reply())
    for count in (1_500, 150_000):
        shell.write(f"in{count}.jsonl", prompts(count))
        known = len(server.requests)
        began = time.monotonic()
        process = shell.start(*shell.submission(server, "--concurrency", "4", source=f"in{count}.jsonl"))
        server.wait_for_requests(known + 1, timeout_s=60)
        first.append(time.monotonic() - began)
        server.wait_for_requests(known + 800, timeout_s=60)
        peaks.append(peak_kib(process.pid))
        process.kill()
        shell.end(process)
    assert peaks[1] - peaks[0] < 60_000
    assert first[1] < 30


def test_json_logs_are_an_object_a_line_whatever_happens(shell: Shell, server: FaultServer):
    """Also what libraries and the interpreter would say by themselves, and how it ended."""
    shell.write("in.jsonl", prompts(3))
    noisy = shell.root / "noisy"
    noisy.mkdir()
    (noisy / "sitecustomize.py").write_text(
        "import logging, threading, warnings\n"
        "import batchrun.job.commands as commands\n"
        "class Bad:\n"
        "    def __del__(self): raise ValueError('unraisable\\x1b[31m')\n"
        "real = commands._run\n"
        "def run(*args, **named):\n"
        "    logging.getLogger('library').warning('a record\\nof two lines')\n"
        "    try: 1 / 0\n"
        "    except ZeroDivisionError: logging.getLogger('library').exception('caught')\n"
        "    warnings.warn('a warning', RuntimeWarning)\n"
        "    Bad()\n"
        "    thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"
        "    return real(*args, **named)\n"
        "commands._run = run\n"
    )
    env = {"PYTHONPATH": str(noisy)}
    for args, code, last in (
        (["--log-format", "json"], 0, "summary"),
        (["--log-format", "json", "--limit", "0"], 2, "error"),
        (["--log-format=json", "--no-such"], 2, "error"),
        (["--log-format", "json", "--job", "unpriced", "--verbose", "--budget", "1"], 78, "error"),
    ):
        ran = shell.submit(server, *args, env=env).told(code)
        lines = [json.loads(line) for line in ran.err.splitlines()]
        assert all(isinstance(line, dict) and line["level"] and line["message"] for line in lines)
        assert lines[-1]["level"] in {last, "notice"}
        if code == 0:
            said = " ".join(line["message"] for line in lines)
            for word in ("a record of two lines", "ZeroDivisionError", "a warning", "unraisable\\x1b", "in a thread"):
                assert word in said
            (summary,) = [line["summary"] for line in lines if line["level"] == "summary"]
            assert summary["exit_code"] == 0
    ran = shell.submit(server, "--job", "text", env=env).told(0)
    assert "\x1b" not in ran.err
    assert "library: a record of two lines" in ran.err
