"""One step as a graph, operation by operation."""

from typing import assert_never

import mlx.core as mx
import numpy as np

from llamay.mlx_kernels import (
    Attention,
    AttentionInput,
    AttentionOutput,
    Embed,
    FeedForward,
    Logits,
    Operation,
    Program,
    Step,
)
from llamay.mlx_kernels.metal.kernels import Kernels
from llamay.mlx_kernels.metal.pages import PageMap
from llamay.mlx_kernels.metal.step import StepInputs
from llamay.mlx_kernels.metal.weights import Weights


class Forward:
    """stream: [rows, hidden] float32, at the end the logits [logit rows, vocab]."""

    def __init__(
        self, kernels: Kernels, program: Program, weights: Weights, step: Step, page_map: PageMap
    ) -> None:
        self._kernels, self._program, self._weights = kernels, program, weights
        self._wanted, self._page_map = step.logit_rows, page_map
        self._inputs = StepInputs(step, program, page_map)
        self.stream = self._queries = self._attended = self._inputs.positions

    def apply(self, operation: Operation) -> None:
        """Adds one operation of the program to the graph."""
        kernels, weights = self._kernels, self._weights
        match operation:
            case Embed(table):
                tokens, rows = self._inputs.tokens, self._inputs.rows
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
        weights, inputs = self._weights, self._inputs
        qkv = self._kernels.qkv(
            self.stream,
            weights.vector(op.norm),
            op.eps,
            [weights.matrix(tensor) for tensor in (op.query, op.key, op.value)],
            weights.bias(op.layer),
        )
        self._queries, stored = self._kernels.rotate(
            qkv,
            inputs.cosine,
            inputs.sine,
            self._page_map.layout,
            self._program.rope.interleaved,
        )
        inputs.writer.write(op.layer, stored)

    def _attention(self, layer: int) -> None:
        parts = [
            self._kernels.attend(
                self._queries,
                self._inputs.positions,
                span,
                self._inputs.pages,
                [chunk.layers[layer] for chunk in self._page_map.chunks],
                self._program.attention_scale,
                self._page_map.layout,
            )
            for span in self._inputs.spans
        ]
        self._attended = parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _logits(self, op: Logits) -> None:
        head = self._weights.matrix(op.head)
        if not len(self._wanted):
            self.stream = mx.zeros((0, head.rows))
            return
        if not np.array_equal(self._wanted, np.arange(self._inputs.rows)):
            self.stream = self.stream[mx.array(self._wanted)]
        norm = self._weights.vector(op.norm)
        self.stream = self._kernels.logits(self.stream, norm, op.eps, head)
