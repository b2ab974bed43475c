"""One branch in the compare view: what it was sampled with, its turns, its figures."""

from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from llamay.sampling import SamplingParams, child_seed
from llamay.session.tree import Node
from llamay.tui import text
from llamay.tui.bridge import Bridge
from llamay.tui.compare_branches import Comparison
from llamay.tui.turns_view import TurnsView

if TYPE_CHECKING:
    from llamay.session import Session

_DEFAULTS = SamplingParams()


class ComparePane(Vertical):
    """A branch by its last node; `refresh_branch` looks at it again."""

    def __init__(self, session: "Session", bridge: Bridge, comparison: Comparison, index: int):
        super().__init__()
        self._session = session
        self._bridge = bridge
        self.comparison = comparison
        self.index = index
        self.view = TurnsView()
        self._foot = Static(classes="foot")
        self._shown_head = self._shown_figures = self._shown_state = ""
        self._shown_lines = 0

    def compose(self) -> ComposeResult:
        yield self.view
        yield self._foot

    def on_mount(self) -> None:
        self.refresh_branch()

    @property
    def node(self) -> Node:
        """The last node of the branch."""
        return self._session.tree.node(self.comparison.nodes[self.index])

    def refresh_branch(self) -> None:
        """Shows what the branch has become."""
        self.comparison.refresh(self.index)
        head = self._head()
        if head != self._shown_head:
            self._shown_head = head
            self.border_title = Content(head)
        self.view.show(self.comparison.turns(self.index))
        if self.node.state != self._shown_state:
            self._shown_state = self.node.state
            self.refresh_figures()

    def refresh_figures(self) -> None:
        """Shows the branch's counts; other branches' tokens may change how many are its own."""
        figures = self.figures()
        if 0 < self._foot.size.width < cell_len(figures):
            figures = figures.replace(" · ", "·")
        if figures != self._shown_figures:
            self._foot.update(Content(figures), layout=self._lines(figures) != self._shown_lines)
            self._shown_figures, self._shown_lines = figures, self._lines(figures)

    def _lines(self, figures: str) -> int:
        return -(-cell_len(figures) // max(self._foot.size.width, 1))

    def _head(self) -> str:
        node = self.node
        words = [str(self.index + 1)]
        if node.label:
            words.append(text.one_line(node.label))
        words.append(self._sampled_with(node))
        if node.id == self._session.place:
            words.append("here")
        return " · ".join(words)

    def _sampled_with(self, node: Node) -> str:
        settings = self._session.tree.effective(node.id)
        temperature = settings.temperature
        if temperature is None:
            temperature = _DEFAULTS.temperature
        if temperature == 0:
            return "greedy"
        if node.seed is None:
            return f"t {temperature:g}"
        return f"{_seed(node, settings.seed or 0)} · t {temperature:g}"

    def figures(self) -> str:
        """The branch's state and counts in a line."""
        node = self.node
        if node.state == "failed":
            return f"failed: {text.one_line(node.error or 'see the log')}"
        if node.state == "queued":
            return "waits for its turn"
        running = self._bridge.running.get(node.id)
        if node.state == "reading" and running is not None:
            computed, to_compute = running.done - running.cached, running.total - running.cached
            return (
                f"reading: {text.count(running.cached)} from cache · "
                f"{text.count(computed)} of {text.count(to_compute)} computed"
            )
        words = [f"+{text.count(self.comparison.own_tokens(self.index))} tok"]
        words.append(text.plural(self._session.where(node.id).own_pages, "page"))
        speed = running.tokens_per_s if running is not None else _speed(node)
        words += [text.rate(speed)] if speed else []
        words += [node.state] if node.state in ("stopped", "interrupted") else []
        return " · ".join(words)


def _seed(node: Node, base: int) -> str:
    """The seed that a user knows, and which of its children an answer has, where that is so."""
    index = node.seed_index or 0
    if node.seed != child_seed(base, index):
        return f"seed {node.seed}"
    return f"seed {base} #{index + 1}" if index else f"seed {base}"


def _speed(node: Node) -> float | None:
    return len(node.ids) / node.seconds if node.ids and node.seconds else None
