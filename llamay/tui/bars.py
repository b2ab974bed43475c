"""The lines around the regions: what is open, how reading goes, notices, figures and keys."""

from dataclasses import dataclass
from string import punctuation

from rich.cells import cell_len
from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.keys import format_key
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input, Static, TextArea

from llamay.tui.bridge import Running
from llamay.tui.text import MUTED, clean, count, duration, one_line

_MAX_BAR = 40
_KEY_GAP = "  "


class Header(Widget):
    """What is open on the left, what happened on opening it on the right."""

    DEFAULT_CSS = "Header { height: 1; padding: 0 1; background: $panel; }"

    def __init__(self, *, id: str | None = None) -> None:
        """Shows the name of the program."""
        super().__init__(id=id)
        self._left: list[str] = ["llamay"]
        self._right: list[str] = []

    def show(self, left: list[str], right: list[str]) -> None:
        """Parts, of which the last on the right, then the last on the left, give way to others."""
        self._left = [one_line(part) for part in left if part]
        self._right = [one_line(part) for part in right]
        self.refresh()

    def render(self) -> Content:
        width = self.size.width
        parts, right_parts = list(self._left), list(self._right)

        def fits() -> bool:
            needed = cell_len(" · ".join(parts)) + cell_len(", ".join(right_parts))
            return needed + 2 <= width

        while not fits() and len(right_parts) > 1:
            right_parts.pop()
        while not fits() and len(parts) > 2:
            parts.pop()
        left = " · ".join(parts)
        right = ", ".join(right_parts) if fits() else ""
        room = width - cell_len(left)
        return Content.assemble((left, "bold"), " " * (room - cell_len(right)), (right, MUTED))


class PrefillBar(Widget):
    """How far the prompt is read: from cache, computed, and still to come."""

    DEFAULT_CSS = "PrefillBar { height: 1; padding: 0 1; display: none; }"

    def __init__(self, *, id: str | None = None) -> None:
        """Hidden until there is something to read."""
        super().__init__(id=id)
        self._reading: Running | None = None

    def show(self, running: Running | None) -> None:
        """Shows an answer's reading; None hides the bar."""
        self._reading = running
        if self.display != (running is not None):
            self.display = running is not None
        if self.display:
            self.refresh()

    @property
    def sentence(self) -> str:
        """The figures beside the bar."""
        running = self._reading
        if running is None:
            return ""
        computed, all_of_it = running.done - running.cached, running.total - running.cached
        parts = [f"{count(running.cached)} from cache"] if running.cached else []
        parts.append(f"{count(max(computed, 0))} of {count(all_of_it)} computed")
        if running.seconds_left is not None:
            parts.append(f"about {duration(running.seconds_left)} left")
        return " · ".join(parts)

    def render(self) -> Content:
        running, sentence = self._reading, self.sentence
        if running is None:
            return Content()
        width = max(min(_MAX_BAR, self.size.width - cell_len(sentence) - 12), 4)
        total = max(running.total, 1)
        cached = round(width * running.cached / total)
        done = max(round(width * running.done / total), cached)
        bar = Content.assemble(
            ("█" * cached, "$primary"),
            ("▓" * (done - cached), "$accent"),
            ("░" * (width - done), "$foreground 40%"),
        )
        return Content.assemble(("reading  ", "bold"), bar, "  ", sentence)


class NoticeBar(Static):
    """The last notice, in place; it stays in the log."""

    DEFAULT_CSS = """
    NoticeBar { height: auto; max-height: 4; padding: 0 1; display: none; }
    NoticeBar.-warning { color: $text-warning; }
    NoticeBar.-error { color: $text-error; text-style: bold; }
    """

    def show(self, message: str, level: str = "info") -> None:
        """Shows a sentence; an empty one hides the line."""
        if not message and not self.display:
            return
        sign = {"info": "", "warning": "! ", "error": "✗ "}[level]
        self.update(Content(sign + clean(message)))
        self.set_class(level == "warning", "-warning")
        self.set_class(level == "error", "-error")
        self.display = bool(message)


@dataclass(frozen=True, slots=True)
class _Shown:
    """A key in the status bar and the cells [start, end) it stands in."""

    key: str
    start: int
    end: int


class StatusBar(Widget):
    """Figures on the left, the keys that apply now on the right; a click is the key."""

    DEFAULT_CSS = "StatusBar { height: 1; padding: 0 1; background: $panel; }"

    def __init__(self, *, id: str | None = None) -> None:
        """Shows keys only, until `show`."""
        super().__init__(id=id)
        self._figures = ""
        self._shown: list[_Shown] = []
        self._keys: list[tuple[Binding, str, str]] | None = None  # until bindings change

    def on_mount(self) -> None:
        """Follows the screen's bindings."""
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_changed)

    def _bindings_changed(self, screen: Screen[object]) -> None:
        self._keys = None
        self.refresh()

    def show(self, figures: str) -> None:
        """Shows figures on the left."""
        if figures != self._figures:
            self._figures = figures
            self.refresh()

    def render(self) -> Content:
        width = self.size.width
        figures = one_line(self._figures)
        self._keys = self._keys or self._applying()
        # What opens everything else stays, whatever else there is room for.
        stays = ("next_region", "help") if self.screen.has_class("-narrow") else ("palette", "help")
        last = [key for key in self._keys if key[0].id in stays]
        keys = [key for key in self._keys if key[0].id not in stays]
        position = cell_len(figures) + 3 if figures else 0
        parts: list[Content | str | tuple[str, str]] = [(figures, "bold"), "   "] if figures else []
        self._shown = []
        room = width - sum(cell_len(name + word) + 3 for _, name, word in last)
        while room < position and len(last) > 1:  # help is the last to go
            room += cell_len(f"{last[0][1]} {last[0][2]}") + len(_KEY_GAP)
            last.pop(0)
        for binding, name, word in [*keys, *last]:
            size = cell_len(f"{name} {word}")
            if position + size > (room if (binding, name, word) not in last else width):
                continue
            self._shown.append(_Shown(binding.key, position, position + size))
            parts += [(name, "bold $text-accent"), f" {word}", _KEY_GAP]
            position += size + len(_KEY_GAP)
        return Content.assemble(*parts)

    def _applying(self) -> list[tuple[Binding, str, str]]:
        """Bindings with the key and the word for each, those of the focus first."""
        found: dict[str, tuple[Binding, str, str]] = {}
        typing = isinstance(self.screen.focused, TextArea | Input)
        for active in self.screen.active_bindings.values():
            binding = active.binding
            typed = typing and format_key(binding.key) in punctuation
            if binding.show and active.enabled and not typed and binding.action not in found:
                name = self.app.get_key_display(binding)
                found[binding.action] = (binding, name, binding.description)
        return sorted(found.values(), key=lambda item: item[0].id == "help")

    def on_click(self, event: events.Click) -> None:
        """Presses the key that was clicked."""
        x = event.x - self.styles.padding.left
        for shown in self._shown:
            if shown.start <= x < shown.end:
                self.app.simulate_key(shown.key)
