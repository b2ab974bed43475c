"""Measures a model on this machine: prefill, decode, fork, snapshot, restore.

Every figure is the median of some repetitions, each on fresh state.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llamay.engine import Engine
from llamay.kv import Context
from llamay.kv.snapshot import read_snapshot, write_snapshot
from llamay.mlx_kernels import Control
from llamay.model.decoder import Rows

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Tokens of the prompt and of each answer, forks made, sizes of batches, repetitions."""

    prompt: int = 2048
    gen: int = 32
    forks: int = 32
    batch: tuple[int, ...] = (1, 2, 4, 8)
    repetitions: int = 3


def run_bench(engine: Engine, options: BenchOptions) -> Iterator[tuple[str, Any]]:
    """(phase, figures) as each phase is done; seconds, bytes and counts.

    Phases: prefill, decode, batch (a list), fork, snapshot, restore, restore_speedup.
    """
    ids = [(7919 * i + 1) % engine.decoder.vocab_size for i in range(options.prompt)]
    prefill_s, branch = _median(options, lambda: _prefill(engine, ids), _close)
    yield "prefill", _rate(len(ids), prefill_s)
    decode_s, _ = _median(options, lambda: _decode(engine, [branch.fork()], options.gen), _nothing)
    yield "decode", _rate(options.gen, decode_s)
    yield "batch", list(_batches(engine, branch, options))
    yield "fork", _forks(engine, branch, options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.llamayctx"
        snapshot, restore, restore_s = _files(engine, branch, path, options)
    yield "snapshot", snapshot
    yield "restore", restore
    yield "restore_speedup", prefill_s / restore_s
    branch.close()


def _prefill(engine: Engine, ids: Sequence[int]) -> tuple[float, Context]:
    start = time.perf_counter()
    branch = engine.read(engine.cache.new_context(), ids)
    return time.perf_counter() - start, branch.context


def _decode(engine: Engine, contexts: Sequence[Context], steps: int) -> tuple[float, None]:
    """Greedy steps of all contexts together, which are then closed."""
    tokens = [index % engine.decoder.vocab_size for index in range(len(contexts))]
    start = time.perf_counter()
    for _ in range(steps):
        rows = [Rows(context, [token]) for context, token in zip(contexts, tokens, strict=True)]
        logits = engine.decoder.forward(engine.cache, rows, Control())
        tokens = [int(row.argmax()) for row in logits]
    seconds = time.perf_counter() - start
    _close_all(contexts)
    return seconds, None


def _batches(engine: Engine, base: Context, options: BenchOptions) -> Iterator[dict[str, Any]]:
    for size in options.batch:

        def decode(size: int = size) -> tuple[float, None]:
            return _decode(engine, [base.fork() for _ in range(size)], options.gen)

        seconds, _ = _median(options, decode, _nothing)
        yield {"branches": size, "tokens_per_s": size * options.gen / seconds}


def _forks(engine: Engine, base: Context, options: BenchOptions) -> dict[str, Any]:
    pages = engine.cache.live_pages

    def fork() -> tuple[float, list[Context]]:
        start = time.perf_counter()
        made = [base.fork() for _ in range(options.forks)]
        return time.perf_counter() - start, made

    seconds, made = _median(options, fork, _close_all)
    allocated = engine.cache.live_pages - pages
    _close_all(made)
    return {
        "count": options.forks,
        "seconds": seconds,
        "pages_allocated": allocated,
        "pages_a_copy_would_need": options.forks * len(base.page_ids),
    }


def _files(
    engine: Engine, base: Context, path: Path, options: BenchOptions
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Figures of snapshot and restore, and the seconds from a file to the next token's logits."""
    identity = engine.identity()
    seconds, infos = [], []
    for _ in range(options.repetitions):
        start = time.perf_counter()
        infos.append(write_snapshot(base, path, identity))
        seconds.append(time.perf_counter() - start - infos[-1].fsync_seconds)
    fsync_s = statistics.median(info.fsync_seconds for info in infos)
    size = infos[-1].bytes

    def restore() -> tuple[float, Context]:
        start = time.perf_counter()
        context = read_snapshot(engine.cache, path, identity).context
        return time.perf_counter() - start, context

    restore_s, context = _median(options, restore, _close)
    start = time.perf_counter()
    engine.resume(context)
    logits_s = time.perf_counter() - start
    context.close()
    snapshot = {"seconds": statistics.median(seconds), "bytes": size, "fsync_seconds": fsync_s}
    restored = {"seconds": restore_s, "bytes": size, "to_logits_seconds": restore_s + logits_s}
    return snapshot, restored, restore_s + logits_s


def _median(
    options: BenchOptions, run: Callable[[], tuple[float, T]], discard: Callable[[T], Any]
) -> tuple[float, T]:
    """Median seconds of some runs, and what the last one made; the others' are discarded."""
    seconds, made = run()
    times = [seconds]
    for _ in range(options.repetitions - 1):
        discard(made)
        seconds, made = run()
        times.append(seconds)
    return statistics.median(times), made


def _rate(tokens: int, seconds: float) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}


def _close(context: Context) -> None:
    context.close()


def _close_all(contexts: Sequence[Context]) -> None:
    for context in contexts:
        context.close()


def _nothing(made: object) -> None:
    return None
