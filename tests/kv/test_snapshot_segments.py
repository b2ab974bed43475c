"""Branches written in parts, each position once, and read back onto what is still in memory."""

import json
import os
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from llamay.errors import (
    ContextBusyError,
    SnapshotError,
    SnapshotSegmentError,
    SnapshotVersionError,
)
from llamay.formats import KVPrecision
from llamay.kv.snapshot import (
    Extended,
    Key,
    convert_snapshot,
    extend_from_segments,
    format,
    read_snapshot,
    show_snapshot,
    write_segment,
    write_snapshot,
)
from tests.kv.row_kernels import (
    IDENTITY,
    VOCAB,
    RowKernels,
    append,
    f32_rows,
    fill,
    new_cache,
    rows_of,
    state_of,
    write_chain,
)

T = TypeVar("T")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
KEY = Key(bytes(range(32)))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "GROUP", 1)
    monkeypatch.setattr(format, "CHUNK_BYTES", 300)  # 2 positions


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    return write_chain(tmp_path, fill(new_cache(), TOKENS, logits=True), [0, 5, 6, 13])


@pytest.mark.parametrize("cuts", [[0, 13], [0, 1, 13], [0, 4, 8, 13], [0, 5, 6, 7, 13]])
@pytest.mark.parametrize("pages", [(1, 3), (4, 4), (64, 1)])
@pytest.mark.parametrize("held", [0, 4, 5, 12, 13])
def test_segments_give_what_the_context_lacks(
    tmp_path: Path, cuts: list[int], pages: tuple[int, int], held: int
) -> None:
    source, target = new_cache(pages[0]), new_cache(pages[1])
    whole = fill(source, TOKENS, logits=True)
    paths = write_chain(tmp_path, whole, cuts)
    context = fill(target, TOKENS[:held])
    expected = context.logits if held == len(TOKENS) else whole.logits
    extended = extend_from_segments(target, context, paths, IDENTITY, TOKENS)
    assert (extended.positions, extended.exact, extended.warning) == (13 - held, True, None)
    assert list(context.tokens) == TOKENS
    assert rows_of(target, context) == rows_of(source, whole)
    assert (context.logits is None) == (expected is None)
    assert expected is None or np.array_equal(expected, context.logits)
    assert context.numerics == "rows-v1-f32"
    target.check()
    context.close()
    assert target.live_pages == 0


@pytest.mark.parametrize("upto", range(1, 14))
def test_a_branch_may_end_within_a_segment_and_has_logits_at_its_end_only(
    chain: list[Path], upto: int
) -> None:
    cache = new_cache()
    context = cache.new_context()
    paths = chain[: 1 + sum(upto > cut for cut in (5, 6))]
    extend_from_segments(cache, context, paths, IDENTITY, TOKENS[:upto])
    assert rows_of(cache, context) == rows_of(cache, fill(cache, TOKENS[:upto]))
    assert (context.logits is not None) == (upto == 13)


def test_logits_can_be_left_out(tmp_path: Path) -> None:
    context = fill(new_cache(), TOKENS, logits=True)
    write_segment(tmp_path / "x", IDENTITY, context, 5, 13, logits=False)
    assert show_snapshot(tmp_path / "x").header.logits == 0
    write_segment(tmp_path / "x", IDENTITY, context, 5, 13)
    assert show_snapshot(tmp_path / "x").header.logits == VOCAB


def test_branches_restored_one_after_the_other_share_their_pages(tmp_path: Path) -> None:
    cache = new_cache(2)
    trunk = fill(cache, TOKENS[:8])
    paths = write_chain(tmp_path, trunk, [0, 8])
    branches = []
    for index, cut in enumerate([8, 7, 3]):  # 8 and 7: an edge of a page, and within one
        branch = trunk.fork()
        branch.truncate(cut)
        append(cache, branch, [40 + index] * 4)
        path = tmp_path / f"branch {index}"
        write_segment(path, IDENTITY, branch, cut, cut + 4, parent=paths[0].name)
        branches.append(([*paths, path], list(branch.tokens), branch))
    before = cache.live_pages
    expected = [rows_of(cache, branch) for _, _, branch in branches]
    use = [cache.pages_of(branch) for _, _, branch in branches]
    for _, _, branch in branches:
        branch.close()
    trunk.close()
    assert cache.live_pages == 0

    trunk = cache.new_context()
    extend_from_segments(cache, trunk, paths, IDENTITY, TOKENS[:8])
    cache.retain(trunk)
    restored = []
    for files, history, _ in branches:
        context = cache.match(history)
        extended = extend_from_segments(cache, context, files, IDENTITY, history)
        assert extended.positions == 4
        restored.append(context)
    cache.clear_tree()
    assert cache.live_pages == before
    assert [rows_of(cache, context) for context in restored] == expected
    assert [cache.pages_of(context) for context in restored] == use
    cache.check()


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_branch_that_leaves_its_parent_within_a_chunk_keeps_its_own_rows(
    tmp_path: Path, cut: int
) -> None:
    source, target = new_cache(2), new_cache(3)
    branch = fill(source, TOKENS)
    paths = [*write_chain(tmp_path, branch, [0, 13]), tmp_path / "branch"]
    branch.truncate(cut)
    append(source, branch, [40, 41, 42], salt=1)
    write_segment(paths[1], IDENTITY, branch, cut, cut + 3, parent=paths[0].name)
    context = target.new_context()
    extend_from_segments(target, context, paths, IDENTITY, list(branch.tokens))
    assert rows_of(target, context) == rows_of(source, branch)
    target.check()


def test_file_is_as_the_byte_table_says(tmp_path: Path) -> None:
    context = fill(new_cache(), TOKENS, logits=True)
    path = tmp_path / "x"
    info = write_segment(path, IDENTITY, context, 10, 13, parent="the one before")
    data = path.read_bytes()
    assert info.bytes == len(data)
    magic, version, reader, size = struct.unpack_from("<8sHHI", data)
    assert (magic, version, reader) == (b"LLAMAYCX", 4, 4)
    header = json.loads(data[16 : 16 + size])
    assert (header["start"], header["parent"], header["tokens"]) == (10, "the one before", 3)
    assert header["precision"] == header["cache_precision"] == "f32"
    at = 16 + size + 16
    assert np.frombuffer(data, "<i4", 3, at).tolist() == TOKENS[10:]
    at += 4 * (3 + VOCAB)
    assert data[at : at + 3 * 128] == f32_rows(13, context.layout)[10:].tobytes()
    assert len(data) == at + 3 * 128 + 16 * (3 + 1)
    shown = show_snapshot(path)
    assert (shown.header.start, shown.header.end, shown.header.parent) == (10, 13, "the one before")
    assert [check.result for check in shown.checks] == ["pass", "pass"]


def test_a_segment_from_the_start_is_a_plain_snapshot(tmp_path: Path) -> None:
    cache = new_cache()
    context = fill(cache, TOKENS, logits=True)
    write_segment(tmp_path / "segment", IDENTITY, context, 0, 13)
    write_snapshot(context, tmp_path / "whole", IDENTITY)
    assert (tmp_path / "segment").read_bytes() == (tmp_path / "whole").read_bytes()
    assert read_snapshot(cache, tmp_path / "segment", IDENTITY).exact


def test_a_segment_from_the_start_with_a_parent_stays_a_segment(tmp_path: Path) -> None:
    context = fill(new_cache(), TOKENS)
    write_segment(tmp_path / "x", IDENTITY, context, 0, 13, parent="p")
    header = show_snapshot(tmp_path / "x").header
    assert (header.version, header.start, header.parent) == (4, 0, "p")


def test_figures_are_the_same_when_all_is_verified_before_room_is_made(chain: list[Path]) -> None:
    cache, other = new_cache(budget_pages=4), new_cache()
    kept = fill(cache, [6, 7])
    cache.retain(kept)
    kept.close()
    extended = extend_from_segments(cache, cache.new_context(), chain, IDENTITY, TOKENS)
    assert cache.retained == 0
    plain = extend_from_segments(other, other.new_context(), chain, IDENTITY, TOKENS)
    assert extended == plain


def test_a_segment_alone_is_refused_where_a_whole_snapshot_is_needed(chain: list[Path]) -> None:
    cache = new_cache()
    with pytest.raises(SnapshotSegmentError, match="from position 6 on; resume the session"):
        read_snapshot(cache, chain[-1], IDENTITY)
    assert state_of(cache) == state_of(new_cache())


def test_a_reader_that_predates_segments_refuses_them(
    chain: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format, "VERSION", 3)
    with pytest.raises(SnapshotVersionError, match="update llamay"):
        read_snapshot(new_cache(), chain[-1], IDENTITY)
    assert read_snapshot(new_cache(), chain[0], IDENTITY).context.length == 5


@pytest.mark.parametrize("own", KVPrecision)
def test_rows_are_stored_at_the_cache_s_own_precision(tmp_path: Path, own: KVPrecision) -> None:
    cache = new_cache(precision=own)
    context = fill(cache, TOKENS)
    paths = write_chain(tmp_path, context, [0, 6, 13])
    assert {show_snapshot(path).header.precision for path in paths} == {own}
    again = cache.new_context()
    assert extend_from_segments(cache, again, paths, IDENTITY, TOKENS).exact
    assert rows_of(cache, again) == rows_of(cache, context)


def test_only_the_files_and_chunks_that_are_needed_are_read(chain: list[Path]) -> None:
    cache = new_cache()
    context = fill(cache, TOKENS[:9])
    for path in chain[:2]:
        path.unlink()
    data = bytearray(chain[2].read_bytes())
    data[data.index(f32_rows(13, context.layout)[6].tobytes())] ^= 1  # not needed: position 6
    chain[2].write_bytes(data)
    extended = extend_from_segments(cache, context, chain, IDENTITY, TOKENS)
    # Positions 8 to 12 by twos from 6, and the tokens and logits.
    assert extended == Extended(4, 5 * 128 + 4 * (7 + VOCAB), True, None)
    context.truncate(5)
    with pytest.raises(SnapshotError, match="No such file"):
        extend_from_segments(cache, context, chain[:2], IDENTITY, TOKENS[:6])


def test_what_a_segment_lost_marks_the_context(tmp_path: Path) -> None:
    cache = new_cache()
    paths = write_chain(tmp_path, fill(cache, TOKENS), [0, 5, 13])
    convert_snapshot(paths[1], paths[1], kv=KVPrecision.Q8)
    assert show_snapshot(paths[1]).header.start == 5
    context = fill(cache, TOKENS[:3])
    extended = extend_from_segments(cache, context, paths, IDENTITY, TOKENS)
    assert not extended.exact  # though the first file lost nothing
    assert extended.warning == "continues, not bit-exact (rows-v1-f32+q8)"
    assert context.numerics == "rows-v1-f32+q8"
    cache.retain(context)
    assert cache.match(TOKENS).length == 0


def test_a_context_s_own_marks_stay(tmp_path: Path) -> None:
    cache = new_cache()
    paths = write_chain(tmp_path, fill(cache, TOKENS), [0, 5, 13])
    context = cache.new_context("rows-v1-f32+q8")
    append(cache, context, TOKENS[:5])
    assert extend_from_segments(cache, context, paths, IDENTITY, TOKENS).exact
    assert context.numerics == "rows-v1-f32+q8"


def test_a_file_of_another_precision_s_cache_marks_the_context(tmp_path: Path) -> None:
    paths = write_chain(tmp_path, fill(new_cache(precision=KVPrecision.Q8), TOKENS), [0, 13])
    cache = new_cache(numerics="rows-v1-q8")
    context = cache.new_context()
    extended = extend_from_segments(cache, context, paths, IDENTITY, TOKENS)
    assert not extended.exact  # though its payload is all that was saved
    assert context.numerics == "rows-v1-q8+q8"


def test_another_backend_s_segment_continues_and_says_so(tmp_path: Path) -> None:
    source = new_cache(numerics="metal-v1-f32")
    paths = write_chain(tmp_path, fill(source, TOKENS), [0, 13])
    cache = new_cache()
    context = cache.new_context()
    assert not extend_from_segments(cache, context, paths, IDENTITY, TOKENS).exact
    assert context.numerics == "rows-v1-f32+metal-v1-f32"


@pytest.mark.parametrize("part", [(0, 0), (5, 5), (6, 5), (-1, 3), (0, 14)])
def test_parts_that_are_not_there_are_not_written(tmp_path: Path, part: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no positions"):
        write_segment(tmp_path / "x", IDENTITY, fill(new_cache(), TOKENS), *part)
    assert list(tmp_path.iterdir()) == []


class Worker:
    """A thread that runs what it is given: the only one that may touch pages."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.calls = 0
        self.thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while job := self._jobs.get():
            job()

    def run(self, work: Callable[[], T], /) -> T:
        results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

        def job() -> None:
            try:
                results.put((work(), None))
            except BaseException as error:
                results.put((None, error))

        self.calls += 1
        self._jobs.put(job)
        result, error = results.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def stop(self) -> None:
        self._jobs.put(None)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker; meanwhile kernels run on its thread only, and files are touched on others only."""
    worker = Worker()

    def only(here: bool, real: Callable[..., object]) -> Callable[..., object]:
        def checked(*args: object) -> object:
            assert (threading.current_thread() is worker.thread) == here
            return real(*args)

        return checked

    for name in ("new_slab", "copy_page", "export_rows", "import_rows"):
        monkeypatch.setattr(RowKernels, name, only(True, getattr(RowKernels, name)))
    for name in ("open", "write", "fsync", "preadv"):
        monkeypatch.setattr(os, name, only(False, getattr(os, name)))
    worker.thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        worker.thread.join()


def test_pages_are_touched_by_the_worker_and_files_by_the_caller(
    tmp_path: Path, worker: Worker
) -> None:
    cache = new_cache()
    context = worker.run(lambda: fill(cache, TOKENS, logits=True))
    fork = context.fork()
    info = write_segment(tmp_path / "x", IDENTITY, fork, 4, 13, run=worker.run, parent="-")
    assert info.bytes == (tmp_path / "x").stat().st_size
    again = context.fork()
    worker.run(lambda: again.truncate(6))
    extend_from_segments(cache, again, [tmp_path / "x"], IDENTITY, TOKENS, run=worker.run)
    rows = [worker.run(lambda c=c: rows_of(cache, c)) for c in (context, again)]  # type: ignore[misc]
    assert rows[0] == rows[1]
    assert again.logits is not None
    cache.check()


def test_an_owner_elsewhere_is_not_disturbed(tmp_path: Path, chain: list[Path]) -> None:
    cache = new_cache()
    context = fill(cache, TOKENS[:4])
    with context.in_use(), ThreadPoolExecutor(1) as other:
        for call in (
            lambda: write_segment(tmp_path / "x", IDENTITY, context, 0, 4),
            lambda: extend_from_segments(cache, context, chain, IDENTITY, TOKENS),
        ):
            with pytest.raises(ContextBusyError):
                other.submit(call).result()
    assert list(context.tokens) == TOKENS[:4]
    assert not (tmp_path / "x").exists()
