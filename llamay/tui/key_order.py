"""Keys act in the order in which they came, each where the one before it left the focus.

Textual sends a key through the queues of all widgets above the focus before it acts, and a new
screen takes its focus a little after it is there. What is typed meanwhile, by quick hands or on a
busy machine, would go to the old focus or to none.
"""

import time
from typing import Any

from textual import events
from textual.app import App
from textual.screen import Screen
from textual.widgets import Input, TextArea

_LOOK_AGAIN_S = 0.01
_MOST_S = 1.0  # a screen without a focus by then has none


async def act(app: App[Any], key: str) -> bool:
    """Does what a key is bound to where the focus is, at once; False if nothing came of it."""
    active = app.screen.active_bindings.get(key)
    if active is None or not active.enabled:
        return False
    return await app.run_action(active.binding.action, active.node)


class KeyOrder:
    """Deals with an app's keys before Textual does."""

    def __init__(self, app: App[Any]) -> None:
        """Holds no key yet."""
        self._app = app
        self._held: list[events.Key] = []
        self._since = 0.0
        self._without: Screen[Any] | None = None  # the screen whose focus never came

    async def take(self, event: events.Key) -> bool:
        """Deals with a key; False if it is text, or Textual's to deal with."""
        app = self._app
        if event.is_forwarded or not app.screen_stack:
            return False
        if not app.app_focus:  # a key gives it back
            return False
        if self._held or self._focus_comes():
            self._hold(event)
            return True
        return not isinstance(app.focused, TextArea | Input) and await act(app, event.key)

    def _focus_comes(self) -> bool:
        screen = self._app.screen
        if screen.focused is not None or screen is self._without:
            return False
        return not screen.is_mounted or bool(screen.focus_chain)

    def _hold(self, event: events.Key) -> None:
        if not self._held:
            self._since = time.monotonic()
            self._app.set_timer(_LOOK_AGAIN_S, self._release)
        self._held.append(event)

    async def _release(self) -> None:
        """Gives the keys that were held to the app, unless the focus is still to come."""
        if not self._app.screen_stack:
            return
        if self._focus_comes():
            if time.monotonic() < self._since + _MOST_S:
                self._app.set_timer(_LOOK_AGAIN_S, self._release)
                return
            self._without = self._app.screen
        held, self._held = self._held, []
        for key in held:
            await self._app.on_event(key)
