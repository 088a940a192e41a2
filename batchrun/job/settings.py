"""Settings as a job remembers them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import fields

from batchrun.config import Settings

__all__ = ["from_json", "to_json"]


def to_json(settings: Settings) -> Any:  # noqa: ANN401 - JSON
    """Returns what a job remembers, as plain JSON types."""
    kept = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return msgspec.to_builtins(kept, enc_hook=str)


def from_json(kept: Any) -> Settings:  # noqa: ANN401 - JSON
    """Returns the settings that were remembered; what this version no longer knows is left out."""
    known = {f.name for f in fields(Settings)}
    return msgspec.convert(
        {name: value for name, value in kept.items() if name in known},
        Settings,
        dec_hook=lambda wanted, value: wanted(value),
        strict=False,
    )
