"""The app around the screens: opening, errors, help, palette, log, export, themes, leaving."""

import asyncio
from pathlib import Path

import pytest
from textual.command import CommandPalette

from llamay.errors import HubError
from llamay.events import Notice
from llamay.tui.app import LlamayApp
from llamay.tui.confirm import Confirm
from llamay.tui.help import Reading
from llamay.tui.keys import APP, MAIN
from llamay.tui.session_switcher import SessionSwitcher
from llamay.tui.settings import SettingsScreen
from llamay.tui.themes import saved_theme

from .fake_host import FakeHost
from .fake_session import FakeSession
from .main_app import NARROW, Driver, branched, drive


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HubError("no model 'x' here; `llamay pull x` fetches it"), "no model 'x' here"),
        (TypeError("a bug"), "unexpected TypeError: a bug"),
    ],
)
def test_what_cannot_be_opened_is_said_and_the_screen_stays_usable(
    tmp_path: Path, error: Exception, said: str
):
    host = FakeHost(tmp_path)
    host.fails = error

    async def scenario(d: Driver) -> None:
        await d.until(lambda: bool(d.notices()))
        assert said in d.screen_text()
        await d.press("h", "i")
        assert d.regions.editor.text == "hi"
        await d.press("f1")
        assert isinstance(d.app.screen, Reading)

    drive(scenario, host=host)


def test_the_model_is_opened_when_the_first_screen_was_drawn(tmp_path: Path, monkeypatch):
    drawn: list[str] = []
    display = LlamayApp._display

    def noting(app: LlamayApp, screen, renderable) -> None:
        display(app, screen, renderable)
        drawn.append("\n".join(strip.text for strip in screen._compositor.render_strips()))

    class Host(FakeHost):
        def open(self, *arguments):
            assert "You can write already" in drawn[0]
            assert "^P Palette" in drawn[0]
            return super().open(*arguments)

    monkeypatch.setattr(LlamayApp, "_display", noting)

    async def scenario(d: Driver) -> None:
        assert d.notices() == []

    drive(scenario, host=Host(tmp_path))


def test_the_theme_that_was_chosen_is_there_at_the_next_start(tmp_path: Path):
    assert saved_theme(tmp_path / "home") is None

    async def scenario(d: Driver) -> None:
        await d.press("escape", "T")
        assert d.app.theme == "llamay-light"

    drive(scenario, host=FakeHost(tmp_path / "home"))
    assert saved_theme(tmp_path / "home") == "llamay-light"
    (tmp_path / "home" / "theme.txt").write_bytes(b"\xff mauve")
    assert saved_theme(tmp_path / "home") is None


@pytest.mark.parametrize(("theme", "dark"), [("llamay-light", False), ("llamay-dark", True)])
def test_an_app_begins_in_its_theme(theme: str, dark: bool):
    async def run() -> None:
        app = LlamayApp(FakeHost(Path("/nowhere")), theme=theme)
        async with app.run_test() as pilot:
            await pilot.pause()
            wanted = app.get_theme(theme)
            assert wanted is not None
            assert app.main.styles.background.hex.lower() == wanted.background
            assert (app.has_class("-dark-mode"), app.has_class("-light-mode")) == (dark, not dark)
            app.exit()

    asyncio.run(run())


def test_help_lists_every_key_and_the_users_own(tmp_path: Path):
    (tmp_path / "keys.toml").write_text('[keys]\nfork = "F"\nnonsense = "x"\n')
    host = FakeHost(tmp_path, branched())

    async def scenario(d: Driver) -> None:
        assert any("no action 'nonsense'" in notice for notice in d.notices())
        await d.press("escape", "question_mark")
        screen = d.app.screen
        assert isinstance(screen, Reading)
        shown = screen.text.plain
        assert all(key.help in shown for key in (*APP, *MAIN))
        assert "F                Fork: the next message" in shown
        assert str(tmp_path / "keys.toml") in shown
        await d.press("escape", "F")
        assert host.session.place == 6
        assert "new branch" in d.notices()[-1]

    drive(scenario, host=host)


def test_every_command_is_in_the_palette_and_runs():
    session = branched()

    async def scenario(d: Driver) -> None:
        commands = {command.title for command in d.app.get_system_commands(d.main)}
        missing = {key.help for key in MAIN} - commands
        assert missing == {
            "Continue a stopped answer from its exact token",
            "Edit this message as a sibling of it",
            "From the editor to the turns",
            "Redo what was undone",
        }  # none of these applies to the current turn
        titles = [command.title for command in d.app.get_system_commands(d.main)]
        assert titles.index("Fork: the next message starts a new branch here") < 3
        assert titles.index("A page down") > titles.index("All keys")
        await d.press("ctrl+p")
        await d.until(lambda: isinstance(d.app.screen, CommandPalette))
        for key in "light or dark":
            await d.pilot.press("space" if key == " " else key)
        await d.until(lambda: d.screen_text().count("Light or dark") == 1)
        await d.pilot.pause(0.3)
        await d.press("enter")
        await d.until(lambda: d.app.theme == "llamay-light")

    drive(scenario, session)


def test_notices_stay_in_the_log():
    async def scenario(d: Driver) -> None:
        d.session.notice("one [b]thing[/b]", "warning")
        await d.until(lambda: bool(d.notices()))
        await d.press("escape", "ctrl+l")
        screen = d.app.screen
        assert isinstance(screen, Reading)
        assert "! one [b]thing[/b]" in screen.text.plain

    drive(scenario, branched())


def test_export_as_markdown(tmp_path: Path):
    session = branched()
    target = tmp_path / "out.md"

    async def scenario(d: Driver) -> None:
        await d.press("escape", "x")
        d.app.screen.dismiss(str(target))
        await d.until(target.exists)
        text = target.read_text()
        assert "Which index would you use?" in text
        assert "At that size, measure." in text
        assert "partial" not in text  # another branch
        await d.press("x")
        d.app.screen.dismiss("/no/such/folder/x.md")
        await d.until(lambda: "No such file" in d.notices()[-1])

    drive(scenario, session)


def test_switching_sessions_saves_the_one_that_was_open(tmp_path: Path):
    first = branched()
    host = FakeHost(tmp_path, first)

    async def scenario(d: Driver) -> None:
        await d.press("escape", "s")
        assert isinstance(d.app.screen, SessionSwitcher)
        d.app.screen.dismiss("other")
        await d.until(lambda: d.regions.editor.has_focus)
        await d.until(lambda: d.app.session is not None and d.app.session.name == "other")
        assert first.closed
        assert host.opened == [(None, None), ("other", None)]
        assert "other" in d.screen_text().splitlines()[0]
        for listener in first.listeners:  # it is closed, but somebody may still hold it
            listener(Notice("late news of the old session", "info"))
        host.session.notice("news of the new one")
        await d.until(lambda: "news of the new one" in d.notices())
        assert not any("late news" in notice for notice in d.notices())

    drive(scenario, host=host)


def test_duplicate_and_settings():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press("escape", "D")
        assert ("duplicate", 6, None) in session.calls
        assert "migration-review-2" in d.notices()[-1]
        await d.press("comma")
        assert isinstance(d.app.screen, SettingsScreen)

    drive(scenario, session)


def test_a_read_only_session_offers_this_model_and_changes_nothing_before():
    session = branched()
    session.read_only = "migration-review is read-only: it was made with another model"
    session.continue_with_model = lambda: setattr(session, "read_only", None)

    async def scenario(d: Driver) -> None:
        await d.until(lambda: isinstance(d.app.screen, Confirm))
        assert not d.main.check_action("fork", ())
        await d.press("y")
        assert session.read_only is None
        assert d.main.check_action("fork", ())

    drive(scenario, session)


@pytest.mark.parametrize("key", ["ctrl+q", "ctrl+c"])
def test_leaving_saves(key):
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press(key)

    app: LlamayApp = drive(scenario, session)
    assert session.closed
    assert app.goodbye is not None
    assert app.goodbye.command == "llamay --session migration-review"


def test_ctrl_c_stops_an_answer_before_it_leaves():
    session = FakeSession(delay_s=0.2)

    async def scenario(d: Driver) -> None:
        await d.write("Go")
        await d.until(lambda: session.tree.node(2).state == "writing")
        await d.press("ctrl+c")
        await d.quiet()
        assert session.tree.node(2).state == "stopped"
        assert d.app.is_running

    drive(scenario, session)


def test_search_and_filters():
    session = branched()
    session.label(3, "shorter")

    async def scenario(d: Driver) -> None:
        tree = d.regions.tree_view
        await d.press("escape", "slash", *"partial")
        await d.until(lambda: tree.cursor == 3)
        await d.until(lambda: d.regions.transcript.path[-1] == 3)
        assert "1 match" in d.screen_text()
        await d.press("escape")
        await d.until(lambda: tree.cursor == 6)
        await d.press("slash", *"index", "down", "enter")
        assert tree.has_focus
        assert tree.cursor in session.tree.search("index")
        await d.press("v", "v")
        assert "labelled only" in d.screen_text()
        assert "[shorter]" in d.screen_text()
        assert "None; nobody" not in d.screen_text().split("┃")[0]

    drive(scenario, session)


def test_folding_by_keys_and_l_labels_what_is_not_folded():
    session = branched()

    async def scenario(d: Driver) -> None:
        tree = d.regions.tree_view
        d.regions.go(tree)
        await d.press("g", "j", "h")
        assert "(5)" in d.screen_text()
        await d.press("l")
        assert "(5)" not in d.screen_text()
        await d.press("l")
        assert type(d.app.screen).__name__ == "AskLine"

    drive(scenario, session, size=NARROW)
