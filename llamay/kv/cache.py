"""The one class of the state engine that others use."""

from weakref import WeakSet

from llamay.formats import KVLayout
from llamay.kv.context import Context
from llamay.kv.store import PageStore
from llamay.mlx_kernels import KernelSet


class Cache:
    """All contexts of one model. One thread at a time.

    pages_per_slab: see `PageStore`
    """

    def __init__(
        self, kernels: KernelSet, layout: KVLayout, pages_per_slab: int | None = None
    ) -> None:
        self.store = PageStore(kernels, layout, pages_per_slab)
        self._contexts: WeakSet[Context] = WeakSet()

    def new_context(self) -> Context:
        """An empty context."""
        return self._registered(Context(self.store))

    def fork(self, context: Context) -> Context:
        """A context that continues from `context`; shares every page and copies none."""
        return self._registered(context.fork())

    @property
    def live_pages(self) -> int:
        """Pages that some context holds."""
        return self.store.ids.live

    def check(self) -> None:
        """Asserts that pages and contexts agree; for tests."""
        holders: dict[int, int] = {}
        for context in self._contexts:
            pages = context.page_ids
            assert len(set(pages)) == len(pages), "a context holds a page twice"
            assert context.length <= len(pages) * self.store.layout.page_tokens
            for page in pages:
                holders[page] = holders.get(page, 0) + 1
        for page, count in holders.items():
            assert self.store.ids.ref_count(page) == count, f"page {page}: wrong ref count"
            assert len(self.store.slabs.arrays[page // self.store.slabs.pages_per_slab])
        assert self.store.ids.live == len(holders), "a page is held by nobody"

    def _registered(self, context: Context) -> Context:
        self._contexts.add(context)
        return context
