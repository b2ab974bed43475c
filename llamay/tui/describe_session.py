"""What the screens say of a session as a whole: figures, and where the next message goes."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from llamay.tui import describe
from llamay.tui.bridge import Running
from llamay.tui.text import count, plural, rate

if TYPE_CHECKING:
    from llamay.session import Session
    from llamay.session.tree import Tree


def summary(session: "Session") -> str:
    """`3 branches · 35 pages, a copy would be 96`."""
    sentence = plural(len(session.tree.leaves()), "branch")
    if session.read_only:
        return sentence
    figures = session.figures()
    sentence += f" · {plural(figures.pages, 'page')}"
    if figures.copy_pages > figures.pages:
        sentence += f", a copy would be {count(figures.copy_pages)}"
    return sentence


def status(session: "Session", last: int | None, running: Running | None) -> list[str]:
    """The branch that ends at `last`, its answer if that is under way, and what else is."""
    parts = []
    if last is not None:
        parts.append(f"{count(session.tree.length(last))} tok")
    if running and running.tokens_per_s is not None:
        parts.append(rate(running.tokens_per_s))
    nodes = list(session.tree.nodes.values())  # a copy: other threads add nodes
    states = {node.id: node.state for node in nodes if not node.hidden}
    if others := sum(states[id] in ("reading", "writing") for id in states if id != last):
        parts.append(f"{others} more running")
    if queued := list(states.values()).count("queued"):
        parts.append(f"{queued} queued")
    if any(state in describe.RUNNING for state in states.values()):
        parts.append("Esc Stop")
    return parts


def editor_title(session: "Session", editing: int | None) -> str:
    """Where the next message goes; editing: the message that it stands beside."""
    tree = session.tree
    if editing is not None:
        return "edit: Enter makes a sibling of the message, Esc leaves it as it is"
    if session.place == tree.root.id:
        return "first message"
    place = tree.node(session.place)
    if tree.children(place.id):
        return f'new branch after "{describe.preview(tree, place)[:40]}"'
    return "message: it waits for the answer" if place.state in describe.RUNNING else "message"


def shown_path(tree: "Tree", node: int) -> list[int]:
    """The turns from the beginning to `node`, the system prompt first if there is one."""
    system = bool(tree.effective(node).system)
    return [id for id in tree.path(node) if system or id != tree.root.id]


def to_compare(tree: "Tree", marked: Collection[int], current: int) -> list[int]:
    """Marked turns in the order of the tree; without marks, an answer and its siblings."""
    nodes = [id for id in tree.walk() if id in marked]
    if not nodes and tree.node(current).role == "assistant":
        return describe.siblings(tree, current)
    return nodes


def delete_question(tree: "Tree", node: int) -> str:
    """How much goes with a turn."""
    below = sum(1 for _ in tree.walk(node)) - 1
    what = f"this turn and {plural(below, 'turn')} after it" if below else "this turn"
    return f"Delete {what}? Undo (u) brings it back until the session is closed."
