"""The reference for `llamay.kv`: contexts that share nothing, and a flat list for the prefix tree.

It is slow and does nothing clever. Every context has its own copy of all tokens and values. Beside
them stand the identities of the pages that a sharing cache would hold, from which the figures
follow by counting: live pages, ref counts, bytes that only the tree keeps, copies, evictions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace


class OutOfBudgetError(Exception):
    """No page is left, and nothing retained to give up."""


@dataclass(eq=False)
class ModelContext:
    """pages: an identity each, in position order; reserved ones may follow those of `tokens`."""

    numerics: str
    tokens: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    pages: list[object] = field(default_factory=list)
    logits: int | None = None


class ReferenceModel:
    """The operations of a `Cache` and its contexts."""

    def __init__(
        self, page_tokens: int, tree_pages: int, budget_pages: int | None, numerics: str
    ) -> None:
        """numerics: of the contexts that are retained and matched."""
        self.page_tokens = page_tokens
        self.tree_pages = tree_pages
        self.budget_pages = budget_pages
        self.numerics = numerics
        self.contexts: list[ModelContext] = []
        self.retained: list[ModelContext] = []  # the least recently used first
        self.parked: list[ModelContext] = []  # the least recently parked first
        self.copies = 0

    # Figures.

    def ref_count(self, page: object) -> int:
        """How many contexts hold a page, those of the tree among them."""
        return sum(page in context.pages for context in self.contexts + self.retained)

    @property
    def live_pages(self) -> int:
        """Pages that something holds."""
        return len({page for context in self.contexts + self.retained for page in context.pages})

    @property
    def tree_only_pages(self) -> int:
        """Pages that only the tree holds."""
        worked_with = {page for context in self.contexts for page in context.pages}
        return len({p for context in self.retained for p in context.pages} - worked_with)

    @property
    def idle_only_pages(self) -> int:
        """Pages that nobody works with."""
        worked_with = {p for c in self.contexts if c not in self.parked for p in c.pages}
        return len({p for c in self.contexts + self.retained for p in c.pages} - worked_with)

    def user_count(self, page: object) -> int:
        """How many contexts that somebody works with hold a page."""
        return sum(page in c.pages for c in self.contexts if c not in self.parked)

    # Contexts.

    def new(self, numerics: str) -> ModelContext:
        """An empty context."""
        context = ModelContext(numerics)
        self.contexts.append(context)
        return context

    def fork(self, context: ModelContext) -> ModelContext:
        """A copy of everything that is committed."""
        copy = self._copy(context, len(context.tokens))
        self.contexts.append(copy)
        return copy

    def reserve(self, context: ModelContext, count: int) -> None:
        """Pages for `count` more positions; a shared page that the first lies in is copied."""
        length = len(context.tokens)
        new = max(0, self._pages_of(length + count) - len(context.pages))
        in_use = count > 0 and length % self.page_tokens > 0
        if in_use:
            in_use = self.user_count(context.pages[length // self.page_tokens]) > 1
        if new + in_use > self._room:
            raise OutOfBudgetError
        for _ in range(new):
            self._make_room(lambda: self._full)
            context.pages.append(object())
        if count and length % self.page_tokens:
            self._own_page(context, length // self.page_tokens)
        self._bound_tree()

    def commit(self, context: ModelContext, tokens: Sequence[int], values: Sequence[int]) -> None:
        """Appends positions."""
        if tokens:
            context.logits = None
        context.tokens += tokens
        context.values += values

    def truncate(self, context: ModelContext, length: int) -> None:
        """Forgets positions and reserved pages."""
        if length != len(context.tokens):
            context.logits = None
        del context.tokens[length:], context.values[length:]
        del context.pages[self._pages_of(length) :]
        self._bound_tree()

    def forget(self, context: ModelContext) -> None:
        """A context was closed or collected."""
        self.contexts.remove(context)
        self.unpark(context)
        self._bound_tree()

    def copy_of(self, context: ModelContext) -> ModelContext:
        """A copy that nobody holds, as a file would have it."""
        return replace(self._copy(context, len(context.tokens)), pages=[])

    def restore(self, saved: ModelContext, numerics: str) -> ModelContext:
        """A context like the saved one, in pages of its own."""
        pages = self._pages_of(len(saved.tokens))
        if pages > self._room:
            raise OutOfBudgetError
        context = self.new(numerics)
        self.reserve(context, len(saved.tokens))
        self.commit(context, saved.tokens, saved.values)
        context.logits = saved.logits
        return context

    def park(self, context: ModelContext) -> None:
        """From now on it may be closed when room is needed."""
        self.unpark(context)
        self.parked.append(context)

    def unpark(self, context: ModelContext) -> None:
        """The reverse; what was closed is empty."""
        if context in self.parked:
            self.parked.remove(context)

    # The tree.

    def match(self, tokens: Sequence[int]) -> ModelContext:
        """A fork of what is retained that begins like `tokens` for longest."""
        entry, length = self._longest(tokens)
        if entry is None:
            return self.new(self.numerics)
        self._touch(entry)
        found = self._copy(entry, length)
        self.contexts.append(found)
        return found

    def retain(self, context: ModelContext) -> None:
        """Keeps a copy, unless one that is retained begins with all of it."""
        if not context.tokens or context.numerics != self.numerics:
            return
        entry, length = self._longest(context.tokens)
        if entry is not None and length == len(context.tokens):
            self._touch(entry)
            if length == len(entry.tokens) and context.logits is not None:
                entry.logits = context.logits
            return
        self.retained = [
            entry for entry in self.retained if entry.tokens != context.tokens[: len(entry.tokens)]
        ]
        self.retained.append(self._copy(context, len(context.tokens)))
        self._bound_tree()

    def clear_tree(self) -> None:
        """Forgets everything retained."""
        self.retained = []

    # Helpers.

    def _longest(self, tokens: Sequence[int]) -> tuple[ModelContext | None, int]:
        """Of those that begin like `tokens` for longest, the one whose tokens sort first."""
        best: ModelContext | None = None
        longest = 0
        for entry in sorted(self.retained, key=lambda entry: entry.tokens):
            length = common_length(entry.tokens, tokens)
            if length > longest:
                best, longest = entry, length
        return best, longest

    def _touch(self, entry: ModelContext) -> None:
        self.retained.remove(entry)
        self.retained.append(entry)

    def _copy(self, context: ModelContext, length: int) -> ModelContext:
        return replace(
            context,
            tokens=context.tokens[:length],
            values=context.values[:length],
            pages=context.pages[: self._pages_of(length)],
            logits=context.logits if length == len(context.tokens) else None,
        )

    def _pages_of(self, length: int) -> int:
        return (length + self.page_tokens - 1) // self.page_tokens

    def _own_page(self, context: ModelContext, index: int) -> None:
        page = context.pages[index]
        self._make_room(lambda: self._full and self.ref_count(page) > 1)
        if self.ref_count(page) > 1:
            context.pages[index] = object()
            self.copies += 1

    @property
    def _full(self) -> bool:
        return self.budget_pages is not None and self.live_pages >= self.budget_pages

    @property
    def _room(self) -> float:
        """Pages that can be had."""
        if self.budget_pages is None:
            return math.inf
        return self.budget_pages - self.live_pages + self.idle_only_pages

    def _make_room(self, needed: Callable[[], bool]) -> None:
        """Closes what is parked, then forgets what is retained, while room is needed."""
        while needed():
            if self.parked:
                closed = self.parked.pop(0)
                closed.tokens, closed.values, closed.pages, closed.logits = [], [], [], None
            else:
                del self.retained[0]

    def _bound_tree(self) -> None:
        while self.tree_only_pages > self.tree_pages:
            del self.retained[0]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length
