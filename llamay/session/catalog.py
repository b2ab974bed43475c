"""All sessions of a user: created, found, listed and removed.

They are folders in one folder, and a session's name is its folder's. What begins with a dot is not
a session: one that is being made or removed, and `.last`, the name of the one used last (times do
not tell: a clock may have been set back).
"""

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from llamay.errors import SessionCorruptError, SessionError, SessionKeyError, UsageError
from llamay.kv.snapshot import Key
from llamay.session.files import create_file, unwritable
from llamay.session.folder import DRAFT, SessionFolder, create_folder, open_folder
from llamay.session.loading import MANIFEST, PREVIOUS, Loaded, has_records_after, load
from llamay.session.lock import Lock, owner_of
from llamay.session.manifest import Summary, read_summary
from llamay.session.names import checked_name, slug
from llamay.session.tree import Tree

_LAST = ".last"
_REMOVED = ".removed-"


@dataclass(frozen=True, slots=True)
class Entry:
    """A session in the list.

    summary:   None if it cannot be read: it is encrypted and no key was given, or damaged
    bytes:     all its files
    owner:     who has it open, such as `process 123`
    problem:   why it cannot be read, a sentence
    depth:     0, or one more than the session that it is a copy of, which it then comes after
    """

    name: str
    summary: Summary | None
    bytes: int
    encrypted: bool
    owner: str | None
    problem: str | None = None
    depth: int = 0

    @property
    def updated(self) -> float:
        """Seconds since 1970."""
        return self.summary.updated if self.summary else 0.0


class Catalog:
    """The sessions below `home`."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "sessions"

    def create(
        self, tree: Tree, *, name: str | None = None, text: str = "", key: Key | None = None
    ) -> SessionFolder:
        """A new session, open for writing.

        name: as the user gave it; without one it is made of `text`, and of a number if it is taken
        Raises UsageError if the name cannot be, SessionError if it is taken or nothing can be
        written.
        """
        for path in self._free_paths(name, text):
            with suppress(FileExistsError):
                return create_folder(path, tree, key)
        raise AssertionError("names ended")

    def rename(self, folder: SessionFolder, text: str) -> None:
        """Gives an open session a name made of a text."""
        for path in self._free_paths(None, text):
            with suppress(FileExistsError):
                folder.rename(path)
                self.set_last(path.name)
                return

    def open(self, name: str, key: Key | None = None) -> SessionFolder:
        """An existing session, open for writing, and the last used one; errors as `open_folder`."""
        folder = open_folder(self.path(name), key)
        self.set_last(folder.name)
        return folder

    def read(self, name: str, key: Key | None = None) -> Loaded:
        """An existing session, with an owner or not; changes nothing. Errors as `load`."""
        return load(self.path(name), key)

    def path(self, name: str) -> Path:
        """The folder of an existing session. Raises SessionError if there is none."""
        path = self.folder / name
        if name != path.name or name.startswith(".") or not _is_session(path):
            raise SessionError(f"there is no session {name!r}; `llamay sessions` lists them")
        return path

    def last(self) -> str | None:
        """The name of the session used last that is still there; else of the newest."""
        with suppress(OSError, UnicodeDecodeError, SessionError):
            return self.path((self.folder / _LAST).read_text("utf-8")).name
        entries = self.entries()
        return max(entries, key=lambda entry: entry.updated).name if entries else None

    def set_last(self, name: str) -> None:
        """Remembers the session used last, if that can be written."""
        with suppress(SessionError):
            create_file(self.folder / _LAST, name.encode())

    def entries(self, key: Key | None = None) -> list[Entry]:
        """All sessions, the newest first, copies below what they are copies of.

        key: for those that are encrypted with it
        """
        entries = [_entry(path, key) for path in self._paths()]
        entries.sort(key=lambda entry: (-entry.updated, entry.name))
        return list(_threaded(entries))

    def remove(self, name: str) -> None:
        """Deletes a session for good.

        Raises SessionBusyError if a process has it open, and SessionError if there is none or it
        cannot be deleted.
        """
        path = self.path(name)
        lock = Lock(path)
        try:
            removed = self.folder / f"{_REMOVED}{secrets.token_hex(8)}"
            path.rename(removed)
        except OSError as error:
            raise unwritable(path, error) from error
        finally:
            lock.release()
        self._sweep()

    def _sweep(self) -> None:
        """Deletes what is no session any more, or never became one."""
        for path in self.folder.iterdir():
            if path.name.startswith((_REMOVED, DRAFT)):
                with suppress(SessionError):
                    Lock(path).release()
                    shutil.rmtree(path, ignore_errors=True)

    def _paths(self) -> Iterator[Path]:
        with suppress(OSError):
            for path in self.folder.iterdir():
                if not path.name.startswith(".") and _is_session(path):
                    yield path

    def _free_paths(self, name: str | None, text: str) -> Iterator[Path]:
        taken = {path.name.casefold() for path in self._paths()}
        if name is not None:
            if checked_name(name).casefold() in taken:
                raise _taken(name)
            yield self.folder / checked_name(name)
            raise _taken(name)
        base = slug(text)
        for number in count(1):
            candidate = base if number == 1 else f"{base}-{number}"
            if candidate not in taken:
                yield self.folder / candidate


def _taken(name: str) -> UsageError:
    return UsageError(f"there is a session {name!r} already; choose another name")


def _is_session(path: Path) -> bool:
    return (path / MANIFEST).exists() or (path / PREVIOUS).exists()


def _entry(path: Path, key: Key | None) -> Entry:
    summary, encrypted, problem = None, False, None
    try:
        summary = _summary(path, None)
        encrypted = summary is None
        if encrypted and key:
            summary = _summary(path, key)
    except SessionKeyError as error:
        encrypted, problem = True, str(error) if key else None
    except (SessionError, OSError) as error:
        problem = str(error)
    size = 0
    with suppress(OSError):
        size = sum(file.stat().st_size for file in path.rglob("*"))
    return Entry(path.name, summary, size, encrypted, owner_of(path), problem)


def _summary(path: Path, key: Key | None) -> Summary | None:
    """From the beginning of session.json if that is all there is; else from the whole session."""
    with suppress(FileNotFoundError, SessionCorruptError):
        summary = read_summary(path / MANIFEST, key)
        if summary is None or not has_records_after(path, summary.sequence):
            return summary
    return load(path, key).summary()


def _threaded(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Each entry after the one that it is a copy of, as deep as it goes."""
    ids = {entry.summary.id for entry in entries if entry.summary}
    copies: dict[str, list[Entry]] = {}
    roots = []
    for entry in entries:
        parent = entry.summary.parent if entry.summary else None
        if parent in ids and parent is not None:
            copies.setdefault(parent, []).append(entry)
        else:
            roots.append(entry)
    waiting = roots[::-1]
    while waiting:
        yield (entry := waiting.pop())
        below = copies.pop(entry.summary.id, []) if entry.summary else []
        waiting += (replace(copy, depth=entry.depth + 1) for copy in reversed(below))
