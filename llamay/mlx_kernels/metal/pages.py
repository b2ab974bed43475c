"""Pages on Metal: where they lie, how a step writes them, and how rows leave and enter.

A slab is a stretch of a chunk, and a chunk is one array for each layer, uint32 [pages *
page_tokens, words]: a position's row of that layer as `KVLayout` describes it. Chunks grow, so
that a kernel, which takes a fixed number of arrays, reaches all of them.

Writing in place: MLX reuses the array that a scatter updates if nothing else refers to it, and on
Metal everything that a command buffer reads is referred to until that has completed. So each layer
has an array of its own, written once in a step before anything reads it, and a step ends with
`mx.synchronize`, which waits for the completion handlers too. Nor may the memory be more than 16 KB
larger than the array (`is_donatable` in mlx/backend/common/utils.h), as memory that is used again
may be.
"""

from collections.abc import Callable, Sequence
from weakref import WeakSet, WeakValueDictionary

import mlx.core as mx
import numpy as np

from llamay.formats import KVLayout
from llamay.mlx_kernels import ByteArray, Int32Array, Slabs, check_rows

MAX_CHUNKS = 16
PAGE_BITS = 26  # of a page's place: chunk << PAGE_BITS | page in the chunk
SMALL = 64  # slabs; below, a new chunk is half as large as all others together, then as large


class Chunk:
    """One array for each layer.

    layers: [pages * page_tokens, words] uint32 each
    """

    def __init__(self, layout: KVLayout, slabs: int, pages_per_slab: int) -> None:
        shape = (slabs * pages_per_slab * layout.page_tokens, row_words(layout))
        mx.clear_cache()  # so that the arrays' memory is new
        self.layers = [mx.zeros(shape, dtype=mx.uint32) for _ in range(layout.layers)]
        mx.eval(self.layers)
        self.slabs = slabs
        self.used: WeakValueDictionary[int, MetalSlab] = WeakValueDictionary()


class MetalSlab:
    """`pages` pages of a chunk, from page `start` on; the chunk goes with its last slab."""

    def __init__(self, chunk: Chunk, start: int, pages: int) -> None:
        self.chunk, self.start, self.pages = chunk, start, pages

    def __len__(self) -> int:
        return self.pages


class ChunkPool:
    """Finds room for slabs of one layout and size."""

    def __init__(self) -> None:
        self._chunks: WeakSet[Chunk] = WeakSet()

    def new_slab(self, layout: KVLayout, pages: int) -> MetalSlab:
        """A slab in a chunk that has room, or in a new chunk."""
        chunks = list(self._chunks)
        chunk = next((chunk for chunk in chunks if len(chunk.used) < chunk.slabs), None)
        if chunk is None:
            total = sum(chunk.slabs for chunk in chunks)
            chunk = Chunk(layout, max(1, total if total >= SMALL else total // 2), pages)
            self._chunks.add(chunk)
        place = next(place for place in range(chunk.slabs) if place not in chunk.used)
        slab = MetalSlab(chunk, place * pages, pages)
        chunk.used[place] = slab
        return slab


def row_words(layout: KVLayout) -> int:
    """32-bit words of a position's row in one layer."""
    return layout.row_bytes // layout.layers // 4


class PageMap:
    """Where the pages of a cache lie.

    chunks: those in use, in the order in which kernels take them
    first:  of each slab, its first page's place
    """

    def __init__(self, slabs: Slabs) -> None:
        self.layout = slabs.layout
        self.chunks: list[Chunk] = []
        self._pages_per_slab = slabs.pages_per_slab
        self.first = np.zeros(len(slabs.arrays), dtype=np.int32)
        for index, slab in enumerate(slabs.arrays):
            if len(slab):
                if slab.chunk not in self.chunks:
                    self.chunks.append(slab.chunk)
                self.first[index] = self.chunks.index(slab.chunk) << PAGE_BITS | slab.start
        assert len(self.chunks) <= MAX_CHUNKS

    def places(self, pages: Int32Array) -> Int32Array:
        """chunk << PAGE_BITS | page in the chunk, of page ids; 0 where the id is -1."""
        slab, at = np.divmod(pages, self._pages_per_slab)
        places: Int32Array = np.where(pages < 0, 0, self.first[slab] + at).astype(np.int32)
        return places

    def rows(self, places: Int32Array, positions: Int32Array) -> list[tuple[Chunk, Int32Array]]:
        """For each chunk, the row in its arrays of each position, -1 if it lies elsewhere.

        places: of the page that the position lies in. Chunks without a position are left out.
        """
        page = (places & ((1 << PAGE_BITS) - 1)).astype(np.int64)
        row = page * self.layout.page_tokens + positions % self.layout.page_tokens
        chunk = places >> PAGE_BITS
        return [
            (self.chunks[index], np.where(chunk == index, row, -1).astype(np.int32))
            for index in np.unique(chunk)
        ]

    def targets(
        self, places: Int32Array, positions: Int32Array
    ) -> list[tuple[int, Int32Array, Int32Array]]:
        """Where a step's rows go: [(index of a chunk, rows of the step, rows in the chunk)].

        places: of each row's page; -1 for a row that is not written
        """
        written = np.flatnonzero(places >= 0).astype(np.int32)
        found = []
        for chunk, rows in self.rows(places[written], positions[written]):
            here = rows >= 0
            found.append((self.chunks.index(chunk), written[here], rows[here]))
        return found

    def context_rows(
        self, pages: Sequence[int], start: int, end: int
    ) -> list[tuple[Chunk, Int32Array]]:
        """`rows` for positions [start, end) of the context that holds `pages`.

        Raises ValueError for positions outside the pages.
        """
        page_tokens = self.layout.page_tokens
        if start < 0 or end > len(pages) * page_tokens:
            raise ValueError("a position lies outside the pages")
        positions = np.arange(start, end, dtype=np.int32)
        ids = np.asarray(pages, dtype=np.int32)[positions // page_tokens]
        return self.rows(self.places(ids), positions)


def finish(arrays: list[mx.array], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Evaluates, and waits until the memory that was read can be written in place again.

    meanwhile: is called once the work is the device's
    """
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]
    try:
        meanwhile()
    finally:
        mx.synchronize()


def copy_page(slabs: Slabs, source: int, target: int) -> None:
    """Copies a page; the other pages of its slab stay where they are."""
    page_map, page_tokens = PageMap(slabs), slabs.layout.page_tokens
    (from_chunk, read), (to_chunk, written) = (
        page_map.context_rows([page], 0, page_tokens)[0] for page in (source, target)
    )
    content = [array[mx.array(read)] for array in from_chunk.layers]
    finish(content)
    rows = mx.array(written)
    for layer, values in enumerate(content):
        to_chunk.layers[layer][rows] = values
    finish(to_chunk.layers)


def export_rows(
    slabs: Slabs, pages: Sequence[int], start: int, end: int, out: ByteArray | None
) -> ByteArray:
    """See `KernelSet`."""
    layout = slabs.layout
    if out is None:
        out = np.empty((end - start, layout.row_bytes), dtype=np.uint8)
    check_rows(out, layout, end - start)
    by_layer = out.reshape(end - start, layout.layers, 4 * row_words(layout))
    for chunk, rows in PageMap(slabs).context_rows(pages, start, end):
        here = rows >= 0
        for layer, array in enumerate(chunk.layers):
            by_layer[here, layer] = np.asarray(array)[rows[here]].view(np.uint8)
    return out


def import_rows(slabs: Slabs, pages: Sequence[int], start: int, rows: ByteArray) -> None:
    """See `KernelSet`."""
    layout = slabs.layout
    check_rows(rows, layout, len(rows))
    words = rows.view(np.uint32).reshape(len(rows), layout.layers, row_words(layout))
    for chunk, targets in PageMap(slabs).context_rows(pages, start, start + len(rows)):
        here = targets >= 0
        at = mx.array(targets[here])
        for layer in range(layout.layers):
            chunk.layers[layer][at] = mx.array(np.ascontiguousarray(words[here, layer]))
        finish(chunk.layers)
