"""kill -9, suspended processes: no result is lost, none is doubled, what is in doubt is said."""

from __future__ import annotations

import json
import random
import signal
import time

import pytest

from tests.faults.server import FaultServer, Reply
from tests.support import Shell, parse, prompts, wait_until

ROWS = 2000
KILLS = 10
IN_FLIGHT = 20


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ten_kills_of_two_thousand_rows_lose_and_double_nothing(shell: Shell, server: FaultServer):
    dice = random.Random(20260)
    server.delay_s = 0.02
    shell.write("in.jsonl", prompts(ROWS))
    args = shell.submission(server, "--concurrency", str(IN_FLIGHT), "--price-in", "1", "--price-out", "1")
    acknowledged: set[str] = set()
    for _ in range(KILLS):
        process = shell.start(*args)
        seen = len(server.requests)
        wait_until(lambda seen=seen: len(server.requests) > seen, 30)
        time.sleep(dice.random() * 0.25)
        process.kill()
        assert shell.end(process).code == -signal.SIGKILL
        # every answer that any reader was shown must still be there afterwards
        done = {json.loads(line)["custom_id"] for line in shell.run("results").told(0).out.splitlines()}
        assert acknowledged <= done
        acknowledged = done
    assert len(acknowledged) < ROWS, "the kills came too late to tell anything"
    before = parse(shell.run("report", "--format", "json").told(0).out)
    ran = shell.submit(server, "--concurrency", str(IN_FLIGHT), timeout_s=90).told(0)
    assert ran.rows == {"total": ROWS, "succeeded": ROWS, "failed": 0, "pending": 0, "in_doubt": 0}
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(1, ROWS + 1)]
    assert shell.errors() == []
    assert ROWS <= len(server.requests) <= ROWS + KILLS * IN_FLIGHT
    assert set(server.seen) == {f"p{n}" for n in range(1, ROWS + 1)}
    repeated = len(server.requests) - ROWS
    assert repeated > 0
    text = shell.run("report").told(0).out.decode()
    assert "in doubt" in text
    counts = [int(word.replace(",", "")) for word in text.split() if word.replace(",", "").isdigit()]
    assert any(repeated <= count <= KILLS * IN_FLIGHT for count in counts), text
    assert before["rows"]["in_doubt"] <= IN_FLIGHT


def killed_with_four_in_flight(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(10))
    server.script(lambda request, n: Reply(hold=True) if n > 3 else None)
    process = shell.start(*shell.submission(server, "--concurrency", "4", "--price-in", "1", "--price-out", "1"))
    server.wait_for_requests(7)
    wait_until(lambda: shell.run("status", "--json").told(0).rows["succeeded"] == 3)
    process.kill()
    shell.end(process)
    server.script(lambda request, n: None)


def test_rows_in_flight_at_a_kill_are_listed_as_in_doubt_and_sent_again(shell: Shell, server: FaultServer):
    killed_with_four_in_flight(shell, server)
    status = shell.run("status", "--json").told(0).summary
    assert status["state"] != "running"
    assert status["rows"]["in_doubt"] == 4
    assert sorted(status["in_doubt_ids"]) == ["r4", "r5", "r6", "r7"]
    assert status["rows"]["succeeded"] == 3
    assert "4" in shell.run("report").told(0).out.decode()
    ran = shell.run("resume", "--json").told(0)
    assert ran.rows == {"total": 10, "succeeded": 10, "failed": 0, "pending": 0, "in_doubt": 0}
    assert server.seen == {f"p{n}": 2 if n in {4, 5, 6, 7} else 1 for n in range(1, 11)}
    assert {row["custom_id"]: row["attempts"] for row in shell.results()} == {
        f"r{n}": 2 if n in {4, 5, 6, 7} else 1 for n in range(1, 11)
    }
    assert ran.summary["requests"]["sent"] == 14
    report = shell.run("report").told(0).out.decode()
    assert "r4" in report or "4 rows" in report or " 4 " in report


def test_on_doubt_fail_leaves_them_failed_and_sends_none_again(shell: Shell, server: FaultServer):
    killed_with_four_in_flight(shell, server)
    ran = shell.run("resume", "--on-doubt", "fail", "--json").told(1)
    assert ran.rows == {"total": 10, "succeeded": 6, "failed": 4, "pending": 0, "in_doubt": 0}
    assert server.seen == {f"p{n}": 1 for n in range(1, 11)}
    assert [row["custom_id"] for row in shell.errors()] == ["r4", "r5", "r6", "r7"]
    assert all(row["error"]["kind"] and row["error"]["message"] for row in shell.errors())
    assert ran.summary["cost_usd"] <= 14
    ran = shell.run("resume", "--retry-failed", "--json").told(0)
    assert ran.rows["succeeded"] == 10
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(1, 11)]


def test_a_row_killed_again_and_again_is_still_answered_and_its_sends_are_counted(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(1))
    server.script(lambda request, n: Reply(hold=True))
    for kill in range(1, 4):
        process = shell.start(*shell.submission(server))
        server.wait_for_requests(kill)
        process.kill()
        shell.end(process)
    server.script(lambda request, n: None)
    ran = shell.run("resume", "--json").told(0)
    (row,) = shell.results()
    assert row["attempts"] == len(server.requests) == ran.summary["requests"]["sent"] == 4


def test_a_kill_before_the_first_send_leaves_a_job_that_can_be_submitted_again(shell: Shell, server: FaultServer):
    dice = random.Random(7)
    shell.write("in.jsonl", prompts(3000))
    for _ in range(3):
        process = shell.start(*shell.submission(server, "--concurrency", "1", "--rpm", "1"))
        time.sleep(0.25 + dice.random() * 0.3)
        process.kill()
        shell.end(process)
    sent = len(server.requests)
    assert sent <= 3
    ran = shell.submit(server, "--limit", "20", "--rpm", "100000", "--concurrency", "20").told(0)
    assert ran.rows["succeeded"] == 20
    assert len(server.requests) <= 20 + sent


def test_a_process_that_slept_longer_than_its_timeouts_keeps_the_answers_that_came(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(12))
    server.script(lambda request, n: Reply(delay_s=0.3))
    process = shell.start(*shell.submission(server, "--concurrency", "6", "--timeout", "1", "--max-attempts", "1"))
    server.wait_for_requests(6)
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGCONT)
    ran = shell.end(process).told(0)
    assert ran.rows["succeeded"] == 12
    assert server.seen == {f"p{n}": 1 for n in range(1, 13)}


def test_a_job_directory_copied_elsewhere_still_tells_where_it_stands(shell: Shell, server: FaultServer):
    killed_with_four_in_flight(shell, server)
    job = shell.root / "in.batchrun"
    job.rename(shell.root / "moved")
    assert shell.run("status", "moved", "--json").told(0).rows["succeeded"] == 3
    assert len(shell.run("results", "moved").told(0).out.splitlines()) == 3
    ran = shell.run("resume", "moved", "--json").told(0)
    assert ran.rows["succeeded"] == 10
