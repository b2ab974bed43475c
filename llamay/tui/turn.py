"""A turn of the transcript as lines: what it is called, its text in blocks, and how it stands.

Only blocks that are looked at are rendered; the others' heights are estimates until they are.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.text import Text

from llamay.tui.blocks import Block, Blocks
from llamay.tui.markdown import Markdown, wrap
from llamay.tui.text import clean, count, plural

_PIECE_LINES = 50  # of a message, rendered at a time
_SHOWN_LINES = 12  # of a long message while it is folded
_LONG_LINES = 30
WRITING_MARK = "▌"


@dataclass(frozen=True, slots=True)
class Heading:
    """The line above a turn: who, and on the right which of its siblings it is and its marks."""

    who: str
    notes: str = ""


@dataclass(slots=True)
class _Unit:
    """Lines that are rendered together; `lines` is None until they are."""

    block: Block
    height: int
    lines: list[Text] | None = None


class Turn:
    """One node's turn; `show` it as often as something changed, then ask for its lines.

    unfolded: whether thinking and what is long in a message is shown whole
    """

    def __init__(self, node: int, role: str) -> None:
        """role: of the node; an answer is Markdown, everything else is shown as it was typed."""
        self.node = node
        self.role = role
        self.unfolded = False
        self._text = ""
        self._heading = Heading("")
        self._foot: Sequence[tuple[str, str]] = ()
        self._writing = False
        self._blocks = Blocks()
        self._finished = False
        self._units: list[_Unit] = []
        self._changed = 0  # the first unit that the last change touched
        self._growing = 0  # units at the end that are made anew with each piece
        self._marked: _Unit | None = None  # the one rendered with the mark of what is written
        self._markdown: Markdown | None = None
        self._width = 0
        self._starts: list[int] | None = None

    def set_look(self, markdown: Markdown, width: int) -> None:
        """Renders by these styles in this width from now on."""
        self._markdown, self._width = markdown, width
        for unit in self._units:
            self._forget(unit)
        self._starts = None

    def show(
        self,
        text: str,
        heading: Heading,
        foot: Sequence[tuple[str, str]] = (),
        *,
        writing: bool = False,
    ) -> bool:
        """Takes what the turn has become; text that it only adds to the last costs what it adds.

        foot:    sentences below the text, each with the name of its style
        writing: whether more text will come
        Returns whether anything changed.
        """
        now = (text, heading, tuple(foot), writing)
        if now == (self._text, self._heading, self._foot, self._writing) and self._finished:
            return False
        self._heading, self._foot = heading, tuple(foot)
        self._take(text, writing)
        self._starts = None
        return True

    def toggle(self) -> None:
        """Shows or folds what is long or thought."""
        self.unfolded = not self.unfolded
        self._rebuild()

    @property
    def can_unfold(self) -> bool:
        """Whether there is something to show or fold."""
        if self.role == "assistant":
            blocks = [*self._blocks.complete, *self._blocks.growing]
            return any(block.kind == "thinking" for block in blocks)
        return self._is_long

    @property
    def changed_from(self) -> int:
        """The first line that the last change can have touched, but for the heading."""
        return self._line_starts()[1 + min(self._changed, len(self._units))]

    @property
    def height(self) -> int:
        """How many lines it has, as far as is known."""
        return self._line_starts()[-1]

    @property
    def is_exact(self) -> bool:
        """Whether nothing of the height is an estimate."""
        return all(unit.lines is not None for unit in self._units)

    def settle(self) -> None:
        """Renders one more block whose height is an estimate."""
        for unit in self._units:
            if unit.lines is None:
                self._render(unit)
                return

    def line(self, y: int) -> tuple[str, Text]:
        """Line `y` and the name of its style; rendering it may change the height.

        Raises IndexError beyond the last line.
        """
        while True:
            starts = self._line_starts()
            if not 0 <= y < starts[-1]:
                raise IndexError(y)
            index = bisect_right(starts, y) - 1
            if index == 0:
                return "heading", self._heading_line()
            if index > len(self._units):
                style, line = self._foot_lines()[y - starts[index]]
                return style, line
            unit = self._units[index - 1]
            if unit.lines is not None:
                return "text", unit.lines[y - starts[index]]
            self._render(unit)

    def settle_lines(self, first: int, last: int) -> None:
        """Renders what stands in lines [first, last), until their heights are exact."""
        y = first
        while y < min(last, self.height):
            self.line(y)
            y += 1

    def _take(self, text: str, writing: bool) -> None:
        grows = text.startswith(self._text) and not self._finished
        if not grows and text == self._text and not writing:
            return
        if self.role != "assistant":
            self._text, self._writing, self._finished = text, False, True
            self._rebuild()
            return
        if not grows:
            self._blocks, self._text, self._finished = Blocks(), "", False
            self._units, self._growing = [], 0
        self._blocks.feed(text[len(self._text) :])
        if not writing:
            self._blocks.finish()
        self._text, self._writing, self._finished = text, writing, not writing
        self._add_units()

    def _add_units(self) -> None:
        """Makes units of what came: complete blocks once, the growing ones anew."""
        if self._marked is not None:
            self._forget(self._marked)
        del self._units[len(self._units) - self._growing :]
        self._changed = max(len(self._units) - 1, 0)
        new = [*self._blocks.complete[len(self._units) :], *self._blocks.growing]
        self._units += [_Unit(block, self._estimate(block)) for block in new]
        self._growing = len(self._blocks.growing)
        if self._units and self._units[-1].block.goes_on:
            self._forget_thinking()  # its first block says how long it is

    def _forget(self, unit: _Unit) -> None:
        unit.lines, unit.height = None, self._estimate(unit.block)

    def _forget_thinking(self) -> None:
        for unit in self._units:
            if unit.block.kind == "thinking":
                self._forget(unit)

    def _rebuild(self) -> None:
        if self.role == "assistant":
            self._forget_thinking()
        else:
            self._units = [_Unit(block, self._estimate(block)) for block in self._pieces()]
        self._starts = None

    @property
    def _is_long(self) -> bool:
        return self._text.count("\n") >= _LONG_LINES

    def _pieces(self) -> list[Block]:
        """A message in blocks of some lines, without those that are folded away."""
        lines = self._text.split("\n")
        if self._is_long and not self.unfolded:
            lines = lines[:_SHOWN_LINES]
        return [
            Block("prose", "\n".join(lines[start : start + _PIECE_LINES]))
            for start in range(0, len(lines), _PIECE_LINES)
        ]

    def _estimate(self, block: Block) -> int:
        if self._is_hidden(block):
            return 0
        if block.kind == "thinking" and not self.unfolded:
            return 1 + block.gap
        width = max(self._width, 1)
        lines = block.source.split("\n")
        return block.gap + sum(1 + max(len(line) - 1, 0) // width for line in lines)

    def _is_hidden(self, block: Block) -> bool:
        return block.kind == "thinking" and block.goes_on and not self.unfolded

    def _line_starts(self) -> list[int]:
        """Where each part begins: the heading, each unit, the foot; and last, the end."""
        if self._starts is None:
            heights = [1, *(unit.height for unit in self._units), len(self._foot_lines())]
            self._starts = [0, *accumulate(heights)]
        return self._starts

    def _render(self, unit: _Unit) -> None:
        assert self._markdown is not None, "set_look comes first"
        block = unit.block
        lines = [Text()] if block.gap else []
        if self.role != "assistant":
            lines += self._plain(block.source)
        elif block.kind == "thinking":
            lines = self._thinking(block, lines)
        elif block.kind == "code":
            grows = any(block is other for other in self._blocks.growing)
            lines += self._markdown.code(clean(block.source), block.language, coloured=not grows)
        else:
            lines += self._markdown.prose(clean(block.source))
        if self._writing and unit is self._units[-1]:
            lines, self._marked = self._with_mark(lines), unit
        unit.lines, unit.height = lines, len(lines)
        self._starts = None

    def _thinking(self, block: Block, gap: list[Text]) -> list[Text]:
        if self._is_hidden(block):
            return []
        quoted = [Text("┊ ") + line for line in self._plain(block.source, self._width - 2)]
        if block.goes_on:
            return quoted
        thoughts = [b for b in self._all_blocks if b.kind == "thinking"]
        words = sum(len(b.source.split()) for b in thoughts)
        sign = "▾" if self.unfolded else "▸"
        head = Text(f"{sign} thinking, {plural(words, 'word')}")
        return [*gap, head, *(quoted if self.unfolded else [])]

    @property
    def _all_blocks(self) -> list[Block]:
        return [*self._blocks.complete, *self._blocks.growing]

    def _plain(self, source: str, width: int | None = None) -> list[Text]:
        lines = clean(source).split("\n")
        return [row for line in lines for row in wrap(Text(line), width or self._width)]

    def _with_mark(self, lines: list[Text]) -> list[Text]:
        """The lines with the mark of what is being written after the last character."""
        if not lines:
            return [Text(WRITING_MARK)]
        last = lines[-1].copy()
        last.rstrip()
        if last.cell_len >= self._width:
            return [*lines, Text(WRITING_MARK)]
        return [*lines[:-1], last + Text(WRITING_MARK)]

    def _heading_line(self) -> Text:
        notes = clean(self._heading.notes)
        who = Text(clean(self._heading.who))
        who.truncate(max(self._width - Text(notes).cell_len - 1, 1), overflow="ellipsis")
        room = self._width - who.cell_len - Text(notes).cell_len
        return who + Text(" " * max(room, 1)) + Text(notes) if notes else who

    def _foot_lines(self) -> list[tuple[str, Text]]:
        foot = list(self._foot)
        if self.role != "assistant" and self._is_long:
            more = self._text.count("\n") + 1 - _SHOWN_LINES
            fold = "▾ all lines" if self.unfolded else f"▸ {count(more)} more lines"
            foot.insert(0, ("muted", f"{fold}, o {'folds' if self.unfolded else 'shows'} them"))
        if self._writing and not self._units:
            foot.insert(0, ("text", WRITING_MARK))
        lines = [
            (style, row) for style, text in foot for row in wrap(Text(clean(text)), self._width)
        ]
        return [*lines, ("gap", Text())]
