"""What several branches share, and where each becomes its own; plain data, no widgets."""

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from llamay.tui.describe import RUNNING
from llamay.tui.turns_view import Turn
from llamay.tui.wrapped import Mark

if TYPE_CHECKING:
    from llamay.session import Session

_PARTS = "parts here"
_ENDS = "ends here"


class Histories:
    """Token histories side by side that only grow; what was compared is not compared again."""

    def __init__(self, histories: Sequence[Sequence[int]]) -> None:
        """Starts with at least one history; they are copied."""
        self._histories = [list(history) for history in histories]
        self._common = dict.fromkeys(combinations(range(len(histories)), 2), 0)
        self._compare()

    def extend(self, index: int, ids: Sequence[int]) -> None:
        """Appends tokens to one of them."""
        self._histories[index].extend(ids)
        self._compare()

    def length(self, index: int) -> int:
        """How many tokens one of them has."""
        return len(self._histories[index])

    @property
    def shared(self) -> int:
        """How many tokens from the start all have in common."""
        return min(self._common.values(), default=len(self._histories[0]))

    def parts_at(self, index: int, growing: Collection[int] = ()) -> int | None:
        """Position of the first token that no other one has there; None while there is none.

        That is where a branch leaves the one it follows longest, so branches that part from each
        other late have late marks even if a third parted early.
        growing: those to which tokens still come: one that is only behind may follow yet
        """
        others = [i for i in range(len(self._histories)) if i != index]
        common = {i: self._common[min(i, index), max(i, index)] for i in others}
        if any(common[i] == self.length(i) for i in others if i in growing):
            return None
        position = max(common.values(), default=self.length(index))
        return position if position < self.length(index) else None

    def _compare(self) -> None:
        for (first, second), common in self._common.items():
            one, other = self._histories[first], self._histories[second]
            end = min(len(one), len(other))
            while common < end and one[common] == other[common]:
                common += 1
            self._common[first, second] = common


class Comparison:
    """Branches of a session's tree by their last nodes, as the compare view shows them."""

    def __init__(self, session: "Session", nodes: Sequence[int]) -> None:
        """Starts with at least one node."""
        self.nodes = tuple(nodes)
        self._session = session
        tree = session.tree
        self._paths = [tree.path(node) for node in nodes]
        self._common_turns = _common_length(self._paths)
        self._marks: dict[int, tuple[int, Mark]] = {}
        self._read()

    def _read(self) -> None:
        tree = self._session.tree
        self._starts = [tree.start(node) for node in self.nodes]
        self._histories = Histories([tree.history(node) for node in self.nodes])
        self._marks.clear()

    def refresh(self, index: int) -> None:
        """Takes in the tokens that a branch has got since the last time."""
        tree, node = self._session.tree, self.nodes[index]
        start = tree.start(node)
        if start != self._starts[index]:  # a message got its tokens
            self._read()
            return
        known = self._histories.length(index) - start
        self._histories.extend(index, tree.node(node).ids[known:])

    @property
    def shared_tokens(self) -> int:
        """How many tokens all branches have in common."""
        return self._histories.shared

    def shared_pages(self) -> int | None:
        """How many pages all branches hold; None while one of them waits, and holds none yet."""
        tree = self._session.tree
        # A page is held by the ends of branches, and `nodes` may be on the way to these.
        tips = [{id for id in tree.walk(node) if not tree.children(id)} for node in self.nodes]
        if any(tree.node(node).state == "queued" for node in self.nodes):
            return None
        cells = self._session.page_map(self.nodes[0])
        return sum(all(held & set(cell.holders) for held in tips) for cell in cells)

    def own_tokens(self, index: int) -> int:
        """How many tokens a branch has after those that all have in common."""
        return self._histories.length(index) - self._histories.shared

    def turns(self, index: int) -> list[Turn]:
        """A branch's turns after those that all branches have, the place where it parts marked."""
        tree = self._session.tree
        nodes = [tree.node(id) for id in self._paths[index][self._common_turns :]]
        if not nodes:  # all else continues from here
            nodes = [tree.node(self.nodes[index])]
        marked, mark = self._mark(index) or (None, None)
        heads = {"user": "You", "assistant": "Answer" if len(nodes) > 1 else "", "root": "System"}
        return [
            Turn(heads[node.role], node.text, mark if node.id == marked else None) for node in nodes
        ]

    def _mark(self, index: int) -> tuple[int, Mark] | None:
        """The node and the place in its text where a branch parts; kept once it is known."""
        if index not in self._marks:
            tree = self._session.tree
            states = enumerate(tree.node(node).state for node in self.nodes)
            growing = [i for i, state in states if state in RUNNING]
            position = self._histories.parts_at(index, growing)
            if position is None:
                return None
            owner = next(id for id in reversed(self._paths[index]) if tree.start(id) <= position)
            mark = self._place(owner, position - tree.start(owner))
            if mark is None:
                return None
            self._marks[index] = owner, mark
        return self._marks[index]

    def _place(self, id: int, token: int) -> Mark | None:
        """A token of a node as a place in its text; None while its text is still to come."""
        node = self._session.tree.node(id)
        if node.role != "assistant":
            return Mark(0, 1, _PARTS)  # a template wrote the tokens around a user's words
        pieces = self._session.pieces(id)
        start = len("".join(pieces[:token]))
        # A character of several tokens is complete with its last one.
        shown = next((piece for piece in pieces[token:] if piece), "")
        if start < len(node.text):
            return Mark(start, min(start + len(shown), len(node.text)), _PARTS)
        return None if node.state in RUNNING else Mark(len(node.text), len(node.text), _ENDS)


def _common_length(paths: Sequence[Sequence[int]]) -> int:
    """How many ids all paths have in common from the start."""
    common = 0
    for ids in zip(*paths, strict=False):
        if len(set(ids)) > 1:
            break
        common += 1
    return common
