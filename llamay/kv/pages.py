"""Which pages are in use, by whom and by how many; no arrays.

Pages that only the prefix tree keeps alive are counted, because the tree is bounded by them, and so
are those that nobody works with, because they make room.
"""

import heapq
from collections.abc import Sequence
from enum import Enum


class Holder(Enum):
    """What a context that holds pages is for."""

    USER = 0  # somebody works with it
    PARKED = 1  # idle, and safe on disk: it may be closed when room is needed
    TREE = 2  # the prefix tree keeps it


class PageIds:
    """Allocates page ids, the lowest free one first, and counts the holders of each."""

    def __init__(self) -> None:
        self._counts: list[int] = []  # holders of each id ever allocated; 0 is free
        self._idle_counts: list[int] = []  # those of them that are no users
        self._tree_counts: list[int] = []  # those of them that belong to the prefix tree
        self._free: list[int] = []
        self.live = 0  # pages with a holder
        self.idle_only = 0  # pages with holders, none of them a user
        self.tree_only = 0  # pages whose holders all belong to the prefix tree

    def allocate(self) -> int:
        """A page id with one holder, a user."""
        if self._free:
            page = heapq.heappop(self._free)
            self._counts[page] = 1
        else:
            page = len(self._counts)
            self._counts.append(1)
            self._idle_counts.append(0)
            self._tree_counts.append(0)
        self.live += 1
        return page

    def retain(self, pages: Sequence[int], holder: Holder = Holder.USER) -> None:
        """Adds a holder to each page."""
        for page in pages:
            self._count(page, holder, 1)

    def retain_beside_user(self, pages: Sequence[int]) -> None:
        """Adds a user to each page, which all have another."""
        counts = self._counts
        for page in pages:
            counts[page] += 1

    def release(self, page: int, holder: Holder = Holder.USER) -> bool:
        """Takes a holder away; True if that was the last and the page is free again."""
        self._count(page, holder, -1)
        if self._counts[page]:
            return False
        self.live -= 1
        heapq.heappush(self._free, page)
        return True

    def change(self, pages: Sequence[int], before: Holder, after: Holder) -> None:
        """One holder of each page becomes one of another kind."""
        for page in pages:
            self._count(page, before, -1)
            self._count(page, after, 1)

    def _count(self, page: int, holder: Holder, change: int) -> None:
        counts, idle, tree = self._counts, self._idle_counts, self._tree_counts
        self.idle_only -= counts[page] == idle[page] > 0
        self.tree_only -= counts[page] == tree[page] > 0
        counts[page] += change
        if holder is not Holder.USER:
            idle[page] += change
        if holder is Holder.TREE:
            tree[page] += change
        self.idle_only += counts[page] == idle[page] > 0
        self.tree_only += counts[page] == tree[page] > 0

    def ref_count(self, page: int) -> int:
        """Holders of a page; 0 if it is free."""
        return self._counts[page] if page < len(self._counts) else 0

    def user_count(self, page: int) -> int:
        """Those holders of a page that somebody works with."""
        return self.ref_count(page) - self.idle_count(page)

    def idle_count(self, page: int) -> int:
        """Those holders of a page that are parked or belong to the prefix tree."""
        return self._idle_counts[page] if page < len(self._counts) else 0

    def tree_count(self, page: int) -> int:
        """Those holders of a page that belong to the prefix tree."""
        return self._tree_counts[page] if page < len(self._counts) else 0

    def live_between(self, start: int, end: int) -> int:
        """How many of the ids [start, end) have a holder."""
        return sum(count > 0 for count in self._counts[start:end])
