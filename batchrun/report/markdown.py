"""The report as Markdown (CommonMark with tables), in which text from outside means nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchrun.report.inert import Foreign, sanitize
from batchrun.report.sections import Table, sections

__all__ = ["markdown"]


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the report, ending in a newline. Whatever is not ours stands in code spans."""
    lines = [f"# batchrun report: {_inline(sanitize(report['job'], 200))}"]
    for section in sections(report):
        lines += ["", f"## {section.title}"]
        if section.facts:
            lines += ["", *(f"- {name}: {_inline(value)}" for name, value in section.facts)]
        if section.table and section.table.rows:
            lines += ["", *_table(section.table)]
        if section.lines:
            lines += ["", *(f"- {_inline(line)}" for line in section.lines)]
    return "\n".join(lines) + "\n"


def _table(table: Table) -> Iterator[str]:
    yield _row(table.head)
    yield _row(["---" if i < table.words else "---:" for i in range(len(table.head))])
    for cells in table.rows:
        yield _row([_inline(cell) for cell in cells])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _inline(value: str) -> str:
    """Returns our own words as they are, and foreign ones as a code span.

    A code span is where neither HTML nor links, mentions or emphasis work. Its fence is longer than any run
    of backticks inside. A bar is drawn as U+2223: no escape of it means the same to every reader of tables.
    """
    if not isinstance(value, Foreign) or not value:
        return value
    shown = value.replace("|", "∣")
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    # A reader takes one space at each end off again, so that a backtick may stand there.
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{fence}{pad}{shown}{pad}{fence}" if shown.strip() else ""
