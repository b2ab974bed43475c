"""What a user did to a tree, so that it can be taken back and made again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamay.errors import SessionError
from llamay.session.node import Node


@dataclass(frozen=True, slots=True)
class Step:
    """One attribute of one node, before and after an edit."""

    attribute: str
    node: int
    before: Any
    after: Any


@dataclass(slots=True)
class Done:
    """An edit that can be taken back or made again.

    place: where the tree's place goes then; None leaves it where it is
    """

    place: int | None
    steps: list[Step]


@dataclass(slots=True)
class Edits:
    """The edits that were made, and those that were taken back, the next one last."""

    made: list[Done] = field(default_factory=list)
    undone: list[Done] = field(default_factory=list)

    def add(self, steps: list[Step], place: int) -> None:
        """An edit was made; place: where the tree's place was before."""
        moves = any(step.attribute == "hidden" for step in steps)
        self.made.append(Done(place if moves else None, steps))
        self.undone.clear()

    def undo(self, nodes: Mapping[int, Node], place: int) -> tuple[int, list[Step]]:
        """Takes the last edit back and returns the new place and what was changed.

        Raises SessionError if there is none.
        """
        if not self.made:
            raise SessionError("there is nothing to undo")
        done = self.made.pop()
        for step in reversed(done.steps):
            setattr(nodes[step.node], step.attribute, step.before)
        return self._moved(done, self.undone, place)

    def redo(self, nodes: Mapping[int, Node], place: int) -> tuple[int, list[Step]]:
        """Makes the edit again that was taken back last; as `undo`."""
        if not self.undone:
            raise SessionError("there is nothing to redo")
        done = self.undone.pop()
        for step in done.steps:
            setattr(nodes[step.node], step.attribute, step.after)
        return self._moved(done, self.made, place)

    def clear(self) -> None:
        """Nothing can be taken back or made again from now on."""
        self.made.clear()
        self.undone.clear()

    def _moved(self, done: Done, target: list[Done], place: int) -> tuple[int, list[Step]]:
        target.append(done if done.place is None else Done(place, done.steps))
        return place if done.place is None else done.place, done.steps


def phrase(done: list[Done], nodes: Mapping[int, Node]) -> str | None:
    """What the last of these edits was, such as `2 answers`; None if there are none."""
    if not done:
        return None
    steps = done[-1].steps
    node = nodes[steps[0].node]
    match steps[0]:
        case Step("hidden", after=True):
            return f'deletion of "{node.preview()}"'
        case Step("hidden") if node.role == "user":
            return f'message "{node.preview()}"'
        case Step("hidden"):
            return "an answer" if len(steps) == 1 else f"{len(steps)} answers"
        case Step("label", after=None, before=before):
            return f'removal of label "{before}"'
        case Step("label", after=after):
            return f'label "{after}"'
        case _:
            return "settings"
