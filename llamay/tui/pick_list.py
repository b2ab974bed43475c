"""A list to choose one from, with the keys that the tree has."""

from typing import ClassVar

from textual.binding import BindingType
from textual.widgets import OptionList

from llamay.tui.keys import bindings
from llamay.tui.screen_keys import PICK_LIST


class PickList(OptionList):
    """Rows are plain text; Enter and a click choose."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(PICK_LIST)]

    def __init__(self, *, id: str | None = None) -> None:
        """Without rows."""
        super().__init__(id=id, markup=False)
