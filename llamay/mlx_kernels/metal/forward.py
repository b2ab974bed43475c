"""One step as a graph, operation by operation."""

from typing import Any, assert_never

import mlx.core as mx

from llamay.formats import KVLayout
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
            case Embed(table):
                tokens, rows = self._arrays["tokens"], self._plan.rows
                self.stream = kernels.embed(tokens, rows, weights.matrix(table))
            case AttentionInput():
                self._attention_input(operation)
            case Attention(layer):
                self._attention(layer)
            case AttentionOutput(output):
                matrix = weights.matrix(output)
                self.stream = kernels.project_add(self._attended, matrix, self.stream)
            case FeedForward(norm, eps, gate, up, down):
                inner = kernels.gate_up(
                    self.stream, weights.vector(norm), eps, weights.matrix(gate), weights.matrix(up)
                )
                self.stream = kernels.project_add(inner, weights.matrix(down), self.stream)
            case Logits():
                self._logits(operation)
            case _:
                assert_never(operation)

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
        interleaved = self._program.rope.interleaved
        self._queries, stored = self._kernels.rotate(
            qkv, arrays["cosine"], arrays["sine"], self._layout, interleaved
        )
        for index, (chunk, some) in enumerate(self._plan.targets):
            self.launches += 1 + some
            rows = stored[arrays["written"][index]] if some else stored
            self._layers[chunk][op.layer][arrays["rows"][index]] = rows

    def _attention(self, layer: int) -> None:
        parts = [
            self._kernels.attend(
                self._queries,
                self._arrays["positions"],
                span,
                items,
                self._arrays["pages"],
                [chunk[layer] for chunk in self._layers],
                self._program.attention_scale,
                self._layout,
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
        self.stream = self._kernels.logits(self.stream, norm, op.eps, head)
        if self._plan.best:
            self.best = self._kernels.best(self.stream, self._plan.best)
