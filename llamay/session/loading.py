"""A session out of its files: the newest whole manifest, and the records after it."""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from llamay.errors import SessionCorruptError, SessionError
from llamay.kv.snapshot import Key
from llamay.session.journal import EMPTY_BYTES, JournalText, read_journal
from llamay.session.manifest import Manifest, Summary, read_manifest, summarise
from llamay.session.records import Redo, Undo
from llamay.session.tree import Tree

MANIFEST = "session.json"
PREVIOUS = "session.previous.json"
_JOURNAL = re.compile(r"journal-(\d{1,19})")
_TRIES = 20


@dataclass(slots=True)
class Loaded:
    """A session as its files have it.

    sequence: number of the last record in `tree`; manifest_sequence: in the manifest it began with
    notices:  sentences on what was damaged, for the user
    damaged:  the files it was found in
    updated:  seconds since 1970
    """

    id: bytes
    tree: Tree
    sequence: int
    encrypted: bool
    updated: float
    manifest_sequence: int = 0
    notices: list[str] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)

    @property
    def replayed(self) -> bool:
        """Whether there were records after the manifest."""
        return self.sequence > self.manifest_sequence

    def summary(self) -> Summary:
        """What a list says of the session."""
        return summarise(self.id, self.sequence, self.tree, self.updated)


def load(path: Path, key: Key | None = None) -> Loaded:
    """Reads a session's folder and changes nothing; it may have an owner who writes.

    Raises SessionError if there is none, SessionCorruptError if neither manifest is whole,
    SessionVersionError, and SessionKeyError.
    """
    for remaining in reversed(range(_TRIES)):
        before = _listing(path)
        loaded = None
        try:
            loaded = _load(path, key)
        except SessionError:
            if not remaining or _listing(path) == before:
                raise
        # If its owner rotated meanwhile, files that were needed may have gone.
        if loaded and (not remaining or _listing(path) == before):
            return loaded
    raise AssertionError("neither loaded nor an error")


def journal_name(base: int) -> str:
    """The file of the records after number `base`."""
    return f"journal-{base}"


def journal_bases(path: Path) -> list[int]:
    """The journals of a folder, ascending."""
    names = (entry.name for entry in path.iterdir())
    return sorted(int(match[1]) for match in map(_JOURNAL.fullmatch, names) if match)


def has_records_after(path: Path, sequence: int) -> bool:
    """Whether there is a journal of later records than number `sequence`. Raises OSError."""
    files = [path / journal_name(base) for base in journal_bases(path) if base >= sequence]
    return any(file.stat().st_size > EMPTY_BYTES for file in files)


def _listing(path: Path) -> list[object]:
    """What a rotation changes."""
    seen: list[object] = []
    for file in (path / MANIFEST, path / PREVIOUS):
        with suppress(OSError):
            stat = file.stat()
            seen += [file, stat.st_ino, stat.st_mtime_ns]
    with suppress(OSError):
        seen += journal_bases(path)
    return seen


def _load(path: Path, key: Key | None) -> Loaded:
    notices: list[str] = []
    damaged: list[Path] = []
    manifest = _newest_manifest(path, key, notices, damaged)
    loaded = Loaded(
        manifest.id,
        manifest.tree,
        manifest.sequence,
        manifest.encrypted,
        _updated(path),
        manifest.sequence,
        notices,
        damaged,
    )
    _replay(path, loaded, key)
    return loaded


def _updated(path: Path) -> float:
    times = [0.0]
    for file in path.iterdir():
        with suppress(FileNotFoundError):  # its owner may rotate
            times.append(file.stat().st_mtime)
    return max(times)


def _newest_manifest(
    path: Path, key: Key | None, notices: list[str], damaged: list[Path]
) -> Manifest:
    present = [file for file in (path / MANIFEST, path / PREVIOUS) if file.exists()]
    if not present:
        raise SessionError(f"{path}: there is no session; see `llamay sessions`")
    for file in present:
        try:
            return read_manifest(file, key)
        except SessionCorruptError:
            if file == present[-1]:
                raise
            notices.append(f"{file}: the file is damaged; the one before and the journal were read")
            damaged.append(file)
    raise AssertionError("neither a manifest nor an error")


def _replay(path: Path, loaded: Loaded, key: Key | None) -> None:
    bases = journal_bases(path)
    complete = True
    for i, base in enumerate(bases):
        if i + 1 < len(bases) and bases[i + 1] <= loaded.manifest_sequence:
            continue  # kept for the manifest before
        file = path / journal_name(base)
        text = read_journal(file, loaded.id, loaded.manifest_sequence, key)
        complete &= _apply(text, loaded, complete)
        if text.damage:
            loaded.damaged.append(file)
            loaded.notices.append(
                f"{file}: the file is damaged ({'; '.join(text.damage)}); "
                "what was whole in it was kept"
            )
    if not complete:
        # What an undo would take back may not be what the user did.
        loaded.tree.edits.clear()


def _apply(text: JournalText, loaded: Loaded, complete: bool) -> bool:
    """Whether all records followed one another and fitted; those that do are applied."""
    for sequence, record in text.records:
        if sequence <= loaded.sequence:
            continue
        if sequence != loaded.sequence + 1:
            complete = False
            text.damage.append(f"records {loaded.sequence + 1} to {sequence - 1} are missing")
        loaded.sequence = sequence
        if not complete and isinstance(record, Undo | Redo):
            continue
        try:
            loaded.tree.apply(record)
        except SessionError as error:
            complete = False
            text.damage.append(f"record {sequence} does not fit: {error}")
    return complete
