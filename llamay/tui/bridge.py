"""The one bridge from a session's events to Textual's messages.

A session tells its events on a thread of its own, one for each token. The bridge gathers them and
posts one `SessionUpdate` to every follower, at most `UPDATES_PER_S` times a second, on the app's
thread. What a node has become is in the session's tree: an update only says where to look again.
"""

import asyncio
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

from textual.message import Message
from textual.message_pump import MessagePump

from llamay.events import (
    AnswerEnded,
    AnswerFailed,
    AnswerProgress,
    AnswerStarted,
    AnswerText,
    PlaceChanged,
    SessionEvent,
    TreeChanged,
)

if TYPE_CHECKING:
    from llamay.session import Session

UPDATES_PER_S = 30


@dataclass(slots=True)
class Running:
    """An answer on its way, as far as its events have told.

    memory, disk, prefill: tokens of its prompt taken from memory, from disk, and to be computed
    total, cached, done:   of the prompt being read, in tokens; `cached` are not computed
    seconds:               since reading began
    tokens:                written so far; `first_at`, `last_at`: when, on the monotonic clock
    """

    node: int
    memory: int = 0
    disk: int = 0
    prefill: int = 0
    total: int = 0
    cached: int = 0
    done: int = 0
    seconds: float = 0.0
    tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0

    @property
    def is_reading(self) -> bool:
        """Whether there is a prompt to read, and nothing written yet."""
        return self.tokens == 0 and self.total > 0

    @property
    def tokens_per_s(self) -> float | None:
        """How fast it is written; None before there are two tokens to measure."""
        elapsed = self.last_at - self.first_at
        return (self.tokens - 1) / elapsed if self.tokens > 1 and elapsed > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """How long reading will go on at the speed so far; None before there is one."""
        computed = self.done - self.cached
        return (self.total - self.done) * self.seconds / computed if computed > 0 else None


class SessionUpdate(Message):
    """What happened in the session since the last update.

    nodes:  whose text, state, label, settings or children are to be looked at again
    tree:   whether nodes came or went, or changed in more than their text
    place:  whether the next message continues from elsewhere
    events: those that happen once, in order: answers started, ended or failed; saved; resumed;
            notices
    """

    def __init__(
        self,
        nodes: frozenset[int] = frozenset(),
        tree: bool = False,
        place: bool = False,
        events: tuple[SessionEvent, ...] = (),
    ) -> None:
        super().__init__()
        self.nodes = nodes
        self.tree = tree
        self.place = place
        self.events = events


class Bridge:
    """Follows one session at a time, for any number of widgets; made on the app's thread."""

    def __init__(self) -> None:
        self.running: dict[int, Running] = {}
        self._loop = asyncio.get_running_loop()
        self._followers: WeakSet[MessagePump] = WeakSet()
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, SessionEvent]] = []
        self._session: Session | None = None
        self._last_flush = 0.0

    def follow(self, follower: MessagePump) -> None:
        """Posts every `SessionUpdate` from now on to `follower`, while it is there."""
        self._followers.add(follower)

    def attach(self, session: "Session") -> None:
        """Listens to `session`; what another one still tells is no longer heard."""
        self.running.clear()
        with self._lock:
            self._waiting.clear()
        self._session = session
        session.subscribe(lambda event: self._take(session, event))

    def _take(self, session: "Session", event: SessionEvent) -> None:
        """Notes an event; runs on the session's thread."""
        if session is not self._session:
            return
        with self._lock:
            self._waiting.append((time.monotonic(), event))
            first = len(self._waiting) == 1
        if first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        due = self._last_flush + 1 / UPDATES_PER_S
        self._loop.call_later(max(0.0, due - time.monotonic()), self._flush)

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if waiting:
            update = self._gather(waiting)
            for follower in list(self._followers):
                # A message keeps who has seen it, so each follower gets its own.
                follower.post_message(
                    SessionUpdate(update.nodes, update.tree, update.place, update.events)
                )

    def _gather(self, waiting: Iterable[tuple[float, SessionEvent]]) -> SessionUpdate:
        nodes: set[int] = set()
        once: list[SessionEvent] = []
        tree = place = False
        for at, event in waiting:
            match event:
                case TreeChanged():
                    nodes.update(event.nodes)
                    tree = True
                case PlaceChanged():
                    place = True
                case AnswerText() | AnswerProgress():
                    nodes.add(event.node)
                    self._note_running(event, at)
                case _:
                    once.append(event)
                    if isinstance(event, AnswerStarted | AnswerEnded | AnswerFailed):
                        nodes.add(event.node)
                        self._note_turning_point(event)
        return SessionUpdate(frozenset(nodes), tree, place, tuple(once))

    def _note_running(self, event: AnswerText | AnswerProgress, at: float) -> None:
        running = self.running.setdefault(event.node, Running(event.node))
        if isinstance(event, AnswerProgress):
            running.total, running.cached = event.total, event.cached
            running.done, running.seconds = event.done, event.seconds
            return
        if running.tokens == 0:
            running.first_at = at
        running.tokens += len(event.ids)
        running.last_at = at

    def _note_turning_point(self, event: AnswerStarted | AnswerEnded | AnswerFailed) -> None:
        if isinstance(event, AnswerStarted):
            running = self.running.setdefault(event.node, Running(event.node))
            running.memory, running.disk, running.prefill = event.memory, event.disk, event.prefill
        else:
            self.running.pop(event.node, None)
