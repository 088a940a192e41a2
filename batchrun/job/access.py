"""Where to send and with which key. Keys come from the environment or a private file, and stay in memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from urllib.parse import urlsplit

from batchrun.config import PriceOverride, Settings
from batchrun.errors import BatchrunError, Exit
from batchrun.intake.shapes import Shaper, Shaping
from batchrun.providers.base import Provider
from batchrun.providers.packing import Packing, make_packed, packing_for
from batchrun.providers.presets import PRESETS, Preset, is_this_machine, make_provider, resolve
from batchrun.records import Endpoint
from batchrun.report.prices import PriceBook

__all__ = ["endpoints_for", "key_for", "packings_for", "preset_for", "prices_for", "provider_at", "shaper_for"]

_SIM_PRICE = PriceOverride(Decimal("0.15"), Decimal("0.60"), cached_input=Decimal("0.015"))
"""What the simulator pretends to charge, so that costs and budgets can be tried: a small model's list price, and a
tenth of it for what its cache serves, as is usual."""

_LONGEST_KEY = 64 * 1024
"""Characters; a key file that is something else must not fill the memory."""


def preset_for(settings: Settings, environ: Mapping[str, str], *, need_key: bool = True) -> Preset:
    """Returns where to send. With nothing named, whichever provider's key is set."""
    if settings.provider is not None or settings.base_urls:
        return endpoints_for(settings)[0]
    if settings.api_key_env is not None or settings.api_key_file is not None:
        return resolve("openai", None)
    for name in ("openai", "anthropic"):
        if environ.get(PRESETS[name].key_env or ""):
            return resolve(name, None)
    if not need_key:
        return resolve("openai", None)
    raise BatchrunError(
        "no provider named and no key set",
        hint="set OPENAI_API_KEY (or name another with --provider), or try it now with --provider sim",
        exit_code=Exit.CONFIGURATION,
    )


def endpoints_for(settings: Settings) -> list[Preset]:
    """Returns every endpoint that was named: one provider, at each of its addresses. Raises: BatchrunError(2)."""
    found = [resolve(settings.provider, url, allow_http=settings.allow_http) for url in settings.base_urls or (None,)]
    if len({preset.name for preset in found}) > 1:
        raise BatchrunError(
            "the --base-url addresses belong to different providers",
            hint="one job has one provider and one key; name it with --provider if they all speak like it",
        )
    return found


def packings_for(preset: Preset, settings: Settings) -> dict[Endpoint, Packing]:
    """Returns by endpoint how rows share calls there; empty in live mode. Raises: BatchrunError(2) if none can."""
    if settings.mode == "live":
        return {}
    name, mode = settings.packing, "packed" if settings.mode == "packed" else "auto"
    found = {endpoint: packing_for(preset, endpoint, name, mode) for endpoint in preset.endpoints}  # type: ignore[arg-type]
    packings = {endpoint: packing for endpoint, packing in found.items() if packing is not None}
    if settings.mode == "packed" and not packings:
        raise BatchrunError(
            f"no endpoint of {preset.name} is known to take many rows in one call",
            hint="say in which shape it does with --packing, or leave --mode out",
        )
    return packings


def provider_at(preset: Preset, key: str | None, packings: Mapping[Endpoint, Packing]) -> Provider:
    """Returns the codec of one endpoint, for single and for packed calls."""
    provider = make_provider(preset, key)
    for packing in packings.values():
        provider = make_packed(provider, packing, preset)
    return provider


def key_for(preset: Preset, settings: Settings, environ: Mapping[str, str]) -> str | None:
    """Returns the key, from a 0600 file or the environment. Raises: BatchrunError(78) if it is needed and not there."""
    if settings.api_key_file is not None:
        return _key_from_file(settings.api_key_file)
    name = settings.api_key_env or preset.key_env
    key = environ.get(name, "").strip() if name else ""
    if key:
        if not key.isascii() or not key.isprintable():
            raise BatchrunError(f"the key in {name} holds characters that no key has", exit_code=Exit.CONFIGURATION)
        return key
    if settings.api_key_env is not None or preset.key_required:
        raise BatchrunError(
            f"no key: {name} is not set",
            hint=f"export {name}=…, or name a file with --api-key-file, or try without a key: --provider sim",
            exit_code=Exit.CONFIGURATION,
        )
    return None


def _key_from_file(path: Path) -> str:
    try:
        with path.open(encoding="ascii") as file:  # what is looked at is what is read
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise BatchrunError(
                    f"{path} can be read by others (mode {mode:04o})",
                    hint=f"chmod 600 {path}",
                    exit_code=Exit.CONFIGURATION,
                )
            key = file.read(_LONGEST_KEY).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BatchrunError(
            f"cannot read the key file {path}: {getattr(error, 'strerror', 'not ASCII')}",
            exit_code=Exit.CONFIGURATION,
        ) from None
    if not key or not key.isprintable():
        raise BatchrunError(f"{path} holds no key", hint="one line with the key", exit_code=Exit.CONFIGURATION)
    return key


def shaper_for(preset: Preset, settings: Settings) -> Shaper:
    """Returns what turns lines into rows for a provider. Raises: BatchrunError(2) for options that cannot work."""
    return Shaper(
        Shaping(
            endpoint=settings.endpoint,
            family=preset.family,
            speaks=preset.endpoints,
            model=settings.model,
            default_model=preset.default_model,
            system=settings.system,
            template=settings.template,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            params=settings.params,
            max_tokens_name=preset.max_tokens_name,
        )
    )


def prices_for(preset: Preset, settings: Settings) -> PriceBook:
    """Returns what tokens cost there: the user's own prices first, then the list of this moment."""
    own = settings.price
    if preset.name == "sim" and own == PriceOverride():
        own = _SIM_PRICE
    base_url = next(iter(settings.base_urls), None)
    if base_url is not None and is_this_machine(urlsplit(base_url).hostname or ""):
        base_url = None  # no price list names it: do not load one to see that
    return PriceBook(own, settings.prices, provider=preset.name, base_url=base_url, at=datetime.now(UTC))
