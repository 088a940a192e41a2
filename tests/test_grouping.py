"""Many questions about one document pay for it once: rows that begin alike go together, one first, end to end."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from math import exp
from typing import Any

import orjson
import pytest

from batchrun.plan.schedule import Done, Flow, Schedule, Send
from batchrun.records import Call, Output, Reply, Row, Usage
from batchrun.run.prefixes import Prefixes
from batchrun.run.simcache import PromptCache
from tests.faults.server import FaultServer, Request, error
from tests.faults.server import Reply as Answer
from tests.support import Shell, parse

WORDS = ["order", "checked", "refund", "on", "its", "way", "please", "allow", "three", "days", "parcel", "warehouse"]
CHEAP = ("--price-in", "1", "--price-cached-in", "0.1", "--price-out", "0")
"""So that what a job costs is what its input costs."""


def document(number: int, size: int) -> str:
    dice = random.Random(number)
    text = [f"Document {number}: "]
    while sum(map(len, text)) < size:
        text += [f"{dice.choice(WORDS)}{dice.randrange(100)} " for _ in range(100)]
    return "".join(text)[:size]


def questions(documents: int, each: int, size: int = 10_000, seed: int = 3) -> list[dict[str, Any]]:
    """Returns rows ``d7-q3`` about documents of ``size`` bytes, shuffled."""
    texts = [document(number, size) for number in range(documents)]
    rows = [
        {
            "id": f"d{number}-q{asked}",
            "max_tokens": 20,
            "messages": [
                {"role": "system", "content": "Answer from the document alone."},
                {"role": "user", "content": f"{texts[number]}\n\nQuestion {asked}: what does it say of {asked}?"},
            ],
        }
        for number in range(documents)
        for asked in range(each)
    ]
    random.Random(seed).shuffle(rows)
    return rows


def about(request: Request) -> str:
    """Returns which document a request is about."""
    return request.text.partition(":")[0]


def test_the_first_question_about_a_document_is_answered_before_the_others_leave(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", questions(20, 10))
    server.delay_s = 0.1
    held: set[str] = set()

    def first_is_held(request: Request, n: int) -> Answer | None:
        first = about(request) not in held
        held.add(about(request))
        return Answer(hold=True) if first else None

    server.script(first_is_held)
    process = shell.start(*shell.submission(server, "--concurrency", "64"))
    server.wait_for_requests(20)
    time.sleep(0.4)
    assert Counter(map(about, server.requests)) == {f"Document {n}": 1 for n in range(20)}
    server.release()
    ran = shell.end(process).told(0)
    assert ran.rows["succeeded"] == 200
    assert "200 rows in 20 groups begin alike" in ran.err
    assert len(server.requests) == 200
    assert server.max_in_flight >= 40
    assert [row["custom_id"] for row in shell.results()] == [row["id"] for row in questions(20, 10)]


def test_documents_come_one_after_the_other_however_the_input_is_shuffled(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [*questions(15, 12), *({"id": f"s{n}", "prompt": f"p{n}"} for n in range(30))])
    shell.submit(server, "--concurrency", "1").told(0)
    order = [about(request) for request in server.requests]
    runs = [name for at, name in enumerate(order[:180]) if at == 0 or order[at - 1] != name]
    assert len(runs) <= 15 * 4  # but for rows that the packer takes early to fill a window
    assert all(name.startswith("Document") for name in order[:100])
    assert Counter(order) == {f"Document {n}": 12 for n in range(15)} | {f"p{n}": 1 for n in range(30)}


def test_leaders_that_fail_in_every_way_hold_nobody_back(shell: Shell, server: FaultServer):
    rows = questions(12, 6)
    shell.write("in.jsonl", rows)
    tries: Counter[str] = Counter()
    ways = [Answer(500), Answer(503), error(429), Answer(end="reset", raw=b""), Answer(200, b"{"), error(400)]

    def fail_twice(request: Request, n: int) -> Answer | None:
        name = about(request)
        tries[name] += 1
        return ways[(int(name.split()[1]) + tries[name]) % len(ways)] if tries[name] <= 2 else None

    server.script(fail_twice)
    ran = shell.submit(server, "--concurrency", "8", timeout_s=90)
    refused = {row["custom_id"] for row in shell.errors()}
    assert ran.rows["succeeded"] + len(refused) == 72
    assert 0 < len(refused) <= 12
    ended = [row["custom_id"] for row in (*shell.results(), *shell.errors())]
    assert Counter(ended) == Counter(row["id"] for row in rows)


def test_a_killed_job_goes_on_group_by_group_and_loses_nothing(shell: Shell, server: FaultServer):
    rows = questions(20, 10)
    shell.write("in.jsonl", rows)
    server.script(lambda request, n: Answer(hold=True) if n > 90 else None)
    process = shell.start(*shell.submission(server, "--concurrency", "4"))
    server.wait_for_requests(94)
    time.sleep(0.2)
    process.kill()
    assert shell.end(process).code == -signal.SIGKILL
    server.release()
    server.script(lambda request, n: None)
    before = len(server.requests)
    ran = shell.run("resume", "--json").told(0)
    assert ran.rows == {"total": 200, "succeeded": 200, "failed": 0, "pending": 0, "in_doubt": 0}
    assert len(server.requests) == 200 + 4
    order = [about(request) for request in server.requests[before:]]
    assert len(set(order)) <= 20
    assert sum(a != b for a, b in itertools.pairwise(order)) < 80  # shuffled it would be 100 or more
    assert [row["custom_id"] for row in shell.results()] == [row["id"] for row in rows]


def test_rows_that_are_appended_have_groups_of_their_own(shell: Shell, server: FaultServer):
    rows = questions(10, 10)
    shell.write("in.jsonl", rows)
    shell.submit(server).told(0)
    more = [row | {"id": f"{row['id']}-again"} for row in questions(10, 10, seed=4)]
    shell.write("in.jsonl", [*rows, *more])
    held: set[str] = set()

    def first_is_held(request: Request, n: int) -> Answer | None:
        first = about(request) not in held
        held.add(about(request))
        return Answer(hold=True) if first else None

    server.script(first_is_held)
    process = shell.start(*shell.submission(server))
    server.wait_for_requests(110)
    time.sleep(0.3)
    assert len(server.requests) == 110
    server.release()
    ran = shell.end(process).told(0)
    assert ran.rows["succeeded"] == 200
    assert "100 rows in 10 groups begin alike" in ran.err


def test_what_is_small_stays_in_order_unless_it_is_asked_for(shell: Shell, server: FaultServer):
    rows = questions(4, 3)
    shell.write("in.jsonl", rows)
    asked = [row["messages"][-1]["content"] for row in rows]
    for number, (flag, is_grouped) in enumerate([("auto", False), ("none", False), ("prefix", True)]):
        before = len(server.requests)
        job = ("--job", f"job{number}", "--concurrency", "1", "--group-by", flag)
        ran = shell.submit(server, *job).told(0)
        assert ("begin alike" in ran.err) is is_grouped
        assert ([request.text for request in server.requests[before:]] == asked) is not is_grouped


def test_a_job_that_was_grouped_can_go_on_in_order(shell: Shell, server: FaultServer):
    rows = questions(10, 10)
    shell.write("in.jsonl", rows)
    server.script(lambda request, n: error(401, "invalid_api_key") if n == 1 else None)
    shell.submit(server, "--concurrency", "1").told(77)
    shell.run("resume", "--concurrency", "1", "--group-by", "none", "--json").told(0)
    assert [request.text for request in server.requests[1:]] == [row["messages"][-1]["content"] for row in rows]


def test_prompts_without_a_long_beginning_in_common_are_left_alone(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [{"id": f"r{n}", "prompt": f"{n} {document(n, 6_000)}"} for n in range(60)])
    ran = shell.submit(server, "--concurrency", "1", "--group-by", "prefix").told(0)
    assert "no rows are known to begin alike" in ran.err
    assert [row.text.split()[0] for row in server.requests] == [str(n) for n in range(60)]


def test_an_estimate_tells_what_the_cache_will_serve_and_a_report_what_it_did(shell: Shell):
    shell.write("in.jsonl", questions(20, 20))
    flags = ("--provider", "sim", "--model", "m", *CHEAP, "--sim-latency", "0.02", "--json")
    none = parse(shell.run("estimate", "in.jsonl", *flags, "--group-by", "none").told(0).out)
    told = parse(shell.run("estimate", "in.jsonl", *flags).told(0).out)
    assert none["cached"] == {"share": 0, "tokens": 0, "groups": 0, "saved_usd": 0}
    assert told["cached"]["groups"] == 20
    saved = told["cached"]["saved_usd"]
    assert saved == Decimal(told["cached"]["tokens"]) * Decimal("0.9") / 1_000_000
    for name in ("min", "expected"):
        assert none["cost_usd"][name] - told["cost_usd"][name] == saved
    assert none["cost_usd"]["max"] == told["cost_usd"]["max"]
    ran = shell.run("submit", "in.jsonl", *flags).told(0).summary
    report = parse(shell.run("report", "--format", "json").told(0).out)
    cached, given = ran["tokens"]["cached"], ran["tokens"]["input"]
    assert report["cache"]["saved_usd"] == Decimal(cached) * Decimal("0.9") / 1_000_000
    assert float(report["cache"]["share"]) == pytest.approx(cached / given, abs=1e-6)
    assert float(told["cached"]["share"]) == pytest.approx(cached / given, abs=0.08)
    assert float(told["cached"]["share"]) <= cached / given  # it promises no more
    text = shell.run("report").told(0).out.decode()
    assert f"{cached / given:.1%} of the input" in " ".join(text.split())
    assert "less than at full price" in " ".join(text.split())


def test_a_report_without_a_cache_says_nothing_of_it(shell: Shell):
    shell.write("in.jsonl", [{"id": "a", "prompt": "hi"}])
    shell.run("submit", "in.jsonl", "--provider", "sim", "--model", "m", "--sim-latency", "0").told(0)
    assert "full price" not in shell.run("report").told(0).out.decode()


# ---------------------------------------------------------------- 500 documents × 20 questions


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_questions_about_each_of_500_documents_cost_a_third_where_they_are_grouped(shell: Shell):
    """In a hundredth of the time and more: a run lasts some thirty lives of the cache, as at one row a second."""
    shell.write("in.jsonl", questions(500, 20))
    costs = {}
    for how in ("none", "auto"):
        scaled = ("--sim-latency", "0.05", "--sim-cache-life", "0.5", "--concurrency", "32")
        flags = ("--job", how, "--provider", "sim", "--model", "m", *CHEAP, *scaled, "--group-by", how, "--json")
        ran = shell.run("submit", "in.jsonl", *flags, timeout_s=140).told(0)
        assert ran.rows["succeeded"] == ran.summary["requests"]["sent"] == 10_000
        costs[how] = ran.summary["cost_usd"]
        report = parse(shell.run("report", how, "--format", "json").told(0).out)
        assert report["cache"]["saved_usd"] + costs[how] == Decimal(ran.summary["tokens"]["input"]) / 1_000_000
    assert costs["auto"] <= Decimal("0.35") * costs["none"]


def rows_of(documents: list[str], each: int) -> list[tuple[int, int]]:
    rows = [(number, asked) for number in range(len(documents)) for asked in range(each)]
    random.Random(11).shuffle(rows)
    return rows


def cost_of(rows: Iterator[Row], *, rpm: int, latency_s: float) -> tuple[float, float]:
    """Runs rows through the product's own schedule against the simulated cache, its real five minutes in virtual time.

    Returns what the input costs in full-price tokens, and the seconds that it took.
    """
    dice = random.Random(5)
    schedule = Schedule(Flow(rpm=rpm), random.Random(6), 0.0)
    cache = PromptCache(300.0)
    now, cost = 0.0, 0.0
    landing: list[tuple[float, int, Call, list[bytes], int]] = []
    while True:
        if wanted := schedule.wants(now):
            calls = [Call((row,), 1, row.tokens, Decimal(0)) for row in itertools.islice(rows, wanted)]
            schedule.offer(now, calls)
            if len(calls) < wanted:
                schedule.close()
        step = schedule.next(now)
        if isinstance(step, Done):
            return cost, now
        if isinstance(step, Send):
            (row,) = step.call.rows
            beginnings = cache.beginnings("/v1/chat/completions", "m", row.body)
            lands = now + latency_s * exp(dice.gauss(0.0, 0.35))
            heapq.heappush(landing, (lands, row.line, step.call, beginnings, cache.read(now, beginnings)))
            continue
        until = getattr(step, "until", float("inf"))
        if not landing or until < landing[0][0]:
            now = max(now, until)
            continue
        now, _, call, beginnings, cached = heapq.heappop(landing)
        cache.write(now, beginnings)
        cost += call.tokens - 0.9 * cached
        (row,) = call.rows
        usage = Usage(call.tokens, 20, cached)
        schedule.settle(now, call, Reply({row.custom_id: Output(b'"ok"', b"{}", usage=usage)}, usage))


@pytest.mark.parametrize(("rpm", "at_most"), [(30, 0.25), (60, 0.35)])
def test_over_hours_of_virtual_time_grouping_cuts_the_input_cost_to_a_third(rpm: int, at_most: float):
    """500 documents of 2,500 tokens × 20 questions, shuffled, at half a row and at one row a second."""
    documents = [document(number, 10_000) for number in range(500)]
    order = rows_of(documents, 20)

    def row(line: int, path: tuple[int, ...] = ()) -> Row:
        number, asked = order[line - 1]
        content = f"{documents[number]}\n\nQuestion {asked}: what does it say of {asked}?"
        body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 20})
        return Row(line, f"r{line}", "chat", "m", body, 20, tokens=len(body) // 4, prefix=path)

    prefixes = Prefixes()
    for line in range(1, len(order) + 1):
        prefixes.add(row(line))
    shared = prefixes.find()
    assert shared.pays
    assert (shared.rows, shared.groups) == (10_000, 500)
    grouped, grouped_s = cost_of((row(*member) for member in prefixes.members()), rpm=rpm, latency_s=2.0)
    plain, plain_s = cost_of((row(line) for line in range(1, 10_001)), rpm=rpm, latency_s=2.0)
    prefixes.close()
    assert grouped <= at_most * plain
    assert grouped_s <= 1.01 * plain_s  # and it takes no longer
