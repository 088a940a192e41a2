from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from batchrun.plan.budget import Budget

CENTS = st.decimals(min_value=0, max_value=5, places=4)


def test_a_reservation_turns_into_its_cost() -> None:
    budget = Budget(Decimal(1), Decimal("0.5"))
    assert budget.fits(Decimal("0.5"))
    budget.reserve(Decimal("0.3"))
    assert not budget.fits(Decimal("0.2001"))
    assert budget.settle(Decimal("0.3"), Decimal("0.1")) == 0
    assert (budget.spent_usd, budget.reserved_usd) == (Decimal("0.6"), 0)


def test_an_unknown_cost_stays_spent_at_its_reservation() -> None:
    budget = Budget(Decimal(1))
    budget.reserve(Decimal("0.3"))
    assert budget.settle(Decimal("0.3"), None) == Decimal("0.3")
    assert (budget.spent_usd, budget.reserved_usd) == (Decimal("0.3"), 0)


def test_what_cannot_have_been_billed_is_released() -> None:
    budget = Budget(Decimal(1))
    budget.reserve(Decimal(1))
    assert not budget.fits(Decimal("0.01"))
    budget.release(Decimal(1))
    assert budget.fits(Decimal(1))
    assert "$0 of $1 is spent" in budget.shortfall(Decimal(2))


def test_without_a_cap_everything_fits_and_is_summed_all_the_same() -> None:
    budget = Budget()
    budget.reserve(Decimal(10**9))
    assert budget.fits(Decimal(10**9))
    budget.settle(Decimal(10**9), Decimal("0.000000001"))
    assert budget.spent_usd == Decimal("0.000000001")


@given(st.lists(st.tuples(CENTS, st.sampled_from(["cost", "lost", "free"]), st.floats(0, 1))))
def test_spent_and_reserved_never_pass_the_cap(history: list[tuple[Decimal, str, float]]) -> None:
    budget, out = Budget(Decimal(20)), []
    for worst, end, share in history:
        if budget.fits(worst):
            budget.reserve(worst)
            out.append((worst, end, share))
        if len(out) > 3:
            oldest, how, part = out.pop(0)
            if how == "free":
                budget.release(oldest)
            else:
                budget.settle(oldest, None if how == "lost" else oldest * Decimal(part))
        assert budget.spent_usd + budget.reserved_usd <= 20
        assert budget.reserved_usd == sum((worst for worst, _, _ in out), Decimal(0))
