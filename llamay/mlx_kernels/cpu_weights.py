"""Weights as the CPU kernels read them: packed now, or mapped as an earlier start packed them."""

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llamay.formats import Tensor
from llamay.mlx_kernels import _cpu
from llamay.mlx_kernels.memory import anonymous_memory
from llamay.mlx_kernels.packed import PackedFolder, packed_key
from llamay.mlx_kernels.program import Program, matrices

ALIGNMENT = 64
ROWS_AT_ONCE = 1024  # of a matrix, packed by one thread: a multiple of the 16 packed together

Matrix = tuple[int, int, int, memoryview]  # as the C code takes it: format, rows, columns, packed


def packed_weights(
    program: Program, threads: int, folder: PackedFolder | None
) -> dict[int, Matrix]:
    """The program's matrices by their tensors' ids, packed here or by an earlier start."""
    layout = _Layout(program)
    tensors = list(layout.tensors.values())
    if folder is not None and program.source and folder.takes(layout.size):
        weights = _kept_weights(layout, packed_key(program.source, tensors), threads, folder)
    else:
        weights = _pack_all(layout, threads)
    return {id(tensor): layout.matrix(weights, tensor) for tensor in tensors}


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


def _kept_weights(layout: _Layout, key: str, threads: int, folder: PackedFolder) -> memoryview:
    """What the folder has; else packed now, and kept."""
    weights = folder.load(key, layout.size, threads)
    if weights is None:
        weights = _pack_all(layout, threads)
        folder.keep(key, weights)
    return weights


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
