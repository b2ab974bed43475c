"""The line to search all turns in."""

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class SearchBar(Input):
    """Tells what is typed as `Input.Changed`, and what else is wanted as its own messages."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,ctrl+n", "step(1)", "Next", show=True),
        Binding("up", "step(-1)", "Previous", show=True),
        Binding("enter", "finish(True)", "Take", show=True),
        Binding("escape", "finish(False)", "Leave", show=True),
    ]
    DEFAULT_CSS = "SearchBar { display: none; height: 1; border: none; padding: 0 1; }"

    class Step(Message):
        """The user wants the next (1) or previous (-1) match."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    class Finished(Message):
        """The user took the match that is shown, or left."""

        def __init__(self, taken: bool) -> None:
            super().__init__()
            self.taken = taken

    def action_step(self, step: int) -> None:
        """The next or previous match."""
        self.post_message(self.Step(step))

    def action_finish(self, taken: bool) -> None:
        """Takes the match, or leaves."""
        self.post_message(self.Finished(taken))
