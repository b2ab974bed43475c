"""Turns of one branch as plain text in a narrow pane, cheap to let grow."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from textual import events
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style

from llamay.tui.wrapped import Mark, Wrapped

_HEAD = Style(bold=True, dim=True)
_BLANK = Content()


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn shows: a line above it or none, its text, and a marked place in the text."""

    head: str
    text: str
    mark: Mark | None = None


class TurnsView(ScrollView, can_focus=True):
    """Stays at the end while text comes, unless it was scrolled away from there.

    It has no scroll bar: four of them, moved with every line, would double the work of a frame.
    """

    DEFAULT_CSS = "TurnsView { overflow-x: hidden; scrollbar-size: 0 0; }"

    class Scrolled(Message):
        """It was scrolled, but not because it grew or followed another."""

        def __init__(self, view: "TurnsView") -> None:
            super().__init__()
            self.view = view

    def __init__(self) -> None:
        super().__init__()
        self._turns: Sequence[Turn] = ()
        self._wrapped: list[Wrapped] = []
        self._lines: list[Content] = []
        self._strips: dict[int, tuple[Content, int, Style, Strip]] = {}
        self._moving = False

    @property
    def plain(self) -> str:
        """The lines as they are shown, without colours."""
        return "\n".join(line.plain.rstrip() for line in self._lines)

    @property
    def lines_below(self) -> int:
        """How many lines are to be scrolled to."""
        return max(round(self.max_scroll_y - self.scroll_target_y), 0)

    def show(self, turns: Sequence[Turn]) -> None:
        """Shows these turns instead of the present ones; what they only add is cheap."""
        self._turns = turns
        self._layout_lines()

    def follow(self, y: float) -> None:
        """Scrolls to a line because another view was; tells nobody."""
        self._move(y)

    def _layout_lines(self) -> None:
        width = self.size.width
        if width < 1:
            return
        at_end = self.scroll_target_y >= self.max_scroll_y
        del self._wrapped[len(self._turns) :]
        self._wrapped += [Wrapped() for _ in self._turns[len(self._wrapped) :]]
        before, self._lines = self._lines, []
        for turn, wrapped in zip(self._turns, self._wrapped, strict=True):
            wrapped.update(turn.text, width, turn.mark)
            self._lines += [_BLANK] if self._lines else []
            self._lines += [Content(turn.head).stylize(_HEAD)] if turn.head else []
            self._lines += wrapped.lines
        self._set_height(len(self._lines))
        if at_end:
            self._move(self.max_scroll_y)
        same = takewhile(lambda pair: pair[0] is pair[1], zip(before, self._lines, strict=False))
        first = sum(1 for _ in same)
        self.refresh_lines(first, max(len(before), len(self._lines)) - first)

    def _set_height(self, lines: int) -> None:
        """Takes a number of lines, without laying out the screen, in which nothing moves for it."""
        self.set_reactive(TurnsView.virtual_size, Size(self.size.width, lines))

    def _move(self, y: float) -> None:
        self._moving = True
        self.scroll_to(y=y, animate=False, force=True, immediate=True)
        self._moving = False

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._moving and round(old_value) != round(new_value):
            self.post_message(self.Scrolled(self))

    def on_resize(self, event: events.Resize) -> None:
        self._layout_lines()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract("\n".join(line.plain for line in self._lines)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def render_line(self, y: int) -> Strip:
        line_y = self.scroll_offset.y + y
        width, style = self.size.width, self.visual_style
        if line_y >= len(self._lines):
            return Strip.blank(width, style.rich_style)
        line = self._lines[line_y]
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(line_y)) is not None:
            start, end = span
            chosen = self.screen.get_visual_style("screen--selection")
            return self._strip(
                line.stylize(chosen, start, len(line) if end == -1 else end), line_y, style
            )
        known = self._strips.get(line_y)
        if known is None or known[0] is not line or known[1:3] != (width, style):
            known = (line, width, style, self._strip(line, line_y, style))
            self._strips[line_y] = known
        return known[3]

    def _strip(self, line: Content, line_y: int, style: Style) -> Strip:
        strip = Strip(line.render_segments(style))
        return strip.extend_cell_length(self.size.width, style.rich_style).apply_offsets(0, line_y)
