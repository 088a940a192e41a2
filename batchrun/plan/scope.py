"""The controllers of one scope (origin, model), and the lane of calls that may go out through a model's scopes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import inf

from batchrun.plan.limit import Limit
from batchrun.plan.pace import Expectation, KnownQuota, Mark, Sample, even_pace
from batchrun.plan.prefix import Entry, Prefixes
from batchrun.plan.retry import Breaker, RetryBudget
from batchrun.plan.steps import Flow
from batchrun.records import Call, Quotas

__all__ = ["Flight", "Lane", "Origin", "Scope"]

LONGEST_PAUSE_S = 300.0
"""A hint beyond this holds back its row, not everybody."""
FIRST_WINDOW_S = 0.25
"""The very first window goes out over this time, so that a refusal can still spare the rest of it."""
NOTHING_SENT = Mark(0.0, 0.0)
UNLIMITED_OUTPUT = 1_024
"""Output tokens to expect, before anything is known, of a request that names no limit."""


class Flight:
    """What is remembered of a call while it is out."""

    __slots__ = (
        "expected", "most", "order", "others", "probe", "request_mark", "sample", "scope", "token_mark",
    )  # fmt: skip

    def __init__(self, scope: Scope, expected: float, most: int) -> None:
        self.scope = scope
        self.expected = expected
        """Tokens charged to the user's own limit: the input and the output that is expected."""
        self.most = most
        """Tokens that the server may charge: the input and the output that is allowed."""
        self.others = scope.limit.in_flight
        self.order = 0
        self.probe = False
        self.request_mark = NOTHING_SENT
        self.token_mark = NOTHING_SENT
        self.sample: Sample | None = None


class Origin:
    """One endpoint. What the user set holds for all that is sent to it, whatever the model."""

    __slots__ = ("number", "requests", "tokens")

    def __init__(self, flow: Flow, now: float, number: int) -> None:
        self.number = number
        self.requests = even_pace(now, flow.rpm)
        self.tokens = even_pace(now, flow.tpm)


class Scope:
    """What one model at one endpoint allows: its window, its paces, its pause and its breaker."""

    __slots__ = (
        "_gap_s", "_gap_until", "_hinted", "_next_at", "_patience_s", "answered_at", "breaker", "limit", "origin",
        "pause_s", "paused_until", "reason", "requests", "tokens",
    )  # fmt: skip

    def __init__(self, flow: Flow, rng: random.Random, now: float, origin: Origin) -> None:
        self.origin = origin.number
        self.limit = Limit(now, flow.max_concurrency, flow.concurrency)
        self.requests = KnownQuota(now, origin.requests)
        self.tokens = KnownQuota(now, origin.tokens, least_scale=0.02)
        self.breaker = Breaker(rng)
        self.paused_until = now
        self.pause_s = 0.0
        self._patience_s = flow.patience_s
        self._hinted = False
        self.answered_at = -inf
        self.reason = "concurrency"
        # Herds: after a pause, and at the very beginning, a window goes out evenly and not at once.
        self._next_at = now
        self._gap_s = 0.0 if flow.concurrency else FIRST_WINDOW_S / self.limit.window
        self._gap_until = now + FIRST_WINDOW_S

    def opens_at(self, now: float, expected: float, most: int) -> float:
        """Returns when such a call may go out: now or earlier, later, or ``inf`` for after some call has ended."""
        if self.breaker.opened_at is not None:
            self.reason = "breaker"
            if self.breaker.probing:
                patient_until = self.breaker.opened_at + self._patience_s
                return patient_until if patient_until > now else inf
            return max(self.breaker.probe_at, self.paused_until)
        if self.paused_until > now:
            self.reason = "pause"
            return self.paused_until
        opens_at = self.limit.opens_at(now)
        if opens_at == inf:
            self.reason = "concurrency"
            return inf
        if opens_at > now:
            self.reason = "rate"
        if self._next_at > opens_at:
            opens_at = self._next_at
            self.reason = "concurrency"
        wait_s = self.requests.wait_s(now, 1.0, 1.0)
        if now + wait_s > opens_at:
            opens_at = now + wait_s
            self.reason = "requests per minute"
        wait_s = self.tokens.wait_s(now, expected, most)
        if now + wait_s > opens_at:
            opens_at = now + wait_s
            self.reason = "tokens per minute"
        return opens_at

    def describe(self) -> str:
        """Says in words what held a call back."""
        if self.reason == "breaker":
            return "breaker open, probing"
        if self.reason == "pause":
            return f"paused {self.pause_s:.0f} s by Retry-After" if self._hinted else "cooling down after a refusal"
        if self.reason == "rate":
            return f"server rate limit ≈ {self.limit.rate or 0.0:.1f}/s"
        if self.reason == "concurrency" and self.limit.kind == "in-flight":
            return f"server in-flight limit ≈ {self.limit.window}"
        return self.reason

    def send(self, now: float, flight: Flight) -> None:
        """Takes the slot and the rate for a call that goes out."""
        flight.request_mark = self.requests.take(now, 1.0, 1.0)
        flight.token_mark = self.tokens.take(now, flight.expected, flight.most)
        self.limit.sent(now)
        flight.order = self.limit.sends
        if self.breaker.opened_at is not None:
            flight.probe = True
            self.breaker.probing = True
        if now < self._gap_until:
            self._next_at = now + self._gap_s

    def learn(self, now: float, quotas: Quotas, sent_at: float, flight: Flight) -> None:
        """Takes the limits that a reply's headers tell."""
        if quotas.requests is not None:
            self.requests.learn(now, quotas.requests, sent_at, flight.request_mark)
        if quotas.tokens is not None:
            self.tokens.learn(now, quotas.tokens, sent_at, flight.token_mark)

    def refused(self, now: float, sent_at: float, flight: Flight, hint_s: float | None) -> bool:
        """Takes a refusal: pauses, and cuts the limit unless a known quota explains it.

        Returns whether this began a pause worth telling of.
        """
        self.tokens.give_back(now, flight.expected, flight.most)
        if self.requests.exhausted(now, 1.0) or self.tokens.exhausted(now, flight.most):
            self.limit.ended(now)
            cool_down_s = 0.0
        else:
            cool_down_s = self.limit.refused(now, sent_at, flight.others, flight.order)
        pause_s = cool_down_s if hint_s is None else min(LONGEST_PAUSE_S, hint_s)
        if now + pause_s <= self.paused_until:
            return False
        began = self.paused_until <= now
        self.paused_until = now + pause_s
        self.pause_s = pause_s
        self._hinted = hint_s is not None
        if pause_s > 0.5 * self.limit.rtt_s:  # long enough for what was in flight to have landed
            self._spread(self.paused_until)
        return began and pause_s >= 1.0

    def works(self, now: float, sent_at: float, flight: Flight) -> bool:
        """Takes a sign of life; returns whether it closes the breaker."""
        self.answered_at = now
        if flight.probe:
            self.breaker.probed(now, succeeded=True)
            self.limit.restart(now)
            self._spread(now)
        elif self.breaker.opened_at is None:
            self.breaker.succeeded(sent_at)
        return flight.probe

    def failed(self, now: float, sent_at: float) -> bool:
        """Takes an error that says something about the server; returns whether it opens the breaker.

        A slot freed by an error is not filled at once: a dead server would be tried as fast as it fails.
        """
        self._spread(now)
        self._next_at = now + self._gap_s
        return self.breaker.failed(now, sent_at)

    def _spread(self, since: float) -> None:
        """Lets a window go out over a round trip, and not at once."""
        self._gap_s = self.limit.rtt_s / self.limit.window
        self._gap_until = since + self.limit.rtt_s

    def unsent(self, now: float, flight: Flight) -> None:
        """The call did not go out after all: gives back its slot and rate."""
        self.limit.ended(now)
        self.requests.give_back(now, 1.0, 1.0)
        self.tokens.give_back(now, flight.expected, flight.most)
        if flight.probe:
            self.breaker.probing = False


class Lane:
    """The calls of one model that may go out now, and its scopes: one per endpoint."""

    __slots__ = ("_counts_max", "_measured", "expectation", "prefixes", "ready", "retries", "scopes")

    def __init__(self, flow: Flow, rng: random.Random, now: float, origins: Iterable[Origin]) -> None:
        self.ready: list[Entry] = []
        """A heap: the most urgent first, then in order."""
        self.prefixes: Prefixes[Scope] = Prefixes()
        self.scopes = [Scope(flow, rng, now, origin) for origin in origins]
        self.retries = RetryBudget(now)
        self.expectation = Expectation()
        self._counts_max = flow.counts_max_tokens
        self._measured = flow.tpm is not None and not flow.counts_max_tokens

    @property
    def room(self) -> int:
        """Calls that may be in flight through its scopes."""
        return sum(scope.limit.window for scope in self.scopes)

    def flight(self, scope: Scope, call: Call) -> Flight:
        """Returns the flight of a call that goes out through ``scope``."""
        expected, most = self.charge(call)
        flight = Flight(scope, expected, most)
        if self._measured:
            flight.sample = self.expectation.sent()
        return flight

    def charge(self, call: Call) -> tuple[float, int]:
        """Returns the tokens that are expected of a call, and the most that it may be charged."""
        limit = most_output(call)
        most = call.tokens + limit
        return (most if self._counts_max else call.tokens + limit * self.expectation.share), most

    def used(self, now: float, call: Call, flight: Flight, tokens: tuple[int, int] | None) -> None:
        """Settles the charge of a call that was processed: input and output tokens, None where unknown."""
        if flight.sample is None:
            return
        if tokens is None:
            self.expectation.ended(flight.sample, None)
            return
        limit = most_output(call)
        self.expectation.ended(flight.sample, tokens[1] / limit if limit else None)
        flight.scope.tokens.correct(now, sum(tokens) - flight.expected)


def most_output(call: Call) -> int:
    """Returns the output tokens that a call's rows allow together."""
    if len(call.rows) == 1:
        limit = call.rows[0].max_output
        return UNLIMITED_OUTPUT if limit is None else limit
    return sum(UNLIMITED_OUTPUT if row.max_output is None else row.max_output for row in call.rows)
