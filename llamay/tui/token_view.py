"""The tokens of an answer one by one, with the probability that the model gave each."""

import math
from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual import events
from textual.app import RenderResult
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from llamay.tui.keys import bindings
from llamay.tui.screen_keys import TOKENS
from llamay.tui.text import MUTED, clean, count, share

_BARS = "▁▂▃▄▅▆▇█"


class TokenView(Widget, can_focus=True):
    """A bar for each token near the chosen one, the text around it, and its probability.

    The chosen token is the last one, and stays so while others come, until another is chosen.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(TOKENS)]
    DEFAULT_CSS = """
    TokenView { height: 6; }
    TokenView:focus { background-tint: $foreground 10%; }
    """

    class Chosen(Message):
        """Another token is chosen, or the last one is another."""

    def __init__(self, *, id: str | None = None) -> None:
        """Without tokens."""
        super().__init__(id=id)
        self._alternatives: Sequence[tuple[str, float]] = ()
        self._pieces: Sequence[str] = ()
        self._logprobs: Sequence[float] = ()
        self._chosen: int | None = None

    def show(self, pieces: Sequence[str], logprobs: Sequence[float]) -> None:
        """Shows an answer's tokens: their texts, and as many logarithms of probabilities."""
        length = min(len(pieces), len(logprobs))
        if (pieces[:length], logprobs[:length]) != (self._pieces, self._logprobs):
            self._pieces, self._logprobs = pieces[:length], logprobs[:length]
            self._tell()

    def choose(self, index: int | None) -> None:
        """Chooses a token; None is the last one, whichever that is."""
        if index != self._chosen:
            self._chosen = index
            self._tell()

    def show_alternatives(self, alternatives: Sequence[tuple[str, float]]) -> None:
        """Shows the likeliest tokens at the chosen one's place, until another is chosen."""
        self._alternatives = alternatives
        self.refresh()

    def _tell(self) -> None:
        self._alternatives = ()
        self.refresh()
        self.post_message(self.Chosen())

    @property
    def index(self) -> int:
        """The chosen token's; -1 if there are none."""
        last = len(self._pieces) - 1
        return last if self._chosen is None else min(self._chosen, last)

    def figures(self) -> str:
        """The chosen token and its probability in a line."""
        index = self.index
        if index < 0:
            return "no token written yet"
        piece = _visible(self._pieces[index])
        name = f'token "{piece}"' if piece else "part of a character"
        return f"{name}  {share(self._logprobs[index])}"

    def _window(self) -> range:
        """The tokens that have a bar: as many as there are columns, the chosen one among them."""
        width = max(self.size.width, 1)
        start = min(max(self.index - width // 2, 0), max(len(self._pieces) - width, 0))
        return range(start, min(start + width, len(self._pieces)))

    def render(self) -> RenderResult:
        index = self.index
        if index < 0:
            return Content(self.figures()).stylize(MUTED)
        bars = Content.assemble(
            *(
                (_bar(self._logprobs[i]), "reverse" if i == index else "$text-primary")
                for i in self._window()
            )
        )
        place = f"{count(index + 1)} of {count(len(self._pieces))}"
        lines = [bars, self._around(), Content(self.figures()), Content(self.others())]
        return Content("\n").join([*lines, Content(place).stylize(MUTED)])

    def others(self) -> str:
        """Likely tokens besides the chosen one, as many as there is room for, in percent."""
        chosen, line = self._pieces[self.index], ""
        for piece, logprob in self._alternatives:
            shown = _visible(piece).strip() or _visible(piece)
            word = f"{shown} {share(logprob).removesuffix(' %')}"
            longer = f"{line} · {word}" if line else word
            if piece != chosen and cell_len(longer) <= self.size.width:
                line = longer
        return line

    def _around(self) -> Content:
        """The chosen token in its line, as much around it as there is room for."""
        before = [_visible(piece) for piece in self._pieces[max(0, self.index - 40) : self.index]]
        chosen = _visible(self._pieces[self.index]) or "·"
        after = [_visible(piece) for piece in self._pieces[self.index + 1 : self.index + 41]]
        room = self.size.width - cell_len(chosen)
        left = ""
        while before and cell_len(before[-1] + left) <= room * 2 // 3:
            left = before.pop() + left
        right = ""
        while after and cell_len(left + right + after[0]) <= room:
            right += after.pop(0)
        return Content.assemble(left, (chosen, "reverse"), right)

    def action_move(self, step: str) -> None:
        """Chooses the token before or after, the first, or the last and those to come."""
        last = len(self._pieces) - 1
        steps = {"left": self.index - 1, "right": self.index + 1, "home": 0, "end": last}
        index = max(steps[step], 0)
        self.choose(None if index >= last else index)

    def action_pages(self) -> None:
        """Goes up to the page map."""
        self.screen.focus_previous()

    def on_click(self, event: events.Click) -> None:
        """Chooses the token whose bar was clicked."""
        window = self._window()
        if event.y == 0 and event.x < len(window):
            self.choose(window[event.x])


def _bar(logprob: float) -> str:
    return _BARS[min(int(math.exp(logprob) * len(_BARS)), len(_BARS) - 1)]


def _visible(piece: str) -> str:
    """A token's text on one line, line feeds and tabs as escapes."""
    return clean(piece).replace("\n", "\\n").replace("\t", "\\t")
