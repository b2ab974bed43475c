"""What the transcript shows where no turn is: how to begin, and what waits for the model."""

from typing import TYPE_CHECKING

from textual.content import Content
from textual.widgets import Static

from llamay.tui.text import MUTED, clean, one_line

if TYPE_CHECKING:
    from llamay.session import Session

_KEYS: tuple[str | tuple[str, str], ...] = (
    "Write a message below; ",
    ("Enter", "bold"),
    " sends it.\n",
    ("Esc", "bold"),
    " leaves the editor, and single keys act: ",
    ("f", "bold"),
    " on any turn starts a new branch there, ",
    ("e", "bold"),
    " edits a message beside the old one, ",
    ("n", "bold"),
    " asks for several answers at once. Nothing is lost or computed again.\n\n",
)


class Welcome(Static):
    """Teaches the first steps."""

    DEFAULT_CSS = "Welcome { height: 1fr; padding: 1 2; }"

    def show_loading(self, sentence: str, waiting: list[str]) -> None:
        """Says how far opening is; waiting: messages that will be sent then."""
        parts: list[str | tuple[str, str]] = [(f"{clean(sentence)}\n\n", "bold")]
        parts.append("You can write already: what you send waits, and is answered then.\n")
        for text in waiting:
            parts += [("\nwaiting  ", MUTED), one_line(text)[:200]]
        self.update(Content.assemble(*parts))

    def show_begin(self, session: "Session") -> None:
        """Says what can be done at the beginning of a session, and where it is saved."""
        others = len(session.tree.children(session.tree.root.id))
        begin = "The beginning: a message here starts another branch." if others else ""
        self.update(
            Content.assemble(
                (f"{begin or 'A new conversation.'}\n\n", "bold"),
                *_KEYS,
                f"Everything is saved as it is written, as “{one_line(session.name)}”; ",
                ("s", "bold"),
                " lists all sessions.\n",
                ("?", "bold"),
                " shows all keys, ",
                ("Ctrl+P", "bold"),
                " every command.",
            )
        )
