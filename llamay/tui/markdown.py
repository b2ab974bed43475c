"""Markdown as lines of a width. A model's text is data: HTML and links are shown, not obeyed.

Styles are looked up by the names in `STYLES`, so that the screen's theme gives the colours.
"""

import functools
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.style import Style
from rich.text import Text

from llamay.tui.highlight import highlight

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.tree import SyntaxTreeNode

STYLES = (
    "strong",
    "em",
    "strike",
    "code",
    "codeblock",
    "heading",
    "link",
    "muted",
    "keyword",
    "string",
    "comment",
    "number",
    "name",
)
_INLINE = {"strong": "strong", "em": "em", "s": "strike", "link": "link"}
_MIN_COLUMN = 4
# Wrapping asks for a console and uses nothing of it.
_CONSOLE = Console(file=io.StringIO(), width=80)


def wrap(text: Text, width: int) -> list[Text]:
    """The text in lines of at most `width` cells, broken at spaces where that is possible."""
    return list(text.wrap(_CONSOLE, max(width, 1), tab_size=4)) or [Text()]


class Markdown:
    """Renders pieces of Markdown in one width and one set of styles."""

    def __init__(self, width: int, styles: Mapping[str, Style]) -> None:
        """width: in cells, at least one; styles: has all of `STYLES`."""
        self._width = max(width, 1)
        self._styles = styles

    def prose(self, source: str) -> list[Text]:
        """The lines of Markdown, already cleaned of what a terminal obeys."""
        # Here, because the first screen shows no Markdown yet and is there sooner without it.
        from markdown_it.tree import SyntaxTreeNode

        root = SyntaxTreeNode(_parser().parse(source))
        return self._blocks(root.children, self._width)

    def code(self, source: str, language: str, *, coloured: bool = True) -> list[Text]:
        """The lines of a block of code, filled to the width; not coloured while it grows."""
        return self._code(source, language if coloured else "", self._width)

    def _blocks(
        self, nodes: "Sequence[SyntaxTreeNode]", width: int, tight: bool = False
    ) -> list[Text]:
        lines: list[Text] = []
        for node in nodes:
            if lines and not tight:
                lines.append(Text())
            lines += self._block(node, width)
        return lines

    def _block(self, node: "SyntaxTreeNode", width: int) -> list[Text]:
        match node.type:
            case "paragraph":
                return wrap(self._inline(node), width)
            case "heading":
                text = self._inline(node)
                text.stylize_before(self._styles["heading"])
                return wrap(text, width)
            case "bullet_list" | "ordered_list":
                return self._list(node, width)
            case "blockquote":
                return self._quote(node, width)
            case "fence" | "code_block":
                language = node.info.split()[0] if node.info.split() else ""
                return self._code(node.content.removesuffix("\n"), language, width)
            case "hr":
                return [Text("─" * width, self._styles["muted"])]
            case "table":
                return self._table(node, width)
            case _:
                return wrap(Text(node.content), width)

    def _list(self, node: "SyntaxTreeNode", width: int) -> list[Text]:
        lines: list[Text] = []
        number = int(node.attrs.get("start", 1))
        tight = all(
            child.hidden
            for item in node.children
            for child in item.children
            if child.type == "paragraph"
        )
        for index, item in enumerate(node.children):
            marker = f"{number + index}. " if node.type == "ordered_list" else "• "
            if index and not tight:
                lines.append(Text())
            inside = self._blocks(item.children, max(width - len(marker), 1), tight) or [Text()]
            lines.append(Text.assemble((marker, self._styles["muted"]), inside[0]))
            lines += [Text(" " * len(marker)) + line for line in inside[1:]]
        return lines

    def _quote(self, node: "SyntaxTreeNode", width: int) -> list[Text]:
        bar = Text("▎ ", self._styles["muted"])
        return [bar + line for line in self._blocks(node.children, max(width - 2, 1))]

    def _code(self, source: str, language: str, width: int) -> list[Text]:
        base = self._styles["codeblock"]
        coloured = highlight(source, language, self._styles)
        lines = []
        for line in coloured.split("\n", allow_blank=True):
            for piece in _fold(line, max(width - 4, 1)):
                row = Text("  ", base)
                row.append_text(piece)
                row.pad_right(max(width - row.cell_len, 0))
                row.stylize_before(base)
                lines.append(row)
        return lines

    def _table(self, node: "SyntaxTreeNode", width: int) -> list[Text]:
        rows = [
            [self._inline(cell) for cell in row.children]
            for part in node.children
            for row in part.children
        ]
        natural = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=False)]
        widths = _column_widths(natural, width - 3 * (len(natural) - 1))
        muted = self._styles["muted"]
        lines: list[Text] = []
        for index, row in enumerate(rows):
            cells = [wrap(cell, size) for cell, size in zip(row, widths, strict=False)]
            for line in range(max(map(len, cells))):
                parts = [cell[line].copy() if line < len(cell) else Text() for cell in cells]
                for part, size in zip(parts, widths, strict=False):
                    part.pad_right(max(size - part.cell_len, 0))
                    if index == 0:
                        part.stylize_before(self._styles["strong"])
                row_text = Text()
                for column, part in enumerate(parts):
                    row_text.append(" │ " if column else "", muted)
                    row_text.append_text(part)
                lines.append(row_text)
            if index == 0:
                lines.append(Text("─┼─".join("─" * size for size in widths), muted))
        return lines

    def _inline(self, node: "SyntaxTreeNode") -> Text:
        """The text of a node's inline content."""
        text = Text()
        for inline in node.children:
            for child in inline.children:
                self._span(child, text)
        return text

    def _span(self, node: "SyntaxTreeNode", text: Text) -> None:
        match node.type:
            case "code_inline":
                text.append(node.content, self._styles["code"])
            case "softbreak":
                text.append(" ")
            case "hardbreak":
                text.append("\n")
            case "image":
                text.append(f"[{node.content}] ({node.attrs.get('src', '')})", self._styles["link"])
            case "strong" | "em" | "s" | "link":
                start = len(text)
                for child in node.children:
                    self._span(child, text)
                text.stylize(self._styles[_INLINE[node.type]], start)
                target = str(node.attrs.get("href", ""))
                if target and target != text.plain[start:]:
                    text.append(f" ({target})", self._styles["muted"])
            case _:
                text.append(node.content)


@functools.cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def _fold(line: Text, width: int) -> list[Text]:
    """A line of code in pieces of the width; its spaces stay where they are."""
    line.expand_tabs(4)
    if line.cell_len <= width:
        return [line]
    cuts, cells = [], 0
    for index, char in enumerate(line.plain):
        size = Text(char).cell_len
        if cells + size > width:
            cuts.append(index)
            cells = 0
        cells += size
    return list(line.divide(cuts))


def _column_widths(natural: Sequence[int], width: int) -> list[int]:
    """The columns' widths: as wide as they need, the widest made narrower until all fit."""
    widths = [max(size, 1) for size in natural]
    while sum(widths) > width and max(widths) > _MIN_COLUMN:
        widths[widths.index(max(widths))] -= 1
    return widths
