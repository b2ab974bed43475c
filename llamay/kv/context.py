"""A context: a list of pages, a length, and the tokens that made it.

    positions   [0, length)                 [length, reserved end)
    who sees    this context and its forks  nobody, until `commit`

Ownership: `in_use` makes the calling thread a context's owner. Whatever another thread then asks
of the context fails with ContextBusyError and changes nothing. Without an owner, every operation
is atomic: it runs under the cache's lock.
"""

import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llamay.errors import ContextBusyError
from llamay.formats import KVLayout
from llamay.kv.pages import Holder
from llamay.kv.store import PageStore
from llamay.mlx_kernels import ByteArray, Float32Array, KernelSet


class Context:
    """Tokens and the keys and values computed for them; made by a `Cache`.

    numerics: what made the keys and values; contexts continue each other's bits only if it is equal
    logits:   [vocab] float32 of the last position where they were kept (at the end of a turn), or
              None; forgotten when the length changes
    """

    def __init__(self, store: PageStore, lock: threading.RLock, numerics: str) -> None:
        self._store = store
        self._lock = lock
        self._page_ids: list[int] = []
        # Append-only and shared by forks: it may hold more than this context's own `length`.
        self._tokens = array("i")
        self._length = 0
        self._reserved_end = 0  # positions from `length` to here may be written
        self._owner: int | None = None
        self._holder = Holder.USER
        self.numerics = numerics
        self.logits: Float32Array | None = None
        store.contexts.add(self)

    def __del__(self) -> None:
        # Collection can happen anywhere, within the store's own bookkeeping too: only leave a note.
        if self._page_ids:
            self._store.orphans.append((self._page_ids, self._holder))

    @property
    def length(self) -> int:
        """Committed positions."""
        return self._length

    @property
    def tokens(self) -> Sequence[int]:
        """The committed tokens, a copy."""
        with self._lock:  # a commit may change both
            return self._tokens[: self._length]

    @property
    def page_ids(self) -> Sequence[int]:
        """Pages in position order; the last may reach beyond `length`."""
        return self._page_ids

    @property
    def layout(self) -> KVLayout:
        """Of its pages."""
        return self._store.layout

    @property
    def kernels(self) -> KernelSet:
        """What lays out its pages."""
        return self._store.kernels

    @property
    def own_pages(self) -> int:
        """Pages that nobody else holds."""
        return sum(self._store.ids.ref_count(page) == 1 for page in self._page_ids)

    @property
    def holder(self) -> Holder:
        """Who keeps it."""
        return self._holder

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Makes this thread the owner. Raises ContextBusyError if another thread is.

        Raises ValueError if it is parked.
        """
        with self._lock:
            self._refuse_others()
            self._refuse_parked()
            before, self._owner = self._owner, threading.get_ident()
        try:
            yield
        finally:
            self._owner = before

    def fork(self) -> "Context":
        """A context that continues from here; shares every page and copies none."""
        with self._lock:
            self._refuse_others()
            return self.forked(self._length)

    def reserve(self, count: int) -> None:
        """Makes positions [length, length + count) writable by this context alone.

        Copies at most one page: the one that `length` lies in, if another context holds it too.
        Raises BudgetError or MemoryError, with the context as it was, if pages cannot be had;
        ValueError if it is parked.
        """
        with self._lock:
            self._refuse_others()
            self._refuse_parked()
            page_tokens, had = self._store.layout.page_tokens, len(self._page_ids)
            self.check_room(count)
            try:
                while len(self._page_ids) * page_tokens < self._length + count:
                    self._page_ids.append(self._store.allocate())
                if count and self._length % page_tokens:
                    self._writable(self._length // page_tokens)
            except BaseException:
                self._release_from(had)
                raise
            finally:
                self._store.trim()
            self._reserved_end = max(self._reserved_end, self._length + count)

    def check_room(self, count: int) -> None:
        """Raises BudgetError if `reserve` would, for so many positions."""
        with self._lock:
            self._refuse_others()
            self._store.trim()  # with what was collected
            self._store.require(self._new_pages(count))

    def commit(self, tokens: Sequence[int]) -> None:
        """Publishes positions that a step has written: `tokens` are those after `length`.

        Raises ValueError if they were not reserved.
        """
        with self._lock:
            self._refuse_others()
            if not tokens:
                return
            if self._length + len(tokens) > self._reserved_end:
                raise ValueError(f"{len(tokens)} tokens committed without being reserved")
            if len(self._tokens) != self._length:  # another fork went on, or this was truncated
                self._tokens = self._tokens[: self._length]
            self._tokens.extend(tokens)
            self._length += len(tokens)
            self.logits = None

    def truncate(self, length: int) -> None:
        """Forgets positions from `length` on, and what was reserved; copies nothing.

        Raises ValueError if `length` is negative or beyond the end.
        """
        with self._lock:
            self._refuse_others()
            if not 0 <= length <= self._length:
                raise ValueError(f"cannot truncate a context of {self._length} tokens to {length}")
            self._release_from(-(-length // self._store.layout.page_tokens))
            self._reserved_end = length
            if length != self._length:
                self._length, self.logits = length, None
            self._store.trim()

    def close(self) -> None:
        """Releases every page; the context is then empty."""
        self.truncate(0)

    def export_rows(self, start: int, end: int, out: ByteArray | None = None) -> ByteArray:
        """Rows of positions [start, end), committed; for the owner and its helpers.

        Several threads at once if there are `row_threads`; see `KernelSet`.
        """
        assert self._owner is not None
        assert end <= self._length
        store = self._store
        return store.kernels.export_rows(store.slabs, self._page_ids, start, end, out)

    def import_rows(self, start: int, rows: ByteArray) -> None:
        """Writes positions from `start` on, reserved and not committed; otherwise the same."""
        assert self._owner is not None
        assert start >= self._length
        self._store.kernels.import_rows(self._store.slabs, self._page_ids, start, rows)

    def _refuse_others(self) -> None:
        if self._owner not in (None, threading.get_ident()):
            raise ContextBusyError("the context is in use by another thread; wait for its step")

    def forked(self, length: int, holder: Holder = Holder.USER) -> "Context":
        """A context of the first `length` positions."""
        child = Context(self._store, self._lock, self.numerics)
        child._page_ids = self._page_ids[: -(-length // self._store.layout.page_tokens)]
        child._holder = holder
        if self._holder is holder is Holder.USER:
            self._store.ids.retain_beside_user(child._page_ids)
        else:
            self._store.ids.retain(child._page_ids, holder)
        child._tokens, child._length = self._tokens, length
        if length == self._length:
            child.logits = self.logits
        return child

    def hold(self, holder: Holder) -> None:
        """Makes it one of another kind. Raises ContextBusyError if anybody owns it."""
        with self._lock:
            if self._owner is not None:
                raise ContextBusyError("the context is in use; wait for its step")
            self._store.ids.change(self._page_ids, self._holder, holder)
            self._holder = holder

    def drop(self) -> None:
        """`close` for a context that nobody works with; the tree is not trimmed."""
        self._release_from(0)
        self._length, self._reserved_end, self.logits = 0, 0, None

    def _refuse_parked(self) -> None:
        if self._holder is Holder.PARKED:
            raise ValueError("the context is parked; unpark it before it is used")

    def _new_pages(self, count: int) -> int:
        """How many pages `reserve` needs, at the least."""
        page_tokens = self._store.layout.page_tokens
        pages = max(0, -(-(self._length + count) // page_tokens) - len(self._page_ids))
        if not count or self._length % page_tokens == 0:
            return pages
        # Holders that are no users give the page up, if need be, rather than have it copied.
        return pages + (self._store.ids.user_count(self._page_ids[self._length // page_tokens]) > 1)

    def _release_from(self, index: int) -> None:
        """Releases pages [index, end), the last first, so that no page is listed twice."""
        while len(self._page_ids) > index:
            self._store.release(self._page_ids.pop(), self._holder)

    def _writable(self, index: int) -> None:
        """Makes page `index` this context's own: the only place where a page is copied."""
        page, ref_count = self._page_ids[index], self._store.ids.ref_count
        while ref_count(page) > 1 and self._store.full:
            self._store.make_room()  # which may leave the page to this context alone
        if ref_count(page) > 1:
            self._page_ids[index] = self._store.copy(page)
            self._store.release(page)
