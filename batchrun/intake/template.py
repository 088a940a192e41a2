"""A row's fields → its prompt, through a Jinja template that is strict about missing fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Self

import orjson
from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

from batchrun.errors import BatchrunError, Exit
from batchrun.intake.bodies import BadLine

__all__ = ["PromptTemplate"]

MAX_PROMPT_CHARS = 16 * 1024 * 1024
MAX_POWER_BITS = 4096

_MISSING = re.compile(r"'([^']+)' is undefined|has no attribute '([^']+)'")


class PromptTemplate:
    """A compiled template. BatchrunError (exit 2) where its syntax is wrong."""

    def __init__(self, text: str) -> None:
        environment = _Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=False)
        try:
            self._template = environment.from_string(text)
        except TemplateSyntaxError as exc:
            raise BatchrunError(
                f"--template, line {exc.lineno}: {exc.message}",
                hint="fields are written {{ field }}; see Jinja's template language",
                exit_code=Exit.USAGE,
            ) from exc

    def render(self, data: bytes) -> bytes:
        """Returns the prompt for a valid JSON object, as raw JSON string; BadLine where it does not render."""
        fields = json.loads(data, parse_float=_Number)
        try:
            return orjson.dumps("".join(_capped(self._template.generate(fields))))
        except BadLine:
            raise
        except UndefinedError as exc:
            missing = _MISSING.search(exc.message or "")
            if missing is None:
                raise BadLine(f"the template fails: {exc.message}") from exc
            raise BadLine(
                f"lacks `{missing[1] or missing[2]}`, which the template needs",
                "add the field, or write {{ field | default('') }}",
            ) from exc
        except Exception as exc:
            # A template can raise whatever its expressions raise, and each is that row's own.
            raise BadLine(f"the template fails: {type(exc).__name__}: {exc}") from exc


def _capped(parts: Iterable[str]) -> Iterator[str]:
    chars = 0
    for part in parts:
        chars += len(part)
        if chars > MAX_PROMPT_CHARS:
            raise BadLine(f"its prompt is longer than {MAX_PROMPT_CHARS:,} characters")
        yield part


class _Number(float):
    """A number that prints as it was written: ``1.10`` stays ``1.10``."""

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number._text = text
        return number

    def __str__(self) -> str:
        return self._text


class _Environment(SandboxedEnvironment):
    """The sandbox, which bounds ranges; bounded here too are repeated texts and powers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> Any:  # noqa: ANN401 - as in Jinja
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_POWER_BITS:
                raise SecurityError("the power is too large")
        elif max(_length(left, right), _length(right, left)) > MAX_PROMPT_CHARS:
            raise SecurityError("the product is too long")
        return super().call_binop(context, operator, left, right)


def _length(repeated: object, times: object) -> int:
    if isinstance(repeated, str | list | tuple) and isinstance(times, int):
        return len(repeated) * times
    return 0
