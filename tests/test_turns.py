from __future__ import annotations

import asyncio

from batchrun.run.turns import Turns


def crowd(few: int, size: int, *, cancelled: frozenset[int] = frozenset(), rows: int = 1) -> list[int]:
    """Returns in which round of the loop each of a crowd that asks in one round got its turn, in their order."""

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        turns = Turns(loop, few)
        now = 0

        def count() -> None:
            nonlocal now
            now += 1
            loop.call_soon(count)

        async def ask() -> int:
            if (turn := turns.next(rows)) is not None:
                await turn
            return now

        asked = [asyncio.create_task(ask()) for _ in range(size)]
        loop.call_soon(count)
        await asyncio.sleep(0)  # all have asked
        for number in cancelled:
            asked[number].cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [round_ for round_ in found if isinstance(round_, int)]

    return asyncio.run(main())


def test_a_crowd_gets_its_turns_a_few_a_round_in_the_order_of_asking():
    rounds = crowd(4, 11)
    assert rounds == sorted(rounds)
    assert [rounds.count(number) for number in dict.fromkeys(rounds)] == [4, 4, 3]


def test_of_a_great_crowd_half_have_their_turn_in_each_round():
    rounds = crowd(4, 104)
    assert [rounds.count(number) for number in dict.fromkeys(rounds)] == [4, 50, 25, 12, 6, 4, 3]


def test_a_reply_with_many_rows_is_a_round_by_itself_however_great_the_crowd():
    rounds = crowd(4, 9, rows=2_048)
    assert rounds == sorted(set(rounds))


def test_a_few_do_not_wait():
    assert crowd(4, 4) == [0, 0, 0, 0]


def test_who_has_left_takes_no_turn():
    rounds = crowd(2, 8, cancelled=frozenset({2, 3, 6}))
    assert [rounds.count(number) for number in dict.fromkeys(rounds)] == [2, 3]


def test_what_is_ready_to_be_sent_goes_before_the_rest_of_the_crowd_is_read():
    order: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns = Turns(loop, 1)

        async def reply(name: str) -> None:
            if (turn := turns.next()) is not None:
                await turn
            order.append(f"read {name}")
            loop.call_soon(order.append, f"send after {name}")

        await asyncio.gather(*(reply(name) for name in "abc"))
        await asyncio.sleep(0)

    asyncio.run(main())
    assert order == ["read a", "send after a", "read b", "send after b", "read c", "send after c"]
