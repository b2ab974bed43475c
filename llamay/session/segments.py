"""Segment files of a session: their names, which are needed, and which to merge.

What is in them is the snapshot format's affair. A segment belongs to one node, so what branches
share is stored once: the state of a node is that of the nodes above it and its own.
"""

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamay.errors import SessionError
from llamay.kv.snapshot import sweep
from llamay.session.records import SegmentRef
from llamay.session.tree import Tree

SMALL_BYTES = 8 * 2**20
MERGED_BYTES = 32 * 2**20
_SUFFIX = ".llamayctx"


@dataclass(frozen=True, slots=True)
class Merge:
    """Segments of a node, in order and without gaps, that one file should replace."""

    node: int
    segments: tuple[SegmentRef, ...]


class SegmentFiles:
    """The files in one folder; for one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def new_name(self, node: int, start: int, end: int) -> str:
        """A name that no segment of the session has or had."""
        return f"{node}-{start}-{end}-{secrets.token_hex(4)}{_SUFFIX}"

    def path(self, name: str) -> Path:
        """Where a segment is. Raises SessionError if the name leads out of the folder."""
        if not name or Path(name).name != name or name.startswith("."):
            raise SessionError(f"{self.folder}: expected the name of a segment, found {name!r}")
        return self.folder / name

    def missing(self, tree: Tree) -> dict[int, tuple[SegmentRef, ...]]:
        """By node: the segments whose files are gone or of another size. Reads no file."""
        sizes = self._sizes()
        missing = {
            node.id: tuple(ref for ref in node.segments if sizes.get(ref.name) != ref.bytes)
            for node in tree.nodes.values()
        }
        return {node: segments for node, segments in missing.items() if segments}

    def sweep(self, tree: Tree) -> int:
        """Removes files that no node needs, hidden ones included; returns the bytes freed.

        Not while a segment is being written that the tree does not know yet.
        """
        sweep(self.folder)
        needed = {ref.name for node in tree.nodes.values() for ref in node.segments}
        freed = 0
        for name, size in self._sizes().items():
            if name not in needed:
                with suppress(OSError):
                    (self.folder / name).unlink()
                    freed += size
        return freed

    def _sizes(self) -> dict[str, int]:
        """Every segment file and its size."""
        with suppress(OSError), os.scandir(self.folder) as entries:
            return {e.name: e.stat().st_size for e in entries if e.name.endswith(_SUFFIX)}
        return {}


def plan_merges(
    tree: Tree, small_bytes: int = SMALL_BYTES, merged_bytes: int = MERGED_BYTES
) -> list[Merge]:
    """What to merge: neighbours of under `small_bytes` each, into files of up to `merged_bytes`."""
    merges = []
    for node in tree.nodes.values():
        runs: list[list[SegmentRef]] = []
        for ref in node.segments:
            run = runs[-1] if runs else []
            fits = sum(part.bytes for part in run) + ref.bytes <= merged_bytes
            small = ref.bytes < small_bytes and all(part.bytes < small_bytes for part in run[-1:])
            if run and run[-1].end == ref.start and small and fits:
                run.append(ref)
            else:
                runs.append([ref])
        merges += [Merge(node.id, tuple(run)) for run in runs if len(run) > 1]
    return merges
