"""The records of new turns."""

import time

from llamay.sampling import child_seed
from llamay.session.records import NO_SETTINGS, AddNode, Settings
from llamay.session.tree import Tree


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
