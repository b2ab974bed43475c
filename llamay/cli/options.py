"""Flags that several commands share."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llamay.cli.output import progress_bar
from llamay.formats import KVPrecision

if TYPE_CHECKING:
    from llamay.engine import Engine

Command = TypeVar("Command", bound=Callable[..., Any])

MODEL_FLAGS = (
    click.option("-m", "--model", default=None, help="Path of a .gguf, or a name [smollm2:135m]."),
    click.option("--device", type=click.Choice(["auto", "cpu", "reference"]), default="auto"),
    click.option("--threads", type=click.IntRange(1, 1024), help="[the processor's cores]"),
    click.option(
        "--kv",
        type=click.Choice([precision.value for precision in KVPrecision]),
        default="f32",
        show_default=True,
        help="Precision of keys and values.",
    ),
    click.option("--page-tokens", type=int, default=64, show_default=True),
    click.option("--ctx-size", type=int, help="Most tokens in a context [the model's own]."),
)

SAMPLING_FLAGS = (
    click.option("--temperature", type=float, default=0.8, show_default=True, help="0: greedy."),
    click.option("--top-k", type=int, default=40, show_default=True, help="0 keeps all."),
    click.option("--top-p", type=float, default=0.95, show_default=True),
    click.option("--min-p", type=float, default=0.05, show_default=True),
    click.option("--repeat-penalty", type=float, default=1.0, show_default=True, help="1 is off."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--max-tokens", type=int, help="[until the model stops or the context is full]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="Ends the answer; repeatable."),
)


def flags(*groups: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    """Adds groups of flags to a command, in the order given."""

    def decorate(command: Command) -> Command:
        for group in reversed(groups):
            for option in reversed(group):
                command = option(command)
        return command

    return decorate


def load_engine(
    model: str | None,
    device: str,
    threads: int | None,
    kv: str,
    page_tokens: int,
    ctx_size: int | None,
) -> "Engine":
    """The engine for the model flags, with a bar on the terminal if something is fetched."""
    from llamay.engine import Engine
    from llamay.hub import DEFAULT_MODEL

    with progress_bar() as progress:
        return Engine.load(
            model or DEFAULT_MODEL,
            device=device,
            threads=threads,
            page_tokens=page_tokens,
            precision=KVPrecision(kv),
            context_size=ctx_size,
            progress=progress,
        )
