"""What is installed for development is what was locked: every package by hash, within the ranges, from no host."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parent.parent
LOCK = (REPOSITORY / ".ci/requirements.lock").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
HASHES = r"((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
ENTRY = re.compile(r"^([a-z0-9-]+)==(\S+) \\\n" + HASHES + r"(?:    #.*\n)*", re.MULTILINE)
LOCKED = {name: Version(version) for name, version, _ in ENTRY.findall(LOCK)}


def test_every_line_of_the_lock_is_a_version_with_its_hashes():
    assert ENTRY.sub("", re.sub(r"\A(?:#.*\n)+", "", LOCK)) == ""
    assert len(LOCKED) > 40


def test_the_lock_names_no_host_and_no_index():
    assert "://" not in LOCK
    assert "@" not in LOCK
    assert re.findall("^ *--(?!hash)", LOCK, re.MULTILINE) == []


def test_all_that_the_project_needs_is_locked_within_its_ranges():
    needed = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    needed += PROJECT["build-system"]["requires"]
    wrong = [
        str(wanted)
        for wanted in map(Requirement, needed)
        if not wanted.specifier.contains(LOCKED.get(canonicalize_name(wanted.name), Version("0")))
    ]
    assert wrong == [], "run `make lock`"
