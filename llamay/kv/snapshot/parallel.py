"""Chunks shared out among threads: each reads or writes, digests and moves the rows of its own."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llamay.kv.context import Context
from llamay.mlx_kernels import ByteArray
from llamay.mlx_kernels.machine import usable_cores
from llamay.mlx_kernels.memory import HUGE_PAGE, anonymous_memory

MAX_THREADS = 4  # which memory, that bounds it all, does not feed more of


def cores() -> int:
    """How many threads are worth while for reading and verifying."""
    return min(MAX_THREADS, usable_cores())


def row_threads(context: Context) -> int:
    """How many threads may move rows of a context at once, and are worth while."""
    return min(MAX_THREADS, context.kernels.row_threads)


def page_buffer(size: int) -> ByteArray:
    """[size] uint8 in huge pages where there are any: the system copies to and from them faster.

    Raises MemoryError.
    """
    pages = -(-max(size, 1) // HUGE_PAGE)
    return np.frombuffer(anonymous_memory(pages * HUGE_PAGE), dtype=np.uint8)[:size]


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
