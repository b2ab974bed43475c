"""Snapshots and restores beside threads that rewrite the shared prefix."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from llamay.errors import ContextBusyError
from llamay.kv import Cache, Context
from llamay.kv.snapshot import format, read_snapshot, write_snapshot
from tests.kv.row_kernels import (
    IDENTITY,
    RowKernels,
    append,
    fill,
    new_cache,
    rows_of,
    state_of,
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "GROUP", 1)
    monkeypatch.setattr(format, "CHUNK_BYTES", 300)  # 2 positions


def rewrite(cache: Cache, context: Context, rng: random.Random) -> None:
    """A step of a decode that goes back into what it shares, and on from there."""
    context.truncate(rng.randrange(context.length + 1))
    append(cache, context, [rng.randrange(50) for _ in range(rng.randrange(1, 9))], salt=2)


def test_snapshot_and_restore_while_forks_rewrite_the_prefix(tmp_path: Path) -> None:
    cache = new_cache()
    base = fill(cache, list(range(30)))
    expected = rows_of(cache, base)
    forks = [base.fork() for _ in range(3)]
    done, start = Event(), Barrier(5)

    def decode(index: int) -> int:
        rng, steps = random.Random(index), 0
        start.wait()
        while not done.is_set():
            rewrite(cache, forks[index], rng)
            steps += 1
        return steps

    def store(index: int) -> int:
        path, same = tmp_path / f"{index}", 0
        own = base.fork()
        start.wait()
        for _ in range(30):
            write_snapshot(own, path, IDENTITY)
            again = read_snapshot(cache, path, IDENTITY).context
            same += rows_of(cache, again) == expected
            again.close()
        own.close()
        return same

    with ThreadPoolExecutor(5) as threads:
        writers = [threads.submit(decode, index) for index in range(3)]
        stores = [threads.submit(store, index) for index in range(2)]
        try:
            assert [future.result() for future in stores] == [30, 30]
        finally:
            done.set()
        assert all(future.result() > 0 for future in writers)
    assert rows_of(cache, base) == expected
    for context in [base, *forks]:
        context.close()
    cache.check()
    assert cache.live_pages == 0


def test_context_being_written_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    context = fill(cache, list(range(10)))
    exporting, go_on = Event(), Event()
    real = RowKernels.export_rows

    def export(*args: object, **kwargs: object) -> object:
        exporting.set()
        assert go_on.wait(10)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(RowKernels, "export_rows", export)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write_snapshot, context, tmp_path / "x", IDENTITY)
        assert exporting.wait(10)
        refused = 0
        for act in (
            context.fork,
            context.close,
            lambda: context.reserve(1),
            lambda: cache.retain(context),
            lambda: write_snapshot(context, tmp_path / "y", IDENTITY),
        ):
            with pytest.raises(ContextBusyError):
                act()
            refused += 1
        go_on.set()
        writing.result()
    assert refused == 5
    assert read_snapshot(cache, tmp_path / "x", IDENTITY).context.length == 10
    assert not (tmp_path / "y").exists()


def test_one_path_written_by_many_holds_one_of_them(tmp_path: Path) -> None:
    cache, path = new_cache(), tmp_path / "x"
    contexts = [fill(cache, [index] * (index + 3), salt=index) for index in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            list(threads.map(lambda context: write_snapshot(context, path, IDENTITY), contexts))
            again = read_snapshot(cache, path, IDENTITY).context
            chosen = contexts[again.tokens[0]]
            assert rows_of(cache, again) == rows_of(cache, chosen)
            assert list(again.tokens) == list(chosen.tokens)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_many_restores_at_once_and_failing_ones_among_them(tmp_path: Path) -> None:
    cache = new_cache()
    context = fill(cache, list(range(20)))
    write_snapshot(context, tmp_path / "good", IDENTITY)
    data = bytearray((tmp_path / "good").read_bytes())
    data[-200] ^= 1
    (tmp_path / "bad").write_bytes(data)
    expected = rows_of(cache, context)

    def restore(index: int) -> bool:
        if index % 2:
            with pytest.raises(Exception, match="damaged"):
                read_snapshot(cache, tmp_path / "bad", IDENTITY)
            return True
        again = read_snapshot(cache, tmp_path / "good", IDENTITY).context
        same = rows_of(cache, again) == expected
        again.close()
        return same

    with ThreadPoolExecutor(8) as threads:
        before = state_of(cache, [context])
        assert all(threads.map(restore, range(64)))
    assert state_of(cache, [context]) == before
