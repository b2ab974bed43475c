"""The compare view: 2 to 4 branches side by side, decoding together."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Grid, Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from llamay.errors import LlamayError
from llamay.tui import text
from llamay.tui.bars import StatusBar
from llamay.tui.bridge import Bridge, SessionUpdate
from llamay.tui.compare_branches import Comparison
from llamay.tui.compare_pane import ComparePane
from llamay.tui.confirm import Confirm
from llamay.tui.describe import RUNNING
from llamay.tui.editor import Editor
from llamay.tui.keys import bindings
from llamay.tui.screen_keys import COMPARE
from llamay.tui.turns_view import TurnsView

if TYPE_CHECKING:
    from llamay.session import Session

MAX_PANES = 4
_MIN_PANE_WIDTH = 30
_FIGURES_S = 0.25


class CompareScreen(Screen[int | None]):
    """Ends with the node that was promoted, or None."""

    CSS_PATH = "compare.tcss"
    AUTO_FOCUS = "ComparePane"
    BINDINGS: ClassVar[list[BindingType]] = [
        replace(binding, key_display="1-4") if binding.action == "pane(0)" else binding
        for binding in bindings(COMPARE)
    ]

    def __init__(self, session: "Session", bridge: Bridge, nodes: Sequence[int]) -> None:
        """Shows the branches that end at `nodes`, of which the first four if there are more."""
        super().__init__()
        self._session = session
        self._bridge = bridge
        self._branches = list(nodes[:MAX_PANES])  # those that were dropped too
        self._comparison = Comparison(session, self._branches)
        self._focused_pane = 0
        self._editor = Editor()
        self._editor.placeholder = session.read_only or "one prompt to all"
        self._editor.disabled = bool(session.read_only)
        self._together = True

    def compose(self) -> ComposeResult:
        yield Static(id="shared")
        yield Grid(id="panes")
        with Horizontal(id="ask"):
            yield Static("> ")
            yield self._editor
        yield StatusBar()

    async def on_mount(self) -> None:
        self._bridge.follow(self)
        self.set_interval(_FIGURES_S, self._show_figures)
        await self._show()

    @property
    def panes(self) -> list[ComparePane]:
        """The panes from left to right."""
        return list(self.query(ComparePane))

    @property
    def _chosen(self) -> ComparePane:
        """The pane that has the focus, or had it before the prompt."""
        if isinstance(self.focused, ComparePane):
            return self.focused
        return self.panes[min(self._focused_pane, len(self.panes) - 1)]

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        for pane in self.panes:
            if pane is event.widget:
                self._focused_pane = pane.index

    async def _show(self) -> None:
        """Makes a pane for each branch that is there."""
        nodes = [node for node in self._branches if self._session.tree.visible(node)]
        if not nodes:
            self.dismiss(None)
            return
        self._comparison = Comparison(self._session, nodes)
        self._session.look_at(nodes)
        grid = self.query_one("#panes", Grid)
        stay = self._in_prompt
        async with self.batch():
            await grid.remove_children()
            await grid.mount_all(
                ComparePane(self._session, self._bridge, self._comparison, index)
                for index in range(len(nodes))
            )
            self._arrange()
        self._show_figures()
        if not stay:
            self.set_focus(self._chosen)

    def on_resize(self, event: events.Resize) -> None:
        self._arrange()

    def _arrange(self) -> None:
        """As many panes in a row as have room, the others below; the last row is filled."""
        panes = self.panes
        columns = max(1, min(len(panes), self.size.width // _MIN_PANE_WIDTH))
        self.query_one("#panes", Grid).styles.grid_size_columns = columns
        for index, pane in enumerate(panes):
            last = index == len(panes) - 1
            pane.styles.column_span = columns - index % columns if last else 1

    async def on_session_update(self, update: SessionUpdate) -> None:
        """Shows what the branches have become."""
        visible = tuple(node for node in self._branches if self._session.tree.visible(node))
        if update.tree and visible != self._comparison.nodes:
            await self._show()
            return
        for pane in self.panes:
            if pane.node.id in update.nodes or update.place:
                pane.refresh_branch()
        if update.tree or update.events:
            self._show_figures()
            self.refresh_bindings()

    def _show_figures(self) -> None:
        """What counts and clocks say; some times a second, since text comes more often."""
        tokens = text.plural(self._comparison.shared_tokens, "token")
        pages = self._comparison.shared_pages()
        words = [tokens] if pages is None else [tokens, text.plural(pages, "page")]
        line = Content(f"shared: {' · '.join(words)}")
        self.query_one("#shared", Static).update(line, layout=False)
        for pane in self.panes:
            pane.refresh_figures()
        running = [self._bridge.running.get(node) for node in self._comparison.nodes]
        speeds = [one.tokens_per_s or 0 for one in running if one is not None]
        together = f"{text.rate(sum(speeds))} together" if sum(speeds) else ""
        self.query_one(StatusBar).show(together)

    @property
    def _in_prompt(self) -> bool:
        return self._editor.has_focus

    @property
    def _is_running(self) -> bool:
        return bool(self._running_nodes())

    def _running_nodes(self) -> list[int]:
        """The last turns that are written, and those that they wait for."""
        tree = self._session.tree
        nodes = {id for node in self._comparison.nodes for id in tree.path(node)}
        return sorted(id for id in nodes if tree.node(id).state in RUNNING)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Escape leaves the prompt, else stops what is written, else goes back."""
        if action == "leave_prompt":
            return self._in_prompt
        if self._in_prompt and action in ("stop", "back", "prompt", "pane", "together", "copy"):
            return False
        if action in ("stop", "back"):
            return self._is_running == (action == "stop")
        if action == "undo":
            return len(self._comparison.nodes) < len(self._branches)
        if action in ("prompt", "drop"):
            return not self._session.read_only
        return True

    def action_leave_prompt(self) -> None:
        """Goes from the prompt to the branch that had the focus before."""
        self.set_focus(self._chosen)

    def action_stop(self) -> None:
        """Stops the answers of all panes."""
        for node in reversed(self._running_nodes()):  # what waits, before it would begin
            self._attempt(partial(self._session.stop, node))

    def action_back(self) -> None:
        """Goes back without promoting one."""
        self.dismiss(None)

    def action_prompt(self) -> None:
        """Goes to the prompt."""
        self.set_focus(self._editor)

    def action_pane(self, index: int) -> None:
        """Goes to a branch, if there are so many."""
        if index < len(self.panes):
            self.set_focus(self.panes[index])

    def action_promote(self) -> None:
        """Makes the branch the place of the next message, and goes back."""
        node = self._chosen.node.id
        if self._attempt(lambda: self._session.go(node)):
            self.dismiss(node)

    @work
    async def action_drop(self) -> None:
        """Asks, then deletes the branch's last turn; the others stay."""
        pane = self._chosen
        question = f"Drop branch {pane.index + 1}, {text.plural(len(pane.node.ids), 'token')}?"
        if await self.app.push_screen_wait(Confirm(question, "Drop")):
            node = pane.node.id
            self._attempt(lambda: self._session.delete(node))

    def action_undo(self) -> None:
        """Brings back the branch that was dropped last."""
        self._attempt(self._session.undo)

    def action_together(self) -> None:
        """Scrolls all panes together from now on, or each alone."""
        self._together = not self._together
        self.notify("All branches scroll together." if self._together else "Each scrolls alone.")

    def action_copy(self) -> None:
        """Copies the text of the branch's last turn."""
        self.app.copy_to_clipboard(self._chosen.node.text)
        self.notify(f"Copied {text.plural(len(self._chosen.node.text), 'character')}.")

    def _attempt(self, change: Callable[[], object]) -> bool:
        """Makes a change; False if it is refused, which is said."""
        try:
            change()
        except LlamayError as error:
            self.notify(str(error), severity="error", markup=False)
            return False
        return True

    @on(Editor.Sent)
    async def send(self, event: Editor.Sent) -> None:
        """Sends the prompt to all branches; the panes go on with the answers."""
        nodes = self._comparison.nodes
        if self._attempt(lambda: self._go_on_with(self._session.send_to(nodes, event.text))):
            await self._show()
        else:
            self._editor.put(event.text)

    def _go_on_with(self, nodes: Sequence[int]) -> None:
        self._branches = list(nodes)

    @on(TurnsView.Scrolled)
    def scroll_others(self, event: TurnsView.Scrolled) -> None:
        """Scrolls the other panes to the same line, if they scroll together."""
        if self._together:
            for pane in self.panes:
                if pane is not event.view:
                    pane.follow(event.view.scroll_y)
