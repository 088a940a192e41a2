"""Keys stay secret, other hosts are never spoken to, and hostile text is inert wherever it is shown."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.faults.server import FaultServer, Reply, error
from tests.support import KEY, Shell, chat_reply, parse, prompts
from tests.test_contract_terminal import on_a_terminal

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b31m</td><script>alert(1)</script><img src=x onerror=alert(2)>"
    "[bold red]x[/] [link=http://evil.example]y[/link] | a | `b` ![i](http://evil.example/p.png)"
    "\u202etxt.exe\u2066 =cmd|' /C calc'!A0\r\nfake: line\x00"
)


def test_a_key_that_a_server_echoes_is_redacted_wherever_it_would_be_written(shell: Shell, server: FaultServer):
    shell.write(
        "in.jsonl", [{"id": name, "prompt": name} for name in ("answer", "400", "header", "usage", "html", "500")]
    )

    def script(request, n):
        key = request.headers["authorization"]
        match request.text:
            case "answer":
                return chat_reply(f"your header was {key}", finish=KEY, model=KEY)
            case "400":
                return error(400, KEY, f"bad key {key}", KEY)
            case "header":
                return Reply(200, headers={"x-request-id": KEY, "x-echo": key})
            case "usage":
                return chat_reply("x", usage={"prompt_tokens": 1, "completion_tokens": 1, KEY: KEY})
            case "html":
                return Reply(422, f"<html>{key}</html>", {"content-type": "text/html"})
            case _:
                return Reply(500, f"oops {KEY}") if request.repeat == 1 else None

    server.script(script)
    shell.submit(server, "--max-attempts", "2", "--verbose").told(1)
    for command in (
        ["report"],
        ["report", "--format", "json"],
        ["report", "--format", "markdown"],
        ["results", "--all"],
    ):
        assert KEY.encode() not in shell.run(*command).told(0).out
    files = {path.name: path.read_bytes() for path in (shell.root / "in.batchrun").iterdir()}
    assert [name for name, data in files.items() if KEY.encode() in data] == []
    encoded = base64.b64encode(KEY.encode())[:-4]
    assert [name for name, data in files.items() if encoded in data] == []
    assert "[redacted]" in shell.results()[0]["output"]
    assert "[redacted]" in shell.errors()[0]["error"]["message"]
    assert len(shell.results()) == 4


@pytest.mark.parametrize(
    "reply",
    [
        error(401, "invalid_api_key", f"Incorrect API key: {KEY}"),
        error(429, "insufficient_quota", f"no credit on {KEY}"),
        Reply(302, b"", {"location": f"https://elsewhere.invalid/?key={KEY}"}),
    ],
    ids=["401", "quota", "redirect"],
)
def test_a_fatal_reply_that_echoes_the_key_shows_none(shell: Shell, server: FaultServer, reply):
    shell.write("in.jsonl", prompts(2))
    server.script(lambda request, n: reply)
    ran = shell.submit(server, "--verbose", "--log-format", "json")
    assert ran.code in {77, 78}
    assert KEY not in ran.err + ran.out.decode()
    assert KEY.encode() not in shell.run("status", "--json").told(0).out


def test_an_escaped_echo_of_a_key_is_redacted_too(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(1))
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    raw = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"' + escaped.encode() + b'"},'
    raw += b'"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
    server.script(lambda request, n: Reply(200, raw))
    shell.submit(server).told(0)
    (row,) = shell.results()
    assert KEY not in row["output"]
    assert KEY not in str(row)


def test_a_key_file_must_be_private_and_a_key_is_never_an_argument(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(1))
    path = shell.write("key.secret", b"sk-from-a-file\n")
    path.chmod(0o644)
    ran = shell.submit(server, "--api-key-file", "key.secret")
    assert ran.code in {2, 77, 78}
    assert "0600" in ran.err or "600" in ran.err
    assert "sk-from-a-file" not in ran.err
    assert server.requests == []
    path.chmod(0o600)
    shell.submit(server, "--api-key-file", "key.secret").told(0)
    shell.submit(server, "--api-key-env", "OTHER_KEY", "--job", "env", env={"OTHER_KEY": "sk-from-elsewhere"}).told(0)
    assert [request.headers["authorization"] for request in server.requests] == [
        "Bearer sk-from-a-file",
        "Bearer sk-from-elsewhere",
    ]
    shell.submit(server, "--api-key", KEY[:8], "--job", "arg").told(2)
    for job in ("in.batchrun", "env"):
        for file in (shell.root / job).iterdir():
            assert b"sk-from-" not in file.read_bytes()


def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(1))
    for key in ("sk-two\nlines", "sk-nön-äscii"):
        ran = shell.submit(server, "--provider", "openai", "--job", "j", env={"OPENAI_API_KEY": key})
        assert ran.code in {2, 77, 78}, repr(key)
        assert "Traceback" not in ran.err
        assert "lines" not in ran.err
        assert "äscii" not in ran.err
    assert server.requests == []


def test_the_key_goes_to_no_proxy_and_no_other_host(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(3))
    with FaultServer() as proxy:
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
        shell.submit(server, env=dict.fromkeys(names, proxy.url) | {"NO_PROXY": ""}).told(0)
        assert proxy.connections == 0
    assert len(server.requests) == 3
    assert {request.headers["host"] for request in server.requests} == {server.url.removeprefix("http://")}


def test_a_netrc_is_not_read(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(1))
    shell.write(".netrc", b"machine 127.0.0.1 login me password hunter2\n")
    shell.submit(server, env={"HOME": str(shell.root), "NETRC": str(shell.root / ".netrc"), "OPENAI_API_KEY": ""}).told(
        0
    )
    assert "authorization" not in server.requests[0].headers


def test_a_base_url_works_with_and_without_v1(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(1))
    for job, suffix in (("a", ""), ("b", "/"), ("c", "/v1"), ("d", "/v1/")):
        shell.run("submit", "in.jsonl", "--job", job, "--base-url", server.url + suffix, "--model", "m").told(0)
    assert [request.path for request in server.requests] == ["/v1/chat/completions"] * 4


def hostile_job(shell: Shell, server: FaultServer) -> None:
    rows = [{"id": f"{HOSTILE[:-1].replace(chr(27), '').replace(chr(7), '')}{n}", "prompt": f"p{n}"} for n in range(4)]
    rows = [row | {"id": re.sub(r"[\x00-\x1f\x7f-\x9f]", "", row["id"])} for row in rows]
    shell.write("in.jsonl", rows)

    def script(request, n):
        match request.text:
            case "p0":
                usage = {"prompt_tokens": 1, "completion_tokens": 1}
                return chat_reply(HOSTILE, finish=HOSTILE, model=HOSTILE, usage=usage)
            case "p1":
                return error(400, HOSTILE, HOSTILE, HOSTILE)
            case "p2":
                return Reply(422, HOSTILE.encode(), {"content-type": "text/html"})
            case _:
                return Reply(200, {"choices": [{"message": {"content": HOSTILE}}], "model": HOSTILE})

    server.script(script)


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def test_hostile_model_text_is_inert_in_terminal_and_reports(shell: Shell, server: FaultServer):
    hostile_job(shell, server)
    ran = shell.submit(server, "--verbose").told(1)
    assert CONTROL.findall(ran.err) == []
    assert CONTROL.findall(ran.out.decode()) == []
    for form in ("text", "markdown"):
        told = shell.run("report", "--format", form).told(0).out.decode()
        assert CONTROL.findall(told) == [], form
        assert "\nfake: line" not in told
        assert "alert(1)" in told or "script" not in told
    markdown = shell.run("report", "--format", "markdown").told(0).out.decode()
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    assert re.findall("<(?:script|img|a) ?[^>]*>", rendered) == []
    assert rendered.count("<table>") == markdown.count("\n| ---") + markdown.count("\n|---") + markdown.count("\n| :--")
    for page in (
        (shell.root / "in.batchrun/report.html").read_text(),
        shell.run("report", "--format", "html").out.decode(),
    ):
        assert page.lower().count("<script") <= page.lower().count("</script>")
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert "onerror=alert" not in page or "&lt;img" in page or "\\u003c" in page
        assert "http://evil.example" not in re.findall(r'(?:src|href)="([^"]*)', page)
        assert CONTROL.findall(page.replace("\r\n", "\n")) == []


def test_hostile_model_text_is_kept_whole_in_the_results(shell: Shell, server: FaultServer):
    hostile_job(shell, server)
    shell.submit(server).told(1)
    assert shell.results()[0]["output"] == HOSTILE
    data = (shell.root / "in.batchrun/results.jsonl").read_bytes()
    assert data.count(b"\n") == len(shell.results()) == 2
    assert b"\x1b" not in data


def test_results_on_a_terminal_are_inert_and_say_the_same(shell: Shell, server: FaultServer):
    hostile_job(shell, server)
    shell.submit(server).told(1)
    piped = shell.run("results", "--all").told(0).out
    code, shown = on_a_terminal(shell, ["results", "--all"])
    assert code == 0
    assert CONTROL.findall(shown.replace("\r\n", "\n")) == []
    assert [parse(line) for line in shown.splitlines()] == [parse(line) for line in piped.splitlines()]
    assert "\u202e".encode() in piped  # into a file or a pipe go the characters themselves


def test_a_job_directory_that_is_a_link_or_someone_elses_file_is_not_written_through(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", prompts(1))
    precious = shell.write("precious", b"mine")
    (shell.root / "job").mkdir()
    (shell.root / "job/results.jsonl").symlink_to(precious)
    (shell.root / "job/report.json").symlink_to(precious)
    ran = shell.submit(server, "--job", "job")
    assert ran.code in {0, 2, 74}
    assert precious.read_bytes() == b"mine"


def test_an_internal_error_shows_no_key_and_no_prompt(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [{"id": "a", "prompt": "a very private prompt"}])
    server.script(lambda request, n: Reply(500, "no"))
    job = Path(shell.root / "in.batchrun")
    job.mkdir()
    (job / "state.db").write_bytes(b"this is no database, and never was one" * 100)
    ran = shell.submit(server, "--verbose")
    assert ran.code not in {0, 1}
    assert KEY not in ran.err
    assert "very private prompt" not in ran.err
    assert server.requests == []
    assert (job / "state.db").read_bytes().startswith(b"this is no database")
