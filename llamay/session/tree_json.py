"""A whole tree as JSON, and back.

Token ids and log-probabilities are base64 of little-endian int32 and float64, which keeps every bit
and takes a tenth of the time of numbers in decimal.
"""

import sys
from array import array
from base64 import b64decode, b64encode
from dataclasses import fields
from typing import Any

from llamay.session.edits import Done, Edits, Step
from llamay.session.node import Node
from llamay.session.records import Info, SegmentRef, Settings, from_json, to_json
from llamay.session.tree import Tree

_PACKED = {"ids": "i", "logprobs": "d"}
_DEFAULTS = {field.name: field.default for field in fields(Node)}
_PLAIN = [name for name in _DEFAULTS if name not in {*_PACKED, "pieces", "settings", "segments"}]


def tree_to_json(tree: Tree) -> dict[str, Any]:
    """What `tree_from_json` takes; shares nothing with the tree."""
    return {
        "info": to_json(tree.info),
        "place": tree.place,
        "next_id": tree.next_id,
        "nodes": [_node_to_json(node) for node in tree.nodes.values()],
        "undo": [_done_to_json(done) for done in tree.edits.made],
        "redo": [_done_to_json(done) for done in tree.edits.undone],
    }


def tree_from_json(value: dict[str, Any]) -> Tree:
    """The tree; raises ValueError, TypeError or LookupError if it is none."""
    return Tree.restored(
        from_json(Info, value["info"]),
        [_node_from_json(node) for node in value["nodes"]],
        place=value["place"],
        next_id=value["next_id"],
        edits=Edits(
            *([_done_from_json(done) for done in value[name]] for name in ("undo", "redo"))
        ),
    )


def _node_to_json(node: Node) -> dict[str, Any]:
    plain = {name: getattr(node, name) for name in _PLAIN}
    result = {name: item for name, item in plain.items() if item != _DEFAULTS[name]}
    if node.text:
        result["text"] = node.text
    for name, code in _PACKED.items():
        if getattr(node, name):
            result[name] = _pack(code, getattr(node, name))
    if settings := to_json(node.settings):
        result["settings"] = settings
    if node.segments:
        result["segments"] = [to_json(segment) for segment in node.segments]
    return result


def _node_from_json(value: dict[str, Any]) -> Node:
    known: dict[str, Any] = {name: value[name] for name in _PLAIN if name in value}
    known |= {name: _unpack(code, value.get(name, "")) for name, code in _PACKED.items()}
    return Node(
        **known,
        pieces=[value.get("text", "")],
        settings=from_json(Settings, value.get("settings", {})),
        segments=tuple(from_json(SegmentRef, item) for item in value.get("segments", ())),
    )


def _done_to_json(done: Done) -> dict[str, Any]:
    return {"place": done.place, "steps": [_step_to_json(step) for step in done.steps]}


def _step_to_json(step: Step) -> list[Any]:
    values = [step.before, step.after]
    if step.attribute == "settings":
        values = [to_json(value) for value in values]
    return [step.attribute, step.node, *values]


def _done_from_json(value: dict[str, Any]) -> Done:
    return Done(value["place"], [_step_from_json(*step) for step in value["steps"]])


def _step_from_json(attribute: str, node: int, before: Any, after: Any) -> Step:
    if attribute == "settings":
        before, after = (from_json(Settings, item) for item in (before, after))
    return Step(attribute, node, before, after)


def _pack(code: str, values: list[Any]) -> str:
    data = array(code, values)
    if sys.byteorder == "big":
        data.byteswap()
    return b64encode(data.tobytes()).decode("ascii")


def _unpack(code: str, text: str) -> list[Any]:
    data = array(code, b64decode(text, validate=True))
    if sys.byteorder == "big":
        data.byteswap()
    return data.tolist()
