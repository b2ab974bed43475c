"""The list of sessions, on real folders of sessions."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from llamay.kv.snapshot import Key
from llamay.session.catalog import Catalog
from llamay.session.records import AddNode, AppendIds, Info
from llamay.session.tree import Tree
from llamay.tui.session_switcher import SessionSwitcher

from .fake_session import FakeSession
from .host import NARROW, Host, until

Scenario = Callable[[Pilot[None], SessionSwitcher], Awaitable[None]]


def make(home: Path, name: str, first: str = "Hello", parent: str | None = None) -> str:
    """A session on disk with one message; gives its id."""
    catalog = Catalog(home)
    tree = Tree(info=Info(parent=parent, model="smollm2:135m", created=1.0))
    folder = catalog.create(tree, name=name)
    for record in (AddNode(1, 0, "user", first), AppendIds(1, 0, (5, 6, 7), keeps=0)):
        tree.apply(record)
    folder.close(tree)
    return next(e.summary.id for e in catalog.entries() if e.name == name and e.summary)


def switch(
    home: Path, scenario: Scenario, current: str = "", size: tuple[int, int] = NARROW
) -> Host:
    async def run() -> Host:
        host = Host(FakeSession(), lambda host: SessionSwitcher(home, current))
        async with host.run_test(size=size) as pilot:
            screen = host.screen
            await until(pilot, lambda: said(screen) != "")
            await scenario(pilot, screen)
            await pilot.pause()
        return host

    return asyncio.run(run())


def rows(screen: SessionSwitcher) -> list[str]:
    return [str(option.prompt) for option in screen.query_one(OptionList).options]


def said(screen: SessionSwitcher) -> str:
    content = screen.query_one("#detail", Static).content
    return str(content)


def test_enter_opens_the_chosen_session(tmp_path):
    make(tmp_path, "alpha")
    make(tmp_path, "beta")

    async def scenario(pilot, screen):
        await pilot.press("down", "enter")

    names = [entry.name for entry in Catalog(tmp_path).entries()]
    assert switch(tmp_path, scenario).result == [names[1]]


def test_copies_are_below_what_they_are_copies_of(tmp_path):
    parent = make(tmp_path, "alpha")
    make(tmp_path, "other")
    make(tmp_path, "alpha-2", parent=parent)

    async def scenario(pilot, screen):
        shown = rows(screen)
        at = next(i for i, row in enumerate(shown) if row.split()[0] == "alpha")
        assert shown[at + 1].split()[:2] == ["└", "alpha-2"]

    switch(tmp_path, scenario)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_rows_have_counts_and_fit(tmp_path, size):
    make(tmp_path, "alpha-" + "x" * 90)

    async def scenario(pilot, screen):
        options = screen.query_one(OptionList)
        await until(pilot, lambda: "1 branch" in rows(screen)[0])
        assert "3 tok" in rows(screen)[0]
        assert len(rows(screen)[0]) == options.scrollable_content_region.width

    switch(tmp_path, scenario, size=size)


def test_the_filter_takes_words_of_name_and_first_message(tmp_path):
    make(tmp_path, "alpha", "Which index is it?")
    make(tmp_path, "beta", "Write a poem.")

    async def scenario(pilot, screen):
        await pilot.press("slash", *"poem")
        assert [row.split()[0] for row in rows(screen)] == ["beta"]
        await pilot.press(*"nrd")
        assert screen.query_one(Input).value == "poemnrd"
        assert said(screen) == "no session is called so"
        await pilot.press("backspace", "backspace", "backspace", "enter")

    assert switch(tmp_path, scenario).result == ["beta"]


def test_escape_leaves_the_filter_and_then_the_list(tmp_path):
    make(tmp_path, "alpha")

    async def scenario(pilot, screen):
        await pilot.press("slash", "escape")
        assert screen.query_one(OptionList).has_focus
        await pilot.press("escape")

    assert switch(tmp_path, scenario).result == [None]


@pytest.mark.parametrize(
    ("keys", "name"), [("", "session-1"), ("plans", "plans"), (["end", "-", "a"], "session-1-a")]
)
def test_a_new_session_has_the_name_that_was_given(tmp_path, keys, name):
    async def scenario(pilot, screen):
        assert "n begins one" in said(screen)
        await pilot.press("n")
        await pilot.press(*keys, "enter")

    assert switch(tmp_path, scenario).result == [name]


def test_a_name_that_cannot_be_is_refused_here(tmp_path):
    async def scenario(pilot, screen):
        await pilot.press("n")
        await pilot.press("slash", "enter")
        await until(pilot, lambda: "expected a name of letters" in said(screen))
        await pilot.pause(0.1)
        assert "expected a name of letters" in said(screen)  # the dialog's going says nothing else

    make(tmp_path, "alpha")
    assert switch(tmp_path, scenario).result == []


def test_delete_asks_first(tmp_path):
    make(tmp_path, "alpha")

    async def scenario(pilot, screen):
        await pilot.press("d", "n")
        assert len(Catalog(tmp_path).entries()) == 1
        await pilot.press("d", "y")
        await until(pilot, lambda: rows(screen) == [])
        assert Catalog(tmp_path).entries() == []

    switch(tmp_path, scenario)


def test_a_session_that_is_open_elsewhere_is_neither_opened_nor_deleted_nor_renamed(tmp_path):
    make(tmp_path, "alpha")
    folder = Catalog(tmp_path).open("alpha")

    async def scenario(pilot, screen):
        assert "it is open in process" in said(screen)
        await pilot.press("enter", "r")
        assert "is open; it can be renamed" in said(screen)
        await pilot.press("d", "y")
        await until(pilot, lambda: "process" in said(screen))

    assert switch(tmp_path, scenario).result == []
    folder.release()
    assert len(Catalog(tmp_path).entries()) == 1


def test_the_session_that_is_open_here_is_marked_and_can_be_chosen(tmp_path):
    make(tmp_path, "alpha")
    folder = Catalog(tmp_path).open("alpha")

    async def scenario(pilot, screen):
        assert rows(screen)[0].startswith("● alpha")
        assert said(screen).endswith("open now")
        await pilot.press("enter")

    assert switch(tmp_path, scenario, current="alpha").result == ["alpha"]
    folder.release()


def test_rename_keeps_which_session_was_last(tmp_path):
    make(tmp_path, "alpha")
    make(tmp_path, "beta")  # the last one

    async def scenario(pilot, screen):
        options = screen.query_one(OptionList)
        options.highlighted = options.get_option_index("alpha")
        await pilot.press("r")
        await pilot.press(*"-old", "enter")
        await until(pilot, lambda: any("alpha-old" in row for row in rows(screen)))

    switch(tmp_path, scenario)
    assert Catalog(tmp_path).last() == "beta"


def test_an_encrypted_session_says_what_opens_it(tmp_path):
    folder = Catalog(tmp_path).create(Tree(), name="secret", key=Key.random())
    folder.close(Tree())

    async def scenario(pilot, screen):
        assert "encrypted" in rows(screen)[0]
        assert "--context-key" in said(screen)
        await pilot.press("enter")

    assert switch(tmp_path, scenario).result == []
