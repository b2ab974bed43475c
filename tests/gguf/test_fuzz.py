"""Damaged files: each parses or is refused with llamay's own errors, in bounded time and memory."""

import math
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamay.errors import GGUFError, UnsupportedModelError
from llamay.formats import Format
from llamay.gguf import open_gguf
from llamay.gguf.header import read_header
from tests.gguf_writer import TensorData, float_tensor, gguf_bytes, write_gguf, write_split_gguf

PATH = Path("fuzzed.gguf")
METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "u8": np.uint8(1),
    "i64": np.int64(-1),
    "f32": 0.5,
    "f64": np.float64(0.5),
    "bool": True,
    "tokens": ["<s>", "Ġthe", "", "中"],
    "scores": np.array([0.5, 1.5], np.float32),
    "bools": np.array([True, False]),
    "nested": [[1, 2], [3]],
    "split.no": np.uint16(0),
    "split.count": np.uint16(1),
}
TENSORS = {
    "token_embd.weight": TensorData(Format.Q8_0, (2, 64), bytes(range(136))),
    "blk.0.attn_norm.weight": float_tensor(np.arange(6, dtype=np.float32)),
    "output.weight": float_tensor(np.ones((2, 3), np.float16)),
}
VALID = gguf_bytes(METADATA, TENSORS)
DATA_END = max(t.start + t.num_bytes for t in read_header(PATH, VALID).tensors)
HEADER_END = min(t.start for t in read_header(PATH, VALID).tensors)


def parses(data):
    """Whether `data` is read; every tensor then lies in the file, apart from the others.

    Any exception but the two of the contract fails the test, and so does a second of processor
    time, or memory beyond what this much text can need.
    """
    header, message = None, "fuzzed.gguf: "
    tracemalloc.start()
    started = time.process_time()
    try:
        header = read_header(PATH, data)
    except (GGUFError, UnsupportedModelError) as error:
        message = str(error)
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1.0
    assert peak < 20_000 + 20 * len(data)
    assert message.startswith("fuzzed.gguf: ")
    assert len(message) < 600
    if header is None:
        return False
    end = 0
    for info in sorted(header.tensors, key=lambda info: info.start):
        assert end <= info.start
        end = info.start + info.num_bytes
        blocks = math.prod(info.shape) // info.format.block_len
        assert info.num_bytes == blocks * info.format.block_bytes > 0
    assert end <= len(data)
    return True


def test_every_truncation_is_refused(tmp_path):
    """Each length of a file, through the whole of open_gguf."""
    path = tmp_path / "cut.gguf"
    for length in range(DATA_END):
        path.write_bytes(VALID[:length])
        with pytest.raises(GGUFError):
            open_gguf(path)
    for length in range(DATA_END, len(VALID) + 1):  # only padding after the last tensor is gone
        path.write_bytes(VALID[:length])
        with open_gguf(path) as file:
            assert list(file.tensors) == list(TENSORS)


def test_every_truncation_of_a_part_is_refused(tmp_path):
    parts = write_split_gguf(tmp_path, "m", {}, [{}, {"t": float_tensor(np.ones(8, np.float32))}])
    whole = parts[1].read_bytes()
    for length in range(len(whole)):
        parts[1].write_bytes(whole[:length])
        with pytest.raises(GGUFError, match=r"m-00002-of-00002\.gguf"):
            open_gguf(parts[0])


def test_every_changed_byte_of_the_header_parses_or_is_refused():
    damaged = bytearray(VALID)
    outcomes = set()
    for offset in range(HEADER_END):
        original = VALID[offset]
        for value in {0, 1, 0x7F, 0x80, 0xFF, original ^ 1, original ^ 0x80, original + 1 & 0xFF}:
            damaged[offset] = value
            outcomes.add(parses(bytes(damaged)))
        damaged[offset] = original
    assert outcomes == {True, False}


@pytest.mark.parametrize("width", [4, 8])
def test_huge_values_at_every_offset_parse_or_are_refused(width):
    top = 1 << (8 * width)
    for value in (0, 1, 13, top // 16, top // 2 - 1, top // 2, top - 32, top - 1):
        patch = value.to_bytes(width, "little")
        for offset in range(4, HEADER_END - width):
            parses(VALID[:offset] + patch + VALID[offset + width :])


def test_random_damage_parses_or_is_refused():
    """Bytes changed, cut out, doubled and moved, from fixed seeds."""
    for seed in range(4000):
        rng = random.Random(seed)
        data = bytearray(VALID)
        for _ in range(rng.randint(1, 4)):
            a, b = sorted(rng.randrange(4, HEADER_END) for _ in range(2))
            b = min(b, a + 24)
            match rng.randrange(4):
                case 0:
                    data[a] = rng.randrange(256)
                case 1:
                    del data[a:b]
                case 2:
                    data[a:a] = data[a:b]
                case 3:
                    data[a:b] = rng.randbytes(b - a)
        parses(bytes(data))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_after_the_magic_parse_or_are_refused(tail):
    parses(b"GGUF\x03\0\0\0" + tail)


@settings(max_examples=300, deadline=None)
@given(
    tensors=st.integers(0, 3),
    keys=st.integers(0, 3),
    words=st.lists(
        st.one_of(
            st.integers(0, 13).map(lambda value: struct.pack("<I", value)),
            st.integers(0, 40).map(lambda value: struct.pack("<Q", value)),
            st.integers(0, 2**64 - 1).map(lambda value: struct.pack("<Q", value)),
            st.binary(max_size=8),
        ),
        max_size=40,
    ),
)
def test_random_fields_parse_or_are_refused(tensors, keys, words):
    parses(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(words))


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**31), 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(max_size=20),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(allow_nan=False).map(np.float64),
)


@settings(max_examples=100, deadline=None)
@given(
    metadata=st.dictionaries(
        st.text(max_size=10).map("key.".__add__),
        st.one_of(SCALARS, st.lists(st.text(max_size=10), max_size=5)),
        max_size=6,
    ),
    shapes=st.dictionaries(
        st.text(max_size=10), st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=4
    ),
    alignment=st.sampled_from([8, 16, 32, 256]),
)
def test_what_is_written_is_read(tmp_path_factory, metadata, shapes, alignment):
    arrays = {
        name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    path = tmp_path_factory.mktemp("written") / "m.gguf"
    tensors = {name: float_tensor(array) for name, array in arrays.items()}
    write_gguf(path, metadata, tensors, alignment=alignment)
    with open_gguf(path) as file:
        assert {key: file.metadata[key] for key in metadata} == metadata
        assert list(file.tensors) == list(arrays)
        for name, array in arrays.items():
            tensor = file.tensors[name]
            assert tensor.shape == array.shape
            assert bytes(tensor.data) == array.tobytes()
