"""What a snapshot gives back: the same rows, tokens and logits, or a named refusal."""

import dataclasses
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash

from llamay.errors import (
    BudgetError,
    ContextBusyError,
    SnapshotError,
    SnapshotLayoutError,
    SnapshotWeightsError,
)
from llamay.formats import KVLayout, KVPrecision
from llamay.kv import Cache
from llamay.kv.snapshot import (
    Identity,
    convert_snapshot,
    format,
    read_snapshot,
    show_snapshot,
    write_snapshot,
)
from llamay.kv.snapshot.numerics import holds, marked, restored
from llamay.mlx_kernels import load_kernels
from tests.kv.row_kernels import (
    IDENTITY,
    VOCAB,
    append,
    decode,
    encode,
    f32_rows,
    fill,
    new_cache,
    rows_of,
    state_of,
)

F32, F16, VQ8, Q8 = KVPrecision
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.llamayctx"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in a small file."""
    monkeypatch.setattr(format, "GROUP", 1)
    monkeypatch.setattr(format, "CHUNK_BYTES", 600)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 13])
@pytest.mark.parametrize("pages", [(1, 3), (3, 64), (64, 1), (16, 128), (128, 16)])
def test_other_page_sizes_give_back_the_same_context(
    path: Path, pages: tuple[int, int], count: int
) -> None:
    source, target = new_cache(pages[0]), new_cache(pages[1])
    context = fill(source, TOKENS[:count], logits=True)
    info = write_snapshot(context, path, IDENTITY)
    assert info.bytes == path.stat().st_size
    again = read_snapshot(target, path, IDENTITY)
    assert again.exact
    assert again.warning is None
    assert list(again.context.tokens) == TOKENS[:count]
    assert rows_of(target, again.context) == rows_of(source, context)
    assert again.context.logits is not None
    assert again.context.logits.tobytes() == (np.arange(VOCAB, dtype=np.float32) / 3 - 5).tobytes()
    assert again.context.numerics == "rows-v1-f32"
    append(target, again.context, [7, 7, 7], salt=1)
    target.check()
    again.context.close()
    assert target.live_pages == 0


def test_file_is_as_the_byte_table_says(path: Path) -> None:
    context = fill(new_cache(), TOKENS[:5], logits=True)
    write_snapshot(context, path, IDENTITY, owner="ada", marking="internal")
    data = path.read_bytes()
    magic, version, reader, size = struct.unpack_from("<8sHHI", data)
    assert (magic, version, reader) == (b"LLAMAYCX", 3, 3)
    header = json.loads(data[16 : 16 + size])
    assert header["architecture"] == "made-up"
    assert (header["owner"], header["marking"]) == ("ada", "internal")
    assert (header["tokens"], header["logits"], header["chunk_positions"]) == (5, VOCAB, 4)
    assert header["precision"] == header["cache_precision"] == "f32"
    at = 16 + size
    assert data[at : at + 16] == xxhash.xxh3_128_digest(data[:at])
    at += 16
    head = data[at : at + 4 * (5 + VOCAB)]
    assert np.frombuffer(head, "<i4", 5).tolist() == TOKENS[:5]
    logits = np.frombuffer(head, "<f4", offset=20)
    assert (logits == np.arange(VOCAB, dtype=np.float32) / 3 - 5).all()
    start = at + len(head)
    row = 2 * 16 * 4
    payload = data[start : start + 5 * row]
    assert payload == f32_rows(5, context.layout).tobytes()
    chunks = [head, payload[: 4 * row], payload[4 * row :]]
    table = b"".join(map(xxhash.xxh3_128_digest, chunks))
    over_all = xxhash.xxh3_128_digest(data[:at] + table)
    assert data[start + 5 * row :] == table + over_all


@pytest.mark.parametrize("stored", KVPrecision)
@pytest.mark.parametrize("own", KVPrecision)
def test_own_precision_and_f32_restore_the_same_bits(
    path: Path, own: KVPrecision, stored: KVPrecision
) -> None:
    source, target = new_cache(4, own), new_cache(16, own)
    context = fill(source, TOKENS)
    write_snapshot(context, path, IDENTITY, kv=stored)
    again = read_snapshot(target, path, IDENTITY)
    same = rows_of(target, again.context) == rows_of(source, context)
    lossless = stored in (F32, own) or (own, stored) == (Q8, VQ8)
    assert same == again.exact == lossless
    expected = f"rows-v1-{own.value}" + ("" if lossless else f"+{stored.value}")
    assert again.context.numerics == expected
    assert again.warning == (None if lossless else f"continues, not bit-exact ({expected})")


@pytest.mark.parametrize("kv", KVPrecision)
@pytest.mark.parametrize("pages", [(16, 64), (64, 16), (128, 64)])
def test_cpu_kernels_give_back_the_same_bits(
    path: Path, kv: KVPrecision, pages: tuple[int, int]
) -> None:
    kernels = load_kernels("cpu", threads=2)
    layouts = [KVLayout(2, 1, 16, size, kv) for size in pages]
    source, target = (Cache(kernels, layout, numerics="cpu") for layout in layouts)
    rows = encode(f32_rows(150, layouts[0]), kv)
    context = source.new_context()
    context.reserve(150)
    with context.in_use():
        context.import_rows(0, rows)
    context.commit([position % VOCAB for position in range(150)])
    for stored in (F32, kv):
        write_snapshot(context, path, IDENTITY, kv=stored)
        again = read_snapshot(target, path, IDENTITY)
        assert again.exact
        with again.context.in_use():
            assert again.context.export_rows(0, 150).tobytes() == rows.tobytes()
        again.context.close()
        target.check()
    assert target.live_pages == 0


def test_default_precision_is_f32(path: Path) -> None:
    write_snapshot(fill(new_cache(4, Q8), TOKENS), path, IDENTITY)
    assert show_snapshot(path).header.precision is F32


@pytest.mark.parametrize(("stored", "error"), [(F16, 2**-11), (VQ8, 1 / 254), (Q8, 1 / 254)])
def test_lossy_payload_is_near_and_never_matched(
    path: Path, stored: KVPrecision, error: float
) -> None:
    cache = new_cache()
    context = fill(cache, TOKENS)
    write_snapshot(context, path, IDENTITY, kv=stored)
    again = read_snapshot(cache, path, IDENTITY).context
    exact = f32_rows(len(TOKENS), context.layout)
    rows = np.frombuffer(rows_of(cache, again), np.uint8).reshape(len(TOKENS), -1)
    off = np.abs(decode(rows, F32, context.layout) - exact)
    assert off.max() > 0
    assert (off <= error * np.abs(exact).max(axis=2, keepdims=True) * 1.001).all()
    cache.retain(again)
    assert cache.match(TOKENS).length == 0
    cache.retain(context)
    assert cache.match(TOKENS).length == len(TOKENS)


def test_loss_is_remembered_by_later_snapshots(path: Path) -> None:
    cache = new_cache()
    write_snapshot(fill(cache, TOKENS), path, IDENTITY, kv=Q8)
    lossy = read_snapshot(cache, path, IDENTITY)
    write_snapshot(lossy.context, path, IDENTITY)
    again = read_snapshot(cache, path, IDENTITY)
    assert again.exact  # it continues what was saved
    assert again.context.numerics == "rows-v1-f32+q8"
    assert rows_of(cache, again.context) == rows_of(cache, lossy.context)


def test_other_backend_continues_and_says_so(path: Path) -> None:
    write_snapshot(fill(new_cache(numerics="metal-v1-f32"), TOKENS), path, IDENTITY)
    cache = new_cache()
    again = read_snapshot(cache, path, IDENTITY)
    assert not again.exact
    assert again.warning is not None
    assert "continues, not bit-exact" in again.warning
    assert again.context.numerics == "rows-v1-f32+metal-v1-f32"
    write_snapshot(again.context, path, IDENTITY)
    back = read_snapshot(new_cache(numerics="metal-v1-f32"), path, IDENTITY)
    assert not back.exact
    assert back.context.numerics == "metal-v1-f32+rows-v1-f32"


def test_numerics_marks() -> None:
    assert marked("cpu", "q8") == "cpu+q8"
    assert marked("cpu+q8", "f16", "q8", "cpu") == "cpu+f16+q8"
    assert restored("cpu+q8", F32, "cpu", F32) == ("cpu+q8", True)
    assert restored("cpu", Q8, "cpu", F32) == ("cpu+q8", False)
    assert restored("gpu+q8", F32, "cpu", F32) == ("cpu+gpu+q8", False)
    assert restored("", F32, "", F32) == ("", True)
    assert [(a, b) for a in KVPrecision for b in KVPrecision if holds(a, b)] == [
        *((F32, b) for b in KVPrecision),
        (F16, F16),
        (VQ8, VQ8),
        (VQ8, Q8),
        (Q8, Q8),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [("architecture", "other"), ("vocab_size", VOCAB + 1), ("layout_sha256", "3c" * 32)],
)
def test_other_layout_is_refused(path: Path, field: str, value: object) -> None:
    write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY)
    cache = new_cache()
    other = dataclasses.replace(IDENTITY, **{field: value})
    with pytest.raises(SnapshotLayoutError, match=str(value)) as refused:
        read_snapshot(cache, path, other)
    assert str(getattr(IDENTITY, field)) in str(refused.value)
    assert state_of(cache) == state_of(new_cache())


def test_other_rows_are_refused(path: Path) -> None:
    write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY)
    with pytest.raises(SnapshotLayoutError, match="expected layers 2, found 1"):
        read_snapshot(new_cache(layers=2), path, IDENTITY)


def test_other_weights_are_refused_by_both_digests(path: Path) -> None:
    write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY)
    other = Identity("made-up", VOCAB, IDENTITY.layout_sha256, "4d" * 32)
    with pytest.raises(SnapshotWeightsError, match="4d" * 32) as refused:
        read_snapshot(new_cache(), path, other)
    assert IDENTITY.weights_sha256 in str(refused.value)


def test_logits_can_be_left_out(path: Path) -> None:
    cache = new_cache()
    write_snapshot(fill(cache, TOKENS, logits=True), path, IDENTITY, logits=False)
    assert read_snapshot(cache, path, IDENTITY).context.logits is None


def test_budget_refuses_before_anything_retained_is_forgotten(path: Path) -> None:
    write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY)  # 4 pages
    whole = path.read_bytes()
    path.write_bytes(whole[:-300] + b"damaged" + whole[-293:])  # what is not read is not missed
    cache = new_cache(budget_pages=5)
    working = fill(cache, [1, 2, 3, 4, 5])
    kept = fill(cache, [6, 7])
    cache.retain(kept)
    kept.close()
    before = state_of(cache, [working])
    with pytest.raises(BudgetError, match="3 of them are left, and 4 are needed"):
        read_snapshot(cache, path, IDENTITY)
    assert state_of(cache, [working]) == before
    working.truncate(4)
    path.write_bytes(whole)
    assert read_snapshot(cache, path, IDENTITY).context.length == len(TOKENS)
    assert cache.retained == 0


def test_damage_is_found_before_anything_retained_is_forgotten(path: Path) -> None:
    write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1  # in the last rows
    path.write_bytes(data)
    cache = new_cache(budget_pages=4)
    kept = fill(cache, [6, 7])
    cache.retain(kept)
    kept.close()
    before = state_of(cache)
    with pytest.raises(SnapshotError, match="damaged"):
        read_snapshot(cache, path, IDENTITY)
    assert state_of(cache) == before


def test_context_in_use_elsewhere_is_refused(path: Path) -> None:
    context = fill(new_cache(), TOKENS)
    with context.in_use(), ThreadPoolExecutor(1) as other, pytest.raises(ContextBusyError):
        other.submit(write_snapshot, context, path, IDENTITY).result()
    assert not path.exists()


@pytest.mark.parametrize("target", KVPrecision)
@pytest.mark.parametrize("stored", KVPrecision)
@pytest.mark.parametrize("own", [F32, Q8])
def test_converted_snapshot_is_what_writing_so_gives(
    path: Path, own: KVPrecision, stored: KVPrecision, target: KVPrecision
) -> None:
    cache = new_cache(4, own)
    context = fill(cache, TOKENS, logits=True)
    write_snapshot(context, path, IDENTITY, kv=stored, owner="ada")
    other = path.with_name("y.llamayctx")
    convert_snapshot(path, other, kv=target)
    header = show_snapshot(other).header
    assert (header.precision, header.owner) == (target, "ada")
    again = read_snapshot(cache, other, IDENTITY)
    first_lossless = holds(stored, own)
    assert again.exact == (first_lossless and holds(target, own))
    assert again.exact == (again.context.numerics == cache.numerics)
    if again.exact:
        assert rows_of(cache, again.context) == rows_of(cache, context)
    elif first_lossless or stored is target:
        write_snapshot(context, path, IDENTITY, kv=target)
        direct = read_snapshot(cache, path, IDENTITY)
        assert rows_of(cache, again.context) == rows_of(cache, direct.context)
        assert again.context.numerics == direct.context.numerics
    assert list(again.context.tokens) == TOKENS
    assert again.context.logits is not None


def test_convert_in_place(path: Path) -> None:
    write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY)
    convert_snapshot(path, path, kv=Q8)
    assert show_snapshot(path).header.precision is Q8
    assert [check.result for check in show_snapshot(path).checks] == ["pass", "pass"]


def test_owner_and_marking_must_fit(path: Path) -> None:
    with pytest.raises(SnapshotError, match="shorten"):
        write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY, owner="x" * 70_000)
    assert list(path.parent.iterdir()) == []
