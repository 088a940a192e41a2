"""Many rows in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchrun.providers.base import Provider
from batchrun.providers.presets import Preset
from batchrun.records import Endpoint, GroupKey, Row

__all__ = ["Packing", "make_packed", "packing_for"]


@dataclass(frozen=True)
class Packing:
    name: str
    endpoint: Endpoint
    path: str
    max_rows: int
    max_tokens: int
    max_bytes: int
    max_row_tokens: int | None = None

    def key(self, row: Row) -> GroupKey | None:
        return None


def packing_for(
    preset: Preset, endpoint: Endpoint, name: str | None, mode: Literal["auto", "packed"]
) -> Packing | None:
    return None


def make_packed(provider: Provider, packing: Packing, preset: Preset) -> Provider:
    return provider
