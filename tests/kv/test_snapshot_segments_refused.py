"""Segments that do not make what they should are refused, and leave everything as it was."""

import dataclasses
import json
import struct
from pathlib import Path

import pytest
import xxhash

from llamay.errors import (
    BudgetError,
    SnapshotCorruptError,
    SnapshotKeyError,
    SnapshotLayoutError,
    SnapshotSegmentError,
    SnapshotVersionError,
    SnapshotWeightsError,
)
from llamay.kv import Cache, Context
from llamay.kv.snapshot import (
    Key,
    extend_from_segments,
    format,
    show_snapshot,
    write_segment,
)
from tests.kv.row_kernels import (
    IDENTITY,
    RowKernels,
    fill,
    new_cache,
    rows_of,
    state_of,
    write_chain,
)

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
KEY = Key(bytes(range(32)))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "GROUP", 1)
    monkeypatch.setattr(format, "CHUNK_BYTES", 300)  # 2 positions


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    return write_chain(tmp_path, fill(new_cache(), TOKENS, logits=True), [0, 5, 6, 13])


def refused(
    cache: Cache, context: Context, paths: list[Path], error: type[Exception], match: str | None
) -> None:
    """The chain is refused, and nothing changes."""
    before = state_of(cache, [context])
    with pytest.raises(error, match=match):
        extend_from_segments(cache, context, paths, IDENTITY, TOKENS)
    assert state_of(cache, [context]) == before


def test_files_that_do_not_make_the_history_are_refused(chain: list[Path], tmp_path: Path) -> None:
    cache = new_cache()
    context = fill(cache, TOKENS[:4])
    a, b, c = chain
    refused(cache, context, [], SnapshotSegmentError, r"lack positions \[4, 13\)")
    refused(cache, context, [b, c], SnapshotSegmentError, r"lack positions \[4, 5\)")
    refused(cache, context, [a, c], SnapshotSegmentError, r"reaches position 6.*\[0, 5\)")
    refused(cache, context, [a, b], SnapshotSegmentError, r"reaches position 13.*\[5, 6\)")
    refused(cache, context, [c, b, a], SnapshotSegmentError, r"reaches position 13.*\[0, 5\)")
    with pytest.raises(SnapshotSegmentError, match=r"reaches position 5.*\[6, 13\)"):
        extend_from_segments(cache, context, [a, c, b], IDENTITY, TOKENS[:6])
    other = fill(new_cache(), [*TOKENS[:5], 7, *TOKENS[6:]])
    write_segment(tmp_path / "other", IDENTITY, other, 5, 6, parent="x")
    refused(cache, context, [a, tmp_path / "other", c], SnapshotSegmentError, "tokens are not")
    with pytest.raises(ValueError, match="4 tokens do not begin"):
        extend_from_segments(cache, context, chain, IDENTITY, [9, *TOKENS[1:]])
    extend_from_segments(cache, context, chain, IDENTITY, TOKENS)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("architecture", "other", SnapshotLayoutError),
        ("weights_sha256", "4d" * 32, SnapshotWeightsError),
    ],
)
def test_another_model_s_segment_is_refused(
    chain: list[Path], tmp_path: Path, field: str, value: str, error: type[Exception]
) -> None:
    other = dataclasses.replace(IDENTITY, **{field: value})
    write_segment(chain[1], other, fill(new_cache(), TOKENS), 5, 6, parent="x")
    cache = new_cache()
    refused(cache, cache.new_context(), chain, error, value)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_every_changed_byte_of_what_is_used_is_refused(tmp_path: Path, key: Key | None) -> None:
    cache, path = new_cache(), tmp_path / "5-13"
    paths = write_chain(tmp_path, fill(new_cache(), TOKENS), [0, 5, 13], key)
    context = fill(cache, TOKENS[:3])
    data, before = path.read_bytes(), state_of(cache, [context])
    for at in range(0, len(data), 7 if key else 1):
        changed = bytearray(data)
        changed[at] ^= 1 + at % 255
        path.unlink()
        path.write_bytes(changed)
        with pytest.raises((SnapshotCorruptError, SnapshotVersionError)):
            extend_from_segments(cache, context, paths, IDENTITY, TOKENS, key=key)
        assert list(context.tokens) == TOKENS[:3]
    assert state_of(cache, [context]) == before


def test_damage_is_found_before_anything_kept_is_given_up(chain: list[Path]) -> None:
    data = bytearray(chain[0].read_bytes())
    data[-16 * 5 - 1] ^= 1  # the last row
    chain[0].write_bytes(data)
    cache = new_cache(budget_pages=5)
    kept, parked = fill(cache, [6, 7]), fill(cache, [8])
    cache.retain(kept)
    kept.close()
    cache.park(parked)
    context = cache.new_context()
    refused(cache, context, chain, SnapshotCorruptError, "chunk 3")
    assert cache.unpark(parked)
    parked.reserve(4)  # 2 pages in use
    refused(cache, context, chain, BudgetError, "3 of them are left, and 4 are needed")


def test_damage_is_found_before_a_copied_page_takes_room(tmp_path: Path) -> None:
    source = fill(new_cache(), TOKENS)
    (path,) = write_chain(tmp_path, source, [0, 13])
    data = bytearray(path.read_bytes())
    data[-16 * 9 - 1] ^= 1  # the last row
    path.write_bytes(data)
    cache = new_cache(budget_pages=6)
    context = fill(cache, TOKENS[:5])
    fork = context.fork()  # so that the second page is copied
    kept = fill(cache, [7])
    cache.retain(kept)
    kept.close()
    working = fill(cache, [8])  # 2 pages are left, and 2 are needed besides the copy
    before = state_of(cache, [context, fork, working])
    with pytest.raises(SnapshotCorruptError, match="damaged"):
        extend_from_segments(cache, context, [path], IDENTITY, TOKENS)
    assert state_of(cache, [context, fork, working]) == before


@pytest.mark.parametrize("fields", [{"start": 2**31 - 3}, {"start": -1}, {"parent": 5}])
def test_headers_that_lie_are_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    path = tmp_path / "x"
    write_segment(path, IDENTITY, fill(new_cache(), TOKENS), 5, 13, parent="-")
    data = path.read_bytes()
    size = struct.unpack_from("<I", data, 12)[0]
    text = json.dumps({**json.loads(data[16 : 16 + size]), **fields}).encode()
    start = data[:12] + struct.pack("<I", len(text)) + text
    start += xxhash.xxh3_128_digest(start)
    body, table = data[32 + size : -16 * 6], data[-16 * 6 : -16]
    path.write_bytes(start + body + table + xxhash.xxh3_128_digest(start + table))
    with pytest.raises(SnapshotCorruptError, match="its header cannot be read"):
        show_snapshot(path)


def test_version_3_has_nothing_of_segments(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_segment(path, IDENTITY, fill(new_cache(), TOKENS), 5, 13, parent="-")
    data = bytearray(path.read_bytes())
    size = struct.unpack_from("<I", data, 12)[0]
    struct.pack_into("<HH", data, 8, 3, 3)
    data[16 + size : 32 + size] = xxhash.xxh3_128_digest(bytes(data[: 16 + size]))
    data[-16:] = xxhash.xxh3_128_digest(bytes(data[: 32 + size] + data[-16 * 6 : -16]))
    path.write_bytes(data)
    with pytest.raises(SnapshotCorruptError, match="version 3 with a start or a parent"):
        show_snapshot(path)


def test_encrypted_segments_need_their_key(tmp_path: Path) -> None:
    cache = new_cache()
    paths = write_chain(tmp_path, fill(cache, TOKENS), [0, 5, 13], KEY)
    context = cache.new_context()
    refused(cache, context, paths, SnapshotKeyError, "give its key file")
    extend_from_segments(cache, context, paths, IDENTITY, TOKENS, key=KEY)
    assert rows_of(cache, context) == rows_of(cache, fill(cache, TOKENS))


@pytest.mark.parametrize("method", ["new_slab", "import_rows"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_failing_memory_leaves_the_context_as_it_was(
    chain: list[Path], monkeypatch: pytest.MonkeyPatch, method: str, nth: int
) -> None:
    cache = new_cache(1)
    context = cache.new_context()
    real, calls = getattr(RowKernels, method), iter(range(1, 100))

    def failing(*args: object) -> object:
        if next(calls) == nth:
            raise MemoryError
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(RowKernels, method, failing)
        refused(cache, context, chain, MemoryError, None)
    extend_from_segments(cache, context, chain, IDENTITY, TOKENS)
