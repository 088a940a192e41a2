"""Flags > environment > batchrun.toml > defaults; nothing unknown or secret passes."""

from decimal import Decimal
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchrun.config import CONTENT, PriceOverride, Settings, load, overlay
from batchrun.errors import BatchrunError, Exit
from batchrun.options import OPTIONS


def write(folder: Path, text: str) -> Path:
    path = folder / "batchrun.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(tmp_path: Path, text: str) -> BatchrunError:
    write(tmp_path, text)
    with pytest.raises(BatchrunError) as caught:
        load({}, {}, tmp_path)
    assert caught.value.exit_code == Exit.USAGE
    assert caught.value.hint
    return caught.value


# ---------------------------------------------------------------- precedence


@pytest.mark.parametrize(
    ("flag", "variable", "profile", "entry", "wins"),
    [
        ("1", "2", "3", "4", 1),
        (None, "2", "3", "4", 2),
        (None, None, "3", "4", 3),
        (None, None, None, "4", 4),
        (None, None, None, None, None),
        ("1", None, None, "4", 1),
        (None, "2", None, None, 2),
        (None, "", None, "4", 4),
    ],
)
def test_flags_beat_environment_beats_profile_beats_file_beats_default(tmp_path, flag, variable, profile, entry, wins):
    write(
        tmp_path,
        (f"rpm = {entry}\n" if entry else "") + (f"[profile.openai]\nrpm = {profile}\n" if profile else ""),
    )
    environ = {} if variable is None else {"BATCHRUN_RPM": variable}
    settings, given = load({"rpm": flag, "provider": "openai"}, environ, tmp_path)
    assert settings.rpm == wins
    assert ("rpm" in given) == (flag is not None)


def test_every_option_has_one_flag_one_variable_and_one_field():
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    assert len({option.field for option in OPTIONS}) == len(OPTIONS)
    for option in OPTIONS:
        settings = Settings()
        for name in option.field.split("."):
            settings = getattr(settings, name)


SAMPLE_TEXTS = {
    "NAME": "sim",
    "URL": "https://api.example.com/v1",
    "MODEL": "gpt-5-mini",
    "TEXT": "be brief",
    "TEXT|@FILE": "{{ text }}",
    "N": "7",
    "X": "0.20",
    "KEY=JSON": "top_p=0.90",
    "SECONDS": "90s",
    "DURATION": "20m",
    "USD": "2.50",
    "USD_PER_MTOK": "0.25",
    "N|P%": "5%",
    "DIR": "job",
    "PATH": "key",
    "SHARE": "0.05",
    "text|json": "json",
    "resend|fail": "fail",
    "": "yes",
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_means_the_same_as_a_flag_a_variable_and_an_entry(tmp_path, option):
    text = SAMPLE_TEXTS.get(option.metavar, option.metavar.split("|")[0])
    quoted = '["top_p=0.90"]' if option.field == "params" else f'"{text}"'
    flag = True if not option.metavar else [text] if option.field == "params" else text
    bare = tmp_path / "bare"
    bare.mkdir()
    config = write(tmp_path, f"{option.name} = {quoted}\n")
    by_flag, given = load({option.key: flag}, {}, bare, write(bare, ""))
    by_variable, _ = load({}, {option.variable: text}, bare, write(bare, ""))
    by_entry, _ = load({}, {}, bare, config)
    assert given == {option.field}
    if option.key in {"job", "api_key_file"}:
        assert by_flag == by_variable
        assert getattr(by_entry, option.key) == tmp_path / text
        assert getattr(by_flag, option.key) == bare / text
        return
    by_flag, by_variable, by_entry = (replace(settings, config=None) for settings in (by_flag, by_variable, by_entry))
    assert by_flag == by_variable == by_entry
    assert by_flag != Settings() or text == "auto"


def test_request_parameters_of_all_layers_are_joined_key_by_key(tmp_path):
    write(tmp_path, "[param]\nseed = 12345678901234567890123\ntop_p = 0.10\nstop = ['a', 'b']\n")
    flags = {"param": ["top_p=0.90"]}
    settings, _ = load(flags, {"BATCHRUN_PARAM": '{"user": "ü", "n": 12345678901234567890123}'}, tmp_path)
    assert settings.params == {
        "seed": "12345678901234567890123",
        "top_p": "0.90",
        "stop": '["a","b"]',
        "user": '"ü"',
        "n": "12345678901234567890123",
    }


# ---------------------------------------------------------------- the file


def test_the_nearest_file_up_the_tree_is_read_and_its_paths_start_there(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    write(tmp_path, "rpm = 1\n")
    (tmp_path / "a" / "prompt.j2").write_text("\ufeffHello {{ name }}\n", encoding="utf-8")
    config = write(tmp_path / "a", 'template = "@prompt.j2"\njob = "work"\n')
    settings, given = load({}, {}, tmp_path / "a" / "b")
    assert settings.config == config
    assert settings.rpm is None
    assert settings.template == "Hello {{ name }}\n"
    assert settings.job == tmp_path / "a" / "work"
    assert given == frozenset()  # only what a flag says wins over what a job remembers


def test_a_named_file_is_read_instead_of_the_nearest(tmp_path):
    write(tmp_path, "rpm = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("rpm = 2\n")
    third = tmp_path / "third.toml"
    third.write_text("rpm = 3\n")
    assert load({}, {"BATCHRUN_CONFIG": "other.toml"}, tmp_path)[0].rpm == 2
    assert load({}, {"BATCHRUN_CONFIG": "other.toml"}, tmp_path, third)[0].rpm == 3


def test_a_file_above_that_belongs_to_somebody_else_is_refused(tmp_path, monkeypatch):
    below = tmp_path / "below"
    below.mkdir()
    write(tmp_path, 'base-url = "https://elsewhere.example"\n')
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    if (tmp_path / "batchrun.toml").stat().st_uid == 0:
        monkeypatch.setattr("batchrun.configfile._TRUSTED_OWNERS", frozenset())
    with pytest.raises(BatchrunError, match="belongs to another user"):
        load({}, {}, below)
    assert load({}, {}, tmp_path)[0].base_urls == ("https://elsewhere.example",)
    assert load({}, {}, below, tmp_path / "batchrun.toml")[0].base_urls == ("https://elsewhere.example",)


def test_a_models_profile_wins_over_its_providers(tmp_path):
    write(
        tmp_path,
        """
        provider = "openai"
        tpm = 1
        [profile.openai]
        rpm = 10
        tpm = 10
        base-url = "https://proxy.example/v1"
        [profiles."gpt-5-mini"]
        rpm = 20
        price_in = 0.250
        [profile.other]
        rpm = 30
        """,
    )
    settings, given = load({"model": "gpt-5-mini"}, {}, tmp_path)
    assert (settings.rpm, settings.tpm, settings.base_urls) == (20, 10, ("https://proxy.example/v1",))
    assert settings.price == PriceOverride(input=Decimal("0.250"))
    assert given == {"model"}
    assert load({}, {}, tmp_path)[0].rpm == 10


def test_prices_keep_every_digit(tmp_path):
    write(
        tmp_path,
        """
        price-out = 0.123456789012345678901
        [prices]
        "gpt-5-mini" = { input = "0.25", output = 2, cached-input = 0.0250 }
        """,
    )
    settings, _ = load({}, {}, tmp_path)
    assert str(settings.price.output) == "0.123456789012345678901"
    assert settings.prices == {
        "gpt-5-mini": PriceOverride(input=Decimal("0.25"), output=Decimal(2), cached_input=Decimal("0.0250"))
    }


def test_a_temperature_keeps_its_digits(tmp_path):
    write(tmp_path, "temperature = 0.20\n")
    assert load({}, {}, tmp_path)[0].temperature == "0.20"
    assert load({"temperature": "1e-1"}, {}, tmp_path)[0].temperature == "1e-1"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("max-token = 5", "unknown key `max-token`", "did you mean `max-tokens`?"),
        ("nonsense = 5", "unknown key `nonsense`", "batchrun submit --help"),
        ("[openai]\nrpm = 5", "unknown key `openai`", "batchrun submit --help"),
        ('[prices]\n"m" = { inputs = 1 }', "unknown key `inputs`", "did you mean `input`?"),
        ('[prices]\n"m" = 1', "[prices] holds something else than tables", "[prices]"),
        ('profile = "openai"', "[profile] holds something else than tables", "[profile.NAME]"),
        ('[profile.x]\nmodel = "m"', "`model` has no place in a profile", "top of the file"),
        ("rpm = true", "takes one text or number", "as on the command line"),
        ("rpm = 1.5", "`1.5` is no positive whole number", "digits only"),
        ("budget = nan", "`NaN` is no amount of dollars", "digits only"),
        ("quiet = 3", "`3` is no yes or no", "true"),
        ("rpm = ", "is no TOML", "quotes"),
        ("[param]\nx = inf", "`x` cannot be turned into JSON", "key=json"),
        (f"rpm = {'9' * 5000}", "", ""),
    ],
)
def test_what_a_file_may_not_say_is_named_with_a_hint(tmp_path, text, message, hint):
    error = refused(tmp_path, text)
    assert message in error.message
    assert hint in error.hint
    assert "batchrun.toml" in error.message


@pytest.mark.parametrize("name", ["api_key", "api-key", "OPENAI_API_KEY", "token", "password", "auth-token"])
@pytest.mark.parametrize("table", ["", "[profile.openai]\n"])
def test_a_key_in_a_file_is_refused_and_never_repeated(tmp_path, table, name):
    error = refused(tmp_path, f'{table}{name} = "sk-secret-123"\n')
    assert "0600" in error.hint
    assert "secret" not in error.message + error.hint


def test_a_file_that_is_not_utf8_or_not_there_is_named(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes(b'system = "na\xefve"\n')
    for bad in (path, tmp_path / "none.toml"):
        with pytest.raises(BatchrunError, match=bad.name):
            load({}, {}, tmp_path, bad)


def test_a_byte_order_mark_is_accepted(tmp_path):
    (tmp_path / "batchrun.toml").write_bytes(b"\xef\xbb\xbfrpm = 5\r\n")
    assert load({}, {}, tmp_path)[0].rpm == 5


# ---------------------------------------------------------------- the environment


@pytest.mark.parametrize("text", ["1", "true", "yes", "TRUE", "Yes"])
def test_an_environment_switch_is_on(tmp_path, text):
    assert load({}, {"BATCHRUN_SKIP_INVALID": text}, tmp_path)[0].skip_invalid is True


@pytest.mark.parametrize("text", ["0", "false", "no", "NO"])
def test_an_environment_switch_is_off(tmp_path, text):
    assert load({}, {"BATCHRUN_PROGRESS": text}, tmp_path)[0].progress is False


def test_a_flag_turns_off_what_the_environment_turns_on(tmp_path):
    assert load({"quiet": False}, {"BATCHRUN_QUIET": "1"}, tmp_path)[0].quiet is False


def test_a_mistyped_variable_does_not_go_unnoticed(tmp_path):
    with pytest.raises(BatchrunError) as caught:
        load({}, {"BATCHRUN_BUGDET": "5"}, tmp_path)
    assert caught.value.hint == "did you mean BATCHRUN_BUDGET?"


def test_variables_of_others_and_the_key_are_no_options(tmp_path):
    environ = {"BATCHRUN_API_KEY": "sk-1", "BATCHRUN_HOME": "/x", "BATCHRUN_": "", "PATH": "/bin"}
    assert load({}, environ, tmp_path) == (Settings(), frozenset())


def test_the_mistake_names_the_variable(tmp_path):
    with pytest.raises(BatchrunError, match=r"^BATCHRUN_DEADLINE: `soon` is no duration$"):
        load({}, {"BATCHRUN_DEADLINE": "soon"}, tmp_path)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400), ("0.5", 0.5), ("1.5h", 5400)],
)
def test_durations(tmp_path, text, seconds):
    assert load({"deadline": text}, {}, tmp_path)[0].deadline_s == seconds


def test_no_grace_and_no_patience_are_choices(tmp_path):
    settings, _ = load({"grace": "0", "patience": "0"}, {}, tmp_path)
    assert (settings.grace_s, settings.patience_s) == (0, 0)


def test_a_relative_template_of_a_flag_starts_at_the_working_directory(tmp_path):
    (tmp_path / "t.j2").write_text("{{ x }}")
    assert load({"template": "@t.j2"}, {}, tmp_path)[0].template == "{{ x }}"


# ---------------------------------------------------------------- what a job remembers


def test_a_flag_given_now_wins_over_what_a_job_remembers_but_never_changes_a_request(tmp_path):
    first, _ = load(
        {"model": "m", "rpm": "5", "price_in": "1", "price_out": "2", "quiet": True, "retry_failed": True},
        {},
        tmp_path,
    )
    now, given = load({"model": "other", "tpm": "7", "price_out": "3", "verbose": True}, {}, tmp_path)
    merged = overlay(first, now, given)
    assert (merged.model, merged.rpm, merged.tpm) == ("m", 5, 7)
    assert merged.price == PriceOverride(input=Decimal(1), output=Decimal(3))
    assert (merged.quiet, merged.verbose, merged.retry_failed) == (False, True, False)
    assert {"model", "system", "template", "params"} <= CONTENT
