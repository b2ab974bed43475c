"""The state inspector: what the engine holds of a branch, page by page and token by token."""

from collections import Counter
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from llamay.errors import SessionError
from llamay.tui import text
from llamay.tui.bridge import Bridge, SessionUpdate
from llamay.tui.describe import preview
from llamay.tui.page_map import PageMap
from llamay.tui.token_view import TokenView

if TYPE_CHECKING:
    from llamay.session import Session
    from llamay.session.states import PageCell

_FIGURES_S = 0.5
_LABEL = 10
_NAME = 24
_PLACES = {"memory": "in memory", "disk": "on disk", "none": "to be computed"}
_HINT = "Arrows or the mouse: whose a page is"


class Inspector(VerticalScroll, can_focus=False):
    """Shows one branch, by its last node; the figures follow what the engine does."""

    DEFAULT_CSS = """
    Inspector { padding: 0 1; scrollbar-size-vertical: 1; }
    Inspector > * { margin-bottom: 1; }
    Inspector #pages { margin-bottom: 0; }
    Inspector #legend { color: $text-muted; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        """Empty until a session is bound."""
        super().__init__(id=id)
        self._session: Session | None = None
        self._node = 0
        self._stale = False

    def compose(self) -> ComposeResult:
        yield Static(id="branch")
        yield PageMap(id="pages")
        yield Static(id="legend")
        yield Static(Content(_HINT), id="page")
        yield Static(id="engine")
        yield TokenView(id="tokens")

    def on_mount(self) -> None:
        self.set_interval(_FIGURES_S, self._refresh_stale)
        self.look_again()

    def bind(self, session: "Session", bridge: Bridge) -> None:
        """Follows a session from now on, at the place where it is."""
        self._session = session
        bridge.follow(self)
        self.show(session.place)

    def show(self, node: int) -> None:
        """Shows the branch that ends at `node`."""
        if node != self._node and self.is_mounted:
            self.query_one(TokenView).choose(None)
        self._node = node
        self.look_again()

    def show_token(self, node: int, index: int) -> None:
        """Shows a branch, and one token of its last turn."""
        self.show(node)
        self.query_one(TokenView).choose(index)

    def on_session_update(self, update: SessionUpdate) -> None:
        """Looks again when the tree changed; figures that only grow can wait half a second."""
        if update.tree or update.events:
            self.look_again()
        self._stale = True

    def _refresh_stale(self) -> None:
        if self._stale:
            self.look_again()

    def look_again(self) -> None:
        """Shows what the engine holds now."""
        session = self._session
        if session is None or not self.is_mounted or not self.display:
            return
        self._stale = False
        if self._node not in session.tree.nodes:
            self._node = session.place
        node = session.tree.node(self._node)
        pages = self.query_one(PageMap)
        pages.show(session.page_map(node.id), writing=node.state == "writing")
        self.query_one("#branch", Static).update(self._branch(session))
        self.query_one("#legend", Static).update(pages.legend())
        self.query_one("#engine", Static).update(self._engine(session))
        is_answer = node.role == "assistant"
        self.query_one(TokenView).show(session.pieces(node.id) if is_answer else (), node.logprobs)

    def _branch(self, session: "Session") -> Content:
        where = session.where(self._node)
        pages = where.own_pages + where.shared_pages
        rows = [
            ("context", f"{text.count(where.tokens)} tok"),
            ("pages", f"{text.count(pages)} ({text.count(where.shared_pages)} shared)"),
            ("state", _PLACES[where.place]),
        ]
        return _table(rows)

    def _engine(self, session: "Session") -> Content:
        try:
            figures = session.figures()
        except SessionError:
            return Content("no model: figures come with one")
        held, budget = figures.memory_bytes, figures.budget_bytes
        memory = text.size(held) if budget is None else text.size_of(held, budget)
        counters = figures.counters
        places = Counter[str](cell.where for cell in self.query_one(PageMap).cells)
        rows = [
            ("memory", memory),
            ("tree", f"{text.count(figures.tree_entries)} · {text.size(figures.tree_bytes)}"),
            ("spilled", text.count(places["spilled"])),
            ("computed", f"{text.count(counters.prefilled_tokens)} tok"),
            ("matched", f"{text.count(counters.matched_tokens)} tok"),
            ("restored", f"{text.count(counters.restored_tokens)} tok"),
            ("written", f"{text.count(counters.decoded_tokens)} tok"),
        ]
        return _table(rows)

    @on(PageMap.Pointed)
    def describe_page(self, event: PageMap.Pointed) -> None:
        """Names the positions and the branches of the page that is pointed at."""
        event.stop()
        line = _HINT if event.cell is None else self.page_sentence(event.cell)
        self.query_one("#page", Static).update(Content(line))

    def page_sentence(self, cell: "PageCell") -> str:
        """Whose a page is, and which tokens are in it."""
        assert self._session is not None
        tree = self._session.tree
        names = []
        for node in (tree.nodes[id] for id in cell.holders if id in tree.nodes):
            name = text.one_line(node.label or "") or preview(tree, node)
            names.append(f"“{name if len(name) <= _NAME else name[: _NAME - 1] + '…'}”")
        whose = "own" if cell.own else f"{text.count(len(cell.holders))} share it"
        tokens = f"tokens {text.count(cell.start)} to {text.count(cell.end - 1)}"
        return f"{tokens}, {whose}: {', '.join(names)}" if names else f"{tokens}, held by none"


def _table(rows: list[tuple[str, str]]) -> Content:
    return Content("\n").join(
        Content.assemble((f"{label:<{_LABEL}}", text.MUTED), value) for label, value in rows
    )
