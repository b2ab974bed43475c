"""A kernel set whose pages are rows of bytes, with failures on order and copies counted.

A position holds one number below 2^22: its key the number's upper half, its value the lower half,
each exact in every precision.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamay.formats import KVLayout, KVPrecision
from llamay.kv import Cache, Context
from llamay.mlx_kernels import Best, Float32Array, RunStep, Slabs
from llamay.mlx_kernels.program import Program

Rows = NDArray[np.uint8]

HALF_BITS = 11
HEAD_DIM = 16


def layout_of(page_tokens: int, precision: KVPrecision = KVPrecision.F32) -> KVLayout:
    """A small layout: a key and a value, of which only the first element is not zero."""
    return KVLayout(1, 1, HEAD_DIM, page_tokens, precision)


class FakeKernels:
    """Slab: [pages, page_tokens, row_bytes] uint8, which read as NaN where never written.

    copies:     pages copied
    slabs_left: slabs that can still be made before the system has no memory; None has no end
    """

    name = "fake"
    exact = True
    threads = 1
    row_threads = 2
    numerics_id = "fake"

    def __init__(self) -> None:
        self.copies = 0
        self.slabs_left: int | None = None
        self.copy_fails = False

    def prepare(self, program: Program) -> RunStep:
        raise NotImplementedError

    def best(self, logits: Float32Array, count: int) -> tuple[Best, ...]:
        raise NotImplementedError

    def new_slab(self, layout: KVLayout, pages: int) -> Rows:
        if self.slabs_left is not None:
            if self.slabs_left == 0:
                raise MemoryError
            self.slabs_left -= 1
        return np.full((pages, layout.page_tokens, layout.row_bytes), 0xFF, np.uint8)

    def page_bytes(self, layout: KVLayout) -> int:
        return layout.page_tokens * layout.row_bytes

    def copy_page(self, slabs: Slabs, source: int, target: int) -> None:
        if self.copy_fails:
            raise MemoryError
        self.copies += 1
        self._page(slabs, target)[:] = self._page(slabs, source)

    def export_rows(
        self, slabs: Slabs, pages: Sequence[int], start: int, end: int, out: Rows | None = None
    ) -> Rows:
        whole = np.concatenate([self._page(slabs, page) for page in pages])
        if out is None:
            return whole[start:end]
        out[:] = whole[start:end]
        return out

    def import_rows(self, slabs: Slabs, pages: Sequence[int], start: int, rows: Rows) -> None:
        size = slabs.layout.page_tokens
        for position, row in enumerate(rows, start):
            self._page(slabs, pages[position // size])[position % size] = row

    def _page(self, slabs: Slabs, page: int) -> Rows:
        slab: Rows = slabs.arrays[page // slabs.pages_per_slab]
        entry: Rows = slab[page % slabs.pages_per_slab]
        return entry


def encode(values: Sequence[int], precision: KVPrecision) -> Rows:
    """[count] -> [count, row_bytes] of `layout_of` this precision."""
    numbers = np.asarray(values, np.int64)
    halves = (numbers >> HALF_BITS, numbers & ((1 << HALF_BITS) - 1))
    parts = []
    for half, element in zip(halves, precision.elements, strict=True):
        first = half
        if element == "i1":  # the largest of a vector is 127 steps
            parts.append((half.astype("<f4") / np.float32(127))[:, None].view(np.uint8))
            first = np.where(half > 0, 127, 0)
        vector = np.zeros((len(numbers), HEAD_DIM), "<" + element)
        vector[:, 0] = first
        parts.append(vector.view(np.uint8))
    return np.concatenate(parts, axis=1)


def decode(rows: Rows, precision: KVPrecision) -> list[float]:
    """The reverse of `encode`; NaN where nothing was written."""
    halves, at = [], 0
    for element in precision.elements:
        scale = None
        if element == "i1":
            scale = np.ascontiguousarray(rows[:, at : at + 4]).view("<f4")[:, 0]
            at += 4
        size = HEAD_DIM * int(element[1])
        vector = np.ascontiguousarray(rows[:, at : at + size]).view("<" + element)
        half = vector[:, 0].astype(np.float64)
        halves.append(half if scale is None else np.rint(half * scale))
        at += size
    numbers: list[float] = (halves[0] * (1 << HALF_BITS) + halves[1]).tolist()
    return numbers


def write_values(cache: Cache, context: Context, values: Sequence[int]) -> None:
    """Writes numbers to the positions from the context's length on."""
    store = cache.store
    rows = encode(values, store.layout.precision)
    store.kernels.import_rows(store.slabs, context.page_ids, context.length, rows)


def read_values(cache: Cache, context: Context) -> list[float]:
    """What `write_values` wrote to the committed positions."""
    if context.length == 0:
        return []
    store = cache.store
    rows = store.kernels.export_rows(store.slabs, context.page_ids, 0, context.length)
    return decode(rows, store.layout.precision)


def append(
    cache: Cache, context: Context, tokens: Sequence[int], values: Sequence[int] | None = None
) -> None:
    """A step: reserves, writes and commits; the values are the tokens if none are given."""
    context.reserve(len(tokens))
    write_values(cache, context, tokens if values is None else values)
    context.commit(tokens)


def new_cache(
    page_tokens: int = 4,
    pages_per_slab: int | None = 4,
    *,
    tree_pages: int | None = None,
    budget_pages: int | None = None,
) -> tuple[Cache, FakeKernels]:
    """A cache on fake kernels, its bounds given in pages."""
    kernels = FakeKernels()
    page_bytes = kernels.page_bytes(layout_of(page_tokens))
    bounds = {} if tree_pages is None else {"tree_bytes": tree_pages * page_bytes}
    cache = Cache(
        kernels,
        layout_of(page_tokens),
        numerics="own",
        pages_per_slab=pages_per_slab,
        budget_bytes=None if budget_pages is None else budget_pages * page_bytes,
        **bounds,
    )
    return cache, kernels


def assert_empty(cache: Cache) -> None:
    """Nothing is held and no memory kept."""
    cache.check()
    assert cache.live_pages == 0
    assert cache.tree_bytes == 0
    assert cache.retained == 0
    assert cache.store.slab_bytes == 0
