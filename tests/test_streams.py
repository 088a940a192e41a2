"""Streams, with the installed command at the end of a real pipe: rows go out while they arrive, and none is lost."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from batchrun.run.view import View, is_job
from tests.faults.machine import check_whole, kill_at_request, look
from tests.faults.server import FaultServer, Reply
from tests.support import COMMAND, Ran, Shell, prompts, wait_until

JOB = "in.batchrun"
PACKED = ("--mode", "packed", "--endpoint", "embeddings")

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


def lines(rows: Iterable[Mapping[str, Any] | bytes]) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)


def stream(
    shell: Shell, server: FaultServer, *args: str, interval: str = "30", env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a submission at the end of a pipe that is still empty."""
    asked = shell.submission(server, "--flush-interval", interval, "--job", JOB, *args, source="-")
    return shell.start(*asked, stdin=subprocess.PIPE, env=env)


def say(process: subprocess.Popen[bytes], *rows: Mapping[str, Any] | bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(lines(rows))
    process.stdin.flush()


def stop(shell: Shell, process: subprocess.Popen[bytes], number: signal.Signals, code: int) -> Ran:
    """Sends a signal while the input is open."""
    process.send_signal(number)
    assert process.wait(10) == code
    return shell.end(process).told(code)


def whole(shell: Shell, server: FaultServer, rows: Iterable[Mapping[str, Any] | bytes], *args: str) -> Ran:
    """Streams rows that are all there, to the end of the input."""
    return shell.end(stream(shell, server, *args), data=lines(rows))


def spooled(shell: Shell) -> list[bytes]:
    return (shell.root / JOB / "input.jsonl").read_bytes().split(b"\n")


def known(shell: Shell) -> dict[str, int]:
    """Returns a job's counts as another terminal sees them."""
    if not is_job(shell.root / JOB):
        return {"total": 0, "succeeded": 0, "failed": 0}
    return shell.run("status", JOB, "--json").told(0).rows


# ---------------------------------------------------------------- while it arrives


def test_answers_come_while_the_producer_still_writes(shell: Shell, server: FaultServer) -> None:
    rows = prompts(4)
    process = stream(shell, server)
    for n, row in enumerate(rows, 1):
        say(process, row)
        server.wait_for_requests(n)
        wait_until(lambda n=n: known(shell)["succeeded"] == n)
        assert known(shell) == {"total": n, "succeeded": n, "failed": 0, "pending": 0, "in_doubt": 0}
        assert process.poll() is None
    ran = shell.end(process).told(0)
    assert ran.rows == {"total": 4, "succeeded": 4, "failed": 0, "pending": 0, "in_doubt": 0}
    assert [request.text for request in server.requests] == [f"p{n}" for n in range(1, 5)]
    check_whole(shell, 4)


def test_a_call_that_is_not_full_goes_out_after_the_interval_though_more_may_come(
    shell: Shell, server: FaultServer
) -> None:
    process = stream(shell, server, *PACKED, interval="0.3")
    say(process, *({"id": f"t{n}", "input": f"text {n}"} for n in range(5)))
    server.wait_for_requests(1)
    say(process, *({"id": f"t{n}", "input": f"text {n}"} for n in range(5, 8)))
    server.wait_for_requests(2)
    assert process.poll() is None
    ran = shell.end(process).told(0)
    assert ran.rows["succeeded"] == 8
    assert [len(request.texts) for request in server.requests] == [5, 3]
    assert server.requests[1].at - server.requests[0].at >= 0.3


def test_with_an_interval_of_0_nothing_waits_for_others(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server, *PACKED, interval="0")
    for n in range(1, 4):
        say(process, {"id": f"t{n}", "input": f"text {n}"})
        server.wait_for_requests(n)
    shell.end(process).told(0)
    assert [request.texts for request in server.requests] == [["text 1"], ["text 2"], ["text 3"]]


def test_rows_that_share_a_call_wait_for_others_until_the_interval_or_the_end(
    shell: Shell, server: FaultServer
) -> None:
    process = stream(shell, server, *PACKED)
    for n in range(6):
        say(process, {"id": f"t{n}", "input": f"text {n}"})
        wait_until(lambda n=n: known(shell)["total"] == n + 1)
    assert server.requests == []
    shell.end(process).told(0)
    assert [len(request.texts) for request in server.requests] == [6]


def test_full_calls_go_out_before_the_interval_and_as_few_as_can_be(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server, *PACKED, "--batch-rows", "100")
    say(process, *({"id": f"t{n}", "input": f"text {n}"} for n in range(1_000)))
    server.wait_for_requests(9)  # 64 rows are looked at ahead
    assert process.poll() is None
    shell.end(process).told(0)
    assert [len(request.texts) for request in server.requests] == [100] * 10


def test_a_full_queue_is_packed_at_once_since_nothing_can_join_it(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server, *PACKED, "--max-queue", "20")
    say(process, *({"id": f"t{n}", "input": f"text {n}"} for n in range(50)))
    server.wait_for_requests(2)
    assert process.poll() is None
    shell.end(process).told(0)
    assert [len(request.texts) for request in server.requests] == [20, 20, 10]


def test_larger_priorities_go_first_among_the_rows_that_wait(shell: Shell, server: FaultServer) -> None:
    server.script(lambda request, n: Reply(hold=True) if n == 1 else None)
    process = stream(shell, server, "--concurrency", "1")
    say(process, {"id": "first", "prompt": "first"})
    server.wait_for_requests(1)
    say(process, *({"id": f"r{rank}", "prompt": f"p{rank}", "priority": rank} for rank in (0, 5, -3, 9)))
    wait_until(lambda: known(shell)["total"] == 5)
    server.release()
    shell.end(process).told(0)
    assert [request.text for request in server.requests] == ["first", "p9", "p5", "p0", "p-3"]


@linux
def test_a_producer_that_says_nothing_costs_no_work(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server)
    say(process, *prompts(1))
    wait_until(lambda: known(shell)["succeeded"] == 1)

    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    before = ticks()
    time.sleep(1.0)
    assert ticks() - before <= os.sysconf("SC_CLK_TCK") // 4
    shell.end(process).told(0)


# ---------------------------------------------------------------- back-pressure and size


def test_with_a_stuck_server_no_more_is_read_than_may_wait(shell: Shell, server: FaultServer) -> None:
    server.script(lambda request, n: Reply(hold=True))
    process = stream(shell, server, "--max-queue", "50", "--concurrency", "4")
    rows = prompts(2_000, note="x" * 1_000)
    written = 0

    def produce() -> None:
        nonlocal written
        assert process.stdin is not None
        for row in rows:
            os.write(process.stdin.fileno(), lines([row]))
            written += 1

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    server.wait_for_requests(4)
    wait_until(lambda: known(shell)["total"] == 54)
    time.sleep(0.3)
    assert known(shell) == {"total": 54, "succeeded": 0, "failed": 0, "pending": 54, "in_doubt": 0}
    assert len(server.requests) == 4
    size = len(lines(rows[:1]))
    assert len(spooled(shell)) <= 54 + 65_536 // size + 2
    assert written <= 54 + 2 * 65_536 // size + 4  # what was read ahead, and what the pipe holds
    server.release()
    producer.join(30)
    shell.end(process).told(0)
    check_whole(shell, 2_000)
    assert server.seen.most_common(1) == [("p1", 1)]


@linux
def test_twenty_thousand_rows_from_a_fast_producer_take_flat_memory(shell: Shell, server: FaultServer) -> None:
    rows = prompts(20_000, note="x" * 4_000)
    process = stream(shell, server, "--max-queue", "500", "--concurrency", "64")

    def peak() -> int:
        (text,) = (line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line)
        return int(text.split()[1])

    say(process, *rows[:4_000])
    server.wait_for_requests(3_000)
    early = peak()
    say(process, *rows[4_000:-1])
    server.wait_for_requests(19_999, timeout_s=60)
    late = peak()
    assert late - early < 24 * 1024, f"{early} KiB after 3,000 rows, {late} KiB after all: the rows are 80 MiB"
    say(process, rows[-1])
    shell.end(process).told(0)
    check_whole(shell, 20_000)
    assert len(server.requests) == 20_000


# ---------------------------------------------------------------- stops


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_wait_for_stdin_and_the_job_can_be_resumed(
    shell: Shell, server: FaultServer, number: signal.Signals, code: int
) -> None:
    process = stream(shell, server)
    say(process, *prompts(3), b'{"id": "r4", "pro')
    server.wait_for_requests(3)
    wait_until(lambda: known(shell)["succeeded"] == 3)
    ran = stop(shell, process, number, code)
    assert (ran.summary["state"], ran.rows["succeeded"]) == ("interrupted", 3)
    assert spooled(shell) == [*lines(prompts(3)).split(b"\n")[:-1], b""]
    shell.run("resume", JOB).told(0)
    check_whole(shell, 3)
    assert len(server.requests) == 3


def test_a_signal_before_the_first_row_leaves_a_job_that_takes_the_stream_later(
    shell: Shell, server: FaultServer
) -> None:
    process = stream(shell, server)
    wait_until(lambda: is_job(shell.root / JOB) and View(shell.root / JOB).get("runs"))
    time.sleep(0.3)
    stop(shell, process, signal.SIGINT, 130)
    whole(shell, server, prompts(3)).told(0)
    check_whole(shell, 3)


def test_what_waited_at_a_signal_is_run_by_resume(shell: Shell, server: FaultServer) -> None:
    server.script(lambda request, n: Reply(hold=True))
    process = stream(shell, server, "--concurrency", "2", "--max-queue", "10", "--grace", "0")
    say(process, *prompts(100))
    server.wait_for_requests(2)
    wait_until(lambda: known(shell)["total"] == 12)
    ran = stop(shell, process, signal.SIGINT, 130)
    assert ran.rows["total"] == 100, "all that was read is taken in"
    server.script(lambda request, n: None)
    shell.run("resume", JOB).told(0)
    check_whole(shell, 100)
    assert len(server.requests) == 102


def test_a_deadline_and_a_budget_stop_a_stream_as_they_stop_a_file(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server, "--deadline", "1")
    say(process, *prompts(2))
    assert process.wait(20) == 3
    assert shell.end(process).told(3).summary["reason"].startswith("deadline")
    priced = ("--price-in", "1", "--price-out", "1", "--budget", "0.0004", "--max-tokens", "100")
    process = stream(shell, server, *priced, "--job", "paid")
    say(process, *prompts(50))
    assert process.wait(20) == 3
    assert shell.end(process).told(3).summary["reason"].startswith("budget")


def test_an_unpriced_model_that_comes_later_stops_the_run_before_its_send(shell: Shell, server: FaultServer) -> None:
    priced = ("--provider", "openai", "--model", "gpt-4o-mini", "--budget", "1", "--max-tokens", "10")
    process = stream(shell, server, *priced)
    say(process, *prompts(2))
    server.wait_for_requests(2)
    say(process, {"id": "r3", "prompt": "p3", "model": "nobody-knows"})
    assert process.wait(20) == 78
    ran = shell.end(process).told(78)
    assert "nobody-knows" in ran.err
    assert sorted(server.seen) == ["p1", "p2"]
    again = shell.run("resume", JOB).told(78)
    assert "nobody-knows" in again.err
    shell.run("resume", JOB, "--price-in", "1", "--price-out", "1").told(0)
    check_whole(shell, 3)


def test_rows_that_fail_count_against_max_failures_bad_lines_among_them(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server, "--skip-invalid", "--max-failures", "2")
    say(process, *prompts(1), b"{\n", b"[]\n")
    wait_until(lambda: known(shell)["failed"] == 2)
    assert process.poll() is None
    say(process, b"17\n")
    assert process.wait(20) == 3
    assert shell.end(process).told(3).summary["reason"].startswith("max-failures")


def test_limit_ends_a_stream_at_its_row_and_resume_goes_on_with_what_was_read(
    shell: Shell, server: FaultServer
) -> None:
    process = stream(shell, server, "--limit", "4")
    say(process, *prompts(3))
    server.wait_for_requests(3)
    say(process, *prompts(9)[3:])
    assert process.wait(20) == 0
    assert shell.end(process).told(0).rows["total"] == 4
    shell.run("resume", JOB).told(0)
    assert len(server.requests) == 4
    shell.run("resume", JOB, "--limit", "100").told(0)
    check_whole(shell, 9)
    assert len(server.requests) == 9


# ---------------------------------------------------------------- bad lines


def test_a_bad_line_stops_the_stream_and_nothing_that_was_read_is_lost(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server)
    say(process, *prompts(2))
    server.wait_for_requests(2)
    say(process, b'{"id": "r3"}\n', *prompts(6)[3:])
    assert process.wait(20) == 65
    ran = shell.end(process).told(65)
    assert "line 3 has no `messages`" in ran.err
    assert "resume in.batchrun --skip-invalid" in ran.err
    assert ran.rows == {"total": 2, "succeeded": 2, "failed": 0, "pending": 0, "in_doubt": 0}
    assert "line 3" in shell.run("resume", JOB).told(65).err
    assert len(server.requests) == 2
    assert spooled(shell)[2:6] == [b'{"id": "r3"}', *lines(prompts(6)[3:]).split(b"\n")[:-1]]
    ran = shell.run("resume", JOB, "--skip-invalid", "--json").told(1)
    assert ran.rows == {"total": 6, "succeeded": 5, "failed": 1, "pending": 0, "in_doubt": 0}
    assert [(row["line"], row["error"]["kind"]) for row in shell.errors()] == [(3, "invalid")]
    assert server.seen == {f"p{n}": 1 for n in (1, 2, 4, 5, 6)}


def test_a_bad_line_may_be_mended_in_the_spool(shell: Shell, server: FaultServer) -> None:
    whole(shell, server, [*prompts(2), b'{"id": "r3", "pronpt": "p3"}\n', *prompts(5)[3:]]).told(65)
    spool = shell.root / JOB / "input.jsonl"
    spool.write_bytes(spool.read_bytes().replace(b"pronpt", b"prompt"))
    shell.run("resume", JOB).told(0)
    check_whole(shell, 5)
    assert len(server.requests) == 5


def test_an_id_that_was_there_before_is_a_bad_line(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server)
    say(process, *prompts(2))
    server.wait_for_requests(2)
    say(process, {"id": "r1", "prompt": "again"})
    assert process.wait(20) == 65
    assert "line 3 repeats custom_id `r1`, first seen on line 1" in shell.end(process).told(65).err
    rows = [*prompts(2), {"id": "r1", "prompt": "again"}, *prompts(3)[2:]]
    ran = whole(shell, server, rows, "--skip-invalid").told(1)
    assert ran.err.count("line 3: repeats custom_id") == 1
    assert (ran.rows["succeeded"], ran.rows["failed"]) == (3, 1)
    assert server.seen == {"p1": 1, "p2": 1, "p3": 1}


def test_with_skip_invalid_bad_lines_are_failed_rows_and_the_stream_goes_on(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server, "--skip-invalid")
    say(process, *prompts(1), b"oops\n", b"\n", {"id": "r1", "prompt": "again"})
    wait_until(lambda: known(shell)["failed"] == 2)
    say(process, {"id": "r2", "prompt": "p2"})
    server.wait_for_requests(2)
    ran = shell.end(process).told(1)
    assert ran.rows == {"total": 4, "succeeded": 2, "failed": 2, "pending": 0, "in_doubt": 0}
    assert [(row["line"], row["row"]) for row in shell.errors()] == [(2, "oops"), (4, {"id": "r1", "prompt": "again"})]
    assert "line 2: is no JSON" in ran.err
    assert [row["line"] for row in shell.results()] == [1, 5]
    assert server.seen == {"p1": 1, "p2": 1}


def test_a_line_beyond_all_bounds_is_skipped_unread_and_takes_no_room(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server, "--skip-invalid")
    say(process, *prompts(1))
    for _ in range(70):
        say(process, b"x" * 1_000_000)
    say(process, b"\n", {"id": "r2", "prompt": "p2"})
    ran = shell.end(process).told(1)
    assert (ran.rows["succeeded"], ran.rows["failed"]) == (2, 1)
    assert "line 2: is 70,000,000 bytes long" in ran.err
    assert (shell.root / JOB / "input.jsonl").stat().st_blocks * 512 < 1_000_000
    whole(shell, server, [*prompts(1), b"x" * 70_000_000 + b"\n", *prompts(3)[1:]], "--skip-invalid").told(1)
    assert server.seen == {"p1": 1, "p2": 1, "p3": 1}


def test_a_last_line_needs_no_newline_and_lines_are_read_as_in_files(shell: Shell, server: FaultServer) -> None:
    data = b'\xef\xbb\xbf{"id":"r1","prompt":"p1"}\r\n\n{"id":"r2","prompt":"p2"}'
    whole(shell, server, [data]).told(0)
    assert [(row["line"], row["output"]) for row in shell.results()] == [(1, "echo:p1"), (3, "echo:p2")]
    whole(shell, server, [data + b'\n{"id":"r3","prompt":"p3"}']).told(0)
    check_whole(shell, 3)
    assert len(server.requests) == 3


def test_compressed_stdin_is_refused_with_the_way_around_it(shell: Shell, server: FaultServer) -> None:
    assert "zcat" in whole(shell, server, [gzip.compress(lines(prompts(3)))]).told(65).err
    assert server.requests == []


def test_an_input_that_ends_at_once_is_a_job_without_rows(shell: Shell, server: FaultServer) -> None:
    ran = whole(shell, server, []).told(0)
    assert "no rows" in ran.err
    assert (ran.summary["state"], ran.rows["total"]) == ("complete", 0)
    asked = shell.submission(server, "--flush-interval", "1", "--job", "closed", source="-")
    closed = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&-', COMMAND, *asked],
        cwd=shell.root,
        env=shell.env,
        capture_output=True,
        check=False,
    )
    assert (closed.returncode, json.loads(closed.stdout)["rows"]["total"]) == (0, 0), closed.stderr


def test_stdin_may_be_a_file_and_what_its_reader_had_no_room_for_is_read_later(
    shell: Shell, server: FaultServer
) -> None:
    asked = shell.submission(server, "--flush-interval", "1", "--job", JOB, "--max-queue", "7", source="-")
    with shell.write("rows.jsonl", prompts(500)).open("rb") as stdin:
        shell.run(*asked, stdin=stdin).told(0)
    check_whole(shell, 500)
    assert len(server.requests) == 500


# ---------------------------------------------------------------- again


def test_a_stream_given_again_is_compared_and_goes_on_behind_what_the_job_knows(
    shell: Shell, server: FaultServer
) -> None:
    process = stream(shell, server)
    say(process, *prompts(5))
    server.wait_for_requests(5)
    wait_until(lambda: known(shell)["succeeded"] == 5)
    stop(shell, process, signal.SIGINT, 130)
    whole(shell, server, prompts(9)).told(0)
    check_whole(shell, 9)
    assert len(server.requests) == 9
    changed = [*prompts(2), {"id": "other", "prompt": "other"}, *prompts(12)[3:]]
    ran = whole(shell, server, changed).told(65)
    assert "line 3 of the input has changed" in ran.err
    assert "batchrun resume in.batchrun" in ran.err
    assert "line 3 is gone, the job knows 9 lines" in whole(shell, server, prompts(2)).told(65).err
    assert "repeats custom_id `r2`" in whole(shell, server, [*prompts(9), *prompts(2)[1:]]).told(65).err
    assert len(server.requests) == 9
    assert spooled(shell)[:-1] == [*lines(prompts(9)).split(b"\n")[:-1], *lines(prompts(2)[1:]).split(b"\n")[:-1]]


def test_rows_that_an_earlier_run_left_go_before_those_that_arrive(shell: Shell, server: FaultServer) -> None:
    server.script(lambda request, n: Reply(hold=True))
    process = stream(shell, server, "--concurrency", "1", "--grace", "0")
    say(process, *prompts(5))
    server.wait_for_requests(1)
    wait_until(lambda: known(shell)["total"] == 5)
    stop(shell, process, signal.SIGINT, 130)
    server.script(lambda request, n: None)
    ran = whole(shell, server, prompts(8), "--concurrency", "1").told(0)
    assert "1 rows were in flight when the last run died: r1" in ran.err
    assert [request.text for request in server.requests[1:]] == [f"p{n}" for n in range(1, 9)]
    check_whole(shell, 8)


def test_a_template_and_defaults_make_requests_of_what_arrives_and_of_what_is_resumed(
    shell: Shell, server: FaultServer
) -> None:
    process = stream(shell, server, "--template", "Say {{ word }}", "--max-tokens", "7")
    say(process, {"id": "a", "word": "one"})
    server.wait_for_requests(1)
    wait_until(lambda: known(shell)["succeeded"] == 1)
    process.kill()
    process.wait()
    with (shell.root / JOB / "input.jsonl").open("ab") as spool:
        spool.write(lines([{"id": "b", "word": "two"}]))
    shell.run("resume", JOB).told(0)
    assert [request.text for request in server.requests] == ["Say one", "Say two"]
    assert {request.json["max_tokens"] for request in server.requests} == {7}


def test_a_job_whose_stdin_was_complete_can_go_on_as_a_stream_and_back(shell: Shell, server: FaultServer) -> None:
    data = lines(prompts(3))
    shell.submit(server, "--job", JOB, source="-", data=data[:-1]).told(0)
    whole(shell, server, prompts(5)).told(0)
    shell.submit(server, "--job", JOB, source="-", data=lines(prompts(7))).told(0)
    check_whole(shell, 7)
    assert len(server.requests) == 7
    shell.write("file.jsonl", prompts(2))
    shell.submit(server, "--job", "other", source="file.jsonl").told(0)
    assert "file.jsonl" in whole(shell, server, prompts(3), "--job", "other").told(2).err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("in.jsonl", "--flush-interval", "2"), "--flush-interval is for stdin"),
        (("in.jsonl", "--max-queue", "2"), "--max-queue is for stdin"),
        (("-", "--job", "j", "--max-queue", "2"), "--flush-interval SECONDS"),
        (("-", "--job", "j", "--flush-interval", "soon"), "is no duration"),
        (("-", "--flush-interval", "2"), "--job"),
        (("-", "--job", "j", "--flush-interval", "2", "--max-failures", "5%"), "number of rows"),
    ],
)
def test_what_makes_no_sense_of_a_stream_is_refused(
    shell: Shell, server: FaultServer, args: tuple[str, ...], says: str
) -> None:
    shell.write("in.jsonl", prompts(1))
    ran = shell.run("submit", *args, "--base-url", server.url, "--model", "m").told(2)
    assert says in ran.err
    assert not (shell.root / "j").exists()
    assert server.requests == []


def test_resume_reads_no_stream_and_says_what_does(shell: Shell, server: FaultServer) -> None:
    whole(shell, server, prompts(1)).told(0)
    assert "batchrun submit -" in shell.run("resume", JOB, "--flush-interval", "2").told(2).err


def test_a_setting_of_the_environment_makes_streams_of_stdin_alone(shell: Shell, server: FaultServer) -> None:
    env = {"BATCHRUN_FLUSH_INTERVAL": "2", "BATCHRUN_MAX_QUEUE": "5"}
    shell.write("in.jsonl", prompts(2))
    shell.submit(server, "--job", "file", env=env).told(0)
    process = shell.start(*shell.submission(server, "--job", JOB, source="-"), stdin=subprocess.PIPE, env=env)
    say(process, *prompts(2))
    server.wait_for_requests(4)
    assert process.poll() is None
    shell.end(process).told(0)


# ---------------------------------------------------------------- kills


def test_after_a_kill_every_row_that_was_read_is_answered_once(shell: Shell, server: FaultServer) -> None:
    process = stream(shell, server, "--concurrency", "4", "--max-queue", "40")
    kill_at_request(server, process, 30)
    feeder = threading.Thread(target=feed, args=(process, prompts(500)), daemon=True)
    feeder.start()
    assert process.wait(20) == -signal.SIGKILL
    feeder.join(20)
    shell.end(process)
    server._script = lambda request, n: None
    read = len([line for line in spooled(shell)[:-1] if line])
    standing = look(shell.root / JOB)
    assert read >= 30
    assert len(standing.in_doubt) <= 4
    before = len(server.requests)
    ran = shell.run("resume", JOB, "--json").told(0)
    assert ran.rows["total"] == read
    check_whole(shell, read)
    assert len(server.requests) - before == read - len(standing.records)
    assert standing.records.items() <= look(shell.root / JOB).records.items()
    whole(shell, server, prompts(500)).told(0)
    check_whole(shell, 500)


def feed(process: subprocess.Popen[bytes], rows: list[dict[str, Any]]) -> None:
    try:
        for start in range(0, len(rows), 10):
            say(process, *rows[start : start + 10])
    except BrokenPipeError:
        pass


POINTS = ["spooled", "commit:3", "committed:3", "commit:5", "intent", "send", "reply", "settle", "ingest", "start"]


@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("point", [*POINTS, "spooled:3", "project"])
def test_a_stream_broken_anywhere_is_resumed_and_each_row_is_answered_once(
    shell: Shell, server: FaultServer, point: str, action: str
) -> None:
    process = stream(shell, server, "--concurrency", "4", env={"BATCHRUN_FAILPOINT": f"{point}:{action}"})
    rows = prompts(12)
    try:
        for n in range(0, 12, 3):
            say(process, *rows[n : n + 3])
            wait_until(lambda n=n: process.poll() is not None or len(server.requests) >= n + 3)
    except BrokenPipeError:
        pass
    ran = end(shell, process)
    assert ran.code == {"kill": -signal.SIGKILL, "raise": 74}[action], ran.err
    job = shell.root / JOB
    before = look(job)
    sent = {int(request.text[1:]) for request in server.requests}
    assert sent <= before.records.keys() | before.in_doubt | before.waiting, "a send without a durable intent"
    read = [json.loads(line)["id"] for line in spooled(shell)[:-1]] if (job / "input.jsonl").exists() else []
    resumed = shell.run("resume", JOB, "--json")
    if resumed.code == 0:
        assert [row["custom_id"] for row in shell.results()] == read
    else:
        assert "never began" in resumed.err or "no job" in resumed.err
        assert read == []
    whole(shell, server, rows, "--concurrency", "4").told(0)
    check_whole(shell, 12)
    after = look(job)
    assert before.records.items() <= after.records.items(), "a record that was shown has changed"
    assert len(server.requests) <= 12 + len(before.in_doubt)


def end(shell: Shell, process: subprocess.Popen[bytes]) -> Ran:
    """Ends the input and waits, whether or not anybody still reads."""
    try:
        return shell.end(process)
    except BrokenPipeError:
        return shell.end(process)


def test_a_line_that_a_kill_cut_off_is_dropped_and_whole_ones_without_index_are_new(
    shell: Shell, server: FaultServer
) -> None:
    whole(shell, server, prompts(3)).told(0)
    spool = shell.root / JOB / "input.jsonl"
    with spool.open("ab") as file:
        file.write(lines(prompts(5)[3:]) + b'{"id": "r6", "pro')
    ran = shell.run("resume", JOB, "--json").told(0)
    assert ran.rows["total"] == 5
    check_whole(shell, 5)
    assert spool.read_bytes() == lines(prompts(5))
    with spool.open("ab") as file:
        file.write(b'{"id": "r6"')
    shell.run("resume", JOB).told(0)
    assert spool.read_bytes() == lines(prompts(5))
    assert len(server.requests) == 5


@linux
def test_a_disk_that_is_full_stops_the_stream_and_nothing_is_sent_without_its_line(
    shell: Shell, server: FaultServer
) -> None:
    if sys.platform != "linux":
        pytest.skip("needs a limit on file sizes that raises an error")
    limit = "import resource, os, sys, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    limit += " resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); os.execv(sys.argv[1], sys.argv[1:])"
    asked = shell.submission(server, "--flush-interval", "1", "--job", JOB, source="-")
    process = subprocess.Popen(
        [sys.executable, "-c", limit, COMMAND, *asked],
        cwd=shell.root,
        env=shell.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    shell._started.append(process)
    feeder = threading.Thread(target=feed, args=(process, prompts(1_000, note="x" * 1_000)), daemon=True)
    feeder.start()
    assert process.wait(30) == 74
    feeder.join(20)
    ran = end(shell, process).told(74)
    assert "storage failed" in ran.err
    spooled_texts = {json.loads(line)["prompt"] for line in spooled(shell)[:-1]}
    assert set(server.seen) <= spooled_texts
    shell.run("resume", JOB).told(0)
    assert [row["output"][5:] for row in shell.results()] == [
        json.loads(line)["prompt"] for line in spooled(shell)[:-1]
    ]
    assert max(server.seen.values()) <= 2
