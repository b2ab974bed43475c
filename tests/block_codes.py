"""What the blocks of quantised weights hold, read from the structures of ggml's `ggml-common.h`.

A weight is `scale * s * code`, with `+ minimum` or, in formats of superblocks, `- minimum * m`;
s and m are its sub-block's scale and minimum.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamay.formats import Format

F32 = NDArray[np.float32]
Int = NDArray[np.int64]
Bytes = NDArray[np.uint8]

TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
SUPERBLOCKS = (
    Format.Q2_K, Format.Q3_K, Format.Q4_K, Format.Q5_K, Format.Q6_K, Format.IQ4_XS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Codes:
    """codes [blocks, block_len], scale and minimum [blocks], of sub-blocks [blocks, sub-blocks]."""

    codes: Int
    scale: F32
    minimum: F32 | None = None
    sub_scales: Int | None = None
    sub_minima: Int | None = None

    def each_weights(self, of_sub_blocks: Int) -> Int:
        """[blocks, block_len]: each weight's, of an array with an entry for each sub-block."""
        return of_sub_blocks.repeat(self.codes.shape[1] // of_sub_blocks.shape[1], axis=1)

    def values(self) -> F32:
        """Weights [blocks, block_len], rounded in gguf-py's order."""
        scale = self.scale[:, None]
        if self.sub_scales is not None:
            scale = scale * self.each_weights(self.sub_scales).astype(np.float32)
        values: F32 = scale * self.codes.astype(np.float32)
        if self.sub_minima is not None:
            assert self.minimum is not None
            return values - self.minimum[:, None] * self.each_weights(self.sub_minima).astype("f4")
        return values if self.minimum is None else values + self.minimum[:, None]


def _half(blocks: Bytes, offset: int) -> F32:
    raw = np.ascontiguousarray(blocks[:, offset : offset + 2])
    return raw.view("<f2")[:, 0].astype(np.float32)


def _fields(packed: Bytes, shifts: list[int], mask: int) -> Int:
    """[n, k] bytes -> [n, shifts, k]: the bits of `mask` after each shift to the right."""
    wide = packed[:, None, :].astype(np.int64) >> np.array(shifts)[None, :, None]
    return wide & mask


def _nibbles(packed: Bytes, chunk: int) -> Int:
    """Of each `chunk` bytes first the low halves, then the high ones."""
    count = len(packed)
    return _fields(packed.reshape(-1, chunk), [0, 4], 15).reshape(count, -1)


def _k_scales(packed: Bytes) -> tuple[Int, Int]:
    """Eight 6-bit scales and minima of 12 bytes."""
    d, m, high = (packed[:, i : i + 4].astype(np.int64) for i in (0, 4, 8))
    scales = np.concatenate([d & 63, (high & 15) | (d >> 6 << 4)], axis=1)
    return scales, np.concatenate([m & 63, (high >> 4) | (m >> 6 << 4)], axis=1)


def _block(format: Format, b: Bytes) -> Codes:
    """Blocks of 32."""
    match format:
        case Format.Q4_0:
            return Codes(_nibbles(b[:, 2:], 16) - 8, _half(b, 0))
        case Format.Q4_1:
            return Codes(_nibbles(b[:, 4:], 16), _half(b, 0), _half(b, 2))
        case Format.Q5_0:
            high = np.unpackbits(b[:, 2:6], axis=1, bitorder="little").astype(np.int64)
            return Codes((_nibbles(b[:, 6:], 16) | high << 4) - 16, _half(b, 0))
        case Format.Q5_1:
            high = np.unpackbits(b[:, 4:8], axis=1, bitorder="little").astype(np.int64)
            return Codes(_nibbles(b[:, 8:], 16) | high << 4, _half(b, 0), _half(b, 2))
        case Format.Q8_0:
            return Codes(b[:, 2:].view(np.int8).astype(np.int64), _half(b, 0))
        case Format.IQ4_NL:
            return Codes(TABLE[_nibbles(b[:, 2:], 16)], _half(b, 0))
    raise KeyError(format)


def _low_pairs(packed: Bytes) -> Int:
    """64 bytes: of each 32 the lowest two bits, then the next ..."""
    count = len(packed)
    return _fields(packed.reshape(-1, 32), [0, 2, 4, 6], 3).reshape(count, -1)


def _superblock(format: Format, b: Bytes) -> Codes:
    """Blocks of 256."""
    match format:
        case Format.Q2_K:
            scales, minima = _fields(b[:, :16], [0, 4], 15).transpose(1, 0, 2)
            return Codes(_low_pairs(b[:, 16:80]), _half(b, 80), _half(b, 82), scales, minima)
        case Format.Q3_K:
            high = _fields(b[:, :32], list(range(8)), 1).reshape(len(b), -1)
            low = _fields(b[:, 96:104], [0, 4], 15).reshape(len(b), -1)
            top = _fields(b[:, 104:108], [0, 2, 4, 6], 3).reshape(len(b), -1)
            codes = (_low_pairs(b[:, 32:96]) | high << 2) - 4
            return Codes(codes, _half(b, 108), sub_scales=(low | top << 4) - 32)
        case Format.Q4_K:
            return Codes(_nibbles(b[:, 16:], 32), _half(b, 0), _half(b, 2), *_k_scales(b[:, 4:16]))
        case Format.Q5_K:
            high = _fields(b[:, 16:48], list(range(8)), 1).reshape(len(b), -1)
            codes = _nibbles(b[:, 48:], 32) | high << 4
            return Codes(codes, _half(b, 0), _half(b, 2), *_k_scales(b[:, 4:16]))
        case Format.Q6_K:
            low = _nibbles(b[:, :128], 64)
            high = _fields(b[:, 128:192].reshape(-1, 32), [0, 2, 4, 6], 3).reshape(len(b), -1)
            scales = b[:, 192:208].view(np.int8).astype(np.int64)
            return Codes((low | high << 4) - 32, _half(b, 208), sub_scales=scales)
        case Format.IQ4_XS:
            low = _fields(b[:, 4:8].reshape(-1, 1), [0, 4], 15).reshape(len(b), -1)
            top = b[:, 2].astype(np.int64) | b[:, 3].astype(np.int64) << 8
            scales = low | (top[:, None] >> np.arange(0, 16, 2) & 3) << 4
            return Codes(TABLE[_nibbles(b[:, 8:], 16)], _half(b, 0), sub_scales=scales - 32)
    raise KeyError(format)


def block_codes(format: Format, data: Any) -> Codes:
    """The blocks of a tensor's bytes, in order. Raises KeyError for float formats."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, format.block_bytes)
    return (_superblock if format in SUPERBLOCKS else _block)(format, blocks)
