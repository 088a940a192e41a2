"""Replies are taken up a part at a time, so that what waits to be sent does not wait for all of them."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turns"]


class Turns:
    """Gives turns in the order of asking: for ``few`` rows in each round of an event loop, or for half of a crowd.

    Replies come in crowds, because requests leave in crowds: as many as one commit covers. Taken up all in one round of
    the loop, the first request to follow them would leave only after the last reply of the crowd was read, and the
    crowd would stay one for the whole run. With turns it draws itself apart; half of those who wait at a time, so that
    a great crowd needs few rounds, each of which ends with a commit. A reply with many rows has a round for itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, few: int) -> None:
        self._loop = loop
        self._few = few
        self._given = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def next(self, rows: int = 1) -> asyncio.Future[None] | None:
        """Returns None where there is a turn for ``rows`` now, else a future that is done when there is."""
        if self._given < self._few:
            if self._given == 0:
                self._loop.call_soon(self._round)
            self._given += rows
            return None
        place = self._loop.create_future()
        self._waiting.append((rows, place))
        return place

    def _round(self) -> None:
        self._given = 0
        most = max(self._few, len(self._waiting) // 2)
        while self._waiting and self._given < most:
            rows, place = self._waiting.popleft()
            if not place.done():  # its waiter was cancelled
                place.set_result(None)
                self._given += rows
        if self._given:
            self._loop.call_soon(self._round)
