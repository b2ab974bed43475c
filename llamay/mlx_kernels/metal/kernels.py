"""The kernels of msl/, each as a method that says what it takes and gives.

All arrays are float32 unless said. A product's kernel computes 1 row, or tiles of up to 8, with the
same operations in the same order for each row. Inputs have 8 elements or more, or no dimensions, so
that the signature that MLX makes never changes.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import mlx.core as mx
import numpy as np

from llamay.formats import KVLayout
from llamay.mlx_kernels.metal.pages import MAX_CHUNKS, row_words
from llamay.mlx_kernels.metal.schedule import ROWS, Span
from llamay.mlx_kernels.metal.weights import UNIT, Matrix
from llamay.mlx_kernels.program import Activation

MakeKernel = Callable[..., Any]
Template = dict[str, int | bool]

# Kernel -> the files that stand before it: no more than it needs, as MLX copies
# the text at every call.
PRODUCT = ("blocks", "super_blocks", "sums", "norm", "products")
HEADERS = {
    "embed": ("blocks", "super_blocks"),
    "rms_norm": ("sums", "norm"),
    "qkv": PRODUCT,
    "rotate": ("sums", "norm", "kv"),
    "attend": ("sums", "kv"),
    "merge": ("sums",),
    "project": PRODUCT,
    "gate_up": PRODUCT,
    "logits": PRODUCT,
    "best": ("sums",),
}
# Kernel -> its inputs and outputs.
SIGNATURES: dict[str, tuple[list[str], list[str]]] = {
    "embed": (["tokens", "table", "scale", "sizes"], ["stream"]),
    "rms_norm": (["x", "norm", "eps", "residual", "sizes"], ["y"]),
    "qkv": (["x", "norm", "eps", "query", "key", "value_weights", "bias", "sizes"], ["y"]),
    "rotate": (["qkv", "norms", "eps", "cosine", "sine", "sizes"], ["queries", "stored"]),
    "attend": (
        ["queries", "positions", "items", "pages", "scale", "soft_cap", "sizes"]
        + [f"slab{index}" for index in range(MAX_CHUNKS)],
        ["partial"],
    ),
    "merge": (["partial", "positions", "sizes"], ["y"]),
    "project": (["x", "weights", "residual", "sizes"], ["y"]),
    "gate_up": (["x", "norm", "eps", "gate", "up", "sizes"], ["y"]),
    "logits": (["x", "norm", "eps", "head", "soft_cap", "sizes"], ["y"]),
    "best": (["logits", "sizes"], ["values", "ids", "totals"]),
}
KINDS = {"f4": 4, "f2": 2, "i1": 1}  # of a stored vector, as msl/kv.metal numbers them
SIMDGROUPS = 4  # of a threadgroup in products
OUTPUTS = 4  # of a simdgroup in products
BEST_THREADS = 1024  # of a threadgroup of `best`
KEY_CHUNK = 64  # most head dimensions of a tile of keys in threadgroup memory
MAX_GROUP = 31  # query heads of a kv head; the weights of more leave no room for keys there
THREADGROUP_BYTES = 32 * 1024  # of memory, on every GPU
ALL_POSITIONS = 2**31 - 1  # the window of rows without one


def kernel_source(name: str) -> str:
    """The text of msl/NAME.metal, without comments and indentation."""
    text = (files("llamay.mlx_kernels") / "msl" / f"{name}.metal").read_text(encoding="utf-8")
    return re.sub(r"\n\s+", "\n", re.sub(r"\s*//.*", "", text))


@lru_cache(maxsize=1024)
def sizes(*counts: int) -> mx.array:
    """The counts as a kernel takes them: [8] int32."""
    return mx.array(np.array([*counts, *[0] * (8 - len(counts))], dtype=np.int32))


@lru_cache(maxsize=64)
def scalar(value: float) -> mx.array:
    """A number as a kernel takes it: no dimensions, float32."""
    return mx.array(value, dtype=mx.float32)


class Kernels:
    """Calls the kernels that `make_kernel` made, each made once.

    launches: how many calls there were
    """

    def __init__(self, make_kernel: MakeKernel) -> None:
        """make_kernel: `mx.fast.metal_kernel`, or what has its signature."""
        self._kernels = {
            name: make_kernel(
                name=f"llamay_{name}",
                input_names=inputs,
                output_names=outputs,
                source=kernel_source(name),
                header="".join(map(kernel_source, HEADERS[name])),
            )
            for name, (inputs, outputs) in SIGNATURES.items()
        }
        self.launches = 0
        self._no_slab = mx.zeros(8, dtype=mx.uint32)
        mx.eval(self._no_slab)

    def embed(self, tokens: mx.array, rows: int, table: Matrix, scale: float) -> mx.array:
        """[rows, columns]: scale * the table's rows of tokens [rows, padded to 8] int32."""
        return self._call(
            "embed",
            [tokens, table.data, scalar(scale), sizes(table.columns)],
            [(rows, table.columns)],
            {"FORMAT": table.format.type_id},
            (-(-table.columns // UNIT // 32) * 32, rows, 1),
            32,
        )[0]

    def rms_norm(
        self, x: mx.array, norm: mx.array, eps: float, residual: mx.array | None = None
    ) -> mx.array:
        """x / sqrt(mean of squares + eps) * norm, added to the residual if there is one.

        x, residual: [rows, columns]; norm: [columns]
        """
        adds = residual is not None
        inputs = [x, norm, scalar(eps), x if residual is None else residual, sizes(*x.shape)]
        grid = (32, x.shape[0], 1)
        return self._call("rms_norm", inputs, [x.shape], {"ADD": adds}, grid, 32)[0]

    def qkv(
        self,
        x: mx.array,
        norm: mx.array,
        eps: float,
        matrices: Sequence[Matrix],
        bias: mx.array | None,
    ) -> mx.array:
        """[rows, query, key and value outputs]: the three products of rms_norm(x), biases added.

        matrices: query, key, value; bias: [all outputs]
        """
        x, template = self._normed(x, norm, eps)
        template["BIAS"] = bias is not None
        for name, matrix in zip(("QUERY", "KEY", "VALUE"), matrices, strict=True):
            template[name] = matrix.format.type_id
        counts = [matrix.rows for matrix in matrices]
        inputs = [x, norm, scalar(eps), *(matrix.data for matrix in matrices)]
        inputs += [norm if bias is None else bias, sizes(*x.shape, *counts)]
        return self._product("qkv", inputs, sum(counts), template)

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
        """(queries [rows, heads * head_dim], stored [rows, words of a position] uint32).

        qkv:          as `qkv` gives it
        norms:        [2, head_dim]: RMS norm of each query's and of each key's head, before rope
        cosine, sine: [rows, pairs]
        """
        rows, kv_heads, head_dim = qkv.shape[0], layout.kv_heads, layout.head_dim
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        queries, stored = self._call(
            "rotate",
            [
                qkv,
                qkv if norms is None else norms,
                scalar(eps),
                cosine,
                sine,
                sizes(rows, heads, kv_heads, cosine.shape[1]),
            ],
            [(rows, heads * head_dim), (rows, row_words(layout))],
            {
                "HEAD_DIM": head_dim,
                "HEAD_NORMS": norms is not None,
                "INTERLEAVED": interleaved,
                **_kinds(layout),
            },
            (32 * (heads + 2 * kv_heads), rows, 1),
            32,
            (mx.float32, mx.uint32),
        )
        return queries, stored

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
        """[rows of the span, heads * head_dim]: causal attention.

        queries:   [rows, heads * head_dim]; positions: [rows, padded to 8] int32
        items:     the span's, [items, 12] int32
        pages:     [contexts, width] int32, each page's place (see `pages.PageMap`)
        slabs:     up to 16, one layer of each chunk
        window, soft_cap: as of `program.Attention`
        """
        head_dim, rows = layout.head_dim, span.end - span.start
        heads = queries.shape[1] // head_dim
        group = heads // layout.kv_heads
        simdgroups = min(8, span.tile * group)
        pairs = -(-span.tile * group // simdgroups)
        window = window or ALL_POSITIONS
        counts = (pages.shape[1], row_words(layout), layout.page_tokens, span.runs, span.start)
        inputs = [queries, positions, items, pages, scalar(scale), scalar(soft_cap)]
        inputs += [sizes(*counts, window), *slabs]
        inputs += [self._no_slab] * (MAX_CHUNKS - len(slabs))
        (partial,) = self._call(
            "attend",
            inputs,
            [(rows, span.runs, heads, head_dim + 2)],
            {
                "HEAD_DIM": head_dim,
                "GROUP": group,
                "ROWS": span.tile,
                "PAIRS": pairs,
                "SIMDGROUPS": simdgroups,
                "CHUNK": _key_chunk(head_dim, simdgroups * pairs),
                "CAPPED": soft_cap != 0,
                **_kinds(layout),
            },
            (32 * simdgroups * layout.kv_heads, items.shape[0], 1),
            32 * simdgroups,
        )
        return self._call(
            "merge",
            [partial, positions, sizes(span.runs, heads, span.start, window)],
            [(rows, heads * head_dim)],
            {"HEAD_DIM": head_dim},
            (32 * heads, rows, 1),
            32,
        )[0]

    def project(self, x: mx.array, weights: Matrix, residual: mx.array | None) -> mx.array:
        """x . weights, added to the residual if there is one.

        x: [rows, columns], residual: [rows, outputs]
        """
        added = x if residual is None else residual
        inputs = [x, weights.data, added, sizes(*x.shape, weights.rows)]
        template: Template = {"FORMAT": weights.format.type_id, "ADD": residual is not None}
        return self._product("project", inputs, weights.rows, template)

    def gate_up(
        self,
        x: mx.array,
        norm: mx.array,
        eps: float,
        gate: Matrix,
        up: Matrix,
        activation: Activation,
    ) -> mx.array:
        """[rows, outputs]: activation(n . gate) * (n . up), n = rms_norm(x)."""
        x, template = self._normed(x, norm, eps)
        template |= {"GATE": gate.format.type_id, "UP": up.format.type_id}
        template["GELU"] = activation == "gelu"
        inputs = [x, norm, scalar(eps), gate.data, up.data, sizes(*x.shape, gate.rows)]
        return self._product("gate_up", inputs, gate.rows, template)

    def logits(
        self, x: mx.array, norm: mx.array, eps: float, head: Matrix, soft_cap: float
    ) -> mx.array:
        """[rows, vocab]: rms_norm(x) . head, soft-capped unless soft_cap is 0."""
        x, template = self._normed(x, norm, eps)
        template |= {"FORMAT": head.format.type_id, "CAPPED": soft_cap != 0}
        inputs = [x, norm, scalar(eps), head.data, scalar(soft_cap), sizes(*x.shape, head.rows)]
        return self._product("logits", inputs, head.rows, template)

    def best(self, logits: mx.array, count: int) -> tuple[mx.array, mx.array, mx.array]:
        """The `count` largest of each row of logits [rows, vocab], ties to the lower id.

        Returns values [rows, count], ids [rows, count] int32, and totals [rows] uint64: the sum of
        exp(logit - largest) in units of 2^-40, each rounded down; 0 if a logit is not finite.
        """
        rows, vocab = logits.shape
        shapes: list[tuple[int, ...]] = [(rows, count), (rows, count), (rows,)]
        dtypes = (mx.float32, mx.int32, mx.uint64)
        grid = (BEST_THREADS, rows, 1)
        inputs = [logits, sizes(vocab, count)]
        values, ids, totals = self._call("best", inputs, shapes, {}, grid, BEST_THREADS, dtypes)
        return values, ids, totals

    def _normed(self, x: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, Template]:
        """A product's input: few rows are normed by its own kernel, many by one before it."""
        few = x.shape[0] <= ROWS
        return x if few else self.rms_norm(x, norm, eps), {"NORM": few}

    def _product(
        self, name: str, inputs: list[mx.array], outputs: int, template: Template
    ) -> mx.array:
        """Calls a kernel whose simdgroups compute OUTPUTS outputs of ROWS rows each."""
        rows = inputs[0].shape[0]
        tile = 1 if rows == 1 else ROWS
        threads = 32 * SIMDGROUPS
        groups = -(-outputs // (OUTPUTS * SIMDGROUPS))
        template |= {"ROWS": tile, "OUTPUTS": OUTPUTS, "SIMDGROUPS": SIMDGROUPS}
        grid = (groups * threads, -(-rows // tile), 1)
        return self._call(name, inputs, [(rows, outputs)], template, grid, threads)[0]

    def _call(
        self,
        name: str,
        inputs: list[mx.array],
        shapes: list[tuple[int, ...]],
        template: Template,
        grid: tuple[int, int, int],
        threads: int,
        dtypes: Sequence[mx.Dtype] = (mx.float32,),
    ) -> list[mx.array]:
        self.launches += 1
        outputs: list[mx.array] = self._kernels[name](
            inputs=inputs,
            template=list(template.items()),
            grid=grid,
            threadgroup=(threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=list(dtypes),
        )
        return outputs


def _key_chunk(head_dim: int, pairs: int) -> int:
    """Head dimensions of a tile of keys that fit beside the weights of so many rows' heads.

    Even, so that lines, which are one longer, begin in different banks.
    """
    room = THREADGROUP_BYTES // (32 * 4) - pairs  # floats for each of the tile's 32 positions
    return min(KEY_CHUNK, head_dim, (room - 1) // 2 * 2)


def _kinds(layout: KVLayout) -> Template:
    keys, values = layout.precision.elements
    return {"KEYS": KINDS[keys], "VALUES": KINDS[values]}
