"""The narrow interface between a model and the arithmetic that runs it.

A model is compiled, once, into a `Program`: a flat list of coarse operations. A kernel set prepares
the program's weights its own way and runs it on a `Step`, ragged rows of several contexts.

The numerics contract, which every exact kernel set keeps:

1. A row's result depends on that row only: not on how many rows, contexts or threads there are, nor
   on page size or where a chunk of prefill ended. Attention reads keys and values only as stored in
   the page, even for rows of the same step.
2. Every output element has one fixed order of reduction. Parallelism splits outputs. Attention
   reduces in runs of 256 positions counted from 0, merged in ascending order. Positions before a
   layer's window weigh exactly 0, and runs of which a row sees nothing are left out.
3. CPU kernels give the same bits on every instruction set. SIMD lanes are output rows. For each
   block of 32 weights, ascending: acc = fma(scale_w * scale_x, float(isum), acc), and for formats
   with a minimum then acc = fma(min_w, scale_x * sum_x, acc); isum is an exact integer. Activations
   are quantised with scale = max|x| / 127, q = round_to_even(x / scale); those of queries, keys,
   values and logits in a second plane too, round_to_even(256 * (x / scale - q)), and scale / 256;
   a block with a value that is not finite has a scale of NaN.
   Formats of superblocks (Q2_K to Q6_K, IQ4_XS) do so for each 256 weights, and quantise
   activations in blocks of 256: isum weighs each sub-block's integer sum with its integer scale,
   and of two planes value = fma(256, float(isum of the first), float(isum of the second)) stands
   for float(isum); minima then acc = fma(min_w * scale_x, -float(sum of m * sum_x), acc), where m
   is a sub-block's integer minimum and sum_x the exact sum of the activations that it meets.
   Float weights: one ascending fma chain per row. q.k: one chain per position, ascending in the
   head dimension. Other sums: 16 partial sums, lane l taking elements l, l + 16, ..., then a fixed
   tree.
4. exp, log, sin and cos are our own, from IEEE-exact operations (csrc/fixed_math.h and
   csrc/kernel_bodies.h), and so are tanh |x| = (1 - t) / (1 + t), t = exp(-2 |x|), and gelu(x) =
   x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3). Capped logits are NaN if they were not
   finite. Ties go to the lower id. No contraction, no fast-math, subnormals kept, rounding to
   nearest even.
5. Keys and values are rounded once, when they are written, each head's vector of a position by
   itself. f16: to the nearest, ties to even, at most 65504. 8 bits: scale = max|x| / 127, rounded
   up to 16 significant bits, so that 127 * scale is exact and rounding what was rounded changes
   nothing; q = round_to_even(x / scale); zeros if max|x| < 2^-100. Attention multiplies q.k with
   the key's scale, then with its own; a position's weight with the value's scale, then with the
   values.
6. The numerics id names what made a context: contract version, kernel family, KV precision.
7. Metal kernels multiply unquantised activations and have orders of their own, which
   msl/products.metal, msl/attend.metal and msl/best.metal state; they equal the CPU's results by
   tolerance only. From equal logits, both choose the same token.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamay.errors import UsageError
from llamay.formats import KVLayout, KVPrecision
from llamay.mlx_kernels import _cpu
from llamay.mlx_kernels.program import Program

CONTRACT_VERSION = 1

Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
ByteArray: TypeAlias = NDArray[np.uint8]

NONE_REPLACED: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Step:
    """Ragged rows of several contexts, run together.

    tokens, positions, contexts: [rows] int32; row i is tokens[i] at positions[i] of contexts[i]
    writes: [rows] bool; False asks a question only: the keys and values of the row's position are
        in its page already, are read from there like those before it, and nothing is written
    page_table: [contexts, max_pages] int32 page ids, -1 where a context has none
    logit_rows: [n] int32, the rows whose logits are wanted
    best: how many of the largest of these will be asked for; 0 if nobody asks, and the whole rows
        are read
    Rows of one context stand together in ascending positions. Their pages up to the row's position
    exist, and those written to belong to this context alone.
    """

    tokens: Int32Array
    positions: Int32Array
    contexts: Int32Array
    writes: BoolArray
    page_table: Int32Array
    logit_rows: Int32Array
    best: int = 0


@dataclass(frozen=True, slots=True)
class Best:
    """The logits of a position that come first by value, ties to the lower id.

    values: [k] float32; ids: [k] int32
    log_sum_exp: log(sum(exp(logits))) of all logits; NaN if one is not finite
    """

    values: Float32Array
    ids: Int32Array
    log_sum_exp: float


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step gives for the rows whose logits were wanted.

    logits: [n, vocab] float32
    best:   of each row, if the step asked and the device found them; else empty
    """

    logits: Float32Array
    best: tuple[Best, ...] = ()

    def rows(self, start: int, end: int) -> "StepLogits":
        """Those of rows [start, end)."""
        return StepLogits(self.logits[start:end], self.best[start:end])

    def best_of(self, row: int) -> Best | None:
        """Of a row, if the device found them."""
        return self.best[row] if self.best else None


@dataclass(slots=True)
class Slabs:
    """The arrays that hold pages.

    Page p is entry p % pages_per_slab of array p // pages_per_slab; an array of length 0 stands for
    a slab without pages.
    """

    layout: KVLayout
    pages_per_slab: int
    arrays: list[Any]


class Control:
    """Shared by who runs a step and who watches it; usable from any thread."""

    def __init__(self) -> None:
        self.words = np.zeros(2, dtype=np.int64)

    def cancel(self) -> None:
        """Makes the running step, and every later one with this control, stop unpublished."""
        self.words[0] = 1

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return bool(self.words[0])

    @property
    def operations_done(self) -> int:
        """Operations of the running step that are done."""
        return int(self.words[1])


@dataclass(slots=True)
class DeviceUse:
    """What a device was given to do.

    dispatches: kernels launched, those of MLX and its copies included
    seconds:    from a submission to its end
    """

    dispatches: int = 0
    submissions: int = 0
    seconds: float = 0.0


RunStep: TypeAlias = Callable[[Step, Slabs, Control], StepLogits | None]


class KernelSet(Protocol):
    """What a model and the page store ask of a kernel set."""

    @property
    def name(self) -> str:
        """Name shown to users, such as `cpu avx512-vnni`."""

    @property
    def exact(self) -> bool:
        """Whether it keeps the numerics contract."""

    @property
    def replaced(self) -> Mapping[str, str]:
        """Kernels that failed their check on this machine, and why; stock operations stand in."""

    @property
    def threads(self) -> int:
        """Threads that run a step, the caller's among them."""

    @property
    def row_threads(self) -> int:
        """How many threads may call `export_rows` and `import_rows` at once, each for its rows."""

    @property
    def device_use(self) -> DeviceUse | None:
        """What steps have taken of a device so far; None on the CPU."""

    @property
    def numerics_id(self) -> str:
        """Equal for kernel sets whose contexts continue each other's, if of one KV precision."""

    def prepare(self, program: Program) -> RunStep:
        """Prepares the weights; the result runs a step.

        It returns the logits of `logit_rows`, or None if the step was cancelled, and writes the
        rows' keys and values to their pages. One call at a time.
        """

    def best(self, logits: Float32Array, count: int) -> tuple[Best, ...]:
        """What a step that asks for `count` finds of rows that have these logits [n, vocab].

        Nothing where that is left to whoever reads them.
        """

    def new_slab(self, layout: KVLayout, pages: int) -> Any:
        """An array for `pages` pages, their content undefined."""

    def page_bytes(self, layout: KVLayout) -> int:
        """Bytes of one page."""

    def copy_page(self, slabs: Slabs, source: int, target: int) -> None:
        """Copies a whole page, by ids."""

    def export_rows(
        self,
        slabs: Slabs,
        pages: Sequence[int],
        start: int,
        end: int,
        out: ByteArray | None = None,
    ) -> ByteArray:
        """Rows (see `KVLayout`) of positions [start, end) of the context that holds `pages`.

        Returns `out`, or a new array: [end - start, row_bytes].
        Raises ValueError for an `out` of another shape, or positions outside the pages.
        """

    def import_rows(self, slabs: Slabs, pages: Sequence[int], start: int, rows: ByteArray) -> None:
        """Writes positions start.. from rows [n, row_bytes], contiguous.

        Raises ValueError, with nothing written, for rows of another size, or positions outside the
        pages.
        """


def numerics_id(kernels: KernelSet, layout: KVLayout) -> str:
    """Equal for contexts that continue each other bit for bit, such as `cpu-v1-f32`."""
    return f"{kernels.numerics_id}-{layout.precision.value}"


def c_layout(layout: KVLayout) -> tuple[int, int, int, int, str]:
    """A layout as the C code takes it."""
    counts = (layout.layers, layout.kv_heads, layout.head_dim, layout.page_tokens)
    return (*counts, layout.precision.value)


def check_rows(rows: ByteArray, layout: KVLayout, count: int) -> None:
    """Raises ValueError unless rows are [count, row_bytes] uint8."""
    if rows.dtype != np.uint8 or rows.shape != (count, layout.row_bytes):
        raise ValueError(
            f"{count} rows of {layout.row_bytes} bytes are needed, {rows.dtype} {rows.shape} given"
        )


def convert_rows(
    rows: ByteArray, layout: KVLayout, source: KVPrecision, target: KVPrecision
) -> ByteArray:
    """Rows of one precision as rows of another: decoded to float32 values and rounded again.

    rows: [n, row_bytes], contiguous; the layout's own precision plays no part
    To a precision that holds them, values change no more: f32 holds all, so q8 -> f32 -> q8 gives
    the same bytes. Raises ValueError for rows of another size.
    """
    before, after = replace(layout, precision=source), replace(layout, precision=target)
    check_rows(rows, before, len(rows))
    out = np.empty((len(rows), after.row_bytes), dtype=np.uint8)
    _cpu.convert_rows(c_layout(before), c_layout(after), rows, out)
    return out


def has_metal() -> bool:
    """Whether this machine has a GPU for the Metal kernels.

    `mx.metal.is_available` is true on every Mac, also on one without a GPU.
    """
    if sys.platform != "darwin":
        return False
    import mlx.core as mx

    return mx.device_count(mx.gpu) > 0


def load_kernels(
    device: str = "auto",
    threads: int | None = None,
    checks_file: Path | None = None,
    packed_folder: Path | None = None,
) -> KernelSet:
    """The kernel set for `device`: auto (Metal where there is any, else the CPU), metal, cpu or
    reference. With $LLAMAY_ISA, which names instructions of the CPU, auto is the CPU.

    threads: for the CPU kernels; None takes the processor's cores
    checks_file: where it is kept which Metal kernels work on this machine; None checks none
    packed_folder: where the CPU kernels keep a large model's weights, packed; None keeps none
    Raises UsageError for metal without Metal, ValueError for another device.
    """
    if device == "metal" or (device == "auto" and not os.environ.get("LLAMAY_ISA")):
        if has_metal():
            from llamay.mlx_kernels.metal import MetalKernels

            return MetalKernels(checks_file=checks_file)
        if device == "metal":
            raise UsageError(
                "--device: expected auto or cpu on a machine without Metal, found metal; "
                "use --device cpu"
            )
    if device in ("auto", "cpu"):
        from llamay.mlx_kernels.cpu import CpuKernels
        from llamay.mlx_kernels.packed import PackedFolder

        return CpuKernels(threads, packed=PackedFolder(packed_folder) if packed_folder else None)
    if device == "reference":
        from llamay.mlx_kernels.reference import ReferenceKernels

        return ReferenceKernels()
    raise ValueError(f"device must be auto, metal, cpu or reference, not {device!r}")
