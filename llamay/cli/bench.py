"""`llamay bench`: figures of a model on this machine."""

from typing import TYPE_CHECKING, Any

import click

from llamay.cli.options import ModelOptions, model_flags
from llamay.cli.output import format_bytes, format_time, print_json, print_table, printable
from llamay.errors import UsageError

if TYPE_CHECKING:
    from llamay.engine import Engine


@click.command("bench")
@click.option("--prompt", type=click.IntRange(1, 2**20), default=2048, show_default=True)
@click.option("--gen", type=click.IntRange(1, 2**16), default=32, show_default=True)
@click.option("--forks", type=click.IntRange(1, 2**16), default=32, show_default=True)
@click.option("--batch", default="1,2,4,8", show_default=True, help="Branches decoded together.")
@click.option("--reps", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print an object.")
@model_flags
def command(
    prompt: int, gen: int, forks: int, batch: str, reps: int, as_json: bool, options: ModelOptions
) -> None:
    """Measure prefill, decode, fork, snapshot and restore; medians of some repetitions."""
    from llamay.bench import BenchOptions, run_bench

    plan = BenchOptions(prompt, gen, forks, _sizes(batch), reps)
    engine = options.load(identified=True)
    if prompt + gen > engine.context_size:
        raise UsageError(
            f"prompt and gen: expected up to {engine.context_size} tokens together, "
            f"found {prompt} + {gen}"
        )
    header = _header(engine)
    if not as_json:
        line = " · ".join(f"{name} {value}" for name, value in header.items())
        click.echo(f"{printable(line)}\n")
    figures = dict(run_bench(engine, plan))
    if as_json:
        print_json({"header": header, **figures})
        return
    print_table(("phase", "rate", "median", "note"), _table(figures))
    speedup = figures["restore_speedup"]
    click.echo(
        f"\nRestoring {prompt} tokens is {speedup:.1f} times faster than reading them again."
    )


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > 1024:
        raise UsageError(f"batch: expected counts from 1 to 1024 such as 1,2,4, found {text!r}")
    return sizes


def _header(engine: "Engine") -> dict[str, Any]:
    from importlib.metadata import version

    kernels = engine.model.decoder.kernels
    return {
        "version": version("llamay"),
        "model": engine.model.name,
        "threads": kernels.threads,
        "kernels": kernels.name,
        "kv": engine.cache.store.layout.precision.value,
        "weights_bytes": engine.model.decoder.weights_bytes,
    }


def _table(figures: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    fork, snapshot, restore = figures["fork"], figures["snapshot"], figures["restore"]
    rows = [
        (
            name,
            f"{figures[name]['tokens_per_s']:.1f} tok/s",
            format_time(figures[name]["seconds"]),
            _device(figures[name].get("device"), per_token=name == "decode"),
        )
        for name in ("prefill", "decode")
    ]
    rows += [
        (f"{row['branches']} branches", f"{row['tokens_per_s']:.1f} tok/s", "", "all together")
        for row in figures["batch"]
    ]
    rows.append(
        (
            f"fork x{fork['count']}",
            "",
            format_time(fork["seconds"]),
            f"{fork['pages_allocated']} pages allocated "
            f"(a copy would be {fork['pages_a_copy_would_need']})",
        )
    )
    rows.append(
        (
            "snapshot",
            _bandwidth(snapshot),
            format_time(snapshot["seconds"]),
            f"{format_bytes(snapshot['bytes'])}, "
            f"and fsync {format_time(snapshot['fsync_seconds'])}",
        )
    )
    rows.append(
        (
            "restore",
            _bandwidth(restore),
            format_time(restore["seconds"]),
            f"{format_time(restore['to_logits_seconds'])} to the next token's logits, "
            f"against {format_time(figures['prefill']['seconds'])} to prefill",
        )
    )
    return rows


def _device(use: dict[str, float] | None, per_token: bool) -> str:
    if use is None:
        return ""
    return (
        f"{use['dispatches']:.0f} dispatches, {use['submissions']:.0f} submissions, "
        f"{format_time(use['seconds'])} in kernels" + per_token * ", per token"
    )


def _bandwidth(figures: dict[str, Any]) -> str:
    return f"{figures['bytes'] / figures['seconds'] / 1e9:.1f} GB/s"
