"""One step as a graph, operation by operation."""

from typing import Any, assert_never

import mlx.core as mx

from llamay.formats import KVLayout, Tensor
from llamay.mlx_kernels.metal.kernels import Kernels
from llamay.mlx_kernels.metal.step import Plan
from llamay.mlx_kernels.metal.weights import Weights
from llamay.mlx_kernels.program import (
    Attention,
    AttentionInput,
    AttentionOutput,
    Embed,
    FeedForward,
    Logits,
    Operation,
    PostNorm,
    Program,
)


class Forward:
    """The graph of a step.

    arrays: see `StepInputs`
    layers: [chunks][layers], see `Chunk`; replaced by what the step makes of them
    stream: [rows, hidden] float32, at the end the logits [logit rows, vocab]
    best:   as `Kernels.best` gives them, if the step wants them; else empty
    launches: of MLX's own kernels
    """

    def __init__(
        self,
        kernels: Kernels,
        program: Program,
        weights: Weights,
        layout: KVLayout,
        plan: Plan,
        arrays: dict[str, Any],
        layers: list[list[mx.array]],
    ) -> None:
        self._kernels, self._program, self._weights = kernels, program, weights
        self._layout, self._plan, self._arrays, self._layers = layout, plan, arrays, layers
        self.stream = self._queries = self._attended = arrays["tokens"]
        self.best: tuple[mx.array, ...] = ()
        self.launches = 0

    def apply(self, operation: Operation) -> None:
        """Adds one operation of the program to the graph."""
        kernels, weights = self._kernels, self._weights
        match operation:
            case Embed(table, scale):
                tokens, rows = self._arrays["tokens"], self._plan.rows
                self.stream = kernels.embed(tokens, rows, weights.matrix(table), scale)
            case AttentionInput():
                self._attention_input(operation)
            case Attention():
                self._attention(operation)
            case AttentionOutput(output, post_norm):
                self._add(self._attended, output, post_norm)
            case FeedForward():
                inner = kernels.gate_up(
                    self.stream,
                    weights.vector(operation.norm),
                    operation.eps,
                    weights.matrix(operation.gate),
                    weights.matrix(operation.up),
                    operation.activation,
                )
                self._add(inner, operation.down, operation.post_norm)
            case Logits():
                self._logits(operation)
            case _:
                assert_never(operation)

    def _add(self, x: mx.array, tensor: Tensor, post_norm: PostNorm | None) -> None:
        """stream += x . weights, normed before if there is a norm."""
        matrix = self._weights.matrix(tensor)
        if post_norm is None:
            self.stream = self._kernels.project(x, matrix, self.stream)
            return
        y = self._kernels.project(x, matrix, None)
        norm = self._weights.vector(post_norm.weight)
        self.stream = self._kernels.rms_norm(y, norm, post_norm.eps, self.stream)

    def _attention_input(self, op: AttentionInput) -> None:
        """Queries for attention; keys and values go to the rows' pages."""
        weights, arrays = self._weights, self._arrays
        qkv = self._kernels.qkv(
            self.stream,
            weights.vector(op.norm),
            op.eps,
            [weights.matrix(tensor) for tensor in (op.query, op.key, op.value)],
            weights.bias(op.layer),
        )
        self._queries, stored = self._kernels.rotate(
            qkv,
            weights.head_norms(op.layer),
            op.eps,
            arrays["cosine"][op.rope],
            arrays["sine"][op.rope],
            self._layout,
            self._program.ropes[op.rope].interleaved,
        )
        for index, (chunk, some) in enumerate(self._plan.targets):
            self.launches += 1 + some
            rows = stored[arrays["written"][index]] if some else stored
            self._layers[chunk][op.layer][arrays["rows"][index]] = rows

    def _attention(self, op: Attention) -> None:
        parts = [
            self._kernels.attend(
                self._queries,
                self._arrays["positions"],
                span,
                items,
                self._arrays["pages"],
                [chunk[op.layer] for chunk in self._layers],
                self._program.attention_scale,
                self._layout,
                op.window,
                op.soft_cap,
            )
            for span, items in zip(self._plan.spans, self._arrays["items"], strict=True)
        ]
        self.launches += len(parts) > 1
        self._attended = parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _logits(self, op: Logits) -> None:
        head = self._weights.matrix(op.head)
        if not self._plan.logits:
            self.stream = mx.zeros((0, head.rows))
            return
        self.launches += self._plan.picked
        if self._plan.picked:
            self.stream = self.stream[self._arrays["picks"]]
        norm = self._weights.vector(op.norm)
        self.stream = self._kernels.logits(self.stream, norm, op.eps, head, op.soft_cap)
        if self._plan.best:
            self.best = self._kernels.best(self.stream, self._plan.best)
