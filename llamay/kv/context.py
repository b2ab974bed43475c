"""A context: a list of pages, a length, and the tokens that made it."""

from array import array
from collections.abc import Sequence

from llamay.kv.store import PageStore


class Context:
    """Tokens and the keys and values computed for them. One owner, one thread at a time.

    Positions [0, length) are committed. `reserve` makes room for more, which nobody else sees, and
    `commit` publishes it; a step that fails commits nothing.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._page_ids: list[int] = []
        # Append-only and shared by forks: it may hold more than this context's own `length`.
        self._tokens = array("i")
        self._length = 0

    @property
    def length(self) -> int:
        """Committed positions."""
        return self._length

    @property
    def tokens(self) -> Sequence[int]:
        """The committed tokens, a copy."""
        return self._tokens[: self._length]

    @property
    def page_ids(self) -> Sequence[int]:
        """Pages in position order; the last may reach beyond `length`."""
        return self._page_ids

    def fork(self) -> "Context":
        """A context that continues from here; shares every page and copies none."""
        child = Context(self._store)
        page_tokens = self._store.layout.page_tokens
        child._page_ids = self._page_ids[: -(-self._length // page_tokens)]
        for page in child._page_ids:
            self._store.ids.retain(page)
        child._tokens, child._length = self._tokens, self._length
        return child

    def reserve(self, count: int) -> None:
        """Makes positions [length, length + count) writable by this context alone.

        Copies at most one page: the one that `length` lies in, if another context holds it too.
        Raises MemoryError, with the context as it was, if pages cannot be had.
        """
        page_tokens = self._store.layout.page_tokens
        if count and self._length % page_tokens:
            self._writable(self._length // page_tokens)
        while len(self._page_ids) * page_tokens < self._length + count:
            self._page_ids.append(self._store.allocate())

    def commit(self, tokens: Sequence[int]) -> None:
        """Publishes positions that a step has written: `tokens` are those after `length`."""
        if self._length + len(tokens) > len(self._page_ids) * self._store.layout.page_tokens:
            raise ValueError(f"{len(tokens)} tokens committed without being reserved")
        if len(self._tokens) != self._length:  # another fork went on, or this one was truncated
            self._tokens = self._tokens[: self._length]
        self._tokens.extend(tokens)
        self._length += len(tokens)

    def truncate(self, length: int) -> None:
        """Forgets positions from `length` on, and what was reserved; copies nothing."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate a context of {self._length} tokens to {length}")
        keep = -(-length // self._store.layout.page_tokens)
        for page in self._page_ids[keep:]:
            self._store.release(page)
        del self._page_ids[keep:]
        self._length = length

    def close(self) -> None:
        """Releases every page; the context is then empty."""
        self.truncate(0)

    def _writable(self, index: int) -> None:
        """Makes page `index` this context's own: the only place where a page is copied."""
        page = self._page_ids[index]
        if self._store.ids.ref_count(page) > 1:
            self._page_ids[index] = self._store.copy(page)
            self._store.release(page)
