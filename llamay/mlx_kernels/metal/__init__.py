"""The Metal kernel set: bodies for `mx.fast.metal_kernel` in msl/, and the graph that calls them.

A step is one graph and one evaluation. A row's result depends on that row only: each kernel
computes one row and many with the same operations in the same order (msl/products.metal,
msl/attend.metal). Equality with the CPU kernels is by tolerance.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from llamay.errors import UnsupportedModelError
from llamay.formats import KVLayout
from llamay.mlx_kernels import (
    CONTRACT_VERSION,
    NONE_REPLACED,
    Best,
    ByteArray,
    DeviceUse,
    Float32Array,
    RunStep,
    Slabs,
)
from llamay.mlx_kernels.metal import pages as page_memory
from llamay.mlx_kernels.metal.ahead import StepAhead
from llamay.mlx_kernels.metal.check import failures
from llamay.mlx_kernels.metal.kernels import MAX_GROUP, Kernels, MakeKernel
from llamay.mlx_kernels.metal.runner import Runner, best_of
from llamay.mlx_kernels.metal.stock import StockKernels
from llamay.mlx_kernels.metal.weights import Weights
from llamay.mlx_kernels.program import Program


class MetalKernels:
    """Implements `KernelSet`; exact unless kernels were replaced. One thread at a time.

    replaced: kernels that failed their check, and why; stock MLX operations run in their place
    """

    threads = 1
    row_threads = 1

    def __init__(
        self, make_kernel: MakeKernel | None = None, *, checks_file: Path | None = None
    ) -> None:
        """make_kernel: `mx.fast.metal_kernel`, or what has its signature.

        checks_file: where it is kept which kernels work on this machine; None checks none
        """
        self.kernels = Kernels(make_kernel or mx.fast.metal_kernel)
        self._real = make_kernel is None
        self.replaced: Mapping[str, str] = NONE_REPLACED
        self._checks_file = checks_file
        self._pools: dict[tuple[KVLayout, int], page_memory.ChunkPool] = {}
        self._ahead = StepAhead()
        self.device_use = DeviceUse()

    @property
    def exact(self) -> bool:
        """Whether every kernel works."""
        return not self.replaced

    @property
    def name(self) -> str:
        """`metal`, and what was replaced."""
        return f"metal (not exact without {', '.join(self.replaced)})" if self.replaced else "metal"

    @property
    def numerics_id(self) -> str:
        """Equal on all Macs, but for what was replaced."""
        return "-without-".join([f"metal-v{CONTRACT_VERSION}", *sorted(self.replaced)])

    def prepare(self, program: Program) -> RunStep:
        """See `KernelSet`. Raises UnsupportedModelError for a model without Metal kernels."""
        if (group := program.num_heads // program.num_kv_heads) > MAX_GROUP:
            raise UnsupportedModelError(
                f"expected up to {MAX_GROUP} query heads for each head of keys and values, found "
                f"{group}; use --device cpu"
            )
        weights = Weights(program)
        if self._checks_file is not None:
            self._check(program, weights, self._checks_file)

        keeps = self._real and not self.replaced
        return Runner(self.kernels, program, weights, keeps, self._ahead, self.device_use)

    def best(self, logits: Float32Array, count: int) -> tuple[Best, ...]:
        """See `KernelSet`."""
        return best_of(self.kernels.best(mx.array(logits), min(count, logits.shape[1])))

    def _check(self, program: Program, weights: Weights, file: Path) -> None:
        """Replaces the kernels that fail on this machine."""
        self.replaced = failures(self.kernels, program, weights, file)
        stock = StockKernels()
        for name in self.replaced:
            setattr(self.kernels, name, getattr(stock, name))

    def new_slab(self, layout: KVLayout, pages: int) -> Any:
        """See pages.py."""
        pool = self._pools.setdefault((layout, pages), page_memory.ChunkPool())
        return pool.new_slab(layout, pages)

    def page_bytes(self, layout: KVLayout) -> int:
        """See `KernelSet`."""
        return layout.page_tokens * layout.row_bytes

    def copy_page(self, slabs: Slabs, source: int, target: int) -> None:
        """See `KernelSet`."""
        self._ahead.forget()
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
        self._ahead.forget()
        page_memory.import_rows(slabs, pages, start, rows)
