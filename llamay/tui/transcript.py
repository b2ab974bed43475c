"""The transcript of a branch: turns from the beginning to the one that is shown last.

It draws only the lines that are on the screen, and a token costs what its block costs.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.geometry import Region
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.theme import Theme

from llamay.tui import describe
from llamay.tui.keys import TRANSCRIPT, bindings
from llamay.tui.markdown import STYLES, Markdown
from llamay.tui.scrolling import component_style, set_lines
from llamay.tui.turn import Turn

if TYPE_CHECKING:
    from llamay.session import Session

_GUTTER = 2
_CHOSEN, _OTHER = "▌ ", "  "
_KEPT_TURNS = 100  # of branches that are not shown
_LINE_STYLES = ("heading", "muted", "warning", "error")


class Transcript(ScrollView, can_focus=True):
    """Shows one branch; `chosen` is the turn that actions are about."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(TRANSCRIPT)]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *(f"transcript--{name}" for name in (*STYLES, *_LINE_STYLES, "chosen"))
    }
    DEFAULT_CSS = """
    Transcript { overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    Transcript > .transcript--heading { text-style: bold; color: $text-primary; }
    Transcript > .transcript--muted { color: $foreground 60%; }
    Transcript > .transcript--warning { color: $text-warning; }
    Transcript > .transcript--error { color: $text-error; text-style: bold; }
    Transcript > .transcript--chosen { color: $primary; }
    Transcript > .transcript--strong { text-style: bold; }
    Transcript > .transcript--em { text-style: italic; }
    Transcript > .transcript--strike { text-style: strike; }
    Transcript > .transcript--link { text-style: underline; }
    Transcript > .transcript--code { color: $text-accent; }
    Transcript > .transcript--codeblock { background: $surface; color: $foreground; }
    Transcript > .transcript--keyword { color: $text-accent; }
    Transcript > .transcript--string { color: $text-success; }
    Transcript > .transcript--comment { color: $foreground 60%; text-style: italic; }
    Transcript > .transcript--number { color: $text-warning; }
    Transcript > .transcript--name { color: $text-primary; }
    """

    class Chosen(Message):
        """Another turn was chosen here."""

        def __init__(self, node: int) -> None:
            super().__init__()
            self.node = node

    def __init__(self, *, id: str | None = None) -> None:
        """Shows nothing before `bind`."""
        super().__init__(id=id)
        self.model_name = "Answer"
        self.resume_key = "R"
        self._marked: set[int] = set()
        self.chosen: int | None = None
        self._session: Session | None = None
        self._path: list[int] = []
        self._turns: dict[int, Turn] = {}
        self._starts: list[int] = [0]
        self._styles: dict[str, Style] = {}
        self._base = Style.null()
        self._line_width = 0
        self._follows = True
        self._settling = False

    def bind(self, session: "Session", marked: set[int]) -> None:
        """Shows turns of `session` from now on, none yet; marked: nodes with a check mark."""
        self._session, self._path, self._turns, self.chosen = session, [], {}, None
        self._marked = marked
        self._lay_out()

    @property
    def path(self) -> list[int]:
        """The nodes that are shown, in order."""
        return self._path

    def show(self, path: list[int], chosen: int, *, at_end: bool) -> None:
        """Shows these nodes; at_end: scrolled to the end, else to where the chosen one begins."""
        same = path == self._path
        self._path, self.chosen = path, chosen
        self.refresh_turns()
        if at_end:
            self._follows = True
            self._lay_out()
        elif not same:
            self._follows = False
            self.scroll_to_turn(chosen)

    def refresh_turns(self, nodes: frozenset[int] | None = None) -> None:
        """Looks again at these nodes, or at all."""
        if self._session is None:
            return
        changed = [
            id for id in self._path if (nodes is None or id in nodes) and self._refresh_turn(id)
        ]
        if nodes is None:
            self._forget_turns()
            self._lay_out()
        elif changed:
            self._lay_out(changed[0])

    def toggle_long(self) -> bool:
        """Shows or folds what is long in the chosen turn; False if there is nothing."""
        turn = self._turns.get(self.chosen) if self.chosen is not None else None
        if turn is None or not turn.can_unfold:
            return False
        turn.toggle()
        self._follows = False
        self._lay_out()
        return True

    def scroll_to_turn(self, node: int) -> None:
        """Scrolls so that the turn's heading is seen, and as much of the turn as has room."""
        if node not in self._path or not self._width:
            return
        index = self._path.index(node)
        height = self.scrollable_content_region.height
        turn = self._turns[node]
        turn.settle_lines(0, height)
        self._count_lines()
        top = self._starts[index]
        bottom = top + min(turn.height, height)
        y = self.scroll_offset.y
        if top < y:
            self._scroll(top)
        elif bottom > y + height:
            self._scroll(bottom - height)
        else:
            self._settle_visible()
            self.refresh()

    # lines

    @property
    def _width(self) -> int:
        return max(self.scrollable_content_region.width - _GUTTER - 1, 0)

    def _refresh_turn(self, id: int) -> bool:
        assert self._session is not None, "bind comes first"
        tree = self._session.tree
        node = tree.node(id)
        turn = self._turns.get(id)
        if turn is None:
            turn = self._turns[id] = Turn(id, node.role)
            if self._styles:
                turn.set_look(Markdown(self._width, self._styles), self._width)
        text = node.text if node.role != "root" else tree.effective(id).system or ""
        return turn.show(
            text,
            describe.heading(tree, node, self.model_name, marked=id in self._marked),
            describe.foot(node, self.resume_key),
            writing=node.state in describe.RUNNING,
        )

    def _forget_turns(self) -> None:
        for id in [id for id in self._turns if id not in self._path][:-_KEPT_TURNS]:
            del self._turns[id]

    def _set_look(self) -> None:
        """Takes the theme's styles and the width."""
        self._styles = {
            name: component_style(self, f"transcript--{name}")
            for name in (*STYLES, *_LINE_STYLES, "chosen")
        }
        self._base, self._line_width = self.rich_style, self.scrollable_content_region.width
        markdown = Markdown(self._width, self._styles)
        for turn in self._turns.values():
            turn.set_look(markdown, self._width)

    def _count_lines(self) -> None:
        heights = (self._turns[id].height for id in self._path)
        self._starts = [0, *accumulate(heights)]
        set_lines(self, self._starts[-1])

    def _lay_out(self, grown: int | None = None) -> None:
        """Takes in what changed, and stays where it was, or at the end.

        grown: the first node whose turn changed, if only turns' ends did
        """
        if not self._styles or not self._width:
            return
        y = self.scroll_offset.y
        self._count_lines()
        if self._follows:
            self._scroll_to_end()
        self._settle_visible()
        if grown is None or self.scroll_offset.y != y:
            self.refresh()
            return
        index = self._path.index(grown)
        top = max(self._starts[index] + self._turns[grown].changed_from - y, 0)
        if top < self.size.height:
            self.refresh(Region(0, top, self.size.width, self.size.height - top))

    def _scroll_to_end(self) -> None:
        height = self.scrollable_content_region.height
        while True:  # what becomes exact may be higher or lower than was thought
            before = self._starts[-1]
            self._settle(before - height, before)
            if self._starts[-1] == before:
                break
        self._scroll(max(self._starts[-1] - height, 0))

    def _settle_visible(self) -> None:
        y = self.scroll_offset.y
        self._settle(y, y + self.scrollable_content_region.height)

    def _settle(self, first: int, last: int) -> None:
        """Renders what stands in lines [first, last) of all."""
        for index, id in enumerate(self._path):
            start, end = self._starts[index], self._starts[index + 1]
            if start < last and first < end:
                self._turns[id].settle_lines(max(first - start, 0), last - start)
        self._count_lines()

    def _scroll(self, y: int) -> None:
        self._settling = True
        self.scroll_to(y=y, animate=False, immediate=True, force=True)
        self._settling = False

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value) and self._styles and self._path:
            self._settle_visible()
            if not self._settling:
                self._follows = self.scroll_offset.y >= self.max_scroll_y

    def on_mount(self) -> None:
        """Follows the theme."""
        self.app.theme_changed_signal.subscribe(self, self._theme_changed)

    def _theme_changed(self, theme: Theme) -> None:
        self._set_look()
        self._lay_out()

    def on_resize(self, event: events.Resize) -> None:
        """Wraps all lines anew, and keeps the turn at the top at the top."""
        top = self._turn_at(self.scroll_offset.y)
        self._set_look()
        self._lay_out()
        if not self._follows and top is not None:
            self._scroll(self._starts[self._path.index(top)])

    def render_line(self, y: int) -> Strip:
        width = self._line_width
        line = self.scroll_offset.y + y
        id = self._turn_at(line)
        if id is None:
            return Strip.blank(width, self._base)
        start = self._starts[self._path.index(id)]
        try:
            name, text = self._turns[id].line(line - start)
        except IndexError:
            return Strip.blank(width, self._base)
        chosen = id == self.chosen and name != "gap"
        gutter = Segment(_CHOSEN if chosen else _OTHER, self._styles["chosen"])
        base = self._styles.get(name)
        segments = [s for s in text.render(self.app.console) if s.text]
        strip = Strip([gutter, *(Segment.apply_style(segments, base) if base else segments)])
        return strip.apply_style(self._base).adjust_cell_length(width, self._base)

    def _turn_at(self, line: int) -> int | None:
        if not 0 <= line < self._starts[-1]:
            return None
        return self._path[bisect_right(self._starts, line) - 1]

    # what the user does

    def _choose(self, index: int) -> None:
        node = self._path[max(0, min(index, len(self._path) - 1))]
        if node != self.chosen:
            self.chosen = node
            self._tell(self.Chosen(node))
        self.scroll_to_turn(node)

    @property
    def _chosen_index(self) -> int:
        return self._path.index(self.chosen) if self.chosen in self._path else len(self._path) - 1

    def _step(self, lines: int) -> None:
        """Scrolls within the chosen turn while it goes on that way, else chooses the next one."""
        if not self._path:
            return
        index = self._chosen_index
        top, bottom = self._starts[index], self._starts[index + 1]
        y, height = self.scroll_offset.y, self.scrollable_content_region.height
        goes_on = bottom > y + height if lines > 0 else top < y
        if goes_on:
            self.scroll_to(y=y + lines, animate=False)
        else:
            self._choose(index + (1 if lines > 0 else -1))

    def _tell(self, message: Message) -> None:
        # Whoever called: a message does not pass its sender on its way up.
        self.post_message(message.set_sender(self))

    def action_up(self) -> None:
        """A few lines up, or the turn above."""
        self._step(-3)

    def action_down(self) -> None:
        """A few lines down, or the turn below."""
        self._step(3)

    def action_page(self, pages: int) -> None:
        """A page up or down; chooses the turn that is then in view."""
        height = self.scrollable_content_region.height
        self.scroll_to(y=self.scroll_offset.y + pages * (height - 2), animate=False, immediate=True)
        middle = self._turn_at(self.scroll_offset.y + (0 if pages < 0 else height - 2))
        if middle is not None and middle != self.chosen:
            self.chosen = middle
            self._tell(self.Chosen(middle))
            self.refresh()

    def action_first(self) -> None:
        """The first turn."""
        if self._path:
            self._choose(0)

    def action_last(self) -> None:
        """The end of the last turn."""
        if self._path:
            self._choose(len(self._path) - 1)
            self._follows = True
            self._lay_out()

    async def on_click(self, event: events.Click) -> None:
        """Chooses the turn; a second click continues there."""
        node = self._turn_at(self.scroll_offset.y + event.y)
        if node is None:
            return
        if node != self.chosen:
            self.chosen = node
            self._tell(self.Chosen(node))
            self.refresh()
        if event.chain > 1:
            await self.run_action("screen.go")
