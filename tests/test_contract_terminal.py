"""Cron, pipes and terminals: quiet, plain, private; settings from every place; a resume that remembers."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import time
from decimal import Decimal
from pathlib import Path

import pytest

from tests.faults.server import FaultServer, Reply, error
from tests.support import COMMAND, KEY, Shell, prompts, wait_until

ESC = "\x1b"


def modes(job) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in [job, *job.rglob("*")]}


def test_cron_with_a_bare_environment_another_directory_and_umask_000(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [*prompts(5), {"id": "é", "prompt": "é\u202e"}])
    source = str(shell.root / "in.jsonl")
    args = ["submit", source, "--base-url", server.url, "--model", "m"]
    with (shell.root / "out").open("wb") as out, (shell.root / "err").open("wb") as err:
        process = subprocess.Popen(
            [COMMAND, *args],
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "OPENAI_API_KEY": KEY},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            umask=0,
            start_new_session=True,
        )
        assert process.wait(30) == 0
    told = (shell.root / "err").read_text()
    assert (shell.root / "out").read_bytes() == b""
    assert ESC not in told
    assert "\r" not in told
    assert "Warning" not in told
    assert len(told.splitlines()) < 15
    found = modes(shell.root / "in.batchrun")
    assert found.pop("in.batchrun") == 0o700
    assert set(found.values()) == {0o600}
    assert {"state.db", "results.jsonl", "errors.jsonl", "report.json", "report.html"} <= set(found)
    assert len(shell.results()) == 6
    again = subprocess.run(
        [COMMAND, *args, "--quiet"],
        cwd="/",
        env={"PATH": "/bin", "OPENAI_API_KEY": KEY},
        capture_output=True,
        check=True,
    )
    assert again.stdout + again.stderr == b""
    assert len(server.requests) == 6


README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_recipe_for_cron_mails_only_on_trouble_and_goes_on_the_next_night(shell: Shell, server: FaultServer):
    (line,) = re.findall(r"^    15 3 \* \* \* +(.+)$", README, re.MULTILINE)
    shell.write("today.jsonl", prompts(400))
    shell.write("key.secret", KEY.encode()).chmod(0o600)
    for old, new in (
        ("/opt/batchrun/bin/batchrun", COMMAND),
        ("/srv/labels/key", f"{shell.root}/key.secret"),
        ("/srv/labels", str(shell.root)),
        ("--budget 5", f"--budget 5 --provider openai --base-url {server.url}"),
    ):
        assert old in line
        line = line.replace(old, new)

    def cron(line: str = line) -> subprocess.CompletedProcess[bytes]:
        # what cron gives: its own shell, hardly any variable, no terminal; and a umask that hides nothing
        env = {"PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
        ran = subprocess.run(
            ["/bin/sh", "-c", line], cwd="/", env=env, capture_output=True, umask=0, start_new_session=True, check=False
        )
        shell.said += [ran.stdout, ran.stderr]
        return ran

    server.script(lambda request, n: Reply(delay_s=0.3))
    assert "--deadline 2h" in line
    first = cron(line.replace("--deadline 2h", "--deadline 0.8s"))
    assert (first.returncode, first.stdout) == (3, b"")
    assert re.fullmatch(rb"stopped: deadline[^\n]*\n", first.stderr)
    server.script(lambda request, n: None)
    second = cron()
    assert (second.returncode, second.stdout, second.stderr) == (0, b"", b"")
    assert server.seen == {f"p{n}": 1 for n in range(1, 401)}
    job = shell.root / "today.batchrun"
    assert modes(job).pop("today.batchrun") == 0o700
    assert {mode for name, mode in modes(job).items() if name != "today.batchrun"} == {0o600}
    third = cron()  # nothing left to do
    assert (third.returncode, third.stdout, third.stderr) == (0, b"", b"")
    with (shell.root / "today.jsonl").open("ab") as source:
        source.write(b'{"id":"new","prompt":"new"}\n')
    server.script(lambda request, n: error(401, "invalid_api_key", "bad key"))
    fourth = cron()
    assert fourth.returncode == 77
    assert 1 <= len(fourth.stderr.splitlines()) <= 2


def test_files_written_by_output_are_private_whatever_the_umask(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(2))
    shell.submit(server, umask=0).told(0)
    known = shell.write("known.jsonl", b"older")
    known.chmod(0o644)
    for args in (["results", "-o", "new.jsonl"], ["results", "-o", "known.jsonl"]):
        shell.run(*args, umask=0).told(0)
    for form in ("text", "json", "markdown", "html"):
        shell.run("report", "--format", form, "-o", f"report.{form}", umask=0).told(0)
    written = [path for path in shell.root.iterdir() if path.is_file() and path.name != "in.jsonl"]
    assert len(written) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}


def test_files_are_private_while_the_run_is_on_and_after_a_kill(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(5))
    server.script(lambda request, n: Reply(hold=True))
    process = shell.start(*shell.submission(server), umask=0)
    server.wait_for_requests(5)
    assert {mode for name, mode in modes(shell.root / "in.batchrun").items() if name != "in.batchrun"} == {0o600}
    process.kill()
    shell.end(process)
    shell.run("results", umask=0).told(0)
    shell.run("report", umask=0).told(0)
    found = modes(shell.root / "in.batchrun")
    assert found.pop("in.batchrun") == 0o700
    assert set(found.values()) == {0o600}


def test_quiet_says_only_errors_and_json_logs_are_an_object_a_line(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(30))
    ran = shell.run("submit", "in.jsonl", "--base-url", server.url, "--model", "m", "-q").told(0)
    assert (ran.out, ran.err) == (b"", "")
    server.script(lambda request, n: error(401, "invalid_api_key", "bad key"))
    ran = shell.submit(server, "--job", "q", "-q").told(77)
    assert "401" in ran.err or "key" in ran.err
    for args, url, code in (
        (["--job", "log"], server.url, 77),
        (["--job", "bad", "--limit", "0x"], server.url, 2),
        (["--job", "none", "--patience", "1s"], "http://127.0.0.1:9", 69),
    ):
        ran = shell.run("submit", "in.jsonl", "--base-url", url, "--model", "m", *args, "--log-format", "json").told(
            code
        )
        lines = [json.loads(line) for line in ran.err.splitlines()]
        assert lines, code
        assert all(isinstance(line, dict) for line in lines)


def test_a_closed_stdout_is_no_traceback_and_loses_nothing(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(400))
    shell.submit(server).told(0)
    for command in ("results", "report", "status"):
        for tail in ("| head -c 5 >/dev/null", ">&-", "| true"):
            ran = subprocess.run(
                ["bash", "-c", f"{COMMAND} {command} {tail}; exit ${{PIPESTATUS[0]}}"],
                cwd=shell.root,
                env=shell.env,
                capture_output=True,
                text=True,
                check=False,
            )
            assert "Traceback" not in ran.stderr, (command, tail)
            assert "Exception ignored" not in ran.stderr, (command, tail)
            assert ran.returncode in {0, 1, 141, 74}, (command, tail, ran.returncode)


@pytest.mark.parametrize("tail", ["| true", ">&-", "2>&-", ">&- 2>&- <&-", "2>/dev/full"])
def test_a_run_whose_output_is_closed_still_runs_to_its_end(shell: Shell, server: FaultServer, tail):
    shell.write("in.jsonl", prompts(8))
    command = " ".join([COMMAND, *shell.submission(server, "--progress")])
    ran = subprocess.run(
        ["bash", "-c", f"{command} {tail}; exit ${{PIPESTATUS[0]}}"],
        cwd=shell.root,
        env=shell.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert "Traceback" not in ran.stderr
    assert len(server.requests) == 8
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(1, 9)]
    assert shell.run("status", "--json").told(0).summary["state"] == "complete"


def on_a_terminal(shell: Shell, args: list[str], **env: str) -> tuple[int, str]:
    """Runs the command with stderr and stdout on a terminal; returns its exit code and what was shown."""
    leader, follower = pty.openpty()
    full = shell.env | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"} | env
    process = subprocess.Popen(
        [COMMAND, *args], cwd=shell.root, env=full, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    shown = b""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                data = os.read(leader, 65536)
            except OSError:
                break
            if not data:
                break
            shown += data
    os.close(leader)
    shell.said.append(shown)
    return process.wait(5), shown.decode("utf-8", "replace")


def test_a_terminal_shows_a_bar_and_no_color_is_honoured(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(60))
    server.delay_s = 0.1
    args = ["submit", "in.jsonl", "--base-url", server.url, "--model", "m", "--concurrency", "12"]
    code, shown = on_a_terminal(shell, [*args, "--job", "a"])
    assert code == 0
    assert ESC in shown
    assert "60" in shown
    code, shown = on_a_terminal(shell, [*args, "--job", "b"], NO_COLOR="1")
    assert code == 0
    colours = [found for found in re.findall(r"\x1b\[([\d;]*)m", shown) if re.search(r"(^|;)(3|4|9|10)\d", found)]
    assert colours == []
    code, shown = on_a_terminal(shell, [*args, "--job", "c", "--no-progress"])
    assert code == 0
    assert "\x1b[2K" not in shown
    assert "\x1b[1A" not in shown


def test_flags_beat_environment_beats_file_beats_defaults(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(1))
    (shell.root / "deep/er").mkdir(parents=True)
    shell.write(
        "batchrun.toml", f'base-url = "{server.url}"\nmodel = "file"\nmax-tokens = 11\ntemperature = 0.25\n'.encode()
    )
    first = shell.run("submit", "../../in.jsonl", "--job", "f", cwd=shell.root / "deep/er")
    if first.code == 2:  # the spelling of keys is not told: underscores then
        text = (shell.root / "batchrun.toml").read_text().replace("base-url", "base_url").replace("max-t", "max_t")
        shell.write("batchrun.toml", text.encode())
        first = shell.run("submit", "../../in.jsonl", "--job", "f", cwd=shell.root / "deep/er")
    first.told(0)
    shell.run("submit", "in.jsonl", "--job", "e", env={"BATCHRUN_MODEL": "env"}).told(0)
    shell.run("submit", "in.jsonl", "--job", "g", "--model", "flag", env={"BATCHRUN_MODEL": "env"}).told(0)
    shell.run(
        "submit", "in.jsonl", "--job", "h", env={"BATCHRUN_MAX_TOKENS": "7", "BATCHRUN_BASE_URL": server.url}
    ).told(0)
    sent = [request.json for request in server.requests]
    assert [body["model"] for body in sent] == ["file", "env", "flag", "file"]
    assert [body.get("max_tokens", body.get("max_completion_tokens")) for body in sent] == [11, 11, 11, 7]
    assert {body["temperature"] for body in sent} == {0.25}
    ran = shell.run("submit", "in.jsonl", "--job", "i", env={"BATCHRUN_CONCURRENCY": "many"}).told(2)
    assert "BATCHRUN_CONCURRENCY" in ran.err or "concurrency" in ran.err


def test_a_resume_remembers_everything_but_the_key(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [{"id": f"r{n}", "text": f"t{n}"} for n in range(1, 41)])
    server.delay_s = 0.1
    flags = ["--template", "Say {{ text }}", "--system", "S", "--max-tokens", "9", "--temperature", "0.5"]
    flags += ["--param", "top_p=0.50", "--price-in", "1", "--price-out", "2", "--budget", "0.9", "--limit", "30"]
    flags += ["--concurrency", "3", "--max-attempts", "2"]
    process = shell.start(*shell.submission(server, *flags))
    server.wait_for_requests(6)
    process.send_signal(signal.SIGINT)
    shell.end(process).told(130)
    done = len(server.requests)
    assert done < 30
    shell.run("resume", env={"OPENAI_API_KEY": ""})
    refused = [request for request in server.requests[done:] if "authorization" in request.headers]
    assert refused == []
    server.requests[done:] = []
    ran = shell.run("resume", "in.jsonl", "--json", env={"OPENAI_API_KEY": "sk-other"}).told(0)
    first = server.requests[0]
    for request in server.requests[done:]:
        assert request.headers["authorization"] == "Bearer sk-other"
        assert request.body.replace(request.text.encode(), b"") == first.body.replace(first.text.encode(), b"")
    assert server.max_in_flight <= 3
    assert ran.rows["succeeded"] == 30
    assert ran.summary["cost_unknown_rows"] == 0
    cost = sum(row["usage"]["input_tokens"] + 2 * row["usage"]["output_tokens"] for row in shell.results())
    assert ran.summary["cost_usd"] == Decimal(cost) / 1_000_000


def test_resume_without_a_job_takes_the_latest_one_here(shell: Shell, server: FaultServer):
    for name in ("a", "b"):
        shell.write(f"{name}.jsonl", prompts(4))
        shell.submit(server, "--limit", "2", source=f"{name}.jsonl").told(0)
        time.sleep(0.02)
    ran = shell.run("resume", "--limit", "4", "--json").told(0)
    assert ran.summary["job"] == "b.batchrun"
    assert shell.run("status", "a.jsonl", "--json").told(0).rows["succeeded"] == 2


def test_one_plain_line_a_minute_where_stderr_is_no_terminal(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(20))
    server.delay_s = 0.1
    ran = shell.run("submit", "in.jsonl", "--base-url", server.url, "--model", "m", "--concurrency", "2").told(0)
    assert ran.out == b""
    assert ESC not in ran.err
    assert len(ran.err.splitlines()) < 12
    assert "resume" not in ran.err


def test_a_stop_while_everything_waits_for_a_retry_is_quick(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(3))
    server.script(lambda request, n: error(429, "rate_limit_exceeded", retry_after="120"))
    process = shell.start(*shell.submission(server))
    server.wait_for_requests(1)
    wait_until(lambda: server.in_flight == 0)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    ran = shell.end(process, timeout_s=20).told(143)
    assert ran.took_s < 8
    assert ran.rows == {"total": 3, "succeeded": 0, "failed": 0, "pending": 3, "in_doubt": 0}


def test_help_version_and_an_unknown_command_answer_without_a_job(shell: Shell):
    top = shell.run("--help").told(0).out.decode()
    for command in ("submit", "resume", "report", "status", "results", "estimate", "check"):
        assert command in top
    told = shell.run("submit", "--help").told(0).out.decode()
    wanted = """provider base-url endpoint mode api-key-env api-key-file model system template max-tokens temperature
        param batch-tokens batch-rows batch-bytes max-concurrency concurrency rpm tpm max-attempts timeout budget
        price-in price-out price-cached-in price-cache-write deadline patience max-failures limit job
        skip-invalid on-doubt grace
        retry-failed progress no-progress quiet verbose json log-format config"""
    assert [name for name in wanted.split() if f"--{name}" not in told] == []
    assert "--api-key " not in told
    assert shell.run("--version").told(0).out.strip()
    assert shell.run("explode").told(2).err
