"""A growing text in lines of a width, of which only the last paragraph is wrapped again."""

from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content
from textual.style import Style

from llamay.tui.text import clean

_MARKED = Style(reverse=True)
_TAB = 4


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a text: characters [start, end), and what is written below it."""

    start: int
    end: int
    label: str


class Wrapped:
    """Lines of a text; a marked place gets a line below it with a caret and the mark's label."""

    def __init__(self) -> None:
        """Starts empty."""
        self.lines: list[Content] = []
        self._text = ""
        self._width = 0
        self._mark: Mark | None = None
        self._settled = 0  # characters in paragraphs that have ended
        self._settled_lines = 0

    def update(self, text: str, width: int, mark: Mark | None = None) -> None:
        """Takes the whole text again; what it only adds to the last one costs what it adds."""
        grown = text.startswith(self._text) and (width, mark) == (self._width, self._mark)
        if not grown:
            self._settled = self._settled_lines = 0
        self._text, self._width, self._mark = text, width, mark
        del self.lines[self._settled_lines :]
        start = self._settled
        for paragraph in text[start:].split("\n"):
            self._settled, self._settled_lines = start, len(self.lines)
            self.lines.extend(self._wrap(paragraph, start))
            start += len(paragraph) + 1

    def _wrap(self, paragraph: str, start: int) -> list[Content]:
        content, mark = Content(_shown(paragraph)), self._mark
        marked = mark is not None and start <= mark.start <= start + len(paragraph)
        if mark is None or not marked:
            return content.wrap(self._width) or [Content()]
        # Escapes are longer than what they stand for, so the place is measured in what is shown.
        begin = len(_shown(paragraph[: mark.start - start]))
        end = len(_shown(paragraph[: max(mark.end - start, 0)]))
        lines = content.stylize(_MARKED, begin, end).wrap(self._width) or [Content()]
        return self._with_label(lines, mark.label)

    def _with_label(self, lines: list[Content], label: str) -> list[Content]:
        for index, line in enumerate(lines):
            for span in line.spans:
                if span.style == _MARKED:
                    column = cell_len(line.plain[: span.start])
                    return [*lines[: index + 1], self._label(column, label), *lines[index + 1 :]]
        # A token that shows nothing, a line feed say: its place is where the text before it ends.
        return [*lines, self._label(cell_len(lines[-1].plain), label)]

    def _label(self, column: int, label: str) -> Content:
        column = min(column, self._width - 1)
        room = cell_len(label) + 1
        if column + 1 + room <= self._width:
            return Content(f"{' ' * column}^ {label}")
        if room <= column:
            return Content(f"{' ' * (column - room)}{label} ^")
        return Content(f"{' ' * column}^")


def _shown(text: str) -> str:
    return clean(text).expandtabs(_TAB)
