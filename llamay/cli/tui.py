"""`llamay` without a command: the terminal interface; where there is no terminal, the chat."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamay.cli.chat import chat
from llamay.cli.options import ModelOptions, model_flags, sampling_flags

if TYPE_CHECKING:
    from llamay.sampling import SamplingParams
    from llamay.session import Settings


@click.command("llamay")
@click.option("--session", metavar="NAME", help="Opens or begins a session [the one used last].")
@click.option("--plain", is_flag=True, help="A chat line by line, which is not saved.")
@click.option(
    "--context-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="32 random bytes that encrypt a session.",
)
@sampling_flags
@model_flags
@click.pass_context
def command(
    ctx: click.Context,
    params: "SamplingParams",
    options: ModelOptions,
    session: str | None,
    plain: bool,
    context_key: Path | None,
) -> None:
    """Explore conversations as a tree. Without a terminal, this is a chat line by line."""
    # The interface draws on stderr.
    if plain or not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        chat(params, options)
        return
    from llamay.hub.paths import data_dir
    from llamay.kv.snapshot import Key
    from llamay.tui import EngineHost, run

    host = EngineHost(
        data_dir(),
        options.load_as,
        model=options.name,
        settings=_settings(params),
        key=Key.from_file(context_key) if context_key else None,
    )
    if code := run(host, session):
        ctx.exit(code)


def _settings(params: "SamplingParams") -> "Settings":
    """What was asked for in other than the usual way, for new sessions."""
    from llamay.sampling import SamplingParams
    from llamay.session import Settings

    usual = SamplingParams()
    names = (field.name for field in fields(SamplingParams))
    given = {name: getattr(params, name) for name in names}
    return Settings(**{k: v for k, v in given.items() if v != getattr(usual, k)})
