"""Calls whose prompts begin alike: one goes first, the others wait for its reply without a slot, none for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.errors import Exit
from batchrun.plan.prefix import LEAST_PATIENCE_S, LIFE_S, SWEEP_AT, Prefixes
from batchrun.plan.schedule import HELD_AT_MOST, Done, Flow, Idle, Schedule, Send, Sleep, Stop
from batchrun.records import Call, Fault, Usage
from tests.planning import BROKEN, BUSY, UNREACHABLE, Play, call, fault, reply

WIDE = Flow(concurrency=64)


def of(group: int, *lines: int, model: str = "m") -> list[Call]:
    return [call(line, model=model, prefix=(group,)) for line in lines]


def test_the_first_of_a_group_goes_alone_and_its_reply_lets_the_others_go():
    play = Play(WIDE)
    play.offer(*of(1, 1, 2, 3), *of(2, 4, 5), call(6))
    assert isinstance(play.send_all(), Sleep)
    assert play.lines_out == [1, 4, 6]
    play.now = 1.0
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [4, 6, 2, 3]
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [6, 2, 3, 5]
    assert play.schedule.wants(play.now) > 0
    play.schedule.close()
    play.end_all()
    assert play.done


def test_followers_go_out_ahead_of_new_leaders():
    play = Play(Flow(concurrency=2))
    play.offer(*of(1, 1, 2, 3), *of(2, 4, 5), *of(3, 6, 7))
    play.send_all()
    assert play.lines_out == [1, 4]
    play.now = 1.0
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [4, 2]
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [2, 3]  # and not 6, which would begin a third group


def test_held_followers_take_no_slot_and_more_groups_are_opened_in_their_place():
    play = Play(Flow(concurrency=4))
    play.offer(*of(1, *range(1, 201)))
    play.send_all()
    assert play.lines_out == [1]
    assert play.schedule.wants(play.now) == 2 * 4 + 16
    assert play.schedule.binding == "prompt cache"
    play.offer(*(each for group in range(2, 30) for each in of(group, group * 1000, group * 1000 + 1)))
    play.send_all()
    assert play.lines_out == [1, 2000, 3000, 4000]
    assert play.schedule.wants(play.now) == 0


def test_what_is_held_counts_against_what_is_held_ahead():
    play = Play(WIDE)
    play.offer(*of(1, *range(1, HELD_AT_MOST + 2)))
    play.send_all()
    assert play.lines_out == [1]
    assert play.schedule.wants(play.now) == 0


@pytest.mark.parametrize("failure", [BUSY, BROKEN, UNREACHABLE, fault("rejected"), fault("timeout", billed=True)])
def test_where_a_leader_fails_the_next_one_leads_at_once(failure: Fault):
    play = Play(WIDE)
    play.offer(*of(1, 1, 2, 3))
    play.send_all()
    play.now = 2.0
    play.end(play.out[0], failure)
    while not play.out:
        step = play.send_all()
        assert play.out or isinstance(step, Sleep)
        play.now = play.now if play.out else step.until
    assert play.lines_out[0] == 2
    assert 3 not in play.lines_out


def test_a_failure_that_tells_its_usage_has_begun_the_cache():
    play = Play(WIDE)
    play.offer(*of(1, 1, 2, 3))
    play.send_all()
    play.end(play.out[0], Fault("garbled", "empty", 200, maybe_processed=True, usage=Usage(100, 0)))
    play.send_all()
    assert play.lines_out == [2, 3]


def test_a_straggler_is_waited_for_only_so_long_and_then_another_leads_as_well():
    play = Play(WIDE)
    play.offer(*of(1, 1, 2, 3))
    step = play.send_all()
    assert isinstance(step, Sleep)
    assert step.until == LEAST_PATIENCE_S
    play.now = LEAST_PATIENCE_S - 0.1
    play.send_all()
    assert play.lines_out == [1]
    play.now = LEAST_PATIENCE_S
    play.send_all()
    assert play.lines_out == [1, 2]
    play.now += 1.0
    play.end(play.out[0], BROKEN)  # the leader now is the second one
    play.send_all()
    assert play.lines_out == [2]
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [3]


def test_one_that_comes_after_the_patience_for_its_leader_does_not_wait():
    play = Play(WIDE)
    play.offer(*of(1, 1))
    play.send_all()
    play.now = LEAST_PATIENCE_S + 1.0
    play.offer(*of(1, 2, 3))
    play.send_all()
    assert play.lines_out == [1, 2]


def test_a_cache_that_was_not_used_for_minutes_is_begun_again():
    play = Play(WIDE)
    play.offer(*of(1, 1))
    play.send_all()
    play.end(play.out[0])
    play.now = LIFE_S - 1.0
    play.offer(*of(1, 2, 3))
    play.send_all()
    assert play.lines_out == [2, 3]
    play.end_all()
    play.now += LIFE_S - 1.0
    play.offer(*of(1, 4, 5))
    play.send_all()
    assert play.lines_out == [4, 5]
    play.end_all()
    play.now += LIFE_S
    play.offer(*of(1, 6, 7, 8))
    play.send_all()
    assert play.lines_out == [6]


def test_calls_that_were_let_go_wait_again_where_the_cache_is_gone_before_there_was_room():
    play = Play(Flow(concurrency=1))
    play.offer(*of(1, 1, 2, 3), *of(2, 4))
    play.send_all()
    play.now = 1.0
    play.end(play.out[0], Fault("rate_limited", "slow down", 429, retry_after_s=LIFE_S + 60.0, usage=Usage(1, 0)))
    play.send_all()
    play.now = LIFE_S + 70.0
    play.send_all()
    assert len(play.out) == 1  # one of the group leads again
    play = Play(Flow(concurrency=2))
    play.offer(*of(1, 1, 2, 3, 4), call(9))
    play.send_all()
    assert play.lines_out == [1, 9]
    play.now = 1.0
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [9, 2]
    play.now = LIFE_S + 2.0
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [2, 3]
    play.schedule.settle(play.now, play.out.pop(0), fault("rejected"))
    play.send_all()
    assert play.lines_out == [3]  # 4 was let go by the first reply, and waits for 3 now


def test_a_group_within_a_group_waits_for_the_wider_one_and_then_for_its_own():
    play = Play(WIDE)
    first = [call(line, prefix=(1,)) for line in (1, 2)]
    second = [call(line, prefix=(1, 2)) for line in (3, 4)]
    third = [call(line, prefix=(1, 3)) for line in (5, 6)]
    play.offer(*first, *second, *third)
    play.send_all()
    assert play.lines_out == [1]
    play.now = 1.0
    play.end(play.out[0])
    play.send_all()
    assert play.lines_out == [2, 3, 5]
    play.end(play.out[1])
    play.send_all()
    assert play.lines_out == [2, 5, 4]
    play.end(play.out[1], fault("rejected"))
    play.send_all()
    assert play.lines_out == [2, 4, 6]


def test_a_call_of_many_rows_belongs_to_no_group():
    play = Play(WIDE)
    play.offer(call(1, 2, prefix=(1,)), call(3, 4, prefix=(1,)))
    play.send_all()
    assert play.lines_out == [1, 3]


def test_a_call_that_was_not_sent_after_all_leaves_the_lead_to_the_next():
    play = Play(WIDE)
    play.offer(*of(1, 1, 2, 3))
    play.send_all()
    play.schedule.release(play.now, play.out.pop())
    play.send_all()
    assert len(play.lines_out) == 1


def test_a_group_stays_with_the_endpoint_that_has_its_cache():
    play = Play(Flow(concurrency=8, origins=2))
    play.offer(*(each for group in range(1, 5) for each in of(group, group * 10, group * 10 + 1)))
    play.send_all()
    began = {line // 10: origin for _, line, origin in play.sends}
    assert set(began.values()) == {0, 1}
    for each in list(play.out):
        play.now += 0.1
        play.end(each)
    play.send_all()
    assert {line // 10: origin for _, line, origin in play.sends[4:]} == began


def test_a_stop_leaves_the_held_ones_pending_and_a_deadline_finds_them():
    play = Play(WIDE)
    play.offer(*of(1, 1, 2, 3))
    play.schedule.close()
    play.send_all()
    play.schedule.drain(play.now, Stop("interrupted", Exit.SIGINT, "SIGINT received"))
    assert isinstance(play.step(), Idle)
    play.end(play.out[0])
    assert isinstance(play.step(), Done)
    play = Play(Flow(concurrency=64, deadline_at=5.0))
    play.offer(*of(1, 1, 2, 3))
    play.schedule.close()
    assert play.send_all() == Sleep(5.0)
    play.now = 5.0
    play.send_all()
    assert play.schedule.stop is not None


def test_groups_that_are_over_are_forgotten():
    prefixes: Prefixes[str] = Prefixes()
    for group in range(3 * SWEEP_AT):
        each = call(group + 1, prefix=(group,))
        now = group * 1.0
        assert prefixes.admit(now, (0.0, 1, group, each))
        prefixes.sent(now, each, 1.0)
        assert prefixes.ended(now + 0.5, each, "here", processed=True) == []
    assert len(prefixes._groups) <= SWEEP_AT + LIFE_S
    late = call(9, prefix=(0,))
    assert prefixes.home(now, late) is None
    assert prefixes.ended(now, late, "here", processed=True) == []
    assert prefixes.home(now, late) == "here"


def test_a_call_that_opens_groups_within_groups_when_there_are_many_leads_them_all():
    prefixes: Prefixes[str] = Prefixes()
    for group in range(SWEEP_AT - 1):
        each = call(group + 1, prefix=(group,))
        prefixes.admit(0.0, (0.0, 1, group, each))
        prefixes.sent(0.0, each, 1.0)
        prefixes.ended(0.0, each, "here", processed=False)
    first, second = (call(line, prefix=(SWEEP_AT, SWEEP_AT + 1, SWEEP_AT + 2)) for line in (1, 2))
    assert prefixes.admit(1.0, (0.0, 1, 1, first))
    prefixes.sent(1.0, first, 1.0)
    assert not prefixes.admit(1.0, (0.0, 1, 2, second))
    assert [entry[3] for entry in prefixes.ended(2.0, first, "here", processed=True)] == [second]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 12))
def test_no_call_goes_out_before_the_first_reply_to_its_group(seed: int, window: int, groups: int):
    rng = random.Random(seed)
    schedule = Schedule(Flow(concurrency=window), rng, 0.0)
    calls = [call(line, prefix=(rng.randint(1, groups),)) for line in range(1, 121)]
    out: list[tuple[float, int, Call]] = []
    answered: set[int] = set()
    sent: set[int] = set()
    now, done = 0.0, 0
    while True:
        wanted = schedule.wants(now)
        schedule.offer(now, [calls.pop(0) for _ in range(min(wanted, len(calls)))])
        if not calls:
            schedule.close()
        step = schedule.next(now)
        if isinstance(step, Done):
            break
        if isinstance(step, Send):
            (group,) = step.call.prefix
            assert group in answered or group not in sent
            sent.add(group)
            out.append((now + rng.uniform(0.5, 4.0), step.call.rows[0].line, step.call))
            continue
        now, _, ending = min(out)
        out.remove((now, ending.rows[0].line, ending))
        schedule.settle(now, ending, reply(ending))
        answered |= set(ending.prefix)
        done += 1
    assert done == 120
