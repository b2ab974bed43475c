"""Help and log: text to read, over the main screen."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from llamay.tui.keys import GROUPS, Key
from llamay.tui.screen_keys import SCREENS
from llamay.tui.text import clean

ALL_GROUPS: dict[str, tuple[Key, ...]] = {**GROUPS, **SCREENS}

_WORDS = """\
switch     go to another place in this tree (Enter)
fork       begin a new branch at a turn; nothing is copied (f)
duplicate  begin a new session from a turn (D)

In the tree: ❯ and ● are on the active path, › and ○ are not; ⊟ can be folded, ⊞ is.
`2 own 31 shared` are a branch's pages of 64 tokens; RAM, disk and text only is where they are."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A notice in the log: when (HH:MM:SS), how serious, and what."""

    time: str
    level: str
    message: str


class Reading(ModalScreen[None]):
    """A text in a box that scrolls; any of several keys leaves it."""

    CSS_PATH = "dialog.tcss"
    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1,enter", "leave", "Leave"),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
    ]

    def __init__(self, title: str, text: Content) -> None:
        """Shows `text` under `title`."""
        super().__init__()
        self.text = text
        self._title = title

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._title), classes="title")
            with VerticalScroll():
                yield Static(self.text)
            yield Static(Content("Esc leaves, ↑ ↓ PgUp PgDn j k scroll"), classes="hint")

    def action_leave(self) -> None:
        """Back to where one was."""
        self.dismiss(None)

    def action_scroll(self, lines: int) -> None:
        """Scrolls by lines."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


def help_text(shown: Sequence[tuple[str, Iterable[tuple[str, Key]]]], keys_file: str) -> Content:
    """All keys by group, each with the keys that it has now.

    shown: a group's name, and for each of its actions the keys' names and the table's entry
    """
    parts: list[Content | str | tuple[str, str]] = []
    for name, keys in shown:
        parts.append((f"{name}\n", "bold $text-primary"))
        for names, key in keys:
            parts += [(f"  {names:<16}", "bold"), f" {key.help}\n"]
        parts.append("\n")
    parts += [("Words\n", "bold $text-primary")]
    parts += [f"  {line}\n" for line in _WORDS.split("\n")]
    parts.append(f"\nOther keys for these actions: [keys] in {clean(keys_file)}, such as\n")
    parts.append('  fork = "F"      by the names that the palette shows')
    return Content.assemble(*parts)


def log_text(entries: Sequence[Entry]) -> Content:
    """The notices of this run, the newest first."""
    if not entries:
        return Content("nothing yet")
    signs = {"info": " ", "warning": "!", "error": "✗"}
    lines = (f"{e.time} {signs[e.level]} {clean(e.message)}" for e in reversed(entries))
    return Content("\n".join(lines))
