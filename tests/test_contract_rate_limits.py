"""Rate limits, refusals, outages and bad replies: as many sends as it takes, as few as may be, no row lost to them."""

from __future__ import annotations

import gzip
import json
import time
from email.utils import formatdate

import pytest

from tests.faults.server import FaultServer, Reply, error
from tests.support import Shell, chat_reply, once, prompts

SKEW_S = 365 * 86_400
"""How far the server's clock is ahead of ours."""


def date(after_s: float) -> str:
    return formatdate(time.time() + SKEW_S + after_s, usegmt=True)


def hinted(**headers: str) -> Reply:
    return error(429, "rate_limit_exceeded", "slow down", "requests", **headers)


@pytest.mark.parametrize("status", [429, 503, 529, 498])
def test_refusals_never_use_up_a_rows_attempts(shell: Shell, server: FaultServer, status):
    shell.write("in.jsonl", prompts(6))
    server.script(lambda request, n: error(status, "busy", retry_after="0.05") if request.repeat <= 3 else None)
    ran = shell.submit(server, "--max-attempts", "1", "--concurrency", "3").told(0)
    assert ran.rows["succeeded"] == 6
    assert server.seen == {f"p{n}": 4 for n in range(1, 7)}
    assert ran.summary["requests"] == {"sent": 24, "retried": 18, "refused": 18}
    assert {row["attempts"] for row in shell.results()} == {4}


def test_a_row_that_always_fails_is_sent_exactly_max_attempts_times(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(12))
    server.script(lambda request, n: error(500, "server_error", "boom") if request.text == "p5" else None)
    ran = shell.submit(server, "--max-attempts", "3").told(1)
    assert server.seen == {f"p{n}": 3 if n == 5 else 1 for n in range(1, 13)}
    (failed,) = shell.errors()
    assert (failed["custom_id"], failed["attempts"], failed["error"]["status_code"]) == ("r5", 3, 500)
    assert failed["error"]["kind"] == "overloaded"
    assert "boom" in failed["error"]["message"]
    assert ran.summary["requests"] == {"sent": 14, "retried": 2, "refused": 0}


def test_every_way_to_lose_a_reply_is_asked_again_once(shell: Shell, server: FaultServer):
    lost = {
        "408": error(408),
        "409": error(409),
        "500": error(500),
        "502": Reply(502, "<html>Bad Gateway</html>"),
        "504": error(504),
        "reset": Reply(200, b"", length=10, end="reset"),
        "close": Reply(raw=b"", end="close"),
        "short": Reply(200, b'{"choices"', length=400, end="close"),
        "half a head": Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-le", end="close"),
        "no http": Reply(raw=b"\x16\x03\x01 hello\r\n\r\n", end="close"),
        "drip": Reply(drip_s=0.05),
        "hang": Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{", end="hang"),
        "bomb": Reply(200, gzip.compress(b" " * 100_000_000), {"content-encoding": "gzip"}),
        "deep": Reply(200, b"[" * 200_000 + b"]" * 200_000),
    }
    # two good rows after each, so that this is no outage
    names = [name for bad in lost for name in (bad, f"{bad} +", f"{bad} ++")]
    shell.write("in.jsonl", [{"id": name, "prompt": name} for name in names])
    server.script(once(lambda request: lost.get(request.text)))
    ran = shell.submit(server, "--timeout", "1", "--max-attempts", "2", "--concurrency", "3").told(0)
    assert server.seen == {name: 2 if name in lost else 1 for name in names}
    assert [row["output"] for row in shell.results()] == [f"echo:{name}" for name in names]
    assert [row["attempts"] for row in shell.results()] == [2 if name in lost else 1 for name in names]
    assert ran.summary["requests"] == {"sent": 4 * len(lost), "retried": len(lost), "refused": 0}


def test_what_asking_again_cannot_mend_is_asked_once(shell: Shell, server: FaultServer):
    own = {
        "400": error(400, "invalid_value", "bad value"),
        "404": error(404, "not_found", "nothing here"),
        "413": error(413, "request_too_large", "too large"),
        "422": Reply(422, {"detail": [{"loc": ["body"], "msg": "wrong type"}]}),
        "filter": error(400, "content_filter", "filtered"),
        "context": error(400, "context_length_exceeded", "too long"),
        "429": error(429, "rate_limit_exceeded", "Request too large for m: Limit 1000, Requested 5000.", "tokens"),
        "never": error(500, "odd", x_should_retry="false"),
    }
    shell.write("in.jsonl", [{"id": name, "prompt": name} for name in [*own, "fine", "again"]])
    again = once(lambda request: error(400, "odd", x_should_retry="true"))
    server.script(lambda request, n: again(request, n) if request.text == "again" else own.get(request.text))
    ran = shell.submit(server).told(1)
    assert server.seen == dict.fromkeys([*own, "fine"], 1) | {"again": 2}
    assert ran.rows == {"total": 10, "succeeded": 2, "failed": 8, "pending": 0, "in_doubt": 0}
    kinds = {row["custom_id"]: row["error"]["kind"] for row in shell.errors()}
    assert kinds["429"] == kinds["413"] == "too_large"
    assert kinds["400"] == kinds["422"] == "rejected"
    assert "wrong type" in next(row for row in shell.errors() if row["custom_id"] == "422")["error"]["message"]


def test_the_hints_of_a_refusal_are_kept_to_and_nonsense_is_ignored(shell: Shell, server: FaultServer):
    hints: list[tuple[dict[str, str], float]] = [
        ({"retry_after": "1"}, 1.0),
        ({"retry_after": "0.4"}, 0.4),
        ({"retry_after_ms": "350"}, 0.35),
        ({"retry_after_ms": "300", "retry_after": "30"}, 0.3),
        ({"retry_after": date(2), "date": date(0)}, 1.0),
        ({"retry_after": date(-9), "date": date(0)}, 0.0),
        ({"retry_after": "0"}, 0.0),
        ({"retry_after": "-5"}, 0.0),
        ({"retry_after": "nan"}, 0.0),
        ({"retry_after": "inf"}, 0.0),
        ({"retry_after": "soon"}, 0.0),
        ({"retry_after": ""}, 0.0),
        ({"retry_after": "1e400"}, 0.0),
    ]
    shell.write("in.jsonl", prompts(len(hints)))
    server.script(once(lambda request: hinted(**hints[int(request.text[1:]) - 1][0])))
    shell.submit(server, "--concurrency", "1", "--max-attempts", "1").told(0)
    assert set(server.seen.values()) == {2}
    for place, request in enumerate(server.requests[:-1]):
        if request.repeat == 1:
            headers, least_s = hints[int(request.text[1:]) - 1]
            waited_s = server.requests[place + 1].at - request.at
            assert waited_s >= least_s * 0.99, headers
            assert waited_s < least_s + 6, headers


def test_an_hour_long_hint_is_not_sent_into_and_fails_no_row(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(20))
    server.script(lambda request, n: hinted(retry_after="3600") if request.text == "p3" else None)
    ran = shell.submit(server, "--concurrency", "2", "--deadline", "2s").told(3)
    assert ran.rows["failed"] == 0
    assert ran.rows["succeeded"] + ran.rows["pending"] == 20
    assert server.seen["p3"] == 1
    assert len(server.requests) <= 5
    assert ran.took_s < 10


def test_a_servers_quota_is_found_and_no_row_fails_by_it(shell: Shell):
    shell.write("in.jsonl", prompts(120))
    with FaultServer(delay_s=0.02, requests_per_s=40, burst=20) as server:
        ran = shell.submit(server, "--max-attempts", "1").told(0)
        assert ran.rows["succeeded"] == 120
        assert len(server.requests) == 120 + server.refused
        assert server.refused <= 40
        assert ran.summary["requests"]["refused"] == server.refused
        assert server.billed.total() == 120


def test_a_limit_of_requests_in_flight_is_found_and_no_row_fails_by_it(shell: Shell):
    shell.write("in.jsonl", prompts(200))
    with FaultServer(delay_s=0.05, max_in_flight_allowed=8) as server:
        ran = shell.submit(server, "--max-attempts", "1").told(0)
        assert ran.rows["succeeded"] == 200
        assert server.billed.total() == 200
        assert server.refused <= 100


@pytest.mark.parametrize("flag", ["--concurrency", "--max-concurrency"])
def test_in_flight_is_never_above_the_ceiling(shell: Shell, server: FaultServer, flag):
    shell.write("in.jsonl", prompts(60))
    server.delay_s = 0.05
    shell.submit(server, flag, "5").told(0)
    assert server.max_in_flight == 5
    assert server.connections <= 5


def test_requests_and_tokens_per_minute_are_kept_to(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(100))
    shell.submit(server, "--rpm", "30", "--deadline", "3s", "--job", "rpm").told(3)
    assert 0 < len(server.requests) <= 30 + 30 * 4 / 60
    seen = len(server.requests)
    server.script(lambda request, n: chat_reply(usage={"prompt_tokens": 60, "completion_tokens": 40}))
    shell.write("tpm.jsonl", [{"id": f"t{n}", "prompt": "word " * 52, "max_tokens": 40} for n in range(100)])
    shell.submit(server, "--tpm", "2000", "--deadline", "3s", source="tpm.jsonl").told(3)
    # a full minute's allowance at once, and what three seconds add to it
    assert 0 < len(server.requests) - seen <= 2000 * 65 / 60 / 100 + 1


def test_an_outage_fails_no_row_and_is_not_hammered(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(150))
    server.delay_s = 0.1
    process = shell.start(*shell.submission(server, "--concurrency", "10", "--max-attempts", "3"))
    server.wait_for_requests(50)
    server.go_down()
    connections = server.connections
    time.sleep(2)
    server.come_up()
    ran = shell.end(process).told(0)
    assert ran.rows == {"total": 150, "succeeded": 150, "failed": 0, "pending": 0, "in_doubt": 0}
    assert len(server.requests) <= 150 + 10
    assert server.connections - connections <= 20
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(1, 151)]


def test_resets_on_accept_use_up_no_attempts_where_nothing_was_read(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(5))
    server.reset_on_accept = 3
    ran = shell.submit(server, "--concurrency", "1").told(0)
    assert ran.rows["succeeded"] == 5
    assert server.seen == {f"p{n}": 1 for n in range(1, 6)}


def test_kept_connections_that_went_stale_cost_no_row(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(30))
    server.script(lambda request, n: Reply(end="close"))
    ran = shell.submit(server, "--concurrency", "2").told(0)
    assert ran.rows["succeeded"] == 30
    assert set(server.seen.values()) == {1}


def test_an_answers_bytes_arrive_whole_whatever_their_form(shell: Shell, server: FaultServer):
    text = "é😀 " * 2000 + "\u2028\u0085\x1b[0m"
    body = chat_reply(text, usage={"prompt_tokens": 1, "completion_tokens": 1})
    plain = json.dumps(body.body).encode()
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    for start in range(0, len(plain), 4000):
        piece = plain[start : start + 4000]
        chunked += b"%x\r\n%b\r\n" % (len(piece), piece)
    forms = {
        "gzip": Reply(200, gzip.compress(plain), {"content-encoding": "gzip"}),
        "chunked": Reply(raw=chunked + b"0\r\n\r\n"),
        "until close": Reply(raw=b"HTTP/1.0 200 OK\r\n\r\n" + plain, end="close"),
        "blank lines": Reply(200, b"\n\n\n" + plain),
        "late length": Reply(200, plain, length=-1, end="close"),
    }
    shell.write("in.jsonl", [{"id": name, "prompt": name} for name in forms])
    server.script(lambda request, n: forms[request.text])
    shell.submit(server, "--concurrency", "2").told(0)
    assert server.seen == dict.fromkeys(forms, 1)
    assert [row["output"] == text for row in shell.results()] == [True] * len(forms)
