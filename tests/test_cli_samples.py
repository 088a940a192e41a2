"""What README.md and samples/ show is true."""

import re
from pathlib import Path

import pytest

from batchrun import cli
from batchrun.config import load
from batchrun.errors import Exit
from batchrun.options import OPTIONS
from tests.test_kinds import exists

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["tickets.jsonl", "--model", "gpt-5-mini", "--template", "@classify.j2"], 60),
        (["chats.jsonl", "--model", "gpt-5-mini"], 40),
        (["openai-batch.jsonl"], 40),
        (["texts.jsonl", "--endpoint", "embeddings", "--model", "text-embedding-3-small"], 60),
    ],
)
def test_every_line_of_a_sample_is_a_request(monkeypatch, capfd, arguments, rows):
    monkeypatch.chdir(REPOSITORY / "samples")
    assert cli.main(["check", *arguments, "--provider", "sim"]) == 0
    assert re.search(rf"^rows +{rows}\nbad lines +0\n", capfd.readouterr().out)


def test_the_sample_configuration_is_read():
    settings, _ = load({"provider": "sim", "model": "gpt-5-mini"}, {}, REPOSITORY / "samples")
    assert (settings.sim.rpm, settings.rpm) == (45, 500)
    assert set(settings.prices) == {"our-own-model"}


def test_the_configuration_in_the_readme_is_read(tmp_path):
    example = re.search(r"(?:^    .*\n|^\n)+", README[README.index("    max-concurrency = ") :], re.MULTILINE)
    path = tmp_path / "batchrun.toml"
    path.write_text(re.sub(r"^    ", "", example[0], flags=re.MULTILINE))
    settings, _ = load({"provider": "openai", "model": "gpt-5-mini"}, {}, tmp_path)
    assert (settings.rpm, settings.tpm, settings.api_key_env) == (500, 200_000, "TEAM_OPENAI_KEY")


def test_the_readme_names_every_option_and_exit_code():
    named = set(re.findall(r"(?<![\w-])--[a-z-]+[a-z]", README))
    short = {"quiet", "verbose"}
    assert {f"--{option.name}" for option in OPTIONS if option.name not in short} <= named
    codes = {int(code) for row in re.findall(r"^\| ([0-9, ]+) \|", README, re.MULTILINE) for code in row.split(",")}
    assert codes == {int(code) for code in Exit} | {cli.SIGPIPE}


def test_every_promise_of_the_readme_names_tests_that_exist():
    promises = README.partition("## What it promises")[2].partition("\n## ")[0]
    items = re.split(r"^(?=\d+\. )", promises, flags=re.MULTILINE)[1:]
    assert [int(item.split(".")[0]) for item in items] == list(range(1, 12))
    for item in items:
        named = re.findall(r"\[`(test_\w+)`\]\(tests/([\w/]+\.py)\)", item)
        assert named, item
        assert [(name, file) for name, file in named if not exists(f"{file}::{name}")] == []
    assert README.count("](tests/") == sum(item.count("](tests/") for item in items)


def test_the_commands_of_the_readme_use_known_options():
    known = {f"--{option.name}" for option in OPTIONS} | {"--simulate"}  # that one is estimate's own
    for line in re.findall(r"^    batchrun (.+?)(?: +#.*)?$", README, re.MULTILINE):
        assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= known
