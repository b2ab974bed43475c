"""Measures a model on this machine: prefill, decode, fork, snapshot, restore.

Every figure is the median of some repetitions, each on fresh state. What a GPU had to do is told
with prefill and decode, as means over the repetitions.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from llamay.engine import Branch, Engine
from llamay.mlx_kernels import Control, DeviceUse, StepLogits
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
    ids = [(7919 * i + 1) % engine.model.decoder.vocab_size for i in range(options.prompt)]
    device = _Device(engine)
    prefill_s, branch = _median(options, lambda: _prefill(engine, ids), _close)
    yield "prefill", _rate(len(ids), prefill_s) | device.use_since(options.repetitions)
    decode_s, _ = _median(options, lambda: _decode(engine, branch.fork(), options.gen), _nothing)
    use = device.use_since(options.repetitions * options.gen)
    yield "decode", _rate(options.gen, decode_s) | use
    yield "batch", list(_batches(engine, branch, options))
    yield "fork", _forks(engine, branch, options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.llamayctx"
        snapshot, restore, restore_s = _files(engine, branch, path, options)
    yield "snapshot", snapshot
    yield "restore", restore
    yield "restore_speedup", prefill_s / restore_s
    branch.close()


def _prefill(engine: Engine, ids: Sequence[int]) -> tuple[float, Branch]:
    engine.cache.clear_tree()
    start = time.perf_counter()
    branch = engine.prefill(ids)
    return time.perf_counter() - start, branch


def _decode(engine: Engine, branches: Sequence[Branch], steps: int) -> tuple[float, None]:
    """Greedy steps of all branches together, whatever ends an answer; they are then closed."""
    decoder = engine.model.decoder

    def decode() -> float:
        tokens = [index % decoder.vocab_size for index in range(len(branches))]
        start = time.perf_counter()
        for _ in range(steps):
            rows = [
                Rows(b.context, [token], best=1) for b, token in zip(branches, tokens, strict=True)
            ]
            found = decoder.step(engine.cache, rows, Control())
            tokens = [_likeliest(found, row) for row in range(len(branches))]
        return time.perf_counter() - start

    seconds = engine.call(decode)
    _close_all(branches)
    return seconds, None


def _likeliest(found: StepLogits, row: int) -> int:
    best = found.best_of(row)
    return int(best.ids[0] if best else found.logits[row].argmax())


class _Device:
    """Tells phases apart in what a GPU had to do."""

    def __init__(self, engine: Engine) -> None:
        self._use = engine.model.decoder.kernels.device_use
        self._before = DeviceUse()

    def use_since(self, runs: int) -> dict[str, Any]:
        """What each of so many runs took since the last call; nothing on the CPU."""
        if self._use is None:
            return {}
        before, self._before = self._before, replace(self._use)
        return {
            "device": {
                name: (getattr(self._use, name) - getattr(before, name)) / runs
                for name in ("dispatches", "submissions", "seconds")
            }
        }


def _batches(engine: Engine, base: Branch, options: BenchOptions) -> Iterator[dict[str, Any]]:
    for size in options.batch:

        def decode(size: int = size) -> tuple[float, None]:
            return _decode(engine, base.fork(size), options.gen)

        seconds, _ = _median(options, decode, _nothing)
        yield {"branches": size, "tokens_per_s": size * options.gen / seconds}


def _forks(engine: Engine, base: Branch, options: BenchOptions) -> dict[str, Any]:
    pages = engine.cache.live_pages

    def fork() -> tuple[float, list[Branch]]:
        start = time.perf_counter()
        made = base.fork(options.forks)
        return time.perf_counter() - start, made

    seconds, made = _median(options, fork, _close_all)
    allocated = engine.cache.live_pages - pages
    _close_all(made)
    return {
        "count": options.forks,
        "seconds": seconds,
        "pages_allocated": allocated,
        "pages_a_copy_would_need": options.forks * len(base.context.page_ids),
    }


def _files(
    engine: Engine, base: Branch, path: Path, options: BenchOptions
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Figures of snapshot and restore, and the seconds from a file to the next token's logits."""
    engine.model.identity()  # hashes the file, the first time
    seconds, infos = [], []
    for _ in range(options.repetitions):
        start = time.perf_counter()
        infos.append(base.save(path))
        seconds.append(time.perf_counter() - start - infos[-1].fsync_seconds)
    fsync_s = statistics.median(info.fsync_seconds for info in infos)
    size = infos[-1].bytes

    restores = [_restore(engine, path) for _ in range(options.repetitions)]
    restore_s, logits_s, row_s = (statistics.median(times) for times in zip(*restores, strict=True))
    snapshot = {"seconds": statistics.median(seconds), "bytes": size, "fsync_seconds": fsync_s}
    figures = {
        "seconds": restore_s,
        "bytes": size,
        "to_logits_seconds": logits_s,
        "query_row_seconds": row_s,
    }
    return snapshot, figures, logits_s


def _restore(engine: Engine, path: Path) -> tuple[float, float, float]:
    """Seconds from the file to a context, to its last logits, and of computing these again.

    The file has them, as after every turn; a context that ends elsewhere needs the third too.
    """

    def compute() -> None:
        engine.model.decoder.last_logits(engine.cache, context)

    start = time.perf_counter()
    restored = engine.restore(path)
    read, context = time.perf_counter(), restored.context
    if context.logits is None:
        engine.call(compute)
    ready = time.perf_counter()
    engine.call(compute)
    end = time.perf_counter()
    restored.close()
    return read - start, ready - start, end - ready


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


def _close(branch: Branch) -> None:
    branch.close()


def _close_all(branches: Sequence[Branch]) -> None:
    for branch in branches:
        branch.close()


def _nothing(made: object) -> None:
    return None
