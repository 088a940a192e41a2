"""The providers known by name: where they live, what key they take, what they answer; and their codecs."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec
from msgspec.structs import replace

from batchrun.errors import BatchrunError, Exit
from batchrun.providers import anthropic, gemini, openai
from batchrun.providers.base import Codec, Family, Provider, Secret, Wire, request_headers
from batchrun.providers.headers import anthropic_quotas, openai_quotas
from batchrun.records import Endpoint, Quotas

__all__ = ["PRESETS", "Preset", "is_this_machine", "make_provider", "quotas_of", "resolve"]

_CHAT: frozenset[Endpoint] = frozenset({"chat"})
_OPENAI: frozenset[Endpoint] = frozenset({"chat", "responses", "completions", "embeddings"})
_AND_MESSAGES: frozenset[Endpoint] = _OPENAI | {"messages"}

_VERSION_SEGMENT = re.compile(r"v[0-9]+\w*")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?")


class Preset(msgspec.Struct, frozen=True):
    """A provider as it is before a key is known. ``base_url`` ends before the endpoint's own path."""

    name: str
    family: Family
    base_url: str
    key_env: str | None
    endpoints: frozenset[Endpoint]
    max_tokens_name: str = "max_tokens"
    key_required: bool = True
    key_header: Literal["authorization", "x-api-key", "x-goog-api-key"] = "authorization"
    """``authorization`` carries it as a Bearer token."""
    counts_max_tokens: bool = False
    """The server charges max_tokens against its token quota at admission."""
    daily_requests: bool = False
    """Its request headers count a day, not a minute."""
    default_model: str | None = None


_ALL = (
    Preset(
        "openai",
        "openai",
        "https://api.openai.com/v1",
        "OPENAI_API_KEY",
        _OPENAI,
        max_tokens_name="max_completion_tokens",
        counts_max_tokens=True,
    ),
    Preset(
        "anthropic",
        "anthropic",
        "https://api.anthropic.com",
        "ANTHROPIC_API_KEY",
        frozenset({"messages"}),
        key_header="x-api-key",
    ),
    Preset(
        "gemini",
        "gemini",
        "https://generativelanguage.googleapis.com/v1beta",
        "GEMINI_API_KEY",
        frozenset({"generate"}),
        max_tokens_name="maxOutputTokens",
        key_header="x-goog-api-key",
    ),
    Preset("deepseek", "openai", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY", _CHAT),
    Preset("openrouter", "openai", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", _OPENAI),
    Preset(
        "groq",
        "openai",
        "https://api.groq.com/openai/v1",
        "GROQ_API_KEY",
        frozenset({"chat", "responses"}),
        max_tokens_name="max_completion_tokens",
        counts_max_tokens=True,
        daily_requests=True,
    ),
    Preset(
        "together",
        "openai",
        "https://api.together.xyz/v1",
        "TOGETHER_API_KEY",
        frozenset({"chat", "completions", "embeddings"}),
    ),
    Preset(
        "mistral",
        "openai",
        "https://api.mistral.ai/v1",
        "MISTRAL_API_KEY",
        frozenset({"chat", "embeddings"}),
    ),
    Preset("fireworks", "openai", "https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY", _OPENAI),
    Preset("xai", "openai", "https://api.x.ai/v1", "XAI_API_KEY", frozenset({"chat", "responses"})),
    Preset("holysheep", "openai", "https://api.holysheep.ai/v1", "HOLYSHEEP_API_KEY", _CHAT),
    Preset("vllm", "openai", "http://localhost:8000/v1", "VLLM_API_KEY", _OPENAI, key_required=False),
    Preset("ollama", "openai", "http://localhost:11434/v1", "OLLAMA_API_KEY", _OPENAI, key_required=False),
    Preset(
        "litellm",
        "openai",
        "http://localhost:4000/v1",
        "LITELLM_API_KEY",
        _AND_MESSAGES,
        key_required=False,
    ),
    Preset(
        "sim",
        "openai",
        "http://sim.invalid/v1",
        None,
        _AND_MESSAGES,
        key_required=False,
        default_model="sim-small",
    ),
)
PRESETS = {preset.name: preset for preset in _ALL}

# What a base URL alone means. Reserving max_tokens on a server that does not charge it costs some of its
# quota; not reserving it on one that does costs refusals.
_CUSTOM = Preset("custom", "openai", "", "OPENAI_API_KEY", _AND_MESSAGES, key_required=False, counts_max_tokens=True)


# ---------------------------------------------------------------- which provider


def resolve(name: str | None, base_url: str | None, *, allow_http: bool = False) -> Preset:
    """Returns the provider that is meant: by name (default openai), by base URL, or by name at another URL.

    A base URL of a known host is that provider; of any other host it is OpenAI-compatible, named ``custom``,
    and needs no key. At another host than its own, a named provider needs none either. Plain http is for this
    machine alone, unless ``allow_http``.

    Raises:
        BatchrunError: an unknown name, or a base URL that cannot be used (USAGE).
    """
    if name is not None and name not in PRESETS:
        close = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        known = ", ".join(sorted(PRESETS))
        raise BatchrunError(
            f"unknown provider `{name}`" + (f", did you mean `{close[0]}`?" if close else ""),
            hint=f"known providers: {known}; any other OpenAI-compatible server goes by --base-url",
        )
    if base_url is None:
        return PRESETS[name or "openai"]
    url = _checked(base_url, allow_http=allow_http)
    preset = PRESETS[name] if name is not None else _by_host(url)
    own_host = urlsplit(preset.base_url).hostname == url.hostname
    return replace(preset, base_url=_based(url, preset.family), key_required=preset.key_required and own_host)


def _by_host(url: SplitResult) -> Preset:
    """Returns the preset that lives at this host, so that it gets no other one's key; else ``custom``."""
    for preset in _ALL:
        own = urlsplit(preset.base_url)
        if preset.family == "openai" and own.scheme == "https" and own.hostname == url.hostname:
            return preset
    return _CUSTOM


def _checked(base_url: str, *, allow_http: bool) -> SplitResult:
    """Returns a base URL's parts. Errors do not repeat it where it may hold a password or a token."""
    try:
        url = urlsplit(base_url.strip())
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise BatchrunError(f"the base URL cannot be read: {error}") from None
    if "@" in url.netloc:
        raise BatchrunError("the base URL holds a user name or password", hint="keys go by --api-key-env")
    if url.query or url.fragment or "?" in base_url or "#" in base_url:
        raise BatchrunError("the base URL has a query or fragment", hint="give scheme, host and path only")
    if url.scheme not in ("http", "https") or not host:
        raise BatchrunError(
            f"the base URL `{base_url}` is no http(s) address",
            hint="for example https://api.openai.com/v1 or http://localhost:8000/v1",
        )
    if re.search(r"[\x00-\x20\x7f-\U0010ffff\\]", base_url.strip()):
        raise BatchrunError("the base URL holds spaces or characters that are not ASCII")
    if url.scheme == "http" and not allow_http and not is_this_machine(host):
        raise BatchrunError(
            f"plain http to `{host}` would show the key and the prompts to the network",
            hint="use https, or a tunnel to localhost; --allow-http if you trust all that lies between",
        )
    return url


def is_this_machine(host: str) -> bool:
    """Whether a host's name says that it is the one that we run on."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _based(url: SplitResult, family: Family) -> str:
    """Returns the base URL that endpoint paths are added to, with the version segment of its family."""
    path = url.path.rstrip("/")
    versioned = any(_VERSION_SEGMENT.fullmatch(segment) for segment in path.split("/"))
    if family == "anthropic":
        path = path.removesuffix("/v1")
    elif not versioned:
        path += "/v1" if family == "openai" else "/v1beta"
    return urlunsplit((url.scheme, url.netloc, path, "", ""))


# ---------------------------------------------------------------- its codec


def make_provider(preset: Preset, key: str | None, extra_headers: Iterable[tuple[str, str]] = ()) -> Provider:
    """Returns the codec of ``preset``. The key is sent, and shown by no repr; extra headers outrank ours.

    Raises:
        BatchrunError: a key (CONFIGURATION) or header (USAGE) that cannot be sent as it is.
    """
    auth = None
    if key is not None and (key := key.strip()):
        if not _HEADER_VALUE.fullmatch(key):
            raise BatchrunError(
                "the API key holds characters that no header can carry",
                hint="it may have been pasted with quotes, line breaks or other text",
                exit_code=Exit.CONFIGURATION,
            )
        scheme = b"Bearer " if preset.key_header == "authorization" else b""
        auth = (preset.key_header.encode(), Secret(scheme + key.encode()))
    more: list[tuple[bytes, bytes]] = []
    if preset.family == "anthropic" or "messages" in preset.endpoints:
        more.append((b"anthropic-version", anthropic.VERSION))
    for name, value in extra_headers:
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise BatchrunError(f"the header `{name}` cannot be sent: names and values are plain ASCII")
        more.append((name.encode(), Secret(value.encode())))
    return _FAMILIES[preset.family](
        Wire(
            name=preset.name,
            family=preset.family,
            base_url=preset.base_url,
            urls={endpoint: _url(preset, endpoint) for endpoint in preset.endpoints},
            headers=request_headers(auth, *more),
            readers={**openai.READERS, **anthropic.READERS, **gemini.READERS},
            quotas=quotas_of(preset),
            max_tokens_name=preset.max_tokens_name,
            counts_max_tokens=preset.counts_max_tokens,
        )
    )


_FAMILIES: Mapping[Family, type[Codec]] = {
    "openai": openai.OpenAI,
    "anthropic": Codec,
    "gemini": gemini.Gemini,
}


def quotas_of(preset: Preset) -> Callable[[Mapping[str, str]], Quotas | None]:
    """Returns what reads the quotas in this provider's reply headers."""
    if preset.family == "anthropic":
        return anthropic_quotas
    return partial(openai_quotas, daily_requests=True) if preset.daily_requests else openai_quotas


def _url(preset: Preset, endpoint: Endpoint) -> str:
    match endpoint:
        case "generate":
            return preset.base_url  # the model follows
        case "messages":
            return preset.base_url.removesuffix("/v1") + "/v1/messages"
    return preset.base_url + openai.PATHS[endpoint]
