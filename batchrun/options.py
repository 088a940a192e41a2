"""Every option, once: its name, how its text is read, and what help says of it.

Flags, environment and batchrun.toml all go through the same reader, so a value means the same wherever it
is written. A reader raises BatchrunError whose message fits after the option's name and a colon.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from batchrun.errors import BatchrunError

__all__ = ["BY_KEY", "OPTIONS", "Option", "nearest", "read_price", "read_value"]

_LONGEST_S = 10 * 366 * 86_400.0
_UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _bad(text: str, is_no: str, hint: str) -> BatchrunError:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return BatchrunError(f"`{shown}` is no {is_no}", hint=hint)


# ---------------------------------------------------------------- readers


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BatchrunError("is not valid UTF-8", hint="pass it as UTF-8 text") from None
    if not text:
        raise BatchrunError("is empty", hint="leave the option out, or give it a value")
    return text


def _positive(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,15}", text) and int(text) > 0:
        return int(text)
    raise _bad(text, "positive whole number", "write digits only, as in 500")


def _seed(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,15}", text):
        return int(text)
    raise _bad(text, "whole number", "write digits only, as in 7")


def _duration(text: str) -> float:
    """Returns seconds."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([smhd]?)", text)
    seconds = float(match[1]) * _UNIT_S[match[2]] if match else -1.0
    if 0 <= seconds <= _LONGEST_S:
        return seconds
    raise _bad(text, "duration", "write seconds or a number with s, m, h or d: 90, 90s, 15m, 2h, 1d")


def _positive_duration(text: str) -> float:
    seconds = _duration(text)
    if seconds == 0:
        raise _bad(text, "duration above zero", "write seconds or a number with s, m, h or d: 90, 15m, 2h")
    return seconds


def _share(text: str) -> float:
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,15})?", text) and float(text) <= 1:
        return float(text)
    raise _bad(text, "share from 0 to 1", "write one in twenty as 0.05")


def read_price(text: str) -> Decimal:
    """Returns exact dollars, 0 or more."""
    if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,30})?", text):
        return Decimal(text)
    raise _bad(text, "amount of dollars", "write digits only, as in 0.25")


def _budget(text: str) -> Decimal:
    amount = read_price(text)
    if amount == 0:
        raise _bad(text, "budget", "a budget is above zero, as in 5 or 0.50")
    return amount


def _max_failures(text: str) -> str:
    whole = re.fullmatch(r"[0-9]{1,15}", text)
    percent = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", text)
    if whole or (percent and Decimal(percent[1]) <= 100):
        return text
    raise _bad(text, "number of rows or percentage", "write rows as in 100, or a share of them as in 5%")


def _temperature(text: str) -> str:
    if re.fullmatch(r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", text):
        return text
    raise _bad(text, "temperature", "write it as a JSON number of 0 or more, as in 0.2")


def _base_url(text: str) -> str:
    if "@" in text:
        raise BatchrunError(
            "holds credentials or an `@`",
            hint="give the bare URL; a key comes from the environment or from --api-key-file",
        )
    if re.fullmatch(r"https?://[^\s/?#][^\s?#]*(\?[^\s#]*)?", text, re.IGNORECASE):
        return text
    raise _bad(text, "http or https URL", "write it as in https://api.example.com/v1")


def _variable(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", text):
        return text
    # The text is not repeated: a mistaken value here is most often the key itself.
    raise BatchrunError(
        "takes the name of an environment variable, not its value",
        hint="export the key under a name, then give that name, as in --api-key-env OPENAI_API_KEY",
    )


def _path(text: str, base: Path) -> Path:
    if not text or "\0" in text:
        raise BatchrunError("is no path", hint="give the path of a file or directory")
    path = Path(text)
    if text.startswith("~"):
        try:
            path = path.expanduser()
        except RuntimeError:
            raise _bad(text, "path that can be found without HOME", "write the whole path") from None
    return base / path


def _template(text: str, base: Path) -> str:
    if not text.startswith("@"):
        return _text(text)
    path = _path(text[1:], base)
    try:
        return _text(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise BatchrunError(
            f"cannot read {path}: {error.strerror}",
            hint="`@` is followed by the path of a template file; without it the text itself is the template",
        ) from None
    except UnicodeDecodeError:
        raise BatchrunError(f"{path} is not valid UTF-8", hint="save the template as UTF-8") from None


def _mode(text: str) -> str:
    if text == "deferred":
        raise BatchrunError(f"`{text}` is not there yet", hint="use --mode auto, live or packed")
    return _one_of("auto", "live", "packed")(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text in choices:
            return text
        raise BatchrunError(
            f"`{text[:60]}` is none of {', '.join(choices)}",
            hint=f"did you mean `{nearest(text, choices) or choices[0]}`?",
        )

    return read


def nearest(text: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that was probably meant, or None where none resembles the text."""
    from difflib import get_close_matches

    near = get_close_matches(text.lower(), choices, n=1, cutoff=0.7)
    return near[0] if near else None


def _params(texts: Iterable[str]) -> dict[str, str]:
    """Reads ``key=json`` or JSON objects: request parameter → raw JSON, digits kept; a later one wins."""
    params: dict[str, str] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            params.update(_object(text))
            continue
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise _bad(text, "`key=json`", "write it as in --param top_p=0.9")
        params[key] = _json(key, value)
    return params


def _json(key: str, value: str) -> str:
    import orjson

    try:
        orjson.loads(value)
    except ValueError:
        raise BatchrunError(
            f"the value of `{key[:60]}` is no JSON",
            hint=f"""text needs quotes that the shell leaves alone, as in --param '{key[:60]}="low"'""",
        ) from None
    return value


def _object(text: str) -> dict[str, str]:
    import msgspec

    try:
        raw = msgspec.json.decode(text.encode(), type=dict[str, msgspec.Raw])
    except (ValueError, msgspec.MsgspecError):
        raise _bad(text, "JSON object", """write it as in '{"top_p": 0.9, "seed": 7}'""") from None
    return {key: _json(key, bytes(value).decode()) for key, value in raw.items()}


def _table(table: Mapping[str, Any]) -> dict[str, str]:
    """Reads a TOML table: a Decimal keeps its digits."""
    import msgspec

    encoder = msgspec.json.Encoder(decimal_format="number")
    params: dict[str, str] = {}
    for key, value in table.items():
        try:
            params[key] = encoder.encode(value).decode()
        except (TypeError, ValueError, OverflowError):
            raise BatchrunError(
                f"`{key[:60]}` cannot be turned into JSON", hint="""write it yourself: param = ['key=json']"""
            ) from None
    return params


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in {"1", "true", "yes"}:
        return True
    if text in {"0", "false", "no"}:
        return False
    raise _bad(text, "yes or no", "write 1, true or yes; 0, false or no")


def _scalar(value: object) -> str:
    """Returns a TOML value as the text that a flag would have; a Decimal keeps its digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return format(value, "f") if isinstance(value, Decimal) else str(value)
    raise BatchrunError("takes one text or number", hint="write it as on the command line, in quotes")


def read_value(option: Option, value: object, base: Path, source: str) -> Any:  # noqa: ANN401 - each option has its own type
    """Reads one option's value, from text or from TOML; ``base`` is where a relative path starts.

    Raises:
        BatchrunError: It cannot be read; the message begins with ``source``.
    """
    try:
        if option.field == "params":
            return _table(value) if isinstance(value, Mapping) else _params(_texts(value))
        if not option.metavar:
            return _switch(value)
        if option.many:
            return tuple(option.read(text.strip()) for given in _texts(value) for text in given.split(","))
        if option.read_path:
            return option.read_path(_scalar(value), base)
        return option.read(_scalar(value))
    except BatchrunError as error:
        raise BatchrunError(f"{source}: {error.message}", hint=error.hint) from None


def _texts(value: object) -> list[str]:
    return [_scalar(text) for text in value] if isinstance(value, list | tuple) else [_scalar(value)]


# ---------------------------------------------------------------- the table


class Option(msgspec.Struct, frozen=True):
    """One option: ``--name`` as a flag, ``BATCHRUN_<NAME>`` in the environment, ``name`` in batchrun.toml."""

    group: str
    name: str
    metavar: str
    """What help shows for its value; empty for a switch (``--name`` or ``--no-name``)."""
    help: str
    read: Callable[[str], Any] = _text
    read_path: Callable[[str, Path], Any] | None = None
    """Reads a value that may name a file, relative to the Path."""
    into: str = ""
    """The Settings field where that is not ``key``; dotted into ``price`` and ``sim``."""
    short: str | None = None
    many: bool = False
    """May be repeated: a tuple of values; in the environment with commas between, in batchrun.toml as an array."""

    @property
    def key(self) -> str:
        """The name as Python and TOML write it: ``max_tokens``."""
        return self.name.replace("-", "_")

    @property
    def field(self) -> str:
        """Where its value goes in Settings."""
        return self.into or self.key

    @property
    def variable(self) -> str:
        """Its environment variable: ``BATCHRUN_MAX_TOKENS``."""
        return f"BATCHRUN_{self.key.upper()}"


_ENDPOINTS = ("chat", "responses", "completions", "embeddings", "messages", "generate")
_PACKINGS = ("embeddings", "completions", "vllm-chat", "gateway-batch", "gateway-chat")

OPTIONS: tuple[Option, ...] = (
    Option("where", "provider", "NAME", "Whom to ask: openai, anthropic and others; sim is simulated.", _text),
    Option(
        "where",
        "base-url",
        "URL",
        "The API's address, with or without /v1; repeated: rows go where there is room.",
        _base_url,
        into="base_urls",
        many=True,
    ),
    Option(
        "where",
        "endpoint",
        "|".join(_ENDPOINTS),
        "What kind of request a simple row is.",
        _one_of(*_ENDPOINTS),
    ),
    Option(
        "where",
        "mode",
        "auto|live|packed|deferred",
        "One row per call (live) or many (packed); auto packs where that is known to work. deferred is not there yet.",
        _mode,
    ),
    Option(
        "where",
        "packing",
        "|".join(_PACKINGS),
        "In which shape rows share a call, where the provider does not tell.",
        _one_of(*_PACKINGS),
    ),
    Option("where", "api-key-env", "NAME", "The environment variable that holds the key.", _variable),
    Option(
        "where",
        "api-key-file",
        "PATH",
        "A file that holds the key; refused unless its mode is 0600.",
        read_path=_path,
    ),
    Option("where", "allow-http", "", "Send keys and prompts over plain http, also to another machine."),
    Option("where", "proxy-env", "", "Take proxies from the environment (HTTPS_PROXY and its like)."),
    Option("what", "model", "MODEL", "The model of rows that name none.", _text),
    Option("what", "system", "TEXT", "System prompt of rows that have none.", _text),
    Option(
        "what",
        "template",
        "TEXT|@FILE",
        "Jinja template that makes a prompt of each row's fields.",
        read_path=_template,
    ),
    Option("what", "max-tokens", "N", "Output tokens that a row may use at most.", _positive),
    Option("what", "temperature", "X", "Sampling temperature.", _temperature),
    Option("what", "param", "KEY=JSON", "Any other request parameter; may be repeated.", into="params"),
    Option(
        "batches",
        "batch-tokens",
        "N",
        "Tokens in a batch: prompts and reserved output. [100000; packed: what the endpoint takes]",
        _positive,
    ),
    Option("batches", "batch-rows", "N", "Rows in a batch. [1000; packed: what the endpoint takes]", _positive),
    Option("batches", "batch-bytes", "N", "Bytes in a batch. [16777216; packed: what the endpoint takes]", _positive),
    Option("flow", "max-concurrency", "N", "Ceiling; what works below it is found out. [256]", _positive),
    Option("flow", "concurrency", "N", "Exactly so many requests at a time, not adapted.", _positive),
    Option("flow", "rpm", "N", "Requests per minute at most.", _positive),
    Option("flow", "tpm", "N", "Tokens per minute at most.", _positive),
    Option(
        "flow",
        "group-by",
        "auto|prefix|none",
        "Send rows with a long common beginning together, for the provider's cache; auto: where it pays. [auto]",
        _one_of("auto", "prefix", "none"),
    ),
    Option("flow", "max-attempts", "N", "Sends per row that may have been processed. [5]", _positive),
    Option(
        "flow",
        "timeout",
        "SECONDS",
        "How long one attempt may take in all. [600]",
        _positive_duration,
        into="timeout_s",
    ),
    Option(
        "limits",
        "budget",
        "USD",
        "What the job may cost, all runs together; never exceeded.",
        _budget,
        into="budget_usd",
    ),
    Option(
        "limits",
        "price-in",
        "USD_PER_MTOK",
        "Price of input tokens, as paid.",
        read_price,
        into="price.input",
    ),
    Option("limits", "price-out", "USD_PER_MTOK", "Price of output tokens.", read_price, into="price.output"),
    Option(
        "limits",
        "price-cached-in",
        "USD_PER_MTOK",
        "Price of input tokens read from a cache.",
        read_price,
        into="price.cached_input",
    ),
    Option(
        "limits",
        "price-cache-write",
        "USD_PER_MTOK",
        "Price of input tokens written to a cache.",
        read_price,
        into="price.cache_write",
    ),
    Option(
        "limits",
        "deadline",
        "DURATION",
        "Stop after so long, as in 2h; resumable.",
        _positive_duration,
        into="deadline_s",
    ),
    Option(
        "limits",
        "patience",
        "DURATION",
        "How long an unreachable endpoint is waited for. [15m]",
        _duration,
        into="patience_s",
    ),
    Option("limits", "max-failures", "N|P%", "Stop when more rows than this have failed.", _max_failures),
    Option("limits", "limit", "N", "Only the first N rows, for now.", _positive),
    Option(
        "streams",
        "flush-interval",
        "SECONDS",
        "Send the rows of stdin while they arrive; a batch that is not full goes out after so long.",
        _duration,
        into="flush_interval_s",
    ),
    Option("streams", "max-queue", "N", "Rows of a stream that may wait; then no more are read. [10000]", _positive),
    Option("job", "job", "DIR", "The job directory. [INPUT's name with .batchrun, beside it]", read_path=_path),
    Option("job", "skip-invalid", "", "Bad lines become failed rows; the rest runs."),
    Option(
        "job",
        "on-doubt",
        "resend|fail",
        "What becomes of rows in flight when a run died. [resend]",
        _one_of("resend", "fail"),
    ),
    Option(
        "job",
        "grace",
        "SECONDS",
        "How long replies may still land after a stop. [30]",
        _duration,
        into="grace_s",
    ),
    Option("job", "retry-failed", "", "Ask failed rows again."),
    Option("output", "progress", "", "Show progress. [a bar on a terminal, else a line a minute]"),
    Option("output", "quiet", "", "Errors only.", short="-q"),
    Option("output", "verbose", "", "Say more, and trace internal errors.", short="-v"),
    Option("output", "json", "", "One summary object on stdout."),
    Option(
        "output",
        "log-format",
        "text|json",
        "Write stderr as text or one JSON object a line. [text]",
        _one_of("text", "json"),
    ),
    Option(
        "simulated provider",
        "sim-latency",
        "SECONDS",
        "How long a reply takes. [0.4]",
        _duration,
        into="sim.latency_s",
    ),
    Option("simulated provider", "sim-rpm", "N", "Its quota of requests per minute.", _positive, into="sim.rpm"),
    Option("simulated provider", "sim-tpm", "N", "Its quota of tokens per minute.", _positive, into="sim.tpm"),
    Option(
        "simulated provider",
        "sim-error-rate",
        "SHARE",
        "Share of requests that fail, 0 to 1.",
        _share,
        into="sim.error_rate",
    ),
    Option(
        "simulated provider",
        "sim-cache-life",
        "DURATION",
        "How long its prompt cache remembers; 0: it has none. [5m]",
        _duration,
        into="sim.cache_life_s",
    ),
    Option("simulated provider", "sim-seed", "N", "Seed of its randomness. [0]", _seed, into="sim.seed"),
)

BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}
