"""Flow control over real sockets: a retry that waits, and several endpoints of which one dies and comes back."""

from __future__ import annotations

import threading

from tests.faults.server import FaultServer, Reply
from tests.support import Shell, chat_reply, prompts


def test_a_waiting_retry_holds_no_slot(shell: Shell, server: FaultServer) -> None:
    # The hint of a 500 is the row's own; that of a 429 would pause the other row too.
    shell.write("in.jsonl", prompts(2))
    server.script(
        lambda request, n: Reply(500, {"error": {"message": "lost it"}}, {"retry-after": "2"}) if n == 1 else None
    )
    shell.submit(server, "--concurrency", "1").told(0)
    first, second, third = server.requests
    assert [first.text, second.text, third.text] == ["p1", "p2", "p1"]
    assert third.at - first.at >= 2
    assert server.max_in_flight == 1


def test_the_hint_of_a_refusal_holds_every_row_back(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(2))
    server.script(
        lambda request, n: Reply(429, {"error": {"message": "slow"}}, {"retry-after": "0.6"}) if n == 1 else None
    )
    shell.submit(server, "--concurrency", "1").told(0)
    first, *later = server.requests
    assert first.text == "p1"
    assert sorted(request.text for request in later) == ["p1", "p2"]  # after the pause either may be the first
    assert later[0].at - first.at >= 0.6


def test_rows_go_to_every_endpoint_and_a_dead_one_is_left_out_until_it_is_back(shell: Shell) -> None:
    shell.write("in.jsonl", prompts(1_200))
    with FaultServer(delay_s=0.1) as one, FaultServer(delay_s=0.1) as two:

        def kill_and_revive() -> None:
            two.wait_for_requests(60)
            two.go_down()
            one.wait_for_requests(len(one.requests) + 100)
            two.come_up()

        events = threading.Thread(target=kill_and_revive)
        events.start()
        flags = ["--base-url", one.url, "--base-url", two.url, "--model", "m", "--concurrency", "16", "--json"]
        ran = shell.run("submit", "in.jsonl", *flags).told(0)
        events.join()
        assert ran.rows == {"total": 1_200, "succeeded": 1_200, "failed": 0, "pending": 0, "in_doubt": 0}
        assert {row["custom_id"] for row in shell.results()} == {f"r{n}" for n in range(1, 1_201)}
        last = max(one.requests[-1].at, two.requests[-1].at)
        # Both serve again at the end.
        assert sum(request.at > last - 1.5 for request in two.requests) > 10
        assert sum(request.at > last - 1.5 for request in one.requests) > 10


def test_endpoints_of_different_providers_are_refused(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", prompts(1))
    ran = shell.submit(server, "--base-url", "https://api.groq.com/openai/v1").told(2)
    assert "different providers" in ran.err
    assert server.requests == []


def test_endpoints_are_remembered(shell: Shell) -> None:
    shell.write("in.jsonl", prompts(40))
    with FaultServer() as one, FaultServer() as two:
        for server in (one, two):
            server.script(lambda request, n: chat_reply("x", delay_s=0.05))
        flags = ["--base-url", one.url, "--base-url", two.url, "--model", "m", "--limit", "5"]
        shell.run("submit", "in.jsonl", *flags).told(0)
        before = len(one.requests), len(two.requests)
        shell.run("resume", "--limit", "40").told(0)
        assert len(one.requests) > before[0]
        assert len(two.requests) > before[1]
