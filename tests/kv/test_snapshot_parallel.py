"""Chunks shared out among threads."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from llamay.kv import Context
from llamay.kv.snapshot.parallel import page_buffer, row_threads, share_out


@pytest.mark.parametrize(("count", "threads", "used"), [(0, 4, 1), (1, 4, 1), (9, 1, 1), (9, 3, 3)])
def test_every_item_is_worked_on_once_by_the_caller_and_its_helpers(
    count: int, threads: int, used: int
) -> None:
    seen: list[tuple[int, int]] = []
    together = threading.Barrier(used)

    def work(items: Iterator[int]) -> None:
        together.wait(10)
        seen.append((-1, threading.get_ident()))
        seen.extend((item, threading.get_ident()) for item in items)

    share_out(range(1, count + 1), threads, work)
    assert sorted(item for item, _ in seen) == [-1] * used + list(range(1, count + 1))
    workers = {thread for _, thread in seen}
    assert len(workers) == used
    assert threading.get_ident() in workers


@pytest.mark.parametrize("by_caller", [True, False])
def test_the_first_failure_reaches_the_caller_and_ends_the_work(by_caller: bool) -> None:
    caller, failed, done = threading.get_ident(), threading.Event(), []
    both = threading.Barrier(2)

    def work(items: Iterator[int]) -> None:
        next(items)
        both.wait(10)
        if (threading.get_ident() == caller) == by_caller:
            failed.set()
            raise KeyError("chunk")
        assert failed.wait(10)
        for item in items:
            done.append(item)
            threading.Event().wait(0.005)

    with pytest.raises(KeyError, match="chunk"):
        share_out(range(10_000), 2, work)
    assert len(done) < 100


def test_no_more_threads_move_rows_than_may_or_than_are_worth_while() -> None:
    def context(threads: int) -> Context:
        return cast(Context, SimpleNamespace(kernels=SimpleNamespace(row_threads=threads)))

    assert [row_threads(context(count)) for count in (1, 2, 4, 16)] == [1, 2, 4, 4]


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_buffers_begin_at_a_memory_page(size: int) -> None:
    buffer = page_buffer(size)
    assert len(buffer) == size
    assert buffer.ctypes.data % 4096 == 0
    buffer[:] = 7
