"""What the transcript shows before there is one: how to begin, and what waits for the model."""

from textual.content import Content
from textual.widgets import Static

from llamay.tui.text import MUTED, clean, one_line


class Welcome(Static):
    """Teaches the first steps."""

    DEFAULT_CSS = "Welcome { height: 1fr; padding: 1 2; }"

    def show(self, session: str | None, loading: str, waiting: list[str]) -> None:
        """session: its name, None before one is open; waiting: messages that will be sent then."""
        parts: list[Content | str | tuple[str, str]] = []
        if session is None:
            parts.append((f"{clean(loading)}\n\n", "bold"))
            parts.append("You can write already: what you send waits, and is answered then.\n")
            for text in waiting:
                parts += [("\nwaiting  ", MUTED), one_line(text)[:200]]
        else:
            parts += [
                ("A new conversation.\n\n", "bold"),
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
                f"Everything is saved as it is written, as “{one_line(session)}”; ",
                ("s", "bold"),
                " lists all sessions.\n",
                ("?", "bold"),
                " shows all keys, ",
                ("Ctrl+P", "bold"),
                " every command.",
            ]
        self.update(Content.assemble(*parts))
