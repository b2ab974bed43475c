"""Which pages are in use, and by how many holders; no arrays."""

import heapq


class PageIds:
    """Allocates page ids, the lowest free one first, and counts the holders of each."""

    def __init__(self) -> None:
        self._ref_counts: dict[int, int] = {}
        self._free: list[int] = []
        self._next = 0

    def allocate(self) -> int:
        """A page id with one holder."""
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page = self._next
            self._next += 1
        self._ref_counts[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Adds a holder."""
        self._ref_counts[page] += 1

    def release(self, page: int) -> bool:
        """Takes a holder away; True if that was the last and the page is free again."""
        count = self._ref_counts[page] - 1
        if count:
            self._ref_counts[page] = count
            return False
        del self._ref_counts[page]
        heapq.heappush(self._free, page)
        return True

    def ref_count(self, page: int) -> int:
        """Holders of a page; 0 if it is free."""
        return self._ref_counts.get(page, 0)

    @property
    def live(self) -> int:
        """Pages with at least one holder."""
        return len(self._ref_counts)

    def live_between(self, start: int, end: int) -> int:
        """How many of the ids [start, end) have a holder."""
        return sum(page in self._ref_counts for page in range(start, end))
