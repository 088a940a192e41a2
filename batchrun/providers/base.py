"""What a provider is, and the codec that families share: rows → HttpRequest, HttpResponse → Reply | Fault.

Pure: no network, no clock, no environment. A family brings its readers (one per endpoint) and its headers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec
import orjson

from batchrun import __version__
from batchrun.providers.faults import Broken, ErrorBody, fault_of, read_error
from batchrun.records import Endpoint, Fault, HttpRequest, HttpResponse, Output, Quotas, Reply, Row

__all__ = [
    "Codec",
    "Family",
    "Provider",
    "Reader",
    "Secret",
    "count",
    "join",
    "load",
    "no_object",
    "raw_items",
    "raw_members",
    "request_headers",
    "text_value",
]

Family: TypeAlias = Literal["openai", "anthropic", "gemini"]
Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

Reader: TypeAlias = Callable[[Row, dict[str, Any], bytes, Mapping[str, str]], Output | Broken]
"""(row, parsed reply, the reply's bytes on one line, headers) → the row's answer, or why there is none."""


class Provider(Protocol):
    """Translates between rows and one provider's wire format. It sends, sleeps and retries nothing."""

    @property
    def name(self) -> str:
        """The preset's name."""

    @property
    def origin(self) -> str:
        """``scheme://host:port``: where the key goes, and what limits belong to."""

    @property
    def family(self) -> Family:
        """Whose wire format it speaks."""

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """What rows may ask for; ``encode`` raises KeyError for others."""

    @property
    def max_tokens_name(self) -> str:
        """The parameter that limits the output of a chat request."""

    @property
    def counts_max_tokens(self) -> bool:
        """Whether the server charges max_tokens, not what came out, against its token quota."""

    @property
    def only_first(self) -> bool:
        """Whether the server was seen to answer only one row of a call: it must be asked one row at a time."""

    @property
    def notice(self) -> str | None:
        """What a person should be told once of how the server behaves."""

    def encode(self, rows: tuple[Row, ...]) -> HttpRequest:
        """Returns the request for ``rows`` (exactly one): the row's very body, unless ``adapt`` learned."""

    def decode(self, rows: tuple[Row, ...], response: HttpResponse) -> Reply | Fault:
        """Returns what the response means for ``rows``. Never raises, whatever the bytes."""

    def adapt(self, rows: tuple[Row, ...], fault: Fault) -> bool:
        """Returns True where these rows are now spelt otherwise than ``fault`` refused: ask again at once.

        Each spelling is tried at most once per model, so this ends.
        """


class Secret(bytes):
    """Bytes that are sent but never shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "b'[redacted]'"


class Wire(msgspec.Struct, frozen=True):
    """What tells one provider from another of its family."""

    name: str
    family: Family
    base_url: str
    urls: Mapping[Endpoint, str]
    """Endpoint → absolute URL."""
    headers: Headers
    readers: Mapping[Endpoint, Reader]
    quotas: Callable[[Mapping[str, str]], Quotas | None]
    max_tokens_name: str
    counts_max_tokens: bool


class Codec:
    """The codec that families share. It sends one row per call, so there is nothing to find out of more."""

    only_first = False
    notice: str | None = None

    def __init__(self, wire: Wire) -> None:
        self.name = wire.name
        self.origin = _origin(wire.base_url)
        self.family: Family = wire.family
        self.endpoints: frozenset[Endpoint] = frozenset(wire.urls)
        self.max_tokens_name = wire.max_tokens_name
        self.counts_max_tokens = wire.counts_max_tokens
        self._urls = wire.urls
        self._headers = wire.headers
        self._readers = wire.readers
        self._quotas = wire.quotas

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.origin}>"

    def encode(self, rows: tuple[Row, ...]) -> HttpRequest:
        """Returns the request for the one row of ``rows``."""
        (row,) = rows
        return HttpRequest(self._url(row), self._headers, row.body)

    def decode(self, rows: tuple[Row, ...], response: HttpResponse) -> Reply | Fault:
        """Returns the row's Reply, or the Fault. Never raises."""
        (row,) = rows
        headers = response.headers
        quotas = self._quotas(headers)
        body, doc = load(response.content)
        if not 200 <= response.status < 300:
            return fault_of(response, doc, quotas, url=self._url(row))
        read = self._read(row, doc, body, headers)
        if isinstance(read, Broken):
            return fault_of(response, doc, quotas, url=self._url(row), broken=read)
        get = doc.get
        model, tier = get("model") or get("modelVersion"), get("service_tier")
        return Reply(
            {row.custom_id: read},
            read.usage,
            model if isinstance(model, str) else None,
            headers.get("x-request-id") or headers.get("request-id") or _id(doc),
            response.status,
            tier if isinstance(tier, str) else _usage_tier(doc),
            quotas,
        )

    def adapt(self, rows: tuple[Row, ...], fault: Fault) -> bool:  # noqa: ARG002  # the protocol's signature
        """Returns False: this family has one spelling."""
        return False

    def _url(self, row: Row) -> str:
        return self._urls[row.endpoint]

    def _read(self, row: Row, doc: object, body: bytes, headers: Mapping[str, str]) -> Output | Broken:
        if not isinstance(doc, dict):
            return no_object(doc, body, headers)
        try:
            read = self._readers[row.endpoint](row, doc, body, headers)
        except (RecursionError, msgspec.MsgspecError):
            return Broken("the reply is nested too deeply")
        if doc.get("error") or doc.get("object") == "error":
            # OpenRouter and /responses: an error inside a 200, with usage where tokens were spent.
            error = read_error(doc)
            if error is not None:
                otherwise = read.otherwise if isinstance(read, Broken) else 500
                return Broken(error.message, error, read.usage, otherwise=otherwise)
        return read


def no_object(doc: object, body: bytes, headers: Mapping[str, str]) -> Broken:
    """Returns what a 2xx is whose body is no JSON object: an error in an array, an event stream, or nothing."""
    # Gemini's compatible endpoint sends errors as an array; any other non-object is no answer.
    error = read_error(doc) if isinstance(doc, list) else None
    if headers.get("content-type", "").startswith("text/event-stream"):
        why = 'the reply is an event stream: remove "stream" from the row'
        return Broken(why, ErrorBody(why, "stream", "stream", number=400), processed=True)
    return Broken("the reply is empty" if not body else "the reply is no JSON object", error)


# ---------------------------------------------------------------- bytes


_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def count(value: object) -> int | None:
    """Returns a whole number of tokens that can be one: not negative, below 2^40; ``true`` and 1.0 are none."""
    return value if type(value) is int and 0 <= value < 1 << 40 else None


def load(content: bytes) -> tuple[bytes, Any]:
    """Returns (the JSON text on one line, its value); the value is None where it is no JSON.

    Strips what may stand around it (BOM, DeepSeek's blank lines). Broken text inside an otherwise whole reply
    (lone surrogates, invalid UTF-8) becomes U+FFFD: the reply has been paid for.
    """
    body = content.removeprefix(b"\xef\xbb\xbf").strip()
    try:
        doc = _loads(body)
    except ValueError:
        if not body.startswith((b"{", b"[")):
            return body, None
        body = body.decode("utf-8", "replace").encode()
        body = _ESCAPES.sub(lambda m: b"\\ufffd" if m[1] else m[0], body)
        try:
            doc = _loads(body)
        except ValueError:
            return body, None
    if b"\n" in body or b"\r" in body:
        # Raw line breaks in valid JSON are white space: strings escape theirs.
        body = body.replace(b"\r", b" ").replace(b"\n", b" ")
    return body, doc


def _loads(body: bytes) -> object:
    # Parsed four levels down, so that what is nested too deeply to be read back from inside a record fails here.
    # Only a single whole value leaves each of our brackets with one item; ValueError otherwise.
    [[[[doc]]]] = orjson.loads(b"[[[[" + body + b"]]]]")
    return doc


def raw_members(text: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Returns the members of a JSON object as the very bytes they are; empty where it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return {}


def raw_items(text: bytes | msgspec.Raw) -> list[msgspec.Raw]:
    """Returns the items of a JSON array as the very bytes they are; empty where it is none."""
    try:
        return msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        return []


def join(items: list[bytes]) -> bytes:
    """Returns the JSON array of JSON texts."""
    return b"[" + b",".join(items) + b"]"


def text_value(text: str, *, parse: bool) -> bytes:
    """Returns a text as JSON: with ``parse`` the JSON that it holds, digit for digit, where it holds any."""
    if parse:
        body, doc = load(text.encode("utf-8", "replace"))
        if doc is not None or body == b"null":
            return body
    return orjson.dumps(text)


# ---------------------------------------------------------------- headers


def request_headers(auth: tuple[bytes, bytes] | None, *more: tuple[bytes, bytes]) -> Headers:
    """Returns the headers of every request; of equal names the last in ``more`` counts."""
    headers = {
        b"content-type": b"application/json",
        b"accept": b"application/json",
        b"accept-encoding": b"gzip, deflate",
        b"user-agent": b"batchrun/" + __version__.encode(),
    }
    headers.update([auth] if auth else [])
    headers.update((name.lower(), value) for name, value in more)
    return tuple(headers.items())


def _origin(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _id(doc: dict[str, Any]) -> str | None:
    value = doc.get("id") or doc.get("responseId")
    return value if isinstance(value, str) else None


def _usage_tier(doc: dict[str, Any]) -> str | None:
    usage = doc.get("usage")
    tier = usage.get("service_tier") if isinstance(usage, dict) else None
    return tier if isinstance(tier, str) else None
