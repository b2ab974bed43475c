"""Flags that several commands share, gathered into one argument each."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llamay.cli.output import progress_bar
from llamay.formats import KVPrecision

if TYPE_CHECKING:
    from llamay.engine import Engine
    from llamay.hub import Progress
    from llamay.kv.snapshot import Key
    from llamay.sampling import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class ByteCount(click.ParamType[int]):
    """A size such as 512M or 8G, in binary units."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d{1,18})([KMGT]?)(?:i?B)?", str(value), re.I | re.A)
        if match is None:
            self.fail(f"expected a size such as 512M or 8G, found {value!r}", param, ctx)
        return int(match[1]) * _UNITS[match[2].upper()]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the model flags ask for; names are the flags'."""

    model: str | None
    device: str
    threads: int | None
    kv: str
    page_tokens: int
    ctx_size: int | None
    ctx_mem_budget: int | None

    @property
    def name(self) -> str:
        """The model as the user named it."""
        from llamay.hub import DEFAULT_MODEL

        return self.model or DEFAULT_MODEL

    def load(self, *, identified: bool = False) -> "Engine":
        """Opens the model, with a bar on the terminal if something is fetched or hashed.

        identified: whether contexts are saved or restored, which its file is hashed for
        """
        with progress_bar() as progress:
            engine = self.load_as(self.name, progress)
            if identified:
                engine.model.identity(progress)
            return engine

    def load_as(self, name: str, progress: "Progress") -> "Engine":
        """Opens another model by these flags."""
        from llamay.engine import Engine

        return Engine.load(
            name,
            device=self.device,
            threads=self.threads,
            page_tokens=self.page_tokens,
            precision=KVPrecision(self.kv),
            context_size=self.ctx_size,
            budget_bytes=self.ctx_mem_budget,
            progress=progress,
        )


_MODEL_FLAGS = (
    click.option("-m", "--model", default=None, help="Path of a .gguf, or a name [smollm2:135m]."),
    click.option(
        "--device", type=click.Choice(["auto", "metal", "cpu", "reference"]), default="auto"
    ),
    click.option("--threads", type=click.IntRange(1, 1024), help="[the usable cores]"),
    click.option(
        "--kv",
        type=click.Choice([precision.value for precision in KVPrecision]),
        default="f32",
        show_default=True,
        help="Precision of keys and values.",
    ),
    click.option("--page-tokens", type=int, default=64, show_default=True),
    click.option("--ctx-size", type=int, help="Most tokens in a context [the model's own]."),
    click.option(
        "--ctx-mem-budget",
        type=ByteCount(),
        help="Most memory for keys and values [half of what this process may use].",
    ),
)

_SAMPLING_FLAGS = (
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


key_flag = click.option(
    "--context-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="32 random bytes: encrypts what is saved, opens what is encrypted.",
)


def read_key(path: Path | None) -> "Key | None":
    """The key in a file, None for none. Raises SnapshotKeyError if the file holds no key."""
    from llamay.kv.snapshot import Key

    return Key.from_file(path) if path else None


def model_flags(command: Command) -> Command:
    """Gives a command the model flags, as one argument `options: ModelOptions`."""
    return _gathered(command, _MODEL_FLAGS, "options", ModelOptions)


def sampling_flags(command: Command) -> Command:
    """Gives a command the sampling flags, as one argument `params: SamplingParams`."""
    return _gathered(command, _SAMPLING_FLAGS, "params", _sampling_params)


def sampling_values(command: Command) -> Command:
    """Gives a command the sampling flags, as one argument `sampling: dict[str, Any]`."""
    return _gathered(command, _SAMPLING_FLAGS, "sampling", dict)


def _sampling_params(**values: Any) -> "SamplingParams":
    from llamay.sampling import SamplingParams

    return SamplingParams(**values)


def _gathered(
    command: Command,
    options: tuple[Callable[[Any], Any], ...],
    argument: str,
    gather: Callable[..., Any],
) -> Command:
    """`command` with these options, whose values `gather` turns into its one `argument`."""
    before = len(getattr(command, "__click_params__", []))

    @functools.wraps(command)
    def gathering(**values: Any) -> Any:
        own = {name: values.pop(name) for name in names}
        return command(**values, **{argument: gather(**own)})

    for option in reversed(options):
        option(gathering)
    params: list[click.Parameter] = gathering.__click_params__  # type: ignore[attr-defined]
    names = [str(param.name) for param in params[before:]]
    return gathering  # type: ignore[return-value]
