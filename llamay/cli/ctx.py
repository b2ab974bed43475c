"""`llamay ctx`: contexts as files: build, fork, show, resume, convert."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamay.cli.answers import prompt_text, read_prompt, stream_answers
from llamay.cli.options import ModelOptions, key_flag, model_flags, read_key, sampling_flags
from llamay.cli.output import format_bytes, format_time, print_json, printable, say
from llamay.errors import UsageError
from llamay.formats import KVPrecision

if TYPE_CHECKING:
    from llamay.engine import Branch, Engine
    from llamay.kv.snapshot import Encryption, Header, SnapshotInfo
    from llamay.sampling import SamplingParams

_PATH = click.Path(path_type=Path)
_PRECISIONS = click.Choice([precision.value for precision in KVPrecision])
_json_flag = click.option("--json", "as_json", is_flag=True, help="Print an object.")
_input_flag = click.option("-i", "--input", "source", type=_PATH, required=True)


@click.group("ctx")
def command() -> None:
    """Contexts as files: build, fork, show, resume, convert."""


@command.command("build")
@click.option("-p", "--prompt", help="The text to read.")
@click.option("--file", "file", type=_PATH, help="Text that goes before -p.")
@click.option("-o", "--output", "target", type=_PATH, required=True)
@key_flag
@_json_flag
@model_flags
def build(
    prompt: str | None,
    file: Path | None,
    target: Path,
    context_key: Path | None,
    as_json: bool,
    options: ModelOptions,
) -> None:
    """Read a text and save the context."""
    text, key = prompt_text(prompt, file), read_key(context_key)
    engine = options.load(identified=True)
    ids = engine.model.encode_prompt(text)
    start = time.perf_counter()
    branch = read_prompt(engine, ids)
    prefill_s = time.perf_counter() - start
    saved = branch.save(target, key=key)
    if as_json:
        figures = {"tokens": len(ids), "prefill_s": prefill_s, "save_s": saved.seconds}
        print_json({"path": str(target), "bytes": saved.bytes, **figures})
        return
    click.echo(f"prefilled {len(ids)} tokens in {format_time(prefill_s)}")
    _print_saved(target, saved)


@command.command("fork")
@_input_flag
@click.option("-n", "count", type=click.IntRange(1, 2**16), default=8, show_default=True)
@key_flag
@_json_flag
@model_flags
def fork(
    source: Path,
    count: int,
    context_key: Path | None,
    as_json: bool,
    options: ModelOptions,
) -> None:
    """Restore a context and fork it."""
    engine = options.load(identified=True)
    branch = _restore(engine, source, context_key)
    before, pages = engine.cache.live_pages, len(branch.context.page_ids)
    start = time.perf_counter()
    branches = branch.fork(count)
    seconds = time.perf_counter() - start
    page_bytes = engine.cache.store.page_bytes
    held, copied = engine.cache.live_pages * page_bytes, (count + 1) * pages * page_bytes
    figures = {
        "source": str(source),
        "tokens": branch.length,
        "pages": pages,
        "branches": len(branches),
        "seconds": seconds,
        "pages_allocated": engine.cache.live_pages - before,
        "pages_a_copy_would_need": count * pages,
        "memory_bytes": held,
        "copy_memory_bytes": copied,
    }
    if as_json:
        print_json(figures)
        return
    _print_pairs(
        ("source", f"{source}, {branch.length} tokens, {pages} pages"),
        ("branches", f"{count} in {format_time(seconds)} ({format_time(seconds / count)} each)"),
        ("pages allocated", str(figures["pages_allocated"])),
        ("pages a copy would need", str(figures["pages_a_copy_would_need"])),
        ("memory held", f"{format_bytes(held)} (copies would hold {format_bytes(copied)})"),
    )


@command.command("show")
@click.argument("source", type=_PATH)
@key_flag
@_json_flag
@click.pass_context
def show(ctx: click.Context, source: Path, context_key: Path | None, as_json: bool) -> None:
    """Show a file's header and check its bytes; needs no model. Exits with 1 if it is damaged."""
    from llamay.kv.snapshot import show_snapshot

    shown = show_snapshot(source, key=read_key(context_key))
    fields = {"path": str(source), "bytes": shown.bytes, **_header_fields(shown.header)}
    checks = [
        {"check": check.name, "result": check.result, "detail": check.detail}
        for check in shown.checks
    ]
    if as_json:
        print_json({**fields, "checks": checks})
    else:
        _print_pairs(*((name.replace("_", " "), str(value)) for name, value in fields.items()))
        _print_pairs(*((row["check"], f"{row['result']}: {row['detail']}") for row in checks))
    if any(check["result"] == "fail" for check in checks):
        ctx.exit(1)


@command.command("resume")
@_input_flag
@click.option("-p", "--prompt", help="Text to read before going on.")
@key_flag
@_json_flag
@sampling_flags
@model_flags
def resume(
    source: Path,
    prompt: str | None,
    context_key: Path | None,
    as_json: bool,
    params: "SamplingParams",
    options: ModelOptions,
) -> None:
    """Continue from a file, reading more text first if there is any; nothing is read again."""
    engine = options.load(identified=True)
    start = time.perf_counter()
    branch = _restore(engine, source, context_key)
    restored = branch.length
    say(f"resumed {restored} tokens in {format_time(time.perf_counter() - start)}")
    if prompt:
        branch = read_prompt(engine, engine.model.tokenizer.encode(prompt, continues=True), branch)
    start = time.perf_counter()
    (choice,) = stream_answers(engine, [branch], [params], show=not as_json)
    if as_json:
        timings = {"decode_s": time.perf_counter() - start, "decode_tokens": len(choice.ids)}
        print_json(
            {
                "model": options.name,
                "cached_tokens": restored,
                "choices": [vars(choice)],
                "timings": timings,
            }
        )


@command.command("convert")
@click.argument("source", type=_PATH)
@click.option("-o", "--output", "target", type=_PATH, required=True)
@click.option("--kv", type=_PRECISIONS, help="Precision of the new file [as it is].")
@click.option("--context-key", type=_PATH, metavar="FILE", help="Opens the old file.")
@click.option("--output-key", type=_PATH, metavar="FILE", help="Encrypts the new file [none].")
@_json_flag
def convert(
    source: Path,
    target: Path,
    kv: str | None,
    context_key: Path | None,
    output_key: Path | None,
    as_json: bool,
) -> None:
    """Write a file again in another precision, encrypted or not; needs no model."""
    from llamay.kv.snapshot import convert_snapshot

    saved = convert_snapshot(
        source,
        target,
        kv=KVPrecision(kv) if kv else None,
        key=read_key(context_key),
        target_key=read_key(output_key),
    )
    if context_key and not output_key:
        say(f"{target}: not encrypted; --output-key FILE encrypts it")
    if as_json:
        print_json({"path": str(target), "bytes": saved.bytes, "seconds": saved.seconds})
        return
    _print_saved(target, saved)


def _restore(engine: "Engine", source: Path, context_key: Path | None) -> "Branch":
    restored = engine.restored(source, key=read_key(context_key))
    if restored.warning:
        say(f"{source}: {restored.warning}")
    if restored.context.length == 0:
        raise UsageError(f"{source}: expected a context with tokens, found an empty one")
    return engine.branch(restored.context)


def _header_fields(header: "Header") -> dict[str, Any]:
    return {
        "version": header.version,
        "llamay": header.llamay,
        "architecture": header.architecture,
        "layers": header.layers,
        "kv_heads": header.kv_heads,
        "head_dim": header.head_dim,
        "vocab_size": header.vocab_size,
        "layout_sha256": header.layout_sha256,
        "weights_sha256": header.weights_sha256,
        "numerics": header.numerics,
        "cache_precision": header.cache_precision.value,
        "precision": header.precision.value,
        "lossless": header.lossless,
        "tokens": header.tokens,
        "logits": header.logits > 0,
        "owner": header.owner,
        "marking": header.marking,
        "encrypted": header.encryption is not None,
        "encryption": _encryption_fields(header.encryption) if header.encryption else None,
        "chunk_positions": header.chunk_positions,
        "start": header.start,
        "parent": header.parent,
    }


def _encryption_fields(encryption: "Encryption") -> dict[str, Any]:
    fields = asdict(encryption)
    return {k: v.hex() if isinstance(v, bytes) else v for k, v in fields.items()}


def _print_saved(target: Path, saved: "SnapshotInfo") -> None:
    size, time_ = format_bytes(saved.bytes), format_time(saved.seconds)
    click.echo(f"saved {printable(str(target))} ({size}) in {time_}")


def _print_pairs(*pairs: tuple[str, str]) -> None:
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        click.echo(f"{name.ljust(width)}   {printable(value)}")
