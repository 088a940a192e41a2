"""The command line as people and scripts meet it: options, usage errors, exit codes, stdout and stderr."""

import json
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchrun import cli
from batchrun.errors import BatchrunError, Exit
from batchrun.options import OPTIONS

REPOSITORY = Path(__file__).resolve().parent.parent

SUMMARY = {
    "job": "my job.batchrun",
    "state": "complete",
    "reason": "",
    "exit_code": 0,
    "rows": {"total": 10, "succeeded": 9, "failed": 1, "pending": 0, "in_doubt": 0},
    "in_doubt_ids": [],
    "requests": {"sent": 11, "retried": 1, "refused": 1},
    "batches": 2,
    "tokens": {"input": 812, "output": 30, "cached": 0, "reasoning": 0},
    "cost_usd": Decimal("0.000210000000000000000001"),
    "cost_unknown_rows": 0,
    "elapsed_s": 4.2,
    "rows_per_s": 2.4,
    "latency_s": {"p50": 0.4, "p90": 0.7, "p95": 0.8, "p99": 0.9, "max": 0.9},
    "binding": "requests per minute",
    "results": "my job.batchrun/results.jsonl",
    "errors": "my job.batchrun/errors.jsonl",
    "spent_usd": Decimal("0.00021"),
    "reserved_usd": Decimal(0),
    "budget_usd": None,
    "doubted": 0,
    "calls_saved": None,
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("BATCHRUN_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def installed(*arguments, env=None, **options):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "batchrun", *arguments],
        env={"PYTHONPATH": str(REPOSITORY)} if env is None else env,
        capture_output=True,
        timeout=60,
        check=False,
        **options,
    )


def ended(monkeypatch, exit_code=0, **changes):
    """Makes every run end with this outcome; returns the list of what it was called with."""
    from batchrun.job import commands

    calls = []
    outcome = SimpleNamespace(exit_code=exit_code, summary={**SUMMARY, "exit_code": exit_code, **changes})

    def run(*arguments):
        calls.append(arguments)
        return outcome

    monkeypatch.setattr(commands, "submit", run)
    monkeypatch.setattr(commands, "resume", run)
    return calls


# ---------------------------------------------------------------- help

CONTRACT = [
    "--provider",
    "--base-url",
    "--endpoint",
    "--mode",
    "--api-key-env",
    "--api-key-file",
    "--model",
    "--system",
    "--template",
    "--max-tokens",
    "--temperature",
    "--param",
    "--batch-tokens",
    "--batch-rows",
    "--batch-bytes",
    "--max-concurrency",
    "--concurrency",
    "--rpm",
    "--tpm",
    "--group-by",
    "--max-attempts",
    "--timeout",
    "--budget",
    "--price-in",
    "--price-out",
    "--price-cached-in",
    "--price-cache-write",
    "--deadline",
    "--patience",
    "--max-failures",
    "--limit",
    "--job",
    "--skip-invalid",
    "--on-doubt",
    "--grace",
    "--retry-failed",
    "--progress",
    "--no-progress",
    "--quiet",
    "--verbose",
    "--json",
    "--log-format",
    "--sim-latency",
    "--sim-rpm",
    "--sim-tpm",
    "--sim-error-rate",
    "--sim-cache-life",
    "--sim-seed",
    "--config",
]

CONTENT = {"--endpoint", "--model", "--system", "--template", "--max-tokens", "--temperature", "--param"}


def options_in_help(capsys, command):
    assert cli.main([command, "--help"]) == 0
    return set(re.findall(r"(?<![\w-])--[a-z-]+[a-z]", capsys.readouterr().out))


def test_submit_help_lists_every_option_of_the_contract(capsys):
    assert set(CONTRACT) <= options_in_help(capsys, "submit")


def test_resume_has_every_option_but_those_that_change_a_request(capsys):
    listed = options_in_help(capsys, "resume")
    assert not listed & (CONTENT | {"--job"})
    assert set(CONTRACT) - CONTENT - {"--job"} <= listed


def test_every_command_is_listed(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("submit", "resume", "report", "status", "results", "check", "estimate"):
        assert re.search(rf"^  {command} ", shown, re.MULTILINE)


def test_help_is_ascii_so_that_every_terminal_can_show_it(capsys):
    for command in ("submit", "resume", "report", "status", "results", "check", "estimate"):
        assert cli.main([command, "--help"]) == 0
        assert capsys.readouterr().out.isascii()


def test_the_version_is_data(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "batchrun 0.1.0\n"


def test_nothing_heavy_is_imported_before_a_command_runs():
    program = (
        "import sys; from batchrun.cli import main; main(['--help']);"
        "heavy = {'httpx', 'tiktoken', 'rich', 'genai_prices', 'jinja2', 'anyio', 'asyncio', 'sqlite3', 'zstandard'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=REPOSITORY, timeout=60, check=True)
    assert done.stderr == b"[]\n"


# ---------------------------------------------------------------- usage errors


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["nope"], "no such command", "batchrun --help"),
        (["submit"], "missing argument 'INPUT'", "batchrun submit --help"),
        (["submit", "x", "y"], "unexpected extra argument", "batchrun submit --help"),
        (["submit", "x", "--bugdet", "5"], "--bugdet", "did you mean --budget?"),
        (["submit", "x", "--zzzzzz"], "--zzzzzz", "batchrun submit --help"),
        (["submit", "x", "--rpm"], "requires an argument", "batchrun submit --help"),
        (["submit", "x", "--api-key", "sk-secret"], "--api-key", "never an argument"),
        (["submit", "x", "--api-key=sk-secret"], "--api-key", "never an argument"),
        (["submit", "x", "--api-key-env", "sk-secret"], "--api-key-env", "OPENAI_API_KEY"),
        (["resume", "--model", "m"], "--model", "submit INPUT --job DIR"),
        (["submit", "x", "--rpm", "0"], "--rpm: `0` is no positive whole number", "digits"),
        (["submit", "x", "--rpm", "1e3"], "--rpm: `1e3`", "digits"),
        (["submit", "x", "--tpm", "-5"], "--tpm: `-5`", "digits"),
        (["submit", "x", "--max-concurrency", "٣"], "--max-concurrency", "digits"),
        (["submit", "x", "--limit", "9" * 5000], "--limit", "digits"),
        (["submit", "x", "--timeout", "0"], "--timeout: `0` is no duration above zero", "15m"),
        (["submit", "x", "--deadline", "1w"], "--deadline: `1w` is no duration", "1d"),
        (["submit", "x", "--grace", "inf"], "--grace: `inf` is no duration", "1d"),
        (["submit", "x", "--budget", "0"], "--budget: `0` is no budget", "above zero"),
        (["submit", "x", "--budget", "-1"], "--budget: `-1`", "digits"),
        (["submit", "x", "--budget", ""], "--budget: `` is no amount of dollars", "digits"),
        (["submit", "x", "--price-in", "free"], "--price-in: `free`", "0.25"),
        (["submit", "x", "--max-failures", "101%"], "--max-failures: `101%`", "5%"),
        (["submit", "x", "--max-failures", "some"], "--max-failures: `some`", "5%"),
        (["submit", "x", "--temperature", ".5"], "--temperature: `.5`", "JSON number"),
        (["submit", "x", "--param", "a"], "--param: `a` is no `key=json`", "top_p=0.9"),
        (["submit", "x", "--param", "=1"], "--param: `=1` is no `key=json`", "top_p=0.9"),
        (["submit", "x", "--param", "effort=low"], "the value of `effort` is no JSON", """'effort="low"'"""),
        (["submit", "x", "--param", "x=NaN"], "the value of `x` is no JSON", "quotes"),
        (["submit", "x", "--template", "@none.j2"], "--template: cannot read none.j2", "`@`"),
        (["submit", "x", "--template", ""], "--template: is empty", "value"),
        (["submit", "x", "--system", "\udcff"], "--system: is not valid UTF-8", "UTF-8"),
        (["submit", "x", "--endpoint", "chats"], "--endpoint: `chats` is none of chat,", "did you mean `chat`?"),
        (["submit", "x", "--mode", "deferred"], "--mode: `deferred` is not there yet", "live"),
        (["submit", "x", "--on-doubt", "ask"], "--on-doubt: `ask` is none of resend, fail", "did you mean"),
        (["submit", "x", "--base-url", "api.example.com"], "--base-url: `api.example.com`", "https://"),
        (["submit", "x", "--base-url", "https://me:sk-secret@h/v1"], "--base-url: holds credentials", "--api-key-file"),
        (["submit", "x", "--sim-error-rate", "5"], "--sim-error-rate: `5` is no share", "0.05"),
        (["submit", "x", "-q", "-v"], "--quiet and --verbose exclude each other", "one of them"),
        (["submit", "x", "--config", "none.toml"], "cannot read none.toml", "TOML"),
        (["report", "--format", "pdf"], "--format: `pdf` is none of", "text"),
        (["results", "--all", "--failed"], "--failed and --all exclude each other", "--all"),
    ],
)
def test_a_usage_error_exits_2_with_a_hint(capsys, arguments, message, hint):
    assert cli.main(arguments) == Exit.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    first, second = shown.err.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("hint: ")
    assert message in first
    assert hint in second
    assert "secret" not in shown.err


def test_no_command_shows_help_and_exits_2(capsys):
    assert cli.main([]) == Exit.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Commands:" in shown.err


@pytest.mark.parametrize("arguments", [["submit", "x", "--rpm", "0"], ["submit", "--nope"]])
@pytest.mark.parametrize("how", ["two words", "one word", "environment"])
def test_with_json_logs_an_error_is_one_json_line(capsys, monkeypatch, arguments, how):
    if how == "environment":
        monkeypatch.setenv("BATCHRUN_LOG_FORMAT", "json")
    arguments = [
        *arguments,
        *{"two words": ["--log-format", "json"], "one word": ["--log-format=json"], "environment": []}[how],
    ]
    assert cli.main(arguments) == Exit.USAGE
    [line] = capsys.readouterr().err.splitlines()
    error = json.loads(line)
    assert error["level"] == "error"
    assert error["hint"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", error["at"])


# ---------------------------------------------------------------- a run and its end


def test_what_is_given_now_reaches_the_run(monkeypatch):
    calls = ended(monkeypatch)
    assert cli.main(["submit", "in.jsonl", "--rpm", "5", "--param", "a=1", "--param", "b=2", "-q"]) == 0
    [(path, settings, given, environ, console)] = calls
    assert (path, settings.rpm, settings.params, settings.quiet) == ("in.jsonl", 5, {"a": "1", "b": "2"}, True)
    assert given == {"rpm", "params", "quiet"}
    assert environ is os.environ
    console.notice("quiet")


def test_without_json_a_run_prints_nothing_on_stdout(monkeypatch, capsys):
    ended(monkeypatch)
    assert cli.main(["submit", "in.jsonl"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "9 succeeded, 1 failed" in shown.err


def test_with_json_a_run_prints_one_exact_object(monkeypatch, capsys):
    ended(monkeypatch, exit_code=1)
    assert cli.main(["submit", "in.jsonl", "--json"]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["rows"]["succeeded"] == 9
    assert '"cost_usd":0.000210000000000000000001,' in line


def test_a_run_that_leaves_rows_says_how_to_go_on(monkeypatch, capsys):
    rows = {**SUMMARY["rows"], "pending": 4}
    ended(monkeypatch, exit_code=3, rows=rows, state="stopped", reason="budget reached")
    assert cli.main(["submit", "in.jsonl"]) == 3
    assert capsys.readouterr().err.endswith("go on with: batchrun resume 'my job.batchrun'\n")


@pytest.mark.parametrize(
    ("exit_code", "shown"),
    [
        (0, ""),
        (1, "complete: some failed\n"),
        (3, "stopped: budget\n"),
        (77, "error: failed: the key was refused\n"),
        (130, "interrupted: SIGINT\n"),
    ],
)
def test_a_quiet_run_speaks_only_if_it_did_not_end_well(monkeypatch, capsys, exit_code, shown):
    state, _, reason = shown.removeprefix("error: ").strip().partition(": ")
    ended(monkeypatch, exit_code=exit_code, state=state or "complete", reason=reason)
    assert cli.main(["submit", "in.jsonl", "-q"]) == exit_code
    assert capsys.readouterr().err == shown


def test_with_json_logs_the_end_is_one_line_with_the_summary(monkeypatch, capsys):
    ended(monkeypatch)
    assert cli.main(["submit", "in.jsonl", "--log-format", "json"]) == 0
    [line] = capsys.readouterr().err.splitlines()
    entry = json.loads(line, parse_float=Decimal)
    assert entry["level"] == "summary"
    assert entry["summary"]["cost_usd"] == SUMMARY["cost_usd"]


def test_an_error_ends_a_run_with_its_code(monkeypatch, capsys):
    from batchrun.job import commands

    def run(*arguments):
        raise BatchrunError("no\x1b[31m key", hint="set it", exit_code=Exit.CONFIGURATION)

    monkeypatch.setattr(commands, "submit", run)
    assert cli.main(["submit", "in.jsonl", "-q"]) == 78
    assert capsys.readouterr().err == "error: no\\x1b[31m key\nhint: set it\n"


@pytest.mark.parametrize("verbose", [False, True])
def test_an_internal_error_is_one_line_and_a_traceback_only_when_asked_for(monkeypatch, capsys, verbose):
    from batchrun.job import commands

    def run(*arguments):
        hidden = "sk-secret"
        raise LookupError(f"broke with {len(hidden)}")

    monkeypatch.setattr(commands, "submit", run)
    assert cli.main(["submit", "in.jsonl", *(["-v"] if verbose else [])]) == Exit.SOFTWARE
    shown = capsys.readouterr().err
    assert "error: internal error: LookupError: broke with 9\n" in shown
    assert ("Traceback" in shown) == verbose
    assert "sk-secret" not in shown


def test_a_failing_system_call_is_a_failure_of_storage(monkeypatch, capsys):
    from batchrun.job import commands

    def run(*arguments):
        raise OSError(28, "No space left on device", "job/results.jsonl")

    monkeypatch.setattr(commands, "submit", run)
    assert cli.main(["submit", "in.jsonl"]) == Exit.STORAGE
    assert "No space left on device: 'job/results.jsonl'\n" in capsys.readouterr().err


def test_an_interrupt_outside_of_a_run_exits_130(monkeypatch, capsys):
    from batchrun.job import commands

    def run(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "check", run)
    assert cli.main(["check", "in.jsonl"]) == Exit.SIGINT
    assert "Traceback" not in capsys.readouterr().err


# ---------------------------------------------------------------- data on stdout


@pytest.fixture
def job_with_results(monkeypatch):
    from batchrun.job import locate, standing

    monkeypatch.setattr(locate, "locate", lambda argument, settings, *, cwd: Path("job"))
    monkeypatch.setattr(standing, "write_results", lambda job, which, out: out.write(f"{which}\n".encode()))
    monkeypatch.setattr(standing, "status", lambda job: SUMMARY)


@pytest.mark.parametrize(
    ("flags", "which"), [([], "succeeded"), (["--failed"], "failed"), (["--all"], "all"), (["-o", "-"], "succeeded")]
)
def test_results_go_to_stdout(job_with_results, capfdbinary, flags, which):
    assert cli.main(["results", *flags]) == 0
    assert capfdbinary.readouterr().out == f"{which}\n".encode()


def test_results_into_a_file_replace_it_whole_and_privately(job_with_results, tmp_path, capfdbinary):
    target = tmp_path / "kept.jsonl"
    target.write_text("old")
    target.chmod(0o644)
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    assert cli.main(["results", "-o", str(link)]) == 0
    assert link.is_symlink()
    assert target.read_text() == "succeeded\n"
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.jsonl", "link.jsonl"]
    assert capfdbinary.readouterr().out == b""


def test_results_that_fail_midway_leave_the_old_file(job_with_results, monkeypatch, tmp_path, capsys):
    from batchrun.job import standing

    def write(job, which, out):
        out.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(standing, "write_results", write)
    target = tmp_path / "kept.jsonl"
    target.write_text("old")
    assert cli.main(["results", "-o", str(target)]) == Exit.STORAGE
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    assert "No space left on device" in capsys.readouterr().err


def test_results_into_a_device_do_not_replace_it(job_with_results):
    assert cli.main(["results", "-o", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


def test_status_is_for_people_or_one_object(job_with_results, capfd):
    assert cli.main(["status"]) == 0
    assert "9 succeeded, 1 failed" in capfd.readouterr().out
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["job"] == "my job.batchrun"


def closed_stdout(program, how):
    """Runs main() with a stdout that nobody reads; returns its exit code and stderr."""
    command = f"{sys.executable} -c '{program}' {how}; echo \"exit ${{PIPESTATUS[0]}}\" >&2"
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, cwd=REPOSITORY, timeout=60, check=False
    ).stderr.decode()


PROGRAM = """
import sys
from pathlib import Path
from batchrun.job import locate, standing
locate.locate = lambda argument, settings, *, cwd: Path("job")
standing.write_results = lambda job, which, out: [out.write(b"x" * 1000) for _ in range(1000)]
from batchrun.cli import main
sys.exit(main(["results"]))
"""


ELSEWHERE = "hint: free space, or give another place with -o FILE\n"


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("| true", "exit 141\n"),
        ("| head -c 10 >/dev/null", "exit 141\n"),
        (">&-", f"error: cannot write stdout: it is closed\n{ELSEWHERE}exit 74\n"),
        (">/dev/full", f"error: cannot write stdout: No space left on device\n{ELSEWHERE}exit 74\n"),
        ("2>&- | true", "exit 141\n"),
    ],
)
def test_a_stdout_that_nobody_reads_is_no_traceback(how, shown):
    assert closed_stdout(PROGRAM, how) == shown


# ---------------------------------------------------------------- cron and other bare places


@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}])
def test_it_works_without_home_path_and_locale(tmp_path, environment):
    (tmp_path / "batchrun.toml").write_text("nonsense-ü = 1", encoding="utf-8")
    env = {"PYTHONPATH": str(REPOSITORY), **environment}
    done = installed("submit", "x", env=env, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == Exit.USAGE
    assert b"Traceback" not in done.stderr
    assert b"\x1b" not in done.stderr
    assert done.stdout == b""


def test_closed_standard_streams_are_no_traceback(tmp_path):
    command = f"{sys.executable} -m batchrun submit x --rpm 0 <&- >&- 2>&-"
    done = subprocess.run(
        ["bash", "-c", command], env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


def test_every_option_has_help():
    assert all(option.help.endswith((".", "]")) for option in OPTIONS)
