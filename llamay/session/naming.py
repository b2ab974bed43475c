"""Naming a session that was given no name."""

from contextlib import suppress
from pathlib import Path

from llamay.errors import SessionError
from llamay.events import TreeChanged
from llamay.session.catalog import Catalog
from llamay.session.folder import SessionFolder
from llamay.session.tree import ROOT
from llamay.session.writing import Told, Writer


class Naming:
    """A session's name, to be taken from its first message.

    taken: whether it was
    """

    def __init__(self, home: Path, folder: SessionFolder, writer: Writer) -> None:
        self.taken = False
        self._home = home
        self._folder = folder
        self._writer = writer

    def take(self, text: str) -> None:
        """Renames the session's folder soon, the first time that it is called."""
        with self._writer.lock:
            taken, self.taken = self.taken, True
        if not taken:
            self._writer.later(lambda: Told(then=lambda: self._rename(text)))

    def _rename(self, text: str) -> None:
        with suppress(SessionError):  # then it keeps the name it has
            Catalog(self._home).rename(self._folder, text)
        self._writer.tell(TreeChanged((ROOT,)))
