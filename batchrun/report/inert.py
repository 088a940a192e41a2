"""Text from models, servers and inputs, made harmless before any renderer sees it."""

from __future__ import annotations

import unicodedata

__all__ = ["Foreign", "sanitize", "width"]

_JOINERS = "\u200c\u200d"
"""Invisible, but Persian words and emoji are made with them, and they act upon nothing."""


class Foreign(str):
    """A sanitised text that did not come from us: a renderer must not let it mean anything."""

    __slots__ = ()


def sanitize(text: str, limit: int) -> Foreign:
    r"""Returns ``text`` on one line of at most ``limit`` characters, none of which acts upon a terminal.

    Line ends and tabs become spaces. Other controls (so every ANSI and OSC sequence), bidi controls,
    invisible marks and lone surrogates become visible escapes such as ``\x1b``. A cut text ends in ``…``.
    """
    if len(text) <= limit and text.isprintable():
        return Foreign(text)
    shown: list[str] = []
    length = 0
    for sign in text:
        if sign.isprintable() or sign in _JOINERS:
            part = sign
        elif sign.isspace() and sign not in "\x1c\x1d\x1e\x1f\x85":
            part = " "
        else:
            code = ord(sign)
            part = f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
        shown.append(part)
        length += len(part)
        if length > limit:
            return Foreign("".join(shown)[: max(limit - 1, 0)] + "…" * (limit > 0))
    return Foreign("".join(shown))


def width(text: str) -> int:
    """Returns how many terminal columns a sanitised text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) or sign in _JOINERS else 1 + (unicodedata.east_asian_width(sign) in {"W", "F"})
        for sign in text
    )
