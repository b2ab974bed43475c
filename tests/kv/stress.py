"""Snapshots, segments and restores of CPU pages from many threads, for a build with a sanitizer.

    python -m tests.kv.stress

Fails if a context that comes back differs from what was written.
"""

import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from llamay.formats import KVLayout, KVPrecision
from llamay.kv import Cache, Context
from llamay.kv.snapshot import (
    Identity,
    extend_from_segments,
    format,
    read_snapshot,
    write_segment,
    write_snapshot,
)
from llamay.mlx_kernels import load_kernels
from tests.kv.row_kernels import encode, f32_rows

VOCAB, TOKENS = 50, [(7 * i) % 50 for i in range(150)]
IDENTITY = Identity("made-up", VOCAB, "1a" * 32, "2b" * 32)
THREADS, ROUNDS = 4, 12


def write(context: Context, rows: np.ndarray, tokens: list[int]) -> None:
    """A step that appends these rows."""
    context.reserve(len(tokens))
    with context.in_use():
        context.import_rows(context.length, rows)
    context.commit(tokens)


def assert_holds(context: Context, rows: np.ndarray) -> None:
    with context.in_use():
        assert np.array_equal(context.export_rows(0, context.length), rows[: context.length])


def work(cache: Cache, base: Context, rows: np.ndarray, folder: Path, seed: int) -> None:
    """Writes a fork in parts, reads it back onto other forks, and rewrites what is shared."""
    rng, path = random.Random(seed), folder / str(seed)
    for _ in range(ROUNDS):
        fork, cut = base.fork(), rng.randrange(1, len(TOKENS))
        write_snapshot(fork, path, IDENTITY, kv=rng.choice((None, cache.store.layout.precision)))
        restored = read_snapshot(cache, path, IDENTITY).context
        assert_holds(restored, rows)
        parts = [folder / f"{seed}-{part}" for part in "ab"]
        write_segment(parts[0], IDENTITY, fork, 0, cut)
        write_segment(parts[1], IDENTITY, fork, cut, len(TOKENS), parent="a")
        restored.truncate(rng.randrange(len(TOKENS)))
        other = restored.fork()
        extend_from_segments(cache, other, parts, IDENTITY, TOKENS)
        assert_holds(other, rows)
        start = rng.randrange(len(TOKENS))
        fork.truncate(start)
        write(fork, rows[: len(rows) - start], TOKENS[start:])
        for context in (fork, restored, other):
            context.close()


def main() -> None:
    format.CHUNK_BYTES = 1  # 16 positions a chunk
    for precision in KVPrecision:
        layout = KVLayout(2, 1, 16, 32, precision)
        cache = Cache(load_kernels("cpu", 4), layout, numerics="cpu", pages_per_slab=3)
        rows = encode(f32_rows(len(TOKENS), layout), precision)
        base = cache.new_context()
        write(base, rows, TOKENS)
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(THREADS) as threads:
            jobs = [
                threads.submit(work, cache, base, rows, Path(folder), seed)
                for seed in range(THREADS)
            ]
            for job in jobs:
                job.result()
        assert_holds(base, rows)
        base.close()
        cache.check()
        assert cache.live_pages == 0
    print(f"{THREADS} threads wrote and read {ROUNDS} rounds in each precision")


if __name__ == "__main__":
    main()
