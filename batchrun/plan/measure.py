"""What is measured for the control law: the throughput of a round, and what kind of limit the refusals met."""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec
from msgspec.structs import replace

__all__ = ["Meetings", "Round", "Throughput"]

ROUND_TRIPS = 1.5
"""A round is measured for so many round trips, after one in which the last change works itself out."""
ROUND_S = 1.0
"""It is no shorter than this, so that a fast server is not tried many times a second."""
FEWEST_ANSWERS, ENOUGH_ANSWERS = 8, 40
"""A round has half a window of answers, but no fewer and no more than these."""


class Throughput(msgspec.Struct, frozen=True):
    """What a round showed.

    By Little's law: calls in flight over the mean time of service, which is steadier than a count of ends; for tokens
    it also takes out how much they differ from call to call.
    """

    calls_s: float
    tokens_s: float
    answers: int
    in_flight: float
    """On average."""
    counted_s: float
    """Answers a second, counted."""

    def blended(self, before: Throughput | None) -> Throughput:
        """Returns the mean with what was shown before at the same window."""
        if before is None:
            return self
        calls_s, tokens_s = (self.calls_s + before.calls_s) / 2, (self.tokens_s + before.tokens_s) / 2
        return replace(self, calls_s=calls_s, tokens_s=tokens_s)

    def gain_over(self, before: Throughput) -> float:
        """Returns by which share tokens a second rose; calls a second where no tokens are known."""
        if before.tokens_s > 0.0:
            return self.tokens_s / before.tokens_s - 1.0
        return self.calls_s / before.calls_s - 1.0

    def best_gain_over(self, before: Throughput) -> float:
        """Returns by which share tokens or calls a second rose, whichever rose more."""
        return max(self.gain_over(before), self.calls_s / before.calls_s - 1.0)


class Round:
    """Measures from one round trip after ``now`` on; whole once there is enough to go by."""

    __slots__ = ("_answers", "_area", "_area_at", "_ends", "_from", "_needed", "_service_s", "_tokens")

    def __init__(self, now: float, rtt_s: float, window: float) -> None:
        self._from = self._area_at = now + rtt_s
        self._ends = self._from + max(ROUND_S, ROUND_TRIPS * rtt_s)
        self._needed = max(FEWEST_ANSWERS, min(ENOUGH_ANSWERS, window / 2))
        self._area = 0.0
        self._answers = 0
        self._tokens = 0
        self._service_s = 0.0

    def passed(self, now: float, in_flight: int) -> None:
        """``in_flight`` calls were out until now."""
        if now > self._area_at:
            self._area += in_flight * (now - self._area_at)
            self._area_at = now

    def answered(self, now: float, service_s: float, tokens: int) -> bool:
        """Takes an answer; returns whether the round is whole."""
        if now < self._from:
            return False
        self._answers += 1
        self._tokens += tokens
        self._service_s += service_s
        return now >= self._ends and self._answers >= self._needed

    def result(self, now: float) -> Throughput:
        """Returns what a whole round showed."""
        span_s = now - self._from
        in_flight = self._area / span_s
        per_s = in_flight / max(self._service_s, 1e-9)
        return Throughput(per_s * self._answers, per_s * self._tokens, self._answers, in_flight, self._answers / span_s)


class Meetings:
    """What kind of limit the refusals met, told from what was in service at the last few cuts.

    A server that limits what is in flight refuses with as many in service as ever, and never with fewer than it let
    in before. A refusal with fewer says that a rate is limited.
    """

    STEADY, SCATTERED = 0.08, 0.12
    """Spread of the counts: up to the one they are the same, beyond the other they are not."""
    SMALLEST = 4
    """Fewer calls than this cannot be told to be steady."""

    def __init__(self) -> None:
        self.kind: Literal["in-flight", "rate"] | None = None
        self._met: deque[tuple[int, bool]] = deque(maxlen=5)
        self._let_in = 0
        self._judged_at = float("-inf")

    def judge(self, at: float, rtt_s: float, *, others: int, admitted: int, after: int) -> None:
        """Takes a cut: the refused call had ``others`` beside it, and ``admitted`` turned out to be in service.

        ``after`` of these were sent after the refused one; they may be there only because others had ended.
        """
        agrees = others >= self._let_in
        self._let_in = max(1, admitted - after)
        if rtt_s == 0.0 or (agrees and at - self._judged_at < rtt_s):
            return  # within a round trip nothing has ended yet: the same meeting again
        self._judged_at = at
        self._met.append((max(1, admitted), agrees))
        disagreed = [agreed for _, agreed in self._met][-3:].count(False)
        if disagreed >= 2:
            self.kind = "rate"
        elif disagreed == 1 and self.kind == "in-flight" and not agrees:
            self.kind = None
        elif disagreed == 0 and len(self._met) >= 3:
            self._judge_spread()

    def _judge_spread(self) -> None:
        """With no refusal against it: in-flight if the counts are steady; more of them must say so against a rate."""
        counts = [count for count, _ in self._met]
        spread = (max(counts) - min(counts)) / (sum(counts) / len(counts))
        if spread > self.SCATTERED:
            self.kind = "rate"
        elif spread > self.STEADY or min(counts) < self.SMALLEST:
            pass  # neither the one nor the other
        elif self.kind is None or len(counts) == self._met.maxlen:
            self.kind = "in-flight"
