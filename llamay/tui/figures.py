"""What the main screen says of its session in the lines around the turns, all of it counted."""

from typing import TYPE_CHECKING

from llamay.events import Resumed
from llamay.tui import describe, describe_session
from llamay.tui.bars import Header, StatusBar
from llamay.tui.text import count, duration

if TYPE_CHECKING:
    from llamay.session import Session
    from llamay.tui.bridge import Bridge
    from llamay.tui.regions import Regions


class Figures:
    """Keeps header, status, the tree's summary, the prefill bar and titles as the session is."""

    def __init__(self, regions: "Regions") -> None:
        """Says nothing before `show_loading` or `bind`."""
        self.header = Header()
        self.status = StatusBar()
        self._regions = regions
        self._session: Session | None = None
        self._bridge: Bridge | None = None
        self._model: list[str] = []
        self._opened: list[str] = []

    def bind(self, session: "Session", bridge: "Bridge", model: list[str]) -> None:
        """Tells of `session` from now on; model: its name, kernels and precision."""
        self._session, self._bridge, self._model, self._opened = session, bridge, model, []

    def release(self) -> None:
        """Asks the session for nothing from now on."""
        self._session = None

    def show_loading(self, sentence: str) -> None:
        """Says how far opening is."""
        self.header.show(["llamay", sentence], [])

    def show_resumed(self, event: Resumed) -> str:
        """Says what was restored and what that saved; returns it, for the log."""
        self._opened = [f"resumed {count(event.tokens)} tok in {duration(event.seconds)}"]
        if event.prefill_seconds is not None:
            self._opened.append(f"prefill would take about {duration(event.prefill_seconds)}")
        self.show_header()
        return ", ".join(self._opened)

    def show_header(self) -> None:
        """The session's name, which the first message gives it, and the model."""
        if self._session is not None:
            self.header.show(["llamay", self._session.name, *self._model], self._opened)

    def refresh(self) -> None:
        """The session's figures, which change without an event."""
        if self._session is not None:
            self._regions.show_summary(describe_session.summary(self._session))
            self._regions.tree_view.refresh_figures()
            self.show_status()

    def show_status(self) -> None:
        """What the shown branch holds and how fast it grows; the prefill bar."""
        session, regions = self._session, self._regions
        if session is None or self._bridge is None:
            return
        path = regions.transcript.path
        last = path[-1] if path else None
        running = self._bridge.running.get(last) if last is not None else None
        regions.prefill.show(running if running and running.is_reading else None)
        where = [regions.shown] if regions.screen.has_class("-narrow") else []
        self.status.show(" · ".join(where + describe_session.status(session, last, running)))

    def show_titles(self, node: int, editing: int | None) -> None:
        """Which branch is shown, and where the next message goes."""
        if self._session is not None:
            self._regions.title_talk(describe.branch_title(self._session.tree, node))
            self.show_editor_title(editing)

    def show_editor_title(self, editing: int | None) -> None:
        """Where the next message goes; editing: the message that it stands beside."""
        if self._session is not None:
            self._regions.title_editor(describe_session.editor_title(self._session, editing))
