"""Flags > environment > batchrun.toml > defaults, resolved into one frozen Settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from batchrun.configfile import find_file, read_file
from batchrun.errors import BatchrunError
from batchrun.options import BY_KEY, nearest, read_value
from batchrun.records import Endpoint

__all__ = ["CONTENT", "PriceOverride", "Settings", "SimSettings", "load", "overlay"]

CONTENT = frozenset({"endpoint", "model", "system", "template", "max_tokens", "temperature", "params"})
"""Settings that change what a request says: fixed when a job starts."""

_OF_THIS_RUN = frozenset(
    {
        "flush_interval_s",
        "max_queue",
        "job",
        "retry_failed",
        "progress",
        "quiet",
        "verbose",
        "json",
        "log_format",
        "config",
    }
)
_Layer: TypeAlias = Mapping[str, Any]
"""Settings field (dotted into ``price`` and ``sim``) → value."""


class PriceOverride(msgspec.Struct, frozen=True):
    """Dollars per million tokens, as paid: never discounted further. None: not overridden."""

    input: Decimal | None = None
    output: Decimal | None = None
    cached_input: Decimal | None = None
    cache_write: Decimal | None = None


class SimSettings(msgspec.Struct, frozen=True):
    """The simulated provider: latency in seconds, quotas per minute, share of sends that fail, seed."""

    latency_s: float = 0.4
    rpm: int | None = None
    tpm: int | None = None
    error_rate: float = 0.0
    cache_life_s: float = 300.0
    """How long its prompt cache remembers; 0: it has none."""
    seed: int = 0


class Settings(msgspec.Struct, frozen=True):
    """Everything a run was told. Keys are not in here: only where to read them."""

    # where
    provider: str | None = None
    base_urls: tuple[str, ...] = ()
    """Endpoints of one provider: rows go where there is room."""
    endpoint: Endpoint | None = None
    mode: Literal["auto", "live", "packed", "deferred"] = "auto"
    packing: str | None = None
    """The shape in which rows share a call; None: the endpoint's usual one."""
    api_key_env: str | None = None
    api_key_file: Path | None = None
    allow_http: bool = False
    """Plain http may go to another machine."""
    proxy_env: bool = False
    """Proxies come from the environment; without it there are none."""
    # what
    model: str | None = None
    system: str | None = None
    template: str | None = None
    """The template's text (``@FILE`` already read)."""
    max_tokens: int | None = None
    temperature: str | None = None
    """A JSON number as it was written, so that its digits survive."""
    params: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Request parameter → raw JSON."""
    # batches
    batch_tokens: int | None = None
    """None, here and below: what the way of travelling allows."""
    batch_rows: int | None = None
    batch_bytes: int | None = None
    # flow
    max_concurrency: int = 256
    concurrency: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    group_by: Literal["auto", "prefix", "none"] = "auto"
    """Whether rows whose prompts begin alike are sent together, so that a provider's cache serves them."""
    max_attempts: int = 5
    timeout_s: float = 600.0
    # limits
    budget_usd: Decimal | None = None
    price: PriceOverride = msgspec.field(default_factory=PriceOverride)
    prices: Mapping[str, PriceOverride] = msgspec.field(default_factory=dict)
    """``[prices]`` of batchrun.toml: model → override."""
    deadline_s: float | None = None
    patience_s: float = 900.0
    max_failures: str | None = None
    """``N`` or ``P%``; stops when more have failed."""
    limit: int | None = None
    # streams
    flush_interval_s: float | None = None
    """How long a row of stdin waits for others to share its call; None: nothing is sent before the input has ended."""
    max_queue: int = 10_000
    # job
    job: Path | None = None
    skip_invalid: bool = False
    on_doubt: Literal["resend", "fail"] = "resend"
    grace_s: float = 30.0
    retry_failed: bool = False
    # output
    progress: bool | None = None
    """None: a bar where stderr is a terminal."""
    quiet: bool = False
    verbose: bool = False
    json: bool = False
    log_format: Literal["text", "json"] = "text"
    sim: SimSettings = msgspec.field(default_factory=SimSettings)
    config: Path | None = None
    """The batchrun.toml that was read; None where there is none."""


# ---------------------------------------------------------------- loading


def load(
    flags: Mapping[str, Any], environ: Mapping[str, str], cwd: Path, config: Path | None = None
) -> tuple[Settings, frozenset[str]]:
    """Resolves the options: flags > ``BATCHRUN_*`` > batchrun.toml (its profiles first) > defaults.

    Args:
        flags: Option keys (``max_tokens``) → text, bool for switches, texts for ``param``; None: not given.
        environ: The environment; an empty variable counts as unset.
        cwd: Where relative paths of flags and environment start, and the search for batchrun.toml.
        config: The file of ``--config``; then none is searched for.

    Returns:
        The settings, and the names of those that flags gave, nested ones dotted (``price.input``): in a job that
        exists they win over what it remembers; what a file or the environment says does not.

    Raises:
        BatchrunError: Something cannot be read, is unknown, or holds a key.
    """
    from_flags = _flag_layer(flags, cwd)
    from_environ = _environ_layer(environ, cwd)
    layers: list[_Layer] = [from_flags, from_environ]
    if path := _path(config, environ, cwd):
        document = read_file(path)
        chosen = {**document.top, **from_environ, **from_flags}
        # A model is the narrower name, so its profile wins over its provider's.
        layers += [document.profiles.get(str(chosen.get(name)), {}) for name in ("model", "provider")]
        layers.append(document.top)
        if document.prices:
            prices = {model: PriceOverride(**price) for model, price in document.prices.items()}
            layers.append({"prices": prices})
    given = _merged(layers)
    if given.get("quiet") and given.get("verbose"):
        raise BatchrunError("--quiet and --verbose exclude each other", hint="leave one of them out")
    return replace(_with(Settings(), given), config=path), frozenset(from_flags)


def overlay(remembered: Settings, now: Settings, given: Iterable[str]) -> Settings:
    """Returns what a job remembers with what was ``given`` now laid over it, except for a request's content.

    What concerns one run only (streams, output, ``retry_failed``, ``job``) comes from ``now`` whether given or not.
    """
    names = {name for name in given if name not in CONTENT} | _OF_THIS_RUN
    return _with(remembered, {name: _get(now, name) for name in names})


def _merged(layers: Sequence[_Layer]) -> _Layer:
    """Lays the layers over each other, strongest first; request parameters one by one."""
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        params = {**merged.get("params", {}), **layer.get("params", {})}
        merged.update(layer)
        if params:
            merged["params"] = params
    return merged


def _get(settings: Settings, name: str) -> Any:  # noqa: ANN401 - each setting has its own type
    outer, _, inner = name.partition(".")
    value = getattr(settings, outer)
    return getattr(value, inner) if inner else value


def _with(settings: Settings, values: _Layer) -> Settings:
    plain = {name: value for name, value in values.items() if "." not in name}
    for outer in ("price", "sim"):
        inner = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{outer}.")}
        plain[outer] = replace(getattr(settings, outer), **inner)
    return replace(settings, **plain)


# ---------------------------------------------------------------- flags and environment


def _flag_layer(flags: Mapping[str, Any], cwd: Path) -> _Layer:
    given = ((BY_KEY[key], value) for key, value in flags.items() if value is not None and value != [])
    return {option.field: read_value(option, value, cwd, f"--{option.name}") for option, value in given}


def _environ_layer(environ: Mapping[str, str], cwd: Path) -> _Layer:
    layer: dict[str, Any] = {}
    for variable, text in environ.items():
        key = variable.removeprefix("BATCHRUN_").lower()
        if not variable.startswith("BATCHRUN_") or not text or key in {"config", "api_key"}:
            continue
        if option := BY_KEY.get(key):
            layer[option.field] = read_value(option, text, cwd, variable)
        elif near := nearest(key, BY_KEY):
            # A mistyped budget must not go unnoticed; a variable that resembles no option is somebody else's.
            raise BatchrunError(f"{variable} is no option", hint=f"did you mean {BY_KEY[near].variable}?")
    return layer


def _path(config: Path | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """Returns the batchrun.toml to read: the one that is named, or the nearest up the tree."""
    named = config or environ.get("BATCHRUN_CONFIG")
    return cwd / named if named else find_file(cwd)
