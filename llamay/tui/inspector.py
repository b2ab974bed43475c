"""The state inspector: what the engine holds of a branch, page by page and token by token."""

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from textual import on, work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

from llamay.errors import LlamayError, SessionError
from llamay.tui import text
from llamay.tui.bridge import Bridge, SessionUpdate
from llamay.tui.describe import RUNNING, preview
from llamay.tui.page_map import PageMap
from llamay.tui.token_view import TokenView

if TYPE_CHECKING:
    from llamay.session import Session
    from llamay.session.states import PageCell

_FIGURES_S = 0.5
_STAYS_S = 0.15
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
        self._ask: Timer | None = None
        self._wanted: tuple[int, int, str] | None = None  # token whose alternatives were asked for

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
        self._want_alternatives()

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

    @on(TokenView.Chosen)
    def token_chosen(self, event: TokenView.Chosen) -> None:
        """Asks for what else was likely there."""
        event.stop()
        self._want_alternatives()

    def _want_alternatives(self) -> None:
        """Asks once a choice has stayed for a moment, and nothing more is written there."""
        assert self._session is not None
        index, state = self.query_one(TokenView).index, self._session.tree.node(self._node).state
        wanted = (self._node, index, state)
        if wanted != self._wanted:
            self._wanted = wanted
            if self._ask is not None:
                self._ask.stop()
            if index >= 0 and state not in RUNNING:
                ask = partial(self._alternatives, self._session, self._node, index)
                self._ask = self.set_timer(_STAYS_S, ask)

    @work(thread=True, exclusive=True)
    def _alternatives(self, session: "Session", node: int, index: int) -> None:
        """Has the engine compute one row; on a thread, because it may be at work."""
        try:
            found = session.alternatives(node, index)
        except LlamayError:
            found = []
        self.app.call_from_thread(self._show_alternatives, node, index, found)

    def _show_alternatives(self, node: int, index: int, found: list[tuple[str, float]]) -> None:
        tokens = self.query_one(TokenView)
        if (node, index) == (self._node, tokens.index):
            tokens.show_alternatives(found)

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
