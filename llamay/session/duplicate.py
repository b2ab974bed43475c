"""A new session out of one branch of another."""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llamay.kv.snapshot import Key
from llamay.session.catalog import Catalog
from llamay.session.folder import SEGMENTS
from llamay.session.records import AddNode, Purge, SetLabel, SetPlace, SetSegments, SetState
from llamay.session.tree import Tree


def branch_of(tree: Tree, id: int, parent: str) -> Tree:
    """A tree of the turns from the root to `id`; changes nothing.

    parent: the id of the session that they are a copy of
    """
    info = replace(tree.info, title=None, parent=parent)
    copy = Tree(tree.root.settings, info)
    here = 0
    for node in map(tree.node, tree.path(id)[1:]):
        copy.apply(
            AddNode(
                copy.next_id,
                here,
                node.role,
                node.text,
                tuple(node.ids),
                tuple(node.logprobs),
                node.keeps,
                node.settings,
                node.seed_index,
                node.seed,
                created=node.created,
                model=node.model,
            )
        )
        here = copy.next_id - 1
        ended = node.state not in ("queued", "reading", "writing")
        state = node.state if ended else "interrupted"
        copy.apply(SetState(here, state, node.finish_reason, node.error, node.seconds))
        copy.apply(SetSegments(here, node.segments))
        if node.label:
            copy.apply(SetLabel(here, node.label))
    copy.apply(SetPlace(here))
    copy.apply(Purge())
    return copy


def write_duplicate(home: Path, source: Path, tree: Tree, name: str | None, key: Key | None) -> str:
    """Creates a session of `tree`, whose segments are those of the session at `source`.

    name: None takes one like the other session's. Returns the name.
    Raises UsageError for a name that cannot be, and SessionError if nothing can be written.
    """
    folder = Catalog(home).create(tree, name=name, text=source.name, key=key)
    try:
        segments = [ref.name for node in tree.nodes.values() for ref in node.segments]
        with suppress(OSError):  # what is missing is computed again
            (folder.path / SEGMENTS).mkdir(0o700, exist_ok=True)
            for segment in segments:
                _link(source / SEGMENTS / segment, folder.path / SEGMENTS / segment)
        return folder.name
    finally:
        folder.release()


def _link(source: Path, target: Path) -> None:
    """The same file once more: segments never change. A copy where there are no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
