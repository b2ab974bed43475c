"""The command line: finds the command, runs it, and turns errors into one sentence and a code.

Exit codes: 0 done, 1 a failed operation, 2 wrong use, 130 after Ctrl+C, 141 when the reader of the
output went away. A command lives in a module of its own, as its attribute `command`, and is
imported when it is asked for, so that `llamay --help` stays fast.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import click

from llamay.cli.output import fail
from llamay.errors import LlamayError, UsageError

FAILED, WRONG_USE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

# Command -> (module, line for the list of commands)
COMMANDS = {
    "generate": ("llamay.cli.generate", "Stream a completion of a prompt."),
    "ctx": ("llamay.cli.ctx", "Build, fork, show, resume and convert contexts in files."),
    "sessions": ("llamay.cli.sessions", "List, show, export and delete saved sessions."),
    "verify": ("llamay.cli.verify", "Check that contexts continue exactly."),
    "bench": ("llamay.cli.bench", "Measure prefill, decode, fork, snapshot and restore."),
    "models": ("llamay.cli.models", "List the models on this machine."),
    "pull": ("llamay.cli.pull", "Fetch a model."),
}
START = "llamay.cli.tui"
GROUP_FLAGS = ("-h", "--help", "--version", "--debug")  # others, without a command, are START's


@dataclass
class Settings:
    """What the flags that every command has ask for."""

    debug: bool = False


class _Commands(click.Group):
    """The commands of the table above, imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _load(COMMANDS[cmd_name][0]) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line on `arguments`, by default the process's, and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A locale that cannot express a character must not end the program.
            stream.reconfigure(errors="backslashreplace")
    settings = Settings()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        starts = arguments and arguments[0].startswith("-") and arguments[0] not in GROUP_FLAGS
        root = _load(START) if starts else _group
        with root.make_context("llamay", list(arguments), obj=settings) as ctx:
            root.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        return fail(_usage(error), error.exit_code)
    except LlamayError as error:
        _show_traceback(settings)
        return fail(str(error), WRONG_USE if isinstance(error, UsageError) else FAILED)
    except (click.Abort, KeyboardInterrupt):
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after the terminal's ^C
        return INTERRUPTED
    except BrokenPipeError:
        # Whatever is still buffered would fail again when the interpreter closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except MemoryError as error:
        _show_traceback(settings)
        detail = f" ({error})" if str(error) else ""
        return fail(f"memory ran out{detail}; close other programs, or use a smaller model", FAILED)
    except OSError as error:
        _show_traceback(settings)
        place = f"{error.filename}: " if error.filename else "reading or writing failed: "
        return fail(f"{place}{error.strerror or error}", FAILED)
    except Exception as error:
        _show_traceback(settings)
        hint = "" if settings.debug else "; --debug shows the traceback"
        return fail(f"unexpected {type(error).__name__}: {error}{hint}", FAILED)
    return 0


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Settings).debug = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_debug,
        help="Show the traceback of an error.",
    )


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"llamay {version('llamay')}")
        ctx.exit()


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version.",
)
@click.pass_context
def _group(ctx: click.Context) -> None:
    """Language models on this machine, for people who think in branches.

    Without a command, the terminal interface starts, or a plain chat where there is no terminal;
    `llamay --plain --help` lists its flags.
    """
    if ctx.invoked_subcommand is None:
        start = _load(START)
        with start.make_context("llamay", [], parent=ctx) as started:
            start.invoke(started)


def _load(module: str) -> click.Command:
    command = importlib.import_module(module).command
    assert isinstance(command, click.Command), f"{module}.command is no command"
    if all(param.name != "debug" for param in command.params):
        command.params.append(_debug_option())
    return command


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message}; see `{error.ctx.command_path} --help`"
    return message


def _show_traceback(settings: Settings) -> None:
    if settings.debug:
        traceback.print_exc()
