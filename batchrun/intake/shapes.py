"""A line → Row or BadRow. Each line is read by itself: a file may mix all shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batchrun.intake import bodies, simple
from batchrun.intake.bodies import BadLine, Members
from batchrun.intake.jsonl import OversizedLine
from batchrun.intake.options import Options, Shaping
from batchrun.intake.simple import Content
from batchrun.records import BadRow, Endpoint, Line, Row

if TYPE_CHECKING:
    from batchrun.intake.template import PromptTemplate

__all__ = ["Shaper", "Shaping"]

MAX_ID_CHARS = 1024
_IDS = ("custom_id", "id", "key")
_SOURCES = ("messages", "prompt", "input")
# An endpoint that is asked for by name finds its own field first.
_PREFERRED: Mapping[Endpoint, tuple[str, ...]] = {
    "completions": ("prompt", "input", "messages"),
    "responses": ("input", "messages", "prompt"),
    "embeddings": ("input", "prompt", "messages"),
    "generate": ("contents", *_SOURCES),
}
_HOMES: Mapping[str, Endpoint] = {"openai": "chat", "anthropic": "messages", "gemini": "generate"}
_NULL = b"null"
_BLANK = b" \t\r\n"
_UTF8_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_DIGITS = re.compile(r"-?[0-9]+")
_BATCH_HINT = 'expected {"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'


class _Entry(NamedTuple):
    """A line that holds an object, or a bare string taken for one. ``raws`` shrinks to what nobody took."""

    number: int
    custom_id: str
    value: dict[str, Any]
    raws: Members
    data: bytes
    """The line itself; empty for a bare string."""


class Shaper:
    """Turns lines into rows. BatchrunError (exit 2) where the options can work for no row."""

    def __init__(self, shaping: Shaping) -> None:
        self._options = Options(shaping)
        self._template = _compile(shaping.template)
        self._model = shaping.model or shaping.default_model
        self._raw_model = orjson.dumps(self._model)
        self._family = shaping.family
        self._forced = shaping.endpoint
        self._speaks = shaping.speaks
        self._max_tokens_name = shaping.max_tokens_name
        self._stores = "store" in shaping.params
        self._sources = _PREFERRED.get(shaping.endpoint or _HOMES[shaping.family], _SOURCES)

    def shape(self, line: Line | OversizedLine) -> Row | BadRow | None:
        """Returns the line's request, or why it is none; None for a blank line."""
        if isinstance(line, OversizedLine):
            return BadRow(line.number, f"is {line.length:,} bytes long", "a line holds one request")
        number, _, data = line
        custom_id = None
        try:
            if number == 1:
                data = _without_bom(data)
            try:
                value = orjson.loads(data)
            except orjson.JSONDecodeError as exc:
                if not data.strip(_BLANK):
                    return None
                raise _not_json(data, exc) from exc
            if type(value) is dict:
                raws = bodies.split(data)
                custom_id = _take_id(value, raws) or f"line-{number}"
                return self._object(_Entry(number, custom_id, value, raws, data))
            custom_id = f"line-{number}"
            return self._string(number, custom_id, value, data)
        except BadLine as bad:
            return BadRow(number, bad.why, bad.hint, custom_id)
        except RecursionError:
            return BadRow(number, "is nested too deeply", None, custom_id)

    def _string(self, number: int, custom_id: str, value: object, data: bytes) -> Row:
        if not isinstance(value, str):
            raise BadLine(f"is {bodies.name_of(value)}, expected an object or a string")
        return self._simple(_Entry(number, custom_id, {"prompt": value}, {"prompt": data.strip(_BLANK)}, b""))

    def _object(self, entry: _Entry) -> Row:
        value = entry.value
        if "url" in value and _holds(value.get("body")):
            return self._batch(entry, self._url_endpoint(entry), "body")
        # A row that holds a prompt, or fields for a template, may have columns called url, params or request.
        plain = self._template is not None or not value.keys().isdisjoint(_SOURCES)
        if not plain and ("body" in value or "url" in value):
            return self._batch(entry, self._url_endpoint(entry), "body")
        if _holds(value.get("params"), "messages") or (not plain and "params" in value):
            return self._batch(entry, "messages", "params")
        if _holds(value.get("request"), "contents") or (not plain and "request" in value):
            return self._batch(entry, "generate", "request")
        return self._simple(entry) if self._template is None else self._rendered(entry, self._template)

    def _url_endpoint(self, entry: _Entry) -> Endpoint:
        method = entry.value.get("method")
        if method is not None and method != "POST":
            raise BadLine(f"`method` is {_shown(method)}, expected POST", _BATCH_HINT)
        url = entry.value.get("url")
        entry.raws.pop("method", None)
        entry.raws.pop("url", None)
        if url is None and self._forced is not None:
            return self._forced
        if url is None:
            raise BadLine("has a `body` but no `url`", _BATCH_HINT)
        endpoint = bodies.PATHS.get(url) if isinstance(url, str) else None
        if endpoint is not None:
            return endpoint
        if isinstance(url, str) and ("://" in url or url.startswith("//")):
            raise BadLine(
                f"`url` names a host: {_shown(url)}",
                "write the path alone, like /v1/chat/completions; --base-url says where to send it",
            )
        raise BadLine(f"`url` is unknown: {_shown(url)}", f"known: {', '.join(list(bodies.PATHS)[:5])}")

    def _batch(self, entry: _Entry, endpoint: Endpoint, name: str) -> Row:
        """Takes the body that a batch line holds under ``name``."""
        body = entry.value.get(name)
        if type(body) is not dict:
            what = f"has no `{name}`" if body is None else f"`{name}` is {bodies.name_of(body)}, expected an object"
            raise BadLine(what, f"`{name}` holds the request")
        if self._forced is not None and endpoint != self._forced:
            raise BadLine(
                f"is for {endpoint}, but --endpoint says {self._forced}", "leave --endpoint out, or mend the line"
            )
        raw = entry.raws.pop(name)
        return self._finish(entry, endpoint, body.get("model"), body, raw)

    def _simple(self, entry: _Entry) -> Row:
        """Puts the body together that a simple row stands for."""
        value, raws = entry.value, entry.raws
        for source in self._sources:
            if value.get(source) is not None:
                break
        else:
            raise BadLine(
                "has no `messages`, `prompt` or `input`", "add one of them, or say with --template what to ask"
            )
        endpoint = self._endpoint_for(source, value)
        named = value.get("model") is not None
        if not named and self._model is not None:
            value["model"], raws["model"] = self._model, self._raw_model
        whole = raws.copy()
        content = Content(source, value[source], raws.pop(source))
        members = self._native(entry, endpoint, content, simple.PARAMETERS[endpoint])
        if endpoint == "responses" and not self._stores:
            # OpenAI keeps responses unless told otherwise; a bulk job never asks for them again.
            members.setdefault("store", b"false")
        unchanged = named and len(members) == len(value) and members == whole and entry.data
        raw = entry.data.strip(_BLANK) if unchanged else bodies.join(members)
        # Where no option asks what the body lacks, the row can stand for its own body, unparsed.
        native = members.items() <= whole.items() and not self._options.ask(endpoint)
        return self._finish(entry, endpoint, value.get("model"), value if native else orjson.loads(raw), raw)

    def _rendered(self, entry: _Entry, template: PromptTemplate) -> Row:
        """Renders the template's prompt from a row's fields, which then ride along as metadata."""
        endpoint = self._endpoint_for("prompt", entry.value)
        content = Content("prompt", "", template.render(entry.data))
        raw = bodies.join(self._native(entry, endpoint, content, ()))
        return self._finish(entry, endpoint, entry.value.get("model"), orjson.loads(raw), raw)

    def _native(self, entry: _Entry, endpoint: Endpoint, content: Content, parameters: Container[str]) -> Members:
        return simple.native_body(
            endpoint,
            content,
            entry.value,
            entry.raws,
            max_tokens_name=self._max_tokens_name,
            parameters=parameters,
        )

    def _endpoint_for(self, source: str, value: Mapping[str, Any]) -> Endpoint:
        """Returns where a simple row goes: what is forced, else what the provider speaks and the row holds."""
        if self._forced is not None:
            return self._forced
        if self._family != "openai":
            return _HOMES[self._family]
        model = value.get("model") or self._model
        if source != "messages" and isinstance(model, str) and simple.embeds(model):
            return "embeddings"
        return "responses" if source == "input" else "chat"

    def _finish(self, entry: _Entry, endpoint: Endpoint, model: object, body: dict[str, Any], raw: bytes) -> Row:
        """Lets the options add what the body lacks; one that lacks nothing stays these very bytes."""
        if endpoint not in self._speaks:
            raise BadLine(f"is for {endpoint}, which this provider does not have")
        bodies.check_content(endpoint, body)
        if model is None:
            model = self._model
        if model is None:
            raise BadLine("has no model", "--model NAME names one for all rows that have none")
        if type(model) is not str or not model:
            raise BadLine(f"`model` is {_shown(model)}, expected a name")
        body, raw = self._options.fill(endpoint, model, body, raw)
        raws = entry.raws
        raws.pop("priority", None)
        return Row(
            entry.number,
            entry.custom_id,
            endpoint,
            model.removeprefix("models/") if endpoint == "generate" else model,
            raw,
            bodies.max_output(endpoint, body),
            _priority(entry.value.get("priority")),
            _metadata(raws) if raws else None,
        )


def _compile(template: str | None) -> PromptTemplate | None:
    if template is None:
        return None
    from batchrun.intake.template import PromptTemplate

    return PromptTemplate(template)


# ---------------------------------------------------------------- parts of a line


def _without_bom(data: bytes) -> bytes:
    if data.startswith(_WIDE_BOMS):
        raise BadLine("is UTF-16 or UTF-32, expected UTF-8", "convert the file: iconv -f UTF-16 -t UTF-8")
    return data.removeprefix(_UTF8_BOM)


def _not_json(data: bytes, exc: orjson.JSONDecodeError) -> BadLine:
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return BadLine(f"is not UTF-8 at byte {wrong.start + 1}", "convert the file: iconv -f LATIN1 -t UTF-8")
    hint = None
    if exc.doc[exc.pos : exc.pos + 1] in ("N", "I") or exc.doc[exc.pos - 1 : exc.pos + 1] == "-I":
        hint = "NaN and Infinity are no JSON: write null, or leave the field out"
    return BadLine(f"is no JSON: {exc.msg} at column {exc.colno}", hint)


def _take_id(value: Mapping[str, Any], raws: Members) -> str | None:
    """Takes the row's id out of it: a string, or an integer, which counts as its digits. None: it has none."""
    for name in _IDS:
        found = value.get(name)
        if found is not None:
            break
    else:
        return None
    raw = raws.pop(name)
    if type(found) in (int, float) and _DIGITS.fullmatch(raw.decode()):
        return raw.decode()
    if type(found) is not str:
        raise BadLine(f"`{name}` is {_shown(found)}, expected a string or an integer")
    if not found:
        raise BadLine(f"`{name}` is empty")
    if len(found) > MAX_ID_CHARS:
        raise BadLine(f"`{name}` is {len(found):,} characters long, at most {MAX_ID_CHARS:,} are allowed")
    if not found.isprintable() and _CONTROL.search(found):
        raise BadLine(f"`{name}` holds a control character: {_shown(found)}")
    return found


def _priority(value: object) -> int:
    if value is None:
        return 0
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise BadLine(f"`priority` is {_shown(value)}, expected an integer", "larger goes first; 0 is the default")
    return value


def _metadata(raws: Members) -> bytes | None:
    """Returns the user's metadata as a JSON object: the row's own, and the fields that nothing else took."""
    own = raws.pop("metadata", _NULL)
    if own == _NULL:
        return bodies.join(raws) if raws else None
    if not own.startswith(b"{"):
        return bodies.join({"metadata": own} | raws)
    # A name that is in both says what the row's own metadata says.
    return bodies.join(raws | bodies.split(own)) if raws else own


def _holds(value: object, name: str | None = None) -> bool:
    return isinstance(value, dict) and (name is None or name in value)


def _shown(value: object) -> str:
    """Returns a value as JSON, short enough for a message and harmless in a terminal."""
    if isinstance(value, dict | list):
        return bodies.name_of(value)
    text = orjson.dumps(value).decode()
    if not text.isprintable():
        text = json.dumps(value)
    return text if len(text) <= 60 else text[:59] + "…"
