"""A small session, and trees to compare."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llamay.kv.snapshot import Key
from llamay.session.folder import SessionFolder, create_folder
from llamay.session.records import (
    AddNode,
    AppendIds,
    Edit,
    Info,
    Record,
    SetLabel,
    SetPlace,
    SetState,
    Settings,
    Undo,
)
from llamay.session.tree import Tree
from llamay.session.tree_json import tree_to_json

KEY = Key(bytes(range(32)))
OTHER_KEY = Key(bytes(32))

RECORDS: list[Record] = [
    Edit(
        (
            AddNode(1, 0, "user", "Hi", ids=(1, 2)),
            AddNode(2, 1, "assistant", seed_index=0, state="writing"),
            AddNode(3, 1, "assistant", seed_index=1, state="writing"),
            SetPlace(2),
        )
    ),
    AppendIds(2, 0, (3,), (-0.5,), "a"),
    AppendIds(3, 0, (4,), (-0.25,), "b"),
    AppendIds(2, 1, (5,), (-0.125,), "c"),
    SetState(2, "done", "stop", seconds=0.5),
    SetState(3, "stopped"),
    SetLabel(3, "x"),
    Undo(),
    AddNode(4, 2, "user", "And?", ids=(6,)),
]


def new_tree() -> Tree:
    return Tree(Settings(system="Be brief.", seed=7), Info(model="m", created=1.0))


def tree_after(records: Sequence[Record]) -> Tree:
    tree = new_tree()
    for record in records:
        tree.apply(record)
    return tree


def same(tree: Tree) -> Any:
    """All of a tree, in a form that compares."""
    return json.loads(json.dumps(tree_to_json(tree)))


def make(path: Path, records: Sequence[Record] = RECORDS, key: Key | None = None) -> SessionFolder:
    """A session with these records in its journal, left as by a process that died."""
    folder = create_folder(path, new_tree(), key)
    folder.append(records)
    return folder


@contextmanager
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the session open, until it is killed."""
    code = (
        "import sys; from pathlib import Path; from llamay.session.folder import open_folder\n"
        f"folder = open_folder(Path({str(path)!r})); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "open\n"
        try:
            yield process
        finally:
            process.kill()
