"""The records of new turns, and which turns can have them."""

import time

from llamay.errors import SessionError
from llamay.sampling import child_seed
from llamay.session.node import Node
from llamay.session.records import NO_SETTINGS, AddNode, Settings
from llamay.session.tree import Tree

_RESUMABLE = ("interrupted", "stopped", "failed")


def ask(
    tree: Tree,
    id: int,
    parent: int,
    text: str,
    n: int,
    weights: str | None,
    settings: Settings = NO_SETTINGS,
) -> list[AddNode]:
    """A user's turn with number `id` after `parent`, and then `n` answers to it.

    weights: weights_sha256 of the model that reads and answers it
    """
    turn = AddNode(id, parent, "user", text, settings=settings, created=time.time(), model=weights)
    seed = settings.over(tree.effective(parent)).seed
    return [turn, *_answers(id + 1, id, 0, seed, n, weights)]


def further_answers(tree: Tree, user: int, n: int, weights: str | None) -> list[AddNode]:
    """`n` more answers to a user's turn, with the next seeds that no answer to it ever had."""
    index, seed = tree.next_seed_index(user), tree.effective(user).seed
    return _answers(tree.next_id, user, index, seed, n, weights)


def message_of(tree: Tree, id: int) -> Node:
    """The user's turn that a turn is or answers. Raises SessionError if there is none."""
    node = tree.node(id)
    user = node if node.role == "user" else tree.node(node.parent)
    if user.role != "user":
        raise SessionError(f"turn {id} answers no message; send one")
    return user


def place_of_message(tree: Tree, id: int) -> int:
    """Where a user's turn was sent. Raises SessionError if it is none."""
    node = tree.node(id)
    if node.role != "user":
        raise SessionError(f"turn {id} is no message; only messages are edited")
    return node.parent


def resumable(tree: Tree, id: int, weights: str | None) -> Node:
    """The answer, if it can go on from its exact token. Raises SessionError if not, with why."""
    node = tree.node(id)
    if node.role != "assistant" or node.state not in _RESUMABLE:
        raise SessionError(f"turn {id} is {node.state}; there is nothing to go on with")
    if node.model not in (None, weights):
        raise SessionError(f"turn {id} was begun by another model; regenerate it instead")
    if any(other.parent == id and other.ids for other in tree.nodes.values()):
        raise SessionError(
            f"turn {id} has been continued where it ended; regenerate it, or go on below it"
        )
    return node


def _answers(
    id: int, user: int, index: int, seed: int | None, n: int, weights: str | None
) -> list[AddNode]:
    return [
        AddNode(
            id + i,
            user,
            "assistant",
            seed_index=index + i,
            seed=child_seed(seed or 0, index + i),
            state="queued",
            created=time.time(),
            model=weights,
        )
        for i in range(n)
    ]
