"""A branch: a context of an engine, for whoever uses the engine from outside its thread."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamay.engine.model import Model
from llamay.errors import ContextBusyError
from llamay.formats import KVPrecision
from llamay.kv import Context
from llamay.kv.snapshot import Key, SnapshotInfo, write_snapshot

if TYPE_CHECKING:
    from llamay.engine.worker import Worker


class Branch:
    """Tokens that an engine has read or written, and that it can continue from.

    Usable from any thread, also while the engine continues it: then it is what the last step left.
    """

    def __init__(self, model: Model, worker: "Worker", context: Context) -> None:
        self._model = model
        self._worker = worker
        self.context = context

    @property
    def tokens(self) -> Sequence[int]:
        """Its token ids, a copy."""
        return self.context.tokens

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return self.context.length

    def fork(self, count: int = 1) -> "list[Branch]":
        """Branches that continue from here, each by itself; no page is copied."""

        def forks() -> list[Branch]:
            return [Branch(self._model, self._worker, self.context.fork()) for _ in range(count)]

        try:
            return forks()
        except ContextBusyError:
            return self._worker.call(forks)

    def save(
        self, path: Path | str, *, kv: KVPrecision | None = None, key: Key | None = None
    ) -> SnapshotInfo:
        """Writes it to a snapshot file, from which `Engine.restore` continues exactly.

        kv:  precision of the file; None takes f32, which loses nothing
        key: encrypts the file
        Raises SnapshotError if the file cannot be written; what was there is then as it was.
        """
        (fork,) = self.fork()
        try:
            identity = self._model.identity()

            def write() -> SnapshotInfo:
                return write_snapshot(fork.context, Path(path), identity, kv=kv, key=key)

            return write() if self._model.moves_rows_anywhere else self._worker.call(write)
        finally:
            fork.close()

    def close(self) -> None:
        """Gives its pages back; others that share them keep them.

        An answer that continues it fails.
        """
        try:
            self.context.close()
        except ContextBusyError:
            self._worker.call(self.context.close)

    def __enter__(self) -> "Branch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
