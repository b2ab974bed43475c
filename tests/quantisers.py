"""Rounds float32 weights to the formats of GGUF files; simple, and the same bytes everywhere.

Scales come from the largest and least weights, without any search for better ones. In formats whose
sub-blocks' scales have a sign, every second one is negative.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamay.formats import Format
from tests.block_codes import TABLE

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Int = NDArray[Any]


def _inverse(scale: F32) -> F32:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def _half(scale: F32) -> F32:
    return scale.astype("<f2").astype(np.float32)


def _half_bytes(scale: F32) -> Bytes:
    return scale.astype("<f2").view(np.uint8)


def _pack(quants: Int, chunk: int, bits: int) -> Bytes:
    """[n, k] codes -> bytes [n, ...]: of each 8 / bits chunks, the first in the lowest bits."""
    parts = quants.astype(np.uint8).reshape(len(quants), -1, 8 // bits, chunk)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[None, None, :, None]
    packed: Bytes = np.bitwise_or.reduce(parts << shifts, axis=2).reshape(len(quants), -1)
    return packed


def _largest(x: F32) -> F32:
    """The value of largest size in each row, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)


def _symmetric(x: F32, half_range: int) -> tuple[F32, Int]:
    """Scale and codes 0 .. 2 * half_range - 1 of w = d * (q - half_range)."""
    d = _half(_largest(x) / -half_range)
    return d, np.clip(np.rint(x * _inverse(d)) + half_range, 0, 2 * half_range - 1)


def _with_minimum(x: F32, highest: int) -> tuple[F32, F32, Int]:
    """Scale, minimum and codes of w = d * q + m with m the least weight."""
    m = _half(x.min(axis=1, keepdims=True))
    d = _half((x.max(axis=1, keepdims=True) - m) / highest)
    return d, m, np.clip(np.rint((x - m) * _inverse(d)), 0, highest)


def _high_bits(quants: Int) -> Bytes:
    return np.packbits(quants.astype(np.uint8) >> np.uint8(4), axis=1, bitorder="little")


def _quantise_q4_0(x: F32) -> Bytes:
    d, quants = _symmetric(x, 8)
    return np.concatenate([_half_bytes(d), _pack(quants, 16, 4)], axis=1)


def _quantise_q4_1(x: F32) -> Bytes:
    d, m, quants = _with_minimum(x, 15)
    return np.concatenate([_half_bytes(d), _half_bytes(m), _pack(quants, 16, 4)], axis=1)


def _quantise_q5_0(x: F32) -> Bytes:
    d, q = _symmetric(x, 16)
    return np.concatenate([_half_bytes(d), _high_bits(q), _pack(q % 16, 16, 4)], axis=1)


def _quantise_q5_1(x: F32) -> Bytes:
    d, m, q = _with_minimum(x, 31)
    parts = [_half_bytes(d), _half_bytes(m), _high_bits(q), _pack(q % 16, 16, 4)]
    return np.concatenate(parts, axis=1)


def _quantise_q8_0(x: F32) -> Bytes:
    """w = d * q with q in -127..127."""
    d = _half(np.abs(x).max(axis=1, keepdims=True) / 127)
    quants = np.clip(np.rint(x * _inverse(d)), -127, 127).astype(np.int8)
    return np.concatenate([_half_bytes(d), quants.view(np.uint8)], axis=1)


def _nearest_codes(x: F32) -> Int:
    """The code of the table's value nearest to each of x, which is divided by the scale."""
    return np.abs(x[..., None] - TABLE.astype(np.float32)).argmin(axis=-1)


def _quantise_iq4_nl(x: F32) -> Bytes:
    d = _half(_largest(x) / -127)
    return np.concatenate([_half_bytes(d), _pack(_nearest_codes(x * _inverse(d)), 16, 4)], axis=1)


# --- superblocks of 256 --------------------


def _scaled(x: F32, length: int, largest: float, highest_scale: int) -> tuple[F32, Int, F32]:
    """d [n, 1], signed scales of sub-blocks, and x divided by both [n, 256]."""
    blocks = x.reshape(len(x), -1, length)
    wanted = np.abs(blocks).max(axis=2) / np.float32(largest)
    d = _half(wanted.max(axis=1, keepdims=True) / highest_scale)
    scales = np.rint(wanted * _inverse(d))
    scales[:, 1::2] *= -1
    quotients = blocks * _inverse((d * scales).astype(np.float32))[:, :, None]
    return d, scales.astype(np.int64), quotients.reshape(len(x), -1)


def _scaled_with_minima(
    x: F32, length: int, highest: int, highest_scale: int
) -> tuple[F32, F32, Int, Int, Int]:
    """d, dmin, scales, minima and codes of w = d * s * q - dmin * m."""
    blocks = x.reshape(len(x), -1, length)
    least = np.minimum(blocks.min(axis=2), 0)
    wanted = (blocks.max(axis=2) - least) / np.float32(highest)
    d = _half(wanted.max(axis=1, keepdims=True) / highest_scale)
    dmin = _half((-least).max(axis=1, keepdims=True) / highest_scale)
    scales, minima = np.rint(wanted * _inverse(d)), np.rint(-least * _inverse(dmin))
    raised = blocks + (dmin * minima)[:, :, None]
    quotients = raised * _inverse((d * scales).astype(np.float32))[:, :, None]
    codes = np.clip(np.rint(quotients), 0, highest)
    return d, dmin, scales.astype(np.int64), minima.astype(np.int64), codes.reshape(len(x), -1)


def _k_scale_bytes(scales: Int, minima: Int) -> Bytes:
    low_s, high_s, low_m, high_m = scales[:, :4], scales[:, 4:], minima[:, :4], minima[:, 4:]
    parts = [low_s | high_s >> 4 << 6, low_m | high_m >> 4 << 6, high_s & 15 | (high_m & 15) << 4]
    return np.concatenate(parts, axis=1).astype(np.uint8)


def _quantise_q2_k(x: F32) -> Bytes:
    d, dmin, scales, minima, codes = _scaled_with_minima(x, 16, 3, 15)
    parts = [(scales | minima << 4).astype(np.uint8), _pack(codes, 32, 2)]
    return np.concatenate([*parts, _half_bytes(d), _half_bytes(dmin)], axis=1)


def _quantise_q3_k(x: F32) -> Bytes:
    d, scales, quotients = _scaled(x, 16, 3.5, 31)
    codes, scales = np.clip(np.rint(quotients), -4, 3).astype(np.int64) + 4, scales + 32
    parts = [_pack(codes >> 2, 32, 1), _pack(codes & 3, 32, 2)]
    parts += [_pack(scales & 15, 8, 4), _pack(scales >> 4, 4, 2), _half_bytes(d)]
    return np.concatenate(parts, axis=1)


def _quantise_q4_k(x: F32) -> Bytes:
    d, dmin, scales, minima, codes = _scaled_with_minima(x, 32, 15, 63)
    halves = [_half_bytes(d), _half_bytes(dmin)]
    return np.concatenate([*halves, _k_scale_bytes(scales, minima), _pack(codes, 32, 4)], axis=1)


def _quantise_q5_k(x: F32) -> Bytes:
    d, dmin, scales, minima, codes = _scaled_with_minima(x, 32, 31, 63)
    parts = [_half_bytes(d), _half_bytes(dmin), _k_scale_bytes(scales, minima)]
    return np.concatenate([*parts, _pack(codes // 16, 32, 1), _pack(codes % 16, 32, 4)], axis=1)


def _quantise_q6_k(x: F32) -> Bytes:
    d, scales, quotients = _scaled(x, 16, 32, 127)
    codes = np.clip(np.rint(quotients), -32, 31).astype(np.int64) + 32
    parts = [_pack(codes & 15, 64, 4), _pack(codes >> 4, 32, 2)]
    return np.concatenate([*parts, scales.astype(np.int8).view(np.uint8), _half_bytes(d)], axis=1)


def _quantise_iq4_xs(x: F32) -> Bytes:
    d, scales, quotients = _scaled(x, 32, 127, 31)
    scales = scales + 32
    top = _pack(scales >> 4, 1, 2)
    parts = [_half_bytes(d), top, _pack(scales & 15, 1, 4), _pack(_nearest_codes(quotients), 16, 4)]
    return np.concatenate(parts, axis=1)


def _bf16(x: F32) -> Bytes:
    """The upper half of each value: rounded towards zero."""
    return (x.view("<u4") >> np.uint32(16)).astype("<u2").view(np.uint8)


_QUANTISERS: dict[Format, Callable[[F32], Bytes]] = {
    Format.F32: lambda x: x.astype("<f4").view(np.uint8),
    Format.F16: lambda x: x.astype("<f2").view(np.uint8),
    Format.BF16: _bf16,
    Format.Q4_0: _quantise_q4_0,
    Format.Q4_1: _quantise_q4_1,
    Format.Q5_0: _quantise_q5_0,
    Format.Q5_1: _quantise_q5_1,
    Format.Q8_0: _quantise_q8_0,
    Format.IQ4_NL: _quantise_iq4_nl,
    Format.Q2_K: _quantise_q2_k,
    Format.Q3_K: _quantise_q3_k,
    Format.Q4_K: _quantise_q4_k,
    Format.Q5_K: _quantise_q5_k,
    Format.Q6_K: _quantise_q6_k,
    Format.IQ4_XS: _quantise_iq4_xs,
}


def quantise(weights: F32, format: Format) -> bytes:
    """The bytes of a tensor in `format`; rows are a multiple of its block length."""
    assert weights.shape[-1] % format.block_len == 0
    return _QUANTISERS[format](weights.reshape(-1, format.block_len)).tobytes()
