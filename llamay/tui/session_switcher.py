"""The list of sessions: open one, begin a new one, rename, delete."""

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from llamay.errors import LlamayError, UsageError
from llamay.session.catalog import Catalog, Entry
from llamay.session.names import checked_name
from llamay.tui import text
from llamay.tui.ask import AskLine
from llamay.tui.bars import StatusBar
from llamay.tui.confirm import Confirm
from llamay.tui.keys import bindings
from llamay.tui.pick_list import PickList
from llamay.tui.screen_keys import SESSIONS

if TYPE_CHECKING:
    from llamay.kv.snapshot import Key


class SessionSwitcher(ModalScreen[str | None]):
    """Ends with the name of a session, one that is there or a new one, or None."""

    CSS_PATH = "dialog.tcss"
    AUTO_FOCUS = "PickList"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(SESSIONS)]

    def __init__(self, home: Path, current: str = "", key: "Key | None" = None) -> None:
        """Lists the sessions below `home`; key: for those that are encrypted with it."""
        super().__init__()
        self._catalog = Catalog(home)
        self._current = current
        self._key = key
        self._entries: list[Entry] | None = None  # until they are read
        self._by_name: dict[str, Entry] = {}

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog list"):
            yield Static(Content("Sessions"), classes="title")
            yield Input(placeholder="/ filters by name and first message")
            yield PickList()
            yield Static(id="detail", classes="hint")
            yield StatusBar()

    def on_mount(self) -> None:
        self._read()

    @work(thread=True, exclusive=True)
    def _read(self) -> None:
        """Reads the catalog; on a thread, because there may be many."""
        entries = self._catalog.entries(self._key)
        self.app.call_from_thread(self._show, entries)

    def _show(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._by_name = {entry.name: entry for entry in entries}
        self._list()

    @on(Input.Changed)
    @on(PickList.NewWidth)
    def _list(self) -> None:
        """Lists what passes the filter, the cursor on the session where it was."""
        if self._entries is None:
            return
        options = self.query_one(PickList)
        chosen = self._chosen.name if self._chosen else self._current
        words = self.query_one(Input).value.casefold().split()
        shown = [entry for entry in self._entries if all(word in _words(entry) for word in words)]
        width = options.scrollable_content_region.width
        options.clear_options()
        options.add_options([Option(self._row(entry, width), entry.name) for entry in shown])
        names = [entry.name for entry in shown]
        options.highlighted = (names.index(chosen) if chosen in names else 0) if names else None
        if not names:
            none = "no session is called so" if words else "no session yet; n begins one"
            self._say(none)

    def _row(self, entry: Entry, width: int) -> Content:
        sign = "●" if entry.name == self._current else " "
        branch = f"{'  ' * (entry.depth - 1)}└ " if entry.depth else ""
        name = f"{sign} {branch}{text.one_line(entry.name)}"
        if entry.summary is None:
            figures = "encrypted" if entry.encrypted else "damaged"
        else:
            summary = entry.summary
            figures = (
                f"{text.plural(summary.branches, 'branch'):>12}"
                f"{text.count(summary.tokens):>10} tok"
                f"{text.size(entry.bytes):>10}{text.ago(time.time() - entry.updated):>8}"
            )
        room = max(width - cell_len(figures) - 1, 8)
        faint = "" if _openable(entry, self._current) else text.MUTED
        return Content.assemble((text.fit(name, room), faint), " ", (figures, text.MUTED))

    @property
    def _chosen(self) -> Entry | None:
        option = self.query_one(PickList).highlighted_option
        return None if option is None else self._by_name.get(option.id or "")

    @on(OptionList.OptionHighlighted)
    def describe(self) -> None:
        """Says what the chosen session is about, or why it cannot be opened."""
        if entry := self._chosen:
            self._say(self.detail(entry))

    def detail(self, entry: Entry) -> str:
        """A sentence about a session."""
        if problem := _problem(entry, self._current):
            return problem
        assert entry.summary is not None
        parts = [text.one_line(entry.summary.title), text.one_line(entry.summary.model or "")]
        parts += ["encrypted"] if entry.encrypted else []
        parts += ["open now"] if entry.name == self._current else []
        return " · ".join(part for part in parts if part)

    def _say(self, sentence: str) -> None:
        self.query_one("#detail", Static).update(Content(sentence))

    @property
    def _in_filter(self) -> bool:
        return self.query_one(Input).has_focus

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Letters are text in the filter, and what needs a session needs one."""
        if action == "to_list":
            return self._in_filter
        if self._in_filter and action in ("new", "rename", "delete", "filter"):
            return False
        return self._chosen is not None if action in ("rename", "delete") else True

    def action_filter(self) -> None:
        """Goes to the filter."""
        self.set_focus(self.query_one(Input))

    def action_to_list(self) -> None:
        """Goes to the list."""
        self.set_focus(self.query_one(PickList))

    def action_leave(self) -> None:
        """Leaves the filter for the list, or the list for what was before."""
        if self._in_filter:
            self.action_to_list()
        else:
            self.dismiss(None)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def action_open(self) -> None:
        """Ends with the chosen session, if it can be opened."""
        entry = self._chosen
        if entry is None:
            return
        if problem := _problem(entry, self._current):
            self._say(problem)
        else:
            self.dismiss(entry.name)

    @work
    async def action_new(self) -> None:
        """Asks for a name, and ends with it."""
        numbers = (f"session-{number}" for number in count(len(self._by_name) + 1))
        free = next(name for name in numbers if name not in self._by_name)
        ask = AskLine("Name of the new session", free, suggested=True)
        name = await self.app.push_screen_wait(ask)
        if name is not None:
            try:
                self.dismiss(checked_name(name.strip()))
            except UsageError as error:
                self._say(str(error))

    @work
    async def action_rename(self) -> None:
        """Asks for another name."""
        entry = self._chosen
        if entry is None:
            return
        if entry.owner:
            self._say(f"{text.one_line(entry.name)} is open; it can be renamed when it is closed")
            return
        name = await self.app.push_screen_wait(AskLine("New name", entry.name))
        if name and name.strip() and name != entry.name:
            self._attempt(lambda: self._rename(entry.name, name))

    def _rename(self, old: str, new: str) -> None:
        last = self._catalog.last()
        folder = self._catalog.open(old, self._key)
        try:
            self._catalog.rename(folder, new)
        finally:
            folder.release()
        if last is not None and last != old:
            self._catalog.set_last(last)

    @work
    async def action_delete(self) -> None:
        """Asks, and deletes the chosen session for good."""
        if entry := self._chosen:
            about = text.size(entry.bytes)
            if entry.summary is not None:
                about = f"{text.plural(entry.summary.branches, 'branch')}, {about}"
            question = f"Delete {text.one_line(entry.name)} for good? {about}"
            if await self.app.push_screen_wait(Confirm(question, "Delete")):
                self._attempt(lambda: self._catalog.remove(entry.name))

    @work(thread=True)
    def _attempt(self, change: Callable[[], object]) -> None:
        """Makes a change on a thread, and lists again; says so if it is refused."""
        problem = ""
        try:
            change()
        except LlamayError as error:
            problem = str(error)
        entries = self._catalog.entries(self._key)
        self.app.call_from_thread(self._show, entries)
        if problem:
            self.app.call_from_thread(self._say, problem)


def _words(entry: Entry) -> str:
    title = entry.summary.title if entry.summary else ""
    return f"{entry.name} {title}".casefold()


def _openable(entry: Entry, current: str) -> bool:
    return _problem(entry, current) is None


def _problem(entry: Entry, current: str) -> str | None:
    """Why a session cannot be opened from here, a sentence."""
    if entry.problem:
        return text.clean(entry.problem)
    if entry.summary is None:
        return "it is encrypted; start llamay with --context-key FILE to open it"
    if entry.owner and entry.name != current:
        return f"it is open in {text.one_line(entry.owner)}; close it there first"
    return None
