"""Which pages are in use, and by how many holders; no arrays.

Holders are of two kinds: contexts that somebody works with, and contexts that the prefix tree
keeps. Pages that only the tree keeps alive are counted, because the tree is bounded by them.
"""

import heapq


class PageIds:
    """Allocates page ids, the lowest free one first, and counts the holders of each."""

    def __init__(self) -> None:
        self._counts: list[int] = []  # holders of each id ever allocated; 0 is free
        self._tree_counts: list[int] = []  # those of them that belong to the prefix tree
        self._free: list[int] = []
        self.live = 0  # pages with a holder
        self.tree_only = 0  # pages whose holders all belong to the prefix tree

    def allocate(self) -> int:
        """A page id with one holder, a context."""
        if self._free:
            page = heapq.heappop(self._free)
            self._counts[page] = 1
        else:
            page = len(self._counts)
            self._counts.append(1)
            self._tree_counts.append(0)
        self.live += 1
        return page

    def retain(self, pages: list[int], *, by_tree: bool = False) -> None:
        """Adds a holder to each page."""
        counts = self._counts
        if by_tree:
            for page in pages:
                counts[page] += 1
                self._tree_counts[page] += 1
            return
        tree_counts = self._tree_counts
        for page in pages:
            self.tree_only -= counts[page] == tree_counts[page]
            counts[page] += 1

    def release(self, page: int, *, by_tree: bool = False) -> bool:
        """Takes a holder away; True if that was the last and the page is free again."""
        counts, tree_counts = self._counts, self._tree_counts
        before = counts[page] == tree_counts[page]
        counts[page] -= 1
        tree_counts[page] -= by_tree
        if counts[page]:
            self.tree_only += (counts[page] == tree_counts[page]) - before
            return False
        self.tree_only -= before
        self.live -= 1
        heapq.heappush(self._free, page)
        return True

    def ref_count(self, page: int) -> int:
        """Holders of a page; 0 if it is free."""
        return self._counts[page] if page < len(self._counts) else 0

    def tree_count(self, page: int) -> int:
        """Those holders of a page that belong to the prefix tree."""
        return self._tree_counts[page] if page < len(self._counts) else 0

    def live_between(self, start: int, end: int) -> int:
        """How many of the ids [start, end) have a holder."""
        return sum(count > 0 for count in self._counts[start:end])
