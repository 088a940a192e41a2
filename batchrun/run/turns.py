"""Replies are taken up a few at a time, so that what waits to be sent does not wait for all of them."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turns"]


class Turns:
    """Gives ``few`` turns in each round of an event loop, or half of those who wait, in the order of asking.

    Replies come in crowds, because requests leave in crowds: as many as one commit covers. Taken up all in one round of
    the loop, the first request to follow them would leave only after the last reply of the crowd was read, and the
    crowd would stay one for the whole run. With turns it draws itself apart; half of it at a time, so that a great one
    needs few rounds, each of which ends with a commit.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, few: int) -> None:
        self._loop = loop
        self._few = few
        self._given = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def next(self) -> asyncio.Future[None] | None:
        """Returns None where there is a turn now, else a future that is done when there is."""
        if self._given < self._few:
            if self._given == 0:
                self._loop.call_soon(self._round)
            self._given += 1
            return None
        place = self._loop.create_future()
        self._waiting.append(place)
        return place

    def _round(self) -> None:
        self._given = 0
        most = max(self._few, len(self._waiting) // 2)
        while self._waiting and self._given < most:
            place = self._waiting.popleft()
            if not place.done():  # its waiter was cancelled
                place.set_result(None)
                self._given += 1
        if self._given:
            self._loop.call_soon(self._round)
