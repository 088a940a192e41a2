"""Rows in, as a user sees it: every shape, every bad line, bytes and digits as they were, input pinned."""

from __future__ import annotations

import gzip
import json
import re

import pytest
import zstandard

from tests.faults.server import Reply
from tests.support import Shell, prompts, wait_until

SAY = {"role": "user", "content": "hi"}


def bodies(server) -> list[bytes]:
    return [request.body for request in server.requests]


def numbers_in(err: str) -> set[int]:
    return {int(found) for found in re.findall(r"line (\d+)", err)}


def test_every_openai_row_shape_is_asked_and_answered_under_its_own_id(shell: Shell, server):
    rows = [
        {
            "custom_id": "batch",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "own", "messages": [{"role": "user", "content": "one"}], "metadata": {"k": "sent"}},
        },
        {"custom_id": "no-method", "url": "/v1/chat/completions", "body": {"model": "own", "messages": [SAY]}},
        {"id": "body", "messages": [{"role": "user", "content": "two"}], "metadata": {"queue": "eu"}},
        {"key": "prompt", "prompt": "three", "model": "own", "system": "be brief", "max_tokens": 7, "color": "red"},
        {"id": 17, "prompt": "four"},
        "five",
        {"prompt": "six"},
    ]
    shell.write("in.jsonl", [json.dumps(row) for row in rows])
    ran = shell.submit(server, "--concurrency", "1").told(0)
    assert ran.rows == {"total": 7, "succeeded": 7, "failed": 0, "pending": 0, "in_doubt": 0}
    found = shell.results()
    assert [row["custom_id"] for row in found] == ["batch", "no-method", "body", "prompt", "17", "line-6", "line-7"]
    assert [row["line"] for row in found] == list(range(1, 8))
    assert [row["output"] for row in found] == [
        f"echo:{t}" for t in ("one", "hi", "two", "three", "four", "five", "six")
    ]
    assert found[2]["metadata"] == {"queue": "eu"}
    assert found[3]["metadata"] == {"color": "red"}
    sent = {request.text: request.json for request in server.requests}
    own = {text: body["model"] for text, body in sent.items()}
    assert own == dict.fromkeys(["one", "hi", "three"], "own") | dict.fromkeys(["two", "four", "five", "six"], "m")
    assert sent["one"]["metadata"] == {"k": "sent"}
    assert not any("metadata" in body or "color" in body for text, body in sent.items() if text != "one")
    assert [turn["role"] for turn in sent["three"]["messages"]] == ["system", "user"]
    assert sent["three"].get("max_tokens", sent["three"].get("max_completion_tokens")) == 7
    assert {request.path for request in server.requests} == {"/v1/chat/completions"}


def test_a_batch_lines_body_travels_as_the_very_bytes_it_came_in(shell: Shell, server):
    odd = [
        '{"model": "own",  "messages":[ {"role":"user","content":"\\u00e9\\/é"} ], "seed": 123456789012345678901}',
        '{"messages":[{"role":"user","content":"a"}],"model":"own","temperature":1.0,"x":1e2,"y":0.1000000000000000055511151231257827,"z":-0}',
        '{"model":"own","messages":[{"content":"<|endoftext|>\\t","role":"user"}],"top_p":1E-7,"n":1 }',
        '{"model":"own","messages":[{"role":"user","content":"b"}],"big":' + "7" * 300 + "}",
    ]
    lines = [f'{{"custom_id": "c{n}" ,"url":"/v1/chat/completions", "body": {body} }}' for n, body in enumerate(odd)]
    shell.write("in.jsonl", lines)
    shell.submit(server, "--concurrency", "1").told(0)
    assert bodies(server) == [body.encode() for body in odd]


def test_numbers_of_simple_rows_reach_the_server_digit_for_digit(shell: Shell, server):
    digits = ["123456789012345678901234567890", "1.0", "0.10000000000000000555", "1e2", "-0.0", "18446744073709551617"]
    lines = [
        f'{{"messages":[{{"role":"user","content":"p"}}],"seed":{number},"id":{n}}}' for n, number in enumerate(digits)
    ]
    lines += [f'{{"prompt":"p","temperature":{number},"id":"t{n}"}}' for n, number in enumerate(digits)]
    shell.write("in.jsonl", lines)
    shell.submit(server, "--concurrency", "1", "--param", 'logit_bias={"5": 1.50}').told(0)
    sent = bodies(server)
    found = [re.search(rb'"(?:seed|temperature)": ?([^,}]+)', body)[1].decode() for body in sent]
    assert found == digits * 2
    assert all(b"1.50" in body for body in sent)


def test_lines_end_at_newlines_only_and_keep_their_physical_numbers(shell: Shell, server):
    inside = "a\u2028b\u2029c\u0085d\x7fe"
    data = b"\xef\xbb\xbf" + json.dumps({"prompt": "first"}).encode() + b"\r\n\r\n   \n"
    data += json.dumps({"prompt": inside}, ensure_ascii=False).encode() + b"\n"
    data += b'{"prompt":\r"lone cr"}\n\n'
    data += b'{"prompt":"last"}'
    shell.write("in.jsonl", data)
    for locale in ("C", "POSIX"):
        job = f"job-{locale}"
        shell.submit(server, "--job", job, env={"LC_ALL": locale, "PYTHONUTF8": "0"}).told(0)
        found = shell.results(job)
        assert [row["line"] for row in found] == [1, 4, 5, 7]
        assert [row["custom_id"] for row in found] == ["line-1", "line-4", "line-5", "line-7"]
        assert [row["output"] for row in found] == ["echo:first", f"echo:{inside}", "echo:lone cr", "echo:last"]


BAD = {
    "broken": b'{"prompt": "x"',
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "huge": b'{"prompt": "x", "temperature": 1e999}',
    "surrogate": b'{"prompt": "\\ud800"}',
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "raw surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "number": b"17",
    "null": b"null",
    "array": b"[1]",
    "host": b'{"custom_id":"h","method":"POST","url":"https://evil.example/v1/chat/completions","body":{"messages":[]}}',
    "scheme-relative": b'{"custom_id":"i","url":"//evil.example/v1/chat/completions","body":{"messages":[]}}',
    "unknown url": b'{"custom_id":"j","method":"POST","url":"/v1/files","body":{"messages":[]}}',
    "traversal": b'{"custom_id":"k","method":"POST","url":"/v1/../admin","body":{"messages":[]}}',
    "get": b'{"custom_id":"l","method":"GET","url":"/v1/chat/completions","body":{"messages":[]}}',
    "no body": b'{"custom_id":"m","method":"POST","url":"/v1/chat/completions"}',
    "body no object": b'{"custom_id":"n","method":"POST","url":"/v1/chat/completions","body":"x"}',
    "unknown": b'{"question": "x"}',
    "empty": b"{}",
}


def test_every_bad_line_is_named_with_a_reason_before_anything_is_sent(shell: Shell, server):
    lines = [b'{"id":"good","prompt":"good"}', *BAD.values()]
    shell.write("in.jsonl", lines)
    ran = shell.submit(server, "--job", "job").told(65)
    missed = [name for n, name in enumerate(BAD, 2) if n not in numbers_in(ran.err)]
    assert missed == []
    assert 1 not in numbers_in(ran.err)
    assert str(len(BAD)) in ran.err
    checked = shell.run("check", "in.jsonl", "--base-url", server.url, "--model", "m").told(65)
    assert numbers_in(checked.err + checked.out.decode()) >= set(range(2, len(lines) + 1))
    assert server.requests == []
    assert server.connections == 0


def test_the_first_twenty_of_many_bad_lines_are_shown_and_all_are_counted(shell: Shell, server):
    shell.write("in.jsonl", [b"{", *[b'{"prompt":"x"}', b"oops"] * 60])
    ran = shell.submit(server).told(65)
    assert sorted(numbers_in(ran.err)) == [1, *range(3, 41, 2)]
    assert "61" in ran.err
    assert server.requests == []


def test_skip_invalid_makes_bad_lines_failed_rows_and_runs_the_rest(shell: Shell, server):
    lines = [b'{"id":"a","prompt":"a"}', *BAD.values(), b'{"id":"z","prompt":"z"}']
    shell.write("in.jsonl", lines)
    ran = shell.submit(server, "--skip-invalid").told(1)
    bad = len(BAD)
    assert ran.rows == {"total": bad + 2, "succeeded": 2, "failed": bad, "pending": 0, "in_doubt": 0}
    assert sorted(server.seen) == ["a", "z"]
    assert [row["custom_id"] for row in shell.results()] == ["a", "z"]
    failed = shell.errors()
    assert [row["line"] for row in failed] == list(range(2, bad + 2))
    assert {row["status"] for row in failed} == {"failed"}
    assert all(row["error"]["message"] and row["attempts"] == 0 for row in failed)
    ids = [row["custom_id"] for row in shell.results() + failed]
    assert len(set(ids)) == len(ids)


def test_duplicate_ids_are_named_with_both_lines(shell: Shell, server):
    rows = [
        {"id": "a", "prompt": "1"},
        {"id": 1, "prompt": "2"},
        {"id": "b", "prompt": "3"},
        {"custom_id": "1", "prompt": "4"},
        {"key": "b", "prompt": "5"},
        {"id": "line-7", "prompt": "6"},
        {"prompt": "7"},
    ]
    shell.write("in.jsonl", rows)
    ran = shell.submit(server).told(65)
    for first, second in ((2, 4), (3, 5), (6, 7)):
        told = [line for line in ran.err.splitlines() if re.search(rf"\b{second}\b", line)]
        assert any(re.search(rf"\b{first}\b", line) for line in told), (first, second, ran.err)
    assert server.requests == []


def test_odd_ids_come_back_as_they_were_and_are_never_paths(shell: Shell, server):
    ids = ["x" * 300, "../../escape", "/etc/passwd", "a b", "😀", "a\u202eb", "-", "CON", "line-1", "é\u0301"]
    shell.write("in.jsonl", [{"id": name, "prompt": f"p{n}"} for n, name in enumerate(ids)])
    before = {path.name for path in shell.root.parent.iterdir()}
    shell.submit(server).told(0)
    assert [row["custom_id"] for row in shell.results()] == ids
    assert {path.name for path in shell.root.iterdir()} == {"in.jsonl", "in.batchrun"}
    assert {path.name for path in shell.root.parent.iterdir()} == before
    assert all(path.is_file() for path in (shell.root / "in.batchrun").iterdir())


def test_gzip_zstandard_and_stdin_give_the_same_results_and_can_be_resumed(shell: Shell, server):
    data = b"".join(json.dumps(row).encode() + b"\n" for row in prompts(6))
    shell.write("g.jsonl.gz", gzip.compress(data[:40]) + gzip.compress(data[40:]))
    shell.write("z.jsonl.zst", zstandard.ZstdCompressor().compress(data))
    shell.submit(server, "--limit", "2", "--job", "g", source="g.jsonl.gz").told(0)
    shell.submit(server, "--limit", "2", source="z.jsonl.zst", env={"BATCHRUN_JOB": "z"}).told(0)
    shell.submit(server, "--limit", "2", "--job", "s", source="-", data=data).told(0)
    assert len(server.requests) == 6
    shell.run("resume", "g", "--limit", "6").told(0)
    shell.run("resume", "z", "--limit", "6").told(0)
    shell.run("resume", "s", "--limit", "6").told(0)
    assert server.seen == {f"p{n}": 3 for n in range(1, 7)}
    files = [(shell.root / job / "results.jsonl").read_bytes() for job in "gzs"]
    assert [re.sub(rb'"latency_s":[^,]+|req_\d+', b"", file) for file in files] == [
        re.sub(rb'"latency_s":[^,]+|req_\d+', b"", files[0])
    ] * 3
    assert [row["line"] for row in shell.results("s")] == [1, 2, 3, 4, 5, 6]


def test_stdin_needs_a_job_and_broken_archives_are_refused(shell: Shell, server):
    assert "--job" in shell.submit(server, source="-", data=b'"x"\n').told(2).err
    whole = gzip.compress(b"".join(b'{"id":"r%d","prompt":"p"}\n' % n for n in range(5000)))
    shell.write("cut.jsonl.gz", whole[: len(whole) // 2])
    ran = shell.submit(server, source="cut.jsonl.gz").told(65)
    assert "gz" in ran.err.lower()
    shell.write("not.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(range(200)))
    shell.submit(server, source="not.jsonl.zst").told(65)
    assert server.requests == []


def test_a_gzip_bomb_is_contained(shell: Shell, server):
    shell.write("bomb.jsonl.gz", gzip.compress(b'{"prompt":"' + b"a" * 300_000_000 + b'"}\n', 1))
    ran = shell.submit(server, source="bomb.jsonl.gz", timeout_s=60).told(65)
    assert numbers_in(ran.err) == {1} or "large" in ran.err or "size" in ran.err
    assert server.requests == []


def test_an_input_without_rows_is_complete_at_once_with_a_notice(shell: Shell, server):
    for name, data in (("in.jsonl", b""), ("blank.jsonl", b"\xef\xbb\xbf\n\r\n  \n")):
        ran = shell.submit(server, source=name if shell.write(name, data) else "").told(0)
        assert ran.rows["total"] == 0
        assert ran.summary["state"] == "complete"
        assert "no rows" in ran.err.lower()
    ran = shell.submit(server, source="missing.jsonl")
    assert ran.code in {2, 65}
    assert "missing.jsonl" in ran.err


def test_a_template_makes_prompts_of_any_object_and_is_strict(shell: Shell, server):
    rows = [{"id": "t1", "text": "Où <b>est</b>?", "queue": "eu"}, {"text": "two", "id": "t2"}]
    shell.write("in.jsonl", rows)
    shell.write("ask.txt", b"Classify: {{ text }}\n{% if queue is defined %}[{{ queue }}]{% endif %}")
    shell.submit(server, "--template", "@ask.txt", "--system", "S", "--concurrency", "1").told(0)
    assert [request.text.rstrip("\n") for request in server.requests] == [
        "Classify: Où <b>est</b>?\n[eu]",
        "Classify: two",
    ]
    assert server.requests[0].json["messages"][0] == {"role": "system", "content": "S"}
    found = shell.results()
    assert [row["custom_id"] for row in found] == ["t1", "t2"]
    assert found[0]["metadata"]["queue"] == "eu"
    ran = shell.submit(server, "--template", "{{ text }} {{ queue }}", "--job", "strict").told(65)
    assert numbers_in(ran.err) == {2}
    assert "queue" in ran.err
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "template",
    ["{{ text", "{{ cycler.__init__.__globals__.os.environ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"],
)
def test_a_template_that_is_broken_or_reaches_out_sends_nothing(shell: Shell, server, template):
    shell.write("in.jsonl", [{"id": "a", "text": "x"}])
    ran = shell.submit(server, "--template", template)
    assert ran.code in {2, 65}
    assert "Traceback" not in ran.err
    assert server.requests == []


def test_limit_makes_the_first_rows_the_job_for_now(shell: Shell, server):
    shell.write("in.jsonl", prompts(10))
    ran = shell.submit(server, "--limit", "4").told(0)
    assert sorted(server.seen) == ["p1", "p2", "p3", "p4"]
    assert ran.rows["succeeded"] == 4
    shell.run("resume").told(0)
    assert len(server.requests) == 4
    ran = shell.run("resume", "--limit", "10", "--json").told(0)
    assert ran.rows == {"total": 10, "succeeded": 10, "failed": 0, "pending": 0, "in_doubt": 0}
    assert server.seen == {f"p{n}": 1 for n in range(1, 11)}
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(1, 11)]


def test_defaults_apply_and_a_rows_own_values_win(shell: Shell, server):
    own = {
        "id": "own",
        "prompt": "a",
        "model": "mine",
        "temperature": 0.5,
        "max_tokens": 5,
        "top_p": 0.1,
        "system": "O",
    }
    shell.write("in.jsonl", [{"id": "plain", "prompt": "b"}, own])
    flags = [
        "--max-tokens",
        "99",
        "--temperature",
        "0.25",
        "--system",
        "D",
        "--param",
        "top_p=0.9",
        "--param",
        "stop=[]",
    ]
    shell.submit(server, "--concurrency", "1", *flags).told(0)
    plain, mine = (request.json for request in sorted(server.requests, key=lambda request: request.text, reverse=True))
    limit = "max_tokens" if "max_tokens" in plain else "max_completion_tokens"
    assert (plain["model"], plain["temperature"], plain[limit], plain["top_p"], plain["stop"]) == (
        "m",
        0.25,
        99,
        0.9,
        [],
    )
    assert (mine["model"], mine["temperature"], mine[limit], mine["top_p"], mine["stop"]) == ("mine", 0.5, 5, 0.1, [])
    assert [body["messages"][0]["content"] for body in (plain, mine)] == ["D", "O"]


def test_larger_priorities_are_asked_first(shell: Shell, server):
    ranks = [0, 5, -3, 9, 5, 0]
    shell.write("in.jsonl", [{"id": f"r{n}", "prompt": f"p{n}", "priority": rank} for n, rank in enumerate(ranks)])
    shell.submit(server, "--concurrency", "1").told(0)
    assert [request.text for request in server.requests] == ["p3", "p1", "p4", "p0", "p5", "p2"]
    assert b"priority" not in b"".join(bodies(server))
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(6)]


def test_appended_rows_are_picked_up_and_the_others_are_not_asked_again(shell: Shell, server):
    path = shell.write("in.jsonl", prompts(5))
    shell.submit(server).told(0)
    shell.write("in.jsonl", path.read_bytes() + b'{"id":"r6","prompt":"p6"}\n"bare"')
    ran = shell.submit(server).told(0)
    assert ran.rows["total"] == ran.rows["succeeded"] == 7
    shell.write("in.jsonl", path.read_bytes() + b'\n{"id":"r8","prompt":"p8"}')
    ran = shell.run("resume", "--json").told(0)
    assert ran.rows["total"] == 8
    assert server.seen == {**{f"p{n}": 1 for n in (1, 2, 3, 4, 5, 6, 8)}, "bare": 1}
    assert [row["custom_id"] for row in shell.results()] == ["r1", "r2", "r3", "r4", "r5", "r6", "line-7", "r8"]


def test_an_appended_duplicate_or_bad_line_is_refused_with_its_number(shell: Shell, server):
    path = shell.write("in.jsonl", prompts(3))
    before = path.read_bytes()
    shell.submit(server).told(0)
    shell.write("in.jsonl", before + b'{"id":"r2","prompt":"again"}\n')
    assert 4 in numbers_in(shell.submit(server).told(65).err)
    shell.write("in.jsonl", before + b"oops\n")
    assert numbers_in(shell.run("resume").told(65).err) == {4}
    shell.write("in.jsonl", before)
    shell.submit(server).told(0)
    assert len(server.requests) == 3
    assert [row["custom_id"] for row in shell.results()] == ["r1", "r2", "r3"]


def test_a_changed_or_truncated_input_is_refused_with_the_line_that_differs(shell: Shell, server):
    path = shell.write("in.jsonl", prompts(200))
    before = path.read_bytes()
    shell.submit(server, "--limit", "150").told(0)
    assert len(server.requests) == 150
    changed = before.replace(b'"p137"', b'"P137"')
    cases = {
        "changed": (changed, 137),
        "inserted": (before.replace(b'{"id": "r40"', b'"new"\n{"id": "r40"'), 40),
        "last line changed": (before[:-3] + b"x" + before[-3:], 200),
        "truncated": (b"".join(before.splitlines(keepends=True)[:120]), 121),
        "emptied": (b"", 1),
    }
    for name, (data, line) in cases.items():
        path.write_bytes(data)
        for ran in (shell.submit(server), shell.run("resume", "in.jsonl", "--limit", "200")):
            assert ran.code == 65, name
            assert line in numbers_in(ran.err), (name, ran.err)
    assert len(server.requests) == 150
    assert len(shell.results()) == 150
    path.write_bytes(before)
    ran = shell.run("resume", "--limit", "200", "--json").told(0)
    assert ran.rows["succeeded"] == 200
    assert max(server.seen.values()) == 1


def test_monstrous_lines_are_contained_each_to_its_row(shell: Shell, server):
    deep = b'{"id":"deep","messages":[{"role":"user","content":"d"}],"x":' + b"[" * 900 + b"]" * 900 + b"}"
    lines = [
        b'{"id":"long","prompt":"' + b"word " * 4_000_000 + b'"}',
        b'{"id":"same","prompt":"' + b"a" * 1_000_000 + b'"}',
        b'{"id":"special","prompt":"<|endoftext|><|im_start|>"}',
        deep,
        b'{"id":"deeper","prompt":"x","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"id":"digits","prompt":"x","seed":' + b"7" * 5000 + b"}",
        b'{"id":"plain","prompt":"plain"}',
    ]
    shell.write("in.jsonl", lines)
    ran = shell.submit(server, "--skip-invalid", timeout_s=60)
    assert ran.code == 1, ran.err
    assert ran.rows["total"] == 7
    assert ran.rows["pending"] == 0
    good = {row["custom_id"]: row["output"] for row in shell.results()}
    assert good["plain"] == "echo:plain"
    assert good["special"] == "echo:<|endoftext|><|im_start|>"
    assert good["same"] == "echo:" + "a" * 1_000_000
    assert 5 in {row["line"] for row in shell.errors()}


def test_several_models_in_one_file_are_fine(shell: Shell, server):
    shell.write("in.jsonl", [{"id": f"r{n}", "prompt": "x", "model": f"m{n % 3}"} for n in range(9)])
    shell.submit(server).told(0)
    assert sorted(request.json["model"] for request in server.requests) == sorted([f"m{n % 3}" for n in range(9)])


def test_a_row_without_any_model_is_named_before_anything_is_sent(shell: Shell, server):
    shell.write("in.jsonl", [{"id": "a", "prompt": "x", "model": "m"}, {"id": "b", "prompt": "y"}])
    ran = shell.run("submit", "in.jsonl", "--base-url", server.url)
    assert ran.code in {2, 65, 78}
    assert "--model" in ran.err
    assert server.requests == []


def test_check_and_estimate_send_nothing_and_make_no_job(shell: Shell, server):
    shell.write("in.jsonl", prompts(3))
    server_flags = ["--base-url", server.url, "--model", "m"]
    shell.run("check", "in.jsonl", *server_flags).told(0)
    ran = shell.run("estimate", "in.jsonl", *server_flags, "--max-tokens", "10", "--json").told(0)
    assert ran.summary
    assert server.connections == 0
    assert [path.name for path in shell.root.iterdir()] == ["in.jsonl"]


def test_a_straggler_never_holds_the_next_batch_back(shell: Shell, server):
    shell.write("in.jsonl", prompts(60))
    server.script(lambda request, n: Reply(hold=True) if request.text == "p1" else Reply(delay_s=0.03))
    process = shell.start(*shell.submission(server, "--concurrency", "4", "--batch-rows", "5"))
    wait_until(lambda: len(server.requests) == 60)
    server.release()
    shell.end(process).told(0)
    assert server.max_in_flight == 4
    assert [row["custom_id"] for row in shell.results()] == [f"r{n}" for n in range(1, 61)]
