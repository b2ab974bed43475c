"""Where the computed state of a session's turns is: in contexts, in segment files, or nowhere.

A context is kept for each visible leaf, and the answers under way have theirs; every other turn is
the beginning of one of these. Of a prompt whose reading was stopped, a context holds whole pages.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from llamay.engine import Branch, Counters, Engine
from llamay.errors import ContextBusyError
from llamay.kv import Context
from llamay.session.answers import Answers
from llamay.session.records import RUNNING, SegmentRef
from llamay.session.tree import Tree
from llamay.session.writing import Writer

Place: TypeAlias = Literal["memory", "disk", "none"]


@dataclass(frozen=True, slots=True)
class Where:
    """A turn's branch: its tokens, the pages that it alone holds and those it shares, and where
    its state is: all in memory, all in memory and on disk together, or to be computed in part."""

    tokens: int
    own_pages: int
    shared_pages: int
    place: Place


@dataclass(frozen=True, slots=True)
class PageCell:
    """Positions [start, end) of a branch, a page of them.

    holders: leaves whose branches hold the page; own: whether that is one only
    """

    start: int
    end: int
    holders: tuple[int, ...]
    own: bool
    where: Place


@dataclass(frozen=True, slots=True)
class Figures:
    """What the session's engine holds.

    budget_bytes: None if memory is not bounded
    pages:        of the session's branches, shared ones once; copy_pages: if nothing were shared
    tree_entries: of the prefix tree; tree_bytes: what only it keeps in memory
    """

    memory_bytes: int
    budget_bytes: int | None
    pages: int
    copy_pages: int
    tree_entries: int
    tree_bytes: int
    counters: Counters


@dataclass(frozen=True, slots=True)
class Saved:
    """What segment files hold of a branch: its first `end` tokens."""

    segments: tuple[SegmentRef, ...]
    end: int


def saved(tree: Tree, id: int, weights: str) -> Saved:
    """What the segments of the turns on a path hold, from its beginning to the first gap.

    weights: weights_sha256 of the model; what others computed does not count
    """
    files: list[SegmentRef] = []
    end = 0
    for node in map(tree.node, tree.path(id)[1:]):
        start = tree.start(node.id)
        while files and files[-1].start >= start:
            files.pop()
        end = min(end, start)
        if node.model != weights:
            continue
        for segment in node.segments:
            if segment.start <= end:
                files.append(segment)
                end = segment.end
    return Saved(tuple(files), end)


class States:
    """The contexts of a session's leaves and of its answers under way; for any thread.

    Everything here is guarded by the writer's lock.
    """

    def __init__(self, writer: Writer, engine: Engine, weights: str) -> None:
        self._writer = writer
        self._tree = writer.tree
        self._engine = engine
        self._weights = weights
        self._kept: dict[int, Branch] = {}
        self._under_way: dict[int, Answers] = {}
        self._paths: dict[int, tuple[int, ...]] = {}  # of turns, which never change
        self._counted: tuple[dict[int, Any], dict[int, list[int]]] = {}, {}

    # --- which contexts there are ---

    def begin(self, answers: Answers) -> None:
        """Answers are under way; their contexts are the engine's."""
        with self._writer.lock:
            for node in answers.nodes:
                self._under_way[node] = answers

    def answers(self, node: int) -> Answers | None:
        """The request that an answer is under way in."""
        with self._writer.lock:
            return self._under_way.get(node)

    def under_way(self) -> list[Answers]:
        """All requests under way, each once."""
        with self._writer.lock:
            return list(dict.fromkeys(self._under_way.values()))

    def end(self, answers: Answers, node: int) -> None:
        """An answer of a request has ended; its context is kept, unless it goes on by now."""
        with self._writer.lock:
            branch = _branch(answers, node)
            if self._under_way.get(node) is not answers:
                if branch:
                    branch.close()
                return
            del self._under_way[node]
            if branch:
                length = branch.length
                if length < self._tree.length(node):  # so that all of it is saved
                    length -= length % branch.context.layout.page_tokens
                # Gives back pages that were reserved for a step which never came.
                with suppress(ContextBusyError):
                    branch.context.truncate(length)
                self.keep(node, branch)

    def keep(self, node: int, branch: Branch) -> None:
        """Keeps the context of a leaf, in place of one that was kept."""
        with self._writer.lock:
            before, self._kept[node] = self._kept.get(node), branch
        if before and before is not branch:
            before.close()

    def keep_restored(self, node: int, branch: Branch) -> None:
        """Keeps the context of a leaf, unless it has got another meanwhile."""
        with self._writer.lock:
            if self.is_bare(node):
                self._kept[node] = branch
                return
        branch.close()

    def is_bare(self, node: int) -> bool:
        """Whether a turn has no context that is kept, and none under way or about to be."""
        with self._writer.lock:
            known = node in self._kept or node in self._under_way
            return not known and self._tree.node(node).state not in RUNNING

    def settle(self) -> list[int]:
        """Lets go of contexts whose turn is no visible leaf; returns leaves that have none."""
        with self._writer.lock:
            leaves = self._tree.leaves()
            gone = [self._kept.pop(id) for id in set(self._kept) - set(leaves)]
            bare = [id for id in leaves if self.is_bare(id)]
        for branch in gone:
            branch.close()
        return [id for id in bare if id]

    def close(self) -> None:
        """Lets go of all."""
        with self._writer.lock:
            kept, self._kept = self._kept, {}
        for branch in kept.values():
            branch.close()

    def park(self, node: int) -> None:
        """Says that a leaf's context may go when room is needed, if all of it is on disk."""
        with self._writer.lock:
            branch = self._kept.get(node)
            on_disk = branch and saved(self._tree, node, self._weights).end >= branch.length
        if branch and on_disk:
            with suppress(ContextBusyError):
                self._engine.cache.park(branch.context)

    # --- what they hold ---

    def source(self, node: int) -> Context | None:
        """The context that holds most of a turn's history; it may hold more than that."""
        with self._writer.lock:
            found = self._best(node)
        return found[1] if found else None

    def beginning(self, node: int) -> Context | None:
        """A fork of what a context of the session holds of a turn's history.

        May wait for the engine's step, so not for who holds the writer's lock.
        """

        def beginning() -> Context | None:
            with self._writer.lock:
                if (found := self._best(node)) is None:
                    return None
                common, context = found
                fork = context.fork()
            fork.truncate(min(common, fork.length))  # a parked one may have gone meanwhile
            return fork

        try:
            return beginning()
        except ContextBusyError:
            return self._engine.call(beginning)

    def where(self, id: int) -> Where:
        """See `Where`."""
        with self._writer.lock:
            tokens = self._tree.length(id)
            held, page_ids = self._held(id, tokens)
            holders = self._holders()
            on_disk = saved(self._tree, id, self._weights).end
        own = sum(len(holders.get(page, ())) == 1 for page in page_ids)
        return Where(tokens, own, len(page_ids) - own, _place(tokens, held, on_disk))

    def page_map(self, id: int) -> tuple[PageCell, ...]:
        """A cell for each page of a turn's branch, in order of positions."""
        with self._writer.lock:
            tokens = self._tree.length(id)
            held, page_ids = self._held(id, tokens)
            holders = self._holders()
            on_disk = saved(self._tree, id, self._weights).end
        cells = []
        size = self._engine.cache.store.layout.page_tokens
        for page, start in enumerate(range(0, tokens, size)):
            end = min(start + size, tokens)
            who = tuple(holders.get(page_ids[page], ())) if page < len(page_ids) else ()
            cells.append(PageCell(start, end, who, len(who) == 1, _place(end, held, on_disk)))
        return tuple(cells)

    def figures(self) -> Figures:
        """See `Figures`."""
        cache = self._engine.cache
        store = cache.store
        with self._writer.lock:
            contexts = self._contexts()
        page_ids = [list(context.page_ids) for context in contexts.values()]
        return Figures(
            memory_bytes=cache.live_pages * store.page_bytes,
            budget_bytes=None if store.max_pages is None else store.max_pages * store.page_bytes,
            pages=len({page for pages in page_ids for page in pages}),
            copy_pages=sum(map(len, page_ids)),
            tree_entries=cache.retained,
            tree_bytes=cache.tree_bytes,
            counters=self._engine.counters,
        )

    def _contexts(self) -> dict[int, Context]:
        """Those that the session's visible leaves have now."""
        contexts = {id: branch.context for id, branch in self._kept.items()}
        for node, answers in self._under_way.items():
            if branch := _branch(answers, node):
                contexts[node] = branch.context
        return contexts

    def _held(self, id: int, tokens: int) -> tuple[int, Sequence[int]]:
        """How many of a turn's tokens are in memory, and in which pages."""
        found = self._best(id)
        if found is None:
            return 0, ()
        held, context = found
        size = self._engine.cache.store.layout.page_tokens
        held = min(held, tokens)
        return held, list(context.page_ids)[: -(-held // size)]

    def _holders(self) -> dict[int, list[int]]:
        """The leaves that hold each page; counted anew when a context has another last page.

        The engine goes on meanwhile: it may have given up a page that a context had just now.
        """
        pages = {node: list(context.page_ids) for node, context in self._contexts().items()}
        ends = {node: (len(ids), ids[-1:]) for node, ids in pages.items()}
        if ends != self._counted[0]:
            holders: dict[int, list[int]] = {}
            for node, ids in pages.items():
                for page in ids:
                    holders.setdefault(page, []).append(node)
            self._counted = ends, holders
        return self._counted[1]

    def _path(self, id: int) -> tuple[int, ...]:
        if id not in self._paths:
            self._paths[id] = tuple(self._tree.path(id))
        return self._paths[id]

    def _best(self, id: int) -> tuple[int, Context] | None:
        """The context with most of a turn's tokens at its beginning, and how many these are."""
        path, tokens = self._path(id), self._tree.length(id)
        contexts = self._contexts()
        for node, context in contexts.items():  # most turns are the beginning of some branch
            other = self._path(node)
            begins = other[len(path) - 1 : len(path)] == (id,) and context.length >= tokens > 0
            if begins and self._common(path, other) >= tokens:
                return tokens, context
        best: tuple[int, Context] | None = None
        for node, context in contexts.items():
            common = min(self._common(path, self._path(node)), context.length)
            if common and (best is None or common > best[0]):
                best = common, context
        return best

    def _common(self, path: Sequence[int], other: Sequence[int]) -> int:
        """How many tokens two branches share, by the turns they share."""
        turns = sum(1 for a, b in zip(path, other, strict=False) if a == b)
        ends = [self._tree.length(path[turns - 1])]
        ends += [self._tree.start(node) for branch in (path, other) for node in branch[turns:]]
        return min(ends)


def _branch(answers: Answers, node: int) -> Branch | None:
    """What an answer has by now; of a prompt that is read, what is read of it."""
    generation = answers.generation
    if generation and generation.branches:
        return generation.branches[answers.nodes.index(node)]
    return generation.reading if generation else None


def _place(tokens: int, held: int, on_disk: int) -> Place:
    if tokens <= held:
        return "memory" if tokens else "none"
    return "disk" if tokens <= max(held, on_disk) else "none"
