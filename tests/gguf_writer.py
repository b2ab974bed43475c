"""Writes GGUF files for tests: metadata of every type, tensors, alignment, split files.

    write_gguf(path, {"general.architecture": "llama", "llama.block_count": 2},
               {"token_embd.weight": float_tensor(np.zeros((8, 4), np.float32))})

How a Python value is stored (layout: ggml's docs/gguf.md):

    bool                      bool
    int                       uint32, or int32 if negative
    float                     float32
    str                       string
    bytes                     string, as it is (so that invalid UTF-8 can be written)
    numpy scalar              its own type: np.uint8(3), np.int64(-1), np.float64(0.5), ...
    numpy array, 1-D          array of its own type
    list of str or bytes      array of strings; so is an empty list
    list of int, of float     array of int32, of float32
    list of lists or arrays   array of arrays
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamay.formats import Format

TYPE_IDS = {
    "u1": 0,
    "i1": 1,
    "u2": 2,
    "i2": 3,
    "u4": 4,
    "i4": 5,
    "f4": 6,
    "b1": 7,
    "u8": 10,
    "i8": 11,
    "f8": 12,
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor as it goes into a file; `shape` is outermost first, `data` its blocks in order."""

    format: Format
    shape: tuple[int, ...]
    data: bytes


def float_tensor(array: npt.NDArray[Any]) -> TensorData:
    """A float32 or float16 array as a tensor of format F32 or F16."""
    format = {"f4": Format.F32, "f2": Format.F16}[_code(array.dtype)]
    return TensorData(format, array.shape, array.tobytes())


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorData] | None = None,
    *,
    alignment: int = 32,
    version: int = 3,
) -> Path:
    """Writes one file (see `gguf_bytes`) and returns its path."""
    path.write_bytes(gguf_bytes(metadata, tensors, alignment=alignment, version=version))
    return path


def write_split_gguf(
    folder: Path, name: str, metadata: Mapping[str, Any], parts: Sequence[Mapping[str, TensorData]]
) -> list[Path]:
    """Writes NAME-00001-of-0000N.gguf and so on, one for each of `parts`; returns the paths.

    The first holds all metadata, the others only the split keys.
    """
    count = len(parts)
    total = sum(len(tensors) for tensors in parts)
    paths = []
    for index, tensors in enumerate(parts):
        split = {
            "split.no": np.uint16(index),
            "split.count": np.uint16(count),
            "split.tensors.count": np.int32(total),
        }
        path = folder / f"{name}-{index + 1:05d}-of-{count:05d}.gguf"
        paths.append(write_gguf(path, {**(metadata if index == 0 else {}), **split}, tensors))
    return paths


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorData] | None = None,
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """A whole file; data of each tensor is padded to `alignment`, the last one's too.

    `general.alignment` is written first if it is not the default of 32.
    """
    tensors = tensors or {}
    if alignment != 32:
        metadata = {"general.alignment": alignment, **metadata}
    header = [struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        type_id, payload = _encode(value)
        header.append(_string(key) + struct.pack("<I", type_id) + payload)
    data = []
    offset = 0
    for name, tensor in tensors.items():
        header.append(_tensor_entry(name, tensor, offset))
        data.append(_padded(tensor.data, alignment))
        offset += len(data[-1])
    return _padded(b"".join(header), alignment) + b"".join(data)


def _tensor_entry(name: str, tensor: TensorData, offset: int) -> bytes:
    """A tensor's entry in the header; `offset` counts from the start of the data."""
    dimensions = tensor.shape[::-1]
    return _string(name) + struct.pack(
        f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, tensor.format.type_id, offset
    )


def _encode(value: Any) -> tuple[int, bytes]:
    """A metadata value as (type id, payload); see the table above."""
    if isinstance(value, str | bytes):
        return STRING, _string(value)
    if isinstance(value, list | np.ndarray):
        return ARRAY, _array(value)
    if type(value) is int:
        value = np.int32(value) if value < 0 else np.uint32(value)
    elif type(value) is float:  # np.float64 is a float too, and keeps its type
        value = np.float32(value)
    number = np.asarray(value)
    return TYPE_IDS[_code(number.dtype)], number.tobytes()


def _array(values: list[Any] | npt.NDArray[Any]) -> bytes:
    if isinstance(values, list) and values and type(values[0]) in (int, float):
        values = np.array(values, np.int32 if type(values[0]) is int else np.float32)
    if isinstance(values, np.ndarray):
        return struct.pack("<IQ", TYPE_IDS[_code(values.dtype)], len(values)) + values.tobytes()
    encoded = [_encode(value) for value in values]
    (type_id,) = {type_id for type_id, _ in encoded} or {STRING}
    return struct.pack("<IQ", type_id, len(values)) + b"".join(payload for _, payload in encoded)


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _padded(raw: bytes, alignment: int) -> bytes:
    return raw + b"\0" * (-len(raw) % alignment)


def _code(dtype: np.dtype[Any]) -> str:
    """Kind and size: "f4" for float32."""
    return f"{dtype.kind}{dtype.itemsize}"
