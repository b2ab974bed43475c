"""A small app around one screen: what screens are tested in without the main one."""

from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen

from llamay.tui.bridge import Bridge

from .fake_session import FakeSession

WIDE, NARROW = (120, 40), (80, 24)


class Host(App[None]):
    """Pushes the screen that `make` gives and keeps what it ends with in `result`."""

    def __init__(self, session: FakeSession, make: Callable[["Host"], Screen[Any]]) -> None:
        super().__init__()
        self.animation_level = "none"
        self.session = session
        self.result: list[Any] = []
        self.said: list[str] = []
        self._make = make

    def on_mount(self) -> None:
        self.bridge = Bridge()
        self.bridge.attach(self.session)  # type: ignore[arg-type]
        self.push_screen(self._make(self), self.result.append)

    def notify(self, message: str, **options: Any) -> None:
        self.said.append(message)
        super().notify(message, **options)

    def copy_to_clipboard(self, text: str) -> None:
        self.copied = text
        super().copy_to_clipboard(text)


async def until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    """Lets the app run until something holds; fails if it does not for long."""
    for _ in range(500):  # not by the clock: a busy machine may stand still
        if condition():
            return
        await pilot.pause(0.02)
    raise AssertionError("it did not happen in time")
