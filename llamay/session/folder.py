"""A session's folder: what is where, and how it stays whole.

    session.json            the tree as of some record, see `manifest`
    session.previous.json   the one before
    journal-<n>             records after number n, see `journal`
    segments/               state of positions, one node's each, in the snapshot format
    lock                    the owner's process id, locked while it runs

Every record has a number, and a tree is the result of all records up to one. So a session is its
newest whole manifest and the records after it, from whichever journals they are in, and at every
moment of a rotation that is the same tree: session.json becomes the previous one, the new one is
written, the journal ends (the next record begins another), and journals that the previous one does
not need go. Files that are damaged are kept under another name.

A journal is never continued by another process: what it would encrypt could take a number that
encrypted something else before.
"""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from llamay.errors import SessionError
from llamay.kv.snapshot import Key, sweep
from llamay.kv.snapshot.files import folder_to_disk
from llamay.session.files import create_file, unwritable
from llamay.session.journal import JournalWriter
from llamay.session.loading import MANIFEST, PREVIOUS, Loaded, journal_bases, journal_name, load
from llamay.session.lock import Lock
from llamay.session.manifest import encode_manifest
from llamay.session.records import Purge, Record, SetState
from llamay.session.segments import SegmentFiles
from llamay.session.tree import Tree

SEGMENTS = "segments"
DRAFT = ".new-"  # begins the name of a folder that is not a session yet
_RUNNING = ("queued", "reading", "writing")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What session.json will be: the tree of all records up to number `sequence`."""

    sequence: int
    data: bytes


class SessionFolder:
    """A session open for writing; for one thread at a time.

    tree:    as it was when the folder was opened; whoever opened it goes on with it
    notices: sentences on what was damaged, for the user
    segments: the folder's segment files
    """

    def __init__(self, path: Path, lock: Lock, loaded: Loaded, key: Key | None) -> None:
        """Use `open_folder` or `create_folder`."""
        self.path = path
        self.key = key
        self.id = loaded.id
        self.tree = loaded.tree
        self.notices = loaded.notices
        self.sequence = loaded.sequence
        self.segments = SegmentFiles(path / SEGMENTS)
        self._lock = lock
        self._saved_sequence = self._oldest_sequence = loaded.manifest_sequence
        self._journal: JournalWriter | None = None
        self._stat = os.stat(path)

    @property
    def name(self) -> str:
        """The session's name: that of its folder."""
        return self.path.name

    def append(self, records: Sequence[Record], *, sync: bool = False) -> None:
        """Writes records to the journal, all or none; does not apply them to `tree`.

        sync: have them on the disk, so that a loss of power does not lose them
        Raises SessionError if they cannot be written; the same may be tried again.
        """
        if self._journal is None:
            self._require_folder()
            path = self.path / journal_name(self.sequence)
            self._journal = JournalWriter(path, self.id, self.sequence, self.key)
        self._journal.append(records, sync=sync)
        self.sequence = self._journal.sequence

    def encode(self, tree: Tree, pending: int = 0) -> Checkpoint:
        """What `write` takes.

        tree:    that of all records so far, and of `pending` more that are appended before `write`
        """
        sequence = self.sequence + pending
        path = self.path / MANIFEST
        data = encode_manifest(path, self.id, sequence, tree, self.key, time.time())
        return Checkpoint(sequence, data)

    def write(self, checkpoint: Checkpoint) -> None:
        """Writes session.json, ends the journal, and removes journals that nothing needs.

        Raises SessionError if it cannot be written; nothing is lost then.
        """
        self._require_folder()
        manifest = self.path / MANIFEST
        try:
            with suppress(FileNotFoundError):
                os.replace(manifest, self.path / PREVIOUS)
                self._oldest_sequence = self._saved_sequence
        except OSError as error:
            raise unwritable(manifest, error) from error
        create_file(manifest, checkpoint.data)
        self._saved_sequence = checkpoint.sequence
        self._end_journal()
        bases = [*journal_bases(self.path), self.sequence]
        for base, end in pairwise(bases):
            if end <= self._oldest_sequence:
                with suppress(OSError):
                    (self.path / journal_name(base)).unlink()

    def checkpoint(self, tree: Tree) -> None:
        """`encode` and `write`."""
        self.write(self.encode(tree))

    def rename(self, path: Path) -> None:
        """Moves the folder, with its lock.

        Raises FileExistsError if there is another, and SessionError if it cannot be moved.
        """
        self._require_folder()
        try:
            self.path.rename(path)  # fails on a folder that has files
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(error.errno, "there is another", str(path)) from error
            raise unwritable(path, error) from error
        self.path = path
        self.segments = SegmentFiles(path / SEGMENTS)
        self._end_journal()
        with suppress(OSError):
            folder_to_disk(path.parent)

    def close(self, tree: Tree) -> None:
        """Forgets what was deleted, saves, sweeps the segments, and gives up the lock.

        tree: that of all records so far. Raises SessionError if something cannot be written; the
        lock is given up all the same.
        """
        try:
            if tree.has_hidden or tree.can_undo or tree.can_redo:
                self.append([Purge()])
                tree.apply(Purge())
            if self.sequence != self._saved_sequence:
                self.checkpoint(tree)
            self.segments.sweep(tree)
        finally:
            self.release()

    def release(self) -> None:
        """Gives up the lock and leaves everything as it is."""
        self._end_journal()
        self._lock.release()

    def _begin(self, loaded: Loaded) -> None:
        """Puts in order what the last owner left."""
        sweep(self.path)
        manifest = self.path / MANIFEST
        if manifest in loaded.damaged:
            _set_aside(manifest)
        running = [node.id for node in self.tree.nodes.values() if node.state in _RUNNING]
        records = [SetState(id, "interrupted") for id in running]
        if records:
            self.append(records)
            for record in records:
                self.tree.apply(record)
        if records or loaded.replayed or loaded.notices or not manifest.exists():
            self.checkpoint(self.tree)
        for path in loaded.damaged:
            if path != manifest:
                _set_aside(path)

    def _end_journal(self) -> None:
        if self._journal:
            self._journal.close()
            self._journal = None

    def _require_folder(self) -> None:
        with suppress(OSError):
            if os.path.samestat(os.stat(self.path), self._stat):
                return
        raise SessionError(
            f"{self.path}: the session's folder was moved or deleted while it was open; "
            "what came since is in memory only"
        )


def create_folder(path: Path, tree: Tree, key: Key | None = None) -> SessionFolder:
    """A new session, open for writing; it appears whole.

    key: encrypts everything in it
    Raises FileExistsError if `path` is there already, and SessionError if it cannot be written.
    """
    draft = path.parent / f"{DRAFT}{secrets.token_hex(8)}"
    loaded = Loaded(os.urandom(16), tree, 0, key is not None, time.time())
    lock = None
    try:
        for above in reversed([path.parent, *path.parent.parents]):
            above.mkdir(0o700, exist_ok=True)  # `parents=True` would not give them the mode
        draft.mkdir(0o700)
        lock = Lock(draft)
        folder = SessionFolder(draft, lock, loaded, key)
        data = folder.encode(tree).data
        for name in (PREVIOUS, MANIFEST):
            create_file(draft / name, data)
        folder.rename(path)
        return folder
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if lock:
            lock.release()
        if isinstance(error, OSError) and not isinstance(error, FileExistsError):
            raise unwritable(path, error) from error
        raise


def open_folder(path: Path, key: Key | None = None) -> SessionFolder:
    """An existing session, open for writing; turns that were being written are `interrupted`.

    Raises what `load` raises, SessionBusyError if a process has it open, and SessionError if the
    folder cannot be written.
    """
    lock = Lock(path)
    try:
        loaded = load(path, key)
        folder = SessionFolder(path, lock, loaded, key)
        folder._begin(loaded)
        return folder
    except BaseException:
        lock.release()
        raise


def _set_aside(path: Path) -> None:
    with suppress(OSError):
        path.rename(path.with_name(f"{path.name}.damaged"))
