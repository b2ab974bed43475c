"""Runs kernels of `mx.fast.metal_kernel` on the CPU, from the same text and with the same call.

A kernel runs once in each schedule: threads and threadgroups forward, in reverse, and at random.
All must give the same bits. What a GPU would pass over, or answer with garbage or a hang, raises
MetalError: an access outside a buffer or an array, a write to an input, a misaligned access,
threads that wait at different barriers or collective calls, too much threadgroup memory, no end.

What it cannot show: that Apple's compiler takes the text, how many threads a threadgroup may have
for want of registers, speed, the GPU's rounding in matrices and `fast::`, and stores that become
visible too late although a barrier stands where it should.
"""

import ctypes
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.metal.address_spaces import check_address_spaces
from tests.metal.buffers import GuardedBuffer
from tests.metal.compiler import MetalError, kernel_library, runtime_library, source_line
from tests.metal.signature import Kernel, Operand, Template, Variant, variant_of

SCHEDULES = ("forward", "reverse", "random")

MAX_THREADS = 1024  # of a threadgroup
MAX_BUFFERS = 31  # of a kernel
THREADGROUP_BYTES = 32 * 1024
TIMEOUT_S = 60  # on the processor

_Extent = ctypes.c_uint32 * 3


class _Launch(ctypes.Structure):
    """As in runtime.h."""

    _fields_ = (
        ("grid", _Extent),
        ("threadgroup", _Extent),
        ("schedule", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("timeout_s", ctypes.c_uint32),
    )


class _Fault(ctypes.Structure):
    """As in runtime.h."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("program_counter", ctypes.c_uint64),
        ("line", ctypes.c_int32),
        ("message", ctypes.c_char * 500),
    )


@functools.cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)


@dataclass(frozen=True)
class Loaded:
    """A compiled variant."""

    variant: Variant
    path: Path
    run: Any  # void run(void* const* buffers)

    @classmethod
    def of(cls, variant: Variant) -> "Loaded":
        check_address_spaces(variant)
        _runtime()  # whose symbols the kernel's library needs
        path = kernel_library(variant)
        return cls(variant, path, ctypes.CDLL(str(path)).run)


@dataclass(frozen=True)
class Input:
    """An evaluated input: its memory, strides in elements."""

    memory: NDArray[np.uint8]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    row_contiguous: bool

    @classmethod
    def of(cls, array: mx.array) -> "Input":
        plain = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
        strides = tuple(stride // plain.itemsize for stride in plain.strides)
        span = sum((n - 1) * s for n, s in zip(plain.shape, strides, strict=True)) + 1
        elements = np.lib.stride_tricks.as_strided(
            plain, (span if plain.size else 0,), (plain.itemsize,)
        )
        return cls(elements.view(np.uint8), plain.shape, strides, plain.flags.c_contiguous)

    def described(self, kind: str) -> NDArray[Any]:
        """What the parameters `_shape`, `_strides` and `_ndim` hold."""
        if kind == "ndim":
            return np.array([len(self.shape)], np.int32)
        return (
            np.array(self.shape, np.int32) if kind == "shape" else np.array(self.strides, np.int64)
        )


@dataclass(frozen=True)
class Call:
    """One call of a kernel, its inputs evaluated."""

    kernel: Kernel
    loaded: Loaded
    inputs: dict[str, Input]
    initial_outputs: dict[str, NDArray[np.uint8]]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    def run(self, schedule: str) -> dict[str, NDArray[np.uint8]]:
        """Runs it once; returns the outputs' bytes. Raises MetalError."""
        buffers: list[GuardedBuffer] = []
        try:
            for parameter in self.loaded.variant.parameters:
                content = self._content(parameter.kind, parameter.name)
                name = f"{parameter.kind} {parameter.name}"
                buffer = GuardedBuffer(name, content.nbytes, at_end=schedule != "reverse")
                buffers.append(buffer)
                buffer.bytes[:] = content
                if parameter.kind != "output":
                    buffer.make_read_only()
            self._launch(buffers, schedule)
            parameters = self.loaded.variant.parameters
            pairs = zip(parameters, buffers, strict=True)
            return {p.name: b.bytes.copy() for p, b in pairs if p.kind == "output"}
        finally:
            for buffer in buffers:
                buffer.close()

    def _content(self, kind: str, name: str) -> NDArray[np.uint8]:
        if kind == "output":
            return self.initial_outputs[name]
        if kind == "input":
            return self.inputs[name].memory
        return self.inputs[name].described(kind).view(np.uint8)

    def _launch(self, buffers: Sequence[GuardedBuffer], schedule: str) -> None:
        launch = _Launch(
            grid=_Extent(*self.grid),
            threadgroup=_Extent(*map(min, self.grid, self.threadgroup)),
            schedule=SCHEDULES.index(schedule),
            seed=1,
            threadgroup_bytes=THREADGROUP_BYTES,
            timeout_s=TIMEOUT_S,
        )
        addresses = (ctypes.c_void_p * len(buffers))(*[buffer.address for buffer in buffers])
        fault = _Fault()
        _runtime().host_launch(
            self.loaded.run, addresses, ctypes.byref(launch), ctypes.byref(fault)
        )
        if fault.message:
            raise MetalError(self._explain(fault, buffers, schedule))

    def _explain(self, fault: _Fault, buffers: Sequence[GuardedBuffer], schedule: str) -> str:
        message = f"{self.kernel.name}: {fault.message.decode()} ({schedule} schedule)"
        places = [b.place_of(fault.address) for b in buffers] if fault.address else []
        message += "".join(f"\n  it is {place}" for place in places if place)
        line = fault.line
        if fault.program_counter:
            line = source_line(self.loaded.path, fault.program_counter)
        if line:
            text = self.loaded.variant.text.split("\n")[line - 1]
            message += (
                f"\n  line {line}: {text.strip()}\n  in {self.loaded.path.with_suffix('.cpp')}"
            )
        return message


class HostKernel:
    """What `HostMetal.metal_kernel` returns; called as what `mx.fast.metal_kernel` returns."""

    def __init__(self, host: "HostMetal", kernel: Kernel) -> None:
        self._host, self.kernel = host, kernel
        self._loaded: dict[Any, Loaded] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Evaluates the inputs and runs the kernel; see `mx.fast.metal_kernel`.

        Outputs are 0xFF bytes, NaN if they are floats, where the kernel writes nothing and
        `init_value` is None. Raises MetalError.
        """
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        mx.eval(arrays)
        loaded = self._variant(arrays, output_dtypes, template or ())
        if verbose:
            print(loaded.variant.text)
        named = zip(self.kernel.input_names, map(Input.of, arrays), strict=True)
        filled = map(_fill, output_shapes, output_dtypes, [init_value] * len(output_dtypes))
        outputs = dict(zip(self.kernel.output_names, filled, strict=True))
        call = Call(self.kernel, loaded, dict(named), outputs, tuple(grid), tuple(threadgroup))
        _check_limits(call)
        self._host.launches[self.kernel.name] += 1
        first, *others = [call.run(schedule) for schedule in self._host.schedules]
        for schedule, other in zip(self._host.schedules[1:], others, strict=True):
            for name, dtype in zip(self.kernel.output_names, output_dtypes, strict=True):
                _demand_equal(
                    first[name], other[name], dtype, f"{self.kernel.name}: {name}", schedule
                )
        return list(map(_to_array, first.values(), output_shapes, output_dtypes))

    def _variant(
        self, arrays: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Template
    ) -> Loaded:
        operands = tuple(map(Operand.of, arrays))
        key = (operands, tuple(output_dtypes), tuple(template))
        if key not in self._loaded:
            self._loaded[key] = Loaded.of(variant_of(self.kernel, *key))
        return self._loaded[key]


class HostMetal:
    """Makes kernels that run on this machine's processor.

    schedules: the orders in which each call runs; several must give equal bits
    launches: calls by kernel name
    """

    def __init__(self, schedules: Sequence[str] = SCHEDULES) -> None:
        self.schedules = tuple(schedules)
        self.launches: Counter[str] = Counter()

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
    ) -> HostKernel:
        """As `mx.fast.metal_kernel`."""
        names = tuple(input_names), tuple(output_names)
        kernel = Kernel(name, *names, source, header, ensure_row_contiguous, atomic_outputs)
        return HostKernel(self, kernel)


def _fill(shape: Sequence[int], dtype: mx.Dtype, value: float | None) -> NDArray[np.uint8]:
    """The bytes of an output before the kernel runs."""
    if value is None:
        return np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8)
    return Input.of(mx.contiguous(mx.full(shape, value, dtype))).memory


def _to_array(data: NDArray[np.uint8], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    if not data.size:
        return mx.zeros(shape, dtype)
    if dtype == mx.bool_:
        return mx.array(data.view(np.bool_)).reshape(shape)
    return mx.array(data).view(dtype).reshape(shape)


def _check_limits(call: Call) -> None:
    """What Metal would refuse, and copies that MLX would make silently."""
    threads = int(np.prod(call.threadgroup))
    name = call.kernel.name
    if not 0 < threads <= MAX_THREADS:
        raise MetalError(
            f"{name}: {threads} threads in a threadgroup; 1 to {MAX_THREADS} are allowed"
        )
    if min(call.grid) < 1:
        raise MetalError(f"{name}: the grid {call.grid} is empty")
    if (count := len(call.loaded.variant.parameters)) > MAX_BUFFERS:
        raise MetalError(f"{name}: {count} buffers; Metal has {MAX_BUFFERS}")
    if call.kernel.ensure_row_contiguous:
        for input_name, given in call.inputs.items():
            if not given.row_contiguous:
                raise MetalError(
                    f"{name}: {input_name} is strided, so that MLX copies it at every call"
                )


def _demand_equal(
    first: NDArray[np.uint8], other: NDArray[np.uint8], dtype: mx.Dtype, what: str, schedule: str
) -> None:
    """Raises MetalError unless a schedule gave the bytes that the first one gave."""
    differing = np.flatnonzero(first != other) // dtype.size
    if differing.size:
        index, count = differing[0], np.unique(differing).size
        raise MetalError(
            f"{what} depends on the order of threads: {count} elements differ in the {schedule}"
            f" schedule, first at flat index {index}"
        )
