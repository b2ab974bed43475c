"""A kernel set whose pages are plain numpy rows, with failures on order and copies counted."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamay.formats import KVLayout
from llamay.kv import Cache, Context
from llamay.mlx_kernels import Program, RunStep, Slabs

Rows = NDArray[np.float32]


def layout_of(page_tokens: int) -> KVLayout:
    """The smallest layout: a key and a value of one number each."""
    return KVLayout(layers=1, kv_heads=1, head_dim=1, page_tokens=page_tokens)


class FakeKernels:
    """Slab: [pages, page_tokens, layers, 2, kv_heads, head_dim] float32, NaN where never written.

    copies:     pages copied
    slabs_left: slabs that can still be made before the system has no memory; None has no end
    """

    name = "fake"
    numerics_id = "fake"

    def __init__(self) -> None:
        self.copies = 0
        self.slabs_left: int | None = None
        self.copy_fails = False

    def prepare(self, program: Program) -> RunStep:
        raise NotImplementedError

    def new_slab(self, layout: KVLayout, pages: int) -> Rows:
        if self.slabs_left is not None:
            if self.slabs_left == 0:
                raise MemoryError
            self.slabs_left -= 1
        row = (layout.layers, 2, layout.kv_heads, layout.head_dim)
        return np.full((pages, layout.page_tokens, *row), np.nan, np.float32)

    def page_bytes(self, layout: KVLayout) -> int:
        return layout.page_tokens * layout.layers * 2 * layout.kv_heads * layout.head_dim * 4

    def copy_page(self, slabs: Slabs, source: int, target: int) -> None:
        if self.copy_fails:
            raise MemoryError
        self.copies += 1
        self._page(slabs, target)[:] = self._page(slabs, source)

    def export_rows(self, slabs: Slabs, pages: Sequence[int], start: int, end: int) -> Rows:
        whole = np.concatenate([self._page(slabs, page) for page in pages])
        return whole[start:end]

    def import_rows(self, slabs: Slabs, pages: Sequence[int], start: int, rows: Rows) -> None:
        size = slabs.layout.page_tokens
        for position, row in enumerate(rows, start):
            self._page(slabs, pages[position // size])[position % size] = row

    def _page(self, slabs: Slabs, page: int) -> Rows:
        slab: Rows = slabs.arrays[page // slabs.pages_per_slab]
        entry: Rows = slab[page % slabs.pages_per_slab]
        return entry


def write_values(cache: Cache, context: Context, values: Sequence[int]) -> None:
    """Writes a key of v and a value of -v for each v to the positions from the context's length."""
    kernels = cache.store.kernels
    rows = np.asarray(values, np.float32)[:, None, None, None, None]
    rows = np.concatenate([rows, -rows], axis=2)
    kernels.import_rows(cache.store.slabs, context.page_ids, context.length, rows)


def read_values(cache: Cache, context: Context) -> list[float]:
    """What `write_values` wrote to the committed positions; NaN where key and value disagree."""
    if context.length == 0:
        return []
    store = cache.store
    rows = store.kernels.export_rows(store.slabs, context.page_ids, 0, context.length)
    keys, values = rows[:, 0, 0, 0, 0], rows[:, 0, 1, 0, 0]
    read: list[float] = np.where(keys == -values, keys, np.nan).tolist()
    return read


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
