"""Many rows in one call: one packed body out, an answer for each row back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec
import orjson
from msgspec.structs import replace

from batchrun.providers.base import Family, Provider, load, raw_members
from batchrun.providers.faults import Broken, fault_of
from batchrun.providers.grouping import FIELDS, Packing, PackingName, limit_of, packing_for, prompt_of
from batchrun.providers.presets import Preset, quotas_of
from batchrun.providers.unpacking import unpack
from batchrun.records import Endpoint, Fault, HttpRequest, HttpResponse, Quotas, Reply, Row

__all__ = ["PackedProvider", "Packing", "PackingName", "make_packed", "packing_for"]

# What says that a call, not one of its rows, is too large: OpenAI's codes, Mistral's; then texts that say it alone.
_TOO_MANY_CODES = frozenset({"max_tokens_per_request", "array_above_max_length", "too_many_inputs", "3210"})
_TOO_MANY = re.compile(
    r"array too long|tokens per request|too many (?:inputs|prompts|items|tokens (?:in|overall))"
    r"|batch size|(?:request|payload|body) (?:is )?too large",
    re.IGNORECASE,
)
_FIRST_ONLY = "the server answered only the first row of a call of several: going on with one row per call"
_UNTOLD = "the server does not say which answer is whose in a call of several rows: going on with one row per call"
_FAILS = "the server fails on calls of several rows: going on with one row per call"


def make_packed(provider: Provider, packing: Packing, preset: Preset) -> Provider:
    """Returns ``provider`` with calls of several rows as ``packing`` has them."""
    return PackedProvider(provider, packing, preset.base_url + packing.path, quotas_of(preset))


_MAX_PART_BYTES = 128 * 1024
"""A row's part of a reply: a vector of 3,072 numbers takes some 40 kB, a pretty-printed one three times that."""


class PackedProvider:
    """A provider whose calls may carry several rows of one endpoint.

    Single rows, and those of other endpoints, are encoded and decoded by the wrapped provider, which may have a packing
    of its own. Rows of a call have the same ``packing.key``; what the call states once is taken from the first.
    """

    def __init__(
        self,
        provider: Provider,
        packing: Packing,
        url: str,
        quotas: Callable[[Mapping[str, str]], Quotas | None],
    ) -> None:
        self._provider = provider
        self._packing = packing
        self._url = url
        self._quotas = quotas
        self._tells_apart = False
        """It has answered several rows of one call, so a missing answer is that row's own trouble."""
        self._failed: set[str] = set()
        """First rows of calls that met a 500 before that."""
        self._notice: str | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._packing.name} of {self._provider!r}>"

    @property
    def notice(self) -> str | None:
        """Why the run goes on with one row per call, for people; None while calls of several rows work."""
        return self._notice or self._provider.notice

    @property
    def only_first(self) -> bool:
        """Whether the server has shown that it cannot answer several rows in one call: send one row per call."""
        return self.notice is not None

    def _shares(self, rows: tuple[Row, ...]) -> bool:
        return len(rows) > 1 and rows[0].endpoint == self._packing.endpoint

    @property
    def name(self) -> str:
        """The preset's name."""
        return self._provider.name

    @property
    def origin(self) -> str:
        """``scheme://host:port``."""
        return self._provider.origin

    @property
    def family(self) -> Family:
        """Whose wire format it speaks."""
        return self._provider.family

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """What rows may ask for."""
        return self._provider.endpoints

    @property
    def max_tokens_name(self) -> str:
        """The parameter that limits the output of a chat request."""
        return self._provider.max_tokens_name

    @property
    def counts_max_tokens(self) -> bool:
        """Whether the server charges max_tokens against its token quota."""
        return self._provider.counts_max_tokens

    def encode(self, rows: tuple[Row, ...]) -> HttpRequest:
        """Returns the request for ``rows``, built of their bodies' own bytes."""
        if not self._shares(rows):
            return self._provider.encode(rows)
        alone = self._provider.encode(rows[:1])
        name = self._packing.name
        content = _batch_requests(rows) if name == "gateway-batch" else _array(name, rows, alone.content)
        most = max(alone.max_reply_bytes, len(rows) * _MAX_PART_BYTES)
        return HttpRequest(self._url, alone.headers, content, max_reply_bytes=most)

    def decode(self, rows: tuple[Row, ...], response: HttpResponse) -> Reply | Fault:
        """Returns an Output for each row that was answered, matched by index or custom_id. Never raises."""
        if not self._shares(rows):
            return self._provider.decode(rows, response)
        if not 200 <= response.status < 300:
            return self._fault(rows, response, None)
        unpacked = unpack(self._packing.name, rows, response)
        if isinstance(unpacked, Broken):
            return self._fault(rows, response, unpacked)
        reply = msgspec.structs.replace(unpacked.reply, quotas=self._quotas(response.headers))
        if unpacked.whose == "nobody":
            self._go_alone(_UNTOLD)
            return _split(reply)
        if len(reply.outputs) > 1:
            self._tells_apart = True
        elif unpacked.whose == "first" and not self._tells_apart:
            self._go_alone(_FIRST_ONLY)
        return reply

    def adapt(self, rows: tuple[Row, ...], fault: Fault) -> bool:
        """Returns True where these rows are now spelt otherwise; what the call states once, the first row tells."""
        if not self._shares(rows):
            return self._provider.adapt(rows, fault)
        return self._packing.name != "gateway-batch" and self._provider.adapt(rows[:1], fault)

    def _fault(self, rows: tuple[Row, ...], response: HttpResponse, broken: Broken | None) -> Fault:
        _, doc = load(response.content)
        fault = fault_of(response, doc, self._quotas(response.headers), url=self._url, broken=broken)
        if fault.kind == "rejected" and (fault.code in _TOO_MANY_CODES or _TOO_MANY.search(fault.detail)):
            return replace(fault, kind="too_large")
        if fault.status == 500 and fault.kind == "overloaded" and not self._tells_apart:
            # Some servers fail on any array. Once may be chance; the same rows again, and they go one by one.
            first = rows[0].custom_id
            if first in self._failed:
                self._go_alone(_FAILS)
                return replace(fault, kind="rejected")
            self._failed.add(first)
        return fault

    def _go_alone(self, notice: str) -> None:
        self._notice = self._notice or notice


def _split(reply: Reply) -> Fault:
    """Returns what makes the schedule halve a call whose answers belong to nobody: they have been paid for."""
    return Fault(
        "rejected",
        "the reply does not say which answer is whose",
        reply.status,
        maybe_processed=True,
        usage=reply.usage,
        model=reply.model,
        request_id=reply.request_id,
        quotas=reply.quotas,
    )


# ---------------------------------------------------------------- bodies


class _Input(msgspec.Struct):
    input: msgspec.Raw


class _Prompt(msgspec.Struct):
    prompt: msgspec.Raw


class _Messages(msgspec.Struct):
    messages: msgspec.Raw


_inputs = msgspec.json.Decoder(_Input)
_prompts = msgspec.json.Decoder(_Prompt)
_messages = msgspec.json.Decoder(_Messages)


def _array(name: PackingName, rows: tuple[Row, ...], first: bytes) -> bytes:
    """Returns ``first``, the first row's body, with an array of what every row asks in the place of its own."""
    items: list[bytes | msgspec.Raw]
    match FIELDS[name]:
        case "input":
            items = [_inputs.decode(row.body).input for row in rows]
        case "prompt":
            items = [_prompts.decode(row.body).prompt for row in rows]
        case _:
            items = [_messages.decode(row.body).messages for row in rows]
    members: dict[str, bytes | msgspec.Raw] = {**raw_members(first)}
    members[FIELDS[name]] = b"[" + b",".join(items) + b"]"
    wire_name = {"messages": "batch"} if name == "gateway-chat" else {}
    return b"{" + b",".join(_member(wire_name.get(key, key), raw) for key, raw in members.items()) + b"}"


def _batch_requests(rows: tuple[Row, ...]) -> bytes:
    requests = []
    for row in rows:
        members = raw_members(row.body)
        request = {"custom_id": orjson.dumps(row.custom_id), "prompt": prompt_of(row.endpoint, members)}
        request |= {"max_tokens": limit_of(members), "temperature": members.get("temperature")}
        told = [_member(name, raw) for name, raw in request.items() if raw is not None]
        requests.append(b"{" + b",".join(told) + b"}")
    return b'{"model":' + orjson.dumps(rows[0].model) + b',"batch_requests":[' + b",".join(requests) + b"]}"


def _member(name: str, raw: bytes | msgspec.Raw) -> bytes:
    return orjson.dumps(name) + b":" + bytes(raw)
