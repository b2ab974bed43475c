"""A list to choose one from, with the keys that the tree has."""

from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import OptionList

from llamay.tui.keys import bindings
from llamay.tui.screen_keys import PICK_LIST


class PickList(OptionList):
    """Rows are plain text; Enter and a click choose."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(PICK_LIST)]

    class NewWidth(Message):
        """Rows have got another width. A resize that leaves it alone, such as when a dialog above
        goes, is none: what was said of the rows stays."""

    def __init__(self, *, id: str | None = None) -> None:
        """Without rows."""
        super().__init__(id=id, markup=False)
        self._row_width = 0

    def on_resize(self, event: events.Resize) -> None:
        width = self.scrollable_content_region.width
        if width != self._row_width:
            self._row_width = width
            self.post_message(self.NewWidth())
