"""Money: reserve the worst case before a send, settle it on what the answer cost, refuse what does not fit."""

from __future__ import annotations

from decimal import Decimal

__all__ = ["Budget"]

NOTHING = Decimal(0)


class Budget:
    """One cap over all scopes and all runs of a job; exact dollars.

    Promise: while no answer costs more than was reserved for it, ``spent_usd + reserved_usd <= cap_usd`` holds
    at every moment. Without a cap everything fits, and the sums are kept all the same.
    """

    __slots__ = ("cap_usd", "reserved_usd", "spent_usd")

    def __init__(self, cap_usd: Decimal | None = None, spent_usd: Decimal = NOTHING) -> None:
        self.cap_usd = cap_usd
        self.spent_usd = spent_usd
        self.reserved_usd = NOTHING

    def fits(self, worst_usd: Decimal) -> bool:
        """Says whether ``worst_usd`` could be reserved now."""
        return self.cap_usd is None or self.spent_usd + self.reserved_usd + worst_usd <= self.cap_usd

    def reserve(self, worst_usd: Decimal) -> None:
        """Sets ``worst_usd`` aside for one send; call it only where it fits."""
        self.reserved_usd += worst_usd

    def release(self, worst_usd: Decimal) -> None:
        """Returns the reservation of a send that cannot have been billed."""
        self.reserved_usd -= worst_usd

    def settle(self, worst_usd: Decimal, cost_usd: Decimal | None) -> Decimal:
        """Turns a reservation into what the send cost; unknown (None) means that all of it stays spent.

        Returns the dollars that stay spent without being known as a cost: the reservation or nothing.
        """
        self.reserved_usd -= worst_usd
        if cost_usd is None:
            self.spent_usd += worst_usd
            return worst_usd
        self.spent_usd += cost_usd
        return NOTHING

    def shortfall(self, worst_usd: Decimal) -> str:
        """Says in words that ``worst_usd`` does not fit."""
        return f"${self.spent_usd} of ${self.cap_usd} is spent, and the next call may cost ${worst_usd}"
