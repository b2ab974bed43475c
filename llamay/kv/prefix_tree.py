"""A radix tree over token sequences; its leaves hold contexts.

    retained: [1 2 3 4 5]  [1 2 3 9]        the root has no tokens, an inner node no context and at
                                            least two children; what a leaf holds covers every
            (root)                          prefix on its path, so a shorter sequence that is
              └ 1 2 3                       retained too adds nothing
                  ├ 4 5   -> context
                  └ 9     -> context

Callers hold the cache's lock.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from llamay.kv.context import Context

Tokens: TypeAlias = "array[int]"


class Node:
    """tokens: the edge from the parent; context: at leaves only."""

    __slots__ = ("children", "context", "parent", "tokens")

    def __init__(self, tokens: Tokens, parent: "Node | None", context: Context | None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.context = context
        self.children: dict[int, Node] = {}


class PrefixTree:
    """Retained contexts, found by any prefix of theirs."""

    def __init__(self) -> None:
        self.root = Node(array("i"), None, None)

    def find(self, tokens: Sequence[int]) -> tuple[Node, int] | None:
        """The leaf that begins like `tokens` for longest, and for how long; None if none does.

        Of several, the one whose tokens sort first. Changes nothing.
        """
        node, length = self._walk(array("i", tokens))
        if length == 0:
            return None
        while node.children:
            node = node.children[min(node.children)]
        return node, length

    def insert(self, tokens: Sequence[int], context: Context) -> tuple[Node, Node | None]:
        """Adds a leaf for `tokens`, of which no leaf covers all yet; the tree then owns `context`.

        Returns the leaf, and the leaf whose context became redundant: it covered a part of
        `tokens` only, and has left the tree.
        """
        key = array("i", tokens)
        node, length = self._walk(key)
        depth = self._depth(node)
        if node is not self.root and length == depth and not node.children:
            parent = node.parent
            assert parent is not None
            leaf = Node(node.tokens + key[length:], parent, context)
            parent.children[leaf.tokens[0]] = leaf
            return leaf, node
        if length < depth:
            node = self._split(node, len(node.tokens) - (depth - length))
        leaf = Node(key[length:], node, context)
        node.children[key[length]] = leaf
        return leaf, None

    def remove(self, leaf: Node) -> None:
        """Takes a leaf out; a parent left with one child merges with it."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[0]]
        if parent is self.root or len(parent.children) != 1:
            return
        (child,) = parent.children.values()
        above = parent.parent
        assert above is not None
        child.tokens = parent.tokens + child.tokens
        child.parent = above
        above.children[child.tokens[0]] = child

    def leaves(self) -> Iterator[tuple[Tokens, Node]]:
        """Every leaf with the whole token sequence of its path."""
        pending = [(child.tokens, child) for child in self.root.children.values()]
        while pending:
            path, node = pending.pop()
            if not node.children:
                yield path, node
            pending += [(path + child.tokens, child) for child in node.children.values()]

    def check(self) -> None:
        """Asserts that this is a well-formed radix tree; for tests."""
        pending = list(self.root.children.items())
        while pending:
            first, node = pending.pop()
            assert len(node.tokens) > 0
            assert node.tokens[0] == first
            assert len(node.children) != 1, "a node with one child is not merged"
            assert (node.context is None) == bool(node.children), "contexts are at leaves"
            for child in node.children.values():
                assert child.parent is node
            pending += node.children.items()

    def _walk(self, tokens: Tokens) -> tuple[Node, int]:
        """The deepest node that `tokens` reaches into, and how many of them match."""
        node, length = self.root, 0
        while length < len(tokens):
            child = node.children.get(tokens[length])
            if child is None:
                break
            node = child
            common = _common_length(node.tokens, tokens[length : length + len(node.tokens)])
            length += common
            if common < len(node.tokens):
                break
        return node, length

    def _depth(self, node: Node | None) -> int:
        """Tokens from the root to the end of a node's edge."""
        depth = 0
        while node is not None:
            depth += len(node.tokens)
            node = node.parent
        return depth

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node's edge in two and returns the new inner node above the cut.

        parent ─ a b c d      becomes      parent ─ a b ─ c d
        """
        parent = node.parent
        assert parent is not None
        upper = Node(node.tokens[:at], parent, None)
        parent.children[upper.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[at:], upper
        upper.children[node.tokens[0]] = node
        return upper


def _common_length(a: Tokens, b: Tokens) -> int:
    if a[: len(b)] == b:  # compared in C: the common case
        return len(b)
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
