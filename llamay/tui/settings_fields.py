"""The settings of a branch as a form has them: names, text to values and back, and origins."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamay.errors import UsageError
from llamay.sampling import SamplingParams
from llamay.session.records import Settings
from llamay.tui.describe import preview
from llamay.tui.text import one_line

if TYPE_CHECKING:
    from llamay.session.tree import Tree

_DEFAULTS = SamplingParams()
_NAME = 24


def _integer(text: str) -> int:
    return int(text.replace(",", "").replace("_", ""))


def _texts(text: str) -> tuple[str, ...]:
    return tuple(part.replace("\\n", "\n").replace("\\t", "\t") for part in text.split("|"))


@dataclass(frozen=True, slots=True)
class Field:
    """One of the numbers or texts of `Settings`.

    name:     the attribute, of `SamplingParams` too
    read:     text to value; raises ValueError
    expected: what `read` wants, for the message if it does not get it
    """

    name: str
    read: Callable[[str], Any]
    expected: str

    @property
    def label(self) -> str:
        """The field's name as the command line has it."""
        return self.name.replace("_", "-")

    def value(self, text: str) -> Any:
        """The value that a text says; None if it is empty. Raises UsageError for a wrong one."""
        text = text.strip()
        if not text:
            return None
        try:
            value = self.read(text)
        except ValueError:
            raise UsageError(f"{self.label}: expected {self.expected}, found {text}") from None
        SamplingParams(**{self.name: value})
        return value

    def shown(self, value: Any) -> str:
        """A value as `value` reads it; empty for None."""
        if value is None:
            return ""
        if self.name == "stop":
            return "|".join(one.replace("\n", "\\n").replace("\t", "\\t") for one in value)
        return f"{value:g}" if isinstance(value, float) else str(value)


FIELDS = (
    Field("temperature", float, "a number such as 0.8"),
    Field("top_k", _integer, "a whole number such as 40"),
    Field("top_p", float, "a number such as 0.95"),
    Field("min_p", float, "a number such as 0.05"),
    Field("repeat_penalty", float, "a number such as 1.1"),
    Field("presence_penalty", float, "a number such as 0.5"),
    Field("frequency_penalty", float, "a number such as 0.5"),
    Field("seed", _integer, "a whole number such as 7"),
    Field("max_tokens", _integer, "a whole number such as 200"),
    Field("stop", _texts, "texts with | between"),
)


def inherited(tree: "Tree", id: int) -> Settings:
    """What would hold at a node if nothing was set at it."""
    return Settings() if id == tree.root.id else tree.effective(tree.node(id).parent)


def origin(tree: "Tree", id: int, name: str) -> str:
    """What holds before a node for a setting, and where on its path that was set, in words."""
    before = tree.path(id)[:-1]
    at = next(
        (n for n in reversed(before) if getattr(tree.node(n).settings, name) is not None), None
    )
    if name == "system":
        return "none" if at is None else f"set at {place(tree, at)}"
    field = next(field for field in FIELDS if field.name == name)
    if at is None:
        shown = field.shown(getattr(_DEFAULTS, name)) or "none"
        return f"{shown} · llamay's own"
    return f"{field.shown(getattr(tree.node(at).settings, name))} · set at {place(tree, at)}"


def place(tree: "Tree", id: int) -> str:
    """A turn's label or beginning, in quotes; the root is the beginning."""
    node = tree.node(id)
    if node.role == "root":
        return "the beginning"
    name = one_line(node.label or "") or preview(tree, node) or "an empty turn"
    return f"“{name if len(name) <= _NAME else name[: _NAME - 1] + '…'}”"
