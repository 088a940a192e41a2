"""What tokens cost: the user's own prices, then the offline snapshot of genai-prices. Never the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Context, Decimal
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from batchrun.config import PriceOverride
from batchrun.records import Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice, PriceCalculation, TieredPrices

__all__ = ["PriceBook"]

_LISTED_AS = {
    "anthropic": "anthropic",
    "deepseek": "deepseek",
    "fireworks": "fireworks",
    "gemini": "google",
    "groq": "groq",
    "litellm": "litellm",
    "mistral": "mistral",
    "openai": "openai",
    "openrouter": "openrouter",
    "together": "together",
    "xai": "x-ai",
}
"""Our preset → the provider's id in genai-prices."""

_BY_MODEL = frozenset({"sim"})
"""Presets whose models are priced by name alone: the simulated provider shows what a real one would cost."""

_STANDARD = frozenset({"", "auto", "default", "standard", "standard_only", "on_demand"})
_NEVER_DEARER = frozenset({"batch", "flex"})

_EXACT = Context(prec=100)
_PER_MTOK = Decimal("0.000001")
_MAX_KNOWN = 1_000


class _Rates(msgspec.Struct, frozen=True):
    """Dollars per token where a response has more than ``above`` input tokens. None: unknown."""

    above: int
    input: Decimal | None
    cached: Decimal | None
    cache_write: Decimal | None
    output: Decimal | None
    reasoning: Decimal | None
    request: Decimal
    """Dollars per response."""


_Brackets: TypeAlias = tuple[_Rates, ...]
"""By rising ``above``; a later one replaces the earlier for the whole response. Empty: nothing is known."""


class PriceBook:
    """Implements ``records.Prices``: what one response costs, exact, or None where its price is unknown.

    A price of the user's own is as paid: no tier, time of day or cache discounts it further. For one model
    the exact name in ``prices`` comes first, then patterns (``gpt-5*``), the one with most literal characters
    first, then ``price``, then genai-prices; each of input, output, cached input and cache write by itself.

    ``provider`` is a preset's name. Where genai-prices does not list it, ``base_url`` is looked up; what it
    does not list either (a gateway, a local server) sells at prices of its own, which are unknown. With
    neither given, the model's name alone decides.

    ``at`` is the moment whose price list counts, so that a run has one; None: when a model is first asked
    for. Where a list varies with the time of day, the dearest time counts: a budget must hold at all times.

    Service tiers: ``flex`` and ``batch`` cost the standard price where theirs is not listed, which is never
    too little; any other tier that is not listed (``priority``) is unknown.
    """

    def __init__(
        self,
        price: PriceOverride | None = None,
        prices: Mapping[str, PriceOverride] | None = None,
        *,
        provider: str | None = None,
        base_url: str | None = None,
        at: datetime | None = None,
    ) -> None:
        self._overrides = (*_by_specificity(prices or {}), ("*", price or PriceOverride()))
        self._listed = True
        self._where: dict[str, Any] = {}
        if provider in _LISTED_AS:
            self._where = {"provider_id": _LISTED_AS[provider]}
        elif provider not in _BY_MODEL and base_url is not None:
            self._where = {"provider_api_url": base_url}
        elif provider is not None and provider not in _BY_MODEL:
            self._listed = False
        self._at = at
        self._known: dict[tuple[str, str | None], _Brackets] = {}

    def price(self, model: str, usage: Usage, *, service_tier: str | None = None) -> Decimal | None:
        """Returns the price of one response; None too where its usage contradicts itself."""
        brackets = self._brackets(model, service_tier)
        cached, written = usage.cached_tokens, usage.cache_write_tokens
        fresh = usage.input_tokens - cached - written
        if not brackets or fresh < 0:
            return None
        rates = brackets[0]
        for bracket in brackets[1:]:
            if usage.input_tokens > bracket.above:
                rates = bracket
        reasoning = min(usage.reasoning_tokens, usage.output_tokens)
        total = rates.request
        for tokens, rate in (
            (fresh, rates.input),
            (cached, rates.cached),
            (written, rates.cache_write),
            (usage.output_tokens - reasoning, rates.output),
            (reasoning, rates.reasoning),
        ):
            if tokens:
                if rate is None:
                    return None
                total = _EXACT.fma(rate, tokens, total)
        return total

    def worst(
        self, model: str, input_tokens: int, output_tokens: int, *, service_tier: str | None = None
    ) -> Decimal | None:
        """Returns what no response with at most these tokens exceeds: all at the dearest rate within reach.

        Within reach are reads and writes of the cache, and every long-context bracket up to ``input_tokens``.
        """
        worst: Decimal | None = None
        for rates in self._brackets(model, service_tier):
            if worst is not None and rates.above >= input_tokens:
                break
            total = rates.request
            for tokens, dearest in (
                (input_tokens, _dearest(rates.input, rates.cached, rates.cache_write)),
                (output_tokens, _dearest(rates.output, rates.reasoning)),
            ):
                if tokens:
                    if dearest is None:
                        return None
                    total = _EXACT.fma(dearest, tokens, total)
            worst = total if worst is None else max(worst, total)
        return worst

    # ---------------------------------------------------------------- rates, once per model and tier

    def _brackets(self, model: str, service_tier: str | None) -> _Brackets:
        brackets = self._known.get((model, service_tier))
        if brackets is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            brackets = self._known[model, service_tier] = self._learn(model, (service_tier or "").lower())
        return brackets

    def _learn(self, model: str, tier: str) -> _Brackets:
        own = self._own(model)
        if own.input is not None and own.output is not None:
            listed: _Brackets = (_UNKNOWN,)
        else:
            listed = self._list(model, tier) or (_UNKNOWN,)
        brackets = tuple(_overridden(rates, own) for rates in listed)
        known = any(rates.input is not None or rates.output is not None for rates in brackets)
        return brackets if known else ()

    def _own(self, model: str) -> PriceOverride:
        fits = [override for pattern, override in self._overrides if model == pattern or fnmatchcase(model, pattern)]
        return PriceOverride(
            *(
                next((rate for rate in rates if rate is not None), None)
                for rates in zip(
                    *((fit.input, fit.output, fit.cached_input, fit.cache_write) for fit in fits), strict=True
                )
            )
        )

    def _list(self, model: str, tier: str) -> _Brackets:
        """Returns what genai-prices lists: the dearest of the moments that matter."""
        if not self._listed:
            return ()
        at = self._at or datetime.now(UTC)
        context = None
        if tier not in _STANDARD:
            context = {"processing": "batch"} if tier == "batch" else {"service_tier": tier}
        try:
            found = self._look_up(model, at)
            if context is not None and not _has(found, context, at):
                if tier not in _NEVER_DEARER:
                    return ()
                context = None
            prices = [self._look_up(model, moment, context).model_price for moment in _moments(found.model, at)]
        except (LookupError, ValueError):
            return ()
        starts = sorted({start for price in prices for start in _starts(price)})
        return tuple(_at_its_dearest(prices, start) for start in starts)

    def _look_up(self, model: str, at: datetime, context: Mapping[str, str] | None = None) -> PriceCalculation:
        # 0.3 s that a run with prices of its own need not wait for.
        from genai_prices import Usage as NoUsage
        from genai_prices import calc_price

        return calc_price(NoUsage(), model, genai_request_timestamp=at, price_context=context, **self._where)


_UNKNOWN = _Rates(-1, None, None, None, None, None, Decimal(0))


def _by_specificity(prices: Mapping[str, PriceOverride]) -> Iterator[tuple[str, PriceOverride]]:
    """Yields exact names before patterns, and patterns by falling number of literal characters."""

    def rank(pattern: str) -> tuple[bool, int, str]:
        wild = sum(pattern.count(sign) for sign in "*?[")
        return wild > 0, wild - len(pattern), pattern

    for pattern in sorted(prices, key=rank):
        yield pattern, prices[pattern]


def _overridden(rates: _Rates, own: PriceOverride) -> _Rates:
    cached, cache_write = _per_token(own.cached_input), _per_token(own.cache_write)
    if own.input is not None:
        # As paid: a listed cache discount is no discount on the user's own price.
        fresh = _per_token(own.input)
        cached = fresh if cached is None else cached
        cache_write = fresh if cache_write is None else cache_write
    else:
        fresh = rates.input
        cached = rates.cached if cached is None else cached
        cache_write = rates.cache_write if cache_write is None else cache_write
    output, reasoning = rates.output, rates.reasoning
    if own.output is not None:
        output = reasoning = _per_token(own.output)
    return _Rates(rates.above, fresh, cached, cache_write, output, reasoning, rates.request)


def _per_token(per_mtok: Decimal | None) -> Decimal | None:
    return None if per_mtok is None else _EXACT.multiply(per_mtok, _PER_MTOK)


def _dearest(*rates: Decimal | None) -> Decimal | None:
    """Returns the highest; None where the first, on which the others build, is unknown."""
    return None if rates[0] is None else max(rate for rate in rates if rate is not None)


# ---------------------------------------------------------------- reading genai-prices


def _has(found: PriceCalculation, context: Mapping[str, str], at: datetime) -> bool:
    """Tells whether a context is listed; the library itself would give the standard price without a word."""
    if not any(found.model is model for model in found.provider.models):
        return False
    return any(
        all(context.get(key) == value for key, value in variant.when.items())
        and (variant.constraint is None or variant.constraint.active(at))
        for variant in found.model.price_variants or ()
    )


def _moments(model: ModelInfo, at: datetime) -> list[datetime]:
    """Returns ``at``, and every moment of its day at which a price by time of day begins or ends."""
    times = {
        getattr(price.constraint, name)
        for price in (model.prices if isinstance(model.prices, list) else ())
        for name in ("start_time", "end_time")
        if hasattr(price.constraint, name)
    }
    return [at, *(datetime.combine(at.date(), time) for time in sorted(times))]


def _starts(price: ModelPrice) -> Iterator[int]:
    yield -1
    for value in vars(price).values():
        for tier in getattr(value, "tiers", ()):
            yield tier.start


def _at_its_dearest(prices: list[ModelPrice], above: int) -> _Rates:
    def rate(name: str) -> Decimal | None:
        rates = [_rate(getattr(price, name), above) for price in prices]
        known = [rate for rate in rates if rate is not None]
        return max(known) if len(known) == len(rates) else None

    fresh, output = _per_token(rate("input_mtok")), _per_token(rate("output_mtok"))
    cached, written, reasoning = (
        _per_token(rate(name)) for name in ("cache_read_mtok", "cache_write_mtok", "output_reasoning_mtok")
    )
    return _Rates(
        above,
        fresh,
        fresh if cached is None else cached,
        fresh if written is None else written,
        output,
        output if reasoning is None else reasoning,
        (rate("requests_kcount") or Decimal(0)) / 1000,
    )


def _rate(value: Decimal | TieredPrices | None, above: int) -> Decimal | None:
    """Returns the price per million (or thousand) for responses with more than ``above`` input tokens."""
    if value is None or isinstance(value, Decimal):
        return value
    rate = value.base
    for tier in value.tiers:
        if above >= tier.start:
            rate = tier.price
    return rate
