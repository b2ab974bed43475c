"""The command palette: every action that applies now, what it does and its keys."""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from textual.app import SystemCommand
from textual.command import DiscoveryHit, Hits
from textual.dom import DOMNode
from textual.screen import Screen
from textual.system_commands import SystemCommandsProvider

from llamay.tui.help import ALL_GROUPS

if TYPE_CHECKING:
    from llamay.tui.app import LlamayApp


class Commands(SystemCommandsProvider):
    """Textual's search in the app's commands; before one searches, they stand by importance."""

    async def discover(self) -> Hits:
        for name, help, run, _ in self.app.get_system_commands(self.screen):
            yield DiscoveryHit(name, run, help=help)


def commands(app: "LlamayApp", screen: Screen[Any]) -> Iterator[SystemCommand]:
    """The actions of a screen and the app's, in the order of their tables."""
    places: list[tuple[DOMNode, str]] = []
    if screen is app.main:
        regions = app.main.regions
        places += [(app.main, "Outside the editor"), (app, "Everywhere")]
        places += [(regions.tree_view, "Tree"), (regions.transcript, "Transcript")]
        places += [(regions.editor, "Editor")]
    else:
        places += [(screen, name) for name in ALL_GROUPS if name in type(screen).__name__]
        places += [(app, "Everywhere")]
    for place, group in places:
        for key in ALL_GROUPS[group]:
            if key.id not in ("palette", "leave_editor") and _applies(app, place, key.action):
                run = functools.partial(app.run_action, key.action, place)
                help = f"{app.key_names(key)}   {key.id}"
                yield SystemCommand(key.help, help, run)


def _applies(app: "LlamayApp", place: DOMNode, action: str) -> bool:
    target, _, name = action.partition("(")[0].rpartition(".")
    node = {"app": app, "screen": app.main}.get(target, place)
    return bool(node.check_action(name, ()))
