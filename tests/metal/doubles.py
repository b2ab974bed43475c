"""Stands in for the kernels where the graph is what is tested: MLX operations that run anywhere."""

import mlx.core as mx

from llamay.mlx_kernels.metal import pages


class Doubles:
    """The methods of `Kernels`, for pages in one chunk. What a row gives depends on its token, its
    position by the rope's slowest pair, and on what its context holds there and at the first
    position that it sees."""

    launches = 0

    def embed(self, tokens, rows, table, scale):
        return mx.broadcast_to(tokens[:rows, None] / 8, (rows, table.columns)) + 0.5

    def rms_norm(self, x, norm, eps, residual=None):
        return x if residual is None else residual + x

    def qkv(self, x, norm, eps, matrices, bias):
        return mx.concatenate([x * 2, x, x], axis=1)

    def rotate(self, qkv, norms, eps, cosine, sine, layout, interleaved):
        turn = sine[: len(qkv), -1:] * 256  # small angles
        stored = mx.contiguous(qkv[:, : pages.row_words(layout)] + turn)
        return qkv, stored.view(mx.uint32)

    def attend(
        self, queries, positions, span, items, places, slabs, scale, layout, window, soft_cap
    ):
        size, at = layout.page_tokens, positions[: span.end]
        lines = mx.zeros(at.shape, dtype=mx.int32)
        for column in range(4, 4 + span.tile):  # unused columns repeat the first row
            lines[items[:, column]] = items[:, 0]
        first = mx.maximum(at + 1 - window, 0) if window else mx.zeros_like(at)
        seen = mx.stack([at, first])
        read = slabs[0][places[lines, seen // size] * size + seen % size]
        return queries + mx.sum(mx.contiguous(read).view(mx.float32), axis=(0, 2))[:, None]

    def project(self, x, weights, residual):
        y = x[:, : weights.rows]
        return y if residual is None else residual + y

    def gate_up(self, x, norm, eps, gate, up, activation):
        return mx.concatenate([x, x], axis=1)

    def logits(self, x, norm, eps, head, soft_cap):
        return mx.sin(x[:, :1] + mx.arange(head.rows))

    def best(self, logits, count):
        ids = mx.argsort(-logits, axis=1)[:, :count]
        totals = mx.sum(mx.exp(logits - mx.max(logits, axis=1, keepdims=True)), axis=1) * 2**20
        values = mx.take_along_axis(logits, ids, axis=1)
        return values, ids.astype(mx.int32), totals.astype(mx.uint64) * 2**20
