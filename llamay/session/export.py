"""A session for people and other programs: drawn as a tree, as Markdown, or as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llamay.session.node import Node
from llamay.session.records import to_json
from llamay.session.tree import ROOT, Tree

_SPEAKERS = {"user": "You", "assistant": "Answer"}
_PREVIEW = 60


def draw(tree: Tree) -> Iterator[str]:
    """The visible turns, one on a line, joined by box connectors."""
    system = " ".join((tree.root.settings.system or "").split())
    yield f"system: {system}" if system else "(no system prompt)"
    below = tree.children(ROOT)
    # (node, what stands before its line, whether it is its parent's last child)
    waiting = [(id, "", id == below[-1]) for id in reversed(below)]
    while waiting:
        id, indent, is_last = waiting.pop()
        yield f"{indent}{'└─ ' if is_last else '├─ '}{_turn_line(tree, tree.node(id))}"
        below = tree.children(id)
        indent += "   " if is_last else "│  "
        waiting += [(child, indent, child == below[-1]) for child in reversed(below)]


def to_markdown(tree: Tree, title: str, nodes: Sequence[int]) -> str:
    """These turns, in this order, under their speakers; `title` is the heading.

    Where a turn does not follow the one before it, its heading names the one that it follows.
    """
    turns = [tree.node(id) for id in nodes if id != ROOT]
    before = [ROOT, *(node.id for node in turns)]
    numbered = any(node.parent != id for node, id in zip(turns, before, strict=False))
    parts = [f"# {title}"]
    if system := tree.root.settings.system:
        parts += ["## System", system]
    for node, id in zip(turns, before, strict=False):
        if (system := node.settings.system) is not None:
            parts += ["## System", system or "(none)"]
        parts += [f"## {_heading(node, id, numbered)}", node.text.strip("\n") or "(empty)"]
    return "\n\n".join(parts) + "\n"


def to_object(tree: Tree, name: str, nodes: Sequence[int]) -> dict[str, Any]:
    """These turns as an object for JSON: their texts, ids, log-probabilities and settings."""
    return {
        "name": name,
        **asdict(tree.info),
        "place": tree.place,
        "turns": [_turn_object(tree, tree.node(id)) for id in nodes],
    }


def _turn_line(tree: Tree, node: Node) -> str:
    marks = [node.label and f"[{node.label}]", node.id == tree.place and "<- here"]
    state = "" if node.state == "done" else f", {node.state}"
    who = _SPEAKERS[node.role].lower()
    words = [
        f"{node.id} {who}:",
        node.preview(_PREVIEW),
        f"({len(node.ids)} tokens{state})",
        *marks,
    ]
    return " ".join(word for word in words if word)


def _heading(node: Node, before: int, numbered: bool) -> str:
    heading = _SPEAKERS[node.role]
    if numbered:
        heading += f" {node.id}"
    if node.parent != before:
        heading += f", to {node.parent}" if node.parent != ROOT else ", to begin with"
    if node.label:
        heading += f" [{node.label}]"
    return heading if node.state == "done" else f"{heading} ({node.state})"


def _turn_object(tree: Tree, node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "parent": None if node.id == ROOT else node.parent,
        "role": node.role,
        "text": node.text,
        "ids": node.ids,
        "logprobs": node.logprobs,
        "position": tree.start(node.id),
        "label": node.label,
        "settings": to_json(node.settings),
        "seed": node.seed,
        "state": node.state,
        "finish_reason": node.finish_reason,
        "error": node.error,
        "created": node.created,
        "seconds": node.seconds,
        "model": node.model,
    }
