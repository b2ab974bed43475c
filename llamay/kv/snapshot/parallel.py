"""Chunks shared out among threads: each reads or writes, digests and moves the rows of its own."""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llamay.kv.context import Context
from llamay.mlx_kernels import ByteArray

MAX_THREADS = 4  # which memory, that bounds it all, does not feed more of


def cores() -> int:
    """How many threads are worth while for reading and verifying."""
    return min(MAX_THREADS, os.cpu_count() or 1)


def row_threads(context: Context) -> int:
    """How many threads may move rows of a context at once, and are worth while."""
    return min(MAX_THREADS, context.kernels.row_threads)


def page_buffer(size: int) -> ByteArray:
    """[size] uint8 in large memory pages, which the system copies to and from fast."""
    large = 2 << 20
    length = max(-(-size // large), 1) * large
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)[:size]


class _Shared:
    """An iterator that several threads may take from."""

    def __init__(self, items: Iterable[int]) -> None:
        self._items, self._lock = iter(items), threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._items)

    def stop(self) -> None:
        """Nothing is left."""
        with self._lock:
            self._items = iter(())


def share_out(items: range, threads: int, work: Callable[[Iterator[int]], None]) -> None:
    """Runs `work` on several threads, the caller's among them, on items that they take in turn.

    Waits for all of them. Once one raises, no more items are given out, and the caller meets it.
    """
    shared = _Shared(items)

    def run() -> None:
        try:
            work(shared)
        except BaseException:
            shared.stop()
            raise

    others = min(threads, len(items)) - 1
    with ThreadPoolExecutor(max(others, 1), thread_name_prefix="snapshot") as pool:
        futures = [pool.submit(run) for _ in range(others)]
        run()
        for future in futures:
            future.result()
