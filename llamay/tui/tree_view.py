"""The tree of turns: a row each, with where every branch ends and what it holds."""

from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.geometry import Region
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.theme import Theme

from llamay.tui import describe
from llamay.tui.keys import TREE, bindings
from llamay.tui.scrolling import component_style, set_lines
from llamay.tui.tree_lines import STYLES, TreeLines
from llamay.tui.tree_rows import Row, rows

if TYPE_CHECKING:
    from llamay.session import Session

FILTERS = ("all", "branch ends", "labelled", "marked", "unfinished")


class TreeView(ScrollView, can_focus=True):
    """Rows of the session's tree; `cursor` is the node that is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(TREE)]
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"tree--{name}" for name in STYLES}
    DEFAULT_CSS = """
    TreeView { overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    TreeView > .tree--guide { color: $foreground 40%; }
    TreeView > .tree--quiet { color: $foreground 60%; }
    TreeView > .tree--active { text-style: bold; }
    TreeView > .tree--cursor { background: $foreground 15%; }
    TreeView > .tree--focused { text-style: reverse; }
    TreeView > .tree--tag { color: $text-accent; }
    TreeView > .tree--wrong { color: $text-warning; }
    TreeView > .tree--match { text-style: underline; }
    """

    class Chosen(Message):
        """The cursor went to another turn."""

        def __init__(self, node: int) -> None:
            super().__init__()
            self.node = node

    class Filtered(Message):
        """Another kind of turns is shown."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self, *, id: str | None = None) -> None:
        """Shows nothing before `bind`."""
        super().__init__(id=id)
        self.cursor = 0
        self.marked: set[int] = set()
        self.filter = FILTERS[0]
        self._session: Session | None = None
        self._lines: TreeLines | None = None
        self._matches: set[int] | None = None
        self._folded: set[int] = set()
        self._rows: list[Row] = []
        self._index: dict[int, int] = {}  # of a node's row
        self._heights: list[int] = []
        self._starts: list[int] = [0]
        self._styles: dict[str, Style] = {}
        self._base = Style.null()
        self._width = 0

    def bind(self, session: "Session", marked: set[int]) -> None:
        """Shows the tree of `session` from now on; marked: nodes with a check mark."""
        self._session, self.marked = session, marked
        self._lines = TreeLines(session, marked)
        self._lines.set_look(self._width, self._styles)
        self._folded, self._matches, self.filter = set(), None, FILTERS[0]
        self.cursor = session.place
        self.refresh_tree()

    def refresh_tree(self) -> None:
        """Looks again at the whole tree."""
        if self._session is None or self._lines is None:
            return
        tree = self._session.tree
        self._lines.active = set(tree.path(self._session.place))
        self._lines.matches = self._matches
        self._lines.forget(list(tree.nodes))
        self._lines.forget_figures()
        self._rows = rows(tree, self._folded, self._only())
        self._index = {row.node: index for index, row in enumerate(self._rows)}
        self._measure()
        if self.cursor not in self._index:
            self._set_cursor(self._nearest(self.cursor))
        self.scroll_to_cursor()
        self.refresh()

    def refresh_nodes(self, nodes: Collection[int]) -> None:
        """Looks again at these nodes' texts; the tree is as it was."""
        if self._lines is None or not self._width:
            return
        self._lines.forget(nodes)
        for index in (self._index[node] for node in nodes if node in self._index):
            if self._lines.height(self._rows[index]) != self._heights[index]:
                self._measure()
                self.refresh()
                return
            self._refresh_row(index)

    def refresh_figures(self) -> None:
        """Looks again at what the branches hold whose ends are on the screen."""
        if self._lines is None or not self._width:
            return
        top = self.scroll_offset.y
        first = bisect_right(self._starts, top) - 1
        last = bisect_right(self._starts, top + self.size.height)
        for index, row in enumerate(self._rows[first:last], first):
            if not row.children and self._lines.changed_figures(row.node):
                self._refresh_row(index)

    def choose(self, node: int) -> None:
        """Puts the cursor on a node and unfolds what hides it; tells nobody."""
        if self._session is None:
            return
        hiding = self._folded.intersection(self._session.tree.path(node)[:-1])
        if hiding or node not in self._index:
            self._folded -= hiding
            self.cursor = node
            self.refresh_tree()
        elif node != self.cursor:
            self._draw_cursor(node)
            self.scroll_to_cursor()

    def move_to(self, node: int) -> None:
        """Puts the cursor on a node that has a row, and tells so."""
        if node in self._index:
            self._move(self._index[node])

    def move_to_match(self, step: int) -> None:
        """Puts the cursor on the next (1) or previous (-1) match, round and round."""
        nodes = [row.node for row in self._rows if row.node in (self._matches or ())]
        if nodes:
            index = nodes.index(self.cursor) if self.cursor in nodes else -1
            self.move_to(nodes[(index + step) % len(nodes)])

    def show_matches(self, matches: Collection[int] | None) -> None:
        """Shows only these turns and what is above them; None shows what the filter says."""
        self._matches = None if matches is None else set(matches)
        self.refresh_tree()

    def set_filter(self, name: str) -> None:
        """Shows the turns of one of `FILTERS`."""
        self.filter = name
        self.refresh_tree()
        self._tell(self.Filtered(name))

    def scroll_to_cursor(self) -> None:
        """Scrolls until the cursor's row is seen."""
        index = self._index.get(self.cursor)
        if index is None or index + 1 >= len(self._starts):  # it was never shown so far
            return
        top, bottom = self._starts[index], self._starts[index + 1]
        y, height = self.scroll_offset.y, self.scrollable_content_region.height
        if top < y:
            self.scroll_to(y=top, animate=False, immediate=True)
        elif bottom > y + height:
            self.scroll_to(y=bottom - height, animate=False, immediate=True)

    # rows

    def _only(self) -> set[int] | None:
        """The nodes that search or filter leave; None for all."""
        if self._matches is not None:
            return self._matches
        assert self._session is not None, "bind comes first"
        tree = self._session.tree
        match self.filter:
            case "branch ends":
                return set(tree.leaves())
            case "labelled":
                return {id for id in tree.walk() if tree.node(id).label}
            case "marked":
                return {id for id in tree.walk() if id in self.marked}
            case "unfinished":
                return {id for id in tree.walk() if tree.node(id).state != "done"}
        return None

    def _nearest(self, node: int) -> int:
        """The node, or the lowest of those above it that has a row."""
        assert self._session is not None, "bind comes first"
        above = self._session.tree.path(node) if node in self._session.tree.nodes else []
        return next((id for id in reversed(above) if id in self._index), self._rows[0].node)

    def _measure(self) -> None:
        """Takes the rows' heights anew."""
        if self._lines is not None and self._width:
            self._heights = [self._lines.height(row) for row in self._rows]
            self._starts = [0, *accumulate(self._heights)]
            set_lines(self, self._starts[-1])

    def _refresh_row(self, index: int) -> None:
        """Draws a row anew, if it is on the screen."""
        if not self._width:
            return
        top = self._starts[index] - self.scroll_offset.y
        if -self._heights[index] < top < self.size.height:
            self.refresh(Region(0, top, self.size.width, self._heights[index]))

    def render_line(self, y: int) -> Strip:
        line = self.scroll_offset.y + y
        if self._lines is None or not self._styles or line >= self._starts[-1]:
            return Strip.blank(self._width, self._base)
        index = bisect_right(self._starts, line) - 1
        row = self._rows[index]
        strip = Strip(self._lines.line(row, line - self._starts[index]))
        strip = strip.adjust_cell_length(self._width)
        if row.node == self.cursor:
            strip = strip.apply_style(self._styles["focused" if self.has_focus else "cursor"])
        return strip.apply_style(self._base)

    def _set_look(self) -> None:
        self._styles = {name: component_style(self, f"tree--{name}") for name in STYLES}
        self._base, self._width = self.rich_style, self.scrollable_content_region.width
        if self._lines is not None:
            self._lines.set_look(self._width, self._styles)

    def on_mount(self) -> None:
        """Follows the theme."""
        self.app.theme_changed_signal.subscribe(self, self._theme_changed)

    def _theme_changed(self, theme: Theme) -> None:
        self._set_look()
        self.refresh()

    def on_resize(self, event: events.Resize) -> None:
        """Lays the rows out in the new width."""
        self._set_look()
        self._measure()
        self.scroll_to_cursor()
        self.refresh()  # it may have been drawn in this size before it was measured

    # what the user does

    def _set_cursor(self, node: int) -> None:
        if node != self.cursor:
            self._draw_cursor(node)
            self._tell(self.Chosen(node))

    def _draw_cursor(self, node: int) -> None:
        before, self.cursor = self.cursor, node
        for changed in (before, node):
            if changed in self._index:
                self._refresh_row(self._index[changed])

    def _move(self, index: int) -> None:
        if self._rows:
            self._set_cursor(self._rows[max(0, min(index, len(self._rows) - 1))].node)
            self.scroll_to_cursor()

    @property
    def _row_index(self) -> int:
        return self._index.get(self.cursor, 0)

    def _tell(self, message: Message) -> None:
        # Whoever called: a message does not pass its sender on its way up.
        self.post_message(message.set_sender(self))

    def action_up(self) -> None:
        """The row above."""
        self._move(self._row_index - 1)

    def action_down(self) -> None:
        """The row below."""
        self._move(self._row_index + 1)

    def action_first(self) -> None:
        """The first row."""
        self._move(0)

    def action_last(self) -> None:
        """The last row."""
        self._move(len(self._rows) - 1)

    def action_page(self, pages: int) -> None:
        """About a page up or down."""
        line = self._starts[self._row_index] + pages * (self.scrollable_content_region.height - 1)
        self._move(bisect_right(self._starts, max(line, 0)) - 1)

    def action_left(self) -> None:
        """Folds what follows, or goes to the turn before."""
        row = self._rows[self._row_index]
        if row.children > 1 and not row.below:
            self.action_fold()
        elif self._session is not None and row.node != self._session.tree.root.id:
            self._move(self._index[self._session.tree.node(row.node).parent])

    def action_right(self) -> None:
        """Unfolds, or goes to the turn after."""
        row = self._rows[self._row_index]
        if row.below:
            self.action_fold()
        elif row.children:
            self._move(self._row_index + 1)

    def action_unfold(self) -> None:
        """Unfolds what is folded."""
        self.action_fold()

    def action_fold(self) -> None:
        """Folds or unfolds what follows the cursor's turn."""
        if self._rows[self._row_index].children:
            self._folded ^= {self.cursor}
            self.refresh_tree()

    def action_sibling(self, step: int) -> None:
        """The next or previous sibling."""
        if self._session is None:
            return
        nodes = [
            id for id in describe.siblings(self._session.tree, self.cursor) if id in self._index
        ]
        if self.cursor in nodes:
            self._move(self._index[nodes[(nodes.index(self.cursor) + step) % len(nodes)]])

    def action_here(self) -> None:
        """To where the next message goes."""
        if self._session is not None:
            self.choose(self._session.place)
            self._tell(self.Chosen(self.cursor))

    def action_filter(self) -> None:
        """The next kind of turns."""
        self.set_filter(FILTERS[(FILTERS.index(self.filter) + 1) % len(FILTERS)])

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """`unfold` is there for what is folded only, so that its key is free elsewhere."""
        if action == "unfold":
            return bool(self._rows) and bool(self._rows[self._row_index].below)
        return True

    async def on_click(self, event: events.Click) -> None:
        """Chooses the row; a second click continues there."""
        index = bisect_right(self._starts, self.scroll_offset.y + event.y) - 1
        if index < len(self._rows):
            self._move(index)
            if event.chain > 1:
                await self.run_action("screen.go")
