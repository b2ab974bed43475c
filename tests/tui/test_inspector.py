"""The state inspector, its page map and its view of tokens."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest
from textual.app import ComposeResult
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Static

from llamay.tui.inspector import Inspector
from llamay.tui.page_map import PageMap
from llamay.tui.token_view import TokenView

from .fake_session import FakeSession, PageCell
from .host import Host, until


class InspectorScreen(Screen[None]):
    """An inspector as wide as in the main screen."""

    CSS = "Inspector { width: 26; height: 24; }"

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host

    def compose(self) -> ComposeResult:
        yield Inspector()

    def on_mount(self) -> None:
        self.query_one(Inspector).bind(self.host.session, self.host.bridge)

    def said(self, id: str) -> str:
        return self.query_one(f"#{id}", Static).content.plain


def inspect(
    session: FakeSession, scenario: Callable[[Pilot[None], InspectorScreen], Awaitable[None]]
) -> None:
    async def run() -> None:
        host = Host(session, InspectorScreen)
        async with host.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            await scenario(pilot, host.screen)

    asyncio.run(run())


def answered(answer: str = "So it is.") -> FakeSession:
    session = FakeSession()
    session.script = lambda node: answer
    session.send("Is it so?")
    return session


def cell(page: int, holders: tuple[int, ...], where: str = "memory") -> PageCell:
    return PageCell(page * 64, page * 64 + 64, holders, len(holders) == 1, where)


PAGES = (cell(0, (2, 3, 4, 5)), cell(1, (2, 3, 4)), cell(2, (2, 3)), cell(3, (2,)))


def rows(screen: InspectorScreen) -> list[str]:
    return screen.query_one(PageMap).render().plain.split("\n")


def test_a_page_is_a_cell_shaded_by_how_many_branches_hold_it():
    session = answered()
    session.page_map = lambda id: PAGES

    async def scenario(pilot, screen):
        assert rows(screen)[0].startswith("█▓▒░ ")
        assert screen.said("legend").split("\n") == [
            "░ own · 1",
            "▒ 2 share · 1",
            "▓ 3 share · 1",
            "█ 4 or more share · 1",
        ]

    inspect(session, scenario)


def test_pages_that_are_not_in_memory_have_marks():
    session = answered()
    session.page_map = lambda id: (
        cell(0, (2,), "disk"),
        cell(1, (2,), "none"),
        cell(2, (2,), "spilled"),
    )

    async def scenario(pilot, screen):
        assert rows(screen)[0].startswith("□·◇ ")
        assert "spilled   1" in screen.said("engine")

    inspect(session, scenario)


def test_the_page_being_written_is_marked():
    session = FakeSession()
    session.page_map = lambda id: PAGES
    session.gate.clear()
    session.send("Go on.")

    async def scenario(pilot, screen):
        await until(pilot, lambda: rows(screen)[0].startswith("█▓▒+"))
        session.gate.set()
        await until(pilot, lambda: rows(screen)[0].startswith("█▓▒░"))

    inspect(session, scenario)


def test_rows_are_sixteen_pages_and_say_where_they_begin():
    session = answered()
    session.page_map = lambda id: tuple(cell(page, (2,)) for page in range(35))

    async def scenario(pilot, screen):
        assert [row.split() for row in rows(screen)] == [
            ["░" * 16, "0"],
            ["░" * 16, "1,024"],
            ["░" * 3, "2,048"],
        ]

    inspect(session, scenario)


def test_the_chosen_page_names_its_tokens_and_branches():
    session = answered()
    session.page_map = lambda id: (cell(0, (2, 1)), cell(1, (2,)))
    session.label(2, "main [x]")

    async def scenario(pilot, screen):
        pages = screen.query_one(PageMap)
        pages.focus()
        await pilot.press("home")
        assert pages.pointed == cell(1, (2,))  # the first key only shows where one is
        await pilot.press("left")
        await until(
            pilot,
            lambda: screen.said("page") == "tokens 0 to 63, 2 share it: “main [x]”, “Is it so?”",
        )
        await pilot.press("right")
        await until(pilot, lambda: screen.said("page").startswith("tokens 64 to 127, own"))

    inspect(session, scenario)


def test_down_goes_from_the_last_row_of_pages_to_the_tokens_and_up_back():
    session = answered()
    session.page_map = lambda id: tuple(cell(page, (2,)) for page in range(20))

    async def scenario(pilot, screen):
        pages, tokens = screen.query_one(PageMap), screen.query_one(TokenView)
        pages.focus()
        await pilot.press("home", "home", "down")
        assert pages.pointed == cell(16, (2,))
        await pilot.press("down")
        assert tokens.has_focus
        await pilot.press("up")
        assert pages.has_focus

    inspect(session, scenario)


def test_the_page_under_the_mouse_is_named():
    session = answered()
    session.page_map = lambda id: PAGES

    async def scenario(pilot, screen):
        await pilot.hover(PageMap, offset=(2, 0))
        await until(pilot, lambda: screen.said("page").startswith("tokens 128 to 191, 2 share"))
        await pilot.hover(PageMap, offset=(9, 0))
        await until(pilot, lambda: "Arrows or the mouse" in screen.said("page"))

    inspect(session, scenario)


def test_figures_are_those_of_the_session():
    async def scenario(pilot, screen):
        await until(pilot, lambda: "1.1 / 8.0 GiB" in screen.said("engine"))
        assert "12 · 210 MiB" in screen.said("engine")
        assert "1 (0 shared)" in screen.said("branch")

    inspect(answered(), scenario)


def test_without_a_model_there_are_pages_and_no_figures():
    async def scenario(pilot, screen):
        assert screen.query_one(PageMap).pointed is None
        assert "no pages yet" in rows(screen)[0]
        assert screen.query_one(PageMap).size.height == 2  # 43 letters in 24 columns

    inspect(FakeSession(), scenario)


def test_the_chosen_token_has_its_probability():
    session = answered("So it is.")

    async def scenario(pilot, screen):
        tokens = screen.query_one(TokenView)
        await until(pilot, lambda: tokens.index == 2)
        # the fake's logarithm of every probability is -0.5
        assert tokens.figures() == f'token "is."  {100 * math.exp(-0.5):.1f} %'
        tokens.focus()
        await pilot.press("left", "left", "left")
        assert tokens.index == 0
        assert 'token "So "' in tokens.figures()
        await pilot.press("end")
        assert tokens.index == 2

    inspect(session, scenario)


def test_what_else_was_likely_is_shown_when_a_choice_stays_and_nothing_more_comes():
    session = FakeSession()
    session.script = lambda node: "So it is."
    session.gate.clear()
    session.send("Is it so?")

    async def scenario(pilot, screen):
        tokens = screen.query_one(TokenView)
        await until(pilot, lambda: tokens.index == 0)
        await pilot.pause(0.4)
        assert not [call for call in session.calls if call[0] == "alternatives"]
        session.gate.set()
        await until(pilot, lambda: tokens.others() == "scale 13.5 · rate 5.0")
        assert session.calls[-1] == ("alternatives", 2, 2)
        tokens.focus()
        await pilot.press("home")
        assert tokens.others() == ""
        await until(pilot, lambda: session.calls[-1] == ("alternatives", 2, 0))

    inspect(session, scenario)


@pytest.mark.parametrize(("logprob", "bar"), [(math.log(0.99), "█"), (math.log(0.01), "▁")])
def test_a_bar_is_as_high_as_the_probability(logprob, bar):
    session = answered()

    async def scenario(pilot, screen):
        tokens = screen.query_one(TokenView)
        tokens.show(["a", "b"], [logprob, math.log(0.5)])
        assert tokens.render().plain.split("\n")[0] == f"{bar}▅"

    inspect(session, scenario)


def test_token_text_is_data_and_keeps_to_its_line():
    session = answered()

    async def scenario(pilot, screen):
        tokens = screen.query_one(TokenView)
        tokens.show(["[b]", "\n\x1b[", "你好"], [-1.0] * 3)
        assert tokens.render().plain.split("\n")[1] == "[b]\\n\\x1b[你好"

    inspect(session, scenario)
