"""The app: opens sessions beside the screens, and does what is about a session as a whole."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.keys import format_key
from textual.screen import Screen

from llamay.errors import LlamayError
from llamay.tui import describe
from llamay.tui.ask import AskLine
from llamay.tui.bridge import Bridge
from llamay.tui.help import ALL_GROUPS, Entry, Reading, help_text, log_text
from llamay.tui.host import Host
from llamay.tui.key_order import KeyOrder
from llamay.tui.keys import APP, Key, bindings, load_keymap
from llamay.tui.main_screen import MainScreen
from llamay.tui.text import clean
from llamay.tui.themes import DARK, LIGHT, THEMES, save_theme

if TYPE_CHECKING:
    from llamay.session import Goodbye, Session

KEYS_FILE = "keys.toml"
_OPENING = "opening the model; the first time takes longer"
LEAVE_S = 1.0  # for the interface to end after a signal, once all is saved
_KEY_NAMES = {
    "enter": "Enter",
    "escape": "Esc",
    "space": "Space",
    "tab": "Tab",
    "home": "Home",
    "end": "End",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "f1": "F1",
}


def _palette() -> type[Provider]:
    from llamay.tui.palette import Commands

    return Commands


class LlamayApp(App[None]):
    """Shows one session at a time; `goodbye` is what closing the last one said.

    session: None until the first one is open; waiting: messages to send then
    """

    TITLE = "llamay"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {_palette}
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(APP)]
    bridge: Bridge

    def __init__(self, host: Host, name: str | None = None, *, theme: str = DARK) -> None:
        """Opens the session `name` once the first screen is shown, or the last one."""
        super().__init__(css_path=Path(__file__).with_name("main.tcss"))
        self.host = host
        self.session: Session | None = None
        self.waiting: list[str] = []
        self.notices: list[Entry] = []
        self.loading = _OPENING
        self.goodbye: Goodbye | None = None
        self.last_name = ""  # of the session that was closed last
        self.exit_code = 0
        self.main = MainScreen()
        self._first = name
        self._saving = threading.Lock()
        self._keys = KeyOrder(self)
        self.keymap: dict[str, str] = {}
        for known in THEMES:
            self.register_theme(known)
        # Before there is anything to style; a change later would parse and apply all CSS again.
        self.set_reactive(App.theme, theme)
        self.set_classes(f"-theme-{theme} {'-dark-mode' if theme == DARK else '-light-mode'}")
        self.stylesheet.set_variables(self.get_css_variables())

    def get_default_screen(self) -> Screen[Any]:
        """The main screen; all others are above it."""
        return self.main

    # opening and closing

    def on_load(self) -> None:
        """Makes what the screens find when they are mounted."""
        self.bridge = Bridge()

    def on_mount(self) -> None:
        """Opens the session behind a usable screen."""
        known = {key.id for group in ALL_GROUPS.values() for key in group}
        self.keymap, problems = load_keymap(self.keys_file, known)
        self.set_keymap(self.keymap)
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled, number)
        for problem in problems:
            self.say(problem, "warning")
        # The engine's imports would hold the interpreter while the first screen is drawn.
        self.main.call_after_refresh(self.open, self._first)

    @property
    def keys_file(self) -> Path:
        """Where the user's own keys are."""
        return self.host.home / KEYS_FILE

    def open(self, name: str | None, model: str | None = None) -> None:
        """Opens a session beside the interface; the one that is open is saved and closed first."""
        before, self.session = self.session, None
        self._show_loading(_OPENING)
        self.main.regions.go(self.main.regions.editor)
        self.run_worker(lambda: self._open(before, name, model), thread=True, exclusive=True)

    def _open(self, before: "Session | None", name: str | None, model: str | None) -> None:
        """Opens a session; runs on a thread."""
        try:
            if before is not None:
                before.close()
            session = self.host.open(name, model, self._told)
        except (LlamayError, OSError) as error:
            self.call_from_thread(self._open_failed, str(error))
        except Exception as error:  # the interface stays, whatever a file can make happen
            sentence = f"unexpected {type(error).__name__}: {error}"
            self.call_from_thread(self._open_failed, sentence)
        else:
            self.call_from_thread(self._opened, session)

    def _told(self, sentence: str) -> None:
        self.call_from_thread(self._show_loading, sentence)

    def _show_loading(self, sentence: str) -> None:
        self.loading = sentence
        self.main.show_loading(sentence)

    def _opened(self, session: "Session") -> None:
        # The interface makes many short-lived objects; what is there by now is there to stay, and
        # looking through it for garbage would take longer than an update.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        self.session = session
        self.bridge.attach(session)
        self.main.bind(session)
        if self.host.remark:
            self.say(self.host.remark, "warning")
        if session.read_only and self.host.title:
            from llamay.tui.confirm import Confirm

            question = f"{session.read_only}. Continue with {self.host.title[0]}?"
            self.push_screen(Confirm(question, "Continue", no="Only read"), self._continue)
        waiting, self.waiting = self.waiting, []
        for text in waiting:
            self.attempt(session.send, text)

    def _continue(self, yes: bool | None) -> None:
        """Lets a session of another model go on with this one."""
        if yes and self.session is not None and self.attempt(self.session.continue_with_model):
            self.main.bind(self.session)
            self.say("the text will be read anew, with the next message")

    def _open_failed(self, sentence: str) -> None:
        self._show_loading("nothing is open; m chooses a model, s a session")
        self.say(sentence, "error")

    def close_session(self) -> None:
        """Saves and closes the session, once, from any thread; `goodbye` is then there."""
        with self._saving:
            session, self.session = self.session, None
            if session is not None:
                self.last_name = session.name
                self.goodbye = session.close()

    def _signalled(self, number: int) -> None:
        """A signal to end: saving must not wait for a terminal that may be gone."""
        self.exit_code = 128 + number
        self.main.release()
        threading.Thread(target=self._save_and_leave, name="llamay-save", daemon=True).start()
        self.exit()

    def _save_and_leave(self) -> None:
        """Saves; then ends the process if the interface does not, which waits for ever to draw on a
        terminal that is gone."""
        self.close_session()
        time.sleep(LEAVE_S)
        os._exit(self.exit_code)

    # notices

    def say(self, sentence: str, level: str = "info") -> None:
        """Shows a sentence in place and keeps it in the log."""
        self.note(sentence, level)
        if self.screen is self.main or not self.screen_stack:
            self.main.show_notice(sentence, level)
        else:
            severity = {"info": "information"}.get(level, level)
            self.notify(clean(sentence), severity=severity, markup=False)  # type: ignore[arg-type]

    def note(self, sentence: str, level: str = "info") -> None:
        """Keeps a sentence in the log."""
        self.notices.append(Entry(time.strftime("%H:%M:%S"), level, sentence))

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the session's method returns, True for nothing; None, and said, if it fails."""
        try:
            result = function(*arguments)
        except LlamayError as error:
            self.say(str(error), "error")
            return None
        return True if result is None else result

    # keys, and the session as a whole

    async def on_event(self, event: events.Event) -> None:
        """Takes keys in their order."""
        if not isinstance(event, events.Key) or not await self._keys.take(event):
            await super().on_event(event)

    @property
    def is_answering(self) -> bool:
        """Whether an answer is written, read or waits."""
        if self.session is None:
            return False
        nodes = list(self.session.tree.nodes.values())
        return any(node.state in describe.RUNNING and not node.hidden for node in nodes)

    def stop(self) -> None:
        """Stops everything that is written; what came stays."""
        if self.session is not None:
            self.attempt(self.session.stop)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What does not apply to the session is not offered."""
        session = self.session
        if action in ("undo", "redo"):
            if session is None or session.read_only:
                return False
            return session.tree.can_undo if action == "undo" else session.tree.can_redo
        return super().check_action(action, parameters)

    def action_undo(self) -> None:
        """Takes back the last change of the tree, and says what that was."""
        if self.session is not None and (phrase := self.attempt(self.session.undo)):
            self.say(phrase)

    def action_redo(self) -> None:
        """Makes it again."""
        if self.session is not None and (phrase := self.attempt(self.session.redo)):
            self.say(phrase)

    def compare(self, nodes: Sequence[int]) -> None:
        """Shows branches beside each other."""
        if self.session is None:
            return
        from llamay.tui.compare import CompareScreen

        self.push_screen(CompareScreen(self.session, self.bridge, nodes), self._compared)

    def _compared(self, promoted: int | None) -> None:
        if promoted is not None:
            self.main.continue_at(promoted)

    def action_interrupt(self) -> None:
        """Stops what is written; if nothing is, quits."""
        if self.is_answering:
            self.stop()
            self.say("stopped; Ctrl+C again saves and quits")
        else:
            self.exit()

    async def action_quit(self) -> None:
        """Saves and quits; saving happens when the terminal is given back."""
        self.exit()

    def action_theme(self) -> None:
        """From dark to light and back, and so at the next start."""
        self.theme = LIGHT if self.theme == DARK else DARK
        save_theme(self.host.home, self.theme)

    def action_log(self) -> None:
        """Shows all notices of this run."""
        self.push_screen(Reading("Log", log_text(self.notices)))

    def action_help(self) -> None:
        """Shows all keys as they are now."""
        shown = [
            (name, [(self.key_names(key), key) for key in keys])
            for name, keys in ALL_GROUPS.items()
        ]
        self.push_screen(Reading("Keys", help_text(shown, str(self.keys_file))))

    def get_key_display(self, binding: Binding) -> str:
        """A key as footer and help show it, such as `Esc`, `^P` or `f`."""
        if binding.key_display:
            return binding.key_display
        *modifiers, key = binding.key.split("+")
        name = _KEY_NAMES.get(key) or format_key(key)
        if modifiers == ["ctrl"]:
            return f"^{name.upper()}"
        return "+".join([*(modifier.capitalize() for modifier in modifiers), name])

    def key_names(self, key: Key) -> str:
        """The keys of an action as they are shown, such as `^P` or `f`."""
        names = self.keymap.get(key.id, key.keys).split(",")
        return " ".join(
            self.get_key_display(binding)
            for name in names
            for binding in bindings([replace(key, keys=name)])
        )

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every action that applies now, with its keys, for the palette."""
        from llamay.tui.palette import commands

        return commands(self, screen)

    # sessions, models, settings

    def action_sessions(self) -> None:
        """Switches to another session, or a new one."""
        from llamay.tui.session_switcher import SessionSwitcher

        current = self.session.name if self.session else ""
        switcher = SessionSwitcher(self.host.home, current, self.host.key)
        self.push_screen(switcher, self._switch)

    def _switch(self, name: str | None) -> None:
        if name is not None and (self.session is None or name != self.session.name):
            self.open(name)

    def action_settings(self) -> None:
        """Sampling and system prompt from the current turn on."""
        self._settings(self.main.current)

    def action_system(self) -> None:
        """The system prompt of the session."""
        if self.session is not None:
            self._settings(self.session.tree.root.id, system=True)

    def _settings(self, node: int, *, system: bool = False) -> None:
        if self.session is not None:
            from llamay.tui.settings import SettingsScreen

            self.push_screen(SettingsScreen(self.session, node, system=system))

    def action_model(self) -> None:
        """Chooses a model for this session."""
        from llamay.tui.model_picker import ModelPicker

        self.push_screen(ModelPicker(self.host.model), self._use_model)

    def _use_model(self, model: str | None) -> None:
        if model is not None and model != self.host.model:
            self.open(self.session.name if self.session else None, model)

    def action_export(self) -> None:
        """Asks for a file and writes the branch that is shown as Markdown."""
        if self.session is not None:
            file = f"{self.session.name}.md"
            ask = AskLine("Export this branch as Markdown to", file, suggested=True)
            self.push_screen(ask, self._export)

    def _export(self, path: str | None) -> None:
        if path and self.session is not None:
            from llamay.session.export import to_markdown

            tree, node = self.session.tree, self.main.current
            text = to_markdown(tree, self.session.name, tree.path(node))
            try:
                Path(path).expanduser().write_text(text, "utf-8")
            except OSError as error:
                self.say(f"{path}: {error.strerror or error}", "error")
            else:
                self.say(f"wrote {path}")

    def action_duplicate(self) -> None:
        """Begins a new session from the current turn."""
        if self.session is not None:
            name = self.attempt(self.session.duplicate, self.main.current)
            if name:
                self.say(f"the new session is {name}; s switches to it")
