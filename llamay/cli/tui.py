"""`llamay` without a command: the terminal interface; where there is no terminal, the chat."""

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from llamay.cli.options import ModelOptions, key_flag, model_flags, read_key, sampling_values


@click.command("llamay")
@click.option("--session", metavar="NAME", help="Opens or begins a session [the one used last].")
@click.option("--plain", is_flag=True, help="A chat line by line, which is not saved.")
@key_flag
@sampling_values
@model_flags
@click.pass_context
def command(
    ctx: click.Context,
    sampling: dict[str, Any],
    options: ModelOptions,
    session: str | None,
    plain: bool,
    context_key: Path | None,
) -> None:
    """Explore conversations as a tree. Without a terminal, this is a chat line by line."""
    # The interface draws on stderr.
    if plain or not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        from llamay.cli.chat import chat
        from llamay.sampling import SamplingParams

        chat(SamplingParams(**sampling), options)
        return
    if code := _run(options, session, _given(ctx, sampling), context_key):
        ctx.exit(code)


def _given(ctx: click.Context, sampling: dict[str, Any]) -> dict[str, Any]:
    """The flags that the user set. Raises UsageError for a value out of range."""
    given = {
        name: value
        for name, value in sampling.items()
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if given:
        from llamay.sampling import SamplingParams

        SamplingParams(**given)
    return given


def _run(
    options: ModelOptions, session: str | None, settings: dict[str, Any], key_file: Path | None
) -> int:
    from llamay.hub.paths import data_dir
    from llamay.tui import EngineHost, run

    host = EngineHost(
        data_dir(),
        options.load_as,
        model=options.name,
        settings=settings,
        key=read_key(key_file),
    )
    return run(host, session)
