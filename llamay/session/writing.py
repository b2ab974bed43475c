"""The way of a tree's changes: into the tree, into the journal, and then to whoever listens.

A user's change is applied at once, on the caller's thread; what the engine tells is applied when it
is written. Both are written and told by one thread, in the order in which they came, and nothing is
told before it is written. The two kinds commute, so the journal, replayed, gives the same tree.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from llamay.errors import SessionError
from llamay.events import Notice, SessionEvent
from llamay.session.folder import SessionFolder
from llamay.session.records import Record
from llamay.session.tree import Tree

RETRY_S = 1.0  # after which records that could not be written are tried again

Listener: TypeAlias = Callable[[SessionEvent], object]


@dataclass(frozen=True, slots=True)
class Told:
    """Something that happened.

    records: of the tree, in order; events: for listeners, after the records are written
    applied: whether the tree has the records already
    then:    called last, on the writer's thread
    """

    records: Sequence[Record] = ()
    events: Sequence[SessionEvent] = ()
    applied: bool = False
    then: Callable[[], object] | None = None


class Writer:
    """A tree that is being changed. Usable from any thread.

    lock: guards the tree; held for moments only
    """

    def __init__(self, tree: Tree, folder: SessionFolder | None) -> None:
        """folder: where the journal is; None writes nothing"""
        self.tree = tree
        self.lock = threading.RLock()
        self.written = 0  # records since session.json was
        self._folder = folder
        self._queue: queue.SimpleQueue[Callable[[], Told | None] | None] = queue.SimpleQueue()
        self._listeners: list[Listener] = []
        self._early: list[SessionEvent] | None = []  # told before anybody listened
        self._unwritten: list[Record] = []
        self._retry_at = 0.0
        self._checkpoints: list[Future[None]] = []  # asked for
        self._thread = threading.Thread(target=self._run, name="llamay-journal", daemon=True)
        self._thread.start()

    def subscribe(self, listener: Listener) -> None:
        """Has `listener` called with every event; the first one hears what was told before it."""

        def add() -> None:
            self._listeners.append(listener)
            early, self._early = self._early or [], None
            for event in early:
                self._call(listener, event)

        self.later(lambda: Told(then=add))

    def change(self, *records: Record, events: Sequence[SessionEvent] = ()) -> tuple[int, ...]:
        """Applies changes and has them written and told. Returns the nodes that they touched.

        Raises SessionError for the first record that does not fit; those before it stay.
        """
        nodes: list[int] = []
        with self.lock:
            for record in records:
                nodes += self.tree.apply(record)
            told = Told(records, events, applied=True)
            self._queue.put(lambda: told)
        return tuple(nodes)

    def later(self, make: Callable[[], Told | None]) -> None:
        """Has the writer's thread call `make`, and then write, apply and tell what it returns."""
        self._queue.put(make)

    def tell(self, *events: SessionEvent) -> None:
        """Tells what changes nothing."""
        self.later(lambda: Told(events=events))

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all that came before is written, if it can be, and told; False if late."""
        done = threading.Event()
        self.later(lambda: Told(then=done.set))
        return done.wait(timeout)

    def checkpoint(self) -> "Future[None]":
        """Has session.json written; the result raises SessionError if it cannot be."""
        future: Future[None] = Future()
        self.later(lambda: Told(then=lambda: self._checkpoints.append(future)))
        return future

    def close(self) -> list[Record]:
        """Ends the thread after all that came before. Returns records that could not be written."""
        self._queue.put(None)
        self._thread.join()
        return self._unwritten

    def _run(self) -> None:
        while True:
            batch = self._take()
            ends = None in batch
            if ends:
                self._retry_at = 0.0
            self._tell(self._store([make for make in batch if make]))
            while self._checkpoints:
                self._checkpoint(self._checkpoints.pop())
            if ends:
                return

    def _take(self) -> list[Callable[[], Told | None] | None]:
        """All that waits; waits for something, but not for long if there is something unwritten."""
        with suppress(queue.Empty):
            first = self._queue.get(timeout=RETRY_S if self._unwritten else None)
            return [first, *self._take_waiting()]
        return []

    def _store(self, batch: Sequence[Callable[[], Told | None]]) -> list[Told]:
        told = [entry for make in batch if (entry := make())]
        trouble = self._write([record for entry in told for record in entry.records])
        with self.lock:
            for entry in told:
                for record in () if entry.applied else entry.records:
                    self.tree.apply(record)
        return [*told, *trouble]

    def _write(self, records: Sequence[Record]) -> list[Told]:
        """Writes, with what could not be written before; what the user should know of it."""
        failed_before = bool(self._unwritten)
        self._unwritten += records
        due = not failed_before or time.monotonic() >= self._retry_at
        if self._folder is None or not self._unwritten or not due:
            return []
        try:
            self._folder.append(self._unwritten)
        except SessionError as error:
            self._retry_at = time.monotonic() + RETRY_S
            sentence = f"{error}; the session goes on in memory, and saving is tried again"
            return [] if failed_before else [Told(events=[Notice(sentence, "error")])]
        self.written += len(self._unwritten)
        self._unwritten.clear()
        if not failed_before:
            return []
        return [Told(events=[Notice("everything is saved again", "info")])]

    def _checkpoint(self, future: "Future[None]") -> None:
        told: list[Told] = []
        try:
            with self.lock:  # so that the tree is that of the records written
                waiting = self._take_waiting()
                if None in waiting:  # the end comes after this
                    self._queue.put(None)
                told = self._store([make for make in waiting if make])
                if self._unwritten:
                    raise SessionError("the session's folder cannot be written; see its notices")
                checkpoint = self._folder.encode(self.tree) if self._folder else None
            if checkpoint and self._folder:
                self._folder.write(checkpoint)
                self.written = 0
            future.set_result(None)
        except SessionError as error:
            future.set_exception(error)
        self._tell(told)

    def _take_waiting(self) -> list[Callable[[], Told | None] | None]:
        batch = []
        with suppress(queue.Empty):
            while True:
                batch.append(self._queue.get_nowait())
        return batch

    def _tell(self, told: Sequence[Told]) -> None:
        for entry in told:
            for event in entry.events:
                if self._early is not None:
                    self._early.append(event)
                for listener in list(self._listeners):
                    self._call(listener, event)
            if entry.then:
                entry.then()

    def _call(self, listener: Listener, event: SessionEvent) -> None:
        """One that fails is not called again; the others are."""
        try:
            listener(event)
        except Exception:
            with suppress(ValueError):
                self._listeners.remove(listener)
            kind, value, trace = sys.exc_info()
            if kind:
                threading.excepthook(threading.ExceptHookArgs((kind, value, trace, self._thread)))
