"""The header's parser: what it makes of bytes put together by hand from the specification."""

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llamay.errors import GGUFError, UnsupportedModelError
from llamay.formats import Format
from llamay.gguf.header import (
    MAX_ARRAY_OBJECTS,
    MAX_HEADER_BYTES,
    MAX_KEYS,
    MAX_TENSORS,
    read_header,
)
from tests.gguf_writer import TensorData, gguf_bytes

PATH = Path("folder/bad.gguf")
UINT8, UINT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 7, 8, 9, 10
F32, Q8_0 = 0, 8


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def string(text):
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def key(name, type_id, payload):
    return string(name) + u32(type_id) + payload


def entry(name, dimensions, type_id, offset):
    sizes = b"".join(u64(size) for size in dimensions)
    return string(name) + u32(len(dimensions)) + sizes + u32(type_id) + u64(offset)


def gguf(keys=(), entries=(), data=b"", version=3, alignment=32):
    head = b"GGUF" + u32(version) + u64(len(entries)) + u64(len(keys))
    head += b"".join(keys) + b"".join(entries)
    return head + b"\0" * (-len(head) % alignment) + data


def refusal(data, error=GGUFError):
    """The message of the refusal, checked to be one line that names the file."""
    with pytest.raises(error) as caught:
        read_header(PATH, data)
    message = str(caught.value)
    assert message.startswith(f"{PATH}: ")
    assert "\n" not in message
    assert len(message) < 400
    return message


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_made_by_hand_is_read(version):
    values = np.arange(64, dtype=np.float32)
    blocks = bytes(range(68))
    data = gguf(
        [
            key("general.architecture", STRING, string("llama")),
            key("general.alignment", UINT32, u32(64)),
            key("t", ARRAY, u32(STRING) + u64(2) + string("Ġthe") + string("")),
        ],
        [entry("a", [32, 2], F32, 0), entry("b", [32, 2], Q8_0, 256)],
        values.tobytes() + blocks,
        version=version,
        alignment=64,
    )

    header = read_header(PATH, data)

    assert header.metadata == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "t": ["Ġthe", ""],
    }
    a, b = header.tensors
    assert (a.name, a.format, a.shape) == ("a", Format.F32, (2, 32))
    assert data[a.start : a.start + a.num_bytes] == values.tobytes()
    assert (b.name, b.format, b.shape) == ("b", Format.Q8_0, (2, 32))
    assert data[b.start : b.start + b.num_bytes] == blocks


def test_dimensions_are_reversed_to_outermost_first():
    data = gguf([], [entry("t", [2, 3, 4, 5], F32, 0)], b"\0" * 480)
    assert read_header(PATH, data).tensors[0].shape == (5, 4, 3, 2)


def test_invalid_utf8_in_values_is_kept_apart_and_can_be_had_back():
    raw = [b"\xe4", b"\xe5", b"ok"]
    payload = u32(STRING) + u64(3) + b"".join(string(token) for token in raw)
    metadata = read_header(
        PATH, gguf([key("tokens", ARRAY, payload), key("name", STRING, string(b"a\xff"))])
    ).metadata
    assert [token.encode("utf-8", "surrogateescape") for token in metadata["tokens"]] == raw
    assert metadata["name"].encode("utf-8", "surrogateescape") == b"a\xff"


def test_arrays_of_numbers_are_read_only_and_own_their_bytes():
    data = bytearray(gguf([key("n", ARRAY, u32(UINT32) + u64(2) + u32(7) + u32(8))]))
    array = read_header(PATH, bytes(data)).metadata["n"]
    assert array.dtype == np.uint32
    assert array.tolist() == [7, 8]
    assert not array.flags.writeable


HUGE = [2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("element", [UINT8, UINT64, BOOL, STRING, ARRAY])
def test_a_huge_array_is_refused_without_allocating(element, count):
    data = gguf([key("k", ARRAY, u32(element) + u64(count) + b"\0" * 100)])
    tracemalloc.start()
    try:
        message = refusal(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "key 'k'" in message
    assert peak < 200_000


@pytest.mark.parametrize("length", HUGE)
def test_a_huge_string_or_name_is_refused(length):
    assert "key 'k'" in refusal(gguf([key("k", STRING, u64(length) + b"abc")]))
    assert str(length) in refusal(gguf([u64(length) + b"abc" + b"\0" * 20]))
    inside = u32(STRING) + u64(2) + string("ok") + u64(length) + b"abc"
    assert "found 1 before the end" in refusal(gguf([key("k", ARRAY, inside)]))


@pytest.mark.parametrize("count", [*HUGE, 70_000])
@pytest.mark.parametrize(("where", "offset"), [("tensors", 8), ("metadata keys", 16)])
def test_huge_counts_of_tensors_and_keys_are_refused(where, offset, count):
    data = gguf() + b"\0" * 3_000_000
    message = refusal(data[:offset] + u64(count) + data[offset + 8 :])
    assert f"number of {where}" in message
    assert f"found {count}" in message


@pytest.mark.parametrize(("offset", "left"), [(8, 3), (16, 8)])
def test_counts_are_compared_with_the_bytes_left(offset, left):
    """An entry has at least 32 bytes, a key and its value 13."""
    data = gguf() + b"\0" * 104
    message = refusal(data[:offset] + u64(left + 1) + data[offset + 8 :])
    assert f"expected at most {left}, found {left + 1}" in message


FLOATS = b"\0" * 128
BAD_FILES = {
    "empty": (b"", "not a GGUF file", "found b''"),
    "other magic": (b"PK\x03\x04" + b"\0" * 40, "not a GGUF file", r"found b'PK\x03\x04'"),
    "only magic": (b"GGUF", "version: expected at most 0 bytes"),
    "version 1": (gguf(version=1), "version 2 or 3", "found version 1"),
    "version 4": (gguf(version=4), "version 2 or 3", "found version 4"),
    "big-endian": (b"GGUF\0\0\0\x03" + b"\0" * 16, "little-endian", "found a big-endian file"),
    "key twice": (gguf([key("k", BOOL, b"\1"), key("k", BOOL, b"\1")]), "key 'k'", "a second one"),
    "key not UTF-8": (gguf([key(b"\xff\xfe", BOOL, b"\1")]), "metadata key 0", "UTF-8", r"\xff"),
    "key too long": (gguf([key("k" * 65536, BOOL, b"\1")]), "65535 bytes", "found 65536"),
    "value type": (gguf([key("k", 13, b"\1" * 8)]), "key 'k'", "from 0 to 12", "found 13"),
    "element type": (
        gguf([key("k", ARRAY, u32(13) + u64(1) + b"\0" * 8)]),
        "key 'k'",
        "from 0 to 12",
        "found 13",
    ),
    "bool of 2": (gguf([key("k", BOOL, b"\2")]), "key 'k'", "0 or 1", "found 2"),
    "bools of 2": (
        gguf([key("k", ARRAY, u32(BOOL) + u64(3) + b"\0\1\2")]),
        "key 'k'",
        "0 or 1",
        "found 2",
    ),
    "arrays too deep": (
        gguf([key("k", ARRAY, (u32(ARRAY) + u64(1)) * 200)]),
        "key 'k'",
        "at most 4 deep",
    ),
    "control characters in a key": (gguf([key("a\n\x1b[2J", 13, b"\1" * 8)]), r"'a\n\x1b[2J'"),
    "long key in the message": (gguf([key("k" * 5000, 13, b"\1" * 8)]), "kkk...'"),
    "alignment 0": (gguf([key("general.alignment", UINT32, u32(0))]), "alignment", "found 0"),
    "alignment 48": (gguf([key("general.alignment", UINT32, u32(48))]), "alignment", "found 48"),
    "alignment 4": (gguf([key("general.alignment", UINT32, u32(4))]), "at least 8", "found 4"),
    "alignment text": (gguf([key("general.alignment", STRING, string("32"))]), "found str"),
    "alignment bool": (gguf([key("general.alignment", BOOL, b"\1")]), "found True"),
    "alignment huge": (
        gguf([key("general.alignment", UINT64, u64(2**63))], [entry("t", [1], F32, 0)], FLOATS),
        "tensor 't'",
        f"at offset {2**63}",
    ),
    "tensor twice": (
        gguf([], [entry("t", [8], F32, 0), entry("t", [8], F32, 32)], FLOATS),
        "tensor 't'",
        "a second one",
    ),
    "name not UTF-8": (gguf([], [entry(b"\xff", [8], F32, 0)], FLOATS), "tensor 0", "UTF-8"),
    "no dimension": (gguf([], [entry("t", [], F32, 0)], FLOATS), "tensor 't'", "found 0"),
    "five dimensions": (gguf([], [entry("t", [1] * 5, F32, 0)], FLOATS), "1 to 4", "found 5"),
    "dimension 0": (gguf([], [entry("t", [8, 0], F32, 0)], FLOATS), "'t'", "found [0, 8]"),
    "part of a block": (
        gguf([], [entry("t", [48, 2], Q8_0, 0)], FLOATS),
        "tensor 't'",
        "a multiple of 32 weights for Q8_0",
        "found 48",
    ),
    "size wraps to 0 in 64 bits": (
        gguf([], [entry("t", [2**32, 2**32], F32, 0)], FLOATS),
        "tensor 't'",
        f"found {2**66} bytes",
    ),
    "data past the end": (
        gguf([], [entry("t", [33], F32, 0)], FLOATS),
        "tensor 't'",
        "inside the file's 192 bytes",
        "found 132 bytes at offset 64",
    ),
    "offset past the end": (
        gguf([], [entry("t", [1], F32, 2**64 - 32)], FLOATS),
        "tensor 't'",
        "inside the file's 192 bytes",
    ),
    "offset between two steps": (
        gguf([], [entry("t", [1], F32, 4)], FLOATS),
        "tensor 't'",
        "a multiple of 32",
        "found 4",
    ),
    "overlap": (
        gguf([], [entry("b", [8], F32, 32), entry("a", [9], F32, 0)], FLOATS),
        "tensor 'b'",
        "after that of 'a', which ends at 132",
        "found 128",
    ),
    "same data": (
        gguf([], [entry("a", [8], F32, 0), entry("b", [8], F32, 0)], FLOATS),
        "tensor 'b'",
        "after that of 'a'",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_in_a_sentence(name):
    data, *words = BAD_FILES[name]
    message = refusal(data)
    for word in words:
        assert word in message


@pytest.mark.parametrize(("type_id", "name"), [(16, "IQ2_XXS"), (39, "MXFP4"), (77, "unknown")])
def test_a_tensor_type_without_kernels_is_named(type_id, name):
    data = gguf([], [entry("blk.0.ffn_up.weight", [256], type_id, 0)], FLOATS)
    message = refusal(data, UnsupportedModelError)
    assert f"tensor 'blk.0.ffn_up.weight' has type {type_id} ({name})" in message
    assert "Q4_K" in message


@pytest.mark.parametrize("format", list(Format))
def test_every_format_has_the_bytes_of_its_blocks(format):
    block_bytes = {  # sizeof of the block structures in ggml-common.h
        "F32": 4, "F16": 2, "BF16": 2, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34,
        "Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_NL": 18, "IQ4_XS": 136,
    }[format.name]  # fmt: skip
    data = bytes(3 * 2 * block_bytes)
    header = read_header(
        PATH, gguf_bytes({}, {"t": TensorData(format, (3, 2 * format.block_len), data)})
    )
    assert header.tensors[0].num_bytes == 6 * block_bytes
    assert header.tensors[0].format is format


def test_worst_headers_cost_at_most_a_second():
    """The most objects that the limits let through, each file damaged at its very end."""
    strings = key("k", ARRAY, u32(STRING) + u64(MAX_ARRAY_OBJECTS) + bytes(8 * MAX_ARRAY_OBJECTS))
    arrays = key("k", ARRAY, u32(ARRAY) + u64(2**17) + bytes(12 * 2**17))
    many_keys = [key(f"k{index}", BOOL, b"\1") for index in range(MAX_KEYS - 1)]
    many_tensors = [entry(f"t{index}", [8], F32, 32 * index) for index in range(MAX_TENSORS)]
    size = MAX_HEADER_BYTES - 200
    numbers = key("k", ARRAY, u32(UINT8) + u64(size) + bytes(size))
    bad = key("z", 13, b"\1" * 8)
    for data in (
        gguf([strings, bad]),
        gguf([arrays, bad]),
        gguf([*many_keys, bad]),
        gguf([], many_tensors, bytes(32 * MAX_TENSORS - 1)),
        gguf([numbers, bad]),
    ):
        started = time.process_time()
        refusal(data)
        assert time.process_time() - started < 1.0


def test_more_strings_than_the_limit_are_refused():
    count = MAX_ARRAY_OBJECTS // 2
    half = u32(STRING) + u64(count) + bytes(8 * count)
    over = u32(STRING) + u64(count + 1) + bytes(8 * count + 8)
    data = gguf([key("a", ARRAY, half), key("b", ARRAY, over)])
    assert f"key 'b': expected at most {count}, found {count + 1}" in refusal(data)


def test_a_header_longer_than_the_limit_is_refused():
    data = gguf([key("k", STRING, u64(MAX_HEADER_BYTES) + bytes(MAX_HEADER_BYTES))])
    message = refusal(data)
    assert f"headers of up to {MAX_HEADER_BYTES} bytes" in message
    assert "key 'k'" in message
