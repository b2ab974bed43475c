"""Settings of a branch: what holds at a turn, where that is set, and other values from there on."""

from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static, TextArea

from llamay.errors import LlamayError, UsageError
from llamay.session.records import Settings
from llamay.tui import text
from llamay.tui.bars import StatusBar
from llamay.tui.confirm import Confirm
from llamay.tui.keys import bindings
from llamay.tui.screen_keys import SETTINGS
from llamay.tui.settings_fields import FIELDS, Field, inherited, origin, place

if TYPE_CHECKING:
    from llamay.session import Session


class SettingsScreen(ModalScreen[None]):
    """Sets what holds from one turn on. An empty field leaves what holds before it."""

    CSS_PATH: ClassVar = ["dialog.tcss", "settings.tcss"]
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(SETTINGS)]

    def __init__(self, session: "Session", node: int, *, system: bool = False) -> None:
        """Shows the settings at `node`; system: begins in the system prompt."""
        super().__init__()
        self._session = session
        self._node = node
        self._before = session.tree.node(node).settings
        self._inherited = inherited(session.tree, node)
        self._first = "#system" if system else "#temperature"

    def compose(self) -> ComposeResult:
        tree, fixed = self._session.tree, bool(self._session.read_only)
        prompt = tree.effective(self._node).system or ""
        with Vertical(classes="dialog"):
            yield Static(Content(f"Settings from {place(tree, self._node)} on"), classes="title")
            with VerticalScroll():
                yield Static(self._system_line(), classes="hint", id="system-line")
                yield TextArea(prompt, id="system", read_only=fixed, tab_behavior="focus")
                for field in FIELDS:
                    with Horizontal(classes="field"):
                        yield Static(Content(field.label), classes="name")
                        own = field.shown(getattr(self._before, field.name))
                        yield Input(own, id=field.name, disabled=fixed)
                        yield Static(
                            Content(origin(tree, self._node, field.name)), classes="origin"
                        )
            yield Static(Content(self._session.read_only or ""), id="wrong", classes="wrong")
            yield StatusBar()

    def on_mount(self) -> None:
        self.query_one(self._first).focus()

    def _system_line(self) -> Content:
        tree = self._session.tree
        where = "set here" if self._before.system is not None else None
        where = where or origin(tree, self._node, "system")
        line = f"System prompt · {where}"
        if tokens := tree.length(self._node):
            line += f"; another one rereads {text.plural(tokens, 'token')}"
        return Content(line)

    def _value(self, field: Field) -> object:
        return field.value(self.query_one(f"#{field.name}", Input).value)

    def settings(self) -> Settings:
        """What the form says. Raises UsageError for the first field that is wrong."""
        system: str | None = self.query_one("#system", TextArea).text
        if system == (self._inherited.system or ""):
            system = None
        values = {field.name: self._value(field) for field in FIELDS}
        return Settings(system=system, **values)  # type: ignore[arg-type]

    @on(Input.Changed)
    def check(self) -> None:
        """Says at once which field is wrong, and why."""
        problem = ""
        for field in FIELDS:
            wrong = None
            try:
                self._value(field)
            except UsageError as error:
                wrong = str(error)
            self.query_one(f"#{field.name}", Input).set_class(wrong is not None, "-invalid")
            problem = problem or wrong or ""
        self._say(problem)

    def _say(self, sentence: str) -> None:
        self.query_one("#wrong", Static).update(Content(text.clean(sentence)))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Arrows move the cursor in the system prompt, and a read-only session saves nothing."""
        if action == "field":
            return isinstance(self.focused, Input)
        return not (action == "save" and self._session.read_only)

    def action_field(self, step: int) -> None:
        """Goes to the field above or below."""
        if step > 0:
            self.focus_next()
        else:
            self.focus_previous()

    @on(Input.Submitted)
    def action_save(self) -> None:
        """Lets the settings hold from the turn on, unless one is wrong, which is said."""
        try:
            settings = self.settings()
            if settings != self._before:
                self._session.set_settings(self._node, settings)
        except LlamayError as error:
            self._say(str(error))
        else:
            self.dismiss(None)

    @work
    async def action_leave(self) -> None:
        """Leaves; asks first if that would lose what was written."""
        try:
            changed = self.settings() != self._before
        except UsageError:
            changed = True
        if changed and not self._session.read_only:
            question = "Leave without saving these settings?"
            if not await self.app.push_screen_wait(Confirm(question, "Leave", no="Stay")):
                return
        self.dismiss(None)
