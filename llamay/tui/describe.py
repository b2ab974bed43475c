"""What the screens say of a node: who it is of, how it stands, what it begins with."""

import re
from typing import TYPE_CHECKING

from llamay.tui.blocks import Blocks
from llamay.tui.text import one_line, plural
from llamay.tui.turn import Heading

if TYPE_CHECKING:
    from llamay.session.tree import Node, Tree

RUNNING = ("queued", "reading", "writing")
CONTINUABLE = ("stopped", "interrupted", "failed")
_PREVIEW_CHARS = 400
# Marks of Markdown, which a preview does without.
_MARKS = re.compile(r"^\s*```.*$|\*\*|`+|^#+ +|<think>|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)", re.M)
_STATE_WORDS = {
    "queued": "waits",
    "reading": "reads",
    "writing": "writes",
    "stopped": "stopped",
    "interrupted": "interrupted",
    "failed": "failed",
}


def preview(tree: "Tree", node: "Node") -> str:
    """The beginning of what a turn says, on one line, without the thinking before an answer."""
    if node.role == "root":
        return one_line((tree.effective(node.id).system or "")[:_PREVIEW_CHARS]) or "the beginning"
    text = node.text[:_PREVIEW_CHARS]
    if text.lstrip().startswith("<think>"):
        thought, end, answer = node.text.partition("</think>")
        text = answer[:_PREVIEW_CHARS] if end and answer.strip() else thought[:_PREVIEW_CHARS]
    return one_line(_MARKS.sub("", text) if node.role == "assistant" else text)


def last_code(text: str) -> str | None:
    """The last block of code of an answer, as it is; None if it has none."""
    blocks = Blocks()
    blocks.feed(text)
    blocks.finish()
    code: list[str] = []
    for block in reversed(blocks.complete):
        if block.kind == "code":
            code.insert(0, block.source)
            if not block.goes_on:
                return "\n".join(code)
    return None


def state_word(node: "Node") -> str:
    """How a turn stands, if it is not simply done."""
    return _STATE_WORDS.get(node.state, "")


def siblings(tree: "Tree", node: int) -> list[int]:
    """The node and its siblings, in order; the root is its own only one."""
    return [node] if node == tree.root.id else tree.children(tree.node(node).parent)


def which_sibling(tree: "Tree", node: int) -> str:
    """`#2 of 3`; empty for a turn without siblings."""
    all_of_them = siblings(tree, node)
    if len(all_of_them) < 2 or node not in all_of_them:
        return ""
    return f"#{all_of_them.index(node) + 1} of {len(all_of_them)}"


def heading(tree: "Tree", node: "Node", model: str, *, marked: bool) -> Heading:
    """The line above a turn."""
    who = {"user": "You", "assistant": model, "root": "System prompt"}[node.role]
    notes = [
        f"[{one_line(node.label)}]" if node.label else "",
        "✓ marked" if marked else "",
        which_sibling(tree, node.id),
    ]
    return Heading(who, "  ".join(note for note in notes if note))


def foot(node: "Node", resume_key: str) -> list[tuple[str, str]]:
    """Sentences below a turn that did not simply end, each with its style's name."""
    tokens = plural(len(node.ids), "token")
    match node.state:
        case "queued":
            return [("muted", "waits for the answer before it")]
        case "reading":
            return [("muted", "reading …")]
        case "stopped":
            return [("muted", f"stopped after {tokens}; {resume_key} continues from there")]
        case "interrupted":
            sentence = f"interrupted after {tokens}; {resume_key} continues from its exact token"
            return [("warning", sentence)]
        case "failed":
            return [("error", node.error or "failed"), ("muted", f"{resume_key} tries again")]
    if node.finish_reason == "context":
        return [
            (
                "warning",
                f"the context is full after {tokens} of this answer; fork from an earlier turn "
                "(f there), or start llamay with a larger --ctx-size",
            )
        ]
    if node.finish_reason == "length":
        return [("muted", f"ended at the most tokens that the settings allow, {tokens}")]
    return []


def branch_title(tree: "Tree", node: int) -> str:
    """Where a branch came from: its last label or fork, as `main ▸ "Which index?" #2 of 3`."""
    for id in reversed(tree.path(node)[1:]):
        turn = tree.node(id)
        if turn.label:
            return f"main ▸ [{one_line(turn.label)}]"
        if which := which_sibling(tree, id):
            return f'main ▸ "{_short(preview(tree, turn))}" {which}'
    return "main"


def _short(text: str, chars: int = 40) -> str:
    return text if len(text) <= chars else f"{text[: chars - 1].rstrip()}…"
