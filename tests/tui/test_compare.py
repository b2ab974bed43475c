"""The compare view: what its panes show, what its keys do, and that all of it streams."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot

from llamay.errors import SessionError
from llamay.sampling import child_seed
from llamay.session.records import AddNode, AppendIds, Settings
from llamay.tui.compare import CompareScreen
from llamay.tui.compare_branches import Comparison, Histories
from llamay.tui.editor import Editor

from .fake_session import FakeSession, PageCell
from .host import NARROW, WIDE, Host, until
from .main_app import settle

ANSWERS = [
    "A unique index on email, because it is quick.",
    "A unique index on email. It also keeps rows apart.",
    "A partial unique index, so that few rows are in it.",
    "None; the column is small.",
]

Scenario = Callable[[Host, Pilot[None], CompareScreen], Awaitable[None]]


def sampled(n: int) -> FakeSession:
    """A session with `n` answers to one message, which are being written."""
    session = FakeSession()
    session.script = lambda node: ANSWERS[node.seed_index % 4]
    session.send("Which index would you use?", n=n)
    return session


def compare(session: FakeSession, scenario: Scenario, size: tuple[int, int] = WIDE) -> Host:
    """Runs a scenario on the compare view of all answers of a session."""

    async def run() -> Host:
        nodes = session.tree.leaves()
        host = Host(session, lambda host: CompareScreen(session, host.bridge, nodes))
        async with host.run_test(size=size) as pilot:
            await pilot.pause()
            await scenario(host, pilot, host.screen)
        return host

    return asyncio.run(run())


def done(session: FakeSession) -> bool:
    return all(session.tree.node(leaf).state == "done" for leaf in session.tree.leaves())


def test_a_branch_parts_where_it_leaves_the_one_it_follows_longest():
    histories = Histories([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]])
    assert histories.shared == 1
    assert [histories.parts_at(index) for index in range(3)] == [3, 3, 1]


def test_a_branch_that_another_one_goes_on_from_parts_nowhere():
    histories = Histories([[1, 2], [1, 2, 3]])
    assert [histories.parts_at(index) for index in range(2)] == [None, 2]


def test_a_branch_that_is_only_ahead_has_not_parted_yet():
    histories = Histories([[1, 2], [1], [1, 3]])
    assert histories.parts_at(0, growing=[0, 1]) is None
    assert histories.parts_at(2, growing=[0, 1]) is None
    histories.extend(1, [2, 4])
    assert [histories.parts_at(i, growing=[1]) for i in range(3)] == [None, 2, 1]
    assert histories.parts_at(0, growing=[0]) is None  # the other one goes on from it
    histories.extend(0, [5])
    assert histories.parts_at(0, growing=[0, 1, 2]) == 2


def test_a_message_that_gets_its_tokens_after_its_answer_was_made_counts():
    session = sampled(2)
    settle(session)
    tree = session.tree
    for user in (10, 12):
        tree.apply(AddNode(user, 2 + (user == 12), "user", "Why?"))
        tree.apply(AddNode(user + 1, user, "assistant", state="queued"))
    before = tree.length(2)
    comparison = Comparison(session, [11, 13])
    for user in (10, 12):
        tree.apply(AppendIds(user, 0, (1, 2, 3)))
        tree.apply(AppendIds(user + 1, 0, (4, user), (-1.0, -1.0), "So."))
        comparison.refresh(0)
        comparison.refresh(1)
    assert comparison.own_tokens(0) == before + 5 - comparison.shared_tokens


def test_branches_part_when_the_first_own_token_comes():
    histories = Histories([[1], [1]])
    histories.extend(0, [2])
    histories.extend(1, [2])
    assert histories.parts_at(0) is None
    histories.extend(0, [3])
    histories.extend(1, [4])
    assert (histories.parts_at(0), histories.shared) == (2, 2)


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_panes_show_the_answers_and_mark_where_they_part(size):
    async def scenario(host, pilot, screen):
        await until(pilot, lambda: done(host.session))
        await until(pilot, lambda: "apart." in screen.panes[1].plain)
        lines = screen.panes[0].plain.split("\n")
        row = next(row for row, line in enumerate(lines) if "^" in line)
        column = lines[row].index("^")
        assert lines[row - 1][column:].startswith("email,")
        assert "parts here" in lines[row]
        assert "^" in screen.panes[3].plain

    compare(sampled(4), scenario, size)


def test_shared_tokens_are_those_that_all_branches_have():
    session = sampled(2)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: done(session))
        await pilot.pause(0.1)
        # 9 of the message, then "A", "unique", "index", "on"
        assert screen.query_one("#shared").content.plain.startswith("shared: 13 tokens")
        assert screen.panes[0].figures().startswith("+5 tok")

    compare(session, scenario)


def test_shared_pages_are_those_that_the_ends_of_all_branches_hold():
    session = sampled(2)
    settle(session)
    session.send("Go on.", at=3)  # 4, answered by 5
    settle(session)
    holders = [(2, 5), (2, 5), (2,), (5,)]
    session.page_map = lambda id: tuple(
        PageCell(page * 64, page * 64 + 64, held, len(held) == 1, "memory")
        for page, held in enumerate(holders)
    )
    assert Comparison(session, [2, 3]).shared_pages() == 2


def test_one_prompt_goes_to_all_and_the_panes_go_on_with_its_answers():
    session = sampled(3)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: done(session))
        before = session.tree.leaves()
        await pilot.press("enter", *"why", "enter")
        await until(pilot, lambda: session.calls[-1][0] == "send_to")
        assert session.calls[-1] == ("send_to", tuple(before), "why")
        await until(pilot, lambda: done(session) and len(screen.panes) == 3)
        await until(pilot, lambda: "why" in screen.panes[2].plain)
        assert [session.tree.node(pane.node.id).role for pane in screen.panes] == ["assistant"] * 3
        assert screen.query_one(Editor).text == ""
        assert screen.query_one(Editor).has_focus

    compare(session, scenario)


def test_letters_are_text_in_the_prompt():
    async def scenario(host, pilot, screen):
        await pilot.press("enter", *"pd12ty")
        assert screen.query_one(Editor).text == "pd12ty"
        await pilot.press("escape")
        assert screen.panes[0].has_focus
        assert host.result == []

    compare(sampled(2), scenario)


def test_digits_go_to_panes_and_a_digit_without_a_pane_to_none():
    async def scenario(host, pilot, screen):
        await pilot.press("3")
        assert screen.focused is screen.panes[2]
        await pilot.press("4")
        assert screen.focused is screen.panes[2]

    compare(sampled(3), scenario)


def test_the_head_says_what_an_answer_was_sampled_with():
    session = sampled(2)
    session.set_settings(0, Settings(seed=7, temperature=0.5))
    session.tree.node(3).seed = child_seed(7, 1)

    async def scenario(host, pilot, screen):
        heads = ["1 · seed 7 · t 0.5 · here", "2 · seed 7 #2 · t 0.5"]
        await until(pilot, lambda: [str(pane.border_title) for pane in screen.panes] == heads)
        session.set_settings(3, Settings(temperature=0.0))
        await until(pilot, lambda: str(screen.panes[1].border_title) == "2 · greedy")

    compare(session, scenario)


def test_a_click_goes_to_a_pane():
    async def scenario(host, pilot, screen):
        await pilot.click(screen.panes[1])
        assert screen.focused is screen.panes[1]

    compare(sampled(2), scenario)


def test_promote_makes_a_branch_the_place_and_goes_back():
    session = sampled(3)
    second = session.tree.leaves()[1]

    async def scenario(host, pilot, screen):
        await pilot.press("2", "p")
        await pilot.pause()

    host = compare(session, scenario)
    assert host.result == [second]
    assert session.place == second


def test_escape_stops_what_is_written_and_then_goes_back():
    session = FakeSession()
    session.gate.clear()
    session.send("Go on.", n=2)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: session.tree.node(session.tree.leaves()[1]).text != "")
        await pilot.press("escape")
        await until(pilot, lambda: not screen._is_running)
        assert host.result == []
        await pilot.press("escape")
        await pilot.pause()

    host = compare(session, scenario)
    assert {session.tree.node(leaf).state for leaf in session.tree.leaves()} == {"stopped"}
    assert host.result == [None]


def test_escape_stops_what_waits_and_the_answers_that_it_waits_for():
    session = FakeSession()
    session.gate.clear()
    session.send("Go on.", n=2)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: session.tree.node(session.tree.leaves()[1]).text != "")
        await pilot.press("enter", "W", "h", "y", "enter")
        waiting = session.tree.leaves()
        assert [session.tree.node(leaf).state for leaf in waiting] == ["queued", "queued"]
        assert "page" not in str(screen.query_one("#shared").content)  # it is not known yet
        await pilot.press("escape", "escape")
        await until(pilot, lambda: not screen._is_running)

    compare(session, scenario)
    answers = [node for node in session.tree.nodes.values() if node.role == "assistant"]
    assert [node.state for node in answers] == ["stopped"] * 4


def test_drop_asks_deletes_and_undo_brings_the_pane_back():
    session = sampled(3)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: done(session))
        await pilot.press("2", "d", "n")
        assert len(session.tree.leaves()) == 3
        await pilot.press("d", "y")
        await until(pilot, lambda: len(screen.panes) == 2)
        assert len(session.tree.leaves()) == 2
        await pilot.press("u")
        await until(pilot, lambda: len(screen.panes) == 3)
        assert len(session.tree.leaves()) == 3

    compare(session, scenario)


def test_a_refused_change_is_said_and_changes_nothing():
    session = sampled(2)

    def refuse(node: int) -> None:
        raise SessionError("turn 3 is on the active path [/]; go elsewhere first")

    session.delete = refuse

    async def scenario(host, pilot, screen):
        await pilot.press("d", "y")
        await until(pilot, lambda: bool(host.said))
        assert host.said == ["turn 3 is on the active path [/]; go elsewhere first"]
        assert len(screen.panes) == 2

    compare(session, scenario)


def long_answers(n: int) -> FakeSession:
    session = FakeSession()
    session.script = lambda node: "\n".join(f"{node.seed_index} line {i}" for i in range(200))
    session.send("Go on.", n=n)
    return session


def test_panes_scroll_together_until_told_otherwise():
    session = long_answers(2)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: "line 199" in screen.panes[1].plain)
        first, second = screen.panes
        await pilot.press("home")
        await until(pilot, lambda: (first.scroll_y, second.scroll_y) == (0, 0))
        await pilot.press("t", "pagedown")
        await until(pilot, lambda: first.scroll_y > 0)
        await pilot.pause(0.3)
        assert second.scroll_y == 0

    compare(session, scenario)


def test_four_panes_show_all_that_streams_and_stay_at_its_end():
    session = long_answers(4)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: done(session))
        await until(pilot, lambda: all("line 199" in pane.plain for pane in screen.panes))
        assert all(pane.scroll_y == pane.max_scroll_y > 0 for pane in screen.panes)

    compare(session, scenario, NARROW)


def test_model_text_is_data():
    session = FakeSession()
    session.script = lambda node: f"[bold]{node.seed_index}[/] \x1b[31mred\x1b[0m [@click=quit]x[/]"
    session.send("[red]Really[/]?", n=2)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: "[@click=quit]x[/]" in screen.panes[1].plain)
        assert "[bold]1[/]" in screen.panes[1].plain
        assert "\x1b" not in screen.panes[1].plain

    compare(session, scenario)


def test_a_read_only_session_can_be_looked_at_only():
    session = sampled(2)
    session.read_only = "its model is not here"

    async def scenario(host, pilot, screen):
        await pilot.press("enter", "d")
        assert screen.focused is screen.panes[0]
        assert len(host.screen_stack) == 2

    compare(session, scenario)


def test_copy_takes_the_branch_as_it_was_written():
    session = sampled(2)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: done(session))
        await pilot.press("2", "y")
        assert host.copied == ANSWERS[1]

    compare(session, scenario)


@pytest.mark.parametrize(("size", "rows"), [((120, 40), 1), ((80, 24), 2), ((50, 40), 4)])
def test_four_panes_are_in_as_many_rows_as_the_width_asks_for(size, rows):
    async def scenario(host, pilot, screen):
        await pilot.pause()
        assert len({pane.region.y for pane in screen.panes}) == rows
        right = max(pane.region.right for pane in screen.panes)
        assert screen.panes[-1].region.right == right

    compare(sampled(4), scenario, size)


def test_a_word_more_does_not_cost_what_all_the_words_before_it_cost():
    session = long_answers(4)

    async def scenario(host, pilot, screen):
        await until(pilot, lambda: done(session))
        nodes = [pane.node for pane in screen.panes]

        def cost(lines: int) -> float:
            """Processor seconds of a word more in each, the least of some, after so many lines."""
            for node in nodes:
                node.pieces.append("another line\n" * lines)
            times = []
            for _ in range(20):
                for node in nodes:
                    node.pieces.append("word ")
                started = time.process_time()
                for pane in screen.panes:
                    pane.refresh_branch()
                times.append(time.process_time() - started)
            return min(times)

        short = cost(0)  # 200 lines in each
        assert cost(3000) < 12 * short

    compare(session, scenario)
