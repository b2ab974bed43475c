"""Where pages live: slabs of bounded size, allocated as needed and released when empty.

Two empty slabs are kept as spares: the system takes milliseconds to give memory that reads as
zeros, and a hundred in a virtual machine whose host has to find it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

from llamay.errors import BudgetError
from llamay.formats import KVLayout
from llamay.kv.pages import Holder, PageIds
from llamay.mlx_kernels import KernelSet, Slabs

if TYPE_CHECKING:
    from llamay.kv.context import Context

SLAB_BYTES = 64 * 2**20
MAX_SPARES = 2


class PageStore:
    """Pages of one layout, as a kernel set lays them out. Callers hold the cache's lock.

    pages_per_slab: how many pages a slab holds; None fits as many as 64 MiB hold, at least one
    max_bytes:      most bytes of pages in use; None does not bound them
    """

    def __init__(
        self,
        kernels: KernelSet,
        layout: KVLayout,
        pages_per_slab: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.kernels = kernels
        self.layout = layout
        self.page_bytes = kernels.page_bytes(layout)
        self.max_pages = None if max_bytes is None else max_bytes // self.page_bytes
        self.ids = PageIds()
        self.slabs = Slabs(layout, pages_per_slab or max(1, SLAB_BYTES // self.page_bytes), [])
        self.spares: list[object] = []  # empty slabs
        self.contexts: WeakSet[Context] = WeakSet()
        self.orphans: list[tuple[list[int], Holder]] = []  # pages of collected contexts
        # Set by the cache. make_room gives up something that nobody uses; trim keeps the prefix
        # tree within its bound after pages were released.
        self.make_room: Callable[[], object] = lambda: None
        self.trim: Callable[[], None] = lambda: None

    def require(self, count: int) -> None:
        """Raises BudgetError unless `count` more pages can be had, by giving up what nobody uses.

        So nothing is given up for what fails in the end.
        """
        if self.max_pages is None:
            return
        left = self.max_pages - self.ids.live + self.ids.idle_only
        if count > left:
            raise BudgetError(
                f"the context memory budget holds {self.max_pages} pages of {self.page_bytes} "
                f"bytes, {left} of them are left, and {count} are needed; close branches or raise "
                "--ctx-mem-budget"
            )

    @property
    def full(self) -> bool:
        """Whether the budget has no room for another page."""
        return self.max_pages is not None and self.ids.live >= self.max_pages

    def allocate(self) -> int:
        """A page with one holder and undefined content; something idle makes room if need be.

        The caller knows by `require` that there is room. Raises MemoryError if the system has none.
        """
        while self.full:
            self.make_room()
        page = self.ids.allocate()
        slab = page // self.slabs.pages_per_slab
        try:
            if slab == len(self.slabs.arrays):
                self.slabs.arrays.append(self._take_slab())
            elif not len(self.slabs.arrays[slab]):
                self.slabs.arrays[slab] = self._take_slab()
        except BaseException:
            self.ids.release(page)
            raise
        return page

    def release(self, page: int, holder: Holder = Holder.USER) -> None:
        """Takes a holder away; with its last page, a slab goes or becomes a spare."""
        if not self.ids.release(page, holder):
            return
        per_slab = self.slabs.pages_per_slab
        start = page // per_slab * per_slab
        if self.ids.live_between(start, start + per_slab) == 0:
            empty = self.slabs.arrays[page // per_slab]
            self.slabs.arrays[page // per_slab] = bytearray()
            if len(self.spares) < MAX_SPARES:
                self.spares.append(empty)

    def release_orphans(self) -> None:
        """Releases what contexts held that were collected without being closed."""
        while self.orphans:
            pages, holder = self.orphans.pop()
            for page in pages:
                self.release(page, holder)

    def copy(self, page: int) -> int:
        """A new page with the content of `page`."""
        target = self.allocate()
        try:
            self.kernels.copy_page(self.slabs, page, target)
        except BaseException:
            self.release(target)
            raise
        return target

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slabs that hold pages."""
        count = sum(len(array) > 0 for array in self.slabs.arrays)
        return count * self.slabs.pages_per_slab * self.page_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of the empty slabs that are kept."""
        return len(self.spares) * self.slabs.pages_per_slab * self.page_bytes

    def _take_slab(self) -> object:
        """A spare slab, or a new one."""
        if self.spares:
            return self.spares.pop()
        return self.kernels.new_slab(self.layout, self.slabs.pages_per_slab)
