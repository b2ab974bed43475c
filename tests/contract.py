"""The numerics contract in plain numpy: the same bits as the CPU kernels, computed another way.

Written from the contract's text (`llamay/mlx_kernels/__init__.py`), one operation after another on
whole arrays, without threads, tiles, pages or chunks. Fused multiply-adds are emulated, so that no
instruction of the processor is trusted either. Constants that the text leaves to csrc (the
polynomial of exp, the tree of 16 lanes) are repeated here: changing one changes the contract.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamay.formats import Format, Tensor
from llamay.mlx_kernels.program import (
    Attention,
    AttentionInput,
    AttentionOutput,
    Embed,
    FeedForward,
    Logits,
    PostNorm,
    Program,
    Rope,
)
from tests.block_codes import SUPERBLOCKS, block_codes
from tests.oracle import dequantise

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Int = NDArray[np.int64]

BLOCK, SUPERBLOCK, LANES, RUN = 32, 256, 16, 256
ZERO, ONE = np.float32(0), np.float32(1)
TINY_SCALE = np.float32(2.0**-100)


def fma(a: F32, b: F32, c: F32) -> F32:
    """float32 a * b + c, rounded once.

    The product is exact in float64. The sum is rounded there to odd (if it is inexact, to the
    neighbour whose last bit is set), so that rounding it again to float32 loses nothing (Boldo
    and Melquiond, "Emulation of FMA and correctly rounded sums").
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        wide = np.float64(c)
        total = np.asarray(product + wide)
        back = total - product
        error = (product - (total - back)) + (wide - back)
        bits = total.view(np.int64)
        inexact_even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        away = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(inexact_even, bits + away, bits).view(np.float64)
        rounded: F32 = odd.astype(np.float32)
    return rounded


def exp32(x: F32) -> F32:
    """e^x of the kernels' polynomial, 0 up to -87."""
    bounded = np.where(x > -87, x, np.float32(-87))
    count = np.rint(bounded * np.float32(float.fromhex("0x1.715476p+0")))
    r = fma(count, np.float32(-float.fromhex("0x1.62e4p-1")), bounded)
    r = fma(count, np.float32(-float.fromhex("0x1.7f7d1cp-20")), r)
    p = np.full_like(r, float.fromhex("0x1.6a238cp-10"))
    for digits in ("0x1.123a6cp-7", "0x1.5558f4p-5", "0x1.55549p-3", "0x1.fffffcp-2"):
        p = fma(p, r, np.float32(float.fromhex(digits)))
    p = fma(p, r * r, r + ONE)
    return np.where(x > -87, p * np.ldexp(ONE, count.astype(np.int32)), ZERO)


def sum_lanes(lanes: F32) -> F32:
    """[..., 16] -> [...]: lane l with l + 8, then + 4, + 2, + 1."""
    width = LANES // 2
    while width:
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
        width //= 2
    return lanes[..., 0]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x, result: [rows, columns]; columns are a multiple of 16."""
    squares = np.zeros((len(x), LANES), np.float32)
    for start in range(0, x.shape[1], LANES):
        squares = fma(x[:, start : start + LANES], x[:, start : start + LANES], squares)
    mean = sum_lanes(squares) / np.float32(x.shape[1])
    scale = ONE / np.sqrt(mean + np.float32(eps))
    return x * scale[:, None] * weight


def quantise_activations(x: F32, planes: int, span: int) -> tuple[list[Int], F32]:
    """Integers of each plane [rows, spans, span], and the scale [rows, spans] of the last plane's.

    One plane: 8 bits. Two: x is scale * (256 * the first + the second); the second is what the
    first left over, times 256, as 8 bits more.
    """
    blocks = x.reshape(len(x), -1, span)
    finite = np.isfinite(blocks).all(axis=2)
    scale = np.where(finite, np.abs(blocks).max(axis=2) / np.float32(127), np.float32(np.nan))
    live = scale >= TINY_SCALE
    quotient = blocks / np.where(live, scale, ONE)[:, :, None]
    coarse = np.rint(np.clip(quotient, -127, 127))
    integers = [coarse]
    if planes == 2:
        integers.append(np.rint(np.clip((quotient - coarse) * np.float32(256), -127, 127)))
        scale = scale / np.float32(256)
    integers = [np.where(live[:, :, None], plane, 0).astype(np.int64) for plane in integers]
    return integers, np.where(live | ~finite, scale, ZERO)


def matmul(weights: Tensor, planes: int, x: F32) -> F32:
    """[rows of x, rows of weights]: the contract's third rule."""
    if weights.format in (Format.F32, Format.F16, Format.BF16):
        acc = np.zeros((len(x), weights.rows), np.float32)
        dense = dequantise(weights.format, weights.data, weights.shape)
        for k in range(weights.columns):
            acc = fma(dense[None, :, k], x[:, k, None], acc)
        return acc
    if weights.format in SUPERBLOCKS:
        return _matmul_of_superblocks(weights, planes, x)
    return _matmul_of_blocks(weights, planes, x)


def _matmul_of_blocks(weights: Tensor, planes: int, x: F32) -> F32:
    acc = np.zeros((len(x), weights.rows), np.float32)
    blocks = block_codes(weights.format, weights.data)
    codes = blocks.codes.reshape(weights.rows, -1, BLOCK)
    scales = blocks.scale.reshape(weights.rows, -1)
    minima = None if blocks.minimum is None else blocks.minimum.reshape(weights.rows, -1)
    by_plane, x_scales = quantise_activations(x, planes, BLOCK)
    x_integers = sum(plane * 256 ** (planes - 1 - i) for i, plane in enumerate(by_plane))
    x_sums = x_scales * x_integers.sum(axis=2).astype(np.float32)
    for b in range(scales.shape[1]):
        isum = (x_integers[:, b] @ codes[:, b].T).astype(np.float32)
        acc = fma(scales[None, :, b] * x_scales[:, b, None], isum, acc)
        if minima is not None:
            acc = fma(minima[None, :, b], x_sums[:, b, None], acc)
    return acc


def _matmul_of_superblocks(weights: Tensor, planes: int, x: F32) -> F32:
    acc = np.zeros((len(x), weights.rows), np.float32)
    blocks = block_codes(weights.format, weights.data)
    assert blocks.sub_scales is not None
    shape = (weights.rows, -1, SUPERBLOCK)
    weighed = (blocks.codes * blocks.each_weights(blocks.sub_scales)).reshape(shape)
    scales = blocks.scale.reshape(weights.rows, -1)
    by_plane, x_scales = quantise_activations(x, planes, SUPERBLOCK)
    for s in range(scales.shape[1]):
        value = np.zeros_like(acc)
        for plane in by_plane:
            isum = (plane[:, s] @ weighed[:, s].T).astype(np.float32)
            value = fma(np.float32(256), value, isum)
        acc = fma(scales[None, :, s] * x_scales[:, s, None], value, acc)
        if blocks.sub_minima is None or blocks.minimum is None:
            continue
        minima = blocks.each_weights(blocks.sub_minima).reshape(shape)[:, s]
        x_integers = sum(plane[:, s] * 256 ** (planes - 1 - i) for i, plane in enumerate(by_plane))
        taken = -(x_integers @ minima.T)
        minimum = blocks.minimum.reshape(weights.rows, -1)[None, :, s]
        acc = fma(minimum * x_scales[:, s, None], taken.astype(np.float32), acc)
    return acc


def sine_cosine(x: F64) -> tuple[F64, F64]:
    """Taylor series about the nearest multiple of pi / 2, which is taken off in three parts."""
    n = np.rint(x * float.fromhex("0x1.45f306dc9c883p-1"))
    r = (x - n * float.fromhex("0x1.921fb544p+0")) - n * float.fromhex("0x1.0b4611a4p-34")
    r = r - n * float.fromhex("0x1.13198a2e03707p-65")
    square = r * r
    s, c = np.ones_like(r), np.ones_like(r)
    for k in range(18, 1, -2):
        s = 1.0 - s * square / (k * (k + 1))
        c = 1.0 - c * square / (k * (k - 1))
    s = s * r
    turn = n.astype(np.int64) & 3
    return np.choose(turn, [s, c, -s, -c]), np.choose(turn, [c, -s, -c, s])


def rotate(x: F32, rope: Rope) -> F32:
    """x: [positions, heads, head_dim], position i in row i."""
    angles = np.arange(len(x))[:, None] * np.array(rope.inverse)
    sine, cosine = (
        (table * rope.magnitude).astype(np.float32)[:, None] for table in sine_cosine(angles)
    )
    half = len(rope.inverse)
    pairs = np.s_[..., 0 : 2 * half : 2], np.s_[..., 1 : 2 * half : 2]
    if not rope.interleaved:
        pairs = np.s_[..., :half], np.s_[..., half : 2 * half]
    a, b = x[pairs[0]], x[pairs[1]]
    out = x.copy()
    out[pairs[0]], out[pairs[1]] = a * cosine - b * sine, a * sine + b * cosine
    return out


def soft_capped(x: F32, cap: float) -> F32:
    """cap * tanh(x / cap), tanh from exp; x itself if there is no cap."""
    if not cap:
        return x
    ratio = x / np.float32(cap)
    t = exp32(np.abs(ratio) * np.float32(-2))
    capped = (ONE - t) / (ONE + t) * np.float32(cap)
    return np.where(ratio > 0, capped, np.where(ratio < 0, ZERO - capped, ratio))


def capped_logits(x: F32, cap: float) -> F32:
    """NaN where x is not finite."""
    with np.errstate(invalid="ignore"):
        return soft_capped(x, cap) + (x - x) if cap else x


def attend_run(
    q: F32, keys: F32, values: F32, seen: NDArray[np.bool_], scale: float, soft_cap: float
):
    """Partial results of queries [rows, heads, head_dim] over one run: (largest, sum, values).

    keys, values: [positions, kv_heads, head_dim]; seen: [rows, positions], some of each row
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
    scores = np.zeros((*q.shape[:2], len(keys)), np.float32)
    for d in range(q.shape[2]):
        scores = fma(keys.T[d][None], q[:, :, d, None], scores)
    scores = soft_capped(scores * np.float32(scale), soft_cap)
    scores = np.where(seen[:, None], scores, np.float32(-np.inf))
    largest = scores.max(axis=2)
    weights = exp32(scores - largest[:, :, None])
    lanes = np.zeros((*q.shape[:2], LANES), np.float32)
    for start in range(0, len(keys), LANES):
        part = weights[:, :, start : start + LANES]
        lanes[:, :, : part.shape[2]] += part
    acc = np.zeros_like(q)
    for t in range(len(keys)):
        added = fma(weights[:, :, t, None], values[None, t], acc)
        acc = np.where(seen[:, t, None, None], added, acc)
    return largest, sum_lanes(lanes), acc


def attention(q: F32, k: F32, v: F32, scale: float, window: int, soft_cap: float) -> F32:
    """Causal; q: [positions, heads, head_dim], k and v: [positions, kv_heads, head_dim]."""
    out = np.empty_like(q)
    positions = np.arange(len(q))
    for first in range(0, len(q), RUN):  # queries by runs too: those of run r see runs up to r
        rows = positions[first : first + RUN]
        from_where = rows + 1 - window if window else np.zeros_like(rows)
        state = None
        for start in range(0, first + 1, RUN):
            here = positions[None, start : start + RUN]
            seen = (here >= from_where[:, None]) & (here <= rows[:, None])
            if not seen.any():
                continue
            run = np.s_[start : start + RUN]
            with np.errstate(invalid="ignore"):  # rows that see nothing of the run
                part = attend_run(q[rows], k[run], v[run], seen, scale, soft_cap)
                state = part if state is None else merge(state, part)
        out[rows] = state[2] / state[1][:, :, None]
    return out


def merge(state, part):
    """Folds the later partial result into the earlier one.

    A row that sees nothing of the earlier run begins with the later one.
    """
    begins = np.isneginf(state[0])
    both = _merge_both(state, part)
    return tuple(
        np.where(begins[..., None] if each.ndim == 3 else begins, each, merged)
        for each, merged in zip(part, both, strict=True)
    )


def _merge_both(state, part):
    largest = np.maximum(state[0], part[0])
    old, new = exp32(state[0] - largest), exp32(part[0] - largest)
    total = fma(state[1], old, part[1] * new)
    return largest, total, fma(state[2], old[:, :, None], part[2] * new[:, :, None])


def gated(gate: F32, up: F32, activation: str) -> F32:
    """silu(gate) * up, or gelu(gate) * up by gelu(x) = x sigmoid(2u)."""
    minus = ZERO - gate
    if activation == "gelu":
        inner = fma(gate * gate * gate, np.float32(0.044715), gate)
        minus = inner * np.float32(-2 * np.sqrt(2 / np.pi))
    sigmoid = ONE / (ONE + exp32(np.minimum(minus, np.float32(87))))
    return gate * sigmoid * up


def vector(tensor: Tensor) -> F32:
    return dequantise(tensor.format, tensor.data, tensor.shape)


def forward(program: Program, ids: Sequence[int]) -> F32:
    """Logits [len(ids), vocab] after each token of one context that starts at 0."""
    stream = q = k = v = attended = np.empty(0, np.float32)
    for operation in program.operations:
        match operation:
            case Embed(table, scale):
                rows = dequantise(table.format, table.data, table.shape)[np.asarray(ids)]
                stream = rows * np.float32(scale)
            case AttentionInput():
                q, k, v = attention_input(program, operation, stream)
            case Attention(_, window, soft_cap):
                attended = attention(q, k, v, program.attention_scale, window, soft_cap)
            case AttentionOutput(weights, post_norm):
                y = matmul(weights, 1, attended.reshape(len(ids), -1))
                stream = stream + post_normed(y, post_norm)
            case FeedForward():
                x = rms_norm(stream, vector(operation.norm), operation.eps)
                parts = matmul(operation.gate, 1, x), matmul(operation.up, 1, x)
                y = matmul(operation.down, 1, gated(*parts, operation.activation))
                stream = stream + post_normed(y, operation.post_norm)
            case Logits():
                x = rms_norm(stream, vector(operation.norm), operation.eps)
                return capped_logits(matmul(operation.head, 2, x), operation.soft_cap)
    raise AssertionError("the program has no Logits")


def post_normed(y: F32, norm: PostNorm | None) -> F32:
    return y if norm is None else rms_norm(y, vector(norm.weight), norm.eps)


def attention_input(program: Program, op: AttentionInput, stream: F32) -> tuple[F32, F32, F32]:
    x = rms_norm(stream, vector(op.norm), op.eps)

    def heads(weights: Tensor, bias: Tensor | None) -> F32:
        y = matmul(weights, 2, x)
        y = y if bias is None else y + vector(bias)
        return y.reshape(len(x), -1, program.head_dim)

    def turned(x: F32, norm: Tensor | None) -> F32:
        if norm is not None:
            flat = rms_norm(x.reshape(-1, program.head_dim), vector(norm), op.eps)
            x = flat.reshape(x.shape)
        return rotate(x, program.ropes[op.rope])

    q = turned(heads(op.query, op.query_bias), op.query_norm)
    k = turned(heads(op.key, op.key_bias), op.key_norm)
    return q, k, heads(op.value, op.value_bias)
