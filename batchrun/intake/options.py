"""What the command line says of every row: defaults that a body gets only where it lacks them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

from batchrun.errors import BatchrunError, Exit
from batchrun.intake import bodies, simple
from batchrun.intake.bodies import Members
from batchrun.records import Endpoint

__all__ = ["Options", "Shaping"]

ANTHROPIC_MAX_TOKENS = 4096
"""Anthropic refuses a request that names none."""

_ENDPOINTS: frozenset[Endpoint] = frozenset(simple.PARAMETERS)
_CONFIG = "generationConfig"


class Shaping(msgspec.Struct, frozen=True):
    """Who will be asked, and what every row is told unless it says otherwise."""

    endpoint: Endpoint | None = None
    """Forced for all rows; None: a batch line's own form decides, and for simple rows what they hold."""
    family: Literal["openai", "anthropic", "gemini"] = "openai"
    """What the provider speaks: decides where simple rows go."""
    speaks: frozenset[Endpoint] = _ENDPOINTS
    """Endpoints that the provider has; rows for another one are bad."""
    model: str | None = None
    default_model: str | None = None
    """Stands in where neither row nor option names a model; only the simulator has one."""
    system: str | None = None
    template: str | None = None
    max_tokens: int | None = None
    temperature: str | None = None
    """A JSON number as it was written."""
    params: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Request parameter → raw JSON."""
    max_tokens_name: str = "max_completion_tokens"
    """What chat calls it: reasoning models refuse max_tokens, older servers know only that."""


class _Default(NamedTuple):
    """An option as body member: added where the body has none of ``names``."""

    names: tuple[str, ...]
    name: str
    raw: bytes


class Options:
    """Fills what bodies lack. BatchrunError (exit 2) where the options can work for no row."""

    def __init__(self, shaping: Shaping) -> None:
        _check(shaping)
        self._system = None if shaping.system is None else orjson.dumps(shaping.system)
        self._defaults = {endpoint: _defaults(shaping, endpoint) for endpoint in _ENDPOINTS}
        self._config = _config_defaults(shaping)

    def ask(self, endpoint: Endpoint) -> bool:
        """Whether any option but the model concerns bodies of this endpoint."""
        return bool(self._defaults[endpoint] or self._system or (endpoint == "generate" and self._config))

    def fill(self, endpoint: Endpoint, model: str, body: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], bytes]:
        """Returns a body, parsed and raw, with what it lacked; the very same where it lacks nothing.

        Gemini takes the model from the URL, so its bodies get none. BadLine where a body has no place for
        the system prompt.
        """
        added: Members = {}
        if endpoint != "generate" and body.get("model") is None:
            added["model"] = orjson.dumps(model)
        if self.ask(endpoint):
            added |= _lacking(self._defaults[endpoint], body)
            if endpoint == "generate":
                added |= _lacking_config(self._config, body, raw)
            if self._system is not None and not bodies.has_system(endpoint, body):
                members = bodies.split(raw) | added
                bodies.add_system(endpoint, members, self._system)
                raw = bodies.join(members)
                return orjson.loads(raw), raw
        if not added:
            return body, raw
        if body.keys().isdisjoint(added):
            raw = bodies.splice(raw, added, empty=not body)
        else:
            raw = bodies.join(bodies.split(raw) | added)
        return (orjson.loads(raw) if self.ask(endpoint) else body), raw


def _check(shaping: Shaping) -> None:
    if shaping.endpoint is not None and shaping.endpoint not in shaping.speaks:
        raise BatchrunError(
            f"this provider has no endpoint {shaping.endpoint}",
            hint=f"it has: {', '.join(sorted(shaping.speaks))}",
            exit_code=Exit.USAGE,
        )
    if shaping.system is not None and shaping.endpoint in ("completions", "embeddings"):
        raise BatchrunError(
            f"--system has no place in {shaping.endpoint}",
            hint="put it into the prompt, for example with --template",
            exit_code=Exit.USAGE,
        )
    for name, raw in shaping.params.items():
        _check_param(name, raw)
    if shaping.temperature is not None and type(_parsed("--temperature", shaping.temperature)) not in (int, float):
        raise BatchrunError("--temperature must be a number", exit_code=Exit.USAGE)


def _check_param(name: str, raw: str) -> None:
    value = _parsed(f"--param {name}", raw)
    if name in ("messages", "prompt", "input", "contents", "model"):
        raise BatchrunError(f"--param cannot set `{name}`", hint="rows hold what is asked; --model names the model")
    if name == "stream" and value not in (None, False):
        raise BatchrunError("--param cannot ask for a stream", hint="answers are kept when they are complete")


def _parsed(option: str, raw: str) -> object:
    try:
        value: object = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise BatchrunError(
            f"{option}={raw} is no JSON", hint=f"strings need quotes: '\"{raw}\"'", exit_code=Exit.USAGE
        ) from exc
    return value


def _defaults(shaping: Shaping, endpoint: Endpoint) -> tuple[_Default, ...]:
    """Returns what the options add to bodies of this endpoint, at their top level."""
    if endpoint == "generate":
        native = simple.gemini_parameters(_encoded(shaping.params))
        return tuple(_Default((name,), name, raw) for name, raw in native.items() if name != _CONFIG)
    defaults: list[_Default] = []
    limits = bodies.MAX_TOKENS_NAMES[endpoint]
    if limits and shaping.max_tokens is not None:
        name = shaping.max_tokens_name if endpoint == "chat" else limits[0]
        defaults.append(_Default(limits, name, b"%d" % shaping.max_tokens))
    if limits and shaping.temperature is not None:
        defaults.append(_Default(("temperature",), "temperature", shaping.temperature.encode()))
    set_already = {name for default in defaults for name in default.names}
    for name, raw in _encoded(shaping.params).items():
        if name not in set_already:
            defaults.append(_Default(limits if name in limits else (name,), name, raw))
            set_already.add(name)
    if endpoint == "messages" and "max_tokens" not in set_already:
        defaults.append(_Default(limits, "max_tokens", b"%d" % ANTHROPIC_MAX_TOKENS))
    return tuple(defaults)


def _config_defaults(shaping: Shaping) -> Members:
    """Returns what the options add to Gemini's generationConfig."""
    members = _encoded(shaping.params)
    if shaping.temperature is not None:
        members["temperature"] = shaping.temperature.encode()
    if shaping.max_tokens is not None:
        members["max_tokens"] = b"%d" % shaping.max_tokens
    return bodies.split(simple.gemini_parameters(members).get(_CONFIG, b"{}"))


def _encoded(params: Mapping[str, str]) -> Members:
    return {name: raw.strip().encode() for name, raw in params.items()}


def _lacking(defaults: tuple[_Default, ...], body: Mapping[str, Any]) -> Members:
    return {name: raw for names, name, raw in defaults if body.keys().isdisjoint(names)}


def _lacking_config(defaults: Members, body: Mapping[str, Any], raw: bytes) -> Members:
    name, config = bodies.gemini_config(body)
    lacking = {key: value for key, value in defaults.items() if config.keys().isdisjoint((key, _snake(key)))}
    if not lacking:
        return {}
    own = bodies.split(raw)[name] if config else b"{}"
    return {name: bodies.splice(own, lacking, empty=not config)}


def _snake(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name)
