"""The page map: one cell for each page of a branch, in reading order."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import RenderResult
from textual.binding import BindingType
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.widget import Widget

from llamay.tui.keys import bindings
from llamay.tui.screen_keys import PAGE_MAP
from llamay.tui.text import MUTED, count

if TYPE_CHECKING:
    from llamay.session.states import PageCell

_SHADES = "░▒▓█"  # for one, two, three, and more branches that hold a page
_PLACES = {"disk": "□", "spilled": "◇", "none": "·"}
_WRITTEN = "+"
_NONE = "no pages yet: the first message makes them"
_PER_ROW = 16
_STYLES = {
    "░": "$text-secondary",
    "▒": "$text-primary",
    "▓": "$text-primary",
    "█": "$text-primary",
    "+": "bold $text-accent",
}
_MEANINGS = {
    "░": "own",
    "▒": "2 share",
    "▓": "3 share",
    "█": "4 or more share",
    "+": "being written",
    "□": "on disk",
    "◇": "spilled",
    "·": "to be computed",
}


class PageMap(Widget, can_focus=True):
    """Cells in rows, the position of each row's first token beside it; tells what is pointed at."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(PAGE_MAP)]
    DEFAULT_CSS = """
    PageMap { height: auto; }
    PageMap:focus { background-tint: $foreground 10%; }
    """

    class Pointed(Message):
        """Another page is chosen or under the mouse; None: none is."""

        def __init__(self, cell: "PageCell | None") -> None:
            super().__init__()
            self.cell = cell

    def __init__(self, *, id: str | None = None) -> None:
        """Without pages."""
        super().__init__(id=id)
        self.cells: Sequence[PageCell] = ()
        self._writing = False
        self._chosen: int | None = None
        self._hovered: int | None = None

    def show(self, cells: "Sequence[PageCell]", *, writing: bool) -> None:
        """Shows these pages; writing: whether tokens come to the last one."""
        if (cells, writing) == (self.cells, self._writing):
            return
        grown = len(cells) != len(self.cells)
        self.cells, self._writing = cells, writing
        if self._chosen is not None and self._chosen >= len(cells):
            self._chosen = None
        self.refresh(layout=grown)
        self._tell()

    @property
    def pointed(self) -> "PageCell | None":
        """The page under the mouse, else the chosen one."""
        index = self._chosen if self._hovered is None else self._hovered
        return None if index is None or index >= len(self.cells) else self.cells[index]

    def legend(self) -> Content:
        """What the signs that are there mean, and how many pages have each."""
        signs = Counter(self._sign(index) for index in range(len(self.cells)))
        lines = [
            Content.assemble((sign, _STYLES.get(sign, "")), f" {meaning} · {count(signs[sign])}")
            for sign, meaning in _MEANINGS.items()
            if signs[sign]
        ]
        return Content("\n").join(lines)

    def _sign(self, index: int) -> str:
        cell = self.cells[index]
        if self._writing and index == len(self.cells) - 1:
            return _WRITTEN
        if cell.where != "memory":
            return _PLACES[cell.where]
        return _SHADES[min(max(len(cell.holders), 1), len(_SHADES)) - 1]

    @property
    def _per_row(self) -> int:
        return _PER_ROW * max(1, (self.size.width - 8) // _PER_ROW)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if not self.cells:
            return len(Content(_NONE).wrap(width))
        per_row = _PER_ROW * max(1, (width - 8) // _PER_ROW)
        return max(1, -(-len(self.cells) // per_row))

    def render(self) -> RenderResult:
        if not self.cells:
            return Content(_NONE).stylize(MUTED)
        return Content("\n").join(
            self._row(start) for start in range(0, len(self.cells), self._per_row)
        )

    def _row(self, start: int) -> Content:
        end = min(start + self._per_row, len(self.cells))
        chosen = {self._chosen, self._hovered}
        parts: list[str | tuple[str, str]] = []
        for index in range(start, end):
            sign = self._sign(index)
            style = _STYLES.get(sign, "")
            parts.append((sign, f"reverse {style}" if index in chosen else style))
        first = count(self.cells[start].start)
        gap = self.size.width - self._per_row - len(first)
        if gap > 0:
            parts += [" " * (self._per_row - (end - start) + gap), (first, MUTED)]
        return Content.assemble(*parts)

    def action_move(self, step: str) -> None:
        """Chooses another page: by cells, by rows, or the first or last."""
        last = len(self.cells) - 1
        if last < 0:
            return
        now = self._chosen if self._chosen is not None else last
        if step == "down" and now + self._per_row > last:
            self.screen.focus_next()
            return
        steps = {
            "left": now - 1,
            "right": now + 1,
            "up": now - self._per_row,
            "down": now + self._per_row,
            "home": 0,
            "end": last,
        }
        self._choose(min(max(steps[step], 0), last) if self._chosen is not None else now)

    def _choose(self, index: int | None) -> None:
        self._chosen = index
        self.refresh()
        self._tell()

    def _tell(self) -> None:
        self.post_message(self.Pointed(self.pointed))

    def _at(self, x: int, y: int) -> int | None:
        index = y * self._per_row + x
        return index if x < self._per_row and index < len(self.cells) else None

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._hover(self._at(event.x, event.y))

    def on_leave(self, event: events.Leave) -> None:
        self._hover(None)

    def on_click(self, event: events.Click) -> None:
        self._choose(self._at(event.x, event.y))

    def _hover(self, index: int | None) -> None:
        if index != self._hovered:
            self._hovered = index
            self.refresh()
            self._tell()
