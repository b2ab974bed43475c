"""Keys that come faster than they are handled: each acts where the one before it left the focus."""

import asyncio
from pathlib import Path

from textual.events import Key

from llamay.tui.app import LlamayApp

from .fake_host import FakeHost
from .main_app import Driver, branched, drive


def type_at_once(d: Driver, *keys: str) -> None:
    """Puts keys into the app's queue, as a terminal does with what was typed while it was busy."""
    for key in keys:
        d.app.post_message(Key(key, key if len(key) == 1 else None))


def test_text_after_enter_in_the_tree_reaches_the_editor():
    session = branched()

    async def scenario(d: Driver) -> None:
        d.regions.go(d.regions.tree_view)
        type_at_once(d, "j", "enter", *"jfdrule", "enter", *"next")
        await d.until(lambda: d.regions.editor.text == "next")
        await d.quiet()
        assert session.calls[-1] == ("send", "jfdrule", None, 1)
        assert session.tree.node(7).parent == 3
        assert not any(call[0] in ("regenerate", "delete", "undo") for call in session.calls)

    drive(scenario, session)


def test_text_after_enter_on_a_message_edits_it():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press("escape")
        type_at_once(d, "k", "enter", *"!u")
        await d.until(lambda: d.regions.editor.text == "And for 10M rows?!u")
        assert d.main.editing == 5

    drive(scenario, session)


def test_letters_after_escape_act_and_those_after_them_are_text_again():
    session = branched()

    async def scenario(d: Driver) -> None:
        type_at_once(d, *"draft", "escape", "k", "k", "f", *"tail")
        await d.until(lambda: d.regions.editor.text.endswith("tail"))
        assert d.regions.editor.text == "drafttail"
        assert session.place == 2

    drive(scenario, session)


def test_the_cursor_moves_before_what_is_typed_after_it():
    async def scenario(d: Driver) -> None:
        type_at_once(d, "a", "c", "left", "b", "end", "ctrl+j", "d")
        await d.until(lambda: d.regions.editor.text == "abc\nd")

    drive(scenario)


def test_text_for_a_dialog_that_is_on_its_way_reaches_it():
    session = branched()

    async def scenario(d: Driver) -> None:
        type_at_once(d, "escape", "l", *"best", "enter")
        await d.until(lambda: session.tree.node(6).label == "best")
        assert d.regions.editor.text == ""

    drive(scenario, session)


def test_a_branch_is_promoted_by_keys_that_come_together():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press("escape")
        type_at_once(d, "k", "k", "c", "3", "p")
        await d.until(lambda: session.place == 4)

    drive(scenario, session)


class Hurried(LlamayApp):
    """Its user types before there is a screen."""

    def on_load(self) -> None:
        for key in "hi":
            self.post_message(Key(key, key))


def test_what_is_typed_before_the_first_screen_is_for_the_editor(tmp_path: Path):
    async def run() -> None:
        app = Hurried(FakeHost(tmp_path))
        async with app.run_test() as pilot:
            await pilot.pause(0.1)
            assert app.main.regions.editor.text == "hi"

    asyncio.run(run())
