"""Bytes that are not what was written are refused, and leave the cache as it was."""

import dataclasses
import json
import os
import random
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamay.errors import (
    SnapshotCorruptError,
    SnapshotError,
    SnapshotVersionError,
    SnapshotWeightsError,
)
from llamay.kv import Cache
from llamay.kv.snapshot import Key, format, read_snapshot, show_snapshot, write_snapshot
from tests.kv.row_kernels import (
    IDENTITY,
    RowKernels,
    State,
    as_version_2,
    fill,
    new_cache,
    rows_of,
    state_of,
)

KEY = Key(bytes(range(32)))
TOKENS = [3, 1, 4, 1, 5]
HEADER_AT = 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "GROUP", 1)
    monkeypatch.setattr(format, "CHUNK_BYTES", 300)  # 2 positions


@pytest.fixture
def cache() -> Cache:
    """A cache with something in it: a context, and a retained one that shares its pages."""
    cache = new_cache()
    context = fill(cache, [9, 9, 9, 9, 9, 9])
    cache.retain(context)
    fork = context.fork()
    fork.truncate(5)
    cache.retain(fill(cache, [8, 8]))
    cache.test_contexts = [context, fork]  # type: ignore[attr-defined]
    return cache


def written(path: Path, key: Key | None = None) -> bytes:
    """A small snapshot's bytes."""
    write_snapshot(fill(new_cache(), TOKENS, logits=True), path, IDENTITY, key=key)
    return path.read_bytes()


@pytest.fixture
def good(tmp_path: Path) -> bytes:
    """A small snapshot's bytes, for tests with many examples."""
    return written(tmp_path / "good")


def state(cache: Cache) -> State:
    return state_of(cache, cache.test_contexts)  # type: ignore[attr-defined]


def refuse(cache: Cache, path: Path, data: bytes, key: Key | None = None) -> SnapshotError:
    """The error that this file meets; fails if it is read."""
    path.unlink(missing_ok=True)  # file systems flush a file that is truncated and written again
    path.write_bytes(data)
    with pytest.raises(SnapshotError) as refused:
        read_snapshot(cache, path, IDENTITY, key=key)
    return refused.value


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_every_changed_byte_is_refused(cache: Cache, tmp_path: Path, key: Key | None) -> None:
    path = tmp_path / "x"
    data, before, rng = written(path, key), state(cache), random.Random(1)
    header_end = HEADER_AT + struct.unpack_from("<I", data, 12)[0]
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= rng.choice([1, 0x80, 0xFF, rng.randrange(1, 256)])
        error = refuse(cache, path, bytes(changed), key)
        assert isinstance(error, SnapshotCorruptError | SnapshotVersionError), at
        assert str(path) in str(error)
        if HEADER_AT <= at < header_end:  # before anything in it is believed
            assert "the header's digest differs" in str(error)
        if at % 16 == 0:
            assert state(cache) == before, at
    assert state(cache) == before


def test_every_value_of_version_and_header_size_is_refused(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "x"
    data = written(path)
    for at in range(8, HEADER_AT):
        for value in set(range(256)) - {data[at]}:
            refuse(cache, path, data[:at] + bytes([value]) + data[at + 1 :])


@pytest.mark.parametrize("version", [2, 3])
def test_every_truncation_is_refused(cache: Cache, tmp_path: Path, version: int) -> None:
    path = tmp_path / "x"
    data = written(path)
    data = data if version == 3 else as_version_2(data)
    before = state(cache)
    for size in range(len(data)):
        assert isinstance(refuse(cache, path, data[:size]), SnapshotCorruptError)
    assert state(cache) == before


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("tail", [b"\0", b"\xff", bytes(16), bytes(4096)])
def test_every_appended_byte_is_refused(
    cache: Cache, tmp_path: Path, version: int, tail: bytes
) -> None:
    data = written(tmp_path / "x")
    refuse(cache, tmp_path / "x", (data if version == 3 else as_version_2(data)) + tail)


def test_parts_of_two_snapshots_do_not_make_one(cache: Cache, tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    data = written(path)
    write_snapshot(fill(new_cache(), TOKENS, 1, logits=True), other, IDENTITY)
    second = other.read_bytes()
    assert len(second) == len(data)
    for at in range(64, len(data), 64):
        if data[:at] + second[at:] not in (data, second):
            refuse(cache, path, data[:at] + second[at:])


def test_version_2_restores_by_layout_and_warns(tmp_path: Path) -> None:
    path, cache = tmp_path / "x", new_cache()
    path.write_bytes(as_version_2(written(path)))
    other_weights = dataclasses.replace(IDENTITY, weights_sha256="4d" * 32)
    again = read_snapshot(cache, path, other_weights)
    assert again.exact
    assert again.warning is not None
    assert "does not say which weights" in again.warning
    assert list(again.context.tokens) == TOKENS
    assert rows_of(cache, again.context) == rows_of(cache, fill(cache, TOKENS))
    assert [check.result for check in show_snapshot(path).checks] == ["pass", "note"]


def test_version_2_is_refused_if_wished(cache: Cache, tmp_path: Path) -> None:
    path, before = tmp_path / "x", state(cache)
    path.write_bytes(as_version_2(written(path)))
    with pytest.raises(SnapshotWeightsError, match="version 2, which does not say"):
        read_snapshot(cache, path, IDENTITY, allow_legacy=False)
    assert state(cache) == before


@pytest.mark.parametrize("field", ["weights_sha256", "encryption"])
def test_version_2_has_nothing_of_version_3(cache: Cache, tmp_path: Path, field: str) -> None:
    data = written(tmp_path / "x")
    body = as_version_2(data)[HEADER_AT:]
    end = body.index(b"}") + 1
    header = json.loads(body[:end])
    encryption = {"kdf": "scrypt", "salt": "", "nonce": "", "check": "", "n": 0, "r": 0, "p": 0}
    header[field] = IDENTITY.weights_sha256 if field == "weights_sha256" else encryption
    text = json.dumps(header).encode()
    start = struct.pack("<8sHHI", b"LLAMAYCX", 2, 2, len(text)) + text
    error = refuse(cache, tmp_path / "x", start + body[end:])
    assert "version 2 with" in str(error)


def test_chunks_of_any_size_are_not_believed(cache: Cache, tmp_path: Path, good: bytes) -> None:
    many = {"tokens": 10**6, "chunk_positions": 10**6}
    error = refuse(cache, tmp_path / "x", with_header(good, many))
    assert "chunks of 1000000 positions" in str(error)


def test_newer_version_is_named(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "x"
    data = bytearray(written(path))
    struct.pack_into("<HH", data, 8, 6, 5)
    error = refuse(cache, path, bytes(data))
    assert isinstance(error, SnapshotVersionError)
    assert "version 6" in str(error)
    assert "of version 5" in str(error)


def test_newer_version_for_this_reader_is_read(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(with_header(written(path), {"added later": [1, None]}, version=(5, 3)))
    assert list(read_snapshot(cache, path, IDENTITY).context.tokens) == TOKENS


def with_header(
    data: bytes, changes: dict[str, object], version: tuple[int, int] = (3, 3), text: bytes = b""
) -> bytes:
    """The file with other header fields and digests that are right for them."""
    size = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[HEADER_AT : HEADER_AT + size])
    header.update(changes)
    text = text or json.dumps(header).encode()
    start = struct.pack("<8sHHI", b"LLAMAYCX", *version, len(text)) + text
    start += xxhash.xxh3_128_digest(start)
    body, table = data[HEADER_AT + size + 16 : -16 * 5], data[-16 * 5 : -16]
    return start + body + table + xxhash.xxh3_128_digest(start + table)


def test_tokens_and_logits_are_checked_though_digests_are_right(
    cache: Cache, tmp_path: Path
) -> None:
    path, before = tmp_path / "x", state(cache)
    data = written(path)
    head = HEADER_AT + struct.unpack_from("<I", data, 12)[0] + 16
    for at, value in [
        (head, struct.pack("<i", 50)),
        (head + 4, struct.pack("<i", -1)),
        (head + 4 * len(TOKENS), struct.pack("<f", float("nan"))),
    ]:
        changed = data[:at] + value + data[at + 4 :]
        chunk = xxhash.xxh3_128_digest(changed[head : head + 4 * (len(TOKENS) + 50)])
        table = chunk + changed[-16 * 4 : -16]
        end = table + xxhash.xxh3_128_digest(changed[:head] + table)
        error = refuse(cache, path, changed[: -16 * 5] + end)
        assert "tokens outside 0 to 49" in str(error) or "not finite" in str(error)
    assert state(cache) == before


@pytest.mark.parametrize("method", ["new_slab", "import_rows"])
@pytest.mark.parametrize("nth", [1, 2])
def test_failing_memory_leaves_the_cache_as_it_was(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, nth: int
) -> None:
    path, before = tmp_path / "x", state(cache)
    write_snapshot(fill(new_cache(), list(range(40))), path, IDENTITY)  # 10 pages, 3 a slab
    real, calls = getattr(RowKernels, method), iter(range(1, 100))

    def failing(*args: object) -> object:
        if next(calls) == nth:
            raise MemoryError
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(RowKernels, method, failing)
        with pytest.raises(MemoryError):
            read_snapshot(cache, path, IDENTITY)
    assert state(cache) == before
    assert read_snapshot(cache, path, IDENTITY).context.length == 40


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 2**31 - 1, 2**31, 2**63, 10**30, 1.5]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
NUMBERS = ["vocab_size", "layers", "kv_heads", "head_dim", "tokens", "logits", "chunk_positions"]
FIELDS = [*NUMBERS, "architecture", "layout_sha256", "weights_sha256", "numerics", "precision"]
FIELDS += ["cache_precision", "lossless", "owner", "marking", "llamay", "encryption"]
FIELDS += ["start", "parent"]


@contextmanager
def no_large_memory() -> Iterator[None]:
    """Fails if Python's allocators give out more than 16 MiB meanwhile (numpy's are traced too)."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), HOSTILE, min_size=1, max_size=3))
def test_headers_that_lie_are_refused_or_restore_what_they_say(
    cache: Cache, tmp_path: Path, good: bytes, changes: dict[str, object]
) -> None:
    path, before = tmp_path / "x", state(cache)
    path.unlink(missing_ok=True)
    path.write_bytes(with_header(good, changes))
    try:
        with no_large_memory():
            again = read_snapshot(cache, path, IDENTITY)
    except SnapshotError:
        pass
    else:
        assert list(again.context.tokens) == TOKENS
        again.context.close()
    assert state(cache) == before


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    text=st.one_of(
        st.binary(min_size=1, max_size=200),
        st.sampled_from([b"[" * 60_000, b'{"a":' * 9_000, b"1" * 9_000, b"null", b"[]", b"{}"]),
    )
)
def test_headers_that_are_no_header_are_refused(
    cache: Cache, tmp_path: Path, good: bytes, text: bytes
) -> None:
    error = refuse(cache, tmp_path / "x", with_header(good, {}, text=text))
    assert isinstance(error, SnapshotCorruptError)


def test_damage_is_shown_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "x"
    data = bytearray(written(path))
    data[-16 * 5 - 1] ^= 1  # the last position's value
    path.write_bytes(data)
    shown = show_snapshot(path)
    assert shown.header.tokens == len(TOKENS)
    assert [check.result for check in shown.checks] == ["pass", "fail"]
    assert "chunk 3" in shown.checks[1].detail


def test_other_files_are_refused(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("GGUF" * 100)
    os.mkfifo(tmp_path / "fifo")
    for name, message in [
        ("empty", "LLAMAYCX"),
        ("text", "LLAMAYCX"),
        ("fifo", "something else"),
        (".", "something else"),
        ("missing", "No such file"),
    ]:
        with pytest.raises(SnapshotError, match=message) as refused:
            read_snapshot(cache, tmp_path / name, IDENTITY)
        assert str(tmp_path / name) in str(refused.value)
