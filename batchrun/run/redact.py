"""Takes a key out of whatever a server says, at the border, before anything else reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from batchrun.records import Fault, HttpResponse

__all__ = ["Redactor"]

_MARK = "[redacted]"

_SHORTEST = 8
"""Shorter ones are dummies (`ollama`, `test`, `EMPTY`): words that answers are full of, and no secrets."""


class Redactor:
    """Replaces a key by ``[redacted]``, also where JSON spells its characters as escapes."""

    def __init__(self, key: str | None) -> None:
        secret = key if key is not None and (len(key) >= _SHORTEST or key.startswith("sk-")) else ""
        self._key = secret
        self._bytes = secret.encode()
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
        if self._bytes in content:
            content = content.replace(self._bytes, _MARK.encode())
        if b"\\u00" in content or self._slash in content:  # characters of a key that are escapes look like these
            content = self._escaped.sub(_MARK.encode(), content)
        headers: Mapping[str, str] = response.headers
        if any(self._key in value for value in headers.values()):
            headers = {name: value.replace(self._key, _MARK) for name, value in headers.items()}
        if content is response.content and headers is response.headers:
            return response
        return HttpResponse(response.status, headers, content)

    def fault(self, fault: Fault) -> Fault:
        """Returns a transport's fault without the key."""
        if not self._key or self._key not in fault.detail:
            return fault
        return replace(fault, detail=fault.detail.replace(self._key, _MARK))
