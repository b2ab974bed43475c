"""The one class of the state engine that others use."""

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from llamay.formats import KVLayout
from llamay.kv.context import Context
from llamay.kv.pages import Holder
from llamay.kv.prefix_tree import Node, PrefixTree
from llamay.kv.store import PageStore
from llamay.mlx_kernels import KernelSet

TREE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class PageUse:
    """How a context's pages are held, by how many contexts that somebody works with or has parked.

    runs: (pages, contexts) in position order: so many pages in a row, each held by so many
          contexts, this one among them; the later, the fewer
    tree: pages that the prefix tree holds too
    """

    runs: tuple[tuple[int, int], ...]
    tree: int

    @property
    def pages(self) -> int:
        """All pages of the context."""
        return sum(pages for pages, _ in self.runs)

    @property
    def own(self) -> int:
        """Pages that no other such context holds."""
        return self.runs[-1][0] if self.runs and self.runs[-1][1] == 1 else 0


class Cache:
    """All contexts of one model, and the prefix tree. Usable from several threads: one lock guards
    all bookkeeping, and a context in use has one owner (see `Context`).

    numerics:       numerics id of the contexts that this cache's kernels compute; only contexts of
                    this id are retained, and so ever matched
    pages_per_slab: see `PageStore`
    tree_bytes:     most bytes of pages that the prefix tree alone keeps alive
    budget_bytes:   most bytes of pages in use; parked contexts go first, then what the tree keeps
    """

    def __init__(
        self,
        kernels: KernelSet,
        layout: KVLayout,
        *,
        numerics: str = "",
        pages_per_slab: int | None = None,
        tree_bytes: int = TREE_BYTES,
        budget_bytes: int | None = None,
    ) -> None:
        self.store = PageStore(kernels, layout, pages_per_slab, budget_bytes)
        self.store.make_room, self.store.trim = self._make_room, self._trim
        self.numerics = numerics
        self._max_tree_pages = tree_bytes // self.store.page_bytes
        self._lock = threading.RLock()
        self._tree = PrefixTree()
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # the least recently used first
        self._parked: WeakKeyDictionary[Context, None] = WeakKeyDictionary()  # the oldest first

    def new_context(self, numerics: str | None = None) -> Context:
        """An empty context; `numerics` if something else than this cache's kernels fills it."""
        with self._lock:
            return Context(self.store, self._lock, numerics or self.numerics)

    def match(self, tokens: Sequence[int]) -> Context:
        """A fork that holds the longest prefix of `tokens` that some retained context begins with.

        Its length, from 0 to len(tokens), says how long that is. The tree keeps its shape; what was
        found counts as used.
        """
        with self._lock:
            found = self._tree.find(tokens)
            if found is None:
                return self.new_context()
            leaf, length = found
            self._leaves.move_to_end(leaf)
            assert leaf.context is not None
            return leaf.context.forked(length)

    def retain(self, context: Context) -> None:
        """Keeps what a context holds for `match`, after the context is closed too; copies nothing.

        A context with another numerics id is left out: it differs from what a prefill would give.
        Raises ContextBusyError if another thread uses the context.
        """
        with self._lock:
            kept = context.fork()  # checks the owner
            if kept.length and kept.numerics == self.numerics:
                self._keep(kept)
            kept.close()

    def clear_tree(self) -> None:
        """Forgets everything retained."""
        with self._lock:
            while self._evict_oldest():
                pass

    def park(self, context: Context) -> None:
        """Says that a context is idle and safe on disk: it may be closed when room is needed.

        Parked contexts go before anything retained, the least recently parked first. A parked one
        can be forked, retained and closed; `reserve` and `in_use` refuse it with ValueError.
        Raises ContextBusyError if anybody owns it.
        """
        with self._lock:
            context.hold(Holder.PARKED)
            self._parked.pop(context, None)
            self._parked[context] = None

    def unpark(self, context: Context) -> bool:
        """The reverse; False if the context has lost its pages and is empty (or always was)."""
        with self._lock:
            if self._parked.pop(context, False) is None:
                context.hold(Holder.USER)
            return bool(context.page_ids)

    def room(self) -> tuple[int | None, int]:
        """Pages that the budget leaves free, None if it has no bound; those that nobody uses."""
        with self._lock:
            self._trim()
            ids, most = self.store.ids, self.store.max_pages
            return None if most is None else most - ids.live, ids.idle_only

    def pages_of(self, context: Context) -> PageUse:
        """How a context's pages are held; takes some microseconds, however many they are."""
        with self._lock:
            self.store.release_orphans()
            ids, pages, runs = self.store.ids, context.page_ids, []

            def sharers(page: int) -> int:
                return ids.ref_count(page) - ids.tree_count(page)

            start = 0
            while start < len(pages):  # who holds a page holds all before it: counts only fall
                count = sharers(pages[start])
                end = bisect_left(pages, 1 - count, start, key=lambda page: -sharers(page))
                runs.append((end - start, count))
                start = end
            tree = bisect_left(pages, 1, key=lambda page: ids.tree_count(page) == 0)
            return PageUse(tuple(runs), tree)

    @property
    def live_pages(self) -> int:
        """Pages that something holds."""
        return self.store.ids.live

    @property
    def tree_bytes(self) -> int:
        """Bytes of pages that the prefix tree alone keeps alive."""
        return self.store.ids.tree_only * self.store.page_bytes

    @property
    def retained(self) -> int:
        """Leaves of the prefix tree."""
        return len(self._leaves)

    def retained_tokens(self) -> list[tuple[int, ...]]:
        """Token sequences retained, the least recently used first."""
        with self._lock:
            paths = {leaf: tuple(path) for path, leaf in self._tree.leaves()}
            return [paths[leaf] for leaf in self._leaves]

    def _keep(self, context: Context) -> None:
        """Adds a leaf for what a context holds, unless one that is there begins with all of it."""
        found = self._tree.find(context.tokens)
        if found and found[1] == context.length:
            leaf = found[0]
            self._leaves.move_to_end(leaf)
            assert leaf.context is not None
            if leaf.context.length == context.length and context.logits is not None:
                leaf.context.logits = context.logits
            return
        held = context.forked(context.length, Holder.TREE)
        leaf, redundant = self._tree.insert(context.tokens, held)
        self._leaves[leaf] = None
        if redundant:
            self._drop(redundant)

    def _make_room(self) -> None:
        """Closes the least recently parked context, or forgets the least recently used leaf."""
        parked = next(iter(self._parked), None)
        if parked is None:
            evicted = self._evict_oldest()
            assert evicted, "there is nothing to give up"
            return
        del self._parked[parked]
        parked.drop()
        parked.hold(Holder.USER)

    def _evict_oldest(self) -> bool:
        """Forgets the least recently used leaf; False if there is none."""
        oldest = next(iter(self._leaves), None)
        if oldest is None:
            return False
        self._tree.remove(oldest)
        self._drop(oldest)
        return True

    def _drop(self, leaf: Node) -> None:
        """Releases the context of a leaf that has left the tree."""
        del self._leaves[leaf]
        assert leaf.context is not None
        leaf.context.drop()

    def _trim(self) -> None:
        self.store.release_orphans()
        while self.store.ids.tree_only > self._max_tree_pages and self._evict_oldest():
            pass

    def check(self) -> None:
        """Asserts every invariant of pages, contexts and tree; for tests, with all at rest."""
        with self._lock:
            if self.store.orphans:
                self._trim()
            self._check_pages()
            self._tree.check()
            paths = {leaf: path for path, leaf in self._tree.leaves()}
            assert paths.keys() == self._leaves.keys(), "the tree has other leaves"
            for leaf, path in paths.items():
                assert leaf.context is not None
                assert leaf.context.numerics == self.numerics
                assert tuple(leaf.context.tokens) == tuple(path)
            assert self.store.ids.tree_only <= self._max_tree_pages, "the tree is over its bound"

    def _check_pages(self) -> None:
        """A page's counts are the numbers of contexts that hold it; every page has a place."""
        ids, page_tokens = self.store.ids, self.store.layout.page_tokens
        holders: dict[int, list[Context]] = {}
        for context in self.store.contexts:
            pages = context.page_ids
            assert len(set(pages)) == len(pages), "a context holds a page twice"
            assert context.length <= len(pages) * page_tokens
            assert (context.holder is Holder.PARKED) == (context in self._parked)
            for page in pages:
                holders.setdefault(page, []).append(context)
        for page, contexts in holders.items():
            kinds = [context.holder for context in contexts]
            assert ids.ref_count(page) == len(kinds), f"page {page}: wrong ref count"
            assert ids.user_count(page) == kinds.count(Holder.USER), f"page {page}: wrong users"
            assert ids.tree_count(page) == kinds.count(Holder.TREE), (
                f"page {page}: wrong tree count"
            )
            assert len({tuple(c.page_ids[: c.page_ids.index(page)]) for c in contexts}) == 1
            assert len(self.store.slabs.arrays[page // self.store.slabs.pages_per_slab])
        assert ids.live == len(holders), "a page is held by nobody"
        kinds_of = [{context.holder for context in contexts} for contexts in holders.values()]
        assert ids.tree_only == kinds_of.count({Holder.TREE})
        assert ids.idle_only == sum(Holder.USER not in kinds for kinds in kinds_of)
        slabs = {page // self.store.slabs.pages_per_slab for page in holders}
        in_memory = {i for i, array in enumerate(self.store.slabs.arrays) if len(array)}
        assert slabs == in_memory, "a slab without pages is kept, or one with pages is gone"
        for spare in self.store.spares:
            assert all(array is not spare for array in self.store.slabs.arrays)
