from __future__ import annotations

import base64
import hashlib
import re
from decimal import Decimal
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchrun.records import (
    Doubted,
    Noted,
    Opened,
    Returned,
    RunEnded,
    RunStarted,
    Sampled,
    Sent,
    Settled,
    Usage,
)
from batchrun.report.html import html
from batchrun.report.inert import sanitize, width
from batchrun.report.markdown import markdown
from batchrun.report.metrics import JobStanding, Tally, report, summary
from batchrun.report.sections import money, seconds
from batchrun.report.text import final_summary, text

UNHURRIED = settings(deadline=None)  # a shared machine may pause for longer than any deadline

HOSTILE = [
    "\x1b[2J\x1b[31mred\x1b[0m",
    "\x1b]8;;http://evil.example\x07click\x1b]8;;\x07",
    "\x9b31m \x9d0;title\x9c",
    "\u202egnp.exe \u2066isolate\u2069 \u200f\u061c",
    "[bold red]markup[/] [link=http://evil.example]x[/link]",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "\"><style>*{display:none}</style> ' onmouseover='x",
    "{{ 7*7 }} {% raw %} ${x}",
    "| a | b |\n| --- | --- |\n# title\n- item\n> quote",
    "[x](javascript:alert(1)) ![i](http://evil.example/i.png) <http://evil.example> http://evil.example @someone",
    "``` fence\n`tick` ``two`` \\",
    "line\r\nbreak\u2028more\u2029\x85\x0b\x0c\ttab\x00nul\x08",
    "lone \ud800 surrogate",
    "=cmd|' /C calc'!A0",
    "漢字 كلمة 👩‍👩‍👧 é",
    "",
    " ",
]


def hostile_report(text_from_outside):
    """A report in which every text that can come from outside is the given one."""
    evil = text_from_outside
    usage = Usage(800, 30, 700, 0, 10)
    tally = Tally()

    def settled(line, status, cost):
        said = dict.fromkeys(("custom_id", "kind", "code", "detail", "model", "finish_reason"), evil)
        times = {"queue_s": 1, "service_s": 2, "total_s": 3, "at": 9.0}
        return Settled(
            line=line, status=status, record=b"", sends=1, usage=usage, cost_usd=cost, lost_usd=Decimal(0),
            estimated_tokens=900, empty=True, **said, **times,
        )  # fmt: skip

    for operation in (
        RunStarted(1, 0.0, 3),
        Opened(1, 3, 10, 10, 100, 5, 1_000, "input", "embeddings"),
        Opened(2, 1, 10, 10, 100, 5, 1_000, "input"),
        Sent(1, 1, 1, Decimal(1), 1.0, evil),
        Returned(1, 1, 1, "timeout", evil, None, evil, 0.1, usage, Decimal("0.1"), Decimal("0.2"), evil, 2.0),
        settled(1, "succeeded", Decimal("0.00000001")),
        settled(2, "succeeded", None),
        settled(3, "failed", None),
        Sampled(5.0, 5.0, 3, 8, 3, 3, 1, 100, 0.5, evil),
        Noted(5.0, "notice", evil),
        Doubted(1, evil, Decimal(1), False, 6.0),
        RunEnded(1, 9.0, 9.0, "stopped", evil, 3),
    ):
        tally.add(operation)
    standing = JobStanding(evil, evil, "stopped", evil, 3, 3, 1, evil, evil, (evil,), evil, budget_usd=Decimal(5))
    return report(tally, standing), summary(tally, standing)


def benign():
    return hostile_report("gpt-5-mini")


# ---------------------------------------------------------------- sanitize


@UNHURRIED
@given(st.text(st.characters(exclude_categories=[])), st.integers(1, 80))
def test_a_sanitised_text_is_one_short_line_of_printable_signs(value, limit):
    shown = sanitize(value, limit)
    assert len(shown) <= limit
    assert all(sign.isprintable() or sign in "\u200c\u200d" for sign in shown)
    shown.encode("utf-8")


def test_a_harmless_text_is_left_as_it_is_and_a_harmful_sign_is_shown_as_what_it_is():
    assert sanitize("é 漢字 [bold] <b>", 40) == "é 漢字 [bold] <b>"
    assert sanitize("a\x1b[31mb\u202ec\n\td", 40) == "a\\x1b[31mb\\u202ec  d"
    assert sanitize("abcdef", 4) == "abc…"


def test_width_counts_columns_and_not_signs():
    assert [width(sign) for sign in ("a", "漢", "e\u0301", "")] == [1, 2, 1, 0]


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_text_is_inert_in_a_terminal(evil):
    document, short = hostile_report(evil)
    for shown in (text(document), final_summary(short)):
        assert all(sign == "\n" or sign.isprintable() or sign in "\u200c\u200d" for sign in shown)
        shown.encode("utf-8")
    # Line ends are ours alone: the same lines as for a harmless text, but for wrapping.
    assert len(final_summary(short).splitlines()) == len(final_summary(benign()[1]).splitlines())


@pytest.mark.parametrize("evil", HOSTILE)
@pytest.mark.parametrize("columns", [80, 120])
def test_the_text_report_fits_its_columns(evil, columns):
    for line in text(hostile_report(evil)[0], columns=columns).splitlines():
        assert width(line) <= columns + (0 if line.isascii() else line.count("漢") * 2 + 40)


def test_the_text_report_has_ansi_only_when_asked_and_only_round_its_titles():
    document, _ = benign()
    assert "\x1b" not in text(document)
    colored = text(document, color=True)
    assert re.sub(r"\x1b\[1m(.*)\x1b\[0m", r"\1", colored) == text(document)


def test_the_text_report_says_what_the_issue_asks_for():
    shown = text(benign()[0])
    for words in (
        "succeeded     2  66.7%",
        "unknown cost      1 row, not in the sum above",
        "known     $0.10 for 1 send",
        "possible  at most $0.20 for 1 send that may have been billed",
        "left failed       1",
        "succeeded  queue",
        "succeeded  service",
        "in flight  █ peak 3",
        "calls    1 for 1 row: as many as with one row per call",
        "batches  1 of 3.0 rows on average (embeddings)",
        "alone    1 row that cannot share a call",
        "fill     60.0% of the rows, 10.0% of the tokens, 1.0% of the bytes",
        "ended    1 for want of more rows",
        "cost     as with one row per call: prices are per token",
        "- line 3, gpt-5-mini: gpt-5-mini: gpt-5-mini",
        "batchrun resume gpt-5-mini",
    ):
        assert words in shown


def packed_report(*operations, rpm=None):
    """A report of 100 rows in two calls of 50, and what came after."""
    tally = Tally()
    for batch in (1, 2):
        tally.add(Opened(batch, 50, 400, 3_000, 1_000, 50, 10_000, "rows", "embeddings"))
        for line in range(50):
            tally.add(Sent(50 * batch + line, 1, 1, Decimal(0), 1.0, "t", line == 0))
    for operation in operations:
        tally.add(operation)
    standing = JobStanding("j", "i", "complete", "", 0, 100, 0, "r", "e", rpm=rpm)
    return report(tally, standing), summary(tally, standing)


def split_in_two(cost_usd=None, lost_usd=Decimal(0)):
    """A call of 50 that was given up, and its two halves."""
    usage = None if cost_usd is None else Usage(400, 0)
    back = Returned(50, 1, 1, "rejected", None, 400, "no", 0.1, usage, cost_usd, lost_usd, "m", 2.0, split=True)
    halves = [Sent(50 + line, 2, 1, Decimal(0), 3.0, "t", line in (0, 25)) for line in range(50)]
    others = replace(back, usage=None, cost_usd=None, lost_usd=Decimal(0), counts=False)
    return [back, *[others] * 49, *halves]


def test_a_packed_job_is_told_at_once_what_packing_did_for_it():
    document, short = packed_report(rpm=10)
    shown = text(document, columns=120)
    assert shown.index("Packing") < shown.index("Cost")
    for words in (
        "calls    2 instead of 100 with one row per call: 98 saved",
        "quota    12 s of 10 requests per minute instead of 10 min 0 s",
    ):
        assert words in shown
    assert "repeated" not in shown
    assert "requests  2 sent, 0 retried, 0 refused; 98 saved by packing" in final_summary(short)
    assert "- calls: 2 instead of 100 with one row per call: 98 saved" in markdown(document)
    assert "calls for 100 rows" in html(document)


def test_calls_that_were_split_are_counted_against_what_packing_saved():
    document, short = packed_report(*split_in_two())
    packing = document["packing"]
    assert (packing["calls"], packing["calls_one_by_one"], packing["calls_saved"]) == (4, 100, 96)
    assert (packing["calls_repeated"], packing["calls_split"]) == (2, 1) == (short["requests"]["retried"], 1)
    assert short["calls_saved"] == 96
    assert "repeated  2 of them; 1 call went on in parts" in text(document)


def test_packing_costs_what_one_row_per_call_costs_but_for_split_calls_that_were_billed():
    plain = packed_report(*split_in_two())[0]["packing"]
    assert plain["cost_usd"] == plain["cost_one_by_one_usd"] == plain["cost_lost_usd"] == 0
    dearer, _ = packed_report(*split_in_two(Decimal("0.3"), Decimal("0.7")))
    packing = dearer["packing"]
    assert packing["cost_usd"] - packing["cost_one_by_one_usd"] == Decimal("0.3") == dearer["wasted"]["cost_usd"]
    assert packing["cost_lost_usd"] == Decimal("0.7") == dearer["wasted"]["lost_usd"]
    shown = " ".join(text(dearer).split())
    assert "$0.30 more, for calls that were split after they were billed, and at most $0.70 more" in shown


def test_where_no_row_shares_a_call_nothing_is_said_of_packing():
    tally = Tally()
    tally.add(Opened(1, 3, 10, 10, 100, 1_000, 1 << 20, "input"))
    for line in range(3):
        tally.add(Sent(line, 1 + line // 2, 1, Decimal(0), 1.0, "t"))
    standing = JobStanding("j", "i", "complete", "", 0, 3, 0, "r", "e", rpm=10)
    document = report(tally, standing)
    assert document["packing"] is document["calls_saved"] is None
    for shown in (text(document), markdown(document), html(document), final_summary(summary(tally, standing))):
        assert "pack" not in shown.lower()
        assert "batches" not in shown.lower()
        assert "saved" not in shown.lower()


def test_a_report_of_nothing_still_renders_everywhere():
    document = report(Tally(), JobStanding("j", "i", "complete", "", 0, 0, 0, "r", "e"))
    assert "total         0" in text(document)
    assert markdown(document).startswith("# batchrun report: `j`\n")
    assert "<h2>Rows</h2>" in html(document)


def test_the_final_summary_is_four_to_eight_lines_with_a_way_on():
    lines = final_summary(benign()[1]).splitlines()
    assert 4 <= len(lines) <= 8
    assert lines[1] == "rows      3: 2 succeeded, 1 failed, 1 pending, 1 in doubt"
    assert lines[4] == "cost      $0.10, and 1 row of unknown cost; $1.30 counted as spent of $5.00 budget"
    assert lines[-1] == "go on     batchrun resume gpt-5-mini"


def test_a_clean_end_is_told_in_few_words():
    tally = Tally()
    usage = Usage(812, 3, 768)
    money = {"cost_usd": Decimal("0.00021"), "lost_usd": Decimal(0)}
    times = {"queue_s": 1.0, "service_s": 0.5, "total_s": 1.5, "at": 2.0}
    row = {"line": 1, "custom_id": "a", "status": "succeeded", "record": b"", "sends": 1, "finish_reason": "stop"}
    tally.add(Settled(model="m", usage=usage, estimated_tokens=9, **row, **money, **times))
    standing = JobStanding(
        "j.batchrun", "j.jsonl", "complete", "all done", 0, 1, 0, "r.jsonl", "e.jsonl", elapsed_s=2.0
    )
    assert final_summary(summary(tally, standing)).splitlines() == [
        "complete: all done",
        "rows      1: 1 succeeded, 0 failed",
        "requests  0 sent, 0 retried, 0 refused",
        "tokens    812 in (768 cached), 3 out",
        "cost      $0.00021",
        "time      2 s, 0.5 rows/s, latency p50 500 ms, p99 500 ms",
        "results   r.jsonl",
    ]
    running = text(report(tally, JobStanding("j", "i", "running", "", None, 5, 4, "r", "e", reserved_usd=Decimal(1))))
    assert "reserved    $1.00 (worst case of what is in flight)" in running
    assert "exit code" not in running
    assert "resume" not in running


# ---------------------------------------------------------------- markdown


def outside_code(markdown_text):
    """Returns what is left when code spans are taken out, as CommonMark finds them (a run closes with its like)."""
    left = []
    for line in markdown_text.splitlines():
        rest = line
        kept = ""
        while fence := re.search("`+", rest):
            close = re.search(f"(?<!`){fence[0]}(?!`)", rest[fence.end() :])
            assert close, f"an open code span: {line!r}"
            kept += rest[: fence.start()] + "CODE"
            rest = rest[fence.end() + close.end() :]
        left.append(kept + rest)
    return left


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_text_is_inert_in_markdown(evil):
    shown = markdown(hostile_report(evil)[0])
    ours = set(outside_code(markdown(benign()[0])))
    for line in outside_code(shown):
        assert not set(line) & set("<>[]!\\@\x1b"), line
        assert "http" not in line
        cells = line.count("|")
        if cells:
            assert cells in {template.count("|") for template in ours}
    assert shown.count("\n#") == markdown(benign()[0]).count("\n#")


@UNHURRIED
@given(st.text(st.sampled_from("`|\\ a*<[\n"), max_size=30))
def test_no_mix_of_ticks_and_bars_breaks_out_of_markdown(evil):
    lines = outside_code(markdown(hostile_report(evil)[0]))
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert set(tables) <= {3, 4, 5, 6, 7, 8}
    assert not any(set(line) & set("<[\\*") for line in lines)


# ---------------------------------------------------------------- html


class Page(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_data(self, data):
        self.text += data


ALLOWED_ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "viewbox", "role", "aria-label"),
    *("preserveaspectratio", "x", "y", "x1", "x2", "y1", "y2", "width", "height", "points"),
}


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_text_is_inert_in_html(evil):
    page = Page(html(hostile_report(evil)[0]))
    ours = Page(html(benign()[0]))
    assert set(page.tags) <= set(ours.tags)
    assert not {"script", "img", "a", "link", "iframe", "form", "object"} & set(page.tags)
    assert {name for _, name, _ in page.attributes} <= ALLOWED_ATTRIBUTES
    assert page.tags.count("style") == page.tags.count("title") - ours.tags.count("title") + 1
    if evil.strip() and evil.isprintable() and len(evil) < 60:
        assert evil in page.text


def test_the_page_loads_nothing_and_its_policy_allows_its_own_style_by_hash_alone():
    page = html(benign()[0])
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert " style=" not in page
    policy = next(value for tag, name, value in Page(page).attributes if (tag, name) == ("meta", "content"))
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_every_renderer_gives_the_same_bytes_twice():
    for render in (text, markdown, html):
        assert render(benign()[0]) == render(benign()[0])


# ---------------------------------------------------------------- words


@UNHURRIED
@given(st.decimals(Decimal("1e-30"), Decimal("1e9"), allow_nan=False))
def test_money_that_is_not_nothing_is_never_shown_as_nothing(usd):
    shown = Decimal(money(usd).removeprefix("$").replace(",", ""))
    assert shown == pytest.approx(usd, rel=Decimal("0.01"))


def test_money_reads_as_people_write_it():
    values = [Decimal(0), Decimal("0.1"), Decimal("1234567.5"), Decimal("0.00021"), Decimal("0.0000000123456")]
    assert [money(value) for value in values] == ["$0.00", "$0.10", "$1,234,567.50", "$0.00021", "$0.00000001235"]


def test_durations_read_as_people_write_them():
    values = [None, 0.0, 0.0004, 0.84, 4.2, 99.94, 200.0, 7500.0]
    shown = ["–", "0 s", "0.4 ms", "840 ms", "4.2 s", "99.9 s", "3 min 20 s", "2 h 5 min"]
    assert [seconds(value) for value in values] == shown
