"""What people see on stderr: lines, JSON lines, a bar; always inert, never a failure."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.records import BadRow, Standing
from batchrun.terminal.console import StderrConsole
from batchrun.terminal.wording import inert, listing, progress_line

HOSTILE = "\x1b]0;title\x07\x1b[31mred\x9b2J[bold]x[/bold]\u202egnp\u2028\r\ud800\x00:smile:"
REPOSITORY = Path(__file__).resolve().parent.parent


def standing(done=40, **changes):
    values = {
        "total": 100,
        "succeeded": done - 2,
        "failed": 2,
        "in_flight": 8,
        "limit": 16,
        "sent": 50,
        "retried": 3,
        "refused": 1,
        "tokens": 12_345,
        "cost_usd": Decimal("0.4100000001"),
        "spent_usd": Decimal("0.42"),
        "budget_usd": Decimal("5.00"),
        "rows_per_s": 12.34,
        "tokens_per_s": 4321.0,
        "elapsed_s": 3.5,
        "eta_s": 200.0,
        "binding": "requests per minute",
    }
    return Standing(**{**values, **changes})


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def console(stream=None, environ=None, **options):
    stream = io.StringIO() if stream is None else stream
    options.setdefault("wall", lambda: 1_700_000_000.25)
    return StderrConsole(stream, environ or {}, **options), stream


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


# ---------------------------------------------------------------- plain lines


def test_without_a_terminal_a_line_comes_soon_and_then_once_a_minute():
    clock = Clock()
    shown, stream = console(clock=clock)
    shown.start(100)
    at = []
    for tick in range(5 * 200):
        clock.now = 1000 + tick / 5
        before = stream.tell()
        shown.update(standing())
        if stream.tell() > before:
            at.append(tick / 5)
    shown.stop()
    assert at == [10, 70, 130, 190]
    line = (
        "40/100 rows (40%), ETA 3 min 20 s, 12.3 rows/s, 4,321 tokens/s, in flight 8/16, "
        "$0.42 of $5.00, 3 retried, 2 failed, bound by requests per minute"
    )
    assert set(stream.getvalue().splitlines()) == {line}


def test_without_a_budget_the_cost_is_that_of_what_is_settled():
    assert "$0.41, 3 retried" in progress_line(standing(budget_usd=None))


def test_no_rows_yet_is_a_line_too():
    line = progress_line(standing(done=2, total=0, eta_s=None, binding="", failed=0))
    assert line.startswith("0/0 rows, 12.3 rows/s")


@pytest.mark.parametrize("options", [{"progress": False}, {"quiet": True}, {"quiet": True, "progress": True}])
def test_no_progress_and_quiet_show_none(options):
    clock = Clock()
    shown, stream = console(clock=clock, **options)
    shown.start(100)
    clock.now += 1000
    shown.update(standing())
    shown.stop()
    assert stream.getvalue() == ""


def test_an_update_outside_of_a_run_shows_nothing():
    shown, stream = console()
    shown.update(standing())
    shown.stop()
    shown.stop()
    assert stream.getvalue() == ""


# ---------------------------------------------------------------- JSON lines


def test_json_lines_are_one_ascii_object_each_with_exact_money():
    clock = Clock()
    shown, stream = console(clock=clock, as_json=True, verbose=True)
    shown.start(100)
    clock.now += 10
    shown.update(standing(binding="ü\x1b"))
    shown.notice("one")
    shown.warn("two")
    shown.debug("three")
    shown.error("four", "five")
    shown.bad_lines([BadRow(7, f"is {HOSTILE}", "mend it")], 21)
    shown.stop()
    assert stream.getvalue().isascii()
    assert '"cost_usd":0.4100000001,' in stream.getvalue()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    levels = ["progress", "notice", "warning", "debug", "error", "bad_line", "bad_line"]
    assert [line["level"] for line in lines] == levels
    assert {line["at"] for line in lines} == {"2023-11-14T22:13:20.250Z"}
    assert lines[0]["rows"] == {"total": 100, "succeeded": 38, "failed": 2}
    assert lines[0]["binding"] == "ü\\x1b"
    assert (lines[4]["message"], lines[4]["hint"]) == ("four", "five")
    assert lines[5]["line"] == 7


# ---------------------------------------------------------------- levels


def test_quiet_silences_all_but_errors():
    shown, stream = console(quiet=True, verbose=True)
    shown.notice("a")
    shown.warn("b")
    shown.debug("c")
    shown.error("d", "e")
    shown.bad_lines([BadRow(3, "is bad")], 1)
    assert stream.getvalue() == "error: d\nhint: e\nline 3: is bad\n"


def test_only_verbose_tells_details():
    shown, stream = console()
    shown.debug("detail")
    shown, verbose = console(verbose=True)
    shown.debug("detail")
    assert (stream.getvalue(), verbose.getvalue()) == ("", "detail\n")


def test_twenty_bad_lines_are_named_and_the_rest_counted():
    shown, stream = console()
    bad = [BadRow(line, "has no model", "add one" if line != 2 else "or two") for line in range(1, 31)]
    shown.bad_lines(bad, 3000)
    lines = stream.getvalue().splitlines()
    assert lines[:5] == [
        "line 1: has no model",
        "  hint: add one",
        "line 2: has no model",
        "  hint: or two",
        "line 3: has no model",
    ]
    assert lines[-3:] == ["line 20: has no model", "  hint: add one", "… and 2,980 more bad lines"]


def test_bad_lines_that_are_skipped_are_not_named_when_quiet():
    shown, stream = console(quiet=True, hide_bad_lines=True)
    shown.bad_lines([BadRow(3, "is bad")], 1)
    assert stream.getvalue() == ""


# ---------------------------------------------------------------- inert


@given(st.text())
def test_no_text_whatever_acts_upon_a_terminal(text):
    for shown in (inert(text), listing({"a": text})[:-1], progress_line(standing(binding=text))):
        assert "\n" not in shown
        assert not re.search("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", shown)
        shown.encode()


@pytest.mark.parametrize("method", ["notice", "warn", "debug", "error"])
def test_hostile_text_is_shown_inert(method):
    shown, stream = console(verbose=True)
    getattr(shown, method)(HOSTILE)
    assert "\x1b" not in stream.getvalue()
    assert "\x9b" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1
    assert "[bold]x[/bold]" in stream.getvalue()


def test_hostile_text_is_inert_above_a_bar():
    shown, stream = console(Terminal(), {"TERM": "xterm", "COLUMNS": "200"})
    shown.start(100)
    shown.notice(HOSTILE)
    shown.stop()
    assert "\x1b]0" not in stream.getvalue()
    assert "\x1b[31m" not in stream.getvalue()
    assert "[bold]x[/bold]" in stream.getvalue()
    assert ":smile:" in stream.getvalue()


# ---------------------------------------------------------------- the bar


def bar_of(environ):
    shown, stream = console(Terminal(), {"TERM": "xterm-256color", "COLUMNS": "80", **environ})
    shown.start(100)
    shown.update(standing())
    shown.notice("a notice")
    shown.stop()
    return stream.getvalue()


def test_a_terminal_gets_a_bar_that_leaves_no_trace():
    drawn = bar_of({})
    assert "40/100 rows (40%)" in drawn
    assert "bound by requests per" in drawn
    assert "a notice" in drawn
    assert "\x1b[38;5;" in drawn
    assert drawn.rstrip("\r").endswith("\x1b[2K")
    assert "\x1b[?25h" in drawn


def test_no_color_is_honoured():
    drawn = bar_of({"NO_COLOR": "1"})
    assert "40/100 rows (40%)" in drawn
    assert not re.search(r"\x1b\[[0-9;]*m", drawn.replace("\x1b[0m", ""))


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_that_cannot_move_gets_plain_lines(environ):
    assert bar_of(environ) == "a notice\n"


def test_forced_colours_put_no_ansi_where_there_is_no_terminal():
    clock = Clock()
    shown, stream = console(environ={"FORCE_COLOR": "1", "TERM": "xterm"}, clock=clock, progress=True)
    shown.start(100)
    clock.now += 10
    shown.update(standing())
    shown.stop()
    assert "\x1b" not in stream.getvalue()
    assert "40/100 rows" in stream.getvalue()


def test_the_bar_draws_on_a_real_terminal():
    source = Path(__file__).read_text(encoding="utf-8")
    start = source.index("def standing(")
    helper = source[start : source.index("class Clock")]
    program = (
        "from decimal import Decimal\nfrom batchrun.records import Standing\n"
        + helper
        + "import os, sys\nfrom batchrun.terminal.console import StderrConsole\n"
        "c = StderrConsole(sys.stderr, os.environ)\nc.start(100)\nc.update(standing())\nc.stop()\n"
    )
    leader, follower = pty.openpty()
    try:
        environ = {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "80"}
        subprocess.run([sys.executable, "-c", program], stderr=follower, env=environ, timeout=60, check=True)
        assert b"40/100 rows (40%)" in os.read(leader, 65536)
    finally:
        os.close(leader)
        os.close(follower)


# ---------------------------------------------------------------- a stderr that is gone


class Broken(io.StringIO):
    encoding = "utf-8"

    def __init__(self, error, *, terminal):
        super().__init__()
        self.error = error
        self.terminal = terminal
        self.writes = 0

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.writes += 1
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(32, "x"), OSError(28, "x"), OSError(5, "x"), ValueError("x")])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_stderr_that_fails_is_let_go_and_never_raises(error, terminal):
    stream = Broken(error, terminal=terminal)
    clock = Clock()
    shown, _ = console(stream, {"TERM": "xterm"}, clock=clock)
    shown.start(100)
    clock.now += 10
    shown.update(standing())
    shown.notice("a")
    shown.error("b", "c")
    shown.stop()
    shown.error("d")
    assert stream.writes == 1


def test_without_a_stderr_nothing_is_said():
    shown = StderrConsole(None, {})
    shown.start(1)
    shown.error("a", "b")
    shown.stop()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_encoding_can_show_every_text(encoding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    shown, _ = console(stream)
    shown.notice("ü … 漢 \udcff")
    shown.bad_lines([], 5)
    stream.flush()
    assert raw.getvalue().count(b"\n") == 2


# ---------------------------------------------------------------- listings


def test_a_listing_tells_every_entry_for_people():
    document = {
        "rows": 1234,
        "cost_usd": {"min": Decimal("0.5"), "max": None},
        "models": {},
        "without_price": ["a", "b"],
        "duration_s": 3.456,
    }
    assert listing(document) == (
        "rows           1,234\n"
        "cost usd       min $0.50, max unknown\n"
        "models         none\n"
        "without price  a, b\n"
        "duration s     3.46\n"
    )
