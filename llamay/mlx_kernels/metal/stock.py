"""What each kernel computes, in stock MLX operations: the oracle of their check, and what replaces
one that fails it. Slow, and exact in no promise; weights that it touches are dequantised whole.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from llamay.formats import KVLayout, Tensor
from llamay.mlx_kernels import Int32Array
from llamay.mlx_kernels.metal.pages import PAGE_BITS, row_words
from llamay.mlx_kernels.metal.schedule import RUN, Span
from llamay.mlx_kernels.metal.weights import Matrix
from llamay.mlx_kernels.program import Activation
from llamay.mlx_kernels.reference import (
    HALF_MAX,
    HIGHEST_SCALE,
    SMALLEST,
    activated,
    capped_logits,
    dequantize,
    soft_capped,
)


class StockKernels:
    """The methods of `Kernels`."""

    def __init__(self) -> None:
        self._dense: dict[int, tuple[Matrix, mx.array]] = {}

    def embed(self, tokens: mx.array, rows: int, table: Matrix, scale: float) -> mx.array:
        """See `Kernels`."""
        return self._weights(table)[tokens[:rows]] * scale

    def rms_norm(
        self, x: mx.array, norm: mx.array, eps: float, residual: mx.array | None = None
    ) -> mx.array:
        """See `Kernels`."""
        y = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * norm
        return y if residual is None else residual + y

    def qkv(
        self,
        x: mx.array,
        norm: mx.array,
        eps: float,
        matrices: Sequence[Matrix],
        bias: mx.array | None,
    ) -> mx.array:
        """See `Kernels`."""
        n = self.rms_norm(x, norm, eps)
        y = mx.concatenate([n @ self._weights(matrix).T for matrix in matrices], axis=1)
        return y if bias is None else y + bias

    def rotate(
        self,
        qkv: mx.array,
        norms: mx.array | None,
        eps: float,
        cosine: mx.array,
        sine: mx.array,
        layout: KVLayout,
        interleaved: bool,
    ) -> tuple[mx.array, mx.array]:
        """See `Kernels`."""
        rows, kv_heads = qkv.shape[0], layout.kv_heads
        split = qkv.reshape(rows, -1, layout.head_dim)
        heads = split.shape[1] - 2 * kv_heads
        tables = cosine[:rows, None], sine[:rows, None]
        given = [split[:, :heads], split[:, heads : heads + kv_heads]]
        if norms is not None:
            given = [self.rms_norm(part, norms[of], eps) for of, part in enumerate(given)]
        turned = _rotated(mx.concatenate(given, axis=1), *tables, interleaved)
        vectors = (turned[:, heads:], split[:, heads + kv_heads :])
        words = [
            _words(part, element).reshape(rows, -1)
            for part, element in zip(vectors, layout.precision.elements, strict=True)
        ]
        queries = mx.contiguous(turned[:, :heads].reshape(rows, -1))
        return queries, mx.concatenate(words, axis=1)

    def attend(
        self,
        queries: mx.array,
        positions: mx.array,
        span: Span,
        items: mx.array,
        pages: mx.array,
        slabs: Sequence[mx.array],
        scale: float,
        layout: KVLayout,
        window: int,
        soft_cap: float,
    ) -> mx.array:
        """See `Kernels`."""
        ends, places = np.array(positions), np.array(pages)
        lines = {
            (row, item[1]): item[0] for item in np.array(items) for row in item[4 : 4 + item[2]]
        }
        attended = []
        for row in range(span.start, span.end):
            first = max(0, ends[row] + 1 - window) if window else 0
            seen = np.arange(first, ends[row] + 1)
            line = np.array([lines[row, position // RUN] for position in seen])
            stored = _gathered(slabs, places[line, seen // layout.page_tokens], seen, layout)
            keys, values = stored_vectors(stored, layout)
            query = queries[row].reshape(layout.kv_heads, -1, layout.head_dim)
            scores = soft_capped(query @ keys.transpose(1, 2, 0) * scale, soft_cap)
            attended.append((mx.softmax(scores, axis=-1) @ values.swapaxes(0, 1)).reshape(-1))
        return mx.stack(attended)

    def project(self, x: mx.array, weights: Matrix, residual: mx.array | None) -> mx.array:
        """See `Kernels`."""
        y = x @ self._weights(weights).T
        return y if residual is None else residual + y

    def gate_up(
        self,
        x: mx.array,
        norm: mx.array,
        eps: float,
        gate: Matrix,
        up: Matrix,
        activation: Activation,
    ) -> mx.array:
        """See `Kernels`."""
        n = self.rms_norm(x, norm, eps)
        return activated(n @ self._weights(gate).T, activation) * (n @ self._weights(up).T)

    def logits(
        self, x: mx.array, norm: mx.array, eps: float, head: Matrix, soft_cap: float
    ) -> mx.array:
        """See `Kernels`."""
        return capped_logits(self.rms_norm(x, norm, eps) @ self._weights(head).T, soft_cap)

    def best(self, logits: mx.array, count: int) -> tuple[mx.array, mx.array, mx.array]:
        """See `Kernels`."""
        given = np.array(logits)
        ids = np.argsort(-given, axis=1, kind="stable")[:, :count].astype(np.int32)
        values = np.take_along_axis(given, ids, axis=1)
        shares = np.array(mx.exp(logits - mx.max(logits, axis=1, keepdims=True)))
        with np.errstate(invalid="ignore"):
            totals = np.floor(shares * np.float32(2**40)).astype(np.uint64).sum(axis=1)
        finite = np.isfinite(given).all(axis=1)
        return mx.array(values), mx.array(ids), mx.array(np.where(finite, totals, 0))

    def _weights(self, matrix: Matrix) -> mx.array:
        """[rows, columns] float32."""
        if id(matrix) not in self._dense:
            data = np.asarray(matrix.data).data
            tensor = Tensor("", matrix.format, (matrix.rows, matrix.columns), data)
            # The matrix is held too, so that its id stays its own.
            self._dense[id(matrix)] = matrix, dequantize(tensor)
        return self._dense[id(matrix)][1]


def _rotated(x: mx.array, cosine: mx.array, sine: mx.array, interleaved: bool) -> mx.array:
    """x: [rows, heads, head_dim]; cosine, sine: [rows, 1, pairs]."""
    pairs = cosine.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
    parts = [a * cosine - b * sine, a * sine + b * cosine]
    if interleaved:
        return mx.concatenate([mx.stack(parts, axis=-1).reshape(turned.shape), rest], axis=-1)
    return mx.concatenate([*parts, rest], axis=-1)


def _words(x: mx.array, element: str) -> mx.array:
    """Vectors [..., head_dim] as they are stored: [..., words] uint32."""
    if element == "f4":
        return mx.contiguous(x).view(mx.uint32)
    if element == "f2":
        return mx.clip(x, -float(HALF_MAX), float(HALF_MAX)).astype(mx.float16).view(mx.uint32)
    largest = mx.max(mx.abs(x), axis=-1, keepdims=True)
    bits = ((largest / 127).view(mx.uint32) + 0xFF) & 0xFFFFFF00
    scale = mx.minimum(bits.view(mx.float32), float(HIGHEST_SCALE))
    scale = mx.where(largest < float(SMALLEST), 0.0, scale)
    quants = mx.where(scale > 0, mx.round(x / mx.where(scale > 0, scale, 1.0)), 0.0)
    return mx.concatenate([scale.view(mx.uint32), quants.astype(mx.int8).view(mx.uint32)], axis=-1)


def _gathered(
    slabs: Sequence[mx.array], places: Int32Array, positions: Int32Array, layout: KVLayout
) -> mx.array:
    """[positions, words]: stored rows; places: of each position's page."""
    page = places & ((1 << PAGE_BITS) - 1)
    rows = page * layout.page_tokens + positions % layout.page_tokens
    found = mx.zeros((len(positions), row_words(layout)), dtype=mx.uint32)
    for chunk, slab in enumerate(slabs):
        here = places >> PAGE_BITS == chunk
        content = slab[mx.array(np.where(here, rows, 0))]
        found = mx.where(mx.array(here)[:, None], content, found)
    return found


def stored_vectors(stored: mx.array, layout: KVLayout) -> list[mx.array]:
    """Keys and values [positions, kv_heads, head_dim] of stored rows [positions, words]."""
    keys = layout.kv_heads * layout.precision.vector_bytes(layout.head_dim)[0] // 4
    shape = stored.shape[0], layout.kv_heads, -1
    parts = (stored[:, :keys].reshape(shape), stored[:, keys:].reshape(shape))
    return [_floats(x, e) for x, e in zip(parts, layout.precision.elements, strict=True)]


def _floats(words: mx.array, element: str) -> mx.array:
    """The opposite of `_words`."""
    words = mx.contiguous(words)
    if element == "f4":
        return words.view(mx.float32)
    if element == "f2":
        return words.view(mx.float16).astype(mx.float32)
    quants = mx.contiguous(words[..., 1:]).view(mx.int8).astype(mx.float32)
    return mx.contiguous(words[..., :1]).view(mx.float32) * quants
