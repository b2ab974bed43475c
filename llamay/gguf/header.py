"""Reads the header of one GGUF file: its metadata, and where each tensor lies.

Layout of versions 2 and 3, little-endian (ggml's `docs/gguf.md`):

    OFFSET  SIZE  FIELD
    0       4     magic "GGUF"
    4       4     version
    8       8     number of tensors
    16      8     number of metadata keys
    24      ...   per key: name (string), value type u32, value
    ...     ...   per tensor: name (string), number of dimensions u32, each dimension u64
                  (innermost first), type u32, offset u64 (from the start of the data)
    ...     ...   padding to a multiple of `general.alignment`, then the data

A string is a length u64 and its bytes; an array is an element type u32, a count u64 and the
elements. Every length is compared with what is left of the file before anything is read or
allocated for it, and the limits below bound the time and memory that a hostile file can cost.
"""

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from llamay.errors import GGUFError, UnsupportedModelError
from llamay.formats import FORMAT_BY_TYPE_ID, Format

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# The largest headers known (Gemma 3: 262,144 tokens and 514,906 merges) have about 16 MiB,
# 777,050 strings and 1,300 tensors; these limits keep the worst file under a second.
MAX_HEADER_BYTES = 64 << 20
MAX_ARRAY_OBJECTS = 1 << 21  # strings in arrays; an array in an array counts as 16
NESTED_ARRAY_COST = 16
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 15
MAX_NAME_BYTES = (1 << 16) - 1
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4

DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT = 8

BOOL, STRING, ARRAY = 7, 8, 9
# Value type id -> numpy type and struct of one value; strings and arrays apart.
_SCALARS: dict[int, tuple[np.dtype[Any], struct.Struct]] = {
    0: (np.dtype("<u1"), struct.Struct("<B")),
    1: (np.dtype("<i1"), struct.Struct("<b")),
    2: (np.dtype("<u2"), struct.Struct("<H")),
    3: (np.dtype("<i2"), struct.Struct("<h")),
    4: (np.dtype("<u4"), struct.Struct("<I")),
    5: (np.dtype("<i4"), struct.Struct("<i")),
    6: (np.dtype("<f4"), struct.Struct("<f")),
    BOOL: (np.dtype("?"), struct.Struct("<B")),
    10: (np.dtype("<u8"), struct.Struct("<Q")),
    11: (np.dtype("<i8"), struct.Struct("<q")),
    12: (np.dtype("<f8"), struct.Struct("<d")),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Types of ggml that no kernel here computes with, named so that the refusal is understood
# (`enum ggml_type` of ggml.h; numbers that ggml has withdrawn are left out).
_OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the header, checked: its bytes are data[start:start + num_bytes].

    shape: outermost first
    start: offset from the start of the file
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says: metadata in file order, tensors in file order."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]


def shown(name: str) -> str:
    """A key or tensor name for a message: quoted, control characters escaped, cut if long."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def read_header(path: Path, data: mmap.mmap | bytes) -> Header:
    """Parses and checks the header of `data`, the whole file; `path` is for messages only.

    Scalars become int, float, bool or str; arrays of strings and of arrays become lists, other
    arrays read-only numpy arrays that own their bytes. A string that is not UTF-8 keeps its
    undecodable bytes as lone surrogates (`surrogateescape`), so that two tokens that differ in
    such bytes stay different and the bytes can be had back; keys and tensor names are refused.
    Raises GGUFError for a file that is damaged, and UnsupportedModelError for a tensor of a type
    that llamay does not compute with.
    """
    cursor = _Cursor(path, data)
    num_tensors, num_keys = cursor.preamble()
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.name(f"metadata key {index}")
        where = f"key {shown(key)}"
        if key in metadata:
            cursor.fail(where, "each key once", "a second one")
        metadata[key] = cursor.value(cursor.u32(where), where)
    alignment = _alignment(cursor, metadata)
    tensors = [cursor.tensor(f"tensor {index}") for index in range(num_tensors)]
    data_start = -(-cursor.pos // alignment) * alignment
    return Header(metadata, _place(cursor, tensors, data_start, alignment))


def _alignment(cursor: "_Cursor", metadata: dict[str, Any]) -> int:
    """The data's alignment in bytes: a power of two, and a multiple of 8 as GGUF asks."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < MIN_ALIGNMENT or alignment & (alignment - 1):
        found = alignment if isinstance(alignment, int | float) else type(alignment).__name__
        cursor.fail("key 'general.alignment'", "a power of two, at least 8", found)
    return alignment


def _place(
    cursor: "_Cursor", tensors: list[TensorInfo], data_start: int, alignment: int
) -> list[TensorInfo]:
    """Turns offsets into file positions; checks that each tensor has its own bytes of the file."""
    placed: dict[str, TensorInfo] = {}
    for info in tensors:
        where = f"tensor {shown(info.name)}"
        if info.name in placed:
            cursor.fail(where, "each tensor once", "a second one")
        if info.start % alignment:
            cursor.fail(where, f"an offset that is a multiple of {alignment}", info.start)
        start = data_start + info.start
        if start + info.num_bytes > cursor.size:
            found = f"{info.num_bytes} bytes at offset {start}"
            cursor.fail(where, f"data inside the file's {cursor.size} bytes", found)
        placed[info.name] = replace(info, start=start)
    end, last = data_start, ""
    for info in sorted(placed.values(), key=lambda info: info.start):
        if info.start < end:
            where = f"tensor {shown(info.name)}"
            cursor.fail(where, f"data after that of {shown(last)}, which ends at {end}", info.start)
        end, last = info.start + info.num_bytes, info.name
    return list(placed.values())


class _Cursor:
    """Reads one value after the other, refusing what does not fit in the file.

    `where` arguments say what is being read, for messages. Invariant: 0 <= pos <= end <= size.
    """

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.objects_left = MAX_ARRAY_OBJECTS

    def fail(self, where: str, expected: object, found: object) -> NoReturn:
        """Raises the GGUFError of damaged contents."""
        raise GGUFError(
            f"{self.path}: {where}: expected {expected}, found {found}; "
            "the file is truncated or damaged, download it again"
        )

    def take(self, num_bytes: int, where: str) -> int:
        """The offset of the next `num_bytes` bytes, all inside the header; advances past them."""
        start = self.pos
        if num_bytes > self.end - start:
            left = f"at most {self.end - start} bytes at offset {start}"
            limit = f" (headers of up to {MAX_HEADER_BYTES} bytes are read)"
            self.fail(where, left + limit * (self.end < self.size), f"a length of {num_bytes}")
        self.pos = start + num_bytes
        return start

    def preamble(self) -> tuple[int, int]:
        """Checks magic and version; returns (number of tensors, number of metadata keys)."""
        magic = self.data[:4]
        if magic != MAGIC:
            raise GGUFError(
                f"{self.path}: not a GGUF file: expected the magic {MAGIC!r}, found {magic!r}; "
                "give a model in GGUF format"
            )
        self.take(4, "magic")
        version = self.u32("version")
        if version not in VERSIONS:
            big_endian = version & 0xFFFF == 0 and version != 0
            found = "a big-endian file" if big_endian else f"version {version}"
            raise GGUFError(
                f"{self.path}: expected little-endian GGUF version 2 or 3, found {found}; "
                "convert the model again with a current converter"
            )
        num_tensors = self.u64("number of tensors")
        num_keys = self.u64("number of metadata keys")
        self.check_count(num_tensors, MAX_TENSORS, 32, "number of tensors")
        self.check_count(num_keys, MAX_KEYS, 13, "number of metadata keys")
        return num_tensors, num_keys

    def check_count(self, count: int, limit: int, min_bytes: int, where: str) -> None:
        """Refuses a count above `limit`, or of more elements than what is left could hold."""
        limit = min(limit, (self.end - self.pos) // min_bytes)
        if count > limit:
            self.fail(where, f"at most {limit}", count)

    def u32(self, where: str) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, where))[0]
        return value

    def u64(self, where: str) -> int:
        value: int = _U64.unpack_from(self.data, self.take(8, where))[0]
        return value

    def string_bytes(self, where: str) -> bytes:
        length = self.u64(where)
        start = self.take(length, where)
        return self.data[start : start + length]

    def name(self, where: str) -> str:
        """A metadata key or tensor name: UTF-8, at most 65,535 bytes."""
        raw = self.string_bytes(where)
        if len(raw) > MAX_NAME_BYTES:
            self.fail(where, f"a name of at most {MAX_NAME_BYTES} bytes", len(raw))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(where, "a name in UTF-8", repr(raw[:40]))

    def value(self, type_id: int, where: str, depth: int = 0) -> Any:
        """A metadata value; `depth` counts the arrays that it lies in."""
        if type_id == STRING:
            return self.string_bytes(where).decode("utf-8", "surrogateescape")
        if type_id == ARRAY:
            return self.array(where, depth + 1)
        if type_id not in _SCALARS:
            self.fail(where, "a value type from 0 to 12", type_id)
        _, scalar = _SCALARS[type_id]
        (value,) = scalar.unpack_from(self.data, self.take(scalar.size, where))
        if type_id == BOOL:
            if value > 1:
                self.fail(where, "a bool of 0 or 1", value)
            return value == 1
        return value

    def array(self, where: str, depth: int) -> list[Any] | npt.NDArray[Any]:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(where, f"arrays at most {MAX_ARRAY_DEPTH} deep", "a deeper one")
        type_id = self.u32(where)
        count = self.u64(where)
        if type_id in _SCALARS:
            return self.numbers(type_id, count, where)
        if type_id not in (STRING, ARRAY):
            self.fail(where, "an element type from 0 to 12", type_id)
        cost, min_bytes = (1, 8) if type_id == STRING else (NESTED_ARRAY_COST, 12)
        self.check_count(count, self.objects_left // cost, min_bytes, where)
        self.objects_left -= count * cost
        if type_id == STRING:
            return self.strings(count, where)
        return [self.array(where, depth + 1) for _ in range(count)]

    def numbers(self, type_id: int, count: int, where: str) -> npt.NDArray[Any]:
        dtype, _ = _SCALARS[type_id]
        start = self.take(count * dtype.itemsize, where)
        raw = self.data[start : self.pos]
        if type_id == BOOL and raw.strip(b"\0\1"):
            self.fail(where, "bools of 0 or 1", raw.strip(b"\0\1")[0])
        return np.frombuffer(raw, dtype)

    def strings(self, count: int, where: str) -> list[str]:
        """`count` strings; one tight loop over locals, as a vocabulary has 300,000 of them."""
        data, pos, end = self.data, self.pos, self.end
        length_at = _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + length_at(data, pos)[0]
                if pos > end:
                    break
                append(data[start:pos].decode("utf-8", "surrogateescape"))
        except struct.error:  # fewer than 8 bytes left for a length
            pos = end + 1
        if pos > end:
            found = f"{len(strings)} before the end of the header at offset {end}"
            self.fail(where, f"{count} strings", found)
        self.pos = pos
        return strings

    def tensor(self, where: str) -> TensorInfo:
        """One tensor's entry; `start` is still counted from the start of the data."""
        name = self.name(where)
        where = f"tensor {shown(name)}"
        num_dimensions = self.u32(where)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.fail(where, f"1 to {MAX_DIMENSIONS} dimensions", num_dimensions)
        shape = tuple(self.u64(where) for _ in range(num_dimensions))[::-1]
        type_id = self.u32(where)
        offset = self.u64(where)
        format = FORMAT_BY_TYPE_ID.get(type_id)
        if format is None:
            type_name = _OTHER_TYPES.get(type_id, "unknown")
            raise UnsupportedModelError(
                f"{self.path}: {where} has type {type_id} ({type_name}), which is not supported; "
                f"use a file of types {', '.join(known.name for known in Format)}"
            )
        if 0 in shape:
            self.fail(where, "dimensions of at least 1", list(shape))
        if shape[-1] % format.block_len:
            expected = f"rows of a multiple of {format.block_len} weights for {format.name}"
            self.fail(where, expected, shape[-1])
        num_bytes = math.prod(shape[:-1]) * format.row_bytes(shape[-1])
        return TensorInfo(name, format, shape, offset, num_bytes)
