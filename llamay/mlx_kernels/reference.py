"""The reference kernel set: stock MLX operations in float32, obviously right and slow.

It promises no bit equality; tests hold the others against it. Weights are dequantised whole.
A page is [layers, 2, kv_heads, page_tokens, head_dim] float32, whatever the KV precision: it holds
the values that the precision can hold.
"""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from llamay.formats import KVLayout, Tensor
from llamay.mlx_kernels import (
    CONTRACT_VERSION,
    NONE_REPLACED,
    Best,
    ByteArray,
    Control,
    Float32Array,
    RunStep,
    Slabs,
    Step,
    StepLogits,
    _cpu,
    check_rows,
)
from llamay.mlx_kernels.program import (
    Activation,
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

HALF_MAX = np.float32(65504)
SMALLEST = np.float32(2.0**-100)
HIGHEST_SCALE = np.float32(float.fromhex("0x1.0204p121"))  # 127 times the next one is infinite


class ReferenceKernels:
    """Implements `KernelSet`; not exact."""

    exact = False
    replaced = NONE_REPLACED
    device_use = None
    name = "reference"
    threads = 1
    row_threads = 1
    numerics_id = f"reference-v{CONTRACT_VERSION}"

    def prepare(self, program: Program) -> RunStep:
        """See `KernelSet`."""
        weights: dict[int, mx.array] = {}

        def run(step: Step, slabs: Slabs, control: Control) -> StepLogits | None:
            # MLX does not check indices.
            if step.tokens.min() < 0 or step.tokens.max() >= program.vocab_size:
                raise ValueError(f"a token is not in the vocabulary of {program.vocab_size}")
            forward = _Forward(program, weights, step, slabs)
            for index, operation in enumerate(program.operations):
                if control.cancelled:
                    return None
                forward.apply(operation)
                control.words[1] = index + 1
            return StepLogits(np.array(forward.logits))

        return run

    def best(self, logits: Float32Array, count: int) -> tuple[Best, ...]:
        """See `KernelSet`."""
        return ()

    def new_slab(self, layout: KVLayout, pages: int) -> Any:
        """[pages, layers, 2, kv_heads, page_tokens, head_dim] float32."""
        shape = (layout.layers, 2, layout.kv_heads, layout.page_tokens, layout.head_dim)
        return mx.zeros((pages, *shape), dtype=mx.float32)

    def page_bytes(self, layout: KVLayout) -> int:
        """See `KernelSet`."""
        return layout.layers * 2 * layout.kv_heads * layout.page_tokens * layout.head_dim * 4

    def copy_page(self, slabs: Slabs, source: int, target: int) -> None:
        """See `KernelSet`."""
        slab, at = divmod(source, slabs.pages_per_slab)
        content = slabs.arrays[slab][at]
        slab, at = divmod(target, slabs.pages_per_slab)
        slabs.arrays[slab][at] = content

    def export_rows(
        self,
        slabs: Slabs,
        pages: Sequence[int],
        start: int,
        end: int,
        out: ByteArray | None = None,
    ) -> ByteArray:
        """See `KernelSet`."""
        layout = slabs.layout
        if out is None:
            out = np.empty((end - start, layout.row_bytes), dtype=np.uint8)
        check_rows(out, layout, end - start)
        for row, (array, at, offset) in enumerate(_entries(slabs, pages, start, end)):
            content = np.array(array[at, :, :, :, offset])
            parts = [
                _encode(content[:, part], element).reshape(layout.layers, -1)
                for part, element in enumerate(layout.precision.elements)
            ]
            out[row] = np.concatenate(parts, axis=1).reshape(-1)
        return out

    def import_rows(self, slabs: Slabs, pages: Sequence[int], start: int, rows: ByteArray) -> None:
        """See `KernelSet`."""
        layout = slabs.layout
        check_rows(rows, layout, len(rows))
        split = layout.kv_heads * layout.precision.vector_bytes(layout.head_dim)[0]
        entries = _entries(slabs, pages, start, start + len(rows))
        for row, (array, at, offset) in zip(rows, entries, strict=True):
            parts = np.split(row.reshape(layout.layers, -1), [split], axis=1)
            content = [
                _decode(part.reshape(layout.layers, layout.kv_heads, -1), element)
                for part, element in zip(parts, layout.precision.elements, strict=True)
            ]
            array[at, :, :, :, offset] = mx.array(np.stack(content, axis=1))


def _entries(
    slabs: Slabs, pages: Sequence[int], start: int, end: int
) -> list[tuple[mx.array, int, int]]:
    """For each position its slab, the page's place in the slab, and the place in the page."""
    page_tokens = slabs.layout.page_tokens
    if start < 0 or end > len(pages) * page_tokens:
        raise ValueError("a position lies outside the pages")
    entries = []
    for position in range(start, end):
        slab, at = divmod(int(pages[position // page_tokens]), slabs.pages_per_slab)
        entries.append((slabs.arrays[slab], at, position % page_tokens))
    return entries


def _encode(x: Float32Array, element: str) -> ByteArray:
    """Vectors [..., head_dim] as they are stored: [..., bytes] uint8."""
    if element == "f4":
        return np.ascontiguousarray(x).view(np.uint8)
    if element == "f2":
        return np.clip(x, -HALF_MAX, HALF_MAX).astype(np.float16).view(np.uint8)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        bits = (largest / np.float32(127)).view(np.uint32) + np.uint32(0xFF)
        scale = np.minimum((bits & np.uint32(0xFFFFFF00)).view(np.float32), HIGHEST_SCALE)
        scale = np.where(np.isfinite(largest), scale, np.float32(np.nan))
        scale = np.where(largest < SMALLEST, np.float32(0), scale)
        quants = np.where(scale > 0, np.rint(x / np.where(scale > 0, scale, 1)), 0).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=-1)


def _decode(vectors: ByteArray, element: str) -> Float32Array:
    """The opposite of `_encode`."""
    contiguous = np.ascontiguousarray(vectors)
    if element == "f4":
        return contiguous.view(np.float32)
    if element == "f2":
        return contiguous.view(np.float16).astype(np.float32)
    scale = np.ascontiguousarray(contiguous[..., :4]).view(np.float32)
    return scale * contiguous[..., 4:].view(np.int8).astype(np.float32)


def dequantize(tensor: Tensor) -> mx.array:
    """The whole tensor as float32, by the C extension's reader of packed rows."""
    args = (tensor.format.type_id, tensor.rows, tensor.columns)
    packed = bytearray(_cpu.packed_bytes(*args))
    _cpu.pack(*args, tensor.data, packed)
    out = np.empty((tensor.rows, tensor.columns), dtype=np.float32)
    for row in range(tensor.rows):
        _cpu.dequantize_row(*args, packed, row, out[row])
    return mx.array(out.reshape(tensor.shape))


def _rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
    """x: [rows, heads, head_dim]."""
    angles = positions[:, None, None] * mx.array(rope.inverse)
    cosine, sine = mx.cos(angles) * rope.magnitude, mx.sin(angles) * rope.magnitude
    half = len(rope.inverse)
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if rope.interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = mx.stack([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
        turned = turned.reshape(rotated.shape)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        turned = mx.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
    return mx.concatenate([turned, rest], axis=-1)


def activated(gate: mx.array, activation: Activation) -> mx.array:
    """The activation of a feed-forward part's gate, which `up` is multiplied with."""
    if activation == "silu":
        return gate * mx.sigmoid(gate)
    return gate * mx.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))


def soft_capped(x: mx.array, cap: float) -> mx.array:
    """cap * tanh(x / cap), or x if there is no cap."""
    return cap * mx.tanh(x / cap) if cap else x


def capped_logits(x: mx.array, cap: float) -> mx.array:
    """As `soft_capped`, but NaN where x is not finite, so that damage is noticed."""
    return soft_capped(x, cap) + (x - x) if cap else x


class _Forward:
    """One step, operation by operation."""

    def __init__(
        self, program: Program, weights: dict[int, mx.array], step: Step, slabs: Slabs
    ) -> None:
        self._program, self._weights, self._step, self._slabs = program, weights, step, slabs
        self._positions = mx.array(step.positions)
        self._stream = mx.zeros((len(step.tokens), program.hidden))
        self._queries = self._attended = self._stream
        self.logits = mx.zeros((0, program.vocab_size))

    def _weight(self, tensor: Tensor) -> mx.array:
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = dequantize(tensor)
        return self._weights[id(tensor)]

    def _project(self, x: mx.array, weights: Tensor, bias: Tensor | None = None) -> mx.array:
        y = x @ self._weight(weights).T
        return y if bias is None else y + self._weight(bias)

    def apply(self, operation: Any) -> None:
        """Runs one operation of the program."""
        match operation:
            case Embed(table, scale):
                self._stream = self._weight(table)[mx.array(self._step.tokens)] * scale
            case AttentionInput():
                self._attention_input(operation)
            case Attention():
                rows = [self._attend(row, operation) for row in range(len(self._step.tokens))]
                self._attended = mx.stack(rows)
            case AttentionOutput(weights, post_norm):
                self._add(self._project(self._attended, weights), post_norm)
            case FeedForward():
                x = _rms_norm(self._stream, self._weight(operation.norm), operation.eps)
                gate, up = self._project(x, operation.gate), self._project(x, operation.up)
                inner = activated(gate, operation.activation) * up
                self._add(self._project(inner, operation.down), operation.post_norm)
            case Logits():
                picked = self._stream[mx.array(self._step.logit_rows)]
                x = _rms_norm(picked, self._weight(operation.norm), operation.eps)
                self.logits = capped_logits(self._project(x, operation.head), operation.soft_cap)
                mx.eval(self.logits)

    def _add(self, x: mx.array, post_norm: PostNorm | None) -> None:
        """Adds to the stream."""
        if post_norm is not None:
            x = _rms_norm(x, self._weight(post_norm.weight), post_norm.eps)
        self._stream = self._stream + x

    def _attention_input(self, operation: AttentionInput) -> None:
        heads = (len(self._step.tokens), -1, self._program.head_dim)
        x = _rms_norm(self._stream, self._weight(operation.norm), operation.eps)
        queries = self._project(x, operation.query, operation.query_bias).reshape(heads)
        keys = self._project(x, operation.key, operation.key_bias).reshape(heads)
        values = self._project(x, operation.value, operation.value_bias).reshape(heads)
        if operation.query_norm is not None and operation.key_norm is not None:
            queries = _rms_norm(queries, self._weight(operation.query_norm), operation.eps)
            keys = _rms_norm(keys, self._weight(operation.key_norm), operation.eps)
        rope = self._program.ropes[operation.rope]
        self._queries = _rotate(queries, self._positions, rope)
        keys = _rotate(keys, self._positions, rope)
        page_tokens = self._slabs.layout.page_tokens
        stored = [
            mx.array(_decode(_encode(np.array(x), element), element))
            for x, element in zip(
                [keys, values], self._slabs.layout.precision.elements, strict=True
            )
        ]
        for row, position in enumerate(self._step.positions.tolist()):
            if not self._step.writes[row]:
                continue
            page = int(self._step.page_table[self._step.contexts[row], position // page_tokens])
            slab, at = divmod(page, self._slabs.pages_per_slab)
            pair = mx.stack([part[row] for part in stored])
            self._slabs.arrays[slab][at, operation.layer, :, :, position % page_tokens] = pair

    def _attend(self, row: int, attention: Attention) -> mx.array:
        """[num_heads * head_dim] of one row."""
        program, page_tokens = self._program, self._slabs.layout.page_tokens
        visible = int(self._step.positions[row]) + 1
        pages = self._step.page_table[self._step.contexts[row]][: math.ceil(visible / page_tokens)]
        parts = [
            self._slabs.arrays[page // self._slabs.pages_per_slab][
                page % self._slabs.pages_per_slab, attention.layer
            ]
            for page in pages.tolist()
        ]
        first = max(0, visible - attention.window) if attention.window else 0
        keys, values = mx.concatenate(parts, axis=2)[:, :, first:visible]
        queries = self._queries[row].reshape(program.num_kv_heads, -1, program.head_dim)
        scores = queries @ keys.swapaxes(1, 2) * program.attention_scale
        scores = soft_capped(scores, attention.soft_cap)
        return (mx.softmax(scores, axis=-1) @ values).reshape(-1)
