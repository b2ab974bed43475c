"""A question before something that takes away."""

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from llamay.tui.keys import bindings
from llamay.tui.screen_keys import CONFIRM


class Confirm(ModalScreen[bool]):
    """Ends with True only if the user says so; the focus begins on "Keep"."""

    CSS_PATH = "dialog.tcss"
    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(CONFIRM)]

    def __init__(self, question: str, yes: str, *, no: str = "Keep") -> None:
        """Asks `question`; `yes` and `no` are what the buttons say."""
        super().__init__()
        self._question, self._yes, self._no = question, yes, no

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._question))
            with Horizontal(classes="buttons"):
                yield Button(Content(f"{self._yes} (y)"), id="yes", variant="error")
                yield Button(Content(f"{self._no} (n)"), id="no")

    @on(Button.Pressed)
    def pressed(self, event: Button.Pressed) -> None:
        """Answers with the button."""
        self.dismiss(event.button.id == "yes")

    def action_yes(self) -> None:
        """Answers yes."""
        self.dismiss(True)

    def action_no(self) -> None:
        """Answers no."""
        self.dismiss(False)
