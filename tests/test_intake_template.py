from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.errors import BatchrunError, Exit
from batchrun.intake.shapes import Shaper, Shaping
from batchrun.records import BadRow, Line, Row


def shape(data, template, **shaping):
    data = data if isinstance(data, bytes) else orjson.dumps(data)
    return Shaper(Shaping(**{"model": "m", "template": template, **shaping})).shape(Line(2, 0, data))


def prompt_of(data, template):
    row = shape(data, template)
    assert isinstance(row, Row), row
    return orjson.loads(row.body)["messages"][0]["content"]


def test_fields_become_the_prompt_and_ride_along():
    row = shape({"id": 7, "question": "Why?", "queue": "eu", "top_p": 1, "max_tokens": 5}, "Q: {{ question }}\n")
    assert orjson.loads(row.body) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Q: Why?"}],
        "max_completion_tokens": 5,
    }
    assert orjson.loads(row.metadata) == {"question": "Why?", "queue": "eu", "top_p": 1}
    assert row.custom_id == "7"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_passes_through_a_template_unchanged(text):
    assert prompt_of({"text": text}, "{{ text }}") == text


def test_numbers_print_as_they_were_written():
    line = b'{"a":1.10,"b":1e5,"c":123456789012345678901234567890,"d":0.30}'
    assert prompt_of(line, "{{ a }} {{ b }} {{ c }} {{ a + d > 1.3 }}") == (
        "1.10 1e5 123456789012345678901234567890 True"
    )


@pytest.mark.parametrize("field", ["prompt", "input", "messages", "url", "body", "params", "request"])
def test_any_field_can_be_a_column(field):
    assert prompt_of({field: "x"}, "Say {{ " + field + " }}") == "Say x"


def test_a_batch_line_or_a_bare_string_needs_no_template():
    batch = shape({"url": "/v1/chat/completions", "body": {"messages": [{"role": "user"}]}}, "{{ text }}")
    assert orjson.loads(batch.body) == {"model": "m", "messages": [{"role": "user"}]}
    assert orjson.loads(shape("x", "{{ text }}").body)["messages"] == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ text }}", "lacks `text`, which the template needs"),
        ("{{ a.text }}", "lacks `text`, which the template needs"),
        ("{% if text %}{% endif %}", "lacks `text`, which the template needs"),
        ("{{ b / 0 }}", "the template fails: ZeroDivisionError: division by zero"),
        ("{{ 'x' * 10**9 }}", "the template fails: SecurityError: the product is too long"),
        ("{{ ['x'] * 10**9 }}", "the template fails: SecurityError: the product is too long"),
        ("{{ 10 ** 100000000 }}", "the template fails: SecurityError: the power is too large"),
        (
            "{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}",
            "its prompt is longer than 16,777,216 characters",
        ),
        (
            "{{ ''.__class__.__mro__ }}",
            "the template fails: SecurityError: access to attribute '__class__' of 'str' object is unsafe.",
        ),
        ("{{ a[0].b }}", "the template fails: dict object has no element 0"),
        ("{{ a.nope() }}", "lacks `nope`, which the template needs"),
    ],
)
def test_a_row_that_does_not_render_is_a_bad_line_of_its_own(template, why):
    bad = shape({"id": "r", "a": {}, "b": 1}, template)
    assert bad == BadRow(2, why, bad.hint, "r")


def test_an_endless_range_is_refused():
    assert "OverflowError" in shape({"a": 1}, "{% for i in range(10**7) %}{% endfor %}").why


def test_a_default_stands_in_for_a_missing_field():
    assert prompt_of({"a": 1}, "{{ text | default('none') }}") == "none"


def test_a_template_works_for_every_endpoint():
    line = {"id": 1, "text": "x"}
    assert shape(line, "{{ text }}", endpoint="embeddings").body == b'{"model":"m","input":"x"}'
    assert shape(line, "{{ text }}", endpoint="completions").body == b'{"model":"m","prompt":"x"}'
    assert orjson.loads(shape(line, "{{ text }}", family="gemini").body)["contents"][0]["parts"] == [{"text": "x"}]
    assert shape(line, "{{ text }}", model="text-embedding-3-small").endpoint == "embeddings"


def test_a_template_that_does_not_compile_is_a_usage_error_that_names_the_line():
    with pytest.raises(BatchrunError, match="line 2") as caught:
        Shaper(Shaping(template="a\n{% if %}"))
    assert caught.value.exit_code == Exit.USAGE
