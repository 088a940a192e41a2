"""Rows, calls, answers and faults for the tests of ``plan``, and a hand that plays a schedule through."""

from __future__ import annotations

import random
from decimal import Decimal

from batchrun.plan.schedule import Done, Flow, Schedule, Send, Settlement, Step
from batchrun.records import Call, Fault, FaultKind, Output, Quotas, Reply, Row, Usage

ANSWER = Output(value=b'"ok"', body=b"{}")
WORST = Decimal("0.01")


def row(
    line: int,
    *,
    model: str = "m",
    max_output: int | None = 100,
    priority: int = 0,
    size: int = 2,
    prefix: tuple[int, ...] = (),
) -> Row:
    return Row(line, f"r{line}", "chat", model, b"x" * size, max_output, priority, tokens=100, prefix=prefix)


def call(
    *lines: int, model: str = "m", priority: int = 0, worst: Decimal = WORST, prefix: tuple[int, ...] = ()
) -> Call:
    rows = tuple(row(line, model=model, priority=priority, prefix=prefix) for line in lines)
    return Call(rows, 1, 100 * len(rows), worst, priority)


def reply(
    to: Call, *, without: tuple[int, ...] = (), usage: Usage | None = None, quotas: Quotas | None = None
) -> Reply:
    outputs = {each.custom_id: ANSWER for each in to.rows if each.line not in without}
    return Reply(outputs, usage or Usage(to.tokens, 20 * len(to.rows)), quotas=quotas)


def fault(kind: FaultKind, *, billed: bool = False, hint_s: float | None = None) -> Fault:
    return Fault(kind, f"it was {kind}", retry_after_s=hint_s, maybe_processed=billed)


BUSY = Fault("rate_limited", "too many requests", 429)
BROKEN = Fault("overloaded", "internal error", 500, maybe_processed=True)
UNREACHABLE = Fault("network", "connection refused", connected=False)


class Play:
    """A schedule and a clock; what is out is remembered in the order of sending."""

    def __init__(self, flow: Flow = Flow(), *, seed: int = 1) -> None:  # noqa: B008 - frozen
        self.schedule = Schedule(flow, random.Random(seed), 0.0)
        self.now = 0.0
        self.out: list[Call] = []
        self.sends: list[tuple[float, int, int]] = []
        """(when, first line, origin) of every send."""
        self.limits: list[int] = []
        """The window after every change that was told, beginning with the first."""
        self.why: list[str] = []

    def offer(self, *calls: Call) -> None:
        self.schedule.offer(self.now, calls)

    def step(self) -> Step:
        step = self.schedule.next(self.now)
        if isinstance(step, Send):
            self.out.append(step.call)
            self.sends.append((self.now, step.call.rows[0].line, step.origin))
        return step

    def send_all(self) -> Step:
        """Sends what may go out now; returns what the schedule says then."""
        while isinstance(step := self.step(), Send):
            pass
        self.listen()
        return step

    def wait(self, seconds: float, *, tick: float = 0.05) -> Step:
        """Lets time pass, sending whatever may go out."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + tick)
            step = self.send_all()
        return step

    def end(self, ended: Call, result: Reply | Fault | None = None, cost: Decimal | None = None) -> Settlement:
        """Ends one call; with a full answer where nothing else is said."""
        self.out.remove(ended)
        settlement = self.schedule.settle(self.now, ended, result or reply(ended), cost_usd=cost)
        self.listen()
        return settlement

    def end_all(self, result: Fault | None = None) -> list[Settlement]:
        return [self.end(each, result) for each in list(self.out)]

    def listen(self) -> None:
        for note in self.schedule.notes():
            self.why.append(f"{note.what}: {note.text}")
            if note.what == "limit":
                old, _, new = note.text.split(" ")[:3]
                self.limits = self.limits or [int(old)]
                self.limits.append(int(new))

    @property
    def lines_out(self) -> list[int]:
        return [each.rows[0].line for each in self.out]

    @property
    def done(self) -> bool:
        return isinstance(self.step(), Done)
