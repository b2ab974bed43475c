"""Idle contexts that are safe on disk make room first, and what the interface shows of sharing."""

import gc

import pytest

from llamay.errors import BudgetError, ContextBusyError
from llamay.kv import Cache, Context
from llamay.kv.cache import PageUse
from tests.kv.fake_kernels import append, assert_empty, new_cache, read_values

PAGE = 4


def filled(cache: Cache, length: int, start: int = 1) -> Context:
    """A context whose tokens and values are start, start + 1, ..."""
    context = cache.new_context()
    append(cache, context, range(start, start + length))
    return context


def test_parked_contexts_are_closed_before_the_tree_the_least_recently_parked_first() -> None:
    cache, _ = new_cache(PAGE, budget_pages=5)
    kept = filled(cache, PAGE, 50)
    cache.retain(kept)
    kept.close()
    first, second, third = (filled(cache, PAGE, start) for start in (10, 20, 30))
    for context in (first, second, third, first):
        cache.park(context)
    working = filled(cache, PAGE)
    closed = []
    for _ in range(4):
        append(cache, working, range(PAGE))
        cache.check()
        closed.append([c.length == 0 for c in (first, second, third)] + [cache.retained == 0])
    assert closed == [
        [False, True, False, False],
        [False, True, True, False],
        [True, True, True, False],
        [True, True, True, True],
    ]
    with pytest.raises(BudgetError):
        working.reserve(1)


def test_unparking_says_whether_the_pages_are_still_there() -> None:
    cache, _ = new_cache(PAGE, budget_pages=3)
    lost, kept, never = filled(cache, 2), filled(cache, 3), filled(cache, 1)
    lost.reserve(2)
    cache.park(lost)
    cache.park(kept)
    assert cache.unpark(kept)
    working = cache.new_context()
    append(cache, working, [1])
    assert not cache.unpark(lost)
    assert (lost.length, list(lost.page_ids)) == (0, [])
    with pytest.raises(ValueError, match="without being reserved"):
        lost.commit([1])
    assert cache.unpark(never)
    assert not cache.unpark(cache.new_context())
    with pytest.raises(BudgetError):
        working.reserve(PAGE)
    append(cache, kept, [4])
    assert read_values(cache, kept) == [1, 2, 3, 4]
    never.close()
    append(cache, lost, [5])  # it can be used again
    cache.check()


def test_a_parked_context_is_not_written_and_otherwise_as_any() -> None:
    cache, _ = new_cache(PAGE)
    context = filled(cache, PAGE + 2)
    cache.park(context)
    with pytest.raises(ValueError, match="unpark it"):
        context.reserve(1)
    with pytest.raises(ValueError, match="unpark it"), context.in_use():
        pass
    fork = context.fork()
    append(cache, fork, [7])
    cache.retain(context)
    assert cache.match(range(1, PAGE + 3)).length == PAGE + 2
    context.truncate(PAGE)
    assert read_values(cache, context) == list(range(1, PAGE + 1))
    assert read_values(cache, fork) == [*range(1, PAGE + 3), 7]
    cache.check()
    context.close()
    assert not cache.unpark(context)
    append(cache, context, [1])
    cache.check()


def test_a_context_that_somebody_owns_is_not_parked() -> None:
    cache, _ = new_cache(PAGE)
    context = filled(cache, 2)
    with context.in_use(), pytest.raises(ContextBusyError, match="in use"):
        cache.park(context)
    context.reserve(1)
    cache.check()


def test_a_parked_context_that_is_collected_leaves_nothing_behind() -> None:
    cache, _ = new_cache(PAGE, budget_pages=2)
    context = filled(cache, 2 * PAGE)
    cache.park(context)
    del context
    gc.collect()
    working = filled(cache, 2 * PAGE)
    cache.check()
    working.close()
    assert_empty(cache)


def test_nothing_is_given_up_for_what_cannot_fit() -> None:
    cache, kernels = new_cache(PAGE, budget_pages=6)
    kept = filled(cache, PAGE, 50)
    cache.retain(kept)
    kept.close()
    parked, working = filled(cache, PAGE, 20), filled(cache, PAGE + 1)
    cache.park(parked)
    sibling = working.fork()
    assert cache.room() == (2, 2)
    # Two pages are free and two can be freed; the one that is shared with a sibling is copied.
    working.check_room(3 * PAGE)
    for count in (3 * PAGE + 3, 3 * PAGE + 4, 9 * PAGE):
        with pytest.raises(BudgetError, match="4 of them are left"):
            working.check_room(count + PAGE)
        with pytest.raises(BudgetError, match="4 of them are left"):
            working.reserve(count + PAGE)
    assert (parked.length, cache.retained, kernels.copies) == (PAGE, 1, 0)
    working.reserve(3 * PAGE)
    assert (parked.length, cache.retained, kernels.copies) == (0, 0, 1)
    cache.check()
    assert read_values(cache, sibling) == list(range(1, PAGE + 2))


def test_a_page_shared_with_a_parked_context_alone_needs_no_room_for_a_copy() -> None:
    cache, kernels = new_cache(PAGE, budget_pages=1)
    context = filled(cache, 2)
    fork = context.fork()
    cache.park(context)
    append(cache, fork, [3])
    assert (context.length, kernels.copies) == (0, 0)
    assert read_values(cache, fork) == [1, 2, 3]
    cache.check()


def test_page_use_counts_sharers_by_position_and_the_tree_apart() -> None:
    cache, _ = new_cache(PAGE)
    trunk = filled(cache, 5 * PAGE)
    forks = [trunk.fork() for _ in range(3)]
    for fork, length in zip(forks, (2 * PAGE, 2 * PAGE, 4 * PAGE), strict=True):
        fork.truncate(length)
    append(cache, forks[0], range(3 * PAGE))
    cache.retain(forks[2])
    cache.park(forks[1])
    assert cache.pages_of(trunk) == PageUse(((2, 4), (2, 2), (1, 1)), 4)
    assert cache.pages_of(forks[0]) == PageUse(((2, 4), (3, 1)), 2)
    assert cache.pages_of(forks[1]) == PageUse(((2, 4),), 2)
    assert [cache.pages_of(c).own for c in (trunk, *forks)] == [1, 3, 0, 0]
    assert [cache.pages_of(c).pages for c in (trunk, *forks)] == [5, 5, 2, 4]
    assert cache.pages_of(cache.new_context()) == PageUse((), 0)
    assert cache.pages_of(cache.new_context()).own == 0
    del fork, forks[:]
    assert cache.pages_of(trunk) == PageUse(((5, 1),), 4)
