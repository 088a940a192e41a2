from __future__ import annotations

import json
from decimal import Decimal

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.records import (
    Doubted,
    Noted,
    Opened,
    Reopened,
    Returned,
    RunEnded,
    RunStarted,
    Sampled,
    Sent,
    Settled,
    Usage,
)
from batchrun.report.metrics import JobStanding, Tally, dumps, report, summary

UNHURRIED = settings(deadline=None)  # a shared machine may pause for longer than any deadline

ZERO = Decimal(0)


def settled(line, **changed):
    values = {
        "line": line,
        "custom_id": f"t-{line}",
        "status": "succeeded",
        "record": b"{}",
        "sends": 1,
        "kind": None,
        "code": None,
        "detail": None,
        "model": "gpt-5-mini",
        "usage": Usage(800, 30, 700, 0, 10),
        "cost_usd": Decimal("0.00021"),
        "lost_usd": ZERO,
        "estimated_tokens": 1000,
        "finish_reason": "stop",
        "empty": False,
        "queue_s": 1.0,
        "service_s": 0.5,
        "total_s": 1.5,
        "at": 100.0 + line,
    }
    return Settled(**{**values, **changed})


def failed(line, **changed):
    about = {"kind": "rejected", "code": "context_length_exceeded", "detail": "too long", "usage": None}
    return settled(line, **{"status": "failed", "cost_usd": None, "finish_reason": None, **about, **changed})


def returned(line, **changed):
    values = {
        "line": line,
        "sends": 1,
        "attempts": 1,
        "kind": "rate_limited",
        "code": "rate_limit_exceeded",
        "status": 429,
        "detail": "slow down",
        "service_s": 0.1,
        "usage": None,
        "cost_usd": None,
        "lost_usd": ZERO,
        "model": "gpt-5-mini",
        "at": 100.0,
    }
    return Returned(**{**values, **changed})


def sent(line, send=1):
    return Sent(line, send, 1, Decimal("0.01"), 100.0 + line, f"t-{line}")


def standing(**changed):
    values = {
        "job": "prompts.batchrun",
        "input": "prompts.jsonl",
        "state": "complete",
        "reason": "every row is settled",
        "exit_code": 0,
        "total": 10,
        "pending": 0,
        "results": "prompts.batchrun/results.jsonl",
        "errors": "prompts.batchrun/errors.jsonl",
    }
    return JobStanding(**{**values, **changed})


def told(*operations):
    tally = Tally()
    for operation in operations:
        tally.add(operation)
    return tally


def a_job():
    """Ten rows in two runs: nine succeed, one fails; a refusal, a timeout, a doubt."""
    return [
        RunStarted(1, 100.0, 10),
        Opened(1, 10, 9_000, 40_000, 10_000, 100, 1 << 20, "input"),
        *(sent(line) for line in range(1, 11)),
        returned(2),
        returned(3, kind="timeout", code=None, status=None, lost_usd=Decimal("0.01"), detail="no reply in 60 s"),
        returned(4, kind="garbled", code=None, status=200, usage=Usage(50, 5), cost_usd=Decimal("0.00002")),
        settled(1),
        Sampled(104.0, 4.0, 9, 16, 1, 10, 1, 830, 0.5, "requests per minute"),
        Noted(104.0, "limit", "16 → 8 rate_limited"),
        # The run is killed: line 10 is in doubt.
        Doubted(10, "t-10", Decimal("0.01"), True, 5000.0),
        RunStarted(2, 5000.0, 10),
        *(sent(line, 2) for line in (2, 3, 4, 10)),
        *(settled(line, at=5001.0) for line in range(2, 9)),
        failed(9, at=5001.0),
        settled(10, usage=None, cost_usd=None, finish_reason="length", empty=True, at=5002.0),
        Sampled(5002.0, 2.0, 4, 8, 9, 4, 0, 6000, 0.0, "concurrency"),
        RunEnded(2, 5002.0, 2.5, "complete", "every row is settled", 1),
    ]


def test_the_summary_has_the_contracts_keys_in_their_order_and_the_right_totals():
    job = summary(told(*a_job()), standing(exit_code=1))
    assert list(job)[:17] == [
        "job",
        "state",
        "reason",
        "exit_code",
        "rows",
        "in_doubt_ids",
        "requests",
        "batches",
        "tokens",
        "cost_usd",
        "cost_unknown_rows",
        "elapsed_s",
        "rows_per_s",
        "latency_s",
        "binding",
        "results",
        "errors",
    ]
    assert job["rows"] == {"total": 10, "succeeded": 9, "failed": 1, "pending": 0, "in_doubt": 0}
    assert job["requests"] == {"sent": 14, "retried": 4, "refused": 1}
    assert job["tokens"] == {"input": 6450, "output": 245, "cached": 5600, "reasoning": 80}
    assert job["cost_usd"] == Decimal("0.0017")  # 8 × 0.00021 and the garbled attempt
    assert job["cost_unknown_rows"] == 1
    assert job["spent_usd"] == Decimal("0.0217")  # and a timeout and a doubt at their worst
    assert job["doubted"] == 1
    # A killed run lasted at least until the last thing known of it: line 10's intent at 110.
    assert job["elapsed_s"] == 10.0 + 2.5
    assert job["rows_per_s"] == 10 / 12.5
    assert job["latency_s"] == {"p50": 0.5, "p90": 0.5, "p95": 0.5, "p99": 0.5, "max": 0.5}
    assert job["binding"] == "requests per minute"


def test_the_report_starts_with_the_summary_and_keeps_known_and_unknown_money_apart():
    tally = told(*a_job())
    document = report(tally, standing())
    head = summary(tally, standing())
    assert dict(list(document.items())[: len(head)]) == head
    assert document["wasted"] == {
        "cost_usd": Decimal("0.00002"),
        "sends": 1,
        "tokens": 55,
        "lost_usd": Decimal("0.01"),
        "lost_sends": 1,
    }
    assert document["doubts"] == {
        "rows": 1,
        "resent": 1,
        "left_failed": 0,
        "reserved_usd": Decimal("0.01"),
        "ids": ["t-10"],
    }
    (model,) = document["models"]
    assert (model["rows"], model["cost_unknown_rows"], model["usage_unknown_rows"]) == (9, 1, 1)
    assert model["estimate"] == {
        "rows": 8,
        "estimated_tokens": 8000,
        "actual_tokens": 6400,
        "actual_per_estimated": 0.8,
    }
    assert document["batching"]["fill"] == 0.9
    assert document["latency"]["succeeded"]["queue"]["p99"] == 1.0
    assert document["latency"]["succeeded"]["total"]["max"] == 1.5
    assert document["latency"]["failed"]["service"]["count"] == 1
    assert document["finish_reasons"] == {"stop": 8, "length": 1}
    assert document["empty_outputs"] == 1
    assert [(run["run"], run["state"]) for run in document["runs"]["kept"]] == [(1, None), (2, "complete")]
    assert [point["elapsed_s"] for point in document["timeline"]] == [4.0, 6.0]


def test_faults_are_counted_by_kind_and_code_with_examples():
    document = report(told(*a_job()), standing())
    assert [(fault["kind"], fault["code"], fault["status"], fault["sends"]) for fault in document["faults"]] == [
        ("garbled", None, 200, 1),
        ("rate_limited", "rate_limit_exceeded", 429, 1),
        ("rejected", "context_length_exceeded", None, 1),
        ("timeout", None, None, 1),
    ]
    example = {"line": 9, "custom_id": "t-9", "code": "context_length_exceeded", "message": "too long"}
    assert document["failures"] == [{"kind": "rejected", "rows": 1, "examples": [example]}]


@pytest.mark.parametrize(
    ("kind", "status", "refused"),
    [
        ("rate_limited", 429, 1),
        ("rate_limited", 200, 1),
        ("overloaded", 503, 1),
        ("overloaded", 529, 1),
        ("overloaded", 498, 1),
        ("overloaded", 500, 0),
        ("overloaded", 504, 0),
        ("timeout", None, 0),
        ("network", None, 0),
    ],
)
def test_refused_counts_what_was_answered_and_not_processed(kind, status, refused):
    assert told(returned(1, kind=kind, status=status)).refused == refused


def test_a_reopened_row_is_no_longer_failed_and_its_money_stays_spent():
    tally = told(
        failed(1, lost_usd=Decimal("0.3")),
        failed(2, cost_usd=Decimal("0.1"), usage=Usage(5, 5)),
        failed(3, kind="too_large", unsent=True),
        Reopened(1, "rejected", unsent=False, at=200.0),
        Reopened(3, "too_large", unsent=True, at=200.0),
    )
    document = report(tally, standing())
    assert (document["rows"]["failed"], document["rows_unsent"], document["rows_reopened"]) == (1, 0, 2)
    assert [(failure["kind"], failure["rows"]) for failure in document["failures"]] == [("rejected", 1)]
    assert [example["line"] for example in document["failures"][0]["examples"]] == [2]
    assert document["spent_usd"] == Decimal("0.4")


def test_every_failed_row_reopened_leaves_no_failure():
    rows = [failed(line, kind=f"kind {line % 60}") for line in range(600)]
    tally = told(*rows, *(Reopened(row.line, row.kind, unsent=False, at=0.0) for row in rows))
    assert (tally.failed, tally.failures) == (0, {})


def test_a_job_without_rows_has_a_summary_of_zeros_and_nulls():
    job = summary(Tally(), standing(total=0))
    assert job["latency_s"] == {"p50": None, "p90": None, "p95": None, "p99": None, "max": None}
    assert (job["cost_usd"], job["rows_per_s"], job["binding"]) == (0, 0.0, None)


def test_what_the_standing_knows_better_wins():
    job = summary(
        told(*a_job()),
        standing(
            state="running",
            exit_code=None,
            elapsed_s=99.0,
            binding="budget",
            in_doubt_ids=("a",),
            reserved_usd=Decimal(2),
        ),
    )
    assert (job["elapsed_s"], job["binding"], job["reserved_usd"]) == (99.0, "budget", 2)
    assert (job["rows"]["in_doubt"], job["in_doubt_ids"], job["exit_code"]) == (1, ["a"], None)


# ---------------------------------------------------------------- laws of the fold

models = st.sampled_from(["gpt-5-mini", "claude-sonnet-4-5", "m|x"])
moneys = st.none() | st.decimals(0, 1000, places=12)
spans = st.floats(0, 1e5)
uses = st.none() | st.builds(Usage, *[st.integers(0, 10**6)] * 5)
ids = st.text(max_size=8)
kinds = st.sampled_from(["rate_limited", "overloaded", "timeout", "rejected", "garbled"])
settlements = st.builds(
    Settled,
    line=st.integers(1, 50),
    custom_id=ids,
    status=st.sampled_from(["succeeded", "failed"]),
    record=st.just(b""),
    sends=st.integers(0, 5),
    kind=st.none() | kinds,
    code=st.none() | ids,
    detail=st.none() | ids,
    model=models,
    usage=uses,
    cost_usd=moneys,
    lost_usd=moneys.map(lambda usd: usd or ZERO),
    estimated_tokens=st.integers(0, 1000),
    finish_reason=st.none() | ids,
    empty=st.booleans(),
    queue_s=spans,
    service_s=spans,
    total_s=spans,
    at=spans,
    unsent=st.booleans(),
)
returns = st.builds(
    Returned,
    line=st.integers(1, 50),
    sends=st.just(1),
    attempts=st.just(1),
    kind=kinds,
    code=st.none() | ids,
    status=st.none() | st.integers(400, 600),
    detail=ids,
    service_s=spans,
    usage=uses,
    cost_usd=moneys,
    lost_usd=moneys.map(lambda usd: usd or ZERO),
    model=models,
    at=spans,
    counts=st.booleans(),
    split=st.booleans(),
)
sends = st.builds(Sent, st.integers(1, 50), st.integers(1, 5), st.just(1), st.just(ZERO), spans, ids, st.booleans())
openings = st.builds(
    Opened,
    *[st.integers(1, 1000)] * 7,
    st.sampled_from(["tokens", "rows", "bytes", "input", "groups"]),
    st.none() | st.sampled_from(["embeddings", "gateway-batch"]),
)
doubts = st.builds(Doubted, st.integers(1, 50), ids, st.decimals(0, 10, places=6), st.booleans(), spans)
rows = settlements | returns | sends | openings | doubts
operations = (
    rows
    | st.builds(Reopened, st.integers(1, 50), kinds, st.booleans(), spans)
    | st.builds(Sampled, spans, spans, *[st.integers(0, 99)] * 6, spans, st.sampled_from(["concurrency", "tpm"]))
    | st.builds(Noted, spans, st.sampled_from(["limit", "pause"]), ids)
    | st.builds(RunStarted, st.integers(1, 9), spans, st.integers(0, 99))
    | st.builds(RunEnded, st.integers(1, 9), spans, spans, st.just("stopped"), ids, st.just(3))
)


@UNHURRIED
@given(st.lists(operations, max_size=40), st.lists(operations, max_size=20))
def test_a_fold_loaded_from_its_dump_is_the_same_fold(before, after):
    straight, kept = told(*before), Tally()
    kept.add(RunStarted(77, 1.0, 1))  # what it held is replaced
    kept.load(orjson.loads(orjson.dumps(straight.dump())))
    assert kept.dump() == straight.dump()
    for operation in after:
        straight.add(operation)
        kept.add(operation)
    assert kept.dump() == straight.dump()
    assert dumps(report(kept, standing())) == dumps(report(straight, standing()))


@UNHURRIED
@given(st.lists(operations, max_size=40))
def test_a_dump_is_a_picture_that_later_operations_do_not_change(before):
    tally = told(*before)
    picture = tally.dump()
    bytes_then = orjson.dumps(picture)
    for operation in a_job():
        tally.add(operation)
    assert orjson.dumps(picture) == bytes_then


@UNHURRIED
@given(st.lists(rows, max_size=30), st.randoms(use_true_random=False))
def test_counts_money_and_latency_do_not_depend_on_the_order_of_rows(before, random):
    shuffled = before.copy()
    random.shuffle(shuffled)
    one, other = (report(told(*order), standing()) for order in (before, shuffled))
    # Which rows serve as examples may depend on it.
    for name in set(one) - {"failures", "faults", "doubts"}:
        assert one[name] == other[name]
    for section, counted in (("failures", "rows"), ("faults", "sends")):
        counts = [
            {(entry["kind"], entry.get("code"), entry.get("status")): entry[counted] for entry in document[section]}
            for document in (one, other)
        ]
        if section == "failures":
            assert counts[0] == counts[1]
        assert sum(counts[0].values()) == sum(counts[1].values())


@UNHURRIED
@given(st.lists(settlements | returns, max_size=30))
def test_what_was_spent_is_the_exact_sum_of_all_costs_and_lost_reservations(before):
    from fractions import Fraction

    billed = [one for one in before if not (isinstance(one, Settled) and one.status == "failed" and one.unsent)]
    exact = sum((Fraction(one.cost_usd or 0) + Fraction(one.lost_usd) for one in billed), Fraction(0))
    assert Fraction(told(*before).spent_usd) == exact


def test_memory_and_dump_do_not_grow_with_rows_whatever_they_name():
    tally = Tally()

    def feed(begin, end):
        for i in range(begin, end):
            about = {"model": f"model {i}", "finish_reason": f"reason {i}", "custom_id": "x" * 10_000}
            tally.add(settled(i, queue_s=i * 1.7 % 5000, **about))
            tally.add(failed(i, kind=f"kind {i}", code=f"code {i}" * 1000, detail="y" * 100_000))
            tally.add(returned(i, code=f"code {i}"))
            tally.add(Doubted(i, "z" * 10_000, ZERO, True, 0.0))
            tally.add(Noted(0.0, "notice", "n" * 10_000))
            tally.add(RunStarted(i, float(i), 1))
            tally.add(Sampled(float(i), 1.0, 1, 1, 1, 1, 1, 1, 0.0, f"binding {i}"))
        return len(orjson.dumps(tally.dump()))

    small, large = feed(0, 2000), feed(2000, 6000)
    assert large < small * 1.05
    assert tally.succeeded == 6000
    assert sum(model.rows for model in tally.models.values()) == 6000
    assert sum(fault["count"] for fault in tally.faults.values()) == 12_000
    assert [run["run"] for run in tally.runs] == [0, *range(5950, 6000)]


# ---------------------------------------------------------------- exact JSON


@UNHURRIED
@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_every_decimal_comes_back_from_json_exactly_and_without_an_exponent(number):
    written = dumps({"usd": number}).decode()
    assert json.loads(written, parse_float=Decimal, parse_int=Decimal)["usd"] == number
    assert "e" not in written.removeprefix('{"usd"').lower()


def test_money_is_written_plainly():
    moneys = [Decimal("1E-7"), Decimal("0.000210"), Decimal("1E+3"), Decimal("0E-9"), Decimal("-0")]
    assert dumps({"m": moneys}) == b'{"m":[0.0000001,0.00021,1000,0,0]}'


def test_floats_have_at_most_six_decimals_and_are_null_where_they_are_none():
    values = [1 / 3, 2.0, 1e-9, 1e22, float("nan"), float("inf")]
    assert dumps({"f": values}) == b'{"f":[0.333333,2,0,10000000000000000000000,null,null]}'


@UNHURRIED
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_all_other_values_come_back_as_they_were(value):
    assert json.loads(dumps({"v": value})) == {"v": value}


@UNHURRIED
@given(st.text(st.characters(exclude_categories=[])))
def test_no_character_of_the_json_acts_upon_a_terminal(value):
    written = dumps({"v": value}).decode()
    assert written.isprintable() or all(sign.isprintable() or not sign.isascii() for sign in written)
    assert not set(written) & set("\x1b\x9b\x9d\x7f\x07\u202e\u2066\u2028\ufeff")


def test_what_has_no_json_form_is_an_error():
    with pytest.raises(TypeError, match="set"):
        dumps({"v": {1}})


def test_the_same_report_is_the_same_bytes_twice_and_strict_parsers_read_it():
    tally = told(*a_job())
    first = dumps(report(tally, standing()))
    assert first == dumps(report(tally, standing()))
    assert orjson.loads(first)["rows"]["succeeded"] == 9
    assert msgspec.json.decode(first)["doubted"] == 1


# ---------------------------------------------------------------- hints


def test_hints_say_what_to_do_next_and_quote_what_a_shell_would_read():
    names = {"job": "my job.batchrun", "input": "a;rm -rf.jsonl", "errors": "my job.batchrun/errors.jsonl"}
    hints = report(told(*a_job()), standing(pending=3, state="stopped", **names))["hints"]
    assert hints == [
        "go on with the rest: batchrun resume 'my job.batchrun'",
        "ask the failed rows again: batchrun submit 'a;rm -rf.jsonl' --retry-failed",
        "or mend them and submit them as a job of their own: jq -c .row 'my job.batchrun/errors.jsonl' > mended.jsonl",
        "some answers were cut at their token limit: raise --max-tokens",
    ]


def test_stdin_is_asked_again_by_its_job():
    hints = report(told(failed(1)), standing(input="-"))["hints"]
    assert hints[0] == "ask the failed rows again: batchrun submit - --job prompts.batchrun --retry-failed"


def test_an_unknown_price_is_hinted_at_and_a_missing_usage_is_not():
    assert "prices are unknown" in report(told(settled(1, cost_usd=None)), standing())["hints"][0]
    assert report(told(settled(1, cost_usd=None, usage=None)), standing())["hints"] == []
