"""Which provider is meant, where it lives, and that its key stays secret."""

from __future__ import annotations

import pytest

from batchrun.errors import BatchrunError, Exit
from batchrun.providers.presets import PRESETS, make_provider, resolve
from batchrun.records import Row

ENDPOINT_ROWS = {
    endpoint: (Row(1, "a", endpoint, "m", b"{}", None),)
    for endpoint in ("chat", "responses", "completions", "embeddings", "messages", "generate")
}


@pytest.mark.parametrize(
    ("name", "base_url", "endpoint", "url"),
    [
        (None, None, "chat", "https://api.openai.com/v1/chat/completions"),
        ("groq", None, "chat", "https://api.groq.com/openai/v1/chat/completions"),
        ("sim", None, "chat", "http://sim.invalid/v1/chat/completions"),
        ("sim", None, "messages", "http://sim.invalid/v1/messages"),
        (None, "http://localhost:8000", "chat", "http://localhost:8000/v1/chat/completions"),
        (None, "http://localhost:8000/", "embeddings", "http://localhost:8000/v1/embeddings"),
        (None, "http://localhost:8000/v1/", "responses", "http://localhost:8000/v1/responses"),
        (None, "http://[::1]:8000", "completions", "http://[::1]:8000/v1/completions"),
        (None, "https://gw.example/llm", "chat", "https://gw.example/llm/v1/chat/completions"),
        (None, "https://gw.example/llm", "messages", "https://gw.example/llm/v1/messages"),
        (None, "https://gw.example/v1beta/openai", "chat", "https://gw.example/v1beta/openai/chat/completions"),
        (None, "https://gw.example/v4x", "chat", "https://gw.example/v4x/chat/completions"),
        (None, "https://gw.example/vllm", "chat", "https://gw.example/vllm/v1/chat/completions"),
        ("anthropic", None, "messages", "https://api.anthropic.com/v1/messages"),
        ("anthropic", "https://gw.example/anthropic", "messages", "https://gw.example/anthropic/v1/messages"),
        ("anthropic", "https://gw.example/v1/", "messages", "https://gw.example/v1/messages"),
        (
            "gemini",
            "http://127.0.0.1:9/gemini",
            "generate",
            "http://127.0.0.1:9/gemini/v1beta/models/m:generateContent",
        ),
        (
            "gemini",
            "https://gw.example/v1",
            "generate",
            "https://gw.example/v1/models/m:generateContent",
        ),
    ],
)
def test_a_base_url_is_taken_with_or_without_its_version(name, base_url, endpoint, url):
    assert make_provider(resolve(name, base_url), None).encode(ENDPOINT_ROWS[endpoint]).url == url


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_preset_makes_a_provider_for_each_of_its_endpoints(preset):
    provider = make_provider(preset, "key")
    assert (provider.name, provider.family) == (preset.name, preset.family)
    assert provider.endpoints == preset.endpoints
    assert provider.max_tokens_name == preset.max_tokens_name
    for endpoint in provider.endpoints:
        request = provider.encode(ENDPOINT_ROWS[endpoint])
        assert request.url.startswith(preset.base_url)
        assert b"key" in dict(request.headers)[preset.key_header.encode()]


def test_the_origin_names_scheme_host_and_port():
    assert make_provider(resolve("openai", None), None).origin == "https://api.openai.com:443"
    assert make_provider(resolve(None, "http://LOCALHOST:8000/v1"), None).origin == "http://localhost:8000"
    assert make_provider(resolve(None, "http://[::1]/v1"), None).origin == "http://[::1]:80"


def test_a_base_url_alone_is_a_compatible_server_that_needs_no_key():
    preset = resolve(None, "https://gpu.example/v1")
    assert (preset.name, preset.family, preset.key_env, preset.key_required) == (
        "custom",
        "openai",
        "OPENAI_API_KEY",
        False,
    )


def test_a_known_host_gets_its_own_key_and_no_other_providers():
    preset = resolve(None, "https://api.groq.com/openai/v1")
    assert (preset.name, preset.key_env, preset.key_required) == ("groq", "GROQ_API_KEY", True)


def test_a_named_provider_needs_its_key_at_its_own_host_only():
    assert resolve("openai", None).key_required
    assert resolve("openai", "https://api.openai.com").key_required
    assert not resolve("openai", "http://127.0.0.1:9").key_required


def test_an_unknown_provider_is_named_with_what_is_known_and_what_was_meant():
    with pytest.raises(BatchrunError) as caught:
        resolve("antropic", None)
    assert caught.value.exit_code == Exit.USAGE
    assert caught.value.message == "unknown provider `antropic`, did you mean `anthropic`?"
    assert all(name in (caught.value.hint or "") for name in PRESETS)
    with pytest.raises(BatchrunError, match=r"^unknown provider `zzz`$"):
        resolve("zzz", None)


@pytest.mark.parametrize(
    ("base_url", "why"),
    [
        ("", "no http"),
        ("api.openai.com/v1", "no http"),
        ("ftp://host/v1", "no http"),
        ("https:///v1", "no http"),
        ("https://user:hunter2@host/v1", "password"),
        ("https://host/v1?key=hunter2", "query or fragment"),
        ("https://host/v1#hunter2", "query or fragment"),
        ("https://host/v1?", "query or fragment"),
        ("https://host:port/v1", "cannot be read"),
        ("https://[bad/v1", "cannot be read"),
        ("https://host/v 1", "spaces"),
        ("https://host/é", "ASCII"),
        ("https://host\\@evil/v1", "password"),
        ("https://host\\evil/v1", "spaces or characters"),
        ("http://host/v1", "plain http"),
        ("http://10.0.0.5:8000", "plain http"),
        ("http://localhost.evil.example", "plain http"),
    ],
)
def test_a_base_url_that_cannot_be_used_is_a_usage_error_that_shows_no_secret(base_url, why):
    with pytest.raises(BatchrunError, match=why) as caught:
        resolve(None, base_url)
    assert caught.value.exit_code == Exit.USAGE
    assert "hunter2" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "[::1]", "0.0.0.0", "a.localhost"])
def test_plain_http_is_for_this_machine(host):
    assert resolve("openai", f"http://{host}:8000").base_url == f"http://{host}:8000/v1"


def test_plain_http_elsewhere_must_be_allowed():
    assert resolve(None, "http://gpu-box:8000", allow_http=True).base_url == "http://gpu-box:8000/v1"


@pytest.mark.parametrize("name", ["openai", "anthropic", "gemini"])
def test_the_key_is_sent_and_shown_by_no_repr(name):
    provider = make_provider(resolve(name, None), " sk-hunter2\n", [("x-gateway-token", "hunter2too")])
    (endpoint, *_) = provider.endpoints
    request = provider.encode(ENDPOINT_ROWS[endpoint])
    values = dict(request.headers).values()
    assert any(value.endswith(b"sk-hunter2") for value in values)
    assert b"hunter2too" in values
    shown = f"{provider!r} {request!r} {request.headers!r} {vars(provider)!r} {list(values)}"
    assert "hunter2" not in shown


@pytest.mark.parametrize("key", ["sk\r\nx: y", "sk\x00", "schlüssel", "a\u2028b"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key):
    with pytest.raises(BatchrunError) as caught:
        make_provider(resolve("openai", None), key)
    assert caught.value.exit_code == Exit.CONFIGURATION
    assert key not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("header", [("bad name", "x"), ("", "x"), ("x:y", "z"), ("x", "a\r\nb: c"), ("x", "")])
def test_a_header_that_cannot_be_sent_is_a_usage_error(header):
    with pytest.raises(BatchrunError) as caught:
        make_provider(resolve("openai", None), None, [header])
    assert caught.value.exit_code == Exit.USAGE


def test_an_empty_key_is_no_key():
    assert b"authorization" not in dict(
        make_provider(resolve("openai", None), " ").encode(ENDPOINT_ROWS["chat"]).headers
    )
