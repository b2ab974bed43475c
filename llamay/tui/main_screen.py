"""The main screen: the tree, the branch that is shown, and what can be done with a turn."""

from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen

from llamay.events import AnswerFailed, Notice, Resumed, SessionEvent
from llamay.tui import describe, describe_session
from llamay.tui.ask import AskCount, AskLine
from llamay.tui.bars import NoticeBar
from llamay.tui.bridge import SessionUpdate
from llamay.tui.editor import Editor
from llamay.tui.figures import Figures
from llamay.tui.keys import MAIN, bindings
from llamay.tui.regions import Regions
from llamay.tui.text import plural
from llamay.tui.transcript import Transcript
from llamay.tui.tree_view import TreeView

if TYPE_CHECKING:
    from llamay.session import Session
    from llamay.session.tree import Node
    from llamay.tui.app import LlamayApp

_FIGURES_S = 0.5
_SAMPLES = 4
_MAX_COMPARED = 4
# What needs a turn that is no system prompt, and a session that can be written to.
_TURN_ACTIONS = ("sample", "edit", "regenerate", "mark", "label", "delete", "copy", "copy_code")
_WRITING_ACTIONS = ("fork", "sample", "edit", "regenerate", "resume", "label", "delete")


class MainScreen(Screen[None]):
    """Shows one session; nothing but the editor before there is one."""

    app: "LlamayApp"
    AUTO_FOCUS = "#editor"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (150, "-huge")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(MAIN)]

    def __init__(self) -> None:
        """Waits for `bind`."""
        super().__init__()
        self.regions = Regions()
        self.editing: int | None = None  # the message that the editor makes a sibling of
        self._before_edit = 0  # the place then
        self.marked: set[int] = set()
        self._figures = Figures(self.regions)
        self._notice = NoticeBar()
        self._session: Session | None = None

    def compose(self) -> ComposeResult:
        yield self._figures.header
        yield self.regions
        yield self._notice
        yield self._figures.status

    def on_mount(self) -> None:
        """Follows the session's updates."""
        self.app.bridge.follow(self)
        self.show_loading(self.app.loading)
        self.set_interval(_FIGURES_S, self._figures.refresh)

    # what is shown

    @property
    def current(self) -> int:
        """The turn that actions are about; the other region hears of it a little later."""
        transcript = self.regions.transcript
        if transcript.has_focus and transcript.chosen is not None:
            return transcript.chosen
        return self.regions.tree_view.cursor

    @property
    def _node(self) -> "Node | None":
        if self._session is None or self.current not in self._session.tree.nodes:
            return None
        return self._session.tree.node(self.current)

    def release(self) -> None:
        """Lets the session go: from now on, nothing here asks it for anything."""
        self._session = None
        self._figures.release()

    def show_loading(self, sentence: str) -> None:
        """Says how far opening is, and what waits for it."""
        self.release()
        self._figures.show_loading(sentence)
        self.query_one("#talk-region").set_class(False, "-talking")
        self.regions.welcome.show_loading(sentence, self.app.waiting)

    def bind(self, session: "Session") -> None:
        """Shows `session` from now on."""
        self._session, self.editing = session, None
        self._figures.bind(session, self.app.bridge, self.app.host.title)
        self.marked.clear()
        regions = self.regions
        regions.bind(session, self.app.bridge)
        regions.transcript.model_name = (self.app.host.title or ["Answer"])[0]
        regions.transcript.bind(session, self.marked)
        regions.tree_view.bind(session, self.marked)
        tree = session.tree
        regions.editor.past = [node.text for node in tree.nodes.values() if node.role == "user"]
        self.show_node(session.place, at_end=True)
        self._figures.show_header()
        self._figures.refresh()
        if session.read_only:
            self.show_notice(session.read_only, "warning")

    def show_node(self, node: int, *, at_end: bool) -> None:
        """Shows the branch that ends at `node`, which becomes the current turn."""
        assert self._session is not None, "bind comes first"
        path = describe_session.shown_path(self._session.tree, node)
        self.regions.tree_view.choose(node)
        self.regions.transcript.show(path, node, at_end=at_end)
        self.query_one("#talk-region").set_class(bool(path), "-talking")
        if not path:
            self.regions.welcome.show_begin(self._session)
        if self.regions.inspector is not None:
            self.regions.inspector.show(node)
        self._session.look_at(path)
        self._figures.show_titles(node, self.editing)
        self._figures.show_status()
        self.refresh_bindings()

    def show_notice(self, sentence: str, level: str = "info") -> None:
        """Shows a sentence in place until the next one; an empty one hides the line."""
        self._notice.show(sentence, level)

    def on_session_update(self, update: SessionUpdate) -> None:
        """Shows what the session has become."""
        session = self._session
        if session is None:
            return
        for event in update.events:
            self._take_event(event)
        regions = self.regions
        if update.place:
            regions.tree_view.refresh_tree()
            self.show_node(session.place, at_end=True)
        elif update.tree:
            regions.tree_view.refresh_tree()
        else:
            regions.tree_view.refresh_nodes(update.nodes)
        if update.tree:
            self._figures.refresh()
            self._figures.show_header()  # a session takes its name from the first message
            end = regions.transcript.path[-1:] or [session.tree.root.id]
            if not session.tree.visible(end[0]):
                self.show_node(session.place, at_end=True)
            elif describe_session.shown_path(session.tree, end[0]) != regions.transcript.path:
                self.show_node(end[0], at_end=False)  # a system prompt came or went
            regions.transcript.refresh_turns()
            self._figures.show_editor_title(self.editing)
            self.refresh_bindings()
        else:
            regions.transcript.refresh_turns(update.nodes)
        self._figures.show_status()

    def _take_event(self, event: SessionEvent) -> None:
        match event:
            case Notice():
                self.app.say(event.message, event.level)
            case AnswerFailed():
                self.app.say(event.message, "error")
            case Resumed():
                self.app.note(self._figures.show_resumed(event))

    # what the regions tell

    @on(TreeView.Chosen)
    def tree_chosen(self, event: TreeView.Chosen) -> None:
        """Shows the branch up to the cursor, if that is still there."""
        if event.node == self.regions.tree_view.cursor:
            self.show_node(event.node, at_end=False)

    @on(Transcript.Chosen)
    def turn_chosen(self, event: Transcript.Chosen) -> None:
        """Puts the tree's cursor on the turn."""
        self.regions.tree_view.choose(event.node)
        self._figures.show_status()
        self.refresh_bindings()

    def continue_at(self, node: int) -> None:
        """The next message goes on from this answer, or from the beginning."""
        assert self._session is not None, "turns are of a session"
        self.editing = None
        if self.app.attempt(self._session.go, node):
            self.show_node(node, at_end=True)
            self.regions.go(self.regions.editor)

    def edit(self, user: int) -> None:
        """Takes a message into the editor, to send it again beside the old one."""
        assert self._session is not None, "turns are of a session"
        node = self._session.tree.node(user)
        if self.editing is None:
            self._before_edit = self._session.place
        self.continue_at(node.parent)
        self.editing = user
        self.regions.editor.put(node.text)
        self._figures.show_editor_title(self.editing)

    @on(Editor.Sent)
    def sent(self, event: Editor.Sent) -> None:
        """Sends a message; before there is a session, it waits for it."""
        session = self._session
        if session is None:
            self.app.waiting.append(event.text)
            self.regions.welcome.show_loading(self.app.loading, self.app.waiting)
            return
        self.show_notice("")
        editing, self.editing = self.editing, None
        if editing is not None and session.tree.visible(editing):
            done = self.app.attempt(session.edit, editing, event.text)
        else:
            done = self.app.attempt(session.send, event.text)
        if not done:
            self.regions.editor.put(event.text)

    # what can be done with a turn

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What does not apply to the current turn is not offered."""
        if action == "leave_editor":
            in_editor = self.focused is self.regions.editor
            return in_editor and self.editing is None and not self.app.is_answering
        node, session = self._node, self._session
        if session is None or node is None:
            return action not in (*_TURN_ACTIONS, *_WRITING_ACTIONS, "compare")
        if session.read_only and action in _WRITING_ACTIONS:
            return False
        if action in _TURN_ACTIONS and node.role == "root":
            return False
        if action == "resume":
            return node.state in describe.CONTINUABLE
        return node.role == "user" if action == "edit" else True

    def action_go(self) -> None:
        """Continues at an answer; takes a message into the editor."""
        if self._session is not None:
            is_user = self._session.tree.node(self.current).role == "user"
            self.edit(self.current) if is_user else self.continue_at(self.current)

    def action_sibling(self, step: int) -> None:
        """Shows the branch of a sibling."""
        if self._session is not None:
            nodes = describe.siblings(self._session.tree, self.current)
            sibling = nodes[(nodes.index(self.current) + step) % len(nodes)]
            if sibling != self.current:
                self.show_node(sibling, at_end=False)

    def action_escape(self) -> None:
        """Stops what is written; else leaves an edit or a notice."""
        if self.app.is_answering:
            self.app.stop()
        elif self.editing is not None:
            self.continue_at(self._before_edit)
            self.regions.editor.put("")
        else:
            self.show_notice("")

    def action_leave_editor(self) -> None:
        """Goes to the turns, where single keys act."""
        self.show_notice("")
        if self._session is not None:
            talking = bool(self.regions.transcript.path)
            self.regions.go(self.regions.transcript if talking else self.regions.tree_view)

    def action_next_region(self) -> None:
        """The next region."""
        self.regions.go_round(1)
        self._figures.show_status()

    def action_previous_region(self) -> None:
        """The region before."""
        self.regions.go_round(-1)
        self._figures.show_status()

    def action_search(self) -> None:
        """Searches all turns."""
        self.regions.search()

    async def action_inspector(self) -> None:
        """Shows or hides the state inspector."""
        await self.regions.toggle_inspector(self.current)

    def action_fork(self) -> None:
        """The next message starts a new branch at this turn; before it, if it is a message."""
        node = self._node
        if node is not None:
            self.continue_at(node.parent if node.role == "user" else node.id)
            self.app.say("fork: the next message starts a new branch here; nothing is copied")

    def action_edit(self) -> None:
        """Edits this message beside the old one."""
        self.edit(self.current)

    async def action_sample(self) -> None:
        """Asks how many, and shows the answers beside each other."""
        node = self._node
        if node is not None:
            self.app.push_screen(AskCount("How many answers?", _SAMPLES), self._sample)

    def _sample(self, number: int | None) -> None:
        node, session = self._node, self._session
        if number is None or node is None or session is None:
            return
        answers = self.app.attempt(session.sample, node.id, number)
        if answers and len(answers) > 1:
            self.app.compare(answers[:_MAX_COMPARED])

    def action_regenerate(self) -> None:
        """Another answer beside this one, or to this message."""
        if self._session is not None:
            self.app.attempt(self._session.regenerate, self.current)

    def action_resume(self) -> None:
        """Continues an answer that was stopped or interrupted."""
        if self._session is not None:
            node = self.current
            if self.app.attempt(self._session.resume, node):
                self.continue_at(node)

    def action_mark(self) -> None:
        """Marks the turn, or takes the mark away."""
        self.marked ^= {self.current}
        self.regions.tree_view.refresh_tree()
        self.regions.transcript.refresh_turns()
        self.app.say(f"{plural(len(self.marked), 'turn')} marked; c compares them")

    def action_compare(self) -> None:
        """Shows marked turns beside each other; without marks, this answer and its siblings."""
        session = self._session
        if session is None:
            return
        nodes = describe_session.to_compare(session.tree, self.marked, self.current)
        if not 2 <= len(nodes) <= _MAX_COMPARED:
            marks = f"{len(nodes)} are marked" if self.marked else "none is"
            self.app.say(f"mark two to four turns with Space, then c; {marks}", "warning")
            return
        self.app.compare(nodes)

    def action_label(self) -> None:
        """Asks for a label."""
        node = self._node
        if node is not None:
            ask = AskLine("Label of this turn", node.label or "", hint="An empty one takes it off")
            self.app.push_screen(ask, self._label)

    def _label(self, label: str | None) -> None:
        if label is not None and self._session is not None:
            self.app.attempt(self._session.label, self.current, label.strip())

    def action_delete(self) -> None:
        """Asks, and deletes this turn and what follows it; never on the active path."""
        session, node = self._session, self._node
        if session is None or node is None:
            return
        if node.id in session.tree.path(session.place):
            self.app.say(
                "this turn is on the active path; continue on another branch first (Enter there)",
                "warning",
            )
            return
        from llamay.tui.confirm import Confirm

        question = describe_session.delete_question(session.tree, node.id)
        self.app.push_screen(Confirm(question, "Delete"), self._delete)

    def _delete(self, yes: bool | None) -> None:
        if yes and self._session is not None:
            parent = self._session.tree.node(self.current).parent
            if self.app.attempt(self._session.delete, self.current):
                self.show_node(parent, at_end=False)

    def action_copy(self) -> None:
        """Copies the turn's text as it is, by the terminal (OSC 52)."""
        node = self._node
        if node is not None:
            self.app.copy_to_clipboard(node.text)
            self.app.say(f"copied {plural(len(node.text), 'character')}")

    def action_copy_code(self) -> None:
        """Copies the last block of code of the turn."""
        node = self._node
        code = describe.last_code(node.text) if node is not None else None
        if code is None:
            self.app.say("there is no block of code in this turn", "warning")
            return
        self.app.copy_to_clipboard(code)
        self.app.say(f"copied {plural(code.count(chr(10)) + 1, 'line')} of code")

    def action_unfold_text(self) -> None:
        """Shows or folds what is long or thought in this turn."""
        if not self.regions.transcript.toggle_long():
            self.app.say("nothing is folded in this turn")
