"""Leaving a session's files as they should be found."""

from dataclasses import dataclass
from pathlib import Path

from llamay.errors import SessionError
from llamay.session.catalog import Catalog
from llamay.session.folder import SessionFolder
from llamay.session.tree import Tree


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
