"""Every exit code of the contract, reached through the installed command, with what it must leave behind."""

from __future__ import annotations

import re
import resource
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.server import FaultServer, Reply, error
from tests.support import KEY, Shell, prompts, wait_until

FATAL_401 = error(401, "invalid_api_key", "Incorrect API key provided")


def untouched(ran, total: int) -> None:
    """Asserts that every row still waits to be asked."""
    assert ran.rows == {"total": total, "succeeded": 0, "failed": 0, "pending": total, "in_doubt": 0}


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--no-such-flag"],
        ["--deadline", "soon"],
        ["--budget", "lots"],
        ["--budget", "-1"],
        ["--concurrency", "0"],
        ["--max-failures", "150%"],
        ["--param", "top_p"],
        ["--endpoint", "nonsense"],
        ["--provider", "nonsense"],
        ["--on-doubt", "maybe"],
        ["--temperature", "hot"],
        ["--timeout", "-3"],
        ["--base-url", "not a url"],
        ["--base-url", "http://192.0.2.7/v1"],
        ["--template", "@missing.txt"],
    ],
    ids=lambda args: " ".join(args) or "no input",
)
def test_2_a_usage_error_says_what_is_wrong_and_makes_nothing(shell: Shell, args):
    shell.write("in.jsonl", prompts(1))
    base = (
        ["--base-url", "http://127.0.0.1:9", "--model", "m"] if args and "--base-url" not in args else ["--model", "m"]
    )
    ran = shell.run("submit", *(["in.jsonl", *base] if args else []), *args).told(2)
    assert ran.out == b""
    assert ran.err.strip()
    if args:
        assert args[0] in ran.err or args[-1].lstrip("@") in ran.err or "192.0.2.7" in ran.err
    assert [path.name for path in shell.root.iterdir()] == ["in.jsonl"]


def test_2_a_job_that_is_not_there_is_named(shell: Shell):
    for command in ("resume", "status", "report", "results"):
        ran = shell.run(command, "nowhere.batchrun")
        assert ran.code == 2, command
        assert "nowhere" in ran.err
        assert shell.run(command).code == 2
    assert list(shell.root.iterdir()) == []


def test_69_an_endpoint_that_stays_unreachable_stops_the_run_and_fails_no_row(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(40))
    server.script(lambda request, n: Reply(hold=True) if n > 10 else None)
    server.go_down()
    began = time.monotonic()
    ran = shell.submit(server, "--patience", "2s").told(69)
    assert 1.5 < time.monotonic() - began < 20
    untouched(ran, 40)
    assert ran.summary["state"] in {"stopped", "failed"}
    assert "unreachable" in ran.err
    assert "resume" in ran.err
    server.come_up()
    server.script(lambda request, n: None)
    assert shell.run("resume", "--json").told(0).rows["succeeded"] == 40
    assert len(server.requests) == 40


def test_69_patience_ends_for_a_single_row_too(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(1))
    server.go_down()
    process = shell.start(*shell.submission(server, "--patience", "1s"))
    wait_until(lambda: process.poll() is not None, 15)
    untouched(shell.end(process).told(69), 1)


def test_69_a_host_that_does_not_exist_fails_no_row(shell: Shell):
    shell.write("in.jsonl", prompts(30))
    ran = shell.run(
        "submit", "in.jsonl", "--base-url", "https://no-such-host.invalid", "--model", "m", "--patience", "1s", "--json"
    ).told(69)
    untouched(ran, 30)
    assert "unreachable" in ran.err


def test_69_an_unknown_certificate_is_refused_at_once_and_the_key_is_never_sent(shell: Shell, tmp_path: Path):
    key, certificate = tmp_path / "tls.secret", tmp_path / "tls.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*make, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    shell.write("in.jsonl", prompts(20))
    with FaultServer(tls=context) as server:
        ran = shell.submit(server, "--patience", "30s", timeout_s=20).told(69)
        untouched(ran, 20)
        assert re.search("certificate|TLS", ran.err)
        assert server.requests == []


def test_74_after_a_failed_commit_nothing_more_is_sent(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [{"id": f"r{n}", "prompt": f"p{n} " + "x" * 300} for n in range(400)])
    server.delay_s = 0.02

    def no_large_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))

    args = shell.submission(server, "--concurrency", "4", "--price-in", "1", "--price-out", "1")
    ran = shell.run(*args, preexec_fn=no_large_files)
    assert ran.code == 74, ran.err
    assert "Traceback" not in ran.err
    sent = len(server.requests)
    assert 0 < sent < 390
    assert "resume" in ran.err
    # what is shown as done is what is kept, at the stop as well as after it
    kept = len(shell.run("results").told(0).out.splitlines())
    assert sent - 4 <= kept
    for told in (ran, shell.run("status", "--json").told(0)):
        assert told.rows["succeeded"] == kept
        assert told.rows["failed"] == 0
        assert sum(told.rows.values()) == 2 * told.rows["total"] == 800
    ran = shell.run("resume", "--json").told(0)
    assert ran.rows == {"total": 400, "succeeded": 400, "failed": 0, "pending": 0, "in_doubt": 0}
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(400)]
    assert len(server.requests) <= 400 + 4
    assert ran.summary["cost_usd"] == sum(row["cost_usd"] for row in shell.results())


def test_74_a_job_directory_that_cannot_be_made_is_named_and_nothing_is_sent(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(2))
    shell.write("file", b"")
    ran = shell.submit(server, "--job", "file/job")
    assert ran.code in {2, 74}
    assert "file" in ran.err
    assert "Traceback" not in ran.err
    assert server.requests == []


def test_75_a_second_run_on_the_same_job_leaves_at_once(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(10))
    server.script(lambda request, n: Reply(hold=True))
    first = shell.start(*shell.submission(server))
    server.wait_for_requests(10)
    # what only starts and reads is the measure of how long starting takes on this machine
    idle = shell.run("status").told(0).took_s
    for args in (shell.submission(server), ["resume"], ["resume", "in.batchrun", "--retry-failed"]):
        ran = shell.run(*args).told(75)
        assert ran.took_s < idle + 1
        assert "another run" in ran.err
        assert str(first.pid) in ran.err
    assert len(server.requests) == 10
    server.release()
    assert shell.end(first).told(0).rows["succeeded"] == 10


def test_75_a_lock_left_by_a_dead_run_holds_nobody_up(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(4))
    server.script(lambda request, n: Reply(hold=True))
    first = shell.start(*shell.submission(server))
    server.wait_for_requests(4)
    first.kill()
    shell.end(first)
    server.script(lambda request, n: None)
    assert shell.submit(server).told(0).rows["succeeded"] == 4


@pytest.mark.parametrize(
    ("reply", "code", "word"),
    [
        (FATAL_401, 77, "OPENAI_API_KEY|key"),
        (error(403, "forbidden", "no access to this"), 77, "permission|403|access"),
        (error(429, "insufficient_quota", "You exceeded your current quota", "insufficient_quota"), 78, "quota"),
        (error(429, "organization_spend_limit_exceeded", "spend limit"), 78, "limit"),
        (error(402, None, "Insufficient Balance"), 78, "402|[Bb]alance|credit"),
        (error(404, "model_not_found", "The model `m` does not exist"), 78, "model"),
    ],
    ids=["401", "403", "quota", "spend", "402", "model"],
)
def test_77_78_a_fatal_reply_stops_the_run_and_leaves_every_row_pending(
    shell: Shell, server: FaultServer, reply, code, word
):
    shell.write("in.jsonl", prompts(200))
    reply.delay_s = 0.02
    server.script(lambda request, n: reply)
    ran = shell.submit(server, "--concurrency", "5").told(code)
    untouched(ran, 200)
    assert len(server.requests) <= 5
    assert re.search(word, ran.err), ran.err
    assert "resume" in ran.err
    assert ran.summary["state"] in {"stopped", "failed"}
    assert shell.errors() == []


def test_77_a_key_revoked_on_the_way_keeps_what_is_done_and_goes_on_with_a_new_one(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(100))
    good = "Bearer " + KEY
    server.delay_s = 0.01
    server.script(
        lambda request, n: (
            Reply(FATAL_401.status, FATAL_401.body, delay_s=0.01)
            if n > 40 and request.headers["authorization"] == good
            else None
        )
    )
    ran = shell.submit(server, "--concurrency", "4").told(77)
    assert ran.rows == {"total": 100, "succeeded": 40, "failed": 0, "pending": 60, "in_doubt": 0}
    assert len(server.requests) <= 40 + 2 * 4
    refused = len(server.requests) - 40
    ran = shell.run("resume", "--json", env={"OPENAI_API_KEY": "sk-new"}).told(0)
    assert ran.rows["succeeded"] == 100
    assert len(server.requests) == 100 + refused
    assert ran.summary["requests"]["sent"] == 100 + refused


@pytest.mark.parametrize("status", [302, 307])
def test_78_a_redirect_is_named_and_never_followed(shell: Shell, server: FaultServer, status):
    shell.write("in.jsonl", prompts(50))
    with FaultServer() as other:
        server.script(lambda request, n: Reply(status, b"", {"location": other.url + "/v1/elsewhere"}))
        ran = shell.submit(server, "--concurrency", "3").told(78)
        untouched(ran, 50)
        assert other.url in ran.err
        assert other.connections == 0
        assert len(server.requests) <= 3


def test_78_without_a_key_the_variable_and_the_simulation_are_named(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(2))
    for args, names in (
        ([], ["OPENAI_API_KEY", "--provider sim"]),
        (["--provider", "anthropic", "--max-tokens", "5"], ["ANTHROPIC_API_KEY"]),
        (["--provider", "openai", "--api-key-env", "MY_KEY"], ["MY_KEY"]),
    ):
        ran = shell.run("submit", "in.jsonl", "--model", "m", *args, env={"OPENAI_API_KEY": ""}).told(78)
        assert [name for name in names if name not in ran.err] == []
    assert server.requests == []
    ran = shell.run(
        "submit", "in.jsonl", "--provider", "sim", "--sim-latency", "0.01", "--json", env={"OPENAI_API_KEY": ""}
    )
    assert ran.told(0).rows["succeeded"] == 2


def test_0_1_and_3_with_a_broken_row_out_of_many(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(6))
    server.script(lambda request, n: error(400, "no") if request.text == "p6" else None)
    assert shell.submit(server, "--limit", "5").told(0).summary["state"] == "complete"
    ran = shell.run("resume", "--limit", "6", "--json").told(1)
    assert (ran.summary["state"], ran.summary["exit_code"]) == ("complete", 1)
    assert "errors.jsonl" in ran.err
    assert shell.run("status", "--json").told(0).summary["exit_code"] == 1


@pytest.mark.parametrize(("name", "code"), [("SIGHUP", 129), ("SIGINT", 130), ("SIGTERM", 143)])
def test_129_130_143_one_signal_drains_and_the_job_goes_on_later(shell: Shell, server: FaultServer, name, code):
    shell.write("in.jsonl", prompts(40))
    server.script(lambda request, n: Reply(delay_s=0.6 if n > 8 else 0))
    process = shell.start(*shell.submission(server, "--concurrency", "8"))
    server.wait_for_requests(16)
    process.send_signal(signal.Signals[name])
    ran = shell.end(process).told(code)
    assert len(server.requests) == 16
    assert ran.rows == {"total": 40, "succeeded": 16, "failed": 0, "pending": 24, "in_doubt": 0}
    assert ran.summary["state"] == "interrupted"
    assert ran.summary["exit_code"] == code
    assert "resume" in ran.err
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(1, 17)]
    server.script(lambda request, n: None)
    assert shell.run("resume", "--json").told(0).rows["succeeded"] == 40
    assert server.seen == {f"p{n}": 1 for n in range(1, 41)}


def test_a_second_signal_leaves_at_once_and_its_rows_are_in_doubt(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(20))
    server.script(lambda request, n: Reply(hold=True) if n > 4 else None)
    process = shell.start(*shell.submission(server, "--concurrency", "4"))
    server.wait_for_requests(8)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    ran = shell.end(process, timeout_s=10).told(130)
    assert ran.took_s < 5
    assert len(server.requests) == 8
    status = shell.run("status", "--json").told(0).summary
    assert status["rows"]["succeeded"] == 4
    assert status["rows"]["failed"] == 0
    assert sorted(status["in_doubt_ids"]) == ["r5", "r6", "r7", "r8"]
    server.release()
    server.script(lambda request, n: None)
    assert shell.run("resume", "--json").told(0).rows["succeeded"] == 20
    assert len(server.requests) == 24


def test_a_drain_lasts_no_longer_than_its_grace(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(6))
    server.script(lambda request, n: Reply(hold=True))
    process = shell.start(*shell.submission(server, "--concurrency", "3", "--grace", "0.5"))
    server.wait_for_requests(3)
    process.send_signal(signal.SIGTERM)
    ran = shell.end(process, timeout_s=15).told(143)
    assert 0.3 < ran.took_s < 8
    assert len(server.requests) == 3
    assert shell.run("status", "--json").rows["failed"] == 0


def test_a_port_that_accepts_and_says_nothing_is_no_rows_failure_before_its_attempts_are_used(shell: Shell):
    shell.write("in.jsonl", prompts(1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        args = ["--base-url", url, "--model", "m", "--timeout", "0.3", "--max-attempts", "1", "--json"]
        ran = shell.run("submit", "in.jsonl", *args, timeout_s=20).told(1)
    assert ran.rows["failed"] == 1
    (row,) = shell.errors()
    assert (row["error"]["kind"], row["attempts"]) == ("timeout", 1)
