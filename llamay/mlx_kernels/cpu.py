"""The CPU kernel set: the C extension and its threads.

The C code lays out pages (csrc/kv_page.h), reads and writes them through the slabs' buffers, and no
MLX operation ever takes a slab.
"""

import os
from collections.abc import Sequence
from threading import Thread
from typing import Any, assert_never

import numpy as np

from llamay.errors import UnsupportedModelError, UsageError
from llamay.formats import Format, KVLayout, Tensor
from llamay.mlx_kernels import (
    CONTRACT_VERSION,
    NONE_REPLACED,
    Best,
    ByteArray,
    Control,
    Float32Array,
    Int32Array,
    RunStep,
    Slabs,
    Step,
    StepLogits,
    _cpu,
    c_layout,
    check_rows,
)
from llamay.mlx_kernels.cpu_weights import Matrix, load_weights
from llamay.mlx_kernels.machine import usable_cores
from llamay.mlx_kernels.memory import anonymous_memory
from llamay.mlx_kernels.packed import PackedFolder
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


def kernel_set_names() -> list[str]:
    """The instruction sets that this processor has kernels for, best first."""
    return _cpu.kernel_sets()


def kernel_set_name() -> str:
    """The instruction set in use: $LLAMAY_ISA, or the best this processor has.

    Raises UsageError if $LLAMAY_ISA names one that it has not.
    """
    names = _cpu.kernel_sets()
    forced = os.environ.get("LLAMAY_ISA")
    if forced and forced not in names:
        raise UsageError(f"LLAMAY_ISA: expected one of {', '.join(names)}, found {forced!r}")
    return forced or names[0]


class CpuKernels:
    """Implements `KernelSet`; exact. Several may exist, each with its own threads.

    weights_mapped: whether the weights prepared last were packed by an earlier start
    weights_writer: the thread that keeps them for later ones, which no exit waits for, or None
    """

    exact = True
    replaced = NONE_REPLACED
    device_use = None

    def __init__(
        self,
        threads: int | None = None,
        kernel_set: str | None = None,
        packed: PackedFolder | None = None,
    ) -> None:
        """kernel_set: one of `kernel_set_names`; None takes $LLAMAY_ISA or the best

        packed: where packed weights are kept for the next start; None keeps none
        """
        self.kernel_set = kernel_set or kernel_set_name()
        self.weights_mapped = False
        self.weights_writer: Thread | None = None
        self._packed = packed
        self._pool = _cpu.Pool(threads or usable_cores())

    @property
    def name(self) -> str:
        """Such as `cpu avx512-vnni`."""
        return f"cpu {self.kernel_set}"

    @property
    def threads(self) -> int:
        """Threads that run a step, the caller's among them."""
        return self._pool.threads

    @property
    def row_threads(self) -> int:
        """See `KernelSet`."""
        return self._pool.threads

    @property
    def numerics_id(self) -> str:
        """The same for every instruction set: their bits are equal."""
        return f"cpu-v{CONTRACT_VERSION}"

    def prepare(self, program: Program) -> RunStep:
        """See `KernelSet`. Raises UnsupportedModelError for a norm or bias that is not float32."""
        weights = load_weights(program, self._pool, self._packed)
        self.weights_mapped, self.weights_writer = weights.mapped, weights.writer
        compiled = _cpu.Program(
            self.kernel_set,
            program.hidden,
            program.num_heads,
            program.num_kv_heads,
            program.head_dim,
            program.vocab_size,
            program.ropes[0].interleaved,
            np.array([rope.inverse for rope in program.ropes], dtype=np.float64),
            np.array([rope.magnitude for rope in program.ropes], dtype=np.float64),
            program.attention_scale,
        )
        for operation in program.operations:
            _add_operation(compiled, weights.matrices, operation)

        def run(step: Step, slabs: Slabs, control: Control) -> StepLogits | None:
            logits = np.empty((len(step.logit_rows), program.vocab_size), dtype=np.float32)
            done = compiled.run(
                self._pool,
                step.tokens,
                step.positions,
                step.contexts,
                step.writes,
                step.page_table,
                step.page_table.shape[1],
                c_layout(slabs.layout),
                slabs.arrays,
                slabs.pages_per_slab,
                step.logit_rows,
                logits,
                control.words,
            )
            return StepLogits(logits) if done else None

        return run

    def best(self, logits: Float32Array, count: int) -> tuple[Best, ...]:
        """See `KernelSet`."""
        return ()

    def new_slab(self, layout: KVLayout, pages: int) -> Any:
        """[pages, page_bytes] uint8, in numpy's hands: MLX would not use huge pages."""
        memory = anonymous_memory(pages * self.page_bytes(layout))
        return np.frombuffer(memory, dtype=np.uint8).reshape(pages, -1)

    def page_bytes(self, layout: KVLayout) -> int:
        """See `KernelSet`."""
        return _cpu.page_bytes(c_layout(layout))

    def copy_page(self, slabs: Slabs, source: int, target: int) -> None:
        """See `KernelSet`."""
        _page_bytes(slabs, target)[:] = _page_bytes(slabs, source)

    def export_rows(
        self,
        slabs: Slabs,
        pages: Sequence[int],
        start: int,
        end: int,
        out: ByteArray | None = None,
    ) -> ByteArray:
        """See `KernelSet`."""
        if out is None:
            out = np.empty((end - start, slabs.layout.row_bytes), dtype=np.uint8)
        check_rows(out, slabs.layout, end - start)
        _cpu.export_rows(*self._pages(slabs, pages), start, out)
        return out

    def import_rows(self, slabs: Slabs, pages: Sequence[int], start: int, rows: ByteArray) -> None:
        """See `KernelSet`."""
        check_rows(rows, slabs.layout, len(rows))
        _cpu.import_rows(*self._pages(slabs, pages), start, rows)

    def _pages(
        self, slabs: Slabs, pages: Sequence[int]
    ) -> tuple[tuple[int, int, int, int, str], Sequence[Any], int, Int32Array]:
        """What the C code needs to find a context's positions."""
        ids = np.array(pages, dtype=np.int32)
        return c_layout(slabs.layout), slabs.arrays, slabs.pages_per_slab, ids


def _page_bytes(slabs: Slabs, page: int) -> Any:
    """The page's bytes, writable: [page_bytes] uint8."""
    return np.asarray(memoryview(slabs.arrays[page // slabs.pages_per_slab]))[
        page % slabs.pages_per_slab
    ]


def _vector(tensor: Tensor) -> bytes:
    """A copy of a norm or bias, float32: the model file need not stay mapped."""
    if tensor.format is not Format.F32:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r}: expected F32, found {tensor.format.name}; "
            "use another conversion of the model"
        )
    return bytes(tensor.data)


def _optional_vector(tensor: Tensor | None) -> bytes | None:
    return None if tensor is None else _vector(tensor)


def _post_norm(norm: PostNorm | None) -> tuple[bytes | None, float]:
    return (None, 0.0) if norm is None else (_vector(norm.weight), norm.eps)


def _add_operation(compiled: _cpu.Program, packed: dict[int, Matrix], operation: Operation) -> None:
    match operation:
        case Embed():
            compiled.add_embed(packed[id(operation.table)], operation.scale)
        case AttentionInput():
            compiled.add_attention_input(
                operation.layer,
                _vector(operation.norm),
                operation.eps,
                packed[id(operation.query)],
                packed[id(operation.key)],
                packed[id(operation.value)],
                _optional_vector(operation.query_bias),
                _optional_vector(operation.key_bias),
                _optional_vector(operation.value_bias),
                _optional_vector(operation.query_norm),
                _optional_vector(operation.key_norm),
                operation.rope,
            )
        case Attention():
            compiled.add_attention(operation.layer, operation.window, operation.soft_cap)
        case AttentionOutput():
            compiled.add_attention_output(
                packed[id(operation.weights)], *_post_norm(operation.post_norm)
            )
        case FeedForward():
            compiled.add_feed_forward(
                _vector(operation.norm),
                operation.eps,
                packed[id(operation.gate)],
                packed[id(operation.up)],
                packed[id(operation.down)],
                operation.activation,
                *_post_norm(operation.post_norm),
            )
        case Logits():
            compiled.add_logits(
                _vector(operation.norm),
                operation.eps,
                packed[id(operation.head)],
                operation.soft_cap,
            )
        case _:
            assert_never(operation)


def log_sum_exp(logits: Float32Array) -> float:
    """log(sum(exp(logits))), the same bits on every machine; logits: [vocab] float32."""
    return _cpu.log_sum_exp(kernel_set_name(), np.ascontiguousarray(logits))


def sample(
    logits: Float32Array,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    """The token that `uniform`, a number in [0, 1), picks; logits: [vocab] float32.

    Of the logits ordered by value, ties to the lower id, top_k keeps a prefix (0: all), top_p the
    shortest prefix that holds this share of what is left, min_p those with at least this share of
    the most likely one's; temperature then sharpens or flattens what is drawn from.
    """
    contiguous = np.ascontiguousarray(logits)
    return _cpu.sample(kernel_set_name(), contiguous, temperature, top_k, top_p, min_p, uniform)
