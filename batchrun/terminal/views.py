"""Ways to show progress: a bar on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from batchrun.records import Standing
from batchrun.terminal.wording import inert, progress_details, progress_rows

__all__ = ["Bar", "Lines", "Unbreakable", "View"]

_FIRST_LINE_S = 10.0
_LINE_EVERY_S = 60.0


class View(Protocol):
    """A way to show progress."""

    def show(self, standing: Standing) -> None:
        """Takes how the run stands."""

    def say(self, line: str) -> None:
        """Writes one line, already inert, without disturbing what is shown."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class Lines:
    """A plain line soon after the start, then one a minute."""

    def __init__(
        self,
        line: Callable[[Standing], str],
        write: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._line = line
        self._clock = clock
        self._due = clock() + _FIRST_LINE_S
        self.say = write

    def show(self, standing: Standing) -> None:
        """Writes a line if one is due."""
        now = self._clock()
        if now >= self._due:
            self._due = now + _LINE_EVERY_S
            self.say(self._line(standing))

    def close(self) -> None:
        """Leaves nothing behind: each line stands by itself."""


class Bar:
    """A bar with its figures below, drawn over itself from a thread of its own.

    The run's own thread only hands over the newest Standing, so a slow terminal slows nothing down.
    """

    def __init__(self, stream: Unbreakable, environ: Mapping[str, str], total: int) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._total = total
        self._standing: Standing | None = None
        self._console = RichConsole(
            file=stream,  # type: ignore[arg-type] # rich needs no more of a file than this
            force_terminal=True,
            markup=False,
            emoji=False,
            highlight=False,
            _environ=environ,
        )
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            refresh_per_second=5,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, standing: Standing) -> None:
        """Hands over what the next drawing shows."""
        self._standing = standing

    def say(self, line: str) -> None:
        """Writes one line, already inert, above it."""
        from rich.text import Text

        self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Wipes it."""
        self._live.stop()

    def _draw(self) -> Any:  # noqa: ANN401 - whatever rich can render
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        standing = self._standing
        done = standing.succeeded + standing.failed if standing else 0
        total = max(standing.total if standing else self._total, 1)
        first = Table.grid(padding=(0, 1))
        first.add_row(
            ProgressBar(total=total, completed=done, width=28),
            Text(inert(progress_rows(standing)) if standing else f"0/{self._total:,} rows", no_wrap=True),
        )
        if standing is None:
            return first
        return Group(first, Text(inert(", ".join(progress_details(standing)))))


class Unbreakable:
    """A stream whose failure is nobody's trouble: after the first failed write it swallows everything.

    What a pipe has no room for is dropped: a reader that dawdles must not hold up requests in flight.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """What its text is encoded in."""
        return (self._stream and self._stream.encoding) or "utf-8"

    def write(self, text: str) -> int:
        """Writes, or drops what cannot be written."""
        if self._has_room():
            self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Passes on what was written."""
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return bool(self._try(lambda stream: stream.isatty()))

    def fileno(self) -> int:
        """Returns its descriptor. Raises: OSError once it is gone."""
        if self._stream is None:
            raise OSError("closed")
        return self._stream.fileno()

    def moves(self, environ: Mapping[str, str]) -> bool:
        """Returns whether it is a terminal that can draw over itself."""
        return self.isatty() and environ.get("TERM", "").lower() not in {"dumb", "unknown"}

    def _has_room(self) -> bool:
        try:
            return bool(select.select((), (self,), (), 0)[1])
        except (OSError, ValueError):  # no descriptor, or one that select does not know: it will not block
            return True

    def _try(self, use: Callable[[TextIO], object]) -> object:
        if self._stream is None:
            return None
        try:
            return use(self._stream)
        except (OSError, ValueError):  # gone, full, or closed by somebody
            self._stream = None
            return None
