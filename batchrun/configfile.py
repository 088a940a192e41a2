"""batchrun.toml: found up the tree, read, and told apart into options, profiles and prices."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from batchrun.errors import BatchrunError
from batchrun.options import BY_KEY, nearest, read_value

__all__ = ["ConfigFile", "find_file", "read_file"]

_NAME = "batchrun.toml"
_TRUSTED_OWNERS = frozenset({0})
_PRICE_KEYS = ("input", "output", "cached_input", "cache_write")
_TABLES = ("profile", "profiles", "prices")
_IN_PROFILE = {"where", "batches", "flow", "limits", "simulated provider"}
_SECRET = re.compile(r"(^|_)(key|secret|password|authorization|bearer)$|^((api|auth|access|bearer)_)?token$")


class ConfigFile(msgspec.Struct, frozen=True):
    """What a batchrun.toml says. ``top`` and each profile are ``Option.field`` → value."""

    top: Mapping[str, Any]
    profiles: Mapping[str, Mapping[str, Any]]
    """Provider or model → settings that apply when it is the one in use."""
    prices: Mapping[str, Mapping[str, Decimal]]
    """Model → PriceOverride field → dollars per million tokens."""


def find_file(cwd: Path) -> Path | None:
    """Returns the nearest batchrun.toml in ``cwd`` or above it, or None.

    Raises:
        BatchrunError: One above ``cwd`` is another user's: it could send requests and keys elsewhere.
    """
    try:
        here = cwd.absolute()
    except OSError:  # the working directory is gone
        return None
    for folder in (here, *here.parents):
        path = folder / _NAME
        try:
            owner = path.stat().st_uid
        except OSError:
            continue
        if folder != here and owner not in _TRUSTED_OWNERS | {os.geteuid()}:
            raise BatchrunError(
                f"{path} belongs to another user and is not in this directory",
                hint=f"if you trust it, name it: --config {path}",
            )
        return cwd / _NAME if folder == here else path
    return None


def read_file(path: Path) -> ConfigFile:
    """Reads a batchrun.toml. Relative paths in it start at its directory.

    Raises:
        BatchrunError: It cannot be read, has an unknown key, a value that no option takes, or holds a key.
    """
    document = _parse(path)
    top = {key: value for key, value in document.items() if key not in _TABLES}
    profiles: dict[str, Mapping[str, Any]] = {}
    for table in ("profile", "profiles"):
        for name, entries in _tables(path, document, table).items():
            where = f"{path}: [{table}.{name}]"
            profiles[name] = _settings(path, entries, where, groups=_IN_PROFILE)
    prices = {model: _price(path, model, entry) for model, entry in _tables(path, document, "prices").items()}
    return ConfigFile(top=_settings(path, top, f"{path}"), profiles=profiles, prices=prices)


def _parse(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"), parse_float=Decimal)
    except OSError as error:
        raise BatchrunError(
            f"cannot read {path}: {error.strerror}", hint="--config takes the path of a TOML file"
        ) from None
    except (ValueError, ArithmeticError) as error:  # not TOML, not UTF-8, or a number of 5,000 digits
        raise BatchrunError(f"{path} is no TOML: {error}", hint='text needs quotes, as in model = "name"') from None


def _tables(path: Path, document: Mapping[str, Any], name: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the tables within table ``name``; none where it is not there."""
    outer = document.get(name, {})
    if isinstance(outer, Mapping) and all(isinstance(inner, Mapping) for inner in outer.values()):
        return outer
    example = '"model-name" = { input = "0.25", output = "2" }' if name == "prices" else "rpm = 500"
    heading = "[prices]" if name == "prices" else f"[{name}.NAME]"
    raise BatchrunError(
        f"{path}: [{name}] holds something else than tables", hint=f"write {heading} and below it {example}"
    )


def _settings(path: Path, entries: Mapping[str, Any], where: str, groups: set[str] | None = None) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in entries.items():
        key = name.replace("-", "_")
        option = BY_KEY.get(key)
        if option is None:
            raise _unknown(name, key, where)
        if groups and (option.group not in groups or key in {"provider", "endpoint"}):
            raise BatchrunError(
                f"{where}: `{name}` has no place in a profile",
                hint="a profile sets an address, limits and prices; the rest goes to the top of the file",
            )
        settings[option.field] = read_value(option, value, path.parent, f"{where}: `{name}`")
    return settings


def _price(path: Path, model: str, entry: Mapping[str, Any]) -> dict[str, Decimal]:
    price: dict[str, Decimal] = {}
    for name, value in entry.items():
        key = name.replace("-", "_")
        where = f'{path}: [prices] "{model}"'
        if key not in _PRICE_KEYS:
            near = nearest(key, _PRICE_KEYS)
            hint = f"did you mean `{near}`?" if near else f"a price has {', '.join(_PRICE_KEYS)}"
            raise BatchrunError(f"{where}: unknown key `{name}`", hint=hint)
        price[key] = read_value(BY_KEY["price_in"], value, path.parent, f"{where}: `{name}`")
    return price


def _unknown(name: str, key: str, where: str) -> BatchrunError:
    if _SECRET.search(key.lower()):
        return BatchrunError(
            f"{where}: `{name}` would keep a key in a file that others may read",
            hint="keys come from the environment (`api-key-env` names the variable) "
            "or from a file of mode 0600 (`api-key-file` names it)",
        )
    near = nearest(key, BY_KEY) or nearest(key, _TABLES)
    hint = f"did you mean `{near.replace('_', '-')}`?" if near else "`batchrun submit --help` lists all options"
    return BatchrunError(f"{where}: unknown key `{name}`", hint=hint)
