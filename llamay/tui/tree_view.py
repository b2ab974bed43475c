"""The tree of turns: a row each, with where every branch ends and what it holds."""

from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from llamay.tui import describe
from llamay.tui.bridge import Bridge
from llamay.tui.keys import TREE, bindings
from llamay.tui.text import count, one_line
from llamay.tui.tree_rows import Row, rows

if TYPE_CHECKING:
    from llamay.session import Session, Where
    from llamay.session.tree import Node

FILTERS = ("all", "branch ends", "labelled", "marked", "unfinished")
_PLACES = {"memory": "RAM", "disk": "disk", "none": "text only"}
_STYLES = ("guide", "quiet", "active", "cursor", "tag", "wrong", "match")
_MIN_TEXT = 12


class TreeView(ScrollView, can_focus=True):
    """Rows of the session's tree; `cursor` is the node that is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(TREE)]
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"tree--{name}" for name in _STYLES}
    DEFAULT_CSS = """
    TreeView { overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    TreeView > .tree--guide { color: $text-disabled; }
    TreeView > .tree--quiet { color: $text-muted; }
    TreeView > .tree--active { text-style: bold; }
    TreeView > .tree--cursor { text-style: reverse; }
    TreeView > .tree--tag { color: $text-accent; }
    TreeView > .tree--wrong { color: $text-warning; }
    TreeView > .tree--match { text-style: underline; }
    """

    class Chosen(Message):
        """The cursor went to another turn."""

        def __init__(self, node: int) -> None:
            super().__init__()
            self.node = node

    class Go(Message):
        """The user wants to continue at a turn."""

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
        self._bridge: Bridge | None = None
        self._matches: set[int] | None = None
        self._folded: set[int] = set()
        self._active: set[int] = set()
        self._rows: list[Row] = []
        self._index: dict[int, int] = {}  # of a node's row
        self._starts: list[int] = [0]
        self._where: dict[int, Where] = {}
        self._styles: dict[str, Style] = {}

    def bind(self, session: "Session", bridge: Bridge) -> None:
        """Shows the tree of `session` from now on."""
        self._session, self._bridge = session, bridge
        self._folded, self._matches, self.filter = set(), None, FILTERS[0]
        self.cursor = session.place
        self.refresh_tree()

    def refresh_tree(self) -> None:
        """Looks again at the whole tree."""
        if self._session is None:
            return
        tree = self._session.tree
        self._active = set(tree.path(self._session.place))
        self._where.clear()
        self._rows = rows(tree, self._folded, self._only())
        self._index = {row.node: index for index, row in enumerate(self._rows)}
        if self.cursor not in self._index:
            self._set_cursor(self._nearest(self.cursor))
        self._count_lines()
        self.scroll_to_cursor()
        self.refresh()

    def refresh_nodes(self, nodes: Collection[int]) -> None:
        """Looks again at these nodes' text; the tree is as it was."""
        for node in nodes:
            self._where.pop(node, None)
        if any(node in self._index for node in nodes):
            self._count_lines()
            self.refresh()

    def choose(self, node: int) -> None:
        """Puts the cursor on a node and unfolds what hides it; tells nobody."""
        if self._session is None:
            return
        hiding = self._folded.intersection(self._session.tree.path(node)[:-1])
        if hiding or node not in self._index:
            self._folded -= hiding
            self.cursor = node
            self.refresh_tree()
        self.cursor = node
        self.scroll_to_cursor()
        self.refresh()

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
        self.post_message(self.Filtered(name))

    def scroll_to_cursor(self) -> None:
        """Scrolls until the cursor's row is seen."""
        index = self._index.get(self.cursor)
        if index is None:
            return
        top, bottom = self._starts[index], self._starts[index + 1]
        y, height = self.scroll_offset.y, self.scrollable_content_region.height
        if top < y:
            self.scroll_to(y=top, animate=False, immediate=True)
        elif bottom > y + height:
            self.scroll_to(y=bottom - height, animate=False, immediate=True)

    # rows

    def _only(self) -> set[int] | None:
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

    def _count_lines(self) -> None:
        self._starts = [0, *accumulate(self._height(row) for row in self._rows)]
        size = Size(self.scrollable_content_region.width, self._starts[-1])
        if size != self.virtual_size:
            self.virtual_size = size

    def _height(self, row: Row) -> int:
        if not row.children:
            return 2
        node = self._node(row)
        return 2 if cell_len(self._preview(node)) > self._text_width(row, node) else 1

    def _node(self, row: Row) -> "Node":
        assert self._session is not None, "bind comes first"
        return self._session.tree.node(row.node)

    def _preview(self, node: "Node") -> str:
        assert self._session is not None, "bind comes first"
        return describe.preview(self._session.tree, node)

    def _text_width(self, row: Row, node: "Node") -> int:
        """Cells for the preview in the first line."""
        before = cell_len(self._before(row.first)) + len(self._sign(row, node)) + 1
        tags = cell_len(self._tags(row, node))
        return max(self.scrollable_content_region.width - before - tags - bool(tags), 1)

    def _before(self, connectors: str) -> str:
        """Connectors, of which only the last are shown if they would leave no room for text."""
        most = max(self.scrollable_content_region.width - _MIN_TEXT, 2)
        return connectors if len(connectors) <= most else "…" + connectors[-most + 1 :]

    def _sign(self, row: Row, node: "Node") -> str:
        """Who a turn is of, filled on the active path; what is folded and what can be."""
        if row.below:
            return "⊞"
        if row.children > 1:
            return "⊟"
        active = row.node in self._active
        if node.role == "user":
            return "❯" if active else "›"
        return "●" if active else "○"

    def _tags(self, row: Row, node: "Node") -> str:
        tags = [f"({row.below})"] if row.below else []
        if node.label:
            tags.append(f"[{one_line(node.label)}]")
        if word := describe.state_word(node):
            tags.append(word)
        if self._session is not None and row.node == self._session.place:
            tags.append("← here")
        return " ".join(tags)

    def _figures(self, node: int, width: int) -> str:
        """What a branch holds, as fully as has room: tokens, own and shared pages, and where."""
        assert self._session is not None, "bind comes first"
        where = self._where.get(node)
        if where is None:
            where = self._where[node] = self._session.where(node)
        tokens, place = f"{count(where.tokens)} tok", _PLACES[where.place]
        own, shared = where.own_pages, where.shared_pages
        return next(
            (
                figures
                for figures in (
                    f"{tokens} · {own} own {shared} shared · {place}",
                    f"{tokens} · {own}+{shared} pages · {place}",
                    f"{tokens} {own}+{shared}p {place}",
                    f"{tokens} {place}",
                )
                if cell_len(figures) <= width
            ),
            tokens,
        )

    # lines

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        line = self.scroll_offset.y + y
        if not self._rows or not self._styles or line >= self._starts[-1]:
            return Strip.blank(width, self.rich_style)
        index = bisect_right(self._starts, line) - 1
        row = self._rows[index]
        first = line == self._starts[index]
        segments = self._first_line(row) if first else self._second_line(row)
        strip = Strip(segments).adjust_cell_length(width)
        if row.node == self.cursor:
            strip = strip.apply_style(self._styles["cursor"])
        return strip.apply_style(self.rich_style)

    def _first_line(self, row: Row) -> list[Segment]:
        node = self._node(row)
        width = self._text_width(row, node)
        mark = "✓ " if row.node in self.marked else ""
        text = set_cell_size(mark + self._preview(node), width)
        style = self._text_style(row)
        tags = self._tags(row, node)
        wrong = node.state in ("failed", "interrupted")
        segments = [
            Segment(self._before(row.first), self._styles["guide"]),
            Segment(f"{self._sign(row, node)} ", style),
            Segment(text, style),
        ]
        if tags:
            segments += [Segment(" "), Segment(tags, self._styles["wrong" if wrong else "tag"])]
        return segments

    def _second_line(self, row: Row) -> list[Segment]:
        before = self._before(row.rest) + "  " * (not row.rest.endswith("│ "))
        width = max(self.scrollable_content_region.width - cell_len(before), 1)
        if not row.children:
            text = self._figures(row.node, width)
        else:
            node = self._node(row)
            preview, used = self._preview(node), self._text_width(row, node)
            mark = "✓ " if row.node in self.marked else ""
            shown = set_cell_size(mark + preview, used).rstrip()
            text = preview[len(shown) - len(mark) :].lstrip()
            if cell_len(text) > width:
                text = set_cell_size(text, width - 1).rstrip() + "…"
        return [Segment(before, self._styles["guide"]), Segment(text, self._styles["quiet"])]

    def _text_style(self, row: Row) -> Style:
        style = self._styles["active"] if row.node in self._active else Style.null()
        only = self._matches
        if only is None:
            return style
        return style + self._styles["match" if row.node in only else "quiet"]

    def _set_look(self) -> None:
        self._styles = {
            name: self.get_component_rich_style(f"tree--{name}", partial=True) for name in _STYLES
        }

    def notify_style_update(self) -> None:
        super().notify_style_update()
        if self._styles:
            self._set_look()
            self.refresh()

    def on_resize(self, event: events.Resize) -> None:
        """Lays the rows out in the new width."""
        self._set_look()
        self._count_lines()
        self.scroll_to_cursor()

    # what the user does

    def _set_cursor(self, node: int) -> None:
        if node != self.cursor:
            self.cursor = node
            self.post_message(self.Chosen(node))

    def _move(self, index: int) -> None:
        if self._rows:
            self._set_cursor(self._rows[max(0, min(index, len(self._rows) - 1))].node)
            self.scroll_to_cursor()
            self.refresh()

    @property
    def _row_index(self) -> int:
        return self._index.get(self.cursor, 0)

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
            self._move(self._index[self._node(row).parent])

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
            self.post_message(self.Chosen(self.cursor))

    def action_filter(self) -> None:
        """The next kind of turns."""
        self.set_filter(FILTERS[(FILTERS.index(self.filter) + 1) % len(FILTERS)])

    def action_go(self) -> None:
        """Continues at the cursor's turn."""
        if self._rows:
            self.post_message(self.Go(self.cursor))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """`unfold` is there for what is folded only, so that its key is free elsewhere."""
        if action == "unfold":
            return bool(self._rows) and bool(self._rows[self._row_index].below)
        return True

    def on_click(self, event: events.Click) -> None:
        """Chooses the row; a second click continues there."""
        index = bisect_right(self._starts, self.scroll_offset.y + event.y) - 1
        if index < len(self._rows):
            self._move(index)
            if event.chain > 1:
                self.action_go()
