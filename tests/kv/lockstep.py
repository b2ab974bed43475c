"""Runs a cache and the reference model side by side and compares them after every operation."""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from llamay.errors import BudgetError
from llamay.formats import KVLayout, KVPrecision
from llamay.kv import Cache, Context
from llamay.kv.snapshot import (
    Identity,
    extend_from_segments,
    read_snapshot,
    write_segment,
    write_snapshot,
)
from tests.kv.fake_kernels import (
    FakeKernels,
    assert_empty,
    layout_of,
    read_values,
    write_values,
)
from tests.kv.model import ModelContext, OutOfBudgetError, ReferenceModel, common_length

OWN, OTHER = "own", "other"  # numerics ids
TOKENS = (0, 1, 2)  # few, so that sequences often begin alike
MAX_CONTEXTS = 8
MAX_PAGES = 5  # of a context
MAX_SNAPSHOTS = 3
MAX_BRANCHES = 4
PAGE_SIZES = (1, 3, 16, 64)
IDENTITY = Identity("made-up", len(TOKENS), "1a" * 32, "2b" * 32)


@dataclass(frozen=True)
class Config:
    """page_tokens; pages_per_slab: 1 is the way without an arena; budget: whether there is one."""

    page_tokens: int
    pages_per_slab: int
    precision: KVPrecision
    budget: bool

    tree_pages = 6

    @property
    def budget_pages(self) -> int | None:
        return 14 if self.budget else None

    @property
    def layout(self) -> KVLayout:
        return layout_of(self.page_tokens, self.precision)

    def __str__(self) -> str:
        budget = "budget" if self.budget else "no_budget"
        return f"page{self.page_tokens}-slab{self.pages_per_slab}-{self.precision.value}-{budget}"


# Every page size with every precision, with slabs of several pages and of one; half of them, of
# each kind, with a budget.
CONFIGS = [
    Config(page_tokens, pages_per_slab, precision, (i + j + k) % 2 == 0)
    for i, page_tokens in enumerate(PAGE_SIZES)
    for j, pages_per_slab in enumerate((1, 5))
    for k, precision in enumerate(KVPrecision)
]


@dataclass(frozen=True)
class Segment:
    """A file of positions [start, end), and the logits of the last one if they went with it."""

    path: Path
    start: int
    end: int
    logits: int | None


class LockStep:
    """A cache, its model, and the pairs of contexts that belong together.

    folder: for snapshots
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.kernels = FakeKernels()
        page_bytes = self.kernels.page_bytes(config.layout)
        budget = config.budget_pages
        self.cache = Cache(
            self.kernels,
            config.layout,
            numerics=OWN,
            pages_per_slab=config.pages_per_slab,
            # Not whole pages: a part of one must not count.
            tree_bytes=config.tree_pages * page_bytes + page_bytes - 1,
            budget_bytes=None if budget is None else budget * page_bytes + page_bytes - 1,
        )
        self.model = ReferenceModel(config.page_tokens, config.tree_pages, budget, OWN)
        self.pairs: list[tuple[Context, ModelContext]] = []
        self.snapshots: list[tuple[Path, ModelContext]] = []
        # Files from the root on.
        self.branches: list[tuple[list[Segment], ModelContext]] = []
        self.written = self.segments = 0

    # Operations. Indices and positions are taken modulo what there is.

    def new(self, numerics: str) -> None:
        self._add(self.cache.new_context(numerics), self.model.new(numerics))

    def fork(self, index: int) -> None:
        context, model = self._pair(index)
        pages = self.cache.live_pages
        self._add(context.fork(), self.model.fork(model))
        assert self.cache.live_pages == pages

    def extend(self, index: int, count: int, tokens: Sequence[int]) -> None:
        """Appends `count` positions, whose tokens repeat `tokens`."""
        context, model = self._worked_with(index)
        count = min(count, MAX_PAGES * self.config.page_tokens - context.length)
        if not self._reserve(context, model, count):
            return
        new = [tokens[i % len(tokens)] for i in range(count)]
        values = self._new_values(count)
        write_values(self.cache, context, values)
        context.commit(new)
        self.model.commit(model, new, values)

    def overwrite(self, index: int, position: int, count: int, tokens: Sequence[int]) -> None:
        """Rewrites from a position on."""
        self.truncate(index, position)
        self.extend(index, count, tokens)

    def cancel(self, index: int, count: int) -> None:
        """A step that has written its rows and then does not commit."""
        context, model = self._worked_with(index)
        if self._reserve(context, model, count):
            write_values(self.cache, context, self._new_values(count))

    def extend_without_memory(self, index: int, count: int, slabs: int) -> None:
        """A step for which the system gives only so many slabs; without a budget only, for what
        would have been evicted before it failed is not predicted."""
        context, model = self._worked_with(index)
        self.kernels.slabs_left = slabs
        copies = self.kernels.copies
        before = (context.length, list(context.page_ids), self.cache.live_pages)
        try:
            context.reserve(count)
        except MemoryError:
            assert (context.length, list(context.page_ids), self.cache.live_pages) == before
            assert self.kernels.copies == copies
        else:
            self.model.reserve(model, count)
        finally:
            self.kernels.slabs_left = None

    def truncate(self, index: int, position: int) -> None:
        context, model = self._pair(index)
        length = position % (context.length + 1)
        pages = self.kernels.copies
        context.truncate(length)
        self.model.truncate(model, length)
        assert self.kernels.copies == pages

    def keep_logits(self, index: int) -> None:
        context, model = self._pair(index)
        (model.logits,) = self._new_values(1)
        context.logits = np.full(len(TOKENS), model.logits, np.float32)

    def close(self, index: int) -> None:
        context, model = self.pairs.pop(index % len(self.pairs))
        context.close()
        assert context.length == 0
        assert len(context.page_ids) == 0
        self.model.forget(model)

    def drop(self, index: int) -> None:
        """Leaves a context to the garbage collector."""
        _, model = self.pairs.pop(index % len(self.pairs))
        self.model.forget(model)

    def park(self, index: int) -> None:
        context, model = self._pair(index)
        self.cache.park(context)
        self.model.park(model)
        with pytest.raises(ValueError, match="unpark"):
            context.reserve(1)

    def unpark(self, index: int) -> None:
        context, model = self._pair(index)
        assert self.cache.unpark(context) == bool(model.pages)
        self.model.unpark(model)

    def retain(self, index: int) -> None:
        context, model = self._pair(index)
        pages = self.cache.live_pages
        self.cache.retain(context)
        self.model.retain(model)
        assert self.cache.live_pages <= pages

    def match(self, index: int, position: int, tail: Sequence[int]) -> None:
        """Looks for the beginning of some context, followed by something else."""
        known = [model.tokens for _, model in self.pairs]
        known += [model.tokens for model in self.model.retained] or [[]]
        tokens = known[index % len(known)]
        query = tokens[: position % (len(tokens) + 1)] + list(tail)
        pages = self.cache.live_pages
        self._add(self.cache.match(query), self.model.match(query))
        assert self.cache.live_pages == pages

    def clear_tree(self) -> None:
        self.cache.clear_tree()
        self.model.clear_tree()

    def snapshot(self, index: int, kv: KVPrecision | None) -> None:
        """Writes a snapshot whose payload loses nothing; the oldest are forgotten."""
        context, model = self._worked_with(index)
        path = self.folder / f"{len(self.snapshots) % MAX_SNAPSHOTS}.llamayctx"
        write_snapshot(context, path, IDENTITY, kv=kv)
        self.snapshots = [pair for pair in self.snapshots if pair[0] != path]
        self.snapshots.insert(0, (path, self.model.copy_of(model)))

    def restore(self, index: int) -> None:
        """Reads a snapshot back; without room for it, nothing is given up."""
        path, saved = self.snapshots[index % len(self.snapshots)]
        try:
            model = self.model.restore(saved, saved_numerics(saved.numerics))
        except OutOfBudgetError:
            with pytest.raises(BudgetError):
                read_snapshot(self.cache, path, IDENTITY)
            return
        again = read_snapshot(self.cache, path, IDENTITY)
        assert again.exact == (saved.numerics != OTHER)
        self._add(again.context, model)

    def restore_elsewhere(self, index: int, page_tokens: int) -> None:
        """Reads a snapshot into another cache, whose pages have another size."""
        path, saved = self.snapshots[index % len(self.snapshots)]
        layout = layout_of(page_tokens, self.config.precision)
        other = Cache(FakeKernels(), layout, numerics=OWN, pages_per_slab=2)
        again = read_snapshot(other, path, IDENTITY)
        assert again.exact == (saved.numerics != OTHER)
        assert list(again.context.tokens) == saved.tokens
        assert read_values(other, again.context) == saved.values
        other.check()
        again.context.close()
        assert_empty(other)

    def save_branch(self, index: int) -> None:
        """Writes what no file holds yet of a context, as a segment of its branch."""
        context, model = self._worked_with(index)
        files, cut = self._longest_saved(model)
        if cut == len(model.tokens):
            return
        path = self.folder / f"{self.segments}.segment"
        self.segments += 1
        parent = files[-1].path.name if files else ""
        write_segment(path, IDENTITY, context, cut, context.length, parent=parent)
        segment = Segment(path, cut, len(model.tokens), model.logits)
        self.branches.insert(0, ([*files, segment], self.model.copy_of(model)))
        del self.branches[MAX_BRANCHES:]

    def _longest_saved(self, model: ModelContext) -> tuple[list[Segment], int]:
        """Of the branch that begins like this context for longest, the files, and for how long."""
        files: list[Segment] = []
        cut = 0
        for saved_files, saved in self.branches:
            length = common_length(saved.values, model.values)
            if saved.numerics == model.numerics and length > cut:
                files, cut = saved_files, length
        return [file for file in files if file.start < cut], cut

    def restore_branch(self, index: int, position: int, *, matched: bool, hop: bool) -> None:
        """Reads a branch back, all or up to a position, onto what the tree or a context holds."""
        files, saved = self.branches[index % len(self.branches)]
        end = position % len(saved.tokens) + 1
        used = [file for file in files if file.start < end]
        paths = [file.path for file in used]
        history = saved.tokens[:end]
        if matched:
            pair = (self.cache.match(history), self.model.match(history))
        else:
            pair = (self.cache.new_context(), self.model.new(OWN))
        self._add(*pair)
        context, model = pair
        length = len(model.tokens)
        run = (lambda work: work()) if hop else None
        try:
            self.model.reserve(model, end - length)
        except OutOfBudgetError:
            with pytest.raises(BudgetError):
                extend_from_segments(self.cache, context, paths, IDENTITY, history, run=run)
            return
        extended = extend_from_segments(self.cache, context, paths, IDENTITY, history, run=run)
        assert extended.positions == end - length
        if end > length:
            assert extended.exact == (saved.numerics != OTHER)
            self.model.commit(model, history[length:], saved.values[length:end])
            model.numerics = saved_numerics(saved.numerics)
            model.logits = used[-1].logits if used[-1].end == end else None

    # Comparison.

    def check(self) -> None:
        """Asserts the cache's own invariants, and that it is what the model says."""
        cache, model = self.cache, self.model
        cache.check()
        assert cache.live_pages == model.live_pages
        assert cache.tree_bytes == model.tree_only_pages * cache.store.page_bytes
        assert cache.retained_tokens() == [tuple(entry.tokens) for entry in model.retained]
        assert cache.retained == len(model.retained)
        assert self.kernels.copies == model.copies
        held = Counter(p for c in model.contexts + model.retained for p in c.pages)
        by_tree = Counter(p for c in model.retained for p in c.pages)
        identities: dict[int, object] = {}
        for context, expected in self.pairs:
            self._compare(context, expected)
            self._compare_use(context, [(held[p], by_tree[p]) for p in expected.pages])
            for page, identity in zip(context.page_ids, expected.pages, strict=True):
                assert identities.setdefault(page, identity) is identity
        assert len(set(identities.values())) == len(identities)

    def _compare(self, context: Context, expected: ModelContext) -> None:
        assert context.length == len(expected.tokens)
        assert list(context.tokens) == expected.tokens
        assert context.numerics == expected.numerics
        assert read_values(self.cache, context) == expected.values
        logits = None if context.logits is None else int(context.logits[0])
        assert logits == expected.logits

    def _compare_use(self, context: Context, expected: list[tuple[int, int]]) -> None:
        """Each page's holders, and those of them that belong to the tree."""
        ref_count = self.cache.store.ids.ref_count
        assert [ref_count(page) for page in context.page_ids] == [held for held, _ in expected]
        assert context.own_pages == sum(held == 1 for held, _ in expected)
        use = self.cache.pages_of(context)
        sharers = [held - by_tree for held, by_tree in expected]
        assert use.runs == tuple((len(list(run)), count) for count, run in groupby(sharers))
        assert use.tree == sum(by_tree > 0 for _, by_tree in expected)
        assert (use.pages, use.own) == (len(sharers), sharers.count(1))

    def finish(self) -> None:
        """Closes everything: the cache must then be empty."""
        while self.pairs:
            self.close(0)
            self.check()
        self.clear_tree()
        assert_empty(self.cache)

    def _pair(self, index: int) -> tuple[Context, ModelContext]:
        return self.pairs[index % len(self.pairs)]

    def _worked_with(self, index: int) -> tuple[Context, ModelContext]:
        """A pair that is not parked, or no longer."""
        self.unpark(index)
        return self._pair(index)

    def _add(self, context: Context, model: ModelContext) -> None:
        self.pairs.append((context, model))

    def _new_values(self, count: int) -> list[int]:
        """Numbers never written before, exact in float32."""
        self.written += count
        return list(range(self.written - count + 1, self.written + 1))

    def _reserve(self, context: Context, model: ModelContext, count: int) -> bool:
        """Reserves in both; False if both are out of budget."""
        before = (context.length, list(context.page_ids))
        try:
            self.model.reserve(model, count)
        except OutOfBudgetError:
            with pytest.raises(BudgetError):
                context.reserve(count)
            assert (context.length, list(context.page_ids)) == before
            return False
        context.reserve(count)
        return True


def saved_numerics(numerics: str) -> str:
    """The numerics id of a context that comes back: another kernel set's id becomes a mark."""
    return f"{OWN}+{OTHER}" if numerics == OTHER else numerics


def run_random_operations(config: Config, seed: int, operations: int) -> None:
    """One lock-step run of random operations; a failure says which."""
    with tempfile.TemporaryDirectory() as folder:
        lockstep, rng = LockStep(config, Path(folder)), random.Random(seed)
        for number in range(operations):
            name, operation = _choose(lockstep, rng)
            try:
                operation()
                lockstep.check()
            except BaseException as error:
                error.add_note(f"{config}, seed {seed}, operation {number}: {name}")
                raise
        lockstep.finish()


def _choose(lockstep: LockStep, rng: random.Random) -> tuple[str, Callable[[], None]]:
    """A random operation that is possible now, its arguments filled in."""
    page_tokens = lockstep.config.page_tokens
    # To the end of a page, one position to either side, or anywhere.
    count = max(1, rng.randrange(3) * page_tokens + rng.choice((-1, 0, 1)))
    if rng.random() < 0.5:
        count = rng.randint(1, page_tokens + 1)
    index, position = rng.randrange(MAX_CONTEXTS), rng.randrange(1 << 20)
    tokens = rng.choices(TOKENS, k=rng.randint(1, 3))
    tail = rng.choices(TOKENS, k=rng.randrange(3))
    kv = rng.choice((None, lockstep.config.precision))
    operations: list[tuple[int, str, Callable[[], None]]] = []
    if len(lockstep.pairs) < MAX_CONTEXTS:
        operations += [
            (2, "new", lambda: lockstep.new(rng.choice((OWN, OWN, OWN, OTHER)))),
            (6, "match", lambda: lockstep.match(index, position, tail)),
        ]
        if lockstep.snapshots:
            operations += [(2, "restore", lambda: lockstep.restore(index))]
        if lockstep.branches:
            matched, hop = rng.random() < 0.7, rng.random() < 0.5
            restore = lambda: lockstep.restore_branch(  # noqa: E731
                index, position, matched=matched, hop=hop
            )
            operations += [(3, "restore_branch", restore)]
    if lockstep.pairs:
        operations += [
            (10, "extend", lambda: lockstep.extend(index, count, tokens)),
            (4, "overwrite", lambda: lockstep.overwrite(index, position, count, tokens)),
            (2, "cancel", lambda: lockstep.cancel(index, count)),
            (3, "truncate", lambda: lockstep.truncate(index, position)),
            (2, "keep_logits", lambda: lockstep.keep_logits(index)),
            (3, "close", lambda: lockstep.close(index)),
            (2, "drop", lambda: lockstep.drop(index)),
            (7, "retain", lambda: lockstep.retain(index)),
            (4, "park", lambda: lockstep.park(index)),
            (1, "unpark", lambda: lockstep.unpark(index)),
            (1, "snapshot", lambda: lockstep.snapshot(index, kv)),
            (2, "save_branch", lambda: lockstep.save_branch(index)),
        ]
        if len(lockstep.pairs) < MAX_CONTEXTS:
            operations += [(6, "fork", lambda: lockstep.fork(index))]
        if not lockstep.config.budget:
            slabs = rng.randrange(3)
            without = lambda: lockstep.extend_without_memory(index, count, slabs)  # noqa: E731
            operations += [(2, "extend_without_memory", without)]
    if lockstep.snapshots:
        size = rng.choice(PAGE_SIZES)
        elsewhere = lambda: lockstep.restore_elsewhere(index, size)  # noqa: E731
        operations += [(1, "restore_elsewhere", elsewhere)]
    if rng.random() < 0.01:
        operations += [(50, "clear_tree", lockstep.clear_tree)]
    ((_, name, operation),) = rng.choices(operations, [weight for weight, _, _ in operations])
    return name, operation
