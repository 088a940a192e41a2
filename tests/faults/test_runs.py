"""Runs beside, after and instead of each other: one writer, no stale lock, a long sleep costs nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from batchrun.run.files import JobLock, make_private_dir
from tests.faults.machine import check_whole, look
from tests.faults.server import FaultServer, Reply
from tests.support import Shell, prompts, wait_until


def test_of_runs_that_start_together_one_works_and_the_others_leave_at_once(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(12))
    server.script(lambda request, n: Reply(hold=True))
    processes = [shell.start(*shell.submission(server, "--concurrency", "3")) for _ in range(3)]
    wait_until(lambda: sum(process.poll() is None for process in processes) == 1)
    server.wait_for_requests(3)  # while the one that has the job waits for its answers
    (working,) = (process for process in processes if process.poll() is None)
    for process in processes:
        if process is not working:
            assert "another run holds this job" in shell.end(process).told(75).err
    server.release()
    shell.end(working).told(0)
    check_whole(shell, 12)
    assert len(server.requests) == 12


def test_a_run_that_was_stopped_keeps_its_job_and_goes_on_where_it_was(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(12))
    server.script(lambda request, n: Reply(hold=True) if n > 6 else None)
    process = shell.start(*shell.submission(server, "--concurrency", "3"))
    server.wait_for_requests(9)
    process.send_signal(signal.SIGSTOP)
    assert shell.submit(server).code == 75
    assert shell.run("status", "--json").told(0).summary["state"] == "running"
    process.send_signal(signal.SIGCONT)
    server.release()
    shell.end(process).told(0)
    assert len(server.requests) == 12


def test_a_sleep_longer_than_every_timeout_over_which_connections_die_fails_no_row(
    shell: Shell, server: FaultServer
) -> None:
    shell.write("in.jsonl", prompts(40))
    server.delay_s = 0.1
    args = ("--concurrency", "4", "--timeout", "1", "--patience", "1", "--max-attempts", "2", "--grace", "1")
    process = shell.start(*shell.submission(server, *args))
    server.wait_for_requests(10)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    server.go_down()
    server.come_up()
    process.send_signal(signal.SIGCONT)
    done = shell.end(process).told(0)
    check_whole(shell, 40)
    assert done.rows["failed"] == 0
    assert len(server.requests) <= 40 + 4


def test_a_killed_run_leaves_no_lock_though_its_child_lives(tmp_path: Path) -> None:
    job = tmp_path / "j"
    make_private_dir(job)
    code = f"""
import os, subprocess
from pathlib import Path
from batchrun.run.files import JobLock
JobLock(Path({str(job)!r})).acquire()
child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    dead = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert dead.returncode == -signal.SIGKILL
    try:
        lock = JobLock(job)
        assert not lock.is_held_elsewhere()
        lock.acquire()
        lock.release()
    finally:
        subprocess.run(["kill", dead.stdout.decode().strip()], check=True)


def test_a_run_that_takes_over_from_a_dead_one_at_once_settles_its_doubts(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(6))
    server.script(lambda request, n: Reply(hold=True) if n > 2 else None)
    process = shell.start(*shell.submission(server, "--concurrency", "2"))
    server.wait_for_requests(4)
    process.kill()
    server.script(lambda request, n: None)
    ran = shell.submit(server).told(0)  # before anybody has waited for the dead one
    shell.end(process)
    assert "2 rows were in flight when the last run died" in ran.err
    check_whole(shell, 6)
    assert (look(shell.root / "in.batchrun").in_doubt, len(server.requests)) == (set(), 8)
