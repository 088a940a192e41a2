"""Takes a key out of whatever a server says, at the border, before anything else reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, quote_plus

from msgspec.structs import replace

from batchrun.records import Fault, HttpResponse

__all__ = ["Redactor"]

_MARK = "[redacted]"

_SHORTEST = 8
"""Shorter ones are dummies (`ollama`, `test`, `EMPTY`): words that answers are full of, and no secrets."""


class Redactor:
    """Replaces a key by ``[redacted]``, also as an URL quotes it, and where JSON spells its characters as escapes."""

    def __init__(self, key: str | None) -> None:
        secret = key if key is not None and (len(key) >= _SHORTEST or key.startswith("sk-")) else ""
        self._key = secret
        self._forms = list(dict.fromkeys((secret, quote(secret, safe=""), quote_plus(secret))))
        self._bytes = [form.encode() for form in self._forms]
        spelled = (
            rb"(?:%b|\\u%04x|\\u%04X|\\%b)" % (re.escape(c.encode()), ord(c), ord(c), re.escape(c.encode()))
            for c in secret
        )
        self._escaped = re.compile(b"".join(spelled))
        self._slash = b"\\/" if "/" in secret else b"\\u00"

    def response(self, response: HttpResponse) -> HttpResponse:
        """Returns the response without the key; itself where the key is not in it."""
        if not self._key:
            return response
        content = response.content
        for form in self._bytes:
            if form in content:
                content = content.replace(form, _MARK.encode())
        if b"\\u00" in content or self._slash in content:  # characters of a key that are escapes look like these
            content = self._escaped.sub(_MARK.encode(), content)
        headers: Mapping[str, str] = response.headers
        if any(form in value for value in headers.values() for form in self._forms):
            headers = {name: self._text(value) for name, value in headers.items()}
        if content is response.content and headers is response.headers:
            return response
        return HttpResponse(response.status, headers, content)

    def fault(self, fault: Fault) -> Fault:
        """Returns a transport's fault without the key."""
        detail = self._text(fault.detail) if self._key else fault.detail
        return fault if detail == fault.detail else replace(fault, detail=detail)

    def _text(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, _MARK)
        return text
