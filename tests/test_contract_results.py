"""What a run leaves behind: a line per row in input order, answers of every kind kept, failures that can be mended."""

from __future__ import annotations

import json
import random
from decimal import Decimal

import pytest

from tests.faults.server import FaultServer, Reply, error, vector
from tests.support import SUMMARY, Shell, chat_reply, parse, prompts, wait_until

RESULT_KEYS = [
    "custom_id",
    "line",
    "status",
    "output",
    "model",
    "finish_reason",
    "usage",
    "cost_usd",
    "attempts",
    "latency_s",
    "metadata",
    "response",
    "error",
]


def starts_with(found, keys):
    """Asserts that an object begins with ``keys``; more may follow."""
    assert list(found)[: len(keys)] == keys


def test_a_result_and_a_failure_hold_what_the_contract_shows(shell: Shell, server: FaultServer):
    shell.write(
        "in.jsonl", ['{"id":"good","prompt":"hello","metadata":{"queue":"eu"}}', '{"prompt" : "bad", "x":1.50}']
    )
    body = {
        "id": "c-9",
        "object": "chat.completion",
        "created": 5,
        "model": "m-2026",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "refund"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 812, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 768}},
        "odd": {"deep": [1, 2, None]},
    }

    def script(request, n):
        if request.text == "bad":
            return error(400, "context_length_exceeded", "too long for the model")
        return Reply(200, body, {"x-request-id": "req_abc"})

    server.script(script)
    flags = ["--price-in", "0.15", "--price-out", "0.60", "--price-cached-in", "0.075"]
    summary = shell.submit(server, *flags).told(1).summary
    (good,) = shell.results()
    starts_with(good, RESULT_KEYS)
    cost = (44 * Decimal("0.15") + 768 * Decimal("0.075") + 3 * Decimal("0.60")) / 1_000_000
    assert good["custom_id"] == "good"
    assert good["line"] == 1
    assert good["status"] == "succeeded"
    assert good["output"] == "refund"
    assert good["model"] == "m-2026"
    assert good["finish_reason"] == "stop"
    assert good["usage"]["input_tokens"] == 812
    assert good["usage"]["output_tokens"] == 3
    assert good["usage"]["cached_tokens"] == 768
    assert good["cost_usd"] == cost
    assert good["attempts"] == 1
    assert 0 < good["latency_s"] < 10
    assert good["metadata"] == {"queue": "eu"}
    assert good["response"]["status_code"] == 200
    assert good["response"]["request_id"] == "req_abc"
    assert good["response"]["body"] == body
    assert good["error"] is None
    (bad,) = shell.errors()
    assert (bad["custom_id"], bad["line"], bad["status"], bad["attempts"]) == ("line-2", 2, "failed", 1)
    starts_with(bad["error"], ["kind", "code", "message", "status_code"])
    assert bad["error"]["kind"] == "rejected"
    assert bad["error"]["code"] == "context_length_exceeded"
    assert "too long for the model" in bad["error"]["message"]
    assert bad["error"]["status_code"] == 400
    assert bad["row"] == {"prompt": "bad", "x": Decimal("1.50")}
    assert b"1.50" in (shell.root / "in.batchrun/errors.jsonl").read_bytes()
    assert Decimal(str(summary["cost_usd"])) == cost
    assert summary["tokens"]["input"] == 812
    assert summary["tokens"]["cached"] == 768
    assert summary["rows"] == {"total": 2, "succeeded": 1, "failed": 1, "pending": 0, "in_doubt": 0}


def test_the_summary_has_the_contracts_keys_and_status_and_report_agree(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(5))
    server.script(lambda request, n: error(422, "bad", "no") if request.text == "p2" else None)
    ran = shell.submit(server, "--price-in", "1", "--price-out", "2").told(1)
    summary = ran.summary
    status = shell.run("status", "--json").told(0).summary
    report = parse((shell.root / "in.batchrun/report.json").read_bytes())
    printed = parse(shell.run("report", "--format", "json").told(0).out)
    for found in (summary, status):
        starts_with(found, list(SUMMARY))
        for name, keys in SUMMARY.items():
            if keys:
                assert list(found[name]) == keys
    for name in SUMMARY:
        assert status[name] == summary[name] == report[name] == printed[name], name
    assert summary["job"] == "in.batchrun"
    assert (summary["state"], summary["exit_code"]) == ("complete", 1)
    assert summary["requests"] == {"sent": 5, "retried": 0, "refused": 0}
    assert summary["batches"] == 1
    assert summary["in_doubt_ids"] == []
    assert summary["results"] == "in.batchrun/results.jsonl"
    assert summary["errors"] == "in.batchrun/errors.jsonl"
    given = sum(row["usage"]["input_tokens"] for row in shell.results())
    said = sum(row["usage"]["output_tokens"] for row in shell.results())
    assert (summary["tokens"]["input"], summary["tokens"]["output"]) == (given, said)
    assert summary["tokens"]["input"] == server.billed_tokens[0]
    assert Decimal(summary["cost_usd"]) == (given + 2 * said) / Decimal(1_000_000)
    assert summary["latency_s"]["p50"] <= summary["latency_s"]["p99"] <= summary["latency_s"]["max"]


def test_results_are_in_input_order_and_can_be_asked_for_in_three_ways(shell: Shell, server: FaultServer):
    waits = random.Random(5)
    shell.write("in.jsonl", prompts(60))

    def script(request, n):
        if int(request.text[1:]) % 20 == 7:
            return Reply(400, {"error": {"message": "no"}}, delay_s=waits.random() / 5)
        return Reply(delay_s=waits.random() / 5)

    server.script(script)
    ran = shell.run("submit", "in.jsonl", "--base-url", server.url, "--model", "m", "--concurrency", "30").told(1)
    assert ran.out == b""
    good = [f"r{n}" for n in range(1, 61) if n % 20 != 7]
    assert [request.text for request in server.requests] != sorted(request.text for request in server.requests)
    assert [row["custom_id"] for row in shell.results()] == good
    assert [row["custom_id"] for row in shell.errors()] == ["r7", "r27", "r47"]
    assert shell.run("results").told(0).out == (shell.root / "in.batchrun/results.jsonl").read_bytes()
    assert (
        shell.run("results", "--failed", "in.jsonl").told(0).out
        == (shell.root / "in.batchrun/errors.jsonl").read_bytes()
    )
    assert shell.run("results", "in.batchrun", "--all", "-o", "all.jsonl").told(0).out == b""
    lines = (shell.root / "all.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [f"r{n}" for n in range(1, 61)]


def test_status_results_and_report_work_while_the_run_is_on(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(12))
    server.script(lambda request, n: Reply(hold=True) if n > 8 else None)
    process = shell.start(*shell.submission(server, "--concurrency", "4"))
    server.wait_for_requests(12)
    wait_until(lambda: shell.run("status", "--json").told(0).rows["succeeded"] == 8)
    status = shell.run("status", "in.jsonl", "--json").told(0).summary
    assert status["state"] == "running"
    assert (status["rows"]["pending"], status["rows"]["in_doubt"], status["in_doubt_ids"]) == (4, 0, [])
    found = [json.loads(line) for line in shell.run("results").told(0).out.splitlines()]
    assert [row["custom_id"] for row in found] == [f"r{n}" for n in range(1, 9)]
    assert parse(shell.run("report", "--format", "json").told(0).out)["rows"]["succeeded"] == 8
    for command in ("status", "report"):
        told = shell.run(command).told(0).out.decode()
        assert "running" in told
        assert "nothing left" not in told
    server.release()
    assert shell.end(process).told(0).rows["succeeded"] == 12
    assert len(server.requests) == 12


@pytest.mark.parametrize(
    ("reply", "output", "finish"),
    [
        (chat_reply("cut sh", finish="length"), "cut sh", "length"),
        (chat_reply("", finish="content_filter"), "", "content_filter"),
        (chat_reply(None, finish="stop", refusal="I will not"), None, "refusal"),
        (chat_reply("", reasoning_content="thinking …"), "", "stop"),
    ],
    ids=["length", "content_filter", "refusal", "only-reasoning"],
)
def test_a_paid_answer_is_kept_whatever_its_finish(shell: Shell, server: FaultServer, reply, output, finish):
    reply.body["usage"] = {
        "prompt_tokens": 10,
        "completion_tokens": 20,
        "completion_tokens_details": {"reasoning_tokens": 15},
    }
    shell.write("in.jsonl", prompts(1))
    server.script(lambda request, n: reply)
    summary = shell.submit(server, "--price-in", "1", "--price-out", "1").told(0).summary
    (row,) = shell.results()
    assert len(server.requests) == 1
    assert row["status"] == "succeeded"
    assert (row["output"] or "") in {output or "", "I will not"}
    assert row["response"]["body"] == reply.body
    assert row["cost_usd"] == Decimal("0.00003")
    assert summary["tokens"]["reasoning"] == 15
    assert finish in row["finish_reason"] or finish == "refusal"
    report = shell.run("report").told(0).out.decode()
    assert finish.replace("_", " ") in report.replace("_", " ")
    if not output:
        assert "empty" in report.lower() or finish in {"refusal", "content_filter"}


@pytest.mark.parametrize("usage", [None, "null"], ids=["missing", "null"])
def test_unknown_usage_stays_unknown_and_is_counted(shell: Shell, server: FaultServer, usage):
    shell.write("in.jsonl", prompts(3))

    def script(request, n):
        if request.text != "p2":
            return chat_reply(usage={"prompt_tokens": 10, "completion_tokens": 1})
        reply = chat_reply("unknown")
        if usage == "null":
            reply.body["usage"] = None
        return reply

    server.script(script)
    summary = shell.submit(server, "--price-in", "1", "--price-out", "1").told(0).summary
    assert [row["cost_usd"] for row in shell.results()] == [Decimal("0.000011"), None, Decimal("0.000011")]
    assert summary["cost_unknown_rows"] == 1
    assert summary["cost_usd"] == Decimal("0.000022")
    assert summary["tokens"]["input"] == 20
    report = shell.run("report").told(0).out.decode()
    assert "1 row" in report
    assert "unknown" in report


def test_an_unpriced_models_rows_cost_null_and_are_counted(shell: Shell, server: FaultServer):
    rows = [{"id": "a", "prompt": "x", "model": "gpt-4o-mini"}, {"id": "b", "prompt": "x", "model": "nobody-knows-me"}]
    shell.write("in.jsonl", rows)
    server.script(
        lambda r, n: chat_reply(model=r.json["model"], usage={"prompt_tokens": 1000, "completion_tokens": 100})
    )
    summary = shell.submit(server, "--provider", "openai").told(0).summary
    known, unknown = shell.results()
    assert known["cost_usd"] == Decimal("0.00021")
    assert unknown["cost_usd"] is None
    assert summary["cost_usd"] == Decimal("0.00021")
    assert summary["cost_unknown_rows"] == 1


GARBAGE = {
    "empty": Reply(200, b""),
    "blank": Reply(200, b" \n"),
    "html": Reply(200, "<html>it works</html>"),
    "cut": Reply(200, b'{"choices":[{"mess'),
    "no object": Reply(200, b"[]"),
    "no choices": Reply(200, {"id": "x", "choices": []}),
    "short": Reply(200, b'{"a":1}', length=500, end="close"),
}


def test_a_200_that_is_no_answer_is_asked_again(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [{"id": name, "prompt": name} for name in GARBAGE])
    server.script(lambda request, n: GARBAGE[request.text] if request.repeat == 1 else None)
    ran = shell.submit(server).told(0)
    assert server.seen == dict.fromkeys(GARBAGE, 2)
    assert [row["output"] for row in shell.results()] == [f"echo:{name}" for name in GARBAGE]
    assert {row["attempts"] for row in shell.results()} == {2}
    assert ran.summary["requests"]["sent"] == 2 * len(GARBAGE)
    assert ran.summary["requests"]["retried"] == len(GARBAGE)


def test_a_200_that_is_always_garbage_fails_its_row_as_garbled_after_its_attempts(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(3))
    server.script(lambda request, n: Reply(200, b"\x00\xff garbage") if request.text == "p2" else None)
    ran = shell.submit(server, "--max-attempts", "2").told(1)
    assert server.seen == {"p1": 1, "p2": 2, "p3": 1}
    (failed,) = shell.errors()
    assert failed["error"]["kind"] == "garbled"
    assert failed["attempts"] == 2
    assert ran.rows["succeeded"] == 2
    assert "garbled" in shell.run("report").told(0).out.decode()


def test_an_error_inside_a_200_or_an_array_is_recognised(shell: Shell, server: FaultServer):
    inner = {
        "overloaded": Reply(200, {"error": {"message": "busy", "code": 503}}),
        "array": Reply(503, [{"error": {"code": 503, "message": "busy", "status": "UNAVAILABLE"}}]),
        "string": Reply(200, {"error": {"message": "slow", "code": "429"}}),
        "html": Reply(502, "<html>Bad Gateway</html>"),
        "refused": Reply(200, {"error": {"message": "context too long", "code": 400}}),
    }
    shell.write("in.jsonl", [{"id": name, "prompt": name} for name in inner])
    server.script(lambda request, n: inner[request.text] if request.repeat == 1 else None)
    shell.submit(server).told(1)
    assert server.seen == {"overloaded": 2, "array": 2, "string": 2, "html": 2, "refused": 1}
    (failed,) = shell.errors()
    assert (failed["custom_id"], failed["error"]["kind"]) == ("refused", "rejected")


def test_embeddings_come_out_as_vectors_digit_for_digit(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", ['{"id":"a","input":"un"}', '{"id":"b","input":"deux","dimensions":2}', '"trois"'])
    raw = b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.0123456789012345678,-1e-07]}],'
    raw += b'"model":"m","usage":{"prompt_tokens":3,"total_tokens":3}}'
    server.script(lambda request, n: Reply(200, raw) if request.texts == ["un"] else None)
    ran = shell.submit(server, "--endpoint", "embeddings", "--price-in", "2", "--price-out", "0").told(0)
    assert {request.path for request in server.requests} == {"/v1/embeddings"}
    first, second, third = shell.results()
    assert first["output"] == [Decimal("0.0123456789012345678"), Decimal("-1e-07")]
    assert b"0.0123456789012345678" in (shell.root / "in.batchrun/results.jsonl").read_bytes()
    assert [float(x) for x in second["output"]] == vector("deux")
    assert [float(x) for x in third["output"]] == vector("trois")
    assert first["cost_usd"] == Decimal("0.000006")
    assert ran.summary["cost_unknown_rows"] == 0
    assert any(request.json.get("dimensions") == 2 for request in server.requests)


def test_completions_and_responses_run_end_to_end(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [{"id": "a", "prompt": "un"}, {"id": "b", "prompt": "deux", "max_tokens": 9}])
    shell.submit(server, "--endpoint", "completions", "--job", "c", "--concurrency", "1").told(0)
    assert [request.path for request in server.requests] == ["/v1/completions"] * 2
    assert [row["output"] for row in shell.results("c")] == ["echo:un", "echo:deux"]
    assert server.requests[1].json["max_tokens"] == 9
    server.script(
        lambda request, n: (
            Reply(
                200,
                {
                    "id": "x",
                    "object": "response",
                    "status": "failed",
                    "error": {"code": "invalid_prompt", "message": "no such thing"},
                    "output": [],
                    "usage": {"input_tokens": 5, "output_tokens": 0},
                },
            )
            if request.text == "un"
            else None
        )
    )
    shell.submit(server, "--endpoint", "responses", "--job", "r", "--concurrency", "1", "--system", "S").told(1)
    asked = server.requests[2:]
    assert {request.path for request in asked} == {"/v1/responses"}
    body = next(request.json for request in asked if request.text == "deux")
    assert body["store"] is False
    assert body["max_output_tokens"] == 9
    assert body["instructions"] == "S"
    (good,) = shell.results("r")
    assert good["output"] == "echo:deux"
    assert good["usage"]["output_tokens"] == 1
    (bad,) = shell.errors("r")
    assert bad["error"]["code"] == "invalid_prompt"


def test_an_incomplete_response_is_kept_with_its_reason(shell: Shell, server: FaultServer):
    text = {"type": "message", "content": [{"type": "output_text", "text": "half"}]}
    body = {"id": "x", "object": "response", "status": "incomplete", "output": [text]}
    body |= {"incomplete_details": {"reason": "max_output_tokens"}, "usage": {"input_tokens": 5, "output_tokens": 9}}
    shell.write("in.jsonl", ['{"input":"x"}'])
    server.script(lambda request, n: Reply(200, body))
    shell.submit(server, "--endpoint", "responses").told(0)
    (row,) = shell.results()
    assert row["output"] == "half"
    assert row["finish_reason"] in {"length", "max_output_tokens"}
    assert len(server.requests) == 1


def test_anthropic_runs_end_to_end(shell: Shell, server: FaultServer):
    params = '{"model":"claude-x","max_tokens":10,"messages":[{"role":"user","content":"one"}],"temperature":1.0}'
    rows = ['{"custom_id":"a/b c","params":' + params + "}", '{"id":"s","prompt":"two","system":"S"}', '"three"']
    shell.write("in.jsonl", rows)
    usage = {"input_tokens": 10, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 40, "output_tokens": 5}

    def script(request, n):
        if request.text == "three" and request.repeat == 1:
            return Reply(529, {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
        content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": f"said {request.text}"}]
        body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "content": content}
        return Reply(
            200,
            body | {"stop_reason": "max_tokens", "usage": usage},
            {"request-id": "req_an", "x-request-id": "req_an"},
        )

    server.script(script)
    prices = ["--price-in", "1", "--price-out", "10", "--price-cached-in", "0.1", "--price-cache-write", "1.25"]
    args = ["--provider", "anthropic", "--base-url", server.url, "--model", "claude-y", "--max-tokens", "33", "--json"]
    env = {"ANTHROPIC_API_KEY": shell.env["OPENAI_API_KEY"], "OPENAI_API_KEY": ""}
    ran = shell.run("submit", "in.jsonl", *args, *prices, env=env).told(0)
    assert {request.path for request in server.requests} == {"/v1/messages"}
    assert {request.headers["x-api-key"] for request in server.requests} == {shell.env["OPENAI_API_KEY"]}
    assert all("authorization" not in request.headers for request in server.requests)
    by_text = {request.text: request for request in server.requests}
    assert by_text["one"].body == params.encode()
    assert by_text["one"].headers["anthropic-version"] == "2023-06-01"
    assert by_text["two"].json["system"] == "S"
    assert by_text["two"].json["max_tokens"] == 33
    assert [turn["role"] for turn in by_text["two"].json["messages"]] == ["user"]
    assert server.seen == {"one": 1, "two": 1, "three": 2}
    found = shell.results()
    assert [row["custom_id"] for row in found] == ["a/b c", "s", "line-3"]
    assert [row["output"] for row in found] == ["said one", "said two", "said three"]
    cost = (10 * 1 + 100 * Decimal("0.1") + 40 * Decimal("1.25") + 5 * 10) / 1_000_000
    assert [row["cost_usd"] for row in found] == [cost] * 3
    assert found[0]["usage"]["input_tokens"] == 150
    assert found[0]["usage"]["cached_tokens"] == 100
    assert found[0]["response"]["request_id"] == "req_an"
    assert ran.summary["cost_usd"] == 3 * cost
    assert found[0]["finish_reason"] in {"length", "max_tokens"}


def test_gemini_rows_run_end_to_end(shell: Shell, server: FaultServer):
    asked = {"contents": [{"role": "user", "parts": [{"text": "one"}]}], "generationConfig": {"maxOutputTokens": 9}}
    shell.write("in.jsonl", [{"key": "g1", "request": asked}, {"id": "g2", "prompt": "two", "system": "S"}])
    args = ["--provider", "gemini", "--base-url", server.url, "--model", "gemini-x", "--json"]
    ran = shell.run("submit", "in.jsonl", *args, env={"GEMINI_API_KEY": shell.env["OPENAI_API_KEY"]}).told(0)
    assert all(request.path.endswith("/models/gemini-x:generateContent") for request in server.requests)
    assert {request.headers["x-goog-api-key"] for request in server.requests} == {shell.env["OPENAI_API_KEY"]}
    assert [row["output"] for row in shell.results()] == ["echo:one", "echo:two"]
    assert ran.rows["succeeded"] == 2


def test_retry_failed_asks_the_failed_rows_again_with_fresh_attempts(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(6))
    server.script(lambda request, n: error(500) if request.text in {"p2", "p5"} else None)
    shell.submit(server, "--max-attempts", "1").told(1)
    assert [row["custom_id"] for row in shell.errors()] == ["r2", "r5"]
    assert shell.submit(server).told(1).rows["failed"] == 2
    assert len(server.requests) == 6
    server.script(lambda request, n: error(400, "no") if request.text == "p5" else None)
    ran = shell.run("resume", "--retry-failed", "--json").told(1)
    assert ran.rows == {"total": 6, "succeeded": 5, "failed": 1, "pending": 0, "in_doubt": 0}
    assert server.seen == {"p1": 1, "p2": 2, "p3": 1, "p4": 1, "p5": 2, "p6": 1}
    (failed,) = shell.errors()
    assert (failed["custom_id"], failed["attempts"], failed["error"]["code"]) == ("r5", 1, "no")
    server.script(lambda request, n: None)
    shell.submit(server, "--retry-failed").told(0)
    assert shell.errors() == []
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(1, 7)]
    assert next(row for row in shell.results() if row["custom_id"] == "r5")["attempts"] == 1


def test_failed_rows_can_be_mended_and_submitted_as_they_are(shell: Shell, server: FaultServer):
    rows = [
        '{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"q","messages":[{"role":"user","content":"one"}]}}',
        '{"id":"b","prompt":"two","max_tokens":5,"temperature":0.10}',
        '"three"',
    ]
    shell.write("in.jsonl", rows)
    server.script(lambda request, n: error(400, "no"))
    shell.submit(server).told(1)
    lines = (shell.root / "in.batchrun/errors.jsonl").read_bytes().splitlines()
    mended = [line[line.index(b'"row":') + 6 : -1] for line in lines]
    assert [json.loads(line) for line in mended] == [json.loads(row) for row in rows]
    shell.write("again.jsonl", mended)
    server.script(lambda request, n: None)
    shell.submit(server, source="again.jsonl").told(0)
    assert [row["output"] for row in shell.results("again.batchrun")] == ["echo:one", "echo:two", "echo:three"]
    assert {request.body for request in server.requests[3:]} == {request.body for request in server.requests[:3]}


def test_a_finished_job_has_nothing_left_to_do(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(3))
    shell.submit(server).told(0)
    before = {path.name: path.read_bytes() for path in (shell.root / "in.batchrun").glob("*.jsonl")}
    shell.submit(server).told(0)
    assert shell.run("resume", "--json").told(0).summary["state"] == "complete"
    assert len(server.requests) == 3
    assert {path.name: path.read_bytes() for path in (shell.root / "in.batchrun").glob("*.jsonl")} == before


def test_lost_projections_are_built_again_from_the_store(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(5))
    server.script(lambda request, n: error(400) if request.text == "p3" else None)
    shell.submit(server).told(1)
    job = shell.root / "in.batchrun"
    before = {name: (job / name).read_bytes() for name in ("results.jsonl", "errors.jsonl")}
    for name in ("results.jsonl", "errors.jsonl", "report.json", "report.html"):
        (job / name).unlink()
    assert shell.run("results").told(0).out == before["results.jsonl"]
    shell.run("resume").told(1)
    assert {name: (job / name).read_bytes() for name in before} == before
    assert parse((job / "report.json").read_bytes())["rows"]["failed"] == 1
    assert (job / "report.html").exists()
    assert len(server.requests) == 5


def test_a_token_limits_name_is_found_out_where_the_server_knows_only_the_other(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(8, max_tokens=5))

    def script(request, n):
        for wrong, right in (("max_tokens", "max_completion_tokens"), ("max_completion_tokens", "max_tokens")):
            if server.url and wrong in request.json and wrong == refused[0]:
                body = {"message": f"Unsupported parameter: '{wrong}'. Use '{right}' instead.", "param": wrong}
                return Reply(400, {"error": body | {"type": "invalid_request_error", "code": "unsupported_parameter"}})
        return None

    server.script(script)
    for name in ("max_tokens", "max_completion_tokens"):
        refused = [name]
        shell.submit(server, "--job", name, "--concurrency", "2").told(0)
        assert len(shell.results(name)) == 8
    assert len(server.requests) <= 16 + 4
