"""One step as a graph: calls the kernels of msl/, operation by operation."""

from collections.abc import Sequence
from typing import Any, assert_never

import mlx.core as mx
import numpy as np

from llamay.formats import Tensor
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
from llamay.mlx_kernels.metal.pages import MAX_CHUNKS, PageMap, row_words
from llamay.mlx_kernels.metal.schedule import ROWS, Span
from llamay.mlx_kernels.metal.step import StepInputs, scalar, sizes
from llamay.mlx_kernels.metal.weights import UNIT, Weights

KINDS = {"f4": 4, "f2": 2, "i1": 1}  # of a stored vector, as msl/kv.metal numbers them
SIMDGROUPS = 4  # of a threadgroup in products
OUTPUTS = 4  # of a simdgroup in products
KEY_CHUNK = 64  # head dimensions of a tile of keys in threadgroup memory


class Forward:
    """One step, operation by operation; `stream` ends as the logits."""

    def __init__(
        self,
        kernels: dict[str, Any],
        program: Program,
        weights: Weights,
        step: Step,
        page_map: PageMap,
    ) -> None:
        self._kernels, self._program, self._weights = kernels, program, weights
        self._step, self._page_map, self._layout = step, page_map, page_map.layout
        self._inputs = StepInputs(step, program, page_map)
        self._rows = self._inputs.rows
        self._kinds = [KINDS[element] for element in self._layout.precision.elements]
        self.stream = self._queries = self._attended = self._inputs.positions

    def apply(self, operation: Operation) -> None:
        """Adds one operation of the program to the graph."""
        match operation:
            case Embed(table):
                self._embed(table)
            case AttentionInput():
                self._attention_input(operation)
            case Attention(layer):
                parts = [self._attend(layer, *span) for span in self._inputs.spans]
                self._attended = parts[0] if len(parts) == 1 else mx.concatenate(parts)
            case AttentionOutput(weights):
                self.stream = self._project_add(self._attended, weights)
            case FeedForward():
                inner = self._gate_up(operation)
                self.stream = self._project_add(inner, operation.down)
            case Logits():
                self._logits(operation)
            case _:
                assert_never(operation)

    def _call(
        self,
        name: str,
        inputs: list[mx.array],
        shapes: list[tuple[int, ...]],
        template: dict[str, int | bool],
        grid: tuple[int, int, int],
        threadgroup: int,
        dtypes: Sequence[mx.Dtype] = (mx.float32,),
    ) -> list[mx.array]:
        outputs: list[mx.array] = self._kernels[name](
            inputs=inputs,
            template=list(template.items()),
            grid=grid,
            threadgroup=(threadgroup, 1, 1),
            output_shapes=shapes,
            output_dtypes=list(dtypes),
        )
        return outputs

    def _product(
        self,
        name: str,
        inputs: list[mx.array],
        outputs: int,
        template: dict[str, int | bool],
        rows: int,
    ) -> mx.array:
        """Calls a kernel whose simdgroups compute OUTPUTS outputs of ROWS rows each."""
        tile = 1 if rows == 1 else ROWS
        threads = 32 * SIMDGROUPS
        groups = -(-outputs // (OUTPUTS * SIMDGROUPS))
        template |= {"ROWS": tile, "OUTPUTS": OUTPUTS, "SIMDGROUPS": SIMDGROUPS}
        grid = (groups * threads, -(-rows // tile), 1)
        return self._call(name, inputs, [(rows, outputs)], template, grid, threads)[0]

    def _normed(self, x: mx.array, norm: Tensor, eps: float) -> tuple[mx.array, bool]:
        """(x, True) if the product's kernel is to norm its few rows, else (normed x, False)."""
        rows, columns = x.shape
        if rows <= ROWS:
            return x, True
        inputs = [x, self._weights[norm], scalar(eps), sizes(rows, columns)]
        return self._call("rms_norm", inputs, [x.shape], {}, (32, rows, 1), 32)[0], False

    def _embed(self, table: Tensor) -> None:
        columns = table.columns
        self.stream = self._call(
            "embed",
            [self._inputs.tokens, self._weights[table], sizes(self._rows, columns)],
            [(self._rows, columns)],
            {"FORMAT": table.format.type_id},
            (-(-columns // UNIT // 32) * 32, self._rows, 1),
            32,
        )[0]

    def _attention_input(self, op: AttentionInput) -> None:
        program, layout = self._program, self._layout
        matrices = (op.query, op.key, op.value)
        x, norm = self._normed(self.stream, op.norm, op.eps)
        bias = self._weights.bias(op.layer)
        counts = [matrix.rows for matrix in matrices]
        template: dict[str, int | bool] = {
            "QUERY": op.query.format.type_id,
            "KEY": op.key.format.type_id,
            "VALUE": op.value.format.type_id,
            "NORM": norm,
            "BIAS": bias is not None,
        }
        vector = self._weights[op.norm]
        inputs = [
            x,
            vector,
            scalar(op.eps),
            *(self._weights[matrix] for matrix in matrices),
        ]
        inputs += [vector if bias is None else bias]
        inputs += [sizes(self._rows, program.hidden, *counts)]
        qkv = self._product("qkv", inputs, sum(counts), template, self._rows)
        heads, kv_heads = program.num_heads, program.num_kv_heads
        self._queries, stored = self._call(
            "rotate",
            [
                qkv,
                self._inputs.cosine,
                self._inputs.sine,
                sizes(self._rows, heads, kv_heads, len(program.rope.inverse)),
            ],
            [(self._rows, heads * program.head_dim), (self._rows, row_words(layout))],
            {
                "HEAD_DIM": program.head_dim,
                "INTERLEAVED": program.rope.interleaved,
                "KEYS": self._kinds[0],
                "VALUES": self._kinds[1],
            },
            (32 * (heads + 2 * kv_heads), self._rows, 1),
            32,
            (mx.float32, mx.uint32),
        )
        self._inputs.writer.write(op.layer, stored)

    def _attend(self, layer: int, span: Span, items: mx.array) -> mx.array:
        """[rows of the span, heads * head_dim]."""
        program, layout = self._program, self._layout
        rows, heads, head_dim = span.end - span.start, program.num_heads, program.head_dim
        group = heads // program.num_kv_heads
        tile = span.items.shape[1] - 4
        simdgroups = min(8, tile * group)
        slabs = [chunk.layers[layer] for chunk in self._page_map.chunks]
        slabs += [slabs[0]] * (MAX_CHUNKS - len(slabs))
        threads = 32 * simdgroups
        (partial,) = self._call(
            "attend",
            [
                self._queries,
                self._inputs.positions,
                items,
                self._inputs.pages,
                scalar(program.attention_scale),
                sizes(
                    self._inputs.width, row_words(layout), layout.page_tokens, span.runs, span.start
                ),
                *slabs,
            ],
            [(rows, span.runs, heads, head_dim + 2)],
            {
                "HEAD_DIM": head_dim,
                "GROUP": group,
                "ROWS": tile,
                "PAIRS": -(-tile * group // simdgroups),
                "SIMDGROUPS": simdgroups,
                "CHUNK": min(KEY_CHUNK, head_dim),
                "KEYS": self._kinds[0],
                "VALUES": self._kinds[1],
            },
            (threads * program.num_kv_heads, len(span.items), 1),
            threads,
        )
        return self._call(
            "merge",
            [partial, self._inputs.positions, sizes(span.runs, heads, span.start)],
            [(rows, heads * head_dim)],
            {"HEAD_DIM": head_dim},
            (32 * heads, rows, 1),
            32,
        )[0]

    def _project_add(self, x: mx.array, weights: Tensor) -> mx.array:
        inputs = [x, self._weights[weights], self.stream]
        inputs += [sizes(self._rows, weights.columns, weights.rows)]
        template: dict[str, int | bool] = {"FORMAT": weights.format.type_id}
        return self._product("project_add", inputs, weights.rows, template, self._rows)

    def _gate_up(self, op: FeedForward) -> mx.array:
        x, norm = self._normed(self.stream, op.norm, op.eps)
        inputs = [
            x,
            self._weights[op.norm],
            scalar(op.eps),
            self._weights[op.gate],
            self._weights[op.up],
        ]
        inputs += [sizes(self._rows, op.gate.columns, op.gate.rows)]
        template: dict[str, int | bool] = {
            "GATE": op.gate.format.type_id,
            "UP": op.up.format.type_id,
            "NORM": norm,
        }
        return self._product("gate_up", inputs, op.gate.rows, template, self._rows)

    def _logits(self, op: Logits) -> None:
        wanted = self._step.logit_rows
        count = len(wanted)
        if not count:
            self.stream = mx.zeros((0, op.head.rows))
            return
        every = np.array_equal(wanted, np.arange(self._rows))
        picked = self.stream if every else self.stream[mx.array(wanted)]
        x, norm = self._normed(picked, op.norm, op.eps)
        inputs = [x, self._weights[op.norm], scalar(op.eps), self._weights[op.head]]
        inputs += [sizes(count, op.head.columns, op.head.rows)]
        template: dict[str, int | bool] = {"FORMAT": op.head.format.type_id, "NORM": norm}
        self.stream = self._product("logits", inputs, op.head.rows, template, count)
