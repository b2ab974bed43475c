"""Checks the kernels that a program needs on the machine that is to run them.

Each runs on cuts of the program's own weights and on random activations: near what stock MLX
operations give, and with the same bits for a row alone, in a tile of rows and among more. What was
found is kept in a file under a fingerprint of MLX, the system, the GPU, the kernels' text, the
program's formats and what else selects variants; an error of the moment holds for this start only.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from llamay.formats import KVLayout, KVPrecision, Tensor
from llamay.mlx_kernels import Step, _cpu
from llamay.mlx_kernels.metal.kernels import BEST_THREADS, HEADERS, Kernels, kernel_source
from llamay.mlx_kernels.metal.pages import row_words
from llamay.mlx_kernels.metal.schedule import ROWS as TILE
from llamay.mlx_kernels.metal.schedule import spans
from llamay.mlx_kernels.metal.step import padded, rope_tables
from llamay.mlx_kernels.metal.stock import StockKernels, stored_vectors
from llamay.mlx_kernels.metal.weights import Matrix, Weights
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

ROWS = TILE + 1  # so that norm is a kernel of its own
OUTPUTS = 48  # of a matrix's rows that are used
POSITIONS = 270  # more than a run
WINDOW = 10  # at most: of the last rows, some then see two runs and some one
SOFT_CAP = 2.0  # at most: so that scores and logits of random activations come near it
LOGITS = 2 * BEST_THREADS + 52  # more than two for some threads
# What MLX says of a kernel that does not compile. Its other RuntimeErrors, such as want of memory,
# come and go.
DOES_NOT_COMPILE = ("Unable to build metal library", "Unable to load kernel")

Failures = dict[str, str]  # method of `Kernels` -> what is wrong


def failures(kernels: Kernels, program: Program, weights: Weights, file: Path) -> Failures:
    """What fails on this machine, from `file` if it is known there, else found and kept there."""
    fingerprint = _fingerprint(program)
    known = _read(file)
    if fingerprint not in known:
        known[fingerprint], lasting = check(kernels, program, weights)
        if lasting:
            _write(file, known)
    return known[fingerprint]


def check(kernels: Kernels, program: Program, weights: Weights) -> tuple[Failures, bool]:
    """Runs every kernel in the variants that the program needs.

    Returns what fails, and whether another check would find the same.
    """
    checker = _Checker(kernels, weights)
    for operation in {_kind(each): each for each in program.operations}.values():
        if all(map(_known, _tensors(operation))):
            checker.operation(operation)
    for inputs, attention in _kinds_of_attention(program):
        for precision in KVPrecision:
            checker.attention(program, inputs, attention, precision)
    checker.best()
    return checker.failures, checker.lasting


def _read(file: Path) -> dict[str, Failures]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(file: Path, known: dict[str, Failures]) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, indent=1), encoding="utf-8")
        part.replace(file)
    except OSError:  # a full or read-only disk: the next start checks again
        with suppress(OSError):
            part.unlink()


def _fingerprint(program: Program) -> str:
    kinds = sorted({_kind(operation) for operation in program.operations})
    interleaved = program.ropes[0].interleaved
    shape = (program.num_heads, program.num_kv_heads, program.head_dim, interleaved)
    system = (version("mlx"), platform.platform(), str(mx.device_info()))
    digest = hashlib.sha256(repr((system, kinds, shape)).encode())
    for name, headers in HEADERS.items():
        digest.update("".join(map(kernel_source, (*headers, name))).encode())
    return digest.hexdigest()


def _tensors(operation: Operation) -> tuple[Tensor, ...]:
    match operation:
        case Embed(table):
            return (table,)
        case AttentionInput():
            return (operation.query, operation.key, operation.value)
        case AttentionOutput(weights):
            return (weights,)
        case FeedForward():
            return (operation.gate, operation.up, operation.down)
        case Logits():
            return (operation.head,)
    return ()


def _kind(operation: Operation) -> tuple[str, ...]:
    """What selects the variants of the operation's kernels, and whether a window is used."""
    formats = [tensor.format.name for tensor in _tensors(operation)]
    return type(operation).__name__, *formats, *_traits(operation)


def _traits(operation: Operation) -> list[str]:
    """What an operation has that not all of its type have."""
    match operation:
        case AttentionInput():
            biases = operation.query_bias, operation.key_bias, operation.value_bias
            traits = {
                "bias": any(bias is not None for bias in biases),
                "head norms": operation.query_norm is not None,
            }
        case Attention():
            traits = {"window": operation.window > 0, "cap": operation.soft_cap > 0}
        case AttentionOutput():
            traits = {"post norm": operation.post_norm is not None}
        case FeedForward():
            gelu = operation.activation == "gelu"
            traits = {"gelu": gelu, "post norm": operation.post_norm is not None}
        case Logits():
            traits = {"cap": operation.soft_cap > 0}
        case _:
            traits = {}
    return [name for name, there in traits.items() if there]


def _kinds_of_attention(program: Program) -> Iterable[tuple[AttentionInput, Attention]]:
    """Of a layer each, those that differ in what attention does."""
    operations = program.operations
    inputs = [operation for operation in operations if isinstance(operation, AttentionInput)]
    attentions = [operation for operation in operations if isinstance(operation, Attention)]
    layers = zip(inputs, attentions, strict=True)
    return {(*_traits(layer[0]), *_traits(layer[1])): layer for layer in layers}.values()


def _known(tensor: Tensor) -> bool:
    """Whether the reference can dequantise the tensor's format."""
    try:
        _cpu.packed_bytes(tensor.format.type_id, 1, tensor.columns)
    except ValueError:
        return False
    return True


class _Checker:
    def __init__(self, kernels: Kernels, weights: Weights) -> None:
        self._kernels, self._stock, self._weights = kernels, StockKernels(), weights
        self._random = np.random.default_rng(1)
        self.failures: Failures = {}
        self.lasting = True

    def operation(self, operation: Operation) -> None:
        """Everything but attention."""
        match operation:
            case Embed(table, scale):
                matrix = self._cut(table)
                tokens = np.arange(ROWS, dtype=np.int32) % matrix.rows
                self._compare("embed", lambda k, n: k.embed(padded(tokens[:n]), n, matrix, scale))
            case AttentionInput(norm=norm, eps=eps):
                x, vector = self._inputs(operation.query), self._weights.vector(norm)
                matrices = [self._cut(tensor) for tensor in _tensors(operation)]
                bias = self._weights.bias(operation.layer)
                if bias is not None:
                    bias = bias[: sum(matrix.rows for matrix in matrices)]
                self._compare("rms_norm", lambda k, n: k.rms_norm(x[:n], vector, eps))
                self._compare("qkv", lambda k, n: k.qkv(x[:n], vector, eps, matrices, bias))
            case AttentionOutput(weights, post_norm):
                self._add(weights, post_norm)
            case FeedForward(norm, eps, gate, up, down, activation, post_norm):
                x, vector = self._inputs(gate), self._weights.vector(norm)
                given = self._cut(gate), self._cut(up), activation
                self._compare("gate_up", lambda k, n: k.gate_up(x[:n], vector, eps, *given))
                self._add(down, post_norm)
            case Logits(norm, eps, head, soft_cap):
                x, vector, matrix = self._inputs(head), self._weights.vector(norm), self._cut(head)
                cap = min(soft_cap, SOFT_CAP)
                self._compare("logits", lambda k, n: k.logits(x[:n], vector, eps, matrix, cap))

    def attention(
        self,
        program: Program,
        inputs: AttentionInput,
        attention: Attention,
        precision: KVPrecision,
    ) -> None:
        """Norms of heads, rope, what is stored, and attention over it."""
        page_tokens, kv_heads, head_dim = 64, program.num_kv_heads, program.head_dim
        layout = KVLayout(1, kv_heads, head_dim, page_tokens, precision)
        heads = program.num_heads + 2 * kv_heads
        qkv = self._normal(POSITIONS, heads * head_dim)
        positions = np.arange(POSITIONS, dtype=np.int32)
        norms, rope = self._weights.head_norms(inputs.layer), program.ropes[inputs.rope]

        def rotate(kernels: Any, rows: slice) -> tuple[mx.array, mx.array]:
            tables = rope_tables(positions[rows], rope)
            queries, stored = kernels.rotate(
                qkv[rows], norms, inputs.eps, *tables, layout, rope.interleaved
            )
            return queries, stored

        def read_back(kernels: Any, count: int) -> mx.array:
            keys, values = stored_vectors(rotate(kernels, slice(0, count))[1], layout)
            return mx.concatenate([keys, values], axis=1)

        self._compare("rotate", lambda k, n: rotate(k, slice(0, n))[0])
        self._compare("rotate", read_back, tolerance=1 / 100)  # 8 bits may round the other way
        queries, stored = rotate(self._stock, slice(0, POSITIONS))
        pages = -(-POSITIONS // page_tokens)
        slab = mx.zeros((pages * page_tokens, row_words(layout)), dtype=mx.uint32)
        slab[:POSITIONS] = stored
        table = np.arange(pages, dtype=np.int32)[None]
        last = queries[POSITIONS - ROWS :]

        def attend(kernels: Any, count: int) -> mx.array:
            at = positions[POSITIONS - ROWS :][:count]
            zeros = np.zeros(count, dtype=np.int32)
            step = Step(zeros, at, zeros, zeros.astype(np.bool_), table, zeros[:0])
            ((span, items),) = spans(step, page_tokens, 1)
            attended: mx.array = kernels.attend(
                last[:count],
                padded(at),
                span,
                mx.array(items),
                padded(table),
                [slab],
                program.attention_scale,
                layout,
                min(attention.window, WINDOW),
                min(attention.soft_cap, SOFT_CAP),
            )
            return attended

        self._compare("attend", attend)

    def best(self) -> None:
        """Of logits among which there are ties, the largest those of one thread."""
        x = mx.round(self._normal(ROWS, LOGITS) * 64) / 16
        x = mx.where(mx.arange(LOGITS) % BEST_THREADS == 5, 99.0, x)
        for part, tolerance in enumerate((0, 0, 1 / 1000)):  # values, ids, totals

            def run(kernels: Any, count: int, part: int = part) -> mx.array:
                found: tuple[mx.array, ...] = kernels.best(x[:count], 40)
                return found[part].astype(mx.float32)

            self._compare("best", run, tolerance)

    def _add(self, tensor: Tensor, post_norm: PostNorm | None) -> None:
        x, matrix = self._inputs(tensor), self._cut(tensor)
        residual = self._normal(ROWS, matrix.rows)
        if post_norm is None:
            self._compare("project", lambda k, n: k.project(x[:n], matrix, residual[:n]))
            return
        self._compare("project", lambda k, n: k.project(x[:n], matrix, None))
        weight, eps = self._weights.vector(post_norm.weight)[: matrix.rows], post_norm.eps
        y = self._normal(ROWS, matrix.rows)
        self._compare("rms_norm", lambda k, n: k.rms_norm(y[:n], weight, eps, residual[:n]))

    def _normal(self, *shape: int) -> mx.array:
        return mx.array(self._random.normal(size=shape).astype(np.float32))

    def _inputs(self, tensor: Tensor) -> mx.array:
        return self._normal(ROWS, tensor.columns)

    def _cut(self, tensor: Tensor) -> Matrix:
        """The first rows of a matrix."""
        matrix = self._weights.matrix(tensor)
        rows = min(OUTPUTS, matrix.rows)
        return Matrix(matrix.data[:rows], matrix.format, rows, matrix.columns)

    def _compare(
        self, name: str, run: Callable[[Any, int], mx.array], tolerance: float = 1 / 1000
    ) -> None:
        """run(kernels, n): the results of the first n rows; tolerance: of the largest of them."""
        try:
            together, *fewer = (np.array(run(self._kernels, rows)) for rows in (ROWS, TILE, 1))
        except (RuntimeError, ValueError) as error:  # MLX's
            self.failures[name] = str(error).strip().splitlines()[0]
            compiles = not any(text in str(error) for text in DOES_NOT_COMPILE)
            if isinstance(error, RuntimeError) and compiles:
                self.lasting = False
            return
        for some in fewer:
            if not np.array_equal(together[: len(some)].view(np.uint32), some.view(np.uint32)):
                self.failures[name] = "a row depends on how many there are"
        expected = np.array(run(self._stock, ROWS))
        difference = float(np.abs(together - expected).max())
        if not difference <= tolerance * float(np.abs(expected).max()):
            self.failures[name] = f"differs from the reference by {difference:.2g}"
