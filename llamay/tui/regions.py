"""The regions side by side, or one at a time where there is no room; and the search in them."""

from typing import TYPE_CHECKING

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Input, Static

from llamay.tui.bars import PrefillBar
from llamay.tui.bridge import Bridge
from llamay.tui.editor import Editor
from llamay.tui.search_bar import SearchBar
from llamay.tui.text import plural
from llamay.tui.transcript import Transcript
from llamay.tui.tree_view import FILTERS, TreeView
from llamay.tui.welcome import Welcome

if TYPE_CHECKING:
    from llamay.session import Session
    from llamay.tui.inspector import Inspector


class Regions(Horizontal):
    """Tree, talk and state; the one with the focus is `-shown`, which matters in narrow screens."""

    def __init__(self) -> None:
        """Shows a welcome before there are turns."""
        super().__init__()
        self.tree_view = TreeView(id="tree")
        self.transcript = Transcript(id="transcript")
        self.welcome = Welcome(id="welcome")
        self.prefill = PrefillBar(id="prefill")
        self.editor = Editor(id="editor")
        self._search = SearchBar(id="search", placeholder="search all turns")
        self._summary = Static(id="tree-summary")
        self._last_summary = ""
        self._before_search = 0
        self.inspector: Inspector | None = None
        self._session: Session | None = None
        self._bridge: Bridge | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="tree-region", classes="region") as region:
            region.border_title = "Tree"
            yield self.tree_view
            yield self._summary
            yield self._search
        with Vertical(id="talk-region", classes="region -shown"):
            yield self.transcript
            yield self.welcome
            yield self.prefill
            with Horizontal(id="editor-box"):
                yield Static("> ", id="prompt")
                yield self.editor

    def bind(self, session: "Session", bridge: Bridge) -> None:
        """Searches in `session` from now on, and inspects it."""
        self._session, self._bridge = session, bridge
        self._search.display = False
        if self.inspector is not None:
            self.inspector.bind(session, bridge)

    async def toggle_inspector(self, node: int) -> None:
        """Shows the state of the branch that ends at `node`, or hides it."""
        if self.inspector is not None:
            region, self.inspector = self.query_one("#state-region"), None
            if region.has_pseudo_class("focus-within"):
                self.go(self.tree_view)
            await region.remove()
        elif self._session is not None and self._bridge is not None:
            from llamay.tui.inspector import Inspector

            self.inspector = Inspector()
            region = Vertical(self.inspector, id="state-region", classes="region")
            region.border_title = "State"
            await self.mount(region)
            self.inspector.bind(self._session, self._bridge)
            self.inspector.show(node)
            if self.screen.has_class("-narrow"):
                self.go(self._state_stops()[0])

    # focus

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Shows the region that the focus went to."""
        self._show_region_of(event.widget)

    def on_paste(self, event: events.Paste) -> None:
        """What is pasted where there is no text is for the editor."""
        self.go(self.editor)
        self.editor.on_paste(event)

    def go(self, target: Widget) -> None:
        """Moves the focus to a widget in any region."""
        self._show_region_of(target)
        self.screen.set_focus(target)  # at once: `focus` lets keys go to the old place first

    def go_round(self, step: int) -> None:
        """Moves the focus to the next place that takes it: tree, transcript, editor, state."""
        stops: list[Widget] = [self.tree_view, self.editor]
        if self.query_one("#talk-region").has_class("-talking"):
            stops.insert(1, self.transcript)
        stops += self._state_stops()
        focused = self.screen.focused
        index = stops.index(focused) if focused in stops else -1 if step > 0 else 0
        self.go(stops[(index + step) % len(stops)])

    def _state_stops(self) -> list[Widget]:
        """What takes the focus in the inspector, if that is open."""
        regions = self.query("#state-region")
        return [w for region in regions for w in region.walk_children(Widget) if w.can_focus]

    @property
    def shown(self) -> str:
        """The name of the region that has the focus, or had it last."""
        names = {"tree-region": "Tree", "talk-region": "Transcript", "state-region": "State"}
        return next((names[str(r.id)] for r in self.query(".region.-shown")), "")

    def _show_region_of(self, widget: Widget) -> None:
        for region in self.query(".region"):
            region.set_class(region in widget.ancestors_with_self, "-shown")

    # titles

    def show_summary(self, sentence: str) -> None:
        """Shows the figures of the whole session below the tree."""
        if sentence != self._last_summary:  # an update lays the screen out again
            self._last_summary = sentence
            self._summary.update(Content(sentence))

    def title_talk(self, title: str) -> None:
        """Names the branch that the transcript shows."""
        self.query_one("#talk-region").border_title = Content(title)

    def title_editor(self, title: str) -> None:
        """Says where the next message goes."""
        self.query_one("#editor-box").border_title = Content(title)

    @on(TreeView.Filtered)
    def filtered(self, event: TreeView.Filtered) -> None:
        """Names the kind of turns that the tree shows."""
        name = "" if event.name == FILTERS[0] else f"{event.name} only, v"
        self.query_one("#tree-region").border_subtitle = Content(name)

    # search

    def search(self) -> None:
        """Opens the search."""
        if self._session is not None:
            self._before_search = self.tree_view.cursor
            self._search.display = True
            self._search.clear()
            self.go(self._search)

    @on(Input.Changed, "#search")
    def searched(self, event: Input.Changed) -> None:
        """Shows only turns with the text, and puts the cursor on one of them."""
        event.stop()
        assert self._session is not None, "there is a search of a session only"
        region = self.query_one("#tree-region")
        if not event.value:
            self.tree_view.show_matches(None)
            region.border_subtitle = Content("")
            return
        matches = self._session.tree.search(event.value)
        self.tree_view.show_matches(matches)
        region.border_subtitle = Content(plural(len(matches), "match"))
        if matches and self.tree_view.cursor not in matches:
            self.tree_view.move_to(matches[0])

    @on(SearchBar.Step)
    def stepped(self, event: SearchBar.Step) -> None:
        """The next or previous match."""
        self.tree_view.move_to_match(event.step)

    @on(SearchBar.Finished)
    def finished(self, event: SearchBar.Finished) -> None:
        """Closes the search, at the match or where it began."""
        self._search.display = False
        cursor = self.tree_view.cursor if event.taken else self._before_search
        self.tree_view.show_matches(None)
        self.query_one("#tree-region").border_subtitle = Content("")
        self.tree_view.choose(cursor)
        self.tree_view.move_to(cursor)
        self.go(self.tree_view)
