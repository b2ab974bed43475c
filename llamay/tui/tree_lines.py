"""How a row of the tree looks: its one or two lines, in a width; kept until they change."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

from llamay.tui import describe
from llamay.tui.text import count, one_line
from llamay.tui.tree_rows import Row

if TYPE_CHECKING:
    from llamay.session import Session, Where
    from llamay.session.tree import Node

STYLES = ("guide", "quiet", "active", "cursor", "focused", "tag", "wrong", "match")
_PLACES = {"memory": "RAM", "disk": "disk", "none": "text only"}
_MIN_TEXT = 12


class TreeLines:
    """Draws rows of one session's tree.

    active:  nodes on the path to where the next message goes
    matches: what a search found; None without a search
    """

    def __init__(self, session: "Session", marked: Collection[int]) -> None:
        """marked: nodes with a check mark; it may change."""
        self.active: set[int] = set()
        self.matches: Collection[int] | None = None
        self._session = session
        self._marked = marked
        self._width = 0
        self._styles: Mapping[str, Style] = {}
        self._previews: dict[int, str] = {}
        self._where: dict[int, Where] = {}

    def set_look(self, width: int, styles: Mapping[str, Style]) -> None:
        """width: in cells; styles: by the names in `STYLES`."""
        self._width, self._styles = width, styles

    def forget(self, nodes: Collection[int]) -> None:
        """Looks at these nodes' texts again."""
        for node in nodes:
            self._previews.pop(node, None)

    def forget_figures(self) -> None:
        """Looks again at what branches hold."""
        self._where.clear()

    def changed_figures(self, node: int) -> bool:
        """Looks again at what a branch holds; whether that is not what was shown."""
        before, self._where[node] = self._where.get(node), self._session.where(node)
        return before != self._where[node]

    def height(self, row: Row) -> int:
        """1 or 2: ends of branches have a line of figures, long texts a second line."""
        if not row.children:
            return 2
        return 2 if cell_len(self._preview(row.node)) > self._text_width(row) else 1

    def line(self, row: Row, index: int) -> list[Segment]:
        """The first (0) or second (1) line of a row."""
        return self._second(row) if index else self._first(row)

    def _first(self, row: Row) -> list[Segment]:
        node = self._node(row)
        text = set_cell_size(self._first_part(row), self._text_width(row))
        style = self._text_style(row)
        segments = [
            Segment(self._before(row.first), self._styles["guide"]),
            Segment(f"{self._sign(row, node)} ", style),
            Segment(text, style),
        ]
        if tags := self._tags(row, node):
            wrong = node.state in ("failed", "interrupted")
            segments += [Segment(" "), Segment(tags, self._styles["wrong" if wrong else "tag"])]
        return segments

    def _second(self, row: Row) -> list[Segment]:
        # Below a text, its rest; below the guides, a place for them to go on.
        before = self._before(row.rest)
        before += "  " if not row.rest.endswith("│ ") or not row.children else ""
        width = max(self._width - cell_len(before), 1)
        if not row.children:
            text = self._figures(row.node, width)
        else:
            text = self._text(row)[len(self._first_part(row)) :].lstrip()
            if cell_len(text) > width:
                text = set_cell_size(text, width - 1).rstrip() + "…"
        return [Segment(before, self._styles["guide"]), Segment(text, self._styles["quiet"])]

    def _node(self, row: Row) -> "Node":
        return self._session.tree.node(row.node)

    def _preview(self, node: int) -> str:
        preview = self._previews.get(node)
        if preview is None:
            tree = self._session.tree
            preview = self._previews[node] = describe.preview(tree, tree.node(node))
        return preview

    def _text(self, row: Row) -> str:
        mark = "✓ " if row.node in self._marked else ""
        return mark + self._preview(row.node)

    def _first_part(self, row: Row) -> str:
        """As much of the text as the first line has room for, to the end of a word."""
        text, width = self._text(row), self._text_width(row)
        if cell_len(text) <= width:
            return text
        part = set_cell_size(text, width).rstrip()
        end = part.rfind(" ")
        ends_word = text[len(part) : len(part) + 1] in ("", " ")
        return part if ends_word or end < len(part) * 2 // 3 else part[:end]

    def _text_width(self, row: Row) -> int:
        """Cells for the text in the first line."""
        tags = cell_len(self._tags(row, self._node(row)))
        return max(self._width - cell_len(self._before(row.first)) - 2 - tags - bool(tags), 1)

    def _before(self, connectors: str) -> str:
        """Connectors, of which only the last are shown if they would leave no room for text."""
        most = max(self._width - _MIN_TEXT, 2)
        return connectors if len(connectors) <= most else "…" + connectors[-most + 1 :]

    def _sign(self, row: Row, node: "Node") -> str:
        """Who a turn is of, filled on the active path; what is folded and what can be."""
        if row.below:
            return "⊞"
        if row.children > 1:
            return "⊟"
        active = row.node in self.active
        if node.role == "user":
            return "❯" if active else "›"
        return "●" if active else "○"

    def _tags(self, row: Row, node: "Node") -> str:
        tags = [f"({row.below})"] if row.below else []
        if node.label:
            tags.append(f"[{one_line(node.label)}]")
        if word := describe.state_word(node):
            tags.append(word)
        if row.node == self._session.place:
            tags.append("← here")
        return " ".join(tags)

    def _figures(self, node: int, width: int) -> str:
        """What a branch holds, as fully as has room: tokens, own and shared pages, and where."""
        where = self._where.get(node)
        if where is None:
            where = self._where[node] = self._session.where(node)
        tokens, place = f"{count(where.tokens)} tok", _PLACES[where.place]
        own, shared = where.own_pages, where.shared_pages
        if not where.tokens:
            return "nothing read yet"
        ways = (
            f"{tokens} · {own} own {shared} shared · {place}",
            f"{tokens} · {own}+{shared} pages · {place}",
            f"{tokens} {own}+{shared}p {place}",
            f"{tokens} {place}",
        )
        return next((figures for figures in ways if cell_len(figures) <= width), tokens)

    def _text_style(self, row: Row) -> Style:
        style = self._styles["active"] if row.node in self.active else Style.null()
        if self.matches is None:
            return style
        return style + self._styles["match" if row.node in self.matches else "quiet"]
