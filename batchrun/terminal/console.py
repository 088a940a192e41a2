"""The voice for people, on stderr: notices, errors, bad lines, progress; as text or as one JSON object a line.

Whatever is shown is made inert first: no text from a server, a model or a row moves the cursor or sets a
colour. A stderr that is closed or full never fails a run: what cannot be shown is dropped.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from batchrun.errors import Exit
from batchrun.records import BadRow, Standing
from batchrun.terminal.views import Bar, Lines, Unbreakable, View
from batchrun.terminal.wording import inert, progress_line, progress_numbers

__all__ = ["StderrConsole"]

_SHOWN_BAD_LINES = 20


class StderrConsole:
    """The Console of the command line; see ``run.progress.Console``.

    ``clock`` is monotonic seconds; ``wall`` is seconds since the epoch, for the times in JSON lines.
    """

    def __init__(
        self,
        stream: TextIO | None,
        environ: Mapping[str, str],
        *,
        as_json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        progress: bool | None = None,
        hide_bad_lines: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._stream = Unbreakable(stream)
        self._environ = environ
        self._as_json = as_json
        self._quiet = quiet
        self._verbose = verbose
        self._progress = progress is not False and not quiet
        self._hide_bad_lines = hide_bad_lines
        self._clock = clock
        self._wall = wall
        self._view: View | None = None

    def notice(self, text: str) -> None:
        """Says one line that a person should see."""
        if not self._quiet:
            self._say("notice", text, text)

    def warn(self, text: str) -> None:
        """Says one line about something that is not as it should be."""
        if not self._quiet:
            self._say("warning", text, f"warning: {text}")

    def debug(self, text: str) -> None:
        """Says one line, with ``--verbose`` only."""
        if self._verbose and not self._quiet:
            self._say("debug", text, text)

    def error(self, message: str, hint: str | None = None) -> None:
        """Says what went wrong and what to do about it; also when quiet."""
        if self._as_json:
            self._say("error", message, "", **({"hint": hint} if hint else {}))
            return
        self._say("error", message, f"error: {message}")
        if hint:
            self._say("error", hint, f"hint: {hint}")

    def trace(self, text: str) -> None:
        """Shows part of a traceback, line by line; also when quiet."""
        for line in text.splitlines():
            self._say("trace", line, line)

    def summary(self, summary: Mapping[str, Any], text: str, exit_code: int) -> None:
        """Says how a run ended, in the lines of ``text``; when quiet, only that it did not end well."""
        if self._quiet and not exit_code:
            return
        first, *rest = text.splitlines()
        if self._as_json:
            self._say("summary", first, "", summary=summary)
            return
        is_error = Exit.INPUT <= exit_code < Exit.SIGHUP
        self._say("summary", first, f"error: {first}" if is_error else first)
        for line in [] if self._quiet else rest:
            self._say("summary", line, line)

    def bad_lines(self, bad: Sequence[BadRow], count: int) -> None:
        """Names the first bad lines, with reasons and hints, and says how many of ``count`` are left out."""
        if self._hide_bad_lines:
            return
        shown = bad[:_SHOWN_BAD_LINES]
        for i, row in enumerate(shown, 1):
            text = f"line {row.line}: {row.why}"
            more: dict[str, Any] = {"line": row.line, "why": inert(row.why)}
            if row.hint:
                more["hint"] = inert(row.hint)
            self._say("bad_line", text, text, **more)
            # Twenty lines with the same fault share one hint.
            repeated = i < len(shown) and shown[i].hint == row.hint
            if row.hint and not repeated and not self._as_json:
                self._say("bad_line", row.hint, f"  hint: {row.hint}")
        if count > len(shown):
            text = f"and {count - len(shown):,} more bad lines"
            self._say("bad_line", text, f"… {text}")

    def start(self, total: int) -> None:
        """Begins to show progress over ``total`` rows."""
        if not self._progress or self._view is not None:
            return
        if self._as_json or not self._stream.moves(self._environ):
            self._view = Lines(self._progress_line, self._write, self._clock)
        else:
            self._view = Bar(self._stream, self._environ, total)

    def update(self, standing: Standing) -> None:
        """Takes how the run stands; cheap enough for several times a second."""
        if self._view is not None:
            self._view.show(standing)

    def stop(self) -> None:
        """Ends showing progress; again does nothing."""
        view, self._view = self._view, None
        if view is not None:
            view.close()

    def _progress_line(self, standing: Standing) -> str:
        text = progress_line(standing)
        return self._json_line("progress", text, **progress_numbers(standing)) if self._as_json else text

    def _say(self, level: str, message: str, text: str, **more: Any) -> None:  # noqa: ANN401 - any JSON value
        line = self._json_line(level, message, **more) if self._as_json else inert(text)
        if self._view is not None:
            self._view.say(line)
        else:
            self._write(line)

    def _json_line(self, level: str, message: str, **more: Any) -> str:  # noqa: ANN401 - any JSON value
        at = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds")
        line = {"at": at.replace("+00:00", "Z"), "level": level, "message": inert(message), **more}
        return _json(line)

    def _write(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()


def _json(line: Mapping[str, Any]) -> str:
    """Returns one line of ASCII JSON, whatever the terminal's encoding; money keeps all its digits."""
    import msgspec

    text = msgspec.json.Encoder(decimal_format="number").encode(line).decode()
    return re.sub(r"[^\x00-\x7e]+", lambda match: json.dumps(match[0])[1:-1], text)
