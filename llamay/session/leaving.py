"""Leaving a session's files as they should be found."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from llamay.errors import SessionError
from llamay.session.catalog import Catalog
from llamay.session.folder import SessionFolder
from llamay.session.running import Running
from llamay.session.tree import Tree
from llamay.session.writing import Writer


@dataclass(frozen=True, slots=True)
class Goodbye:
    """How a session was left.

    branches:      visible leaves; pages: that they had in memory
    bytes_written: of state, since it was opened; seconds: that closing took
    command:       opens it again
    problem:       why not everything could be saved, a sentence; None if it was
    """

    branches: int
    pages: int
    bytes_written: int
    seconds: float
    command: str
    problem: str | None = None


def leave(
    home: Path,
    opened: SessionFolder | Path,
    writer: Writer,
    running: Running | None,
    unnamed: bool,
) -> Goodbye:
    """Saves what time allows, and ends all that runs.

    opened:  the session's folder, or where it is if it was only read
    unnamed: it has no name but a temporary one, since nobody has sent a message
    """
    begun = time.monotonic()
    tree = writer.tree
    with writer.lock:
        branches = len([leaf for leaf in tree.leaves() if leaf])
    pages, written, trouble = running.close() if running else (0, 0, None)
    unwritten = writer.close()
    unused = unnamed and tree.next_id == 1 and not tree.can_undo
    command = "llamay" if unused else f"llamay --session {shlex.quote(opened.name)}"
    problem = None
    if isinstance(opened, SessionFolder):
        problem = _close(home, opened, tree, len(unwritten), unused)
    if trouble and not problem:
        problem = f"{trouble}; the text is saved, and is read again when it is continued"
    return Goodbye(branches, pages, written, time.monotonic() - begun, command, problem)


def _close(
    home: Path, folder: SessionFolder, tree: Tree, unwritten: int, unused: bool
) -> str | None:
    """Closes a session's folder; returns why not everything could be saved, or None.

    unwritten: records that the journal did not take
    unused:    nobody ever wrote anything in it, so that it is not kept
    """
    try:
        if unused:
            folder.release()
            Catalog(home).remove(folder.name)
        elif unwritten:
            folder.release()
            return (
                f"{folder.path}: the last {unwritten} changes could not be written and are lost; "
                "make room before you go on"
            )
        else:
            folder.close(tree)
    except SessionError as error:
        return str(error)
    return None
