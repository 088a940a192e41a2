from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction

import pytest
from genai_prices import Usage as GenaiUsage
from genai_prices import calc_price
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.config import PriceOverride
from batchrun.records import Usage
from batchrun.report.prices import PriceBook

UNHURRIED = settings(deadline=None)  # a shared machine may pause for longer than any deadline

AT = datetime(2026, 11, 15, 12, tzinfo=UTC)
MODELS = {
    "openai": ["gpt-4o", "gpt-5-mini", "gpt-5-mini-2025-08-07", "gpt-5.4", "gpt-5.5", "text-embedding-3-small"],
    "anthropic": ["claude-sonnet-4-5", "claude-haiku-4-5", "claude-opus-4-1"],
    "gemini": ["gemini-2.5-pro", "gemini-2.5-flash"],
    "mistral": ["mistral-small-latest"],
    "xai": ["grok-4-0709"],
}
PAIRS = [(provider, model) for provider, models in MODELS.items() for model in models]
BOOKS = {provider: PriceBook(provider=provider, at=AT) for provider in MODELS}
IDS = {"gemini": "google", "xai": "x-ai"}

# Around the starts of long-context tiers as well as anywhere.
counts = st.integers(0, 5_000) | st.integers(127_990, 128_010) | st.integers(199_990, 200_010)
counts |= st.integers(271_990, 272_010) | st.integers(0, 2_000_000)


@st.composite
def usages(draw):
    total, output = draw(counts), draw(st.integers(0, 100_000))
    cached = draw(st.integers(0, total))
    written = draw(st.integers(0, total - cached))
    return Usage(total, output, cached, written, draw(st.integers(0, output)))


def library(provider, model, usage, context=None):
    theirs = GenaiUsage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        output_reasoning_tokens=usage.reasoning_tokens,
    )
    found = calc_price(
        theirs,
        model,
        provider_id=IDS.get(provider, provider),
        genai_request_timestamp=AT,
        price_context=context,
    )
    return found.total_price


@UNHURRIED
@given(st.sampled_from(PAIRS), usages())
def test_a_price_is_exactly_what_genai_prices_says(pair, usage):
    provider, model = pair
    if "embedding" in model:
        usage = Usage(usage.input_tokens, 0)
    assert BOOKS[provider].price(model, usage) == library(provider, model, usage)


@UNHURRIED
@given(st.sampled_from(["gpt-5-mini", "gpt-5.4"]), usages(), st.sampled_from(["flex", "batch", "priority"]))
def test_a_tier_that_is_listed_is_priced_as_listed(model, usage, tier):
    context = {"processing": "batch"} if tier == "batch" else {"service_tier": tier}
    assert BOOKS["openai"].price(model, usage, service_tier=tier) == library("openai", model, usage, context)


@UNHURRIED
@given(st.sampled_from(PAIRS), usages(), st.integers(0, 1_000_000), st.integers(0, 100_000))
def test_no_response_costs_more_than_the_worst_case_of_as_many_tokens(pair, usage, more_in, more_out):
    provider, model = pair
    if "embedding" in model:
        usage, more_out = Usage(usage.input_tokens, 0), 0
    worst = BOOKS[provider].worst(model, usage.input_tokens + more_in, usage.output_tokens + more_out)
    assert BOOKS[provider].price(model, usage) <= worst


def test_the_worst_case_jumps_with_the_long_context_tier():
    book = BOOKS["anthropic"]
    # 3.75 (a cache write) and 15 dollars a million up to 200,000 tokens, 7.5 and 22.5 beyond.
    assert book.worst("claude-sonnet-4-5", 200_000, 1000) == Decimal("0.765")
    assert book.worst("claude-sonnet-4-5", 200_001, 1000) == Decimal("1.5225075")


def test_a_listed_model_costs_what_its_page_says():
    assert BOOKS["openai"].price("gpt-5-mini", Usage(1000, 100, cached_tokens=400)) == Decimal("0.00036")


@pytest.mark.parametrize("provider", ["holysheep", "vllm", "ollama", "custom"])
def test_a_gateway_or_local_server_has_no_price_that_anyone_else_could_know(provider):
    book = PriceBook(provider=provider, base_url="http://127.0.0.1:8000/v1")
    assert book.price("gpt-5-mini", Usage(10, 10)) is None
    assert PriceBook(provider=provider).worst("gpt-5-mini", 10, 10) is None


def test_a_base_url_of_a_listed_provider_is_recognised():
    book = PriceBook(provider="custom", base_url="https://generativelanguage.googleapis.com/v1beta/openai", at=AT)
    assert book.price("gemini-2.5-flash", Usage(1_000_000, 0)) == Decimal("0.3")


def test_without_a_provider_or_with_a_simulated_one_the_name_of_the_model_decides():
    for book in (PriceBook(at=AT), PriceBook(provider="sim", base_url="http://sim.invalid/v1", at=AT)):
        assert book.price("gpt-5-mini", Usage(1_000_000, 0)) == Decimal("0.25")
        assert book.price("no-such-model", Usage(10, 10)) is None


def test_a_dearer_tier_that_is_not_listed_is_unknown_and_a_cheaper_one_standard():
    book = BOOKS["anthropic"]
    usage = Usage(1_000_000, 0)
    standard = book.price("claude-opus-4-1", usage)
    assert book.price("claude-opus-4-1", usage, service_tier="standard") == standard
    assert book.price("claude-opus-4-1", usage, service_tier="flex") == standard
    assert book.price("claude-opus-4-1", usage, service_tier="priority") is None
    assert book.worst("claude-opus-4-1", 10, 10, service_tier="priority") is None


def test_where_the_time_of_day_matters_the_dearest_time_counts():
    prices = set()
    for hour in range(24):
        book = PriceBook(provider="deepseek", at=AT.replace(hour=hour))
        prices.add(book.price("deepseek-chat", Usage(1_000_000, 1_000_000)))
    assert prices == {Decimal("1.37")}  # 0.27 and 1.1; a third of the day is half price


def test_own_prices_need_no_list_and_are_never_discounted():
    book = PriceBook(PriceOverride(input=Decimal(2), output=Decimal(8)), provider="openai")
    usage = Usage(1_000_000, 1_000_000, cached_tokens=900_000, cache_write_tokens=50_000)
    for tier in (None, "flex", "batch", "priority"):
        assert book.price("gpt-5-mini", usage, service_tier=tier) == Decimal(10)
        assert book.price("no-such-model", usage, service_tier=tier) == Decimal(10)
    assert book.worst("no-such-model", 1_000_000, 1_000_000) == Decimal(10)


def test_own_cache_prices_count_and_make_the_worst_case_worse():
    book = PriceBook(PriceOverride(Decimal(2), Decimal(8), Decimal("0.5"), Decimal("2.5")))
    assert book.price("m", Usage(1_000_000, 0, 600_000, 300_000)) == Decimal("1.25")
    assert book.worst("m", 1_000_000, 0) == Decimal("2.5")


def test_an_own_input_price_alone_leaves_the_output_to_the_list():
    own = PriceOverride(input=Decimal(1))
    assert PriceBook(own, provider="openai").price("gpt-5-mini", Usage(1_000_000, 1_000_000)) == Decimal(3)
    unlisted = PriceBook(own, provider="vllm")
    assert unlisted.price("m", Usage(1_000_000, 1)) is None
    assert unlisted.worst("m", 1_000_000, 1) is None
    assert unlisted.price("m", Usage(1_000_000, 0)) == Decimal(1)


def test_the_most_specific_own_price_wins():
    prices = {
        "*": PriceOverride(Decimal(9), Decimal(9)),
        "gpt-5*": PriceOverride(Decimal(2), Decimal(2)),
        "gpt-5-m*": PriceOverride(input=Decimal(3)),
        "gpt-5-mini": PriceOverride(output=Decimal(4)),
        "odd[name]": PriceOverride(Decimal(5), Decimal(5)),
    }
    book = PriceBook(PriceOverride(Decimal(7), Decimal(7)), prices, provider="vllm")
    million = Usage(1_000_000, 1_000_000)
    assert book.price("gpt-5-mini", million) == Decimal(7)  # 3 by the longer pattern and 4 by the name
    assert book.price("gpt-5-nano", million) == Decimal(4)
    assert book.price("odd[name]", million) == Decimal(10)
    assert book.price("anything else", million) == Decimal(18)


def test_usage_that_contradicts_itself_has_no_price():
    assert BOOKS["openai"].price("gpt-5-mini", Usage(10, 10, cached_tokens=11)) is None


@UNHURRIED
@given(st.decimals(0, 1000, places=12), st.integers(0, 10**12))
def test_own_prices_of_many_decimals_stay_exact(rate, tokens):
    book = PriceBook(PriceOverride(rate, rate))
    assert Fraction(book.price("m", Usage(tokens, 0))) == Fraction(rate) * tokens / 1_000_000


def test_own_prices_never_load_the_price_list():
    code = """
import sys
from decimal import Decimal
from batchrun.config import PriceOverride
from batchrun.records import Usage
from batchrun.report.prices import PriceBook
book = PriceBook(PriceOverride(Decimal(1), Decimal(2)), provider="openai")
assert book.price("gpt-5-mini", Usage(1, 1)) and book.worst("gpt-5-mini", 1, 1)
assert "genai_prices" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_however_many_models_are_named_few_are_remembered():
    book = PriceBook(PriceOverride(Decimal(1), Decimal(2)))
    for i in range(5_000):
        assert book.price(f"model-{i}", Usage(1_000_000, 0)) == 1
    assert len(book._known) <= 1_000
