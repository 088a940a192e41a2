"""What an unlucky user does, and must not pay for: others' directories, moved files, ignored signals, odd starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from decimal import Decimal
from pathlib import Path

import pytest

from tests.faults.server import FaultServer, Reply
from tests.support import KEY, Shell, chat_reply, prompts

PRICED = ("--price-in", "100", "--price-out", "100")


def test_a_directory_of_somebody_elses_is_refused_and_left_as_it_was(shell: Shell, server: FaultServer) -> None:
    other = shell.root / "thesis"
    other.mkdir(mode=0o755)
    (other / "chapter.txt").write_text("years of work")
    shell.write("in.jsonl", ["{"])
    ran = shell.submit(server, "--job", "thesis").told(2)
    assert "holds other things and no job" in ran.err
    assert [path.name for path in other.iterdir()] == ["chapter.txt"]
    assert other.stat().st_mode & 0o777 == 0o755


def test_a_job_that_never_began_leaves_no_trace_but_for_what_others_put_there(
    shell: Shell, server: FaultServer
) -> None:
    shell.write("in.jsonl", ["{"])
    shell.submit(server).told(65)
    assert not (shell.root / "in.batchrun").exists()
    (shell.root / "empty").mkdir()
    shell.submit(server, "--job", "empty").told(65)
    assert (shell.root / "empty").is_dir()


def test_replies_without_usage_keep_their_reservation_spent_over_all_runs(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(30, max_tokens=50))
    server.script(lambda request, n: chat_reply("fine"))
    spent = [shell.submit(server, "--budget", "0.05", *PRICED).told(3).summary["spent_usd"] for _ in range(3)]
    assert spent[0] == spent[1] == spent[2]
    assert 0 < spent[0] <= Decimal("0.05")
    reserved = Decimal(50) * 100 / 1_000_000
    assert len(server.requests) * reserved <= Decimal("0.05")


def test_a_configuration_file_cannot_lift_the_budget_of_a_job_that_exists(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(40, max_tokens=50))
    (shell.root / "batchrun.toml").write_text('budget = "50"\n')
    first = shell.submit(server, "--budget", "0.02", *PRICED).told(3).summary
    again = shell.run("resume", "--json", env={"BATCHRUN_BUDGET": "50"}).told(3).summary
    assert first["budget_usd"] == again["budget_usd"] == Decimal("0.02")
    assert again["spent_usd"] <= Decimal("0.02")
    assert shell.run("resume", "--json", "--budget", "9").told(0).rows["succeeded"] == 40


def test_an_input_that_changes_while_a_row_fails_loses_no_reply_in_flight(shell: Shell, server: FaultServer) -> None:
    source = shell.write("in.jsonl", prompts(6))
    refusal = {"error": {"message": "no", "code": "bad"}}
    server.script(lambda request, n: Reply(400, refusal, hold=True) if request.text == "p1" else chat_reply(delay_s=1))
    process = shell.start(*shell.submission(server, "--concurrency", "6"))
    server.wait_for_requests(6)
    source.write_bytes(source.read_bytes().replace(b'"p1"', b'"XX"'))
    server.release()
    ran = shell.end(process).told(65)
    assert "line 1 of the input has changed" in ran.err
    assert (ran.rows["succeeded"], ran.rows["in_doubt"]) == (5, 0)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(
    shell: Shell, server: FaultServer, number: signal.Signals
) -> None:
    shell.write("in.jsonl", prompts(12))
    server.script(lambda request, n: chat_reply("x", delay_s=0.1))
    process = shell.start(
        *shell.submission(server, "--concurrency", "2"), preexec_fn=lambda: signal.signal(number, signal.SIG_IGN)
    )
    server.wait_for_requests(2)
    process.send_signal(number)
    assert shell.end(process).told(0).rows["succeeded"] == 12


def test_what_landed_is_written_out_when_the_grace_is_over(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(5))
    server.script(lambda request, n: Reply(hold=True) if request.text == "p1" else None)
    ran = shell.submit(server, "--concurrency", "2", "--deadline", "1", "--grace", "0.2").told(3)
    assert ran.summary["in_doubt_ids"] == ["r1"]
    assert [row["custom_id"] for row in shell.results()] == ["r2", "r3", "r4", "r5"]
    assert {path.name for path in (shell.root / "in.batchrun").iterdir()} >= {"report.json", "report.html"}


def test_every_row_may_have_a_priority_of_its_own(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", [row | {"priority": n % 977 - 400} for n, row in enumerate(prompts(2_000))])
    shell.submit(server, "--concurrency", "1", "--limit", "2000").told(0)
    order = [int(request.text[1:]) - 1 for request in server.requests]
    assert sorted(order) == list(range(2_000))
    # The window ahead is packed in order; what is sent first is of the highest priority there is.
    assert order[0] % 977 - 400 == 576


def test_a_line_beyond_all_bounds_is_one_failed_row_and_the_rest_runs(shell: Shell, server: FaultServer) -> None:
    giant = b'{"id":"giant","prompt":"' + b"x" * (65 << 20) + b'"}'
    shell.write("in.jsonl", b"\n".join([json.dumps(prompts(1)[0]).encode(), giant, b'"after"']))
    ran = shell.submit(server, "--skip-invalid").told(1)
    assert (ran.rows["succeeded"], ran.rows["failed"]) == (2, 1)
    assert [request.text for request in server.requests] == ["p1", "after"]


def test_a_resume_goes_where_the_first_run_went_whatever_keys_are_set_then(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(2))
    keys = {"OPENAI_API_KEY": "", "ANTHROPIC_API_KEY": KEY}
    # No such server is reached from here: what counts is which provider is remembered.
    shell.run("submit", "in.jsonl", "--model", "claude-sonnet-4-5", "--patience", "1", "--deadline", "0.1", env=keys)
    ran = shell.run("resume", "--deadline", "0.1", env={"OPENAI_API_KEY": KEY})
    assert ran.code == 78
    assert "ANTHROPIC_API_KEY is not set" in ran.err


def test_a_run_killed_before_its_first_commit_is_no_job_yet(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(2))
    job = shell.root / "in.batchrun"
    job.mkdir()
    (job / "lock").touch()
    (job / "state.db").touch()
    assert "there is no job" in shell.run("status", "in.jsonl").told(2).err
    assert shell.submit(server).told(0).rows["succeeded"] == 2


def test_a_named_pipe_is_read_once_and_kept(shell: Shell, server: FaultServer) -> None:
    pipe = shell.root / "in.pipe"
    os.mkfifo(pipe)
    data = b"".join(json.dumps(row).encode() + b"\n" for row in prompts(3))
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    assert shell.submit(server, "--limit", "2", source="in.pipe").told(0).rows["succeeded"] == 2
    writer.join()
    assert shell.run("resume", "in.batchrun", "--json", "--limit", "3").told(0).rows["succeeded"] == 3


def test_a_repeated_id_that_is_skipped_gives_its_row_back(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", [{"id": "a", "prompt": "one"}, {"id": "a", "prompt": "two"}])
    shell.submit(server, "--skip-invalid").told(1)
    (failed,) = shell.errors()
    assert failed["row"] == {"id": "a", "prompt": "two"}
    assert "first seen on line 1" in failed["error"]["message"]


def test_an_input_that_was_moved_is_found_at_its_new_place(shell: Shell, server: FaultServer) -> None:
    source = shell.write("in.jsonl", prompts(3))
    shell.submit(server, "--limit", "1").told(0)
    source.rename(shell.root / "moved.jsonl")
    ran = shell.submit(server, "--job", "in.batchrun", source="moved.jsonl").told(0)
    assert ran.rows["succeeded"] == 3


def test_a_start_that_was_refused_before_a_send_fixes_nothing(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(2, max_tokens=5))
    shell.submit(server, "--budget", "1").told(78)
    assert server.requests == []
    ran = shell.run(
        "submit", "in.jsonl", "--base-url", server.url, "--model", "other", "--json", "--budget", "1", *PRICED
    ).told(0)
    assert {request.json["model"] for request in server.requests} == {"other"}
    assert ran.rows["succeeded"] == 2


def test_a_dummy_key_is_no_secret_and_takes_no_words_out_of_answers(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", [{"id": "null", "prompt": "p"}, {"id": "ollama", "prompt": "q"}])
    server.script(lambda request, n: chat_reply("ollama says null"))
    shell.submit(server, env={"OPENAI_API_KEY": "ollama"}).told(0)
    assert [(row["custom_id"], row["output"]) for row in shell.results()] == [
        ("null", "ollama says null"),
        ("ollama", "ollama says null"),
    ]


def test_a_stderr_that_nobody_reads_does_not_hold_up_the_run(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(3))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    try:
        process = shell.start(*shell.submission(server, "-v"), stderr=writing)
        assert shell.end(process, timeout_s=20).code == 0
    finally:
        os.close(reading)
        os.close(writing)


def test_stdin_may_be_compressed(shell: Shell, server: FaultServer) -> None:
    import gzip

    data = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in prompts(3)))
    command = shell.submission(server, "--job", "j", source="-")
    assert shell.run(*command, data=data).told(0).rows["succeeded"] == 3


def test_metadata_with_a_carriage_return_between_its_members_stays_one_line(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", b'{"id":"a","prompt":"p","metadata":{"k":\r1}}\n')
    shell.submit(server).told(0)
    assert b"\r" not in (shell.root / "in.batchrun" / "results.jsonl").read_bytes()
    assert shell.results()[0]["metadata"] == {"k": 1}


def test_looking_at_a_job_all_the_time_keeps_no_run_out(shell: Shell, server: FaultServer) -> None:
    from batchrun.run.files import JobLock

    shell.write("in.jsonl", prompts(3))
    shell.submit(server, "--limit", "1").told(0)
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            JobLock(shell.root / "in.batchrun").is_held_elsewhere()
            time.sleep(0.0005)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert shell.submit(server).told(0).rows["succeeded"] == 3
    finally:
        stop.set()
        looking.join()


def test_a_planted_link_is_not_written_through(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(1))
    victim = shell.write("victim", b"precious")
    job = shell.root / "in.batchrun"
    job.mkdir()
    (job / "lock").symlink_to(victim)
    shell.submit(server)
    assert Path(victim).read_bytes() == b"precious"


def test_the_job_of_a_read_only_directory_can_be_read(shell: Shell, server: FaultServer, tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["mount", "--version"], check=False, capture_output=True).returncode:
        pytest.skip("needs root to mount a directory read-only")
    shell.write("in.jsonl", prompts(2))
    shell.submit(server).told(0)
    job = shell.root / "in.batchrun"
    if subprocess.run(["mount", "--bind", job, job], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", job], check=True)
        assert shell.run("status", "--json").told(0).rows["succeeded"] == 2
        assert shell.run("results").told(0).out.count(b"\n") == 2
    finally:
        subprocess.run(["umount", job], check=True)
