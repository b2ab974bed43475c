"""Every snapshot that an older llamay wrote restores to what was recorded beside it."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from llamay.errors import SnapshotSegmentError
from llamay.formats import KVPrecision
from llamay.kv.snapshot import (
    Key,
    convert_snapshot,
    extend_from_segments,
    read_snapshot,
    show_snapshot,
)
from tests.kv.row_kernels import IDENTITY, decode, fill, new_cache, rows_of

FOLDER = Path(__file__).parents[2] / "testdata" / "snapshots"
KEYS = {
    "v3-key": Key(bytes(range(32))),
    "v3-passphrase": Key.from_passphrase("correct horse battery staple"),
}
NAMES = [f"v{version}-{kv.value}" for version in (2, 3) for kv in KVPrecision] + list(KEYS)
SEGMENTS = [f"v4-{kv.value}" for kv in KVPrecision]


def precision_of(name: str) -> KVPrecision:
    return KVPrecision.F32 if name in KEYS else KVPrecision(name.split("-")[1])


def test_every_file_is_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.llamayctx")) == sorted(NAMES + SEGMENTS)


@pytest.mark.parametrize("name", NAMES)
def test_golden_snapshot_restores_what_was_recorded(name: str) -> None:
    precision, expected = precision_of(name), np.load(FOLDER / "expected.npz")
    cache = new_cache(precision=precision)
    path = FOLDER / f"{name}.llamayctx"
    again = read_snapshot(cache, path, IDENTITY, key=KEYS.get(name))
    assert again.exact
    assert (again.warning is None) == name.startswith("v3")
    assert list(again.context.tokens) == expected["tokens"].tolist()
    assert again.context.logits is not None
    assert again.context.logits.tobytes() == expected["logits"].tobytes()
    assert rows_of(cache, again.context) == expected[precision.value].tobytes()
    assert again.context.numerics == f"rows-v1-{precision.value}"
    assert (again.header.owner, again.header.marking) == ("ada", "internal")
    assert again.header.version == int(name[1])


@pytest.mark.parametrize("name", NAMES)
def test_golden_snapshot_restores_in_f32(name: str) -> None:
    precision, expected = precision_of(name), np.load(FOLDER / "expected.npz")
    cache = new_cache()
    path = FOLDER / f"{name}.llamayctx"
    again = read_snapshot(cache, path, IDENTITY, key=KEYS.get(name))
    values = decode(expected[precision.value], precision, cache.store.layout)
    assert rows_of(cache, again.context) == values.tobytes()
    assert again.exact == (precision is KVPrecision.F32)


@pytest.mark.parametrize("name", NAMES + SEGMENTS)
def test_golden_snapshot_shows_no_damage(name: str) -> None:
    shown = show_snapshot(FOLDER / f"{name}.llamayctx", key=KEYS.get(name))
    assert {check.result for check in shown.checks} <= {"pass", "note"}
    assert shown.header.end == 21


@pytest.mark.parametrize("name", SEGMENTS)
def test_golden_segment_continues_what_was_recorded(name: str) -> None:
    precision, expected = precision_of(name), np.load(FOLDER / "expected.npz")
    cache, tokens = new_cache(precision=precision), expected["tokens"].tolist()
    context, path = fill(cache, tokens[:13]), FOLDER / f"{name}.llamayctx"
    extended = extend_from_segments(cache, context, [path], IDENTITY, tokens)
    assert (extended.positions, extended.exact, extended.warning) == (8, True, None)
    assert list(context.tokens) == tokens
    assert context.logits is not None
    assert context.logits.tobytes() == expected["logits"].tobytes()
    assert rows_of(cache, context) == expected[precision.value].tobytes()
    header = show_snapshot(path).header
    assert (header.version, header.start, header.parent) == (4, 13, "base")
    with pytest.raises(SnapshotSegmentError, match="from position 13 on"):
        read_snapshot(cache, path, IDENTITY)


@pytest.mark.parametrize("target", KVPrecision)
def test_golden_snapshot_converts_to_the_recorded_rows(tmp_path: Path, target: KVPrecision) -> None:
    path = tmp_path / "x"
    shutil.copy(FOLDER / "v3-f32.llamayctx", path)
    convert_snapshot(path, path, kv=target)
    cache = new_cache(precision=target)
    again = read_snapshot(cache, path, IDENTITY)
    assert rows_of(cache, again.context) == np.load(FOLDER / "expected.npz")[target.value].tobytes()
