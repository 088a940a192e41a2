"""The command line: reads options, wires, maps errors to exit codes. What a command does is in job/.

Nothing heavy is imported before a command needs it, so that ``--help`` and ``status`` answer at once.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import typer
from typer.core import TyperCommand

from batchrun import __version__
from batchrun.config import CONTENT, Settings, load
from batchrun.errors import BatchrunError, Exit
from batchrun.options import BY_KEY, OPTIONS, Option, nearest
from batchrun.terminal.output import data_output, mute_stdout

if TYPE_CHECKING:
    from batchrun.job.running import Outcome
    from batchrun.terminal.console import StderrConsole

__all__ = ["app", "main"]

SIGPIPE = 141
"""What a shell shows of a command whose reader went away, as in ``batchrun results | head``."""

Body: TypeAlias = Callable[..., int]
"""What a command does with its arguments and a _Run."""


class _Run(msgspec.Struct, frozen=True):
    """What every command gets. ``given`` names the settings that flags, environment or file set now."""

    settings: Settings
    given: frozenset[str]
    console: StderrConsole


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# ---------------------------------------------------------------- options, declared once


def _options(*groups: str, but: Iterable[str] = ()) -> list[Option]:
    left_out = set(but)
    return [option for option in OPTIONS if option.group in groups and option.key not in left_out]


_TO_SEND = ("where", "batches", "flow", "limits", "simulated provider")
_FOR_SUBMIT = list(OPTIONS)
_FOR_RESUME = [
    option for option in OPTIONS if option.field not in CONTENT and option.key != "job" and option.group != "streams"
]
_FOR_CHECK = [*_options("where", "what"), BY_KEY["limit"], *_options("output", but={"progress"})]
_FOR_ESTIMATE = _options(*_TO_SEND, "what", "output", but={"progress"})
_FOR_STATUS = _options("output", but={"progress"})
_FOR_READING = _options("output", but={"progress", "json"})


def _parameter(option: Option) -> inspect.Parameter:
    """Returns the keyword that typer makes the option of. Its text is read later, by ``config.load``."""
    kind: Any = list[str] if option.many or option.field == "params" else str if option.metavar else bool
    name = f"--{option.name}" if option.metavar else f"--{option.name}/--no-{option.name}"
    names = [name, option.short] if option.short else [name]
    info = typer.Option(*names, metavar=option.metavar or None, help=option.help, show_default=False)
    return inspect.Parameter(
        option.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


_CONFIG = _parameter(Option("output", "config", "PATH", "The batchrun.toml to read. [the nearest one up the tree]"))


class _Command(TyperCommand):
    """A command whose help lists the options under the headings of their table."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own types are private
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            option = BY_KEY.get(parameter.name or "")
            heading = f"Options ({option.group})" if option else "Options"
            if parameter.param_type_name == "argument":
                heading = "Arguments"
            if record := parameter.get_help_record(ctx):
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _command(options: Sequence[Option]) -> Callable[[Body], Body]:
    """Registers a command that takes ``options`` besides its own parameters, and answers for its errors."""

    def register(body: Body) -> Body:
        own = [
            parameter
            for parameter in inspect.signature(body, eval_str=True).parameters.values()
            if parameter.name != "run"
        ]

        def command(**values: Any) -> int:  # noqa: ANN401 - what typer read
            flags = {option.key: values.pop(option.key) for option in options}
            return _run(body, values, flags, values.pop("config"))

        parameters = [*own, *map(_parameter, options), _CONFIG]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # typer reads it
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name=body.__name__, cls=_Command, help=inspect.getdoc(body))(command)
        return body

    return register


def _run(body: Body, values: Mapping[str, Any], flags: Mapping[str, Any], config: str | None) -> int:
    """Runs a command to its exit code."""
    from batchrun.terminal.console import StderrConsole
    from batchrun.terminal.foreign import spoken_for

    console = _early_console(flags.get("log_format"))
    verbose = bool(flags.get("verbose"))
    try:
        settings, given = load(flags, os.environ, Path(), Path(config) if config is not None else None)
        verbose = settings.verbose
        console = StderrConsole(
            sys.stderr,
            os.environ,
            as_json=settings.log_format == "json",
            quiet=settings.quiet,
            verbose=settings.verbose,
            progress=settings.progress,
            hide_bad_lines=settings.quiet and settings.skip_invalid,
        )
        if settings.config:
            console.debug(f"settings from {settings.config}")
        with spoken_for(console):
            return body(**values, run=_Run(settings, given, console))
    except BatchrunError as error:
        console.stop()
        console.error(error.message, error.hint)
        return error.exit_code
    except BrokenPipeError:
        return SIGPIPE
    except KeyboardInterrupt:
        return Exit.SIGINT
    except Exception as error:  # noqa: BLE001 - the last one to be asked
        console.stop()
        what = "the system refused" if isinstance(error, OSError) else f"internal error: {type(error).__name__}"
        console.error(f"{what}: {error}", "run it again with --verbose to see where")
        if verbose:
            import traceback

            for line in traceback.format_exception(error):
                console.trace(line)
        return Exit.STORAGE if isinstance(error, OSError) else Exit.SOFTWARE


# ---------------------------------------------------------------- commands

Input: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="INPUT", help="A JSONL file, plain, .gz or .zst; or - for stdin.", show_default=False),
]
Job: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB", help="A job directory or its input's path. [the latest job here]", show_default=False
    ),
]
Output: TypeAlias = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write to FILE. [stdout]", show_default=False),
]


@_command(_FOR_SUBMIT)
def submit(source: Input, *, run: _Run) -> int:
    """Start a job, or continue the one that INPUT already has."""
    from batchrun.job import commands

    return _ended(commands.submit(source, run.settings, run.given, os.environ, run.console), run)


@_command(_FOR_RESUME)
def resume(job: Job = None, *, run: _Run) -> int:
    """Continue a stopped job. It remembers everything but keys; an option given now wins."""
    from batchrun.job import commands
    from batchrun.job.locate import locate

    path = locate(job, run.settings, cwd=Path())
    return _ended(commands.resume(path, run.settings, run.given, os.environ, run.console), run)


def _ended(outcome: Outcome, run: _Run) -> int:
    from batchrun.report.metrics import dumps
    from batchrun.report.text import final_summary

    run.console.stop()
    run.console.summary(outcome.summary, final_summary(outcome.summary), outcome.exit_code)
    if outcome.summary["rows"]["pending"] or outcome.summary["rows"]["in_doubt"]:
        run.console.notice(f"go on with: batchrun resume {shlex.quote(outcome.summary['job'])}")
    if run.settings.json:
        # The run has ended as it has ended, whether or not somebody still reads.
        with contextlib.suppress(BrokenPipeError), data_output(None) as out:
            out.write(dumps(outcome.summary) + b"\n")
    return outcome.exit_code


@_command(_FOR_STATUS)
def status(job: Job = None, *, run: _Run) -> int:
    """Tell where a job stands, also while it runs in another terminal."""
    from batchrun.job import standing
    from batchrun.job.locate import locate
    from batchrun.report.text import final_summary

    _tell(standing.status(locate(job, run.settings, cwd=Path())), run.settings, final_summary)
    return Exit.OK


@_command(_FOR_READING)
def report(
    job: Job = None,
    *,
    form: Annotated[
        str,
        typer.Option("--format", metavar="text|json|markdown|html", help="[text]", show_default=False),
    ] = "text",
    output: Output = None,
    run: _Run,
) -> int:
    """Report what a job cost and how long it took."""
    render = _renderer(form)
    from batchrun.job import standing
    from batchrun.job.locate import locate

    document = render(standing.report(locate(job, run.settings, cwd=Path())))
    with data_output(output) as out:
        out.write(document)
    return Exit.OK


def _renderer(form: str) -> Callable[[Mapping[str, Any]], bytes]:
    if form == "json":
        from batchrun.report.metrics import dumps

        return lambda document: dumps(document) + b"\n"
    if form == "text":
        from batchrun.report.text import text

        return lambda document: text(document).encode()
    if form == "markdown":
        from batchrun.report.markdown import markdown

        return lambda document: markdown(document).encode()
    if form == "html":
        from batchrun.report.html import html

        return lambda document: html(document).encode()
    raise BatchrunError(f"--format: `{form[:60]}` is none of text, json, markdown, html", hint="did you mean `text`?")


@_command(_FOR_READING)
def results(
    job: Job = None,
    *,
    failed: Annotated[bool, typer.Option("--failed", help="The failed rows instead.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Succeeded and failed rows.")] = False,
    output: Output = None,
    run: _Run,
) -> int:
    """Write a job's results so far, in input order."""
    if failed and everything:
        raise BatchrunError("--failed and --all exclude each other", hint="--all has the failed rows too")
    from batchrun.job import standing
    from batchrun.job.locate import locate

    path = locate(job, run.settings, cwd=Path())
    with data_output(output) as out:
        standing.write_results(path, "all" if everything else "failed" if failed else "succeeded", out)
    return Exit.OK


@_command(_FOR_CHECK)
def check(source: Input, *, run: _Run) -> int:
    """Validate every line of INPUT. Nothing is sent."""
    from batchrun.job import commands
    from batchrun.terminal.wording import listing

    result = commands.check(source, run.settings, os.environ)
    run.console.bad_lines(result.bad, result.bad_count)
    document = {
        "rows": result.rows,
        "bad_lines": result.bad_count,
        "endpoints": result.endpoints,
        "models": result.models,
    }
    _tell(document, run.settings, listing)
    return result.exit_code


@_command(_FOR_ESTIMATE)
def estimate(
    source: Input,
    *,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run the real plan over the rows in virtual time, under these limits.")
    ] = False,
    run: _Run,
) -> int:
    """Estimate tokens, batches, calls, cost and duration of INPUT. Nothing is sent."""
    from batchrun.job.estimating import estimate as estimate_job
    from batchrun.terminal.wording import estimate_listing

    document = estimate_job(source, run.settings, os.environ, run.console, simulated=simulate)
    _tell(document, run.settings, estimate_listing)
    return Exit.OK


def _tell(document: Mapping[str, Any], settings: Settings, describe: Callable[[Mapping[str, Any]], str]) -> None:
    """Writes a document to stdout: one JSON object with ``--json``, else lines for people."""
    from batchrun.report.metrics import dumps

    text = dumps(document) + b"\n" if settings.json else describe(document).encode()
    with data_output(None) as out:
        out.write(text)


# ---------------------------------------------------------------- the program


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Run a JSONL file of LLM requests to the end: durable, adaptive, within budget."""
    if version:
        typer.echo(f"batchrun {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(Exit.USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; ``arguments`` are those of the process by default."""
    _open_standard_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(arguments, prog_name="batchrun", standalone_mode=False)
    except _UsageError as error:
        message, hint = _usage(error, arguments)
        _early_console(_log_format(arguments)).error(message, hint)
        code = Exit.USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = Exit.SIGINT
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        mute_stdout()
    gc.freeze()  # the process ends: spare the collector its last walk over all there is, 0.1 s after a long run
    return int(code or 0)


# typer's errors of usage have no public base class by name; BadParameter is one of them.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _usage(error: Any, arguments: Sequence[str]) -> tuple[str, str]:  # noqa: ANN401 - see above
    """Returns what to say of a mistyped command line, and a hint."""
    message = str(error.message or error.format_message()).strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    command = arguments[0] if arguments else ""
    known = {registered.name for registered in app.registered_commands}
    hint = f"see `batchrun {command} --help`" if command in known else "see `batchrun --help`"
    key = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    if not message.startswith("no such option"):
        return message, hint
    if key in {"api_key", "key", "token"}:
        return message, "a key is never an argument: export it, or name a 0600 file with --api-key-file"
    if command == "resume" and key in BY_KEY and BY_KEY[key].group == "streams":
        return message, "resume runs what was read; to read on: `batchrun submit - --flush-interval SECONDS --job DIR`"
    if command == "resume" and key in BY_KEY:
        return message, "a job keeps its requests as they were; start another: `batchrun submit INPUT --job DIR`"
    if near := nearest(key, BY_KEY):
        return message, f"did you mean --{BY_KEY[near].name}?"
    return message, hint


def _log_format(arguments: Sequence[str]) -> str | None:
    """Returns what ``--log-format`` says on a command line that could not be read."""
    words = " ".join(arguments).replace("--log-format=", "--log-format ").split()
    return words[words.index("--log-format") + 1] if "--log-format" in words[:-1] else None


def _early_console(log_format: str | None) -> StderrConsole:
    """Returns the console of errors that come before the settings are known."""
    from batchrun.terminal.console import StderrConsole

    chosen = log_format or os.environ.get("BATCHRUN_LOG_FORMAT")
    return StderrConsole(sys.stderr, os.environ, as_json=chosen == "json")


def _open_standard_streams() -> None:
    """Makes sure that no file of ours is ever taken for stdin, stdout or stderr that a parent has closed."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
