"""Keys of every family, under every fault, with a server that says them back: nothing that is left or told has one."""

from __future__ import annotations

import base64
import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.faults.server import FaultServer, Reply, Request
from tests.support import KEYS, Shell, chat_reply, keys_in

FAMILIES = {
    "openai": (["--provider", "openai", "--model", "m"], {"OPENAI_API_KEY": KEYS["openai"]}),
    "anthropic": (
        ["--provider", "anthropic", "--model", "claude-sonnet-4-5", "--max-tokens", "5"],
        {"ANTHROPIC_API_KEY": KEYS["anthropic"]},
    ),
    "gemini": (["--provider", "gemini", "--model", "gemini-2.5-flash"], {"GEMINI_API_KEY": KEYS["gemini"]}),
    "file": (["--model", "m", "--api-key-file", "key.secret"], {"OPENAI_API_KEY": KEYS["openai"]}),
}


def echo(request: Request) -> str:
    """Returns the key that a request carries, as its server sees it."""
    headers = request.headers
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or headers["authorization"].removeprefix("Bearer ")


def spelled(key: str) -> str:
    return "".join(f"\\u{ord(letter):04X}" for letter in key)


def fault(request: Request, n: int) -> Reply | None:  # noqa: PLR0911 - a return for each fault
    """Plays the fault that the row's text names; the second time the row is answered."""
    key = echo(request)
    shaped = {
        "error": {
            "message": f"key {key}, see https://elsewhere.invalid/?key={quote(key, safe='')}",
            "type": key,
            "code": key,
            "status": key,
            "details": [{key: key}],
        }
    }
    headers = {"x-request-id": key, "request-id": key, "x-echo": key, "retry-after": key}
    match request.text.split()[0]:
        case "400":
            return Reply(400, shaped, headers)
        case "500" if request.repeat == 1:
            return Reply(500, shaped, headers)
        case "429" if request.repeat == 1:
            return Reply(429, shaped, headers)
        case "html" if request.repeat == 1:
            return Reply(502, f"<html>{key}</html>", {"content-type": "text/html", **headers})
        case "garbled" if request.repeat == 1:
            return Reply(200, f"{key} {spelled(key)}", headers)
        case "cut" if request.repeat == 1:
            return Reply(200, json.dumps(shaped).encode(), headers, length=5_000, end="close")
        case "reset" if request.repeat == 1:
            return Reply(raw=b"", end="reset")
        case "spelled":
            return Reply(422, b'{"error":{"message":"%b"}}' % spelled(key).encode(), headers)
        case "answer":
            body = chat_reply(f"you said {key}", finish=key, model=key, usage={key: key, "prompt_tokens": 1}).body
            return Reply(200, json.dumps(body).replace("fine", key), headers)
        case "hang":
            return Reply(hold=True)
    return None


FAULTS = ("400", "500", "429", "html", "garbled", "cut", "reset", "spelled", "answer", "fine")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_of_any_family_is_left_nowhere_whatever_goes_wrong(shell: Shell, server: FaultServer, family):
    args, env = FAMILIES[family]
    shell.write("key.secret", KEYS["file"].encode()).chmod(0o600)
    rows = [{"id": name, "prompt": name} for name in (*FAULTS, "hang 1", "hang 2")]
    shell.write("in.jsonl", rows)
    shell.env = {"PATH": shell.env["PATH"]} | env
    server.script(fault)
    command = [
        "submit",
        "in.jsonl",
        "--base-url",
        server.url,
        *args,
        "--max-attempts",
        "3",
        "-v",
        "--log-format",
        "json",
    ]
    process = shell.start(*command, env={"PYTHONASYNCIODEBUG": "1", "PYTHONDEVMODE": "1"})
    server.wait_for_requests(len(rows))
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)  # what is written at that moment is looked at too
    killed = shell.end(process)
    found = {path.name: keys_in(path.read_bytes()) for path in Path(shell.root / "in.batchrun").iterdir()}
    assert set(map(str, found.values())) == {"[]"}, found
    assert {echo(request) for request in server.requests} == {KEYS[family]}
    server.release()
    server.script(lambda request, n: replace(fault(request, n), hold=False) if fault(request, n) else None)
    ran = shell.run("resume", *args[-2:] if family == "file" else [], "--json", "--log-format", "json", "-v")
    assert ran.code == 1, ran.err
    assert ran.rows["pending"] == 0
    shell.run("report").told(0)
    shell.run("results", "--all", "-o", "out.jsonl").told(0)
    everything = b"".join(shell.said) + b"".join(p.read_bytes() for p in shell.root.rglob("*.jsonl"))
    assert keys_in(everything) == []
    assert base64.b64encode(KEYS[family].encode())[:-4] not in everything
    assert b"[redacted]" in everything
    for line in (killed.err + ran.err).splitlines():
        assert isinstance(json.loads(line), dict)


@pytest.mark.parametrize("family", ["anthropic", "gemini"])
@pytest.mark.parametrize("status", [401, 402, 302])
def test_a_fatal_reply_that_says_a_key_back_is_told_without_it(shell: Shell, server: FaultServer, family, status):
    args, env = FAMILIES[family]
    shell.write("in.jsonl", [{"id": "a", "prompt": "p"}])
    shell.env = {"PATH": shell.env["PATH"]} | env
    server.script(
        lambda request, n: Reply(
            status, {"error": {"message": echo(request)}}, {"location": f"https://elsewhere.invalid/{echo(request)}"}
        )
    )
    ran = shell.run("submit", "in.jsonl", "--base-url", server.url, *args)
    assert ran.code in {77, 78}
    assert "[redacted]" in ran.err


def test_a_key_of_another_provider_is_sent_to_nobody(shell: Shell, server: FaultServer):
    shell.write("in.jsonl", [{"id": "a", "prompt": "p"}])
    shell.env |= {"ANTHROPIC_API_KEY": KEYS["anthropic"], "GEMINI_API_KEY": KEYS["gemini"]}
    shell.submit(server).told(0)
    assert keys_in(repr(server.requests[0].headers).encode()) == ["openai"]
    args = ["--provider", "gemini", "--model", "gemini-2.5-flash", "--base-url", server.url]
    shell.run("submit", "in.jsonl", "--job", "g", *args).told(0)
    assert keys_in(repr(server.requests[1].headers).encode()) == ["gemini"]


def test_a_traceback_shows_no_values(shell: Shell, server: FaultServer):
    """Breaks batchrun itself, with the key in reach of every frame."""
    shell.write("in.jsonl", [{"id": "a", "prompt": "a very private prompt"}])
    broken = shell.root / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "from batchrun.providers.openai import OpenAI\n"
        "def encode(self, rows):\n"
        "    secret = [bytes(value) for wire in vars(self).values() for _, value in getattr(wire, 'headers', ())]\n"
        "    raise RuntimeError('broken on purpose')\n"
        "OpenAI.encode = encode\n"
    )
    ran = shell.submit(server, "--verbose", env={"PYTHONPATH": str(broken)})
    assert ran.code == 70, ran.err
    assert "broken on purpose" in ran.err
    assert "Traceback" in ran.err
    assert "very private prompt" not in ran.err
    assert server.requests == []
