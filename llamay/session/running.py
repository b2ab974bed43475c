"""What runs a session whose model is here: the contexts, who saves them, and who starts answers."""

import time
from collections.abc import Iterable
from pathlib import Path

from llamay.engine import Engine
from llamay.events import Notice
from llamay.session.folder import SEGMENTS, SessionFolder
from llamay.session.records import SetSegments
from llamay.session.runner import Runner
from llamay.session.saver import Saver
from llamay.session.speed import read_speed, write_speed
from llamay.session.states import States
from llamay.session.writing import Writer

CLOSE_S = 0.9  # what closing may take; the rest of a second is for the last files
ENGINE_S = 0.3  # of it: until answers under way have ended


class Running:
    """The threads of a session, from here to `close`, and what they share."""

    def __init__(
        self, home: Path, folder: SessionFolder, engine: Engine, writer: Writer, weights: str
    ) -> None:
        """home: where speeds are remembered; weights: weights_sha256 of the engine's model"""
        self._home = home
        self._writer = writer
        self._machine = f"{weights} {engine.cache.numerics}"
        self._forget_missing(folder)
        speed = read_speed(home, self._machine)
        self.states = States(writer, engine, weights)
        self.saver = Saver(writer, self.states, engine, folder, weights)
        self.runner = Runner(writer, self.states, self.saver, engine, folder, weights, speed)

    def save(self, leaves: Iterable[int], wait: bool) -> None:
        """Has leaves saved, and session.json; raises SessionError if it waits and cannot."""
        for leaf in leaves:
            self.saver.save(leaf)
        if wait:
            self.saver.flush()
            self._writer.checkpoint().result()

    def close(self) -> tuple[int, int, str | None]:
        """Interrupts answers and saves what time allows.

        Returns pages held, bytes written, and why some could not be, a sentence or None.
        """
        begun = time.monotonic()
        self.runner.close(begun + ENGINE_S)
        self._writer.flush(ENGINE_S)
        pages = self.states.figures().pages
        if self.runner.prefill_tokens_per_s:
            write_speed(self._home, self._machine, self.runner.prefill_tokens_per_s)
        with self._writer.lock:
            tree = self._writer.tree
            here = [leaf for leaf in tree.leaves() if tree.place in tree.path(leaf)]
        trouble = self.saver.close(begun + CLOSE_S, first=here)
        self.states.close()
        return pages, self.saver.bytes_written, trouble

    def _forget_missing(self, folder: SessionFolder) -> None:
        """Takes segments out of the tree whose files are not there any more."""
        tree = self._writer.tree
        missing = folder.segments.missing(tree)
        for node, refs in missing.items():
            rest = tuple(ref for ref in tree.node(node).segments if ref not in refs)
            self._writer.change(SetSegments(node, rest))
        if missing:
            tokens = sum(ref.end - ref.start for refs in missing.values() for ref in refs)
            sentence = f"files with the state of {tokens:,} tokens are gone; they are read again"
            self._writer.tell(Notice(f"{folder.path / SEGMENTS}: {sentence}", "warning"))
