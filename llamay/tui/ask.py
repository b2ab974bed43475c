"""Dialogs that ask for one line or one number."""

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static


class AskLine(ModalScreen[str | None]):
    """Ends with the line, or None if the user left."""

    CSS_PATH = "dialog.tcss"
    DEFAULT_CSS = "AskLine .dialog Input { width: 60; max-width: 100%; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave")]

    def __init__(
        self, question: str, value: str = "", *, hint: str = "", suggested: bool = False
    ) -> None:
        """Asks `question`; the line begins as `value`, in whose place one types if `suggested`."""
        super().__init__()
        self._question, self._value, self._hint = question, value, hint
        self._suggested = suggested

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._question), classes="title")
            yield Input(self._value, select_on_focus=self._suggested)
            yield Static(Content(self._hint or "Enter takes it, Esc leaves"), classes="hint")

    @on(Input.Submitted)
    def submitted(self, event: Input.Submitted) -> None:
        """Answers with the line."""
        self.dismiss(event.value)

    def action_leave(self) -> None:
        """Answers with nothing."""
        self.dismiss(None)


class AskCount(ModalScreen[int | None]):
    """Ends with a number from 1 to 9, by one key."""

    CSS_PATH = "dialog.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n), f"take({n})", show=False) for n in range(1, 10)),
        Binding("enter", "take(0)", "Take"),
        Binding("escape", "leave", "Leave"),
    ]

    def __init__(self, question: str, default: int) -> None:
        """Asks `question`; Enter answers `default`."""
        super().__init__()
        self._question, self._default = question, default

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._question), classes="title")
            yield Static(Content(f"1 to 9; Enter is {self._default}, Esc leaves"), classes="hint")

    def action_take(self, number: int) -> None:
        """Answers with the number, or the default for 0."""
        self.dismiss(number or self._default)

    def action_leave(self) -> None:
        """Answers with nothing."""
        self.dismiss(None)
