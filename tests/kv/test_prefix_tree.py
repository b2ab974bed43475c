"""Match, retain and the bounds of the prefix tree."""

from collections.abc import Sequence

import numpy as np
import pytest

from llamay.kv import Cache, Context
from llamay.kv.prefix_tree import Node, PrefixTree
from tests.kv.fake_kernels import append, assert_empty, new_cache, read_values

PAGE = 4


def retain(cache: Cache, tokens: Sequence[int], *, close: bool = True) -> Context:
    """Computes, retains and closes a context of these tokens."""
    context = cache.new_context()
    append(cache, context, tokens)
    cache.retain(context)
    if close:
        context.close()
    return context


def shape(cache: Cache) -> object:
    """Edges, contexts and the order of children, by identity."""

    def of(node: Node) -> object:
        return (
            list(node.tokens),
            id(node),
            id(node.context),
            [of(child) for child in node.children.values()],
        )

    return of(cache._tree.root)


def test_match_finds_the_longest_prefix_at_any_token() -> None:
    cache, kernels = new_cache(PAGE)
    kept = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9, 9], [8, 8]]
    for tokens in kept:
        retain(cache, tokens)
    pages = cache.live_pages
    for tokens in kept:
        for length in range(len(tokens) + 1):
            for tail in ([], [77], [77, 78]):
                found = cache.match([*tokens[:length], *tail])
                assert list(found.tokens) == tokens[:length]
                assert read_values(cache, found) == tokens[:length]
                assert len(found.page_ids) == -(-length // PAGE)
                cache.check()
    assert kernels.copies == 0
    assert cache.live_pages == pages


def test_match_finds_nothing_in_an_empty_tree_and_for_no_tokens() -> None:
    cache, _ = new_cache(PAGE)
    assert cache.match([1, 2]).length == 0
    retain(cache, [1, 2])
    assert cache.match([]).length == 0
    assert cache.match([2, 1]).length == 0


def test_match_never_changes_the_shape_of_the_tree() -> None:
    cache, _ = new_cache(PAGE)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 7], [6, 6, 6]):
        retain(cache, tokens)
    before, pages = shape(cache), cache.live_pages
    retained = set(cache.retained_tokens())
    for query in ([1], [1, 2], [1, 2, 3, 9, 9], [1, 2, 5], [6, 6, 6], [6, 1], [5], []):
        cache.match(query).close()
        assert shape(cache) == before
        assert cache.live_pages == pages
        assert set(cache.retained_tokens()) == retained


def test_what_is_found_can_be_written_without_harm() -> None:
    cache, kernels = new_cache(PAGE)
    retain(cache, [1, 2, 3, 4, 5, 6])
    for length in (3, 4, 5, 6):
        found = cache.match([1, 2, 3, 4, 5, 6][:length])
        append(cache, found, [50, 51, 52])
        assert read_values(cache, found) == [*range(1, length + 1), 50, 51, 52]
        assert read_values(cache, cache.match([1, 2, 3, 4, 5, 6])) == [1, 2, 3, 4, 5, 6]
    assert kernels.copies == 3  # none at the end of a page
    cache.check()


def test_what_is_retained_does_not_follow_its_context() -> None:
    cache, _ = new_cache(PAGE)
    context = retain(cache, [1, 2, 3, 4, 5], close=False)
    append(cache, context, [6])
    context.truncate(2)
    append(cache, context, [30])
    found = cache.match([1, 2, 3, 4, 5, 6])
    assert read_values(cache, found) == [1, 2, 3, 4, 5]
    assert cache.retained_tokens() == [(1, 2, 3, 4, 5)]


def test_retaining_copies_nothing_and_survives_the_close() -> None:
    cache, kernels = new_cache(PAGE)
    context = retain(cache, range(9), close=False)
    assert cache.live_pages == 3
    assert cache.tree_bytes == 0
    context.close()
    assert cache.live_pages == 3
    assert cache.tree_bytes == 3 * cache.store.page_bytes
    assert kernels.copies == 0
    cache.clear_tree()
    assert_empty(cache)


@pytest.mark.parametrize("length", range(1, 7))
def test_a_prefix_of_something_retained_adds_nothing(length: int) -> None:
    cache, _ = new_cache(PAGE)
    retain(cache, [1, 2, 3, 4, 5, 6])
    retain(cache, [9])
    before, pages = shape(cache), cache.live_pages
    retain(cache, [1, 2, 3, 4, 5, 6][:length])
    assert shape(cache) == before
    assert cache.live_pages == pages
    assert cache.retained_tokens() == [(9,), (1, 2, 3, 4, 5, 6)]  # used, all the same


def test_what_goes_on_replaces_what_it_began_with() -> None:
    cache, _ = new_cache(PAGE)
    context = retain(cache, [1, 2, 3], close=False)
    retain(cache, [2])
    append(cache, context, [4, 5])
    cache.retain(context)
    context.close()
    assert cache.retained_tokens() == [(2,), (1, 2, 3, 4, 5)]
    assert cache.live_pages == 3
    cache.check()


def test_logits_join_what_is_retained_without() -> None:
    cache, _ = new_cache(PAGE)
    context = retain(cache, [1, 2, 3, 4, 5], close=False)
    assert cache.match([1, 2, 3, 4, 5]).logits is None
    context.logits = np.array([1.5], np.float32)
    cache.retain(context)
    found = cache.match([1, 2, 3, 4, 5])
    assert found.logits is not None
    assert found.logits.tolist() == [1.5]
    shorter = cache.match([1, 2, 3])
    shorter.logits = np.array([2.5], np.float32)
    cache.retain(shorter)  # covered by what is longer, which has logits of its own end
    for length, logits in ((5, [1.5]), (3, None)):
        found = cache.match([1, 2, 3, 4, 5][:length])
        assert (None if found.logits is None else found.logits.tolist()) == logits
    context.logits = None
    cache.retain(context)  # takes nothing away
    assert cache.match([1, 2, 3, 4, 5]).logits is not None
    assert cache.retained == 1


def test_an_empty_context_is_not_retained() -> None:
    cache, _ = new_cache(PAGE)
    cache.retain(cache.new_context())
    assert cache.retained == 0
    assert cache.retained_tokens() == []


def test_what_other_kernels_computed_is_not_retained() -> None:
    cache, _ = new_cache(PAGE)
    foreign = cache.new_context("restored")
    assert foreign.numerics == "restored"
    append(cache, foreign, [1, 2, 3, 4], [11, 12, 13, 14])
    assert foreign.fork().numerics == "restored"
    cache.retain(foreign)
    assert (cache.retained, cache.match([1, 2, 3, 4]).length) == (0, 0)
    own = cache.new_context()
    append(cache, own, [1, 2, 5])
    cache.retain(own)
    found = cache.match([1, 2, 3, 4])
    assert found.numerics == "own"
    assert read_values(cache, found) == [1, 2]
    assert cache.retained_tokens() == [(1, 2, 5)]
    cache.check()


def test_nodes_split_where_sequences_part_and_merge_when_one_goes() -> None:
    """The tree drawn in the module, by hand."""
    cache, _ = new_cache(PAGE)
    tree = PrefixTree()
    leaves = {}
    for tokens in ((1, 2, 3, 4, 5), (1, 2, 3, 9), (1, 2, 8), (7,)):
        leaves[tokens], redundant = tree.insert(tokens, cache.new_context())
        assert redundant is None
        tree.check()

    def edges(node: Node) -> object:
        return {tuple(child.tokens): edges(child) for child in node.children.values()}

    assert edges(tree.root) == {(1, 2): {(3,): {(4, 5): {}, (9,): {}}, (8,): {}}, (7,): {}}
    tree.remove(leaves[1, 2, 3, 9])
    tree.check()
    assert edges(tree.root) == {(1, 2): {(3, 4, 5): {}, (8,): {}}, (7,): {}}
    tree.remove(leaves[1, 2, 3, 4, 5])
    tree.check()
    assert edges(tree.root) == {(1, 2, 8): {}, (7,): {}}
    tree.remove(leaves[7,])
    tree.remove(leaves[1, 2, 8])
    tree.check()
    assert edges(tree.root) == {}


def test_a_leaf_that_is_gone_on_from_is_handed_back() -> None:
    cache, _ = new_cache(PAGE)
    tree = PrefixTree()
    first, _ = tree.insert((1, 2, 3), cache.new_context())
    leaf, redundant = tree.insert((1, 2, 3, 4), cache.new_context())
    assert redundant is first
    tree.check()
    assert [(tuple(path), node) for path, node in tree.leaves()] == [((1, 2, 3, 4), leaf)]
    assert tree.find((1, 2, 3)) == (leaf, 3)


def test_of_several_equally_long_the_one_that_sorts_first_is_found_and_used() -> None:
    cache, _ = new_cache(PAGE)
    for tokens in ([1, 2, 9], [1, 2, 4, 8], [1, 2, 4, 5], [1, 3]):
        retain(cache, tokens)
    cache.match([1, 2, 7])
    assert cache.retained_tokens()[-1] == (1, 2, 4, 5)
    # Whatever has come and gone before.
    retain(cache, [1, 2, 4, 1])
    cache.match([1, 2])
    assert cache.retained_tokens()[-1] == (1, 2, 4, 1)


def test_leaves_are_evicted_least_recently_used_first() -> None:
    cache, _ = new_cache(PAGE, tree_pages=3)
    for first in (10, 20, 30):
        retain(cache, [first] * PAGE)
    cache.match([10, 10]).close()  # uses it
    retain(cache, [20] * (PAGE - 1))  # so does this
    retain(cache, [40] * PAGE)
    assert [path[0] for path in cache.retained_tokens()] == [10, 20, 40]
    retain(cache, [50] * (2 * PAGE))
    assert [path[0] for path in cache.retained_tokens()] == [40, 50]
    cache.check()


def test_the_bound_counts_pages_and_shared_ones_once() -> None:
    cache, _ = new_cache(PAGE, tree_pages=3)
    context = retain(cache, range(2 * PAGE), close=False)
    append(cache, context, [50])
    cache.retain(context)
    other = cache.match(range(2 * PAGE))
    append(cache, other, [60])
    cache.retain(other)
    assert cache.retained == 2
    assert cache.tree_bytes == 0
    context.close()
    assert cache.retained == 2
    assert cache.tree_bytes == 1 * cache.store.page_bytes
    other.close()  # two pages in common and one each: over the bound by one
    assert cache.retained_tokens() == [(*range(2 * PAGE), 60)]
    assert cache.tree_bytes == 3 * cache.store.page_bytes
    cache.check()


def test_a_tree_without_room_keeps_only_what_contexts_keep() -> None:
    cache, _ = new_cache(PAGE, tree_pages=0)
    context = retain(cache, [1, 2, 3], close=False)
    assert cache.match([1, 2]).length == 2
    context.close()
    assert_empty(cache)


def test_the_bound_holds_after_a_write_leaves_a_page_to_the_tree() -> None:
    cache, kernels = new_cache(PAGE, tree_pages=0)
    context = retain(cache, [1, 2, 3], close=False)
    append(cache, context, [4])
    assert kernels.copies == 1
    assert cache.retained == 0
    assert cache.live_pages == 1
    cache.check()


def test_the_bound_holds_after_contexts_were_collected() -> None:
    cache, _ = new_cache(PAGE, tree_pages=1)
    context = retain(cache, range(2 * PAGE), close=False)
    del context
    cache.check()
    assert_empty(cache)
    context = retain(cache, range(2 * PAGE), close=False)
    del context
    cache.room()
    assert_empty(cache)
    context, other = retain(cache, range(2 * PAGE), close=False), cache.new_context()
    del context
    append(cache, other, [1])
    assert cache.retained == 0
    assert cache.live_pages == 1
    cache.check()


def test_clearing_the_tree_leaves_contexts_alone() -> None:
    cache, _ = new_cache(PAGE)
    context = retain(cache, range(6), close=False)
    foreign = cache.new_context("restored")
    append(cache, foreign, [1])
    cache.retain(foreign)
    cache.clear_tree()
    assert cache.retained == 0
    assert cache.match(range(6)).length == 0
    assert read_values(cache, context) == list(range(6))
    assert context.own_pages == 2
    cache.check()
