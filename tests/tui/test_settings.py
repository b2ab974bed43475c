"""The settings of a branch: what is shown, what is refused, what is set."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static, TextArea

from llamay.session.records import NO_SETTINGS, Settings
from llamay.tui.settings import SettingsScreen

from .fake_session import FakeSession
from .host import NARROW, Host, until

Scenario = Callable[[Pilot[None], SettingsScreen], Awaitable[None]]


def answered(settings: Settings = NO_SETTINGS) -> FakeSession:
    """A session with a message (1) and its answer (2), `settings` set at the root."""
    session = FakeSession()
    session.set_settings(0, settings)
    session.send("Is it so?")
    return session


def set_up(
    session: FakeSession, scenario: Scenario, node: int = 2, size: tuple[int, int] = NARROW
) -> Host:
    async def run() -> Host:
        host = Host(session, lambda host: SettingsScreen(session, node))
        async with host.run_test(size=size) as pilot:
            await pilot.pause()
            await scenario(pilot, host.screen)
            await pilot.pause()
        return host

    return asyncio.run(run())


def origins(screen: SettingsScreen) -> dict[str, str]:
    rows = screen.query(".field")
    return {
        str(row.query_one(".name", Static).content): str(row.query_one(".origin", Static).content)
        for row in rows
    }


def wrong(screen: SettingsScreen) -> str:
    return str(screen.query_one("#wrong", Static).content)


def test_it_says_what_holds_and_where_that_is_set():
    session = answered(Settings(temperature=0.2, stop=("\n\n", "END")))
    session.set_settings(1, Settings(top_k=5))

    async def scenario(pilot, screen):
        assert origins(screen) == {
            "temperature": "0.2 · set at the beginning",
            "top-k": "5 · set at “Is it so?”",
            "top-p": "0.95 · llamay's own",
            "min-p": "0.05 · llamay's own",
            "repeat-penalty": "1 · llamay's own",
            "presence-penalty": "0 · llamay's own",
            "frequency-penalty": "0 · llamay's own",
            "seed": "0 · llamay's own",
            "max-tokens": "none · llamay's own",
            "stop": "\\n\\n|END · set at the beginning",
        }

    set_up(session, scenario)


def test_what_is_written_is_set_at_the_turn_and_the_rest_stays_inherited():
    session = answered(Settings(temperature=0.2))

    async def scenario(pilot, screen):
        await pilot.press(*"1.5", "down", *"10")
        screen.query_one("#stop", Input).value = "\\n|X"
        screen.query_one("#seed", Input).value = "18446744073709551615"
        await pilot.press("enter")

    assert set_up(session, scenario).result == [None]
    own = session.tree.node(2).settings
    assert own == Settings(temperature=1.5, top_k=10, stop=("\n", "X"), seed=2**64 - 1)


WRONG = [
    ("temperature", "hot", "temperature: expected a number such as 0.8, found hot"),
    ("temperature", "101", "temperature: expected 0 to 100, found 101.0"),
    ("top_p", "0", "top-p: expected more than 0, up to 1, found 0.0"),
    ("seed", "-1", "seed: expected 0 to 2^64 - 1, found -1"),
    ("top_k", "1.5", "top-k: expected a whole number such as 40, found 1.5"),
    ("max_tokens", "0", "max-tokens: expected 1 or more, found 0"),
    ("stop", "a||b", "stop: expected texts that are not empty"),
]


def test_a_wrong_value_is_said_at_once_and_not_set():
    session = answered()

    async def scenario(pilot, screen):
        for name, value, sentence in WRONG:
            field = screen.query_one(f"#{name}", Input)
            field.value = value
            await until(pilot, lambda said=sentence: wrong(screen).startswith(said))
            assert field.has_class("-invalid")
            await pilot.press("ctrl+s")
            field.value = ""
            await until(pilot, lambda: wrong(screen) == "")
            assert not field.has_class("-invalid")

    assert set_up(session, scenario).result == []
    assert session.tree.node(2).settings == Settings()


def test_the_system_prompt_has_lines_and_an_empty_one_is_none():
    session = answered(Settings(system="Be brief."))

    async def scenario(pilot, screen):
        prompt = screen.query_one("#system", TextArea)
        assert prompt.text == "Be brief."
        prompt.focus()
        prompt.move_cursor(prompt.document.end)
        await pilot.press("enter", *"And kind.", "ctrl+s")

    set_up(session, scenario)
    assert session.tree.node(2).settings.system == "Be brief.\nAnd kind."

    async def emptied(pilot, screen):
        screen.query_one("#system", TextArea).text = ""
        await pilot.press("ctrl+s")

    set_up(session, emptied)
    assert session.tree.node(2).settings.system == ""
    assert session.tree.effective(2).system == ""


def test_an_inherited_system_prompt_is_not_set_again():
    session = answered(Settings(system="Be brief."))

    async def scenario(pilot, screen):
        line = str(screen.query_one("#system-line", Static).content)
        assert line.startswith("System prompt · set at the beginning; another one rereads ")
        await pilot.press(*"1", "ctrl+s")

    set_up(session, scenario)
    assert session.tree.node(2).settings == Settings(temperature=1.0)


def test_leaving_asks_only_if_something_would_be_lost():
    session = answered()

    async def unchanged(pilot, screen):
        await pilot.press("escape")

    assert set_up(session, unchanged).result == [None]

    async def changed(pilot, screen):
        await pilot.press("1", "escape")
        await until(pilot, lambda: pilot.app.screen is not screen)
        await pilot.press("n")
        await until(pilot, lambda: pilot.app.screen is screen)
        assert screen.query_one("#temperature", Input).value == "1"
        await pilot.press("escape", "y")

    assert set_up(session, changed).result == [None]
    assert session.tree.node(2).settings == Settings()


def test_a_read_only_session_shows_its_settings_and_saves_none():
    session = answered(Settings(temperature=0.2))
    session.read_only = "its model is not here"

    async def scenario(pilot, screen):
        assert wrong(screen) == "its model is not here"
        assert screen.query_one("#temperature", Input).disabled
        await pilot.press("ctrl+s")
        assert pilot.app.result == []
        await pilot.press("escape")

    assert set_up(session, scenario).result == [None]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_every_field_can_be_reached(size):
    async def scenario(pilot, screen):
        await pilot.press(*["down"] * 9)
        assert screen.focused is screen.query_one("#stop", Input)
        assert screen.region.contains_region(screen.focused.region)

    set_up(answered(), scenario, size=size)
