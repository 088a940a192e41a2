"""Who begins a provider's prompt cache and who waits for it: of calls whose prompts begin alike, one goes first.

A cache can be read once the reply to the call that began it has come. So the first call of a group leads, and the
others are held, without a slot, until it is answered. Where a leader fails, or its reply is late, the next one leads:
what is held always has somebody before it who is out or may go.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import Generic, TypeAlias, TypeVar

from batchrun.records import Call

__all__ = ["LIFE_S", "Entry", "Prefixes"]

LIFE_S = 240.0
"""A cache lives for five minutes after it was used, which may have been a minute before its reply came."""
PATIENCE_RTTS = 4.0
LEAST_PATIENCE_S = 10.0
"""A leader whose reply takes longer than so many round trips, or this, is a straggler: another leads as well."""
SWEEP_AT = 1_024
"""Groups remembered before those are looked for that are over."""

Entry: TypeAlias = tuple[float, int, int, Call]
"""A call with its urgency, as the lane's heap holds it."""
_Home = TypeVar("_Home")


class _Group(Generic[_Home]):
    """The calls that share one beginning."""

    __slots__ = ("due_at", "held", "home", "leader", "warm_until")

    def __init__(self) -> None:
        self.leader: Call | None = None
        """Goes first, or is out: the cache begins with its reply."""
        self.due_at = inf
        """Until when the reply is waited for; ``inf`` before the leader is out."""
        self.warm_until = -inf
        self.home: _Home | None = None
        """Where the cache is."""
        self.held: list[Entry] = []


class Prefixes(Generic[_Home]):
    """The groups of one lane. A call that is in groups within groups waits for each, the widest first.

    Whoever holds calls back does so for a leader that is out, that may go, or that is itself held in a wider group.
    """

    __slots__ = ("_due", "_groups", "_sweep_at", "held")

    def __init__(self) -> None:
        self._groups: dict[int, _Group[_Home]] = {}
        self._due: list[tuple[float, int]] = []
        """A heap: until when a leader is waited for, and its group."""
        self._sweep_at = SWEEP_AT
        self.held = 0
        """Calls that wait for a leader."""

    @property
    def due_at(self) -> float:
        """When a call may have waited long enough; ``inf`` where none waits."""
        return self._due[0][0] if self.held and self._due else inf

    def admit(self, now: float, entry: Entry) -> bool:
        """Says whether a call may go: it leads the groups of which there is no cache. If it may not, it is held."""
        call = entry[3]
        if len(self._groups) >= self._sweep_at:
            self._sweep(now)
        cold = []
        for number in call.prefix:
            group = self._group(number)
            if now < group.warm_until:
                continue
            if group.leader is not None and group.leader is not call and now < group.due_at:
                group.held.append(entry)
                self.held += 1
                return False
            cold.append(group)
        for group in cold:
            if group.leader is not call:
                group.leader, group.due_at = call, inf
        return True

    def home(self, now: float, call: Call) -> _Home | None:
        """Returns where the longest beginning of a call is cached; None where it is nowhere."""
        for number in reversed(call.prefix):
            group = self._groups.get(number)
            if group is not None and now < group.warm_until:
                return group.home
        return None

    def sent(self, now: float, call: Call, rtt_s: float) -> None:
        """A call that was just admitted goes out."""
        for number in call.prefix:
            group = self._groups[number]
            if group.leader is call:
                group.due_at = now + max(LEAST_PATIENCE_S, PATIENCE_RTTS * rtt_s)
                heapq.heappush(self._due, (group.due_at, number))

    def ended(self, now: float, call: Call, home: _Home, *, processed: bool) -> list[Entry]:
        """A call ended; ``processed``: the server has read its prompt. Returns what to admit that waited for it."""
        released: list[Entry] = []
        for number in call.prefix:
            group = self._group(number)
            if processed:
                group.leader, group.home, group.warm_until = None, home, now + LIFE_S
                released += group.held
                group.held = []
            elif group.leader is call:
                group.leader = None
                released += _first(group)
        self.held -= len(released)
        return released

    def overdue(self, now: float) -> list[Entry]:
        """Returns what to admit since its group's leader has been waited for long enough: one call of each."""
        released: list[Entry] = []
        while self._due and self._due[0][0] <= now:
            at, number = heapq.heappop(self._due)
            group = self._groups.get(number)
            if group is not None and group.due_at == at:
                released += _first(group)
        self.held -= len(released)
        return released

    def _group(self, number: int) -> _Group[_Home]:
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = _Group()
        return group

    def _sweep(self, now: float) -> None:
        """Forgets the groups that are over."""
        self._groups = {
            number: group
            for number, group in self._groups.items()
            if group.leader is not None or group.held or now < group.warm_until
        }
        self._sweep_at = max(SWEEP_AT, 2 * len(self._groups))


def _first(group: _Group[_Home]) -> list[Entry]:
    return [group.held.pop(0)] if group.held else []
