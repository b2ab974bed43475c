"""The editor of messages: several lines, history, and $EDITOR."""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import SuspendNotSupported
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import TextArea

from llamay.tui.key_order import act
from llamay.tui.keys import EDITOR, bindings
from llamay.tui.text import plural

_MAX_LINES, _MAX_CHARS = 500, 20_000


class Editor(TextArea):
    """Where messages are written; what is in it stays until it is sent.

    A text that is too long to edit quickly is put aside, and a word such as `[pasted 20,000
    lines]` stands for it; $EDITOR shows it whole.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(EDITOR)]
    DEFAULT_CSS = """
    Editor {
        height: auto; min-height: 1; max-height: 10;
        border: none; padding: 0; background: transparent;
    }
    Editor:focus { border: none; }
    """

    class Sent(Message):
        """The user sent this text."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, *, id: str | None = None) -> None:
        """Starts empty, without history."""
        super().__init__(
            id=id, soft_wrap=True, tab_behavior="focus", highlight_cursor_line=False, compact=True
        )
        self.cursor_blink = False
        self.past: list[str] = []
        self._at: int | None = None  # which of the past is shown; None: the draft
        self._draft = ""
        self._aside: dict[str, str] = {}  # what stands for a long text -> the text

    def remember(self, text: str) -> None:
        """Puts a text at the end of the history, once."""
        if text.strip():
            self.past = [other for other in self.past if other != text] + [text]
        self._at = None

    def put(self, text: str) -> None:
        """Shows a text to edit; a draft that it replaces goes to the history."""
        if self._at is None:
            self.remember(self.whole)
        self._replace(text)
        self._at = None

    @property
    def whole(self) -> str:
        """The text, with what was put aside in its place."""
        text = self.text
        for name, long in self._aside.items():
            text = text.replace(name, long)
        return text

    def on_paste(self, event: events.Paste) -> None:
        """Takes the text in place of what is selected; a long one is put aside."""
        event.stop()
        event.prevent_default()
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")  # terminals send Enter's code
        text = self._put_aside(text) if _is_long(text) else text
        self.replace(text, *self.selection, maintain_selection_offset=False)

    def action_send(self) -> None:
        """Sends what is written, if it is more than white space."""
        text = self.whole
        if not text.strip():
            return
        self.remember(text)
        self._replace("")
        self.post_message(self.Sent(text))

    def action_new_line(self) -> None:
        """A new line at the cursor."""
        self.insert("\n")

    def action_history(self, step: int) -> None:
        """A line up or down; where that is not possible, an earlier or later message.

        The draft comes after the last one.
        """
        at_edge = self.cursor_at_first_line if step < 0 else self.cursor_at_last_line
        if not at_edge or (step > 0 and self._at is None):
            self.action_cursor_up() if step < 0 else self.action_cursor_down()
            return
        if self._at is None:
            self._draft = self.whole
        position = len(self.past) if self._at is None else self._at
        position = max(0, min(position + step, len(self.past)))
        self._at = position if position < len(self.past) else None
        self._replace(self._draft if self._at is None else self.past[self._at])

    def action_external(self) -> None:
        """Opens the text in $VISUAL or $EDITOR, and takes back what was saved."""
        command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "message.md")
            file.write_text(self.whole, "utf-8")
            try:
                with self.app.suspend():
                    done = subprocess.run([*shlex.split(command), str(file)], check=False)
            except (OSError, ValueError, SuspendNotSupported) as error:
                self.notify(f"$EDITOR is {command!r}: {error}", severity="error", markup=False)
                return
            if done.returncode:
                self.notify(
                    f"$EDITOR ({command}) ended with {done.returncode}; the text is as it was",
                    severity="warning",
                    markup=False,
                )
                return
            self._replace(file.read_text("utf-8", errors="replace").removesuffix("\n"))

    async def on_key(self, event: events.Key) -> None:
        """Does what a key is bound to before the next key is text; Enter is no new line then.

        A key that comes after one that moved the focus is for where that went.
        """
        if self.app.focused is not self:
            self.app.post_message(events.Key(event.key, event.character))
        elif event.is_printable or not await act(self.app, event.key):
            return
        event.stop()
        event.prevent_default()  # Textual calls the base class's handler itself

    def _replace(self, text: str) -> None:
        self._aside.clear()
        self.load_text(self._put_aside(text) if _is_long(text) else text)
        self.move_cursor(self.document.end)

    def _put_aside(self, text: str) -> str:
        """Keeps a text and returns what stands for it."""
        number = f" #{len(self._aside) + 1}" if self._aside else ""
        name = f"[pasted {plural(text.count(chr(10)) + 1, 'line')}{number}]"
        self._aside[name] = text
        return name


def _is_long(text: str) -> bool:
    return len(text) > _MAX_CHARS or text.count("\n") >= _MAX_LINES
