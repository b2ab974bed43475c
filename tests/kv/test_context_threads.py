"""One cache, many threads: contexts have one owner at a time, and bookkeeping never races."""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from llamay.errors import BudgetError, ContextBusyError
from llamay.kv import Cache, Context
from tests.kv.fake_kernels import append, assert_empty, new_cache, read_values, write_values

THREADS = 16
PAGE = 3
SEEDS = range(10)


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Threads take turns every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_together(work: Callable[[random.Random], None], threads: int, seed: int) -> None:
    """Runs `work` in many threads that start at the same moment; the first failure is raised."""
    barrier = threading.Barrier(threads)

    def start(index: int) -> None:
        barrier.wait()
        work(random.Random(seed * threads + index))

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(start, index) for index in range(threads)]:
            future.result()


def values_of(tokens: Sequence[int]) -> list[int]:
    """A value for each position that depends on all tokens up to it, as a model's does."""
    values, value = [], 17
    for token in tokens:
        value = (value * 31 + token + 1) % (1 << 22)
        values.append(value)
    return values


def compute(cache: Cache, context: Context, tokens: Sequence[int]) -> None:
    """Appends tokens with the values that a model would give them."""
    values = values_of([*context.tokens, *tokens])[context.length :]
    append(cache, context, tokens, values)


def assert_computed(cache: Cache, context: Context) -> None:
    """The context's values are those of its tokens."""
    assert read_values(cache, context) == values_of(context.tokens)


@pytest.mark.parametrize("seed", SEEDS)
def test_sixteen_threads_fork_one_parent(seed: int) -> None:
    cache, _ = new_cache(PAGE, pages_per_slab=2)
    parent = cache.new_context()
    compute(cache, parent, range(PAGE + 1))

    def work(rng: random.Random) -> None:
        for _ in range(20):
            child = parent.fork()
            assert child.length == PAGE + 1
            assert_computed(cache, child)
            compute(cache, child, rng.choices(range(9), k=rng.randint(1, 2 * PAGE)))
            grandchild = child.fork()
            grandchild.truncate(rng.randint(0, child.length))
            compute(cache, grandchild, [rng.randrange(9)])
            assert_computed(cache, child)
            assert_computed(cache, grandchild)
            if rng.random() < 0.5:
                child.close()
                grandchild.close()

    run_together(work, THREADS, seed)
    assert_computed(cache, parent)
    assert list(parent.tokens) == list(range(PAGE + 1))
    cache.check()
    assert parent.own_pages == len(parent.page_ids) == 2
    parent.close()
    assert_empty(cache)


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_extend_close_and_fork_one_context(seed: int) -> None:
    """Each extends as the owner; forks see a whole number of such steps, or are refused."""
    cache, _ = new_cache(PAGE, pages_per_slab=1)
    parent = cache.new_context()
    step = [5, 6, 7, 8]

    def work(rng: random.Random) -> None:
        for _ in range(100):
            try:
                choice = rng.random()
                if choice < 0.4:
                    with parent.in_use():
                        compute(cache, parent, step)
                elif choice < 0.5:
                    parent.close()
                else:
                    child = parent.fork()
                    assert list(child.tokens) == step * (child.length // len(step))
                    assert_computed(cache, child)
                    compute(cache, child, [1])
                    child.close()
            except ContextBusyError:
                continue

    run_together(work, THREADS, seed)
    assert_computed(cache, parent)
    cache.check()
    assert cache.live_pages == len(parent.page_ids)
    parent.close()
    assert_empty(cache)


@pytest.mark.parametrize("seed", SEEDS)
def test_evictions_race_allocations(seed: int) -> None:
    cache, _ = new_cache(PAGE, pages_per_slab=2, tree_pages=10, budget_pages=30)

    def work(rng: random.Random) -> None:
        context = cache.new_context()
        for _ in range(100):
            try:
                compute(cache, context, rng.choices(range(3), k=rng.randint(1, 2 * PAGE)))
            except BudgetError:
                assert_computed(cache, context)
                context.close()
                continue
            assert_computed(cache, context)
            cache.retain(context)
            choice = rng.random()
            if choice < 0.3:
                context.close()
            elif choice < 0.5:
                context = cache.match(rng.choices(range(3), k=4))  # leaves the other uncollected
        context.close()

    run_together(work, 8, seed)
    cache.check()
    assert cache.live_pages * cache.store.page_bytes == cache.tree_bytes
    cache.clear_tree()
    assert_empty(cache)


@pytest.mark.parametrize("seed", SEEDS)
def test_matches_race_retains(seed: int) -> None:
    cache, _ = new_cache(PAGE, pages_per_slab=4, tree_pages=12)

    def work(rng: random.Random) -> None:
        for _ in range(100):
            tokens = rng.choices(range(2), k=rng.randint(1, 3 * PAGE))
            context = cache.match(tokens)
            assert list(context.tokens) == tokens[: context.length]
            assert_computed(cache, context)
            compute(cache, context, tokens[context.length :])
            cache.retain(context)
            assert_computed(cache, context)
            context.close()

    run_together(work, 8, seed)
    cache.check()
    for tokens in cache.retained_tokens():
        found = cache.match(tokens)
        assert tuple(found.tokens) == tokens
        assert_computed(cache, found)
        found.close()
    cache.clear_tree()
    assert_empty(cache)


def in_other_thread(work: Callable[[], object]) -> None:
    """Runs `work` in a thread of its own and raises what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def enter(context: Context) -> None:
    with context.in_use():
        pass


OPERATIONS: dict[str, Callable[[Cache, Context], object]] = {
    "fork": lambda cache, context: context.fork(),
    "truncate": lambda cache, context: context.truncate(2),
    "truncate to the length": lambda cache, context: context.truncate(context.length),
    "reserve": lambda cache, context: context.reserve(1),
    "reserve nothing": lambda cache, context: context.reserve(0),
    "commit": lambda cache, context: context.commit([9]),
    "commit nothing": lambda cache, context: context.commit([]),
    "close": lambda cache, context: context.close(),
    "retain": lambda cache, context: cache.retain(context),
    "in_use": lambda cache, context: enter(context),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_context_in_use_refuses_other_threads_and_stays_as_it_was(operation: str) -> None:
    cache, kernels = new_cache(PAGE)
    context = cache.new_context()
    compute(cache, context, range(PAGE + 1))
    context.logits = np.array([1.0], np.float32)
    sibling = context.fork()

    def state() -> tuple[object, ...]:
        cache.check()
        counts = [cache.store.ids.ref_count(page) for page in context.page_ids]
        return (
            list(context.tokens),
            list(context.page_ids),
            counts,
            read_values(cache, context),
            cache.live_pages,
            cache.retained_tokens(),
            kernels.copies,
        )

    with context.in_use():
        context.reserve(2)
        before = state()
        with pytest.raises(ContextBusyError, match="in use by another thread"):
            in_other_thread(lambda: OPERATIONS[operation](cache, context))
        assert state() == before
        assert context.logits is not None
        write_values(cache, context, [50, 51])
        context.commit([50, 51])
    assert context.length == PAGE + 3
    assert sibling.length == PAGE + 1
    in_other_thread(context.close)  # free for anybody now
    assert context.length == 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_owner_may_do_everything(operation: str) -> None:
    cache, _ = new_cache(PAGE)
    context = cache.new_context()
    compute(cache, context, range(PAGE + 1))
    with context.in_use():
        context.reserve(1)
        OPERATIONS[operation](cache, context)
        cache.check()


def test_ownership_ends_with_the_outermost_block_and_after_errors() -> None:
    cache, _ = new_cache(PAGE)
    context = cache.new_context()

    def work() -> None:
        with context.in_use():
            with context.in_use():
                pass
            with pytest.raises(ContextBusyError):
                in_other_thread(context.fork)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    in_other_thread(context.fork)


def test_other_contexts_and_matches_do_not_wait_for_a_context_in_use() -> None:
    cache, _ = new_cache(PAGE)
    context = cache.new_context()
    compute(cache, context, range(PAGE + 1))
    cache.retain(context)
    other = context.fork()
    with context.in_use():

        def work() -> None:
            compute(cache, other, [9])
            assert cache.match(range(PAGE)).length == PAGE
            cache.retain(other)

        in_other_thread(work)
    assert list(other.tokens) == [*range(PAGE + 1), 9]
    cache.check()
