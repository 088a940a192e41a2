"""The budget is a cap, as billed by a server that bills each request it works on, whether or not its answer arrives."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from decimal import Decimal

import pytest

from tests.faults.server import FaultServer, Reply, Request, error
from tests.support import Shell, chat_reply, once, parse, prompts, wait_until

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
USAGE = {"prompt_tokens": 10, "completion_tokens": 20}
BILL = Decimal("0.00021")
"""What a request of ``USAGE`` costs at the prices of ``PRICES``."""
PRICES = ["--price-in", "1", "--price-out", "10"]


def rows(count: int, **fields):
    return [{"id": f"r{n}", "prompt": f"{LONG} {n}", "max_tokens": 20} | fields for n in range(1, count + 1)]


def billing(
    server: FaultServer, lost: Callable[[Request], bool] = lambda request: False, delay_s: float = 0.02
) -> None:
    """Has every request use all that it may; the answers of ``lost`` ones never arrive."""

    def script(request: Request, n: int) -> Reply:
        if lost(request):
            return Reply(200, b"", length=10, end="reset", billed=True, delay_s=delay_s)
        return chat_reply(usage=USAGE, delay_s=delay_s)

    server.script(script)


def billed(server: FaultServer) -> Decimal:
    return BILL * server.billed.total()


def test_a_budget_under_fifty_in_flight_is_never_exceeded_as_billed_by_the_server(shell: Shell, server: FaultServer):
    lost = random.Random(3)
    billing(server, lambda request: lost.random() < 0.05)
    shell.write("in.jsonl", rows(300))
    cap = BILL * 120
    ran = shell.submit(server, "--concurrency", "50", "--budget", str(cap), *PRICES).told(3)
    assert billed(server) <= cap
    assert billed(server) >= cap / 2, "so little was spent that it tells nothing"
    assert server.max_in_flight > 20
    assert ran.summary["state"] == "stopped"
    assert "budget" in ran.summary["reason"]
    assert ran.summary["cost_usd"] <= cap
    assert ran.rows["failed"] == 0
    assert ran.rows["pending"] + ran.rows["succeeded"] == 300
    sends = len(server.requests)
    again = shell.run("resume", "--json").told(3)
    assert billed(server) <= cap
    assert len(server.requests) <= sends + 20
    assert again.rows["failed"] == 0
    more = shell.run("resume", "--budget", "1", "--json").told(0)
    assert more.rows["succeeded"] == 300
    assert len({row["custom_id"] for row in shell.results()}) == 300
    assert more.summary["cost_usd"] <= billed(server) <= 1
    report = parse((shell.root / "in.batchrun/report.json").read_bytes())
    assert report["cost_usd"] == 300 * BILL


def test_a_budget_holds_over_kills(shell: Shell, server: FaultServer):
    billing(server, delay_s=0.05)
    shell.write("in.jsonl", rows(200))
    cap = BILL * 100
    for kill in range(1, 4):
        process = shell.start(*shell.submission(server, "--concurrency", "10", "--budget", str(cap), *PRICES))
        server.wait_for_requests(20 * kill)
        process.kill()
        shell.end(process)
    wait_until(lambda: server.in_flight == 0)
    ran = shell.run("resume", "--json").told(3)
    assert billed(server) <= cap
    assert billed(server) >= cap / 2
    known = ran.summary["cost_usd"]
    assert known <= billed(server)
    assert known == BILL * ran.rows["succeeded"]


def test_rows_without_an_output_limit_do_not_break_the_cap(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [{"id": f"r{n}", "prompt": f"{LONG} {n}"} for n in range(40)])
    spent = []

    def script(request: Request, n: int) -> Reply:
        allowed = request.json.get("max_completion_tokens", request.json.get("max_tokens", 50_000))
        spent.append(allowed)
        return chat_reply(usage={"prompt_tokens": 10, "completion_tokens": allowed}, delay_s=0.02)

    server.script(script)
    ran = shell.submit(server, "--concurrency", "10", "--budget", "0.5", *PRICES)
    assert ran.code in {3, 65, 78}
    assert sum(spent) * Decimal(10) / 1_000_000 <= Decimal("0.5")


@pytest.mark.parametrize(
    "prices", [[], ["--price-in", "1"], ["--price-out", "1"]], ids=["none", "only-input", "only-output"]
)
def test_an_unpriced_model_with_a_budget_is_refused_before_any_send(shell: Shell, server: FaultServer, prices):
    shell.write("in.jsonl", rows(3))
    ran = shell.submit(server, "--budget", "5", *prices).told(78)
    assert "--price-" in ran.err
    assert "m" in ran.err
    assert server.requests == []
    assert shell.submit(server, "--budget", "5", *PRICES).told(0).rows["succeeded"] == 3


def test_one_unpriced_model_among_many_is_refused_before_any_send(shell: Shell, server: FaultServer):
    models = [{"model": "gpt-4o-mini"}] * 30 + [{"model": "nobody-knows-me"}]
    shell.write("in.jsonl", [row | model for row, model in zip(rows(31), models, strict=True)])
    ran = shell.submit(server, "--provider", "openai", "--budget", "5").told(78)
    assert "nobody-knows-me" in ran.err
    assert server.requests == []


def test_a_budget_too_small_for_one_row_sends_nothing(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", rows(3))
    ran = shell.submit(server, "--budget", "0.0001", *PRICES).told(3)
    assert server.requests == []
    assert ran.rows == {"total": 3, "succeeded": 0, "failed": 0, "pending": 3, "in_doubt": 0}
    assert ran.summary["cost_usd"] == 0


def test_a_refused_request_gives_its_reservation_back(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", rows(10))
    server.script(once(lambda request: error(429, "rate_limit_exceeded", retry_after="0.05")))
    # room for ten and a little, so that a reservation kept by one of ten refusals would end the run
    estimated = shell.run("estimate", "in.jsonl", "--base-url", server.url, "--model", "m", *PRICES, "--json").told(0)
    cap = Decimal(str(estimated.summary["cost_usd"]["max"])) * Decimal("1.2")
    server.script(
        lambda request, n: (
            error(429, "rate_limit_exceeded", retry_after="0.05") if request.repeat == 1 else chat_reply(usage=USAGE)
        )
    )
    ran = shell.submit(server, "--budget", str(cap), "--concurrency", "2", *PRICES).told(0)
    assert ran.rows["succeeded"] == 10
    assert ran.summary["requests"]["refused"] == 10
    assert ran.summary["cost_usd"] == 10 * BILL


def test_costs_are_exact_to_the_last_digit(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", rows(30))
    usage = random.Random(1)
    given: list[int] = []

    def script(request: Request, n: int) -> Reply:
        tokens = {"prompt_tokens": usage.randrange(1, 10_000), "completion_tokens": usage.randrange(1, 1000)}
        given.append(tokens["prompt_tokens"] * 3 + tokens["completion_tokens"] * 7)
        return chat_reply(usage=tokens)

    server.script(script)
    summary = shell.submit(server, "--price-in", "0.0300000000000000003", "--price-out", "0.07").told(0).summary
    prompt = sum(row["usage"]["input_tokens"] for row in shell.results())
    said = sum(row["usage"]["output_tokens"] for row in shell.results())
    cost = (prompt * Decimal("0.0300000000000000003") + said * Decimal("0.07")) / 1_000_000
    assert summary["cost_usd"] == cost == sum(row["cost_usd"] for row in shell.results())
    assert str(cost.normalize()) in shell.run("status", "--json").out.decode()


def test_the_report_keeps_known_unknown_and_wasted_money_apart(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", rows(4))

    def script(request: Request, n: int) -> Reply | None:
        last = request.text.rsplit(" ", 1)[1]
        if last == "1" and request.repeat == 1:
            return error(500)
        if last == "2":
            return chat_reply("no usage")
        if last == "3":
            return error(400, "no")
        return chat_reply(usage=USAGE)

    server.script(script)
    summary = shell.submit(server, *PRICES).told(1).summary
    assert summary["cost_usd"] == 2 * BILL
    assert summary["cost_unknown_rows"] == 1
    assert summary["requests"] == {"sent": 5, "retried": 1, "refused": 0}
    report = shell.run("report").told(0).out.decode()
    assert "Wasted" in report or "wasted" in report
    assert "unknown" in report


def test_max_failures_stops_when_more_have_failed_and_outranks_failed_rows(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(60))
    server.script(lambda request, n: error(400, "no") if int(request.text[1:]) % 2 == 0 else None)
    ran = shell.submit(server, "--max-failures", "3", "--concurrency", "2").told(3)
    assert 4 <= ran.rows["failed"] <= 4 + 1
    assert ran.rows["pending"] >= 48
    assert len(server.requests) <= 12
    assert "failures" in ran.summary["reason"] or "failed" in ran.summary["reason"]
    ran = shell.run("resume", "--max-failures", "100%", "--json").told(1)
    assert (ran.rows["failed"], ran.rows["succeeded"]) == (30, 30)
    assert max(server.seen.values()) == 1
    exact = shell.submit(server, "--max-failures", "30", "--job", "exact").told(1)
    assert exact.rows["failed"] == 30


def test_a_share_of_failures_stops_the_run(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(100))
    server.script(lambda request, n: error(400, "no"))
    ran = shell.submit(server, "--max-failures", "10%", "--concurrency", "2").told(3)
    assert 0 < ran.rows["failed"] <= 13
    assert ran.rows["pending"] == 100 - ran.rows["failed"]
    assert len(server.requests) == ran.rows["failed"]


def test_a_deadline_stops_the_run_and_leaves_it_resumable(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(100))
    server.delay_s = 0.2
    ran = shell.submit(server, "--deadline", "1s", "--concurrency", "4").told(3)
    assert 0 < ran.rows["succeeded"] < 60
    assert ran.rows["failed"] == 0
    assert ran.rows["pending"] == 100 - ran.rows["succeeded"]
    assert "deadline" in ran.summary["reason"]
    assert "resume" in ran.err
    server.delay_s = 0
    ran = shell.run("resume", "--deadline", "1h", "--json").told(0)
    assert ran.rows["succeeded"] == 100
    assert max(server.seen.values()) == 1


def test_a_stop_by_signal_keeps_what_was_paid(shell: Shell, server: FaultServer):
    billing(server, delay_s=0.3)
    shell.write("in.jsonl", rows(50))
    process = shell.start(*shell.submission(server, "--concurrency", "5", "--budget", "1", *PRICES))
    server.wait_for_requests(5)
    process.send_signal(signal.SIGINT)
    ran = shell.end(process).told(130)
    assert ran.summary["cost_usd"] == billed(server) == BILL * ran.rows["succeeded"]
