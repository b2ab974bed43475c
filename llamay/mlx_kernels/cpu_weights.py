"""Weights as the CPU kernels read them: packed now, or mapped as an earlier start packed them."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Thread

import numpy as np

from llamay.formats import Tensor
from llamay.mlx_kernels import _cpu
from llamay.mlx_kernels.memory import anonymous_memory
from llamay.mlx_kernels.packed import PackedFolder, packed_key
from llamay.mlx_kernels.program import Program, matrices

ALIGNMENT = 64
ROWS_AT_ONCE = 1024  # of a matrix, packed by one thread: a multiple of the 16 packed together

Matrix = tuple[int, int, int, memoryview]  # as the C code takes it: format, rows, columns, packed


@dataclass(frozen=True, slots=True)
class Weights:
    """A program's matrices.

    matrices: by their tensors' ids
    mapped:   whether an earlier start packed them
    writer:   keeps them for later starts; None if nobody does
    """

    matrices: dict[int, Matrix]
    mapped: bool
    writer: Thread | None


def load_weights(program: Program, threads: int, folder: PackedFolder | None) -> Weights:
    """The program's matrices, from the folder or packed now, and then kept there."""
    layout = _Layout(program)
    tensors = list(layout.tensors.values())
    key = packed_key(program.source, tensors)
    if folder is not None and not (program.source and folder.takes(layout.size)):
        folder = None
    packed = folder.load(key, layout.size, threads) if folder else None
    mapped, writer = packed is not None, None
    if packed is None:
        packed = _pack_all(layout, threads)
        writer = folder.keep(key, packed) if folder else None
    return Weights({id(t): layout.matrix(packed, t) for t in tensors}, mapped, writer)


class _Layout:
    """Where the program's matrices stand, packed, one after the other."""

    def __init__(self, program: Program) -> None:
        self.tensors = {id(t): t for operation in program.operations for t in matrices(operation)}
        self.size = 0
        self._offsets = {}
        for key, tensor in self.tensors.items():
            self._offsets[key] = self.size
            self.size += -(-_packed_bytes(tensor, tensor.rows) // ALIGNMENT) * ALIGNMENT

    def rows(self, weights: memoryview, tensor: Tensor, first: int, count: int) -> memoryview:
        """The packed rows [first, first + count) of a matrix; first is a multiple of 16."""
        start = self._offsets[id(tensor)] + _packed_bytes(tensor, first)
        return weights[start : start + _packed_bytes(tensor, count)]

    def matrix(self, weights: memoryview, tensor: Tensor) -> Matrix:
        """As the C code takes it."""
        packed = self.rows(weights, tensor, 0, tensor.rows)
        return tensor.format.type_id, tensor.rows, tensor.columns, packed


def _pack_all(layout: _Layout, threads: int) -> memoryview:
    """All matrices, read-only, in one mapping, in huge pages where there are any."""
    weights = memoryview(anonymous_memory(layout.size))

    def pack(job: tuple[Tensor, int]) -> None:
        tensor, first = job
        rows = min(ROWS_AT_ONCE, tensor.rows - first)
        row_bytes = tensor.format.row_bytes(tensor.columns)
        source = tensor.data[first * row_bytes : (first + rows) * row_bytes]
        target = layout.rows(weights, tensor, first, rows)
        _cpu.pack(tensor.format.type_id, rows, tensor.columns, source, target)
        _release(source)

    jobs = [
        (tensor, first)
        for tensor in layout.tensors.values()
        for first in range(0, tensor.rows, ROWS_AT_ONCE)
    ]
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(pack, jobs))
    return weights.toreadonly()


def _packed_bytes(tensor: Tensor, rows: int) -> int:
    return _cpu.packed_bytes(tensor.format.type_id, rows, tensor.columns) if rows else 0


def _release(view: memoryview) -> None:
    """Lets go of a mapped file's memory that was read once; it comes back if it is read again."""
    if not isinstance(view.obj, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = _address(view) - _address(view.obj)
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (start + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        view.obj.madvise(mmap.MADV_DONTNEED, first, size)


def _address(buffer: memoryview | mmap.mmap) -> int:
    return np.frombuffer(buffer, dtype=np.uint8).ctypes.data
