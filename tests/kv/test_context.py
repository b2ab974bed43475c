"""Contexts as values: fork, truncate, write, commit, and what others see of it."""

import gc

import numpy as np
import pytest

from llamay.kv import Cache, Context
from tests.kv.fake_kernels import (
    append,
    assert_empty,
    new_cache,
    read_values,
    write_values,
)

PAGE = 4
AROUND_A_BOUNDARY = [2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1]


def filled(cache: Cache, length: int, start: int = 1) -> Context:
    """A context whose tokens and values are start, start + 1, ..."""
    context = cache.new_context()
    append(cache, context, range(start, start + length))
    return context


def assert_holds(cache: Cache, context: Context, expected: list[int]) -> None:
    """Tokens and values of the context are `expected`."""
    assert context.length == len(expected)
    assert list(context.tokens) == expected
    assert read_values(cache, context) == expected


@pytest.mark.parametrize("length", [0, *AROUND_A_BOUNDARY])
def test_fork_shares_every_page_and_copies_none(length: int) -> None:
    cache, kernels = new_cache(PAGE)
    parent = filled(cache, length)
    pages = cache.live_pages
    children = [parent.fork() for _ in range(32)]
    assert cache.live_pages == pages
    assert kernels.copies == 0
    for child in children:
        assert list(child.page_ids) == list(parent.page_ids)
        assert_holds(cache, child, list(range(1, length + 1)))
    assert parent.own_pages == 0


@pytest.mark.parametrize("length", AROUND_A_BOUNDARY)
@pytest.mark.parametrize("child_first", [True, False])
def test_writing_after_a_fork_is_seen_by_the_writer_only(length: int, child_first: bool) -> None:
    cache, kernels = new_cache(PAGE)
    parent = filled(cache, length)
    child = parent.fork()
    first, second = (child, parent) if child_first else (parent, child)
    shared = list(range(1, length + 1))
    append(cache, first, [100, 101])
    assert_holds(cache, second, shared)
    append(cache, second, [200])
    assert_holds(cache, first, [*shared, 100, 101])
    assert_holds(cache, second, [*shared, 200])
    # The first to write copies the page that it shares; the second then has it to itself.
    assert kernels.copies == (1 if length % PAGE else 0)
    cache.check()


@pytest.mark.parametrize("length", AROUND_A_BOUNDARY)
def test_the_last_holder_writes_in_place(length: int) -> None:
    cache, kernels = new_cache(PAGE)
    parent = filled(cache, length)
    child = parent.fork()
    parent.close()
    append(cache, child, [100])
    assert kernels.copies == 0
    assert_holds(cache, child, [*range(1, length + 1), 100])
    assert cache.live_pages == -(-(length + 1) // PAGE)


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_forks_twelve_deep_written_at_every_level_stay_apart(page_tokens: int) -> None:
    cache, _ = new_cache(page_tokens)
    contexts, expected = [filled(cache, 2 * page_tokens + 1)], [list(range(1, 2 * page_tokens + 2))]
    for level in range(1, 13):
        child = contexts[-1].fork()
        tokens = list(expected[-1])
        if level % 3 == 0:  # goes back before it goes on
            del tokens[-page_tokens:]
            child.truncate(len(tokens))
        new = [1000 * level + i for i in range(level % 4 + 1)]
        append(cache, child, new)
        contexts.append(child)
        expected.append(tokens + new)
        # The level above goes on too, after its child was made.
        append(cache, contexts[-2], [1000 * level + 500])
        expected[-2] = [*expected[-2], 1000 * level + 500]
        cache.check()
    while contexts:
        for context, tokens in zip(contexts, expected, strict=True):
            assert_holds(cache, context, tokens)
        middle = len(contexts) // 2
        contexts.pop(middle).close()
        expected.pop(middle)
        cache.check()
    assert_empty(cache)


@pytest.mark.parametrize("page_tokens", [1, 3, 4])
def test_every_truncation_point_of_a_shared_context(page_tokens: int) -> None:
    cache, kernels = new_cache(page_tokens)
    length = 3 * page_tokens + 1
    tokens = list(range(1, length + 1))
    parent = filled(cache, length)
    sibling = parent.fork()
    for point in range(length + 1):
        pages, copies = cache.live_pages, kernels.copies
        child = parent.fork()
        child.truncate(point)
        assert cache.live_pages == pages
        assert kernels.copies == copies
        assert len(child.page_ids) == -(-point // page_tokens)
        assert_holds(cache, child, tokens[:point])
        append(cache, child, [100, 101])
        assert kernels.copies == copies + (1 if point % page_tokens else 0)
        assert_holds(cache, child, [*tokens[:point], 100, 101])
        assert_holds(cache, parent, tokens)
        assert_holds(cache, sibling, tokens)
        cache.check()
        child.close()
        assert cache.live_pages == pages


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_refuses_lengths_outside_the_context(length: int) -> None:
    cache, _ = new_cache(PAGE)
    context = filled(cache, 5)
    with pytest.raises(ValueError, match=f"a context of 5 tokens to {length}"):
        context.truncate(length)
    assert_holds(cache, context, [1, 2, 3, 4, 5])


def test_truncate_to_the_length_gives_back_what_was_reserved() -> None:
    cache, _ = new_cache(PAGE)
    context = filled(cache, 5)
    context.reserve(20)
    assert cache.live_pages == 7
    context.truncate(5)
    assert cache.live_pages == 2
    with pytest.raises(ValueError, match="without being reserved"):
        context.commit([1])


def test_reserving_more_than_once_goes_as_far_as_the_farthest() -> None:
    cache, _ = new_cache(PAGE)
    context = filled(cache, 5)
    context.reserve(6)
    context.reserve(2)
    pages = list(context.page_ids)
    context.commit([6, 7, 8, 9, 10])
    assert list(context.page_ids) == pages
    context.commit([11])
    with pytest.raises(ValueError, match="1 tokens committed without being reserved"):
        context.commit([12])
    assert list(context.tokens) == list(range(1, 12))


@pytest.mark.parametrize("shared", [False, True])
def test_commit_refuses_positions_that_were_not_reserved(shared: bool) -> None:
    cache, _ = new_cache(PAGE)
    context = filled(cache, 5)  # the second page has room for three more
    other = context.fork()
    if not shared:
        other.close()
    with pytest.raises(ValueError, match="3 tokens committed without being reserved"):
        context.commit([6, 7, 8])
    context.reserve(2)
    with pytest.raises(ValueError, match="3 tokens committed without being reserved"):
        context.commit([6, 7, 8])
    assert_holds(cache, context, [1, 2, 3, 4, 5])


def test_a_fork_does_not_inherit_what_was_reserved() -> None:
    cache, _ = new_cache(PAGE)
    context = filled(cache, 5)
    context.reserve(10)
    child = context.fork()
    assert len(child.page_ids) == 2
    with pytest.raises(ValueError, match="without being reserved"):
        child.commit([6])
    # Both go on from here: the child copies, the parent writes where it had reserved.
    append(cache, child, [100])
    write_values(cache, context, [200, 201])
    context.commit([200, 201])
    assert_holds(cache, child, [1, 2, 3, 4, 5, 100])
    assert_holds(cache, context, [1, 2, 3, 4, 5, 200, 201])
    cache.check()


@pytest.mark.parametrize("length", [0, *AROUND_A_BOUNDARY])
def test_a_step_that_does_not_commit_publishes_nothing(length: int) -> None:
    cache, _ = new_cache(PAGE)
    tokens = list(range(1, length + 1))
    context = filled(cache, length)
    context.logits = np.array([1.0], np.float32)
    pages, sibling = cache.live_pages, context.fork()
    context.reserve(2 * PAGE)
    write_values(cache, context, [900 + i for i in range(2 * PAGE)])
    for holder in (context, sibling, context.fork()):
        assert_holds(cache, holder, tokens)
        assert holder.logits is not None
    cache.retain(context)
    found = cache.match([*tokens, 900])
    assert_holds(cache, found, tokens)
    sibling.close()
    found.close()
    cache.clear_tree()
    context.truncate(length)
    assert cache.live_pages == pages
    append(cache, context, [50])
    assert_holds(cache, context, [*tokens, 50])


def test_reserving_nothing_changes_nothing() -> None:
    cache, kernels = new_cache(PAGE)
    context = filled(cache, 5)
    other = context.fork()
    context.reserve(0)
    assert list(context.page_ids) == list(other.page_ids)
    assert kernels.copies == 0


def test_tokens_of_forks_share_a_buffer_and_not_each_others_tokens() -> None:
    cache, _ = new_cache(PAGE)
    parent = filled(cache, 6)
    children = [parent.fork() for _ in range(3)]
    for index, child in enumerate(children):
        append(cache, child, [10 + index])
    children[0].truncate(3)
    append(cache, children[0], [20, 21])
    append(cache, parent, [30])
    assert list(parent.tokens) == [1, 2, 3, 4, 5, 6, 30]
    assert [list(child.tokens) for child in children] == [
        [1, 2, 3, 20, 21],
        [1, 2, 3, 4, 5, 6, 11],
        [1, 2, 3, 4, 5, 6, 12],
    ]


def test_a_closed_context_is_empty_and_can_be_filled_again() -> None:
    cache, _ = new_cache(PAGE)
    context = filled(cache, 6)
    other = context.fork()
    context.close()
    context.close()
    assert_holds(cache, context, [])
    append(cache, context, [7, 8])
    assert_holds(cache, context, [7, 8])
    assert_holds(cache, other, [1, 2, 3, 4, 5, 6])


def test_contexts_dropped_without_being_closed_give_their_pages_back() -> None:
    cache, _ = new_cache(PAGE, pages_per_slab=1)
    kept = filled(cache, 5)
    dropped = [kept.fork(), filled(cache, 9), cache.new_context()]
    append(cache, dropped[0], [100])
    dropped[2].reserve(3)
    cycle = [dropped[1]]
    cycle.append(cycle)  # type: ignore[arg-type]
    del dropped, cycle
    gc.collect()
    cache.check()
    assert cache.live_pages == 2
    assert_holds(cache, kept, [1, 2, 3, 4, 5])
    assert kept.own_pages == 2


class TestLogits:
    """Kept for the last position only, and only where somebody kept them."""

    LOGITS = np.array([0.5, 2.0], np.float32)

    def context(self, cache: Cache) -> Context:
        context = filled(cache, 6)
        context.logits = self.LOGITS
        return context

    def test_fork_keeps_them(self) -> None:
        cache, _ = new_cache(PAGE)
        assert self.context(cache).fork().logits is self.LOGITS

    def test_commit_forgets_the_writers_only(self) -> None:
        cache, _ = new_cache(PAGE)
        context = self.context(cache)
        child = context.fork()
        append(cache, child, [7])
        assert child.logits is None
        assert context.logits is self.LOGITS

    def test_committing_nothing_keeps_them(self) -> None:
        cache, _ = new_cache(PAGE)
        context = self.context(cache)
        context.commit([])
        assert context.logits is self.LOGITS

    @pytest.mark.parametrize("length", [0, 4, 5, 6])
    def test_truncate_forgets_them_unless_the_length_stays(self, length: int) -> None:
        cache, _ = new_cache(PAGE)
        context = self.context(cache)
        context.truncate(length)
        assert (context.logits is None) == (length < 6)

    def test_a_failed_step_keeps_them(self) -> None:
        cache, _ = new_cache(PAGE, budget_pages=2)
        context = self.context(cache)
        context.reserve(2)
        context.truncate(6)
        assert context.logits is self.LOGITS

    @pytest.mark.parametrize(
        ("query", "kept"),
        [([1, 2, 3, 4, 5, 6], True), ([1, 2, 3, 4, 5, 6, 7], True), ([1, 2, 3, 4, 5], False)],
    )
    def test_match_gives_them_at_the_end_of_what_was_retained(
        self, query: list[int], kept: bool
    ) -> None:
        cache, _ = new_cache(PAGE)
        cache.retain(self.context(cache))
        found = cache.match(query)
        assert found.length == min(len(query), 6)
        assert (found.logits is not None) == kept
