"""A session in memory with scripted answers: what the screens are tested against.

It has the methods and events of `llamay.session.Session`, and its tree. A word of an answer is a
token; a page is 64 of them. Answers come from a thread of their own, as fast as `delay_s` says, and
wait at `gate` while it is cleared. Events reach listeners on one thread, after the tree changed.
"""

import itertools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from llamay.events import (
    AnswerEnded,
    AnswerFailed,
    AnswerProgress,
    AnswerStarted,
    AnswerText,
    FinishReason,
    Notice,
    PlaceChanged,
    SessionEvent,
    TreeChanged,
)
from llamay.session.records import (
    AddNode,
    AppendIds,
    Delete,
    Edit,
    NodeState,
    Record,
    Redo,
    SetLabel,
    SetPlace,
    SetSettings,
    SetState,
    Settings,
    Undo,
)
from llamay.session.tree import Node, Tree

PAGE = 64
ANSWER = "A **unique** index on `email`, because every lookup goes by it."
RUNNING = ("queued", "reading", "writing")


@dataclass(frozen=True)
class Where:
    tokens: int
    own_pages: int
    shared_pages: int
    place: str


@dataclass(frozen=True)
class PageCell:
    start: int
    end: int
    holders: tuple[int, ...]
    own: bool
    where: str


@dataclass(frozen=True)
class Counters:
    prefilled_tokens: int = 0
    matched_tokens: int = 0
    restored_tokens: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Figures:
    memory_bytes: int
    budget_bytes: int
    pages: int
    copy_pages: int
    tree_entries: int
    tree_bytes: int
    counters: Counters


@dataclass(frozen=True)
class Goodbye:
    branches: int
    pages: int
    bytes_written: int
    seconds: float
    command: str


class FakeSession:
    def __init__(self, name: str = "migration-review", system: str = "", delay_s: float = 0.0):
        self.name = name
        self.tree = Tree(Settings(system=system or None))
        self.read_only: str | None = None
        self.script: Callable[[Node], str] = lambda node: ANSWER
        self.fails: str | None = None
        self.delay_s = delay_s
        self.prefill = 0  # tokens, in steps of PAGE
        self.gate = threading.Event()
        self.gate.set()
        self.looked_at: list[int] = []
        self.calls: list[tuple[object, ...]] = []
        self.closed = False
        self.listeners: list[Callable[[SessionEvent], None]] = []
        self._events: queue.SimpleQueue[SessionEvent | None] = queue.SimpleQueue()
        self._vocabulary: dict[str, int] = {}
        self._stopping: set[int] = set()
        self._lock = threading.RLock()
        self._journal = threading.Thread(target=self._tell, daemon=True)
        self._journal.start()

    @property
    def place(self) -> int:
        return self.tree.place

    # events

    def subscribe(self, listener: Callable[[SessionEvent], None]) -> None:
        self.listeners.append(listener)

    def emit(self, event: SessionEvent) -> None:
        self._events.put(event)

    def notice(self, message: str, level: str = "info") -> None:
        self.emit(Notice(message, level))  # type: ignore[arg-type]

    def _tell(self) -> None:
        while (event := self._events.get()) is not None:
            for listener in self.listeners:
                listener(event)

    @property
    def all_told(self) -> bool:
        return self._events.empty()

    def _apply(self, record: Record) -> tuple[int, ...]:
        with self._lock:
            changed = self.tree.apply(record)
        if changed and not isinstance(record, AppendIds):
            self.emit(TreeChanged(changed))
        return changed

    # turns

    def go(self, node: int) -> None:
        self._apply(SetPlace(node))
        self.emit(PlaceChanged(node))

    def send(self, text: str, at: int | None = None, n: int = 1) -> tuple[int, list[int]]:
        self.calls.append(("send", text, at, n))
        with self._lock:
            user = self.tree.next_id
            ids = list(range(len(text.split()) + 4))
            parent = self.place if at is None else at
            ask = AddNode(user, parent, "user", text, tuple(ids), created=time.time())
            answers, added = self._answers(user, n)
            self._apply(Edit((ask, *answers, SetPlace(added[0]))))
        self.emit(PlaceChanged(self.place))
        self._start(added)
        return user, added

    def send_to(self, nodes: Sequence[int], text: str) -> list[int]:
        self.calls.append(("send_to", tuple(nodes), text))
        added: list[int] = []
        changes: list[Record] = []
        with self._lock:
            first = self.tree.next_id
            for index, node in enumerate(nodes):
                user = first + 2 * index
                changes.append(AddNode(user, node, "user", text, (1, 2, 3), created=time.time()))
                changes += self._answers(user, 1)[0]
                added.append(user + 1)
            self._apply(Edit(tuple(changes)))
        self._start(added)
        return added

    def edit(self, user_id: int, text: str, n: int = 1) -> tuple[int, list[int]]:
        self.calls.append(("edit", user_id, text, n))
        return self.send(text, self.tree.node(user_id).parent, n)

    def regenerate(self, id: int, n: int = 1) -> list[int]:
        self.calls.append(("regenerate", id, n))
        node = self.tree.node(id)
        user = node.id if node.role == "user" else node.parent
        with self._lock:
            answers, added = self._answers(user, n)
            self._apply(Edit((*answers, SetPlace(added[0]))))
        self.emit(PlaceChanged(self.place))
        self._start(added)
        return added

    def sample(self, id: int, n: int) -> list[int]:
        self.calls.append(("sample", id, n))
        return self.regenerate(id, n)

    def _answers(self, user: int, n: int) -> tuple[list[AddNode], list[int]]:
        known = user in self.tree.nodes
        first = max(self.tree.next_id, user + 1)
        index = self.tree.next_seed_index(user) if known else 0
        answers = [
            AddNode(
                first + i,
                user,
                "assistant",
                seed_index=index + i,
                seed=7 + index + i,
                state="queued",
                created=time.time(),
            )
            for i in range(n)
        ]
        return answers, [answer.id for answer in answers]

    def resume(self, answer_id: int) -> None:
        self.calls.append(("resume", answer_id))
        self._apply(SetState(answer_id, "queued"))
        self._start([answer_id])

    def stop(self, answer_id: int | None = None) -> None:
        self.calls.append(("stop", answer_id))
        with self._lock:
            for node in self.tree.nodes.values():
                if node.state in RUNNING and answer_id in (None, node.id):
                    self._stopping.add(node.id)
        self.gate.set()

    def look_at(self, nodes: Iterable[int]) -> None:
        self.looked_at = list(nodes)

    def pieces(self, id: int) -> list[str]:
        return re.findall(r"\s*\S+\s?|\s+", self.tree.node(id).text)

    def alternatives(self, id: int, index: int, n: int = 4) -> list[tuple[str, float]]:
        self.calls.append(("alternatives", id, index))
        return [(self.pieces(id)[index], -0.5), (" scale", -2.0), (" rate", -3.0)]

    # edits

    def label(self, id: int, text: str) -> None:
        self._apply(SetLabel(id, text or None))

    def set_settings(self, id: int, settings: Settings) -> None:
        self._apply(SetSettings(id, settings))

    def delete(self, id: int) -> None:
        self.calls.append(("delete", id))
        self._apply(Delete(id))

    def undo(self) -> str:
        phrase = f"undid: {self.tree.undo_phrase}"
        self._apply(Undo())
        self.emit(PlaceChanged(self.place))
        return phrase

    def redo(self) -> str:
        phrase = f"did again: {self.tree.redo_phrase}"
        self._apply(Redo())
        self.emit(PlaceChanged(self.place))
        return phrase

    def duplicate(self, id: int, name: str | None = None) -> str:
        self.calls.append(("duplicate", id, name))
        return name or f"{self.name}-2"

    # figures

    def where(self, id: int) -> Where:
        tokens = self.tree.length(id)
        pages = -(-tokens // PAGE)
        return Where(tokens, min(1, pages), max(0, pages - 1), "memory")

    def page_map(self, id: int) -> tuple[PageCell, ...]:
        tokens = self.tree.length(id)
        return tuple(
            PageCell(start, min(start + PAGE, tokens), (id,), True, "memory")
            for start in range(0, tokens, PAGE)
        )

    def figures(self) -> Figures:
        return Figures(1_181_116_006, 8 << 30, 35, 96, 12, 210 << 20, Counters())

    def save(self, wait: bool = True) -> None:
        self.calls.append(("save", wait))

    def close(self) -> Goodbye:
        self.stop()
        self.closed = True
        self._events.put(None)
        command = f"llamay --session {self.name}"
        return Goodbye(len(self.tree.leaves()), 35, 4_299_161, 0.048, command)

    # the engine's part

    def _start(self, answers: list[int]) -> None:
        threading.Thread(target=self._write, args=(answers,), daemon=True).start()

    def _write(self, ids: list[int]) -> None:
        if not self._wait_for_turn(ids):
            return
        started = time.monotonic()
        history = self.tree.length(ids[0])
        for id in ids:
            self._apply(SetState(id, "reading"))
            self.emit(AnswerStarted(id, history, 0, self.prefill))
        for done in range(0, self.prefill, PAGE):
            self._pause()
            progress = (history + self.prefill, history, history + done)
            self.emit(AnswerProgress(ids[0], *progress, time.monotonic() - started))
        for id in ids:
            self._apply(SetState(id, "writing"))
        nodes = [self.tree.node(id) for id in ids]
        pieces = [_words(self.script(node), node.text) for node in nodes]
        for step in itertools.zip_longest(*pieces):
            for node, piece in zip(nodes, step, strict=True):
                self._step(node, piece, started)
            self._pause()
        for node in nodes:
            if node.state == "writing":
                stopped = node.id in self._stopping
                self._end(node.id, "cancelled" if stopped else "stop", started)

    def _step(self, node: Node, piece: str | None, started: float) -> None:
        if node.state != "writing":
            return
        if node.id in self._stopping:
            self._end(node.id, "cancelled", started)
        elif self.fails:
            self._apply(SetState(node.id, "failed", error=self.fails))
            self.emit(AnswerFailed(node.id, self.fails))
        elif piece is not None:
            word = self._vocabulary.setdefault(piece, 100 + len(self._vocabulary))
            self._apply(AppendIds(node.id, len(node.ids), (word,), (-0.5,), piece))
            self.emit(AnswerText(node.id, (word,), (-0.5,), piece))

    def _end(self, id: int, reason: FinishReason, started: float) -> None:
        state: NodeState = "stopped" if reason == "cancelled" else "done"
        seconds = time.monotonic() - started
        self._apply(SetState(id, state, reason, seconds=seconds))
        self._stopping.discard(id)
        self.emit(AnswerEnded(id, reason, len(self.tree.node(id).ids), seconds))

    def _wait_for_turn(self, ids: list[int]) -> bool:
        """Waits for the answer that these continue; False if they were stopped before it ended."""
        nodes = self.tree.nodes
        while any(nodes[before].state in RUNNING for before in self.tree.path(ids[0])[:-1]):
            time.sleep(0.002)
            if any(id in self._stopping for id in ids):
                for id in ids:
                    self._end(id, "cancelled", time.monotonic())
                return False
        return True

    def _pause(self) -> None:
        self.gate.wait()
        if self.delay_s:
            time.sleep(self.delay_s)


def _words(text: str, written: str) -> list[str]:
    """The pieces that remain of `text` after `written`; each is a word and the space after it."""
    rest = text[len(written) :] if text.startswith(written) else text
    return re.findall(r"\s*\S+\s?|\s+", rest)
