from __future__ import annotations

from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from batchrun.errors import BatchrunError, Exit
from batchrun.plan.schedule import Done, Flow, Idle, Schedule, Sleep, Stop
from batchrun.records import Fault, Quota, Quotas, Usage
from tests.planning import BROKEN, BUSY, UNREACHABLE, WORST, Play, call, fault, reply

# ---------------------------------------------------------------- slots, order, priority


def test_a_fixed_concurrency_is_never_passed_and_always_used() -> None:
    play = Play(Flow(concurrency=3))
    play.offer(*map(call, range(1, 6)))
    assert isinstance(play.send_all(), Idle)
    assert play.lines_out == [1, 2, 3]
    assert (play.schedule.in_flight, play.schedule.limit, play.schedule.binding) == (3, 3, "concurrency")
    play.end(play.out[1])
    play.send_all()
    assert play.lines_out == [1, 3, 4]


def test_a_waiting_retry_holds_no_slot() -> None:
    """At concurrency 1, row 2 finishes while row 1 waits out its Retry-After of an hour."""
    play = Play(Flow(concurrency=1))
    play.offer(call(1), call(2))
    play.send_all()
    play.end(play.out[0], fault("rate_limited", hint_s=3_600))
    assert isinstance(play.wait(299), Sleep)
    assert play.lines_out == []
    play.wait(2)
    assert play.lines_out == [2]
    play.end(play.out[0])
    play.schedule.close()
    play.wait(3_298, tick=1)
    assert play.lines_out == []
    play.wait(361, tick=1)
    assert play.lines_out == [1]


def test_a_retry_goes_before_new_rows_of_its_priority() -> None:
    play = Play(Flow(concurrency=1))
    play.offer(call(1), call(2), call(3), call(4, priority=1))
    play.send_all()
    assert play.lines_out == [4]
    play.end(play.out[0])
    play.send_all()
    play.end(play.out[0], fault("network"))
    play.send_all()
    assert play.lines_out == [2]
    play.wait(3)
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [1]
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [3]


def test_a_retry_does_not_go_before_a_higher_priority() -> None:
    play = Play(Flow(concurrency=1))
    play.offer(call(1))
    play.send_all()
    play.end(play.out[0], fault("network"))
    play.now = 2.5
    play.offer(call(2, priority=1))
    play.send_all()
    assert play.lines_out == [2]


def test_what_waits_long_enough_goes_before_a_higher_priority() -> None:
    play = Play(Flow(concurrency=1))
    play.offer(call(1), call(2))
    play.send_all()
    play.now = 301.0
    play.offer(call(3, priority=1))
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [2]


def test_models_do_not_slow_each_other_down() -> None:
    """One model is paused for a minute; the other goes on, and more of it is asked for."""
    play = Play(Flow(max_concurrency=64))
    play.offer(*(call(line, model="ab"[line % 2]) for line in range(40)))
    play.wait(1)
    for each in list(play.out):
        if each.rows[0].model == "a":
            play.end(each, fault("rate_limited", hint_s=60))
    for _ in range(20):
        for each in list(play.out):
            play.end(each)
        play.wait(0.5)
    assert {play_call.rows[0].model for play_call in play.out} <= {"b"}
    assert sum(1 for _, line, _ in play.sends if line % 2) == 20
    assert play.schedule.wants(play.now) > 0


def test_one_ceiling_holds_over_all_models() -> None:
    play = Play(Flow(max_concurrency=10))
    play.offer(*(call(line, model=str(line % 5)) for line in range(100)))
    play.wait(2)
    assert len(play.out) == 10
    assert play.schedule.binding == "concurrency"


def test_calls_go_where_there_is_room_and_a_dead_endpoint_is_avoided_until_it_is_back() -> None:
    play = Play(Flow(max_concurrency=8, origins=2))
    play.offer(*map(call, range(200)))
    dead_until = 60.0
    for _ in range(400):
        play.wait(0.25)
        for each in list(play.out):
            origin = next(origin for _, line, origin in reversed(play.sends) if line == each.rows[0].line)
            dead = origin == 1 and play.now < dead_until
            settlement = play.end(each, UNREACHABLE if dead else None)
            assert settlement.failed == ()
        if play.now > 5 and play.schedule.wants(play.now) and len(play.sends) < 20_000:
            play.offer(*map(call, range(1_000 + len(play.sends), 1_020 + len(play.sends))))
    while_dead = [origin for at, _, origin in play.sends if 10 < at < dead_until]
    after = [origin for at, _, origin in play.sends if at > 85]
    assert while_dead.count(1) <= 6
    assert after.count(1) > len(after) / 4


# ---------------------------------------------------------------- attempts and faults


def test_an_always_failing_row_is_sent_exactly_max_attempts_times() -> None:
    play = Play(Flow(max_attempts=5))
    play.offer(call(1))
    play.schedule.close()
    ends = []
    while not play.done:
        ends += play.end_all(BROKEN)
        play.wait(1)
    assert len(play.sends) == 5
    assert [len(end.failed) for end in ends] == [0, 0, 0, 0, 1]
    assert ends[-1].fault == BROKEN
    assert all(end.lost_usd == WORST for end in ends)
    assert play.schedule.spent_usd == 5 * WORST


def test_refusals_never_use_up_an_attempt() -> None:
    play = Play(Flow(max_attempts=1, concurrency=1))
    play.offer(call(1))
    for _ in range(8):
        play.wait(70, tick=0.5)
        assert play.end(play.out[0], BUSY).failed == ()
    play.wait(70, tick=0.5)
    last = play.out[0]
    assert (last.sends, last.attempts) == (9, 0)
    assert play.end(last).succeeded == last.rows
    assert (last.sends, last.attempts) == (9, 1)
    assert play.schedule.spent_usd == WORST


def test_garbled_counts_as_an_attempt() -> None:
    play = Play(Flow(max_attempts=2))
    play.offer(call(1))
    play.send_all()
    assert play.end(play.out[0], fault("garbled", billed=True), cost=Decimal("0.004")).lost_usd == 0
    play.wait(3)
    end = play.end(play.out[0], fault("garbled", billed=True))
    assert (len(end.failed), end.lost_usd) == (1, WORST)
    assert play.schedule.spent_usd == Decimal("0.014")


@pytest.mark.parametrize("kind", ["rejected", "too_large"])
def test_a_rejected_row_fails_at_once(kind: Any) -> None:
    play = Play()
    play.offer(call(1))
    play.send_all()
    end = play.end(play.out[0], fault(kind))
    assert [failed.line for failed in end.failed] == [1]
    assert play.schedule.spent_usd == 0


def test_a_bad_row_in_a_packed_call_is_found_by_splitting_and_only_it_fails() -> None:
    play = Play()
    play.offer(call(*range(1, 9)))
    play.schedule.close()
    failed, succeeded = [], []
    while not play.done:
        for each in list(play.out):
            bad = any(one.line == 6 for one in each.rows)
            end = play.end(each, fault("rejected") if bad else None)
            failed += end.failed
            succeeded += end.succeeded
        play.wait(0.1)
    assert [each.line for each in failed] == [6]
    assert sorted(each.line for each in succeeded) == [1, 2, 3, 4, 5, 7, 8]
    assert len(play.sends) == 7  # 8; 4 + 4; 2 + 2; 1 + 1
    assert play.schedule.reserved_usd == 0


def test_rows_that_an_answer_leaves_out_are_asked_again() -> None:
    play = Play(Flow(max_attempts=2))
    play.offer(call(1, 2, 3, 4))
    play.send_all()
    first = play.out[0]
    end = play.end(first, reply(first, without=(2, 3)))
    assert [each.line for each in end.succeeded] == [1, 4]
    assert [[each.line for each in again.rows] for again in end.again] == [[2], [3]]
    play.wait(3)
    assert [(again.attempts, again.tokens, again.sends) for again in play.out] == [(1, 100, 2)] * 2
    ends = [play.end(again, reply(again, without=play.lines_out)) for again in list(play.out)]
    assert [[each.line for each in end.failed] for end in ends] == [[2], [3]]
    assert {end.fault.kind for end in ends if end.fault is not None} == {"garbled"}


def test_a_packed_call_that_always_fails_is_halved_until_only_the_row_at_fault_is_left() -> None:
    play = Play(Flow(concurrency=8, max_attempts=2))
    play.offer(call(*range(1, 9)))
    failed: list[int] = []
    succeeded: list[int] = []
    while len(failed) + len(succeeded) < 8 and play.now < 3_000:
        play.wait(0.5)
        for each in list(play.out):
            bad = any(one.line == 5 for one in each.rows)
            end = play.end(each, BROKEN if bad else None)
            failed += [one.line for one in end.failed]
            succeeded += [one.line for one in end.succeeded]
    assert failed == [5]
    assert sorted(succeeded) == [1, 2, 3, 4, 6, 7, 8]


def test_a_codec_that_learned_asks_again_at_once_and_no_attempt_is_counted() -> None:
    play = Play(Flow(max_attempts=1))
    play.offer(call(1))
    play.send_all()
    first = play.out[0]
    play.out.clear()
    end = play.schedule.settle(0.0, first, fault("rejected"), adapted=True)
    assert end.again == (first,)
    play.wait(0.02, tick=0.02)
    assert play.out == [first]
    assert (first.sends, first.attempts) == (2, 0)


def test_back_off_grows_from_one_send_to_the_next() -> None:
    play = Play(Flow(concurrency=1, max_attempts=99))
    play.offer(call(1))
    for _ in range(8):
        play.wait(70, tick=0.01)
        play.end(play.out[0], UNREACHABLE)
    times = [at for at, _, _ in play.sends]
    gaps = [later - earlier for earlier, later in pairwise(times[1:])]
    assert len(play.sends) == 8
    assert all(later > 1.1 * earlier or later >= 55 for earlier, later in pairwise(gaps))


def test_no_call_is_sent_again_before_its_hint_has_passed() -> None:
    play = Play(Flow(max_concurrency=16))
    play.offer(*map(call, range(12)))
    play.wait(1)
    hints = {each.rows[0].line: 5.0 + each.rows[0].line for each in play.out}
    began = play.now
    for each in list(play.out):
        play.end(each, fault("rate_limited", hint_s=hints[each.rows[0].line]))
    for _ in range(300):
        play.wait(0.1)
        play.end_all()
    again = {line: at for at, line, _ in play.sends if at > began}
    assert set(again) == set(hints)
    assert all(hints[line] <= again[line] - began for line in hints)


def test_possibly_billed_retries_wait_for_their_budget_and_are_never_dropped() -> None:
    play = Play(Flow(concurrency=28, max_attempts=2))
    play.offer(*map(call, range(28)))
    play.send_all()
    play.now = 1.0
    while play.out:  # every second one is answered, so the breaker stays closed
        play.end(play.out[0], BROKEN)
        play.end(play.out[0])
    play.wait(3)
    assert len(play.sends) - 28 in (10, 11, 12)  # ten, and a tenth of the successes
    play.wait(60)
    assert len(play.sends) - 28 == 14


# ---------------------------------------------------------------- money


def test_a_call_that_does_not_fit_waits_for_others_to_settle_and_then_stops_the_run() -> None:
    play = Play(Flow(budget_usd=Decimal("0.025")))
    play.offer(call(1), call(2), call(3))
    assert isinstance(play.wait(1), Idle)
    assert play.lines_out == [1, 2]
    assert play.schedule.binding == "budget"
    play.end(play.out[0], cost=Decimal("0.001"))
    play.send_all()
    assert play.lines_out == [2, 3]
    play.offer(call(4))
    play.end(play.out[0], cost=Decimal("0.009"))
    play.end(play.out[0], cost=Decimal("0.01"))
    step = play.step()
    assert isinstance(step, Done)
    assert step.stop == play.schedule.stop
    assert step.stop is not None
    assert (step.stop.reason, step.stop.exit_code) == ("budget", Exit.STOPPED)


def test_earlier_runs_count_against_the_budget() -> None:
    play = Play(Flow(budget_usd=Decimal("0.02"), spent_usd=Decimal("0.0101")))
    play.offer(call(1))
    step = play.step()
    assert isinstance(step, Done)
    assert step.stop is not None
    assert "$0.0101 of $0.02 is spent" in step.stop.detail


def test_a_call_is_priced_when_it_is_about_to_go_out() -> None:
    prices = iter([Decimal("0.4"), Decimal("0.7"), Decimal("0.6")])
    play = Play()
    play.schedule = Schedule(Flow(budget_usd=Decimal(1)), play.schedule._rng, 0.0, lambda _: next(prices))
    play.offer(call(1), call(2))
    play.send_all()
    assert play.lines_out == [1]
    play.now = 1.0
    assert isinstance(play.step(), Idle)
    play.step()
    assert play.lines_out == [1, 2]
    assert play.schedule.reserved_usd == 1


def test_a_price_that_cannot_be_told_leaves_the_call_queued() -> None:
    def worst(_: object) -> Decimal:
        raise BatchrunError("no price")

    play = Play()
    play.schedule = Schedule(Flow(budget_usd=Decimal(1)), play.schedule._rng, 0.0, worst)
    play.offer(call(1))
    for _ in range(2):
        with pytest.raises(BatchrunError):
            play.step()
    assert (play.schedule.in_flight, play.schedule.reserved_usd) == (0, 0)


def test_a_released_call_gives_everything_back_and_may_go_again() -> None:
    play = Play(Flow(rpm=60, tpm=60_000, budget_usd=Decimal("0.01")))
    play.offer(call(1))
    play.send_all()
    (unsent,) = play.out
    play.out.clear()
    play.schedule.release(0.0, unsent)
    assert (unsent.sends, play.schedule.reserved_usd, play.schedule.in_flight) == (0, 0, 0)
    play.wait(0.1)
    assert play.out == [unsent]


def test_a_released_probe_is_planned_again() -> None:
    play = Play(Flow(concurrency=10))
    play.offer(*map(call, range(20)))
    play.send_all()
    play.end_all(UNREACHABLE)
    play.wait(1.2)
    (probe,) = play.out
    play.out.clear()
    play.schedule.release(play.now, probe)
    play.send_all()
    assert len(play.out) == 1


# ---------------------------------------------------------------- stops


@pytest.mark.parametrize(
    ("stop", "reason", "code"),
    [
        ("auth", "auth", Exit.PERMISSION),
        ("account", "account", Exit.CONFIGURATION),
        ("redirect", "redirect", Exit.CONFIGURATION),
        ("tls", "tls", Exit.UNREACHABLE),
        (None, "account", Exit.CONFIGURATION),
    ],
)
def test_a_fatal_fault_stops_the_run_and_leaves_all_rows_pending(stop: Any, reason: str, code: Exit) -> None:
    play = Play(Flow(concurrency=3))
    play.offer(*map(call, range(1, 9)))
    play.send_all()
    fatal = Fault("fatal", "no", stop=stop)
    end = play.end(play.out[0], fatal)
    assert ([held.line for held in end.held], end.failed, end.fault) == ([1], (), fatal)
    assert isinstance(play.send_all(), Idle)
    assert [held.line for held in play.end(play.out[0], BUSY).held] == [2]
    assert [each.line for each in play.end(play.out[0]).succeeded] == [3]
    step = play.step()
    assert isinstance(step, Done)
    assert step.stop is not None
    assert (step.stop.reason, step.stop.exit_code) == (reason, code)
    assert len(play.sends) == 3
    assert play.schedule.wants(play.now) == 0


def test_at_the_deadline_nothing_more_is_sent_and_what_is_out_may_land() -> None:
    play = Play(Flow(concurrency=1, deadline_at=10.0))
    play.offer(call(1), call(2))
    play.send_all()
    play.now = 10.0
    assert isinstance(play.send_all(), Idle)
    assert len(play.end(play.out[0]).succeeded) == 1
    step = play.step()
    assert isinstance(step, Done)
    assert step.stop is not None
    assert (step.stop.reason, step.stop.exit_code) == ("deadline", Exit.STOPPED)


def test_a_sleep_never_passes_the_deadline() -> None:
    play = Play(Flow(concurrency=1, deadline_at=10.0))
    play.offer(call(1))
    play.send_all()
    play.end(play.out[0], fault("rate_limited", hint_s=100))
    assert play.step() == Sleep(10.0)


def test_a_deadline_does_not_stop_what_is_finished() -> None:
    play = Play(Flow(deadline_at=10.0))
    play.offer(call(1))
    play.schedule.close()
    play.send_all()
    play.now = 11.0
    play.end(play.out[0])
    assert play.step() == Done(None)


def test_the_run_stops_when_more_rows_have_failed_than_may() -> None:
    play = Play(Flow(concurrency=1, max_failures=3, failed=2))
    play.offer(*map(call, range(9)))
    for expected in (None, "max-failures"):
        play.send_all()
        play.end(play.out[0], fault("rejected"))
        play.step()
        assert (play.schedule.stop.reason if play.schedule.stop else None) == expected
    assert play.schedule.stop is not None
    assert play.schedule.stop.exit_code == Exit.STOPPED


def test_rows_that_failed_without_a_send_are_among_those_that_may_fail() -> None:
    play = Play(Flow(concurrency=1, max_failures=3))
    play.schedule.fail_unsent(3)
    play.send_all()
    assert play.schedule.stop is None
    play.schedule.fail_unsent(1)
    assert play.done
    assert play.schedule.stop is not None
    assert play.schedule.stop.reason == "max-failures"


def test_a_share_of_failures_is_of_the_total() -> None:
    play = Play(Flow(concurrency=1, max_failure_share=0.1, total=20))
    play.offer(*map(call, range(9)))
    for _ in range(3):
        assert play.schedule.stop is None
        play.send_all()
        play.end(play.out[0], fault("rejected"))
    assert play.done
    assert play.schedule.stop is not None


def test_a_drain_keeps_its_first_reason_and_ends_when_nothing_is_out() -> None:
    play = Play(Flow(concurrency=2))
    play.offer(*map(call, range(5)))
    play.send_all()
    play.schedule.drain(0.0, Stop("interrupted", Exit.SIGINT, "SIGINT"))
    play.schedule.drain(0.0, Stop("auth", Exit.PERMISSION, "late"))
    assert isinstance(play.step(), Idle)
    play.end_all()
    step = play.step()
    assert isinstance(step, Done)
    assert step.stop is not None
    assert step.stop.reason == "interrupted"
    assert play.schedule.notes() == []
    assert "stop: interrupted: SIGINT" in play.why


def test_a_run_without_rows_is_done_once_closed() -> None:
    play = Play()
    assert isinstance(play.step(), Idle)
    assert (play.schedule.binding, play.schedule.limit) == ("input", 16)
    play.schedule.close()
    assert play.step() == Done(None)


# ---------------------------------------------------------------- outages


def test_an_outage_opens_the_breaker_and_one_probe_at_a_time_goes_out() -> None:
    play = Play(Flow(concurrency=10))
    play.offer(*map(call, range(50)))
    play.send_all()
    play.end_all(UNREACHABLE)
    opened, before = play.now, len(play.sends)
    probes = []
    while play.now < 60:
        play.wait(0.1)
        if play.out:
            assert len(play.out) == 1
            assert play.schedule.binding == "breaker open, probing"
            probes.append(play.now - opened)
            play.end(play.out[0], UNREACHABLE)
    assert len(play.sends) - before == len(probes)
    assert [round(at) for at in probes[:4]] == pytest.approx([1, 3, 7, 15], abs=1.5)
    assert "breaker: open: connection refused" in play.why
    while not play.out:
        play.wait(0.1)
    play.end(play.out[0])
    play.wait(1)
    assert len(play.out) == 10
    assert "breaker: closed: a probe was answered" in play.why


def test_an_outage_never_fails_a_row_and_lasts_no_longer_than_the_patience() -> None:
    play = Play(Flow(concurrency=4, max_attempts=5, patience_s=600))
    play.offer(*map(call, range(4)))
    failed = 0
    while not play.done:
        play.wait(0.5, tick=0.5)
        failed += sum(len(end.failed) for end in play.end_all(BROKEN))
        assert play.now < 700
    assert failed == 0
    assert play.schedule.stop is not None
    assert (play.schedule.stop.reason, play.schedule.stop.exit_code) == ("unreachable", Exit.UNREACHABLE)
    assert 600 <= play.now <= 640


def test_patience_ends_even_while_a_probe_hangs() -> None:
    play = Play(Flow(concurrency=10, patience_s=60))
    play.offer(*map(call, range(20)))
    play.send_all()
    play.end_all(UNREACHABLE)
    play.wait(3)
    assert len(play.out) == 1
    step = play.step()
    assert isinstance(step, Sleep)
    assert step.until == pytest.approx(60)
    play.now = 60.0
    assert isinstance(play.step(), Idle)
    assert play.schedule.stop is not None
    assert [held.line for held in play.end(play.out[0], fault("timeout", billed=True)).held]
    assert play.done


def test_one_unreachable_model_does_not_stop_the_others() -> None:
    play = Play(Flow(max_concurrency=20, patience_s=30))
    play.offer(*(call(line, model="dead") for line in range(40)))
    play.offer(*(call(100 + line, model="well") for line in range(4_000)))
    answered = 0
    while play.now < 100:
        play.wait(0.5, tick=0.1)
        for each in list(play.out):
            dead = each.rows[0].model == "dead"
            answered += len(play.end(each, UNREACHABLE if dead else None).succeeded)
    assert play.schedule.stop is None
    assert answered > 1_000


def test_rows_that_poison_their_own_calls_fail_and_do_not_open_the_breaker() -> None:
    """Each tenth row always ends in a 500; at the end only these are left, and all of them fail for themselves."""
    play = Play(Flow(concurrency=8, max_attempts=3))
    play.offer(*map(call, range(1, 301)))
    play.schedule.close()
    failed = []
    while not play.done:
        for each in list(play.out):
            failed += play.end(each, BROKEN if each.rows[0].line % 10 == 0 else None).failed
        play.wait(0.2, tick=0.1)
    assert sorted(each.line for each in failed) == list(range(10, 301, 10))
    assert play.schedule.stop is None
    assert not any(why.startswith("breaker") for why in play.why)


def test_late_answers_from_before_an_outage_do_not_end_it() -> None:
    play = Play(Flow(concurrency=20))
    play.offer(*map(call, range(60)))
    play.send_all()
    early = play.out[:5]
    for each in play.out[5:15]:
        play.end(each, UNREACHABLE)
    for each in early:
        play.end(each)
    play.send_all()
    assert len(play.out) == 5
    assert play.schedule.binding == "breaker open, probing"


def test_a_refused_probe_shows_that_the_server_is_back() -> None:
    play = Play(Flow(concurrency=10))
    play.offer(*map(call, range(30)))
    play.send_all()
    play.end_all(UNREACHABLE)
    play.wait(1.2)
    play.end(play.out[0], BUSY)
    play.wait(1.2)
    assert len(play.out) == 10


# ---------------------------------------------------------------- what binds, in words


def test_what_binds_is_told_in_words() -> None:
    play = Play(Flow(max_concurrency=64, rpm=60))
    play.offer(*map(call, range(30)))
    play.send_all()
    assert play.schedule.binding == "requests per minute"
    play = Play(Flow(max_concurrency=64, tpm=600))
    play.offer(*map(call, range(30)))
    play.send_all()
    assert play.schedule.binding == "tokens per minute"
    play = Play(Flow(max_concurrency=64))
    play.offer(*map(call, range(30)))
    play.send_all()
    play.end(play.out[0], fault("rate_limited", hint_s=20))
    play.send_all()
    assert play.schedule.binding == "paused 20 s by Retry-After"
    assert "pause: paused 20.0 s: rate_limited" in play.why
    play.wait(60)
    play.end(play.out[0], BUSY)
    play.send_all()
    assert play.schedule.binding == "cooling down after a refusal"


def test_the_requests_per_minute_that_servers_tell_of_are_those_of_all_scopes() -> None:
    play = Play(Flow(max_concurrency=64, rpm=6_000))
    play.offer(call(1, model="a"), call(2, model="b"), call(3, model="c"))
    play.wait(1)
    assert play.schedule.told_rpm is None  # what the user set, nobody told
    for each, limit in zip(list(play.out), (500, 60, None), strict=True):
        play.end(each, replace(reply(each), quotas=Quotas(Quota(limit, 20, 1.0), None)))
    assert play.schedule.told_rpm == 560


def test_the_scope_pauses_no_longer_than_five_minutes_and_only_the_longest_hint_counts() -> None:
    play = Play(Flow(concurrency=3))
    play.offer(*map(call, range(9)))
    play.send_all()
    for hint_s in (3_600, 10, 400):
        play.end(play.out[0], fault("rate_limited", hint_s=hint_s))
    assert [why for why in play.why if why.startswith("pause")] == ["pause: paused 300.0 s: rate_limited"]
    assert play.step() == Sleep(pytest.approx(10, abs=1.1))  # the retry of the shortest hint; it waits on with the rest
    play.wait(299.9, tick=0.1)
    assert play.out == []
    play.wait(0.2)
    assert play.out != []


def test_a_scope_is_spared_a_herd_after_a_pause() -> None:
    """Twenty calls that waited out the same hint go out over a round trip, not at once."""
    play = Play(Flow(max_concurrency=32))
    play.offer(*map(call, range(2_000)))
    play.wait(2)
    for _ in range(10):
        play.end_all()
        play.wait(2)
    for each in list(play.out):
        play.end(each, fault("rate_limited", hint_s=10))
    began = play.now
    play.wait(30, tick=0.01)
    times = [at for at, _, _ in play.sends if at > began]
    assert times[0] - began >= 10
    assert times[5] - times[0] >= 0.2


def test_headers_pace_from_the_first_answer_on() -> None:
    play = Play(Flow(max_concurrency=64))
    play.offer(*map(call, range(200)))
    play.wait(1)
    first = play.out[0]
    play.end(first, replace(reply(first), quotas=Quotas(Quota(60, 20, 40.0), Quota(None, None, None))))
    play.end_all()
    sent = len(play.sends)
    for _ in range(20):
        play.wait(0.5)
        play.end_all()
    assert len(play.sends) - sent == pytest.approx(20 - 15 + 10, abs=2)  # 15 were on their way; 10 flowed in
    assert play.schedule.binding == "requests per minute"


def test_a_refusal_that_a_known_quota_explains_does_not_cut_the_window() -> None:
    play = Play(Flow(max_concurrency=64))
    play.offer(*map(call, range(200)))
    play.wait(1)
    spent = Quotas(Quota(60, 0, 60.0))
    for each in list(play.out):
        play.end(each, Fault("rate_limited", "quota", 429, retry_after_s=1.0, quotas=spent))
    assert play.schedule.limit == 16
    assert not any(why.startswith("limit") for why in play.why)


def test_what_the_user_set_holds_for_all_models_of_an_endpoint_together() -> None:
    play = Play(Flow(rpm=60, max_concurrency=64))
    play.offer(*(call(line, model="ab"[line % 2]) for line in range(200)))
    while play.now < 120:
        play.wait(1)
        play.end_all()
    assert len(play.sends) == pytest.approx(0.98 * 120, abs=2)


def test_tokens_are_settled_at_their_true_use() -> None:
    """600 tokens a minute; each call is expected to use 200 and uses 120: so 5 and not 3 a minute go out."""
    play = Play(Flow(tpm=600, max_concurrency=64))
    play.offer(*map(call, range(100)))
    while play.now < 600:
        play.wait(1, tick=0.5)
        play.end_all()
    assert len(play.sends) == pytest.approx(0.98 * 50, abs=3)


def test_tokens_of_servers_that_charge_max_tokens_are_not_settled() -> None:
    play = Play(Flow(tpm=600, max_concurrency=64, counts_max_tokens=True))
    play.offer(*map(call, range(100)))
    while play.now < 600:
        play.wait(1, tick=0.5)
        play.end_all()
    assert len(play.sends) == pytest.approx(0.98 * 30, abs=3)


def test_a_call_without_usage_or_limit_is_charged_as_expected() -> None:
    play = Play(Flow(tpm=6_000, max_concurrency=64))
    offered = call(1)
    offered.rows[0].max_output = None
    two = call(2, 3)
    two.rows[0].max_output = None
    embedding = call(4)
    embedding.rows[0].max_output = 0
    play.offer(offered, two, embedding)
    play.wait(120, tick=0.5)
    assert len(play.out) == 3
    play.end(offered, replace(reply(offered), usage=None))
    play.end(two, Fault("garbled", "no JSON", 200, usage=Usage(1, 1), maybe_processed=True))
    play.end(embedding, replace(reply(embedding), usage=Usage(100, 0)))
    assert play.schedule.in_flight == 0


def test_as_much_is_wanted_as_keeps_the_window_busy_and_no_more_than_fits() -> None:
    play = Play(Flow(concurrency=100))
    assert play.schedule.wants(0.0) == 48
    play.offer(*map(call, range(48)))
    assert play.schedule.wants(0.0) == 200 + 16 - 48
    play.offer(*map(call, range(48, 5_000)))
    assert play.schedule.wants(0.0) == 0


def test_patience_ends_for_rows_too_few_to_open_a_breaker() -> None:
    play = Play(Flow(patience_s=20))
    play.offer(call(1), call(2))
    while not play.done and play.now < 60:
        play.end_all(UNREACHABLE)
        play.wait(0.05)
    assert play.schedule.stop is not None
    assert play.schedule.stop.exit_code is Exit.UNREACHABLE
    assert "connection refused" in play.schedule.stop.detail
    assert 20 <= play.now <= 21
    assert {line for _, line, _ in play.sends} == {1, 2}


def test_one_answer_ends_the_count_of_unreachable_seconds() -> None:
    play = Play(Flow(concurrency=2, patience_s=5))
    play.offer(call(1), call(2))
    play.send_all()
    first, second = play.out
    play.end(first, UNREACHABLE)
    play.end(second)
    while first not in play.out and play.now < 60:
        play.wait(0.05)
    assert play.schedule.stop is None
    play.end(first)
    assert play.schedule.stop is None


def test_a_packed_call_that_cannot_go_is_asked_row_by_row_and_no_send_is_counted() -> None:
    play = Play(Flow(concurrency=1))
    play.offer(call(1, 2, 3), call(4))
    play.send_all()
    (packed,) = play.out
    play.schedule.unpack(play.now, packed)
    play.out.clear()
    sent: list[tuple[int, ...]] = []
    while not play.done and play.now < 10:
        sent += [tuple(row.line for row in each.rows) for each in play.out]
        assert all(each.sends == 1 for each in play.out)
        play.end_all()
        play.wait(0.05)
    play.schedule.close()
    assert sorted(sent) == [(1,), (2,), (3,), (4,)]
    assert play.schedule.in_flight == 0


def test_what_a_last_attempt_leaves_out_fails_and_what_a_stopped_run_leaves_out_stays_pending() -> None:
    last = Play(Flow(max_attempts=1))
    last.offer(call(1, 2))
    last.send_all()
    end = last.end(last.out[0], reply(last.out[0], without=(2,)))
    assert ([row.line for row in end.succeeded], [row.line for row in end.failed]) == ([1], [2])
    stopped = Play(Flow())
    stopped.offer(call(1, 2))
    stopped.send_all()
    stopped.schedule.drain(0.0, Stop("interrupted", Exit.SIGINT, "test"))
    end = stopped.end(stopped.out[0], reply(stopped.out[0], without=(2,)))
    assert ([row.line for row in end.succeeded], [row.line for row in end.held]) == ([1], [2])
