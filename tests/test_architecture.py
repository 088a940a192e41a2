"""The one-way rule: bytes flow intake → plan → providers → run → report, and imports never run back."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "batchrun"

MAY_IMPORT = {
    "records": set(),
    "errors": set(),
    "options": {"errors"},
    "configfile": {"errors", "options"},
    "config": {"records", "errors", "options", "configfile"},
    "intake": {"records", "errors", "intake"},
    "plan": {"records", "errors", "plan"},
    "providers": {"records", "errors", "providers"},
    "run": {"records", "errors", "config", "intake", "plan", "providers", "run"},
    "report": {"records", "errors", "config", "report"},
    "terminal": {"records", "errors", "config", "run", "report", "terminal"},
    "job": {"records", "errors", "config", "intake", "plan", "providers", "run", "report", "job"},
    "cli": {"records", "errors", "config", "options", "job", "run", "report", "terminal"},
    "__main__": {"cli"},
}
"""Stage → the stages it may import."""

IMPURE = {"anyio", "asyncio", "httpx", "time", "os", "sqlite3", "socket", "threading"}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def stage(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("batchrun.")}
    ours -= {"__version__"}
    assert ours <= MAY_IMPORT[stage(path)], f"{path} imports upwards"


@pytest.mark.parametrize(
    "path", [p for p in modules() if stage(p) in ("plan", "providers")], ids=lambda path: path.name
)
def test_decisions_and_codecs_are_pure(path: Path) -> None:
    names = {name.split(".")[0] for name in imported(path)}
    assert not names & IMPURE
    if "random" in names:  # a seeded random.Random is an argument; the module's own state is not
        source = path.read_text()
        assert "random.Random" in source
        for word in ("random.random(", "random.uniform(", "random.choice(", "random.seed("):
            assert f" {word}" not in source.replace("_random.", "")


def test_providers_do_not_import_each_other() -> None:
    families = {"openai", "anthropic", "gemini"}
    for name in families:
        names = imported(ROOT / "providers" / f"{name}.py")
        assert not {other for other in families - {name} if f"batchrun.providers.{other}" in names}


def loaded_by(module: str) -> set[str]:
    """Returns the packages that are loaded once ``module`` is."""
    code = f"import sys, {module}; print(*(name.split('.')[0] for name, module in sys.modules.items() if module))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_a_client_of_http_does_not_load_the_command_line_of_its_library() -> None:
    assert "httpx" in (loaded := loaded_by("batchrun.run.transport"))
    assert not loaded & {"click", "pygments", "rich"}


@pytest.mark.parametrize("module", ["batchrun.cli", "batchrun.job.standing"])
def test_what_answers_at_once_imports_nothing_heavy(module: str) -> None:
    assert not loaded_by(module) & {"httpx", "tiktoken", "genai_prices", "jinja2", "uvloop", "zstandard", "pydantic"}


def test_one_module_alone_speaks_http_and_one_alone_speaks_sql() -> None:
    def users(library: str) -> set[str]:
        return {
            str(path.relative_to(ROOT))
            for path in modules()
            if any(name.split(".")[0] == library for name in imported(path))
        }

    assert users("httpx") <= {"run/transport.py", "run/http1.py", "run/proxied.py", "run/sim.py"}
    assert users("sqlite3") <= {
        "run/store.py", "run/view.py", "run/source.py", "run/prefixes.py", "job/pinning.py",
    }  # fmt: skip
