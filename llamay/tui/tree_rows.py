"""The tree as rows, one for each turn, with their connectors; plain data.

An only child stands below its parent; where a turn has several children, they are indented. So a
conversation that never branches is a straight column, however long it is.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamay.session.tree import Tree


@dataclass(frozen=True, slots=True)
class Row:
    """A turn's row.

    first, rest: what stands before its first line and its further ones
    children:    how many it has
    below:       how many turns are folded away below it, 0 if it is not folded
    """

    node: int
    first: str
    rest: str
    children: int
    below: int = 0


def rows(tree: "Tree", folded: Collection[int], only: Collection[int] | None = None) -> list[Row]:
    """The tree's rows from the root down.

    folded: nodes whose descendants are left out
    only:   shows these nodes and what is above them, and nothing is folded; None shows all
    """
    kept = None if only is None else {above for node in only for above in tree.path(node)}
    found: list[Row] = []
    waiting = [(tree.root.id, "", "")]
    while waiting:
        node, first, rest = waiting.pop()
        children = [id for id in tree.children(node) if kept is None or id in kept]
        if kept is None and children and node in folded:
            below = sum(1 for _ in tree.walk(node)) - 1
            found.append(Row(node, first, rest, len(children), below))
            continue
        indents = len(children) > 1
        found.append(Row(node, first, rest + "│ " if indents else rest, len(children)))
        for child in reversed(children):
            last = child == children[-1]
            corner, line = ("└─", "  ") if last else ("├─", "│ ")
            waiting.append((child, rest + corner, rest + line) if indents else (child, rest, rest))
    return found
