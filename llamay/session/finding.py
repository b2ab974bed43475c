"""Finds the computed state of a history: in memory, else in segment files."""

from collections.abc import Sequence
from dataclasses import dataclass

from llamay.engine import Branch, Engine
from llamay.errors import BudgetError, SnapshotError
from llamay.events import Notice
from llamay.kv import Context
from llamay.session.folder import SessionFolder
from llamay.session.records import SetSegments
from llamay.session.states import States, saved
from llamay.session.writing import Writer


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of a history; memory, disk: tokens found there."""

    branch: Branch
    memory: int
    disk: int


class Finder:
    """Finds state for one session; for one thread at a time."""

    def __init__(
        self, writer: Writer, states: States, engine: Engine, folder: SessionFolder, weights: str
    ) -> None:
        """weights: weights_sha256 of the engine's model"""
        self._writer = writer
        self._tree = writer.tree
        self._states = states
        self._engine = engine
        self._folder = folder
        self._weights = weights
        self._warned: set[str] = set()

    def find(self, id: int, history: Sequence[int], *, gentle: bool = False) -> Found:
        """Finds a turn's history in memory and on disk.

        gentle: reads nothing for which something else would have to go
        """
        context = self._in_memory(id, history)
        memory = context.length
        while True:
            with self._writer.lock:
                on_disk = saved(self._tree, id, self._weights)
            end = min(on_disk.end, len(history))  # the turn may have got more meanwhile
            if end <= context.length or (gentle and not self._fits(end - memory)):
                break
            refs = [ref for ref in on_disk.segments if ref.start < end]
            paths = [self._folder.segments.path(ref.name) for ref in refs]
            try:
                extended = self._engine.extend(context, paths, history[:end], key=self._folder.key)
            except BudgetError:
                break  # the engine gives the figures if there is no other way
            except SnapshotError as error:
                if not self._drop_damaged(id, error):
                    break
                continue
            if extended.warning:
                self.warn(extended.warning)
            self._engine.cache.retain(context)
            break
        return Found(self._engine.branch(context), memory, context.length - memory)

    def _in_memory(self, id: int, history: Sequence[int]) -> Context:
        """What any context holds of a history; one that others' numerics made if it holds more."""
        beginning = self._states.beginning(id)
        if beginning is None:
            return self._engine.cache.match(history)
        self._engine.cache.retain(beginning)
        context = self._engine.cache.match(history)
        if beginning.length <= context.length:
            beginning.close()
            return context
        context.close()
        beginning.truncate(min(beginning.length, len(history)))
        return beginning

    def _fits(self, tokens: int) -> bool:
        free, _ = self._engine.cache.room()
        needed = -(-tokens // self._engine.cache.store.layout.page_tokens) + 1
        return free is None or needed <= free

    def _drop_damaged(self, id: int, error: SnapshotError) -> bool:
        """Forgets the segment that an error names; False if it names none of the turn's."""
        with self._writer.lock:
            for node in map(self._tree.node, self._tree.path(id)):
                for ref in node.segments:
                    if str(error).startswith(f"{self._folder.segments.path(ref.name)}: "):
                        rest = tuple(other for other in node.segments if other is not ref)
                        tokens = ref.end - ref.start
                        notice = f"{error}; the text is whole, {tokens:,} tokens are read again"
                        self._writer.change(
                            SetSegments(node.id, rest), events=[Notice(notice, "warning")]
                        )
                        return True
        self.warn(str(error))
        return False

    def warn(self, sentence: str) -> None:
        """Tells the user something, once."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._writer.tell(Notice(sentence, "warning"))
