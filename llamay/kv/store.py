"""Where pages live: slabs of bounded size, allocated as needed and released when empty."""

from llamay.formats import KVLayout
from llamay.kv.pages import PageIds
from llamay.mlx_kernels import KernelSet, Slabs

SLAB_BYTES = 64 * 2**20


class PageStore:
    """Pages of one layout, as a kernel set lays them out. One thread at a time.

    pages_per_slab: how many pages a slab holds; None fits as many as 64 MiB hold, at least one
    """

    def __init__(
        self, kernels: KernelSet, layout: KVLayout, pages_per_slab: int | None = None
    ) -> None:
        self.kernels = kernels
        self.layout = layout
        self.page_bytes = kernels.page_bytes(layout)
        self.ids = PageIds()
        self.slabs = Slabs(layout, pages_per_slab or max(1, SLAB_BYTES // self.page_bytes), [])

    def allocate(self) -> int:
        """A page with one holder and undefined content."""
        page = self.ids.allocate()
        slab = page // self.slabs.pages_per_slab
        try:
            if slab == len(self.slabs.arrays):
                self.slabs.arrays.append(self._new_slab())
            elif not len(self.slabs.arrays[slab]):
                self.slabs.arrays[slab] = self._new_slab()
        except BaseException:
            self.ids.release(page)
            raise
        return page

    def release(self, page: int) -> None:
        """Takes a holder away; the slab goes with its last page."""
        if not self.ids.release(page):
            return
        per_slab = self.slabs.pages_per_slab
        start = page // per_slab * per_slab
        if self.ids.live_between(start, start + per_slab) == 0:
            self.slabs.arrays[page // per_slab] = bytearray()

    def copy(self, page: int) -> int:
        """A new page with the content of `page`."""
        target = self.allocate()
        self.kernels.copy_page(self.slabs, page, target)
        return target

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slabs that exist."""
        count = sum(len(array) > 0 for array in self.slabs.arrays)
        return count * self.slabs.pages_per_slab * self.page_bytes

    def _new_slab(self) -> object:
        return self.kernels.new_slab(self.layout, self.slabs.pages_per_slab)
