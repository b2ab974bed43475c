"""The Metal kernel set: bodies for `mx.fast.metal_kernel` in msl/, and the graph that calls them.

A step is one graph and one evaluation. A row's result depends on that row only: each kernel
computes one row and many with the same operations in the same order (msl/common.metal,
msl/attend.metal). Equality with the CPU kernels is by tolerance.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from llamay.formats import KVLayout
from llamay.mlx_kernels import (
    CONTRACT_VERSION,
    ByteArray,
    Control,
    Float32Array,
    Program,
    RunStep,
    Slabs,
    Step,
)
from llamay.mlx_kernels.metal import pages as page_memory
from llamay.mlx_kernels.metal.forward import Forward
from llamay.mlx_kernels.metal.kernels import Kernels, MakeKernel
from llamay.mlx_kernels.metal.weights import Weights


class MetalKernels:
    """Implements `KernelSet`; exact. All calls of one object come from one thread."""

    name = "metal"
    exact = True
    threads = 1
    row_threads = 1
    numerics_id = f"metal-v{CONTRACT_VERSION}"

    def __init__(self, make_kernel: MakeKernel | None = None) -> None:
        """make_kernel: `mx.fast.metal_kernel`, or what has its signature."""
        self.kernels = Kernels(make_kernel or mx.fast.metal_kernel)
        self._pools: dict[tuple[KVLayout, int], page_memory.ChunkPool] = {}

    def prepare(self, program: Program) -> RunStep:
        """See `KernelSet`. Raises UnsupportedModelError for weights without a Metal kernel."""
        weights = Weights(program)

        def run(step: Step, slabs: Slabs, control: Control) -> Float32Array | None:
            if step.tokens.min() < 0 or step.tokens.max() >= program.vocab_size:
                raise ValueError(f"a token is not in the vocabulary of {program.vocab_size}")
            page_map = page_memory.PageMap(slabs)
            forward = Forward(self.kernels, program, weights, step, page_map)
            cancelled = False
            for index, operation in enumerate(program.operations):
                cancelled = control.cancelled
                if cancelled:
                    break
                forward.apply(operation)
                control.words[1] = index + 1
            # What a cancelled step has written lies beyond its contexts' lengths.
            layers = [array for chunk in page_map.chunks for array in chunk.layers]
            page_memory.finish([forward.stream, *layers])
            return None if cancelled else np.array(forward.stream)

        return run

    def new_slab(self, layout: KVLayout, pages: int) -> Any:
        """See pages.py."""
        pool = self._pools.setdefault((layout, pages), page_memory.ChunkPool())
        return pool.new_slab(layout, pages)

    def page_bytes(self, layout: KVLayout) -> int:
        """See `KernelSet`."""
        return layout.page_tokens * layout.row_bytes

    def copy_page(self, slabs: Slabs, source: int, target: int) -> None:
        """See `KernelSet`."""
        page_memory.copy_page(slabs, source, target)

    def export_rows(
        self,
        slabs: Slabs,
        pages: Sequence[int],
        start: int,
        end: int,
        out: ByteArray | None = None,
    ) -> ByteArray:
        """See `KernelSet`."""
        return page_memory.export_rows(slabs, pages, start, end, out)

    def import_rows(self, slabs: Slabs, pages: Sequence[int], start: int, rows: ByteArray) -> None:
        """See `KernelSet`."""
        page_memory.import_rows(slabs, pages, start, rows)
