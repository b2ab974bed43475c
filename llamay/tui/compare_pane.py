"""One branch in the compare view: what it was sampled with, its turns, its figures."""

from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual import events
from textual.content import Content

from llamay.sampling import SamplingParams, child_seed
from llamay.session.tree import Node
from llamay.tui import text
from llamay.tui.bridge import Bridge, Running
from llamay.tui.compare_branches import Comparison
from llamay.tui.turns_view import Turn, TurnsView

if TYPE_CHECKING:
    from llamay.session import Session

_DEFAULTS = SamplingParams()


class ComparePane(TurnsView):
    """A branch by its last node: how it was sampled and its figures are in its border."""

    def __init__(self, session: "Session", bridge: Bridge, comparison: Comparison, index: int):
        super().__init__()
        self._session = session
        self._bridge = bridge
        self.comparison = comparison
        self.index = index
        self._titles = ("", "")

    def on_mount(self) -> None:
        self.refresh_branch()

    def on_resize(self, event: events.Resize) -> None:
        self.refresh_figures()

    @property
    def node(self) -> Node:
        """The last node of the branch."""
        return self._session.tree.node(self.comparison.nodes[self.index])

    def refresh_branch(self) -> None:
        """Shows what the branch has become."""
        node = self.node
        self.comparison.refresh(self.index)
        turns = self.comparison.turns(self.index)
        if node.state == "failed":
            turns.append(Turn("Failed", node.error or "see the log"))
        self.show(turns)

    def refresh_figures(self) -> None:
        """Shows the counts; other branches' tokens may change how many are this one's own."""
        titles = self._head(), self.figures()
        if titles != self._titles:
            self._titles = titles
            self.border_title, self.border_subtitle = map(Content, titles)

    def _head(self) -> str:
        node = self.node
        words = [str(self.index + 1)]
        if node.label:
            words.append(text.one_line(node.label))
        words.append(self._sampled_with(node))
        if node.id == self._session.place:
            words.append("here")
        head = " · ".join(words)
        return self._fitting(head, head.replace(" · ", "·"))

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
        """The branch's state and counts in as many words as there is room for."""
        node = self.node
        running = self._bridge.running.get(node.id)
        if node.state == "queued":
            return "waits for its turn"
        if node.state == "reading":
            return self._fitting(*_reading(running)) if running is not None else "reading"
        words = [f"+{text.count(self.comparison.own_tokens(self.index))} tok"]
        words.append(text.plural(self._session.where(node.id).own_pages, "page"))
        speed = running.tokens_per_s if running is not None else _speed(node)
        words += [text.rate(speed)] if speed else []
        words += [node.state] if node.state in ("stopped", "interrupted", "failed") else []
        words += [f"{self.lines_below} lines below"] if self.lines_below > 0 else []
        short = "·".join(words)
        shorter = short.replace(" pages", " pp").replace(" tok/s", "/s")
        return self._fitting(" · ".join(words), short, shorter)

    def _fitting(self, *sentences: str) -> str:
        """The first that fits into the border, else the last."""
        room = self.size.width - 4  # spaces, and a piece of the line
        return next((one for one in sentences if cell_len(one) <= room), sentences[-1])


def _reading(running: Running) -> tuple[str, str]:
    computed, to_compute = running.done - running.cached, running.total - running.cached
    short = f"reading {text.count(computed)} of {text.count(to_compute)}"
    return f"{short} computed · {text.count(running.cached)} from cache", short


def _seed(node: Node, base: int) -> str:
    """The seed that a user knows, and which of its children an answer has, where that is so."""
    index = node.seed_index or 0
    if node.seed != child_seed(base, index):
        return f"seed {node.seed}"
    return f"seed {base} #{index + 1}" if index else f"seed {base}"


def _speed(node: Node) -> float | None:
    return len(node.ids) / node.seconds if node.ids and node.seconds else None
