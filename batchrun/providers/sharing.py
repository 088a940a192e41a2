"""What a call of several rows used and cost in one sum, shared out to its rows: the shares always add up to the sum."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from batchrun.records import Usage

__all__ = ["share_cost", "share_usage", "shares"]

_COST_EXPONENT = -12
"""Costs are shared to the millionth of a millionth of a dollar, or finer where the sum is stated finer."""


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Returns whole parts of ``total`` in proportion to ``weights`` (equal where all are 0), exact in sum.

    part_i = ⌊total · W_i / W⌋ - ⌊total · W_(i-1) / W⌋, with W_i the sum of the first i weights: each is within 1 of
    its due.
    """
    whole = sum(weights)
    if whole == 0:
        weights, whole = [1] * len(weights), len(weights)
    parts, weight, given = [], 0, 0
    for own in weights:
        weight += own
        until = total * weight // whole
        parts.append(until - given)
        given = until
    return parts


def share_usage(usage: Usage, inputs: Sequence[int], outputs: Sequence[int]) -> list[Usage]:
    """Returns each row's part of ``usage``: input by the weights ``inputs``, output by ``outputs``.

    Every field adds up to the sum's, and no row has more cached tokens than input, nor more reasoning than output.
    """
    given = shares(usage.input_tokens, inputs)
    cached = shares(usage.cached_tokens, given)  # of k parts never more than k
    written = shares(usage.cache_write_tokens, [own - read for own, read in zip(given, cached, strict=True)])
    said = shares(usage.output_tokens, outputs)
    reasoning = shares(usage.reasoning_tokens, said)
    return [Usage(*parts) for parts in zip(given, said, cached, written, reasoning, strict=True)]


def share_cost(cost_usd: Decimal, weights: Sequence[int]) -> list[Decimal]:
    """Returns each row's part of ``cost_usd``, exact in sum."""
    sign, digits, exponent = cost_usd.as_tuple()
    if not isinstance(exponent, int) or sign:
        raise ValueError(f"{cost_usd} is no cost")
    unit = min(exponent, _COST_EXPONENT)
    units = int("".join(map(str, digits))) * 10 ** (exponent - unit)
    return [Decimal((0, tuple(map(int, str(part))), unit)) for part in shares(units, weights)]
