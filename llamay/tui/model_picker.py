"""The models on this machine, and those that can be pulled."""

from dataclasses import dataclass
from threading import Event
from typing import ClassVar

from rich.cells import cell_len
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from llamay.errors import LlamayError
from llamay.hub import DEFAULT_MODEL, find_model, resolve
from llamay.hub.listing import ModelEntry, list_models
from llamay.tui import text
from llamay.tui.bars import StatusBar
from llamay.tui.keys import bindings
from llamay.tui.pick_list import PickList
from llamay.tui.screen_keys import MODELS

_PROGRESS_S = 0.1
_BAR = 24


class _PullStopped(Exception):  # noqa: N818 - no error: the user asked for it
    """Goes through the hub from its progress callback; what came is kept for the next time."""


@dataclass(frozen=True, slots=True)
class _Progress:
    label: str
    done: int
    total: int | None

    @property
    def sentence(self) -> str:
        """A bar, if it is known how long it is, and bytes."""
        done, label = text.size(self.done), text.one_line(self.label)
        if not self.total:
            return f"{label}  {done}"
        filled = min(_BAR * self.done // self.total, _BAR)
        return f"{label}  {'█' * filled}{'░' * (_BAR - filled)}  {done} of {text.size(self.total)}"


class ModelPicker(ModalScreen[str | None]):
    """Ends with a name that llamay takes for a model, of one that is here by then, or None."""

    CSS_PATH = "dialog.tcss"
    AUTO_FOCUS = "PickList"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(MODELS)]

    def __init__(self, current: str = "") -> None:
        """current: the name of the model in use, if there is one."""
        super().__init__()
        self._current = current
        self._entries: dict[str, ModelEntry] = {}
        self._pullable: list[str] = []
        self._stop: Event | None = None  # set: the pull under way is to end
        self._progress: _Progress | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog list"):
            yield Static(Content("Models"), classes="title")
            yield PickList()
            yield Static(Content("looking for models…"), id="detail", classes="hint")
            yield Input(placeholder="/ another: hf:owner/repo/file.gguf, or a .gguf file's path")
            yield StatusBar()

    def on_mount(self) -> None:
        self.set_interval(_PROGRESS_S, self._show_progress)
        self._look()

    @work(thread=True)
    def _look(self) -> None:
        """Reads the headers of all models; on a thread, because disks may be slow."""
        try:
            entries = list(list_models())
            pullable = [] if find_model(DEFAULT_MODEL) else [DEFAULT_MODEL]
        except (LlamayError, OSError) as error:
            self.app.call_from_thread(self._say, str(error))
        else:
            self.app.call_from_thread(self._show, entries, pullable)

    def _show(self, entries: list[ModelEntry], pullable: list[str]) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._pullable = pullable
        self._list()

    @on(PickList.NewWidth)
    def _list(self) -> None:
        options = self.query_one(PickList)
        chosen = self._chosen or self._current
        width = options.scrollable_content_region.width
        usable = [entry for entry in self._entries.values() if entry.supported]
        others = [entry for entry in self._entries.values() if not entry.supported]
        rows = [Option(self._row(entry, width), entry.name) for entry in usable]
        rows += [Option(_pull_row(name, width), name) for name in self._pullable]
        rows += [Option(self._row(entry, width), entry.name) for entry in others]
        options.clear_options()
        options.add_options(rows)
        names = [row.id for row in rows]
        options.highlighted = (names.index(chosen) if chosen in names else 0) if names else None

    def _row(self, entry: ModelEntry, width: int) -> Content:
        sign = "●" if entry.name == self._current else " " if entry.supported else "✗"
        name = f"{sign} {text.one_line(entry.name)}"
        if not entry.supported:
            row = f"{name}  {text.one_line(entry.reason or '')}"
            return Content(text.fit(row, width)).stylize(text.MUTED)
        figures = (
            f"{text.one_line(entry.architecture or '-'):>8}"
            f"{text.one_line(entry.quantisation or '-'):>8}"
            f"{text.size(entry.size_bytes):>10}"
            f"  {text.fit(text.one_line(entry.store), 13)}"
        )
        room = max(width - cell_len(figures), 8)
        return Content.assemble(text.fit(name, room), (figures, text.MUTED))

    @property
    def _chosen(self) -> str | None:
        option = self.query_one(PickList).highlighted_option
        return option.id if option is not None else None

    @on(OptionList.OptionHighlighted)
    def describe(self) -> None:
        """Says where the chosen model is, or why llamay cannot run it."""
        name = self._chosen
        if name is not None and self._stop is None:
            self._say(self.detail(name))

    def detail(self, name: str) -> str:
        """A sentence about a model of the list."""
        entry = self._entries.get(name)
        if entry is None:
            return f"Enter pulls {name} and opens it; it is checked against its SHA-256"
        path = text.one_line(str(entry.path))
        return (
            path if entry.supported else f"llamay cannot run it: {text.clean(entry.reason or '')}"
        )

    def _say(self, sentence: str) -> None:
        self.query_one("#detail", Static).update(Content(text.clean(sentence)))

    @property
    def _in_name(self) -> bool:
        return self.query_one(Input).has_focus

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The slash is text in a name."""
        return self._in_name if action == "to_list" else not (self._in_name and action == "name")

    def action_name(self) -> None:
        """Goes to the name."""
        self.set_focus(self.query_one(Input))

    def action_to_list(self) -> None:
        """Goes to the list."""
        self.set_focus(self.query_one(PickList))

    def action_leave(self) -> None:
        """Stops what is pulled; else leaves the name for the list; else ends with nothing."""
        if self._stop is not None:
            self._stop.set()
        elif self._in_name:
            self.action_to_list()
        else:
            self.dismiss(None)

    @on(OptionList.OptionSelected)
    def choose(self) -> None:
        """Ends with the chosen model, pulled first if it is not here; says why if it cannot run."""
        name = self._chosen
        entry = self._entries.get(name or "")
        if name is None or self._stop is not None:
            return
        if entry is None:
            self._begin(name)
        elif entry.supported:
            self.dismiss(name)
        else:
            self._say(self.detail(name))

    @on(Input.Submitted)
    def named(self, event: Input.Submitted) -> None:
        """Ends with the model of that name, pulled first if it is not here."""
        if event.value.strip() and self._stop is None:
            self._begin(event.value.strip())

    def _begin(self, name: str) -> None:
        self._stop = Event()
        self._say(f"looking for {name}…")
        self._pull(name, self._stop)

    @work(thread=True)
    def _pull(self, name: str, stop: Event) -> None:
        def progress(label: str, done: int, total: int | None) -> None:
            if stop.is_set():
                raise _PullStopped
            self._progress = _Progress(label, done, total)

        problem = None
        try:
            resolve(name, progress)
        except _PullStopped:
            problem = f"stopped; pulling {name} again goes on where it was"
        except (LlamayError, OSError) as error:
            problem = str(error)
        self.app.call_from_thread(self._pulled, name, problem)

    def _pulled(self, name: str, problem: str | None) -> None:
        self._stop = self._progress = None
        if problem is None:
            self.dismiss(name)
        else:
            self._say(problem)

    def _show_progress(self) -> None:
        """Shows how far pulling is, some times a second, however often the hub tells."""
        if self._progress is not None:
            self._say(self._progress.sentence)


def _pull_row(name: str, width: int) -> Content:
    return Content.assemble(text.fit(f"↓ {name}", max(width - 14, 8)), ("can be pulled", "italic"))
