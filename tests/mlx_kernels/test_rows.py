"""Rows leave and enter pages position by position, whatever the layout of a page."""

import numpy as np
import pytest

from llamay.formats import KVLayout
from llamay.mlx_kernels import Slabs
from llamay.mlx_kernels.cpu import CpuKernels
from llamay.mlx_kernels.reference import ReferenceKernels

LAYERS, KV_HEADS, HEAD_DIM = 2, 3, 16
PAGES_PER_SLAB = 3
KERNELS = [CpuKernels, ReferenceKernels]
POSITIONS = 300


def new_slabs(kernels, page_tokens):
    layout = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, page_tokens)
    needed = -(-POSITIONS // page_tokens) + 2
    count = -(-needed // PAGES_PER_SLAB)
    arrays = [kernels.new_slab(layout, PAGES_PER_SLAB) for _ in range(count)]
    pages = list(range(needed))[::-1]  # a context's pages stand in any order
    return Slabs(layout, PAGES_PER_SLAB, arrays), pages


def known_rows(count=POSITIONS):
    """Float32 rows in which every number tells where it belongs, and none is lost."""
    numbers = np.arange(count * LAYERS * 2 * KV_HEADS * HEAD_DIM, dtype=np.float32)
    return numbers.reshape(count, -1).view(np.uint8)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("page_tokens", [16, 64, 128])
def test_rows_come_back_as_they_went_in(kernels, page_tokens):
    kernels, rows = kernels(), known_rows()
    slabs, pages = new_slabs(kernels, page_tokens)
    for start, end in [(0, 1), (1, page_tokens), (page_tokens, page_tokens + 7), (23 + 112, 300)]:
        kernels.import_rows(slabs, pages, start, rows[start:end])
    kernels.import_rows(slabs, pages, page_tokens + 7, rows[page_tokens + 7 : 135])
    for start, end in [(0, 300), (0, 0), (299, 300), (15, 17), (60, 200)]:
        found = kernels.export_rows(slabs, pages, start, end)
        np.testing.assert_array_equal(found, rows[start:end])


@pytest.mark.parametrize("source", KERNELS)
@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize(("from_page", "to_page"), [(16, 128), (128, 16), (64, 64)])
def test_rows_move_between_kernel_sets_and_page_sizes(source, target, from_page, to_page):
    source, target, rows = source(), target(), known_rows()
    before, pages = new_slabs(source, from_page)
    source.import_rows(before, pages, 0, rows)
    after, other_pages = new_slabs(target, to_page)
    target.import_rows(after, other_pages, 0, source.export_rows(before, pages, 0, POSITIONS))
    np.testing.assert_array_equal(target.export_rows(after, other_pages, 0, POSITIONS), rows)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_copied_page_holds_the_same_and_only_it_has_changed(kernels):
    kernels, rows = kernels(), known_rows()
    slabs, pages = new_slabs(kernels, 64)
    kernels.import_rows(slabs, pages, 0, rows)
    spare = pages[-1]  # beyond the rows, in another slab than page 1
    kernels.copy_page(slabs, pages[1], spare)
    assert spare // PAGES_PER_SLAB != pages[1] // PAGES_PER_SLAB
    np.testing.assert_array_equal(kernels.export_rows(slabs, [spare], 0, 64), rows[64:128])
    np.testing.assert_array_equal(kernels.export_rows(slabs, pages, 0, POSITIONS), rows)
    kernels.import_rows(slabs, [spare], 5, rows[:1])
    np.testing.assert_array_equal(kernels.export_rows(slabs, pages, 0, POSITIONS), rows)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_a_page_has_room_for_its_rows_and_no_more(kernels, page_tokens):
    layout = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, page_tokens)
    bytes_of_rows = page_tokens * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert kernels().page_bytes(layout) == bytes_of_rows
    assert memoryview(kernels().new_slab(layout, 5)).nbytes == 5 * bytes_of_rows
