"""Writes computed state to segment files, on a thread of its own that nobody waits for."""

import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from llamay.engine import Engine
from llamay.errors import EngineStoppedError, LlamayError, SessionError
from llamay.events import Notice, Saved
from llamay.kv import Context
from llamay.kv.snapshot import write_segment
from llamay.kv.snapshot.files import to_disk
from llamay.session.folder import SessionFolder
from llamay.session.loading import journal_bases, journal_name
from llamay.session.records import RUNNING, SegmentRef, SetSegments
from llamay.session.segments import plan_merges
from llamay.session.states import States
from llamay.session.writing import Writer

IDLE_S = 2.0  # after which small segments are merged
RETRY_S = 5.0  # after which what could not be written is tried again
RECORDS_PER_CHECKPOINT = 20_000
BYTES_PER_S = 100e6  # of a disk, before one was measured
PIECE_BYTES = 32 * 2**20  # of a file, so that closing need not wait long for one


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions [start, end) of a turn that no segment has; parent: the segment before."""

    node: int
    start: int
    end: int
    parent: str


class Saver:
    """Saves turns: all of those that have ended, whole pages of those that are being read or
    written."""

    def __init__(
        self, writer: Writer, states: States, engine: Engine, folder: SessionFolder, weights: str
    ) -> None:
        self._writer = writer
        self._states = states
        self._engine = engine
        self._folder = folder
        self._weights = weights
        self._identity = engine.model.identity()
        layout = engine.cache.store.layout
        self._page_tokens, self._row_bytes = layout.page_tokens, layout.row_bytes
        self._wake = threading.Condition()
        self._waiting: dict[int, None] = {}  # turns to save, the first first
        self._busy = False
        self._merged = True
        self._deadline: float | None = None  # set when the session closes
        self._bytes_per_s = BYTES_PER_S
        self._trouble: str | None = None
        self._retry_at = 0.0
        self.bytes_written = 0
        self._thread = threading.Thread(target=self._run, name="llamay-saver", daemon=True)
        self._thread.start()

    def save(self, node: int) -> None:
        """Has a turn, and those before it, saved soon."""
        with self._wake:
            self._waiting.setdefault(node)
            self._merged = False
            self._wake.notify_all()

    def flush(self) -> None:
        """Waits until everything that was asked for is saved or failed."""
        with self._wake:
            self._retry_at = 0.0
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._busy and (not self._waiting or self._trouble))

    def close(self, deadline: float, first: Collection[int]) -> str | None:
        """Saves as much of what was asked for as can be before `deadline` (monotonic clock).

        first: turns that go before others
        Returns why something could not be written, a sentence, or None.
        """
        with self._wake:
            self._deadline = deadline
            waiting = sorted(self._waiting, key=lambda node: node not in first)
            self._waiting = dict.fromkeys(waiting)
            self._wake.notify_all()
        self._thread.join()
        return self._trouble

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                if not self._ready() and self._deadline is None:
                    self._wake.wait(self._patience())
                self._busy = True
                ready = self._ready()
                closing = self._deadline is not None
                node = next(iter(self._waiting)) if ready else None
                if node is not None:
                    del self._waiting[node]
            if node is not None:
                self._save(node)
            elif closing:
                return
            elif not self._waiting and not self._states.under_way():
                self._tidy()

    def _ready(self) -> bool:
        return bool(self._waiting) and (
            self._trouble is None
            or self._deadline is not None
            or time.monotonic() >= self._retry_at
        )

    def _patience(self) -> float | None:
        if self._waiting:
            return max(0.0, self._retry_at - time.monotonic())
        return None if self._merged else IDLE_S

    def _save(self, node: int) -> None:
        try:
            for part in self._parts(node):
                if not self._write_fitting(part):
                    break
            self._sync_journal()
            self._states.park(node)
            self._worked()
        except EngineStoppedError:
            pass  # whoever uses the session hears of it by other ways; the text is in the journal
        except Exception as error:  # whatever it is, text goes on
            self._failed(error)
            with self._wake:
                if self._deadline is None:
                    self._waiting.setdefault(node)

    def _parts(self, node: int) -> Iterator[_Part]:
        """What is to be saved of a turn and those before it."""
        tree = self._writer.tree
        parent = ""
        with self._writer.lock:
            path = tree.path(node)[1:]
        for id in path:
            with self._writer.lock:
                turn = tree.node(id)
                start, end = tree.start(id), tree.length(id)
                segments = turn.segments
                if turn.state in RUNNING and turn.role == "assistant":
                    end = max(start, end // self._page_tokens * self._page_tokens)
                if turn.model != self._weights:
                    continue
            for segment in (*segments, None):
                until = segment.start if segment else end
                if start < until:
                    yield _Part(id, start, until, parent)
                if segment:
                    start, parent = segment.end, segment.name

    def _write_fitting(self, part: _Part) -> bool:
        """Writes a part in pieces of bounded size; False if there is no time left for all."""
        most = max(1, PIECE_BYTES // self._row_bytes // self._page_tokens) * self._page_tokens
        start, parent = part.start, part.parent
        while start < part.end:
            end = min(part.end, start // self._page_tokens * self._page_tokens + most)
            piece = self._fitting(_Part(part.node, start, end, parent))
            if piece is None:
                return False
            ref = self._write(piece)
            if ref is None or ref.end < piece.end:
                return True
            start, parent = ref.end, ref.name
        return True

    def _sync_journal(self) -> None:
        """Has the disk keep what the journal's thread has written, without keeping it waiting."""
        with suppress(OSError):
            for base in journal_bases(self._folder.path)[-1:]:
                path = self._folder.path / journal_name(base)
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    to_disk(descriptor)
                finally:
                    os.close(descriptor)

    def _fitting(self, part: _Part) -> _Part | None:
        """The part, or the beginning of it that can be written before the deadline."""
        if self._deadline is None:
            return part
        seconds = self._deadline - time.monotonic()
        fitting = int(seconds * self._bytes_per_s / self._row_bytes)
        if fitting >= part.end - part.start:
            return part
        end = (part.start + fitting) // self._page_tokens * self._page_tokens
        return _Part(part.node, part.start, end, part.parent) if end > part.start else None

    def _write(self, part: _Part, replaced: tuple[SegmentRef, ...] = ()) -> SegmentRef | None:
        """Writes a part and makes it one of its turn's segments, which it returns.

        Of a part that is not in memory as a whole, the pages that are; None if there are none, or
        it would replace more than that.
        """
        with closing(self._fork(part.node, part.end)) as fork:
            end = fork.length
            if end < part.end:
                end -= end % self._page_tokens
            if end <= part.start or (replaced and end < part.end):
                return None
            begun = time.monotonic()
            files = self._folder.segments
            name = files.new_name(part.node, part.start, end)
            self._require_folder()
            info = write_segment(
                files.path(name),
                self._identity,
                fork,
                part.start,
                end,
                parent=part.parent,
                key=self._folder.key,
                run=self._engine.call,
            )
        seconds = time.monotonic() - begun
        self._bytes_per_s = max(1e6, info.bytes / max(seconds, 1e-6))
        self.bytes_written += info.bytes
        ref = SegmentRef(name, part.start, end, info.bytes)
        with self._writer.lock:
            others = self._writer.tree.node(part.node).segments
            kept = [other for other in others if other not in replaced]
            segments = tuple(sorted([*kept, ref], key=lambda each: each.start))
            self._writer.change(
                SetSegments(part.node, segments), events=[Saved(part.node, info.bytes, seconds)]
            )
        return ref

    def _fork(self, node: int, length: int) -> Context:
        """A context of what memory has of the first `length` tokens of a turn's history."""
        fork = self._states.beginning(node)
        if fork is None or fork.length < length:
            with self._writer.lock:
                history = self._writer.tree.history(node)
            found = self._engine.cache.match(history[:length])
            if fork is None or fork.length < found.length:
                return found
            found.close()
        fork.truncate(min(length, fork.length))
        return fork

    def _require_folder(self) -> None:
        if not self._folder.path.is_dir():
            raise SessionError(
                f"{self._folder.path}: the session's folder is gone; what came since is in memory "
                "only, put the folder back or duplicate the session"
            )

    def _worked(self) -> None:
        if self._trouble:
            self._trouble = None
            self._writer.tell(Notice("computed state is saved again", "info"))

    def _failed(self, error: Exception) -> None:
        if self._trouble is None:
            sentence = f"{error}; the text is safe in the journal or in memory, saving goes on"
            self._writer.tell(Notice(sentence, "error"))
        with self._wake:
            self._trouble = str(error)
            self._retry_at = time.monotonic() + RETRY_S

    def _tidy(self) -> None:
        """Merges small segments, and shortens a long journal, while nothing else is to do."""
        with self._writer.lock:
            merges = plan_merges(self._writer.tree)
        with suppress(LlamayError):
            for merge in merges:
                start, end = merge.segments[0].start, merge.segments[-1].end
                self._write(_Part(merge.node, start, end, ""), merge.segments)
                if self._waiting or self._deadline is not None:
                    return
            if merges or self._writer.written > RECORDS_PER_CHECKPOINT:
                self._writer.checkpoint().result()
                with self._writer.lock:
                    tree = self._writer.tree
                    self._folder.segments.sweep(tree)
        self._merged = True
