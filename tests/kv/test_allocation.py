"""Pages and slabs: bounded, released, and nothing lost when there are none."""

import pytest

from llamay.errors import BudgetError
from llamay.kv import Cache, Context
from llamay.kv.pages import Holder, PageIds
from tests.kv.fake_kernels import (
    FakeKernels,
    append,
    assert_empty,
    layout_of,
    new_cache,
    read_values,
)

PAGE = 4


def figures(cache: Cache, context: Context) -> tuple[object, ...]:
    """All that a failed operation must leave as it was."""
    store = cache.store
    counts = [store.ids.ref_count(page) for page in context.page_ids]
    return (
        context.length,
        list(context.tokens),
        list(context.page_ids),
        read_values(cache, context),
        counts,
        cache.live_pages,
        store.slab_bytes,
    )


def shared_context(cache: Cache) -> tuple[Context, Context]:
    """A context of 6 positions in two pages, and its fork."""
    context = cache.new_context()
    append(cache, context, range(1, 7))
    return context, context.fork()


# The third to sixth page are reserved, and the second, which is shared, is copied last.
@pytest.mark.parametrize("failing", range(5))
def test_no_memory_for_the_nth_page_leaves_the_context_as_it_was(failing: int) -> None:
    cache, kernels = new_cache(PAGE, pages_per_slab=1)
    context, sibling = shared_context(cache)
    before = figures(cache, context)
    kernels.slabs_left = failing
    with pytest.raises(MemoryError):
        context.reserve(18)
    assert figures(cache, context) == before
    assert kernels.copies == 0
    cache.check()
    kernels.slabs_left = 5
    append(cache, context, range(7, 25))
    assert read_values(cache, context) == list(range(1, 25))
    assert read_values(cache, sibling) == list(range(1, 7))
    cache.check()
    context.close()
    sibling.close()
    assert_empty(cache)


@pytest.mark.parametrize("failing", range(5))
def test_no_budget_for_the_nth_page_leaves_the_context_as_it_was(failing: int) -> None:
    cache, kernels = new_cache(PAGE, pages_per_slab=2, budget_pages=2 + failing)
    context, sibling = shared_context(cache)
    before = figures(cache, context)
    with pytest.raises(BudgetError):
        context.reserve(18)
    assert figures(cache, context) == before
    assert kernels.copies == 0
    cache.check()
    if failing:  # one page is enough for one more position
        append(cache, context, [7])
        assert read_values(cache, sibling) == list(range(1, 7))
    cache.check()
    sibling.close()
    context.close()
    assert_empty(cache)


def test_no_memory_for_a_page_in_a_slab_that_was_released_before() -> None:
    cache, kernels = new_cache(PAGE, pages_per_slab=1)
    first, second, third, fourth = (cache.new_context() for _ in range(4))
    for value, context in enumerate((first, second, third, fourth)):
        append(cache, context, [value])
    for closed in (first, third, fourth):
        closed.close()
    kernels.slabs_left = 0
    append(cache, third, [4])  # in a spare slab, and the next one too
    append(cache, fourth, [5])
    with pytest.raises(MemoryError):
        first.reserve(1)
    cache.check()
    kernels.slabs_left = None
    append(cache, first, [3])
    assert [list(c.page_ids) for c in (first, second, third, fourth)] == [[3], [1], [0], [2]]
    assert read_values(cache, second) == [1]


def test_a_copy_that_fails_leaves_the_context_as_it_was() -> None:
    cache, kernels = new_cache(PAGE)
    context, _sibling = shared_context(cache)
    before = figures(cache, context)
    kernels.copy_fails = True
    with pytest.raises(MemoryError):
        context.reserve(9)
    assert figures(cache, context) == before
    cache.check()
    kernels.copy_fails = False
    append(cache, context, range(7, 16))
    assert read_values(cache, context) == list(range(1, 16))


def test_a_refusal_gives_the_figures_and_the_remedy() -> None:
    cache, kernels = new_cache(PAGE, budget_pages=3)
    context = cache.new_context()
    with pytest.raises(BudgetError) as refused:
        context.reserve(3 * PAGE + 1)
    page_bytes = kernels.page_bytes(layout_of(PAGE))
    assert f"3 pages of {page_bytes} bytes" in str(refused.value)
    assert "--ctx-mem-budget" in str(refused.value)


def test_the_budget_takes_the_tree_first_least_recently_used_then_refuses() -> None:
    cache, _ = new_cache(PAGE, budget_pages=4)
    for start in (10, 20, 30):
        context = cache.new_context()
        append(cache, context, range(start, start + PAGE))
        cache.retain(context)
        context.close()
    cache.match([10]).close()
    context = cache.new_context()
    append(cache, context, range(PAGE))
    assert cache.retained == 3
    append(cache, context, range(PAGE))
    assert [path[0] for path in cache.retained_tokens()] == [30, 10]
    append(cache, context, range(PAGE))
    assert [path[0] for path in cache.retained_tokens()] == [10]
    append(cache, context, range(PAGE))
    assert cache.retained == 0
    with pytest.raises(BudgetError):
        context.reserve(1)
    assert context.length == 4 * PAGE
    cache.check()


def test_a_page_shared_with_the_tree_alone_needs_no_room_for_a_copy() -> None:
    cache, kernels = new_cache(PAGE, budget_pages=2)
    context = cache.new_context()
    append(cache, context, range(1, 7))
    cache.retain(context)
    append(cache, context, [7])  # the budget takes the tree's hold on the page away
    assert kernels.copies == 0
    assert cache.retained == 0
    assert read_values(cache, context) == list(range(1, 8))
    cache.check()


def test_contexts_collected_make_room_before_anything_is_refused_or_evicted() -> None:
    cache, _ = new_cache(PAGE, budget_pages=3)
    kept = cache.new_context()
    append(cache, kept, [1])
    cache.retain(kept)
    dropped = cache.new_context()
    append(cache, dropped, range(2 * PAGE))
    del dropped
    append(cache, kept, [2] * PAGE)
    assert cache.retained == 1
    cache.check()


def test_a_page_in_every_slab_keeps_it_and_the_last_page_takes_it_away() -> None:
    cache, kernels = new_cache(PAGE, pages_per_slab=3)
    slab = 3 * kernels.page_bytes(layout_of(PAGE))
    contexts = [cache.new_context() for _ in range(7)]
    for context in contexts:
        append(cache, context, [1])
    assert cache.store.slab_bytes == 3 * slab
    for index in (0, 1, 3, 4):
        contexts[index].close()
        assert cache.store.slab_bytes == 3 * slab
    contexts[2].close()
    assert cache.store.slab_bytes == 2 * slab
    contexts[6].close()
    assert cache.store.slab_bytes == 1 * slab
    cache.check()
    append(cache, contexts[0], [1])
    assert list(contexts[0].page_ids) == [0], "the lowest free page is not taken first"
    assert cache.store.slab_bytes == 2 * slab
    contexts[5].close()
    contexts[0].close()
    assert_empty(cache)


def test_two_empty_slabs_are_kept_and_used_before_a_new_one_is_made() -> None:
    cache, kernels = new_cache(PAGE, pages_per_slab=1)
    page_bytes = kernels.page_bytes(layout_of(PAGE))
    contexts = [cache.new_context() for _ in range(4)]
    for context in contexts:
        append(cache, context, [1])
        assert cache.store.spare_bytes == 0
    kept = [cache.store.slabs.arrays[contexts[i].page_ids[0]] for i in (1, 2)]
    for closed, spares in ((1, 1), (2, 2), (0, 2), (3, 2)):
        contexts[closed].close()
        assert cache.store.spare_bytes == spares * page_bytes
        cache.check()
    kernels.slabs_left = 0
    append(cache, contexts[0], [7])
    append(cache, contexts[2], [8])
    assert {id(array) for array in cache.store.slabs.arrays if len(array)} == set(map(id, kept))
    assert cache.store.spare_bytes == 0
    with pytest.raises(MemoryError):
        contexts[1].reserve(1)
    cache.check()


@pytest.mark.parametrize(
    ("page_tokens", "pages"),
    [(64, 8192), (16 * 2**20, 1), (3, 174762)],  # of 128 bytes a position
)
def test_a_slab_holds_as_many_pages_as_fit_in_64_mib_and_at_least_one(
    page_tokens: int, pages: int
) -> None:
    cache = Cache(FakeKernels(), layout_of(page_tokens))
    assert cache.store.slabs.pages_per_slab == pages


class TestPageIds:
    """Counting, without arrays."""

    def test_the_last_holder_frees_a_page(self) -> None:
        ids = PageIds()
        page = ids.allocate()
        ids.retain([page])
        ids.retain([page], Holder.TREE)
        assert (ids.ref_count(page), ids.tree_count(page), ids.live) == (3, 1, 1)
        assert not ids.release(page)
        assert not ids.release(page, Holder.TREE)
        assert ids.release(page)
        assert (ids.ref_count(page), ids.tree_count(page), ids.live) == (0, 0, 0)

    def test_pages_that_only_the_tree_holds_are_counted(self) -> None:
        ids = PageIds()
        page = ids.allocate()
        ids.retain([page], Holder.TREE)
        assert ids.tree_only == 0
        ids.release(page)
        assert ids.tree_only == 1
        ids.retain([page], Holder.TREE)
        assert ids.tree_only == 1
        ids.retain([page])
        assert ids.tree_only == 0
        ids.release(page)
        assert ids.tree_only == 1
        ids.release(page, Holder.TREE)
        assert ids.tree_only == 1
        assert ids.release(page, Holder.TREE)
        assert (ids.tree_only, ids.live) == (0, 0)

    def test_the_lowest_free_page_is_taken_first(self) -> None:
        ids = PageIds()
        assert [ids.allocate() for _ in range(5)] == [0, 1, 2, 3, 4]
        for page in (3, 0, 2):
            ids.release(page)
        assert [ids.allocate() for _ in range(4)] == [0, 2, 3, 5]

    def test_ids_never_allocated_have_no_holder(self) -> None:
        ids = PageIds()
        ids.allocate()
        assert ids.ref_count(1) == 0
        assert ids.tree_count(1) == 0
        assert [ids.live_between(*span) for span in ((0, 1), (0, 9), (1, 9))] == [1, 1, 0]
