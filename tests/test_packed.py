"""Many rows in one call, end to end: few calls, every answer at its own row, one bad row alone, nothing twice."""

from __future__ import annotations

import json
import random
import time
from decimal import Decimal

import pytest

from tests.faults.server import FaultServer, Reply, error
from tests.support import Shell
from tests.test_llmock import llmock, verdict


def texts(count: int, seed: int = 5) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"id": f"t{n}", "input": f"text {n} " + "word " * rng.randrange(1, 12)} for n in range(count)]


def test_texts_to_embed_share_calls_and_every_vector_is_at_its_own_id(shell: Shell, server: FaultServer) -> None:
    """The server's vectors tell which text they are of."""
    shell.write("in.jsonl", texts(5_000))
    ran = shell.submit(server, "--mode", "packed", "--endpoint", "embeddings").told(0)
    assert ran.rows["succeeded"] == 5_000
    assert len(server.requests) == ran.summary["requests"]["sent"] == 3  # 5,000 rows, at most 2,048 in a call
    assert ran.summary["batches"] == 3
    from tests.faults.server import vector

    for asked, row in zip(texts(5_000), shell.results(), strict=True):
        assert row["custom_id"] == asked["id"]
        assert [float(number) for number in row["output"]] == pytest.approx(vector(asked["input"]))
    usage = [row["usage"] for row in shell.results()]
    assert all(each["usage_shared"] for each in usage)
    assert sum(each["input_tokens"] for each in usage) == ran.summary["tokens"]["input"]


def test_one_poisoned_row_fails_alone_with_few_extra_calls(shell: Shell, server: FaultServer) -> None:
    rows = texts(2_048)
    rows[1_234]["input"] = "POISON"
    shell.write("in.jsonl", rows)
    server.script(
        lambda request, n: error(400, "invalid_input", "input is invalid") if b"POISON" in request.body else None
    )
    ran = shell.submit(server, "--mode", "packed", "--endpoint", "embeddings", "--concurrency", "4").told(1)
    assert (ran.rows["succeeded"], ran.rows["failed"]) == (2_047, 1)
    assert [row["custom_id"] for row in shell.errors()] == ["t1234"]
    assert len(server.requests) <= 1 + 24


def test_a_server_that_answers_only_the_first_prompt_gets_one_row_a_call_and_one_notice(
    shell: Shell, server: FaultServer
) -> None:
    shell.write("in.jsonl", [{"id": f"r{n}", "prompt": f"p{n}"} for n in range(40)])

    def first_only(request, n):
        body = {"id": "c", "model": "m", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        return Reply(
            200, body | {"choices": [{"index": 0, "text": f"echo:{request.texts[0]}", "finish_reason": "stop"}]}
        )

    server.script(first_only)
    flags = ("--endpoint", "completions", "--mode", "packed", "--packing", "completions")
    ran = shell.submit(server, *flags).told(0)
    assert [row["output"] for row in shell.results()] == [f"echo:p{n}" for n in range(40)]
    assert ran.err.count("one row per call") == 1
    assert len(server.requests) <= 41
    shown = shell.run("report").told(0).out.decode()
    assert "calls     40 for 40 rows: as many as with one row per call" in shown


def test_rows_share_a_call_only_if_they_agree_on_what_it_says_once(shell: Shell, server: FaultServer) -> None:
    rows = [{"id": f"r{n}", "input": f"text {n}", "dimensions": 8 if n % 2 else 16} for n in range(20)]
    shell.write("in.jsonl", rows)
    shell.submit(server, "--mode", "packed", "--endpoint", "embeddings").told(0)
    assert sorted(request.json["dimensions"] for request in server.requests) == [8, 16]
    assert {len(request.json["input"]) for request in server.requests} == {10}


def test_a_kill_in_mid_batch_repeats_at_most_the_batches_in_flight(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", texts(2_000))
    server.script(lambda request, n: Reply(hold=True) if n > 6 else None)
    flags = ("--mode", "packed", "--endpoint", "embeddings", "--batch-rows", "100", "--concurrency", "4")
    process = shell.start(*shell.submission(server, *flags))
    server.wait_for_requests(10)
    time.sleep(0.2)
    process.kill()
    process.wait()
    doubted = shell.run("status", "--json").summary["in_doubt_ids"]
    assert len(doubted) == 400
    server.release()
    server.script(lambda request, n: None)
    ran = shell.run("resume", "--json").told(0)
    assert ran.rows["succeeded"] == 2_000
    assert [row["custom_id"] for row in shell.results()] == [f"t{n}" for n in range(2_000)]
    assert len(server.requests) <= 20 + 4


def test_the_price_of_a_packed_call_is_reserved_and_settled_once(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", texts(3_000))
    flags = ("--mode", "packed", "--endpoint", "embeddings", "--price-in", "1", "--price-out", "0", "--budget", "1")
    ran = shell.submit(server, *flags).told(0)
    assert ran.summary["cost_usd"] == Decimal(ran.summary["tokens"]["input"]) / 1_000_000
    assert sum(row["cost_usd"] for row in shell.results()) == ran.summary["cost_usd"]
    assert ran.summary["spent_usd"] == ran.summary["cost_usd"]


def test_estimate_report_and_server_agree_on_what_packing_did(shell: Shell, server: FaultServer) -> None:
    rows = texts(4_000)
    shell.write("in.jsonl", rows)
    flags = ("--endpoint", "embeddings", "--batch-rows", "600", "--rpm", "6000", "--price-in", "1", "--price-out", "0")
    args = ("in.jsonl", "--base-url", server.url, "--model", "m", "--json", "--mode", "packed", *flags)
    told = shell.run("estimate", *args).told(0).summary
    shell.run("submit", *args, "--job", "clean").told(0)
    clean = shell.run("report", "clean", "--format", "json").told(0).summary["packing"]
    assert told["calls"] == clean["calls"] == len(server.requests) == 7
    differ = {name for name in clean if clean[name] != told["packing"][name]}
    assert differ <= {"cost_usd", "cost_one_by_one_usd", "tokens", "fill"}  # the server counts tokens in its own way
    assert [clean["fill"][name] for name in ("rows", "bytes")] == [
        told["packing"]["fill"][n] for n in ("rows", "bytes")
    ]
    assert (clean["calls_saved"], clean["rpm_s"], clean["rpm_one_by_one_s"]) == (3_993, Decimal("0.07"), 40)
    assert (clean["binds"], clean["bound_by"]) == ("rows", {"rows": 6, "input": 1})

    server.requests.clear()
    server.script(
        lambda request, n: error(400, "invalid_input", "input is invalid") if b"POISON" in request.body else None
    )
    rows[1_234]["input"] = "POISON"
    shell.write("bad.jsonl", rows)
    summary = shell.run("submit", "bad.jsonl", *args[1:]).told(1).summary
    packing = shell.run("report", "bad.batchrun", "--format", "json").told(0).summary["packing"]
    asked = {text for request in server.requests for text in request.texts}
    assert packing["calls"] == summary["requests"]["sent"] == len(server.requests)
    assert packing["calls_one_by_one"] == len(asked) == 4_000
    assert packing["calls_saved"] == summary["calls_saved"] == 4_000 - len(server.requests)
    halved = [request for request in server.requests if "POISON" in request.texts and len(request.texts) > 1]
    assert packing["calls_split"] == len(halved) > 5
    assert packing["calls_repeated"] == len(server.requests) - 7 == 2 * len(halved)
    assert packing["cost_usd"] == packing["cost_one_by_one_usd"] == summary["cost_usd"]


def test_a_packed_job_that_was_killed_still_knows_what_its_calls_saved(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", texts(1_000))
    server.script(lambda request, n: Reply(hold=True) if n > 3 else None)
    flags = ("--mode", "packed", "--endpoint", "embeddings", "--batch-rows", "100", "--concurrency", "2")
    process = shell.start(*shell.submission(server, *flags))
    server.wait_for_requests(5)
    process.kill()
    process.wait()
    server.release()
    server.script(lambda request, n: None)
    shell.run("resume", "--json").told(0)
    packing = shell.run("report", "--format", "json").told(0).summary["packing"]
    assert packing["calls"] == len(server.requests) == 12
    assert (packing["calls_one_by_one"], packing["calls_saved"], packing["calls_repeated"]) == (1_000, 988, 2)
    assert (packing["batches"], packing["rows"]) == (12, 1_200)  # two went twice; what was not sent is not counted


def test_one_row_per_call_is_told_nothing_of_packing(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", texts(20))
    flags = ("--mode", "live", "--endpoint", "embeddings")
    ran = shell.run("submit", "in.jsonl", "--base-url", server.url, "--model", "m", *flags).told(0)
    told = shell.run("estimate", "in.jsonl", "--base-url", server.url, "--model", "m", *flags).told(0)
    for words in (ran.err, told.out.decode(), shell.run("report").told(0).out.decode()):
        assert "pack" not in words
        assert "saved" not in words
    assert shell.run("report", "--format", "json").summary["packing"] is None


def test_what_the_server_tells_of_its_quota_shows_what_the_calls_took_of_it(shell: Shell) -> None:
    shell.write("in.jsonl", texts(500))
    flags = ("--endpoint", "embeddings", "--batch-rows", "50", "--sim-rpm", "1200", "--sim-latency", "0.01")
    shell.run("submit", "in.jsonl", "--provider", "sim", *flags).told(0)
    packing = shell.run("report", "--format", "json").told(0).summary["packing"]
    assert (packing["rpm"], packing["rpm_s"], packing["rpm_one_by_one_s"]) == (1_200, Decimal("0.5"), 25)


def test_a_simulated_estimate_sends_as_many_calls_as_it_tells(shell: Shell) -> None:
    shell.write("in.jsonl", texts(1_000))
    flags = ("--endpoint", "embeddings", "--batch-rows", "64", "--simulate", "--json")
    told = shell.run("estimate", "in.jsonl", "--provider", "sim", *flags).told(0).summary
    assert told["calls"] == told["simulated"]["sends"] == 16
    assert told["simulated"]["succeeded"] == 1_000


def test_a_gateway_takes_many_prompts_in_one_call(shell: Shell) -> None:
    rows = [{"custom_id": f"g{n}", "prompt": f"p{n}", "max_tokens": 20, "temperature": 0.2} for n in range(250)]
    shell.write("in.jsonl", rows)
    flags = ["--provider", "sim", "--sim-latency", "0.01", "--mode", "packed", "--packing", "gateway-batch", "--json"]
    ran = shell.run("submit", "in.jsonl", *flags).told(0)
    assert ran.rows["succeeded"] == 250
    assert ran.summary["requests"]["sent"] == 3  # at most 100 rows in a call
    assert [row["custom_id"] for row in shell.results()] == [f"g{n}" for n in range(250)]


def test_what_cannot_share_a_call_travels_alone_beside_what_can(shell: Shell, server: FaultServer) -> None:
    rows: list[object] = [{"id": f"t{n}", "input": f"text {n}"} for n in range(10)]
    rows += [{"id": "array", "input": ["a", "b"]}]
    shell.write("in.jsonl", [json.dumps(row) for row in rows])
    ran = shell.submit(server, "--mode", "packed", "--endpoint", "embeddings").told(0)
    assert ran.rows["succeeded"] == 11
    assert sorted(len(request.json["input"]) for request in server.requests) == [2, 10]


def test_live_mode_sends_one_row_per_call_and_packed_mode_says_where_it_cannot(
    shell: Shell, server: FaultServer
) -> None:
    shell.write("in.jsonl", texts(5))
    shell.submit(server, "--mode", "live", "--endpoint", "embeddings", "--job", "a").told(0)
    assert len(server.requests) == 5
    ran = shell.run("submit", "in.jsonl", "--provider", "anthropic", "--model", "m", "--mode", "packed", "--job", "b")
    assert ran.code in (2, 78)
    assert "packing" in ran.err or "key" in ran.err


def test_llmock_takes_packed_embeddings_and_finds_no_fault(shell: Shell) -> None:
    shell.write("in.jsonl", texts(300))
    with llmock() as url:
        flags = ["--base-url", url, "--model", "text-embedding-3-small", "--mode", "packed", "--json"]
        ran = shell.run("submit", "in.jsonl", *flags).told(0)
        graded = verdict(url)
    assert ran.rows["succeeded"] == 300
    assert graded["findings"] == []
    assert graded["attempts"] == ran.summary["requests"]["sent"] == 1


def test_a_row_that_the_reply_leaves_out_is_asked_again_alone(shell: Shell, server: FaultServer) -> None:
    shell.write("in.jsonl", [{"id": f"t{n}", "input": f"text {n}"} for n in range(6)])

    def forgetful(request, n):
        if len(request.texts) < 6:
            return None
        data = [{"object": "embedding", "index": i, "embedding": [i]} for i in (5, 3, 0, 1, 2)]
        return Reply(200, {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 12}})

    server.script(forgetful)
    ran = shell.submit(server, "--mode", "packed", "--endpoint", "embeddings").told(0)
    assert ran.rows["succeeded"] == 6
    assert [request.texts for request in server.requests][1:] == [["text 4"]]
    assert [row["output"] for row in shell.results() if row["custom_id"] != "t4"] == [[0], [1], [2], [3], [5]]


def test_a_batch_that_is_too_large_is_halved_and_a_row_that_is_fails_alone(shell: Shell, server: FaultServer) -> None:
    rows = [{"id": f"t{n}", "input": f"text {n}"} for n in range(64)]
    rows[7]["input"] = "GIANT"
    shell.write("in.jsonl", rows)

    def picky(request, n):
        if len(request.texts) > 16 or "GIANT" in request.texts:
            return error(413, "request_too_large", "the request is too large")
        return None

    server.script(picky)
    ran = shell.submit(server, "--mode", "packed", "--endpoint", "embeddings").told(1)
    assert ran.rows["succeeded"] == 63
    assert [(row["custom_id"], row["error"]["kind"]) for row in shell.errors()] == [("t7", "too_large")]
    assert len(server.requests) <= 3 + 4 + 2 * 4
