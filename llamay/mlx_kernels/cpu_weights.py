"""Weights as the CPU kernels read them: packed now, or mapped as an earlier start packed them."""

import mmap
from dataclasses import dataclass
from threading import Thread

from llamay.formats import Tensor
from llamay.mlx_kernels import _cpu
from llamay.mlx_kernels.memory import anonymous_memory
from llamay.mlx_kernels.packed import PackedFolder, packed_key
from llamay.mlx_kernels.program import Program, matrices

ALIGNMENT = 64

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


def load_weights(program: Program, pool: _cpu.Pool, folder: PackedFolder | None) -> Weights:
    """The program's matrices, from the folder or packed now, and then kept there."""
    layout = _Layout(program)
    tensors = list(layout.tensors.values())
    key = packed_key(program.source, tensors)
    if folder is not None and not (program.source and folder.takes(layout.size)):
        folder = None
    packed = folder.load(key, layout.size, pool.threads) if folder else None
    mapped, writer = packed is not None, None
    if packed is None:
        packed = _pack_all(layout, pool)
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
            self.size += -(-_packed_bytes(tensor) // ALIGNMENT) * ALIGNMENT

    def memory(self, weights: memoryview, tensor: Tensor) -> memoryview:
        """Where in them a matrix stands."""
        start = self._offsets[id(tensor)]
        return weights[start : start + _packed_bytes(tensor)]

    def matrix(self, weights: memoryview, tensor: Tensor) -> Matrix:
        """As the C code takes it."""
        packed = self.memory(weights, tensor)
        return tensor.format.type_id, tensor.rows, tensor.columns, packed


def _pack_all(layout: _Layout, pool: _cpu.Pool) -> memoryview:
    """All matrices, read-only, in one mapping, in huge pages where there are any.

    Of a mapped file, what was read is let go: packing doubles no memory.
    """
    weights = memoryview(anonymous_memory(layout.size))
    tensors = layout.tensors.values()
    tasks = [
        (t.format.type_id, t.rows, t.columns, t.data, layout.memory(weights, t)) for t in tensors
    ]
    are_mapped = all(isinstance(tensor.data.obj, mmap.mmap) for tensor in tensors)
    _cpu.pack_all(pool, tasks, are_mapped)
    return weights.toreadonly()


def _packed_bytes(tensor: Tensor) -> int:
    return _cpu.packed_bytes(tensor.format.type_id, tensor.rows, tensor.columns)
