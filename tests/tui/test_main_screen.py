"""What the keys of the main screen do to a session, and what is shown of it."""

import pytest

from llamay.events import AnswerProgress, Resumed
from llamay.session.records import Settings
from llamay.tui.ask import AskCount, AskLine
from llamay.tui.compare import CompareScreen
from llamay.tui.confirm import Confirm

from .fake_session import ANSWER, FakeSession
from .main_app import NARROW, Driver, branched, drive


def test_a_message_is_sent_and_its_answer_is_shown():
    async def scenario(d: Driver) -> None:
        assert "A new conversation" in d.screen_text()
        await d.write("Which index?")
        await d.quiet()
        assert ("send", "Which index?", None, 1) in d.session.calls
        screen = d.screen_text()
        assert "Which index?" in screen
        assert "A unique index on email, because every lookup goes by it." in screen
        assert d.regions.transcript.path == [1, 2]
        assert d.regions.tree_view.cursor == 2
        assert d.regions.editor.text == ""

    drive(scenario)


def test_what_is_written_while_the_model_loads_is_sent_when_it_is_there():
    session = FakeSession()

    async def scenario(d: Driver) -> None:
        d.app.session = None
        d.main.show_loading("opening a model")
        await d.write("First?")
        assert "First?" in d.screen_text()
        assert session.calls == []
        d.app._opened(session)
        await d.quiet()
        assert session.calls == [("send", "First?", None, 1)]

    drive(scenario, session)


def test_a_message_to_an_answer_that_is_written_waits_for_it_and_the_draft_stays():
    session = FakeSession()
    session.gate.clear()

    async def scenario(d: Driver) -> None:
        await d.write("One?")
        await d.until(lambda: session.tree.node(2).state == "writing")
        await d.write("Two?")
        d.regions.editor.text = "a draft"
        await d.until(lambda: "1 queued" in d.screen_text())
        assert session.tree.node(4).state == "queued"
        session.gate.set()
        await d.quiet()
        assert [session.tree.node(id).state for id in (2, 4)] == ["done", "done"]
        assert d.regions.editor.text == "a draft"

    drive(scenario, session)


def test_escape_stops_and_what_came_stays_and_is_continued_exactly():
    session = FakeSession()
    words = " ".join(f"w{i}" for i in range(30))
    session.script = lambda node: words
    session.delay_s = 0.2

    async def scenario(d: Driver) -> None:
        await d.write("Count")
        await d.until(lambda: session.tree.node(2).text.startswith("w0 w1"))
        await d.until(lambda: "Esc Stop" in d.screen_text())
        await d.press("escape")
        await d.quiet()
        node = session.tree.node(2)
        assert node.state == "stopped"
        assert "w0 w1" in d.screen_text()
        assert "R continues from there" in d.screen_text()
        session.delay_s = 0
        await d.press("escape", "R")
        await d.quiet()
        assert ("resume", 2) in session.calls
        assert session.tree.node(2).text == words

    drive(scenario, session)


def test_choosing_a_message_edits_it_beside_the_old_one():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press("escape", "k")
        assert d.regions.transcript.chosen == 5
        await d.press("enter")
        editor = d.regions.editor
        assert (editor.text, editor.has_focus, session.place) == ("And for 10M rows?", True, 2)
        assert "Enter makes a sibling" in d.screen_text()
        editor.text = "And for 10 rows?"
        await d.press("enter")
        await d.quiet()
        assert ("edit", 5, "And for 10 rows?", 1) in session.calls
        assert session.tree.children(2) == [5, 7]
        assert "#2 of 2" in d.screen_text()

    drive(scenario, session)


def test_the_beginning_of_a_conversation_is_not_called_a_new_one():
    session = branched()
    session.set_settings(0, Settings())  # no system prompt, which would be shown there

    async def scenario(d: Driver) -> None:
        d.regions.go(d.regions.tree_view)
        await d.press("g")
        assert "A new conversation" not in d.screen_text()
        assert "starts another branch" in d.screen_text()

    drive(scenario, session)


def test_leaving_an_edit_keeps_its_text_in_the_history():
    session = branched()

    async def scenario(d: Driver) -> None:
        d.regions.editor.text = "a draft"
        await d.press("escape", "k", "e")
        assert d.regions.editor.text == "And for 10M rows?"
        assert session.place == 2
        await d.press("escape")
        assert d.regions.editor.text == ""
        assert session.place == 6  # where it was before
        assert "a draft" in d.regions.editor.past

    drive(scenario, session)


def test_choosing_an_answer_continues_from_it():
    session = branched()

    async def scenario(d: Driver) -> None:
        d.regions.go(d.regions.tree_view)
        await d.press("j")  # past the end of what follows answer 2: answer 3
        assert d.regions.transcript.path == [0, 1, 3]
        assert session.place == 6
        await d.press("enter")
        assert session.place == 3
        assert d.regions.editor.has_focus
        await d.write("Why?")
        await d.quiet()
        assert session.tree.node(7).parent == 3

    drive(scenario, session)


def test_fork_begins_a_branch_at_any_turn():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press("escape", "k", "k")
        assert d.main.current == 2
        await d.press("f")
        assert session.place == 2
        assert "new branch after" in d.screen_text()
        await d.press("escape", "k", "f")  # a message: the branch begins before it
        assert session.place == 0

    drive(scenario, session)


def test_another_answer_and_several_answers():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press("escape", "r")
        await d.quiet()
        assert session.calls[-1] == ("regenerate", 6, 1)
        assert session.tree.children(5) == [6, 7]
        await d.press("n")
        assert isinstance(d.app.screen, AskCount)
        await d.press("3")
        await d.until(lambda: isinstance(d.app.screen, CompareScreen))
        assert ("sample", 7, 3) in session.calls
        await d.quiet()

    drive(scenario, session)


def test_marked_turns_are_compared_and_one_is_promoted():
    session = branched()

    async def scenario(d: Driver) -> None:
        d.regions.go(d.regions.tree_view)
        await d.press("c")
        assert "mark two to four turns" in d.notices()[-1]
        await d.press("j", "space", "j", "space")
        assert d.main.marked == {3, 4}
        assert d.screen_text().count("✓") >= 2
        await d.press("c")
        assert isinstance(d.app.screen, CompareScreen)
        d.app.screen.dismiss(4)
        await d.pilot.pause()
        assert session.place == 4

    drive(scenario, session)


def test_siblings_are_compared_without_marks():
    session = branched()
    session.go(3)

    async def scenario(d: Driver) -> None:
        await d.press("escape", "c")
        assert isinstance(d.app.screen, CompareScreen)

    drive(scenario, session)


def test_label_undo_redo():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press("escape", "l")
        assert isinstance(d.app.screen, AskLine)
        await d.press("b", "e", "s", "t", "enter")
        await d.quiet()
        assert session.tree.node(6).label == "best"
        assert "[best]" in d.screen_text()
        await d.press("u")
        assert session.tree.node(6).label is None
        assert d.notices()[-1].startswith("undid: ")
        await d.press("U")
        assert session.tree.node(6).label == "best"
        assert d.notices()[-1].startswith("did again: ")

    drive(scenario, session)


def test_delete_asks_and_never_touches_the_active_path():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press("escape", "d")
        assert "on the active path" in d.notices()[-1]
        d.regions.go(d.regions.tree_view)
        await d.press("j", "d")
        assert isinstance(d.app.screen, Confirm)
        await d.press("n")
        assert session.tree.visible(3)
        await d.press("d", "y")
        await d.quiet()
        assert not session.tree.visible(3)
        assert d.main.current == 1
        await d.press("u")
        await d.quiet()
        assert session.tree.visible(3)

    drive(scenario, session)


def test_copying_a_turn_and_its_code():
    session = branched()
    session.script = lambda node: "Use\n```sql\nSELECT 1;\n```\n\x1b]52;c;evil\x07 so"
    session.send("Show it")

    async def scenario(d: Driver) -> None:
        await d.quiet()
        await d.press("escape", "Y")
        assert d.app.clipboard == "SELECT 1;"
        await d.press("y")
        assert d.app.clipboard == session.tree.node(session.place).text
        await d.press("k", "Y")
        assert "no block of code" in d.notices()[-1]

    drive(scenario, session)


def test_siblings_are_walked_through_in_the_transcript():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press("escape", "k", "k", "right")
        assert d.main.current == 3
        assert d.regions.transcript.path == [0, 1, 3]
        await d.press("left", "left")
        assert d.main.current == 4

    drive(scenario, session)


def test_an_error_of_the_session_is_a_sentence_and_the_text_is_kept():
    session = branched()
    session.fails = "the context of 2,048 tokens is full; fork earlier"

    async def scenario(d: Driver) -> None:
        await d.write("More?")
        await d.quiet()
        screen = d.screen_text()
        assert screen.count("the context of 2,048 tokens is full") >= 2  # in its place, and below
        assert d.notices()[-1] == session.fails
        session.read_only = "it is read-only"

    drive(scenario, session)


@pytest.mark.parametrize(
    ("state", "reason", "sentence"),
    [
        ("interrupted", None, "continues from its exact token"),
        ("done", "context", "larger --ctx-size"),
        ("done", "length", "the most tokens that the settings allow"),
    ],
)
def test_how_an_answer_ended_is_said_below_it(state, reason, sentence):
    from llamay.session.records import SetState

    session = branched()
    session.tree.apply(SetState(6, state, reason))

    async def scenario(d: Driver) -> None:
        assert sentence in d.screen_text()

    drive(scenario, session, size=(160, 40))


def test_a_session_that_was_resumed_says_so():
    async def scenario(d: Driver) -> None:
        d.session.emit(Resumed(2202, 0.031, 3.1))
        d.session.notice("a segment is damaged; its text is read again", "warning")
        await d.until(lambda: "resumed" in d.screen_text())
        assert "resumed 2,202 tok in 31 ms, prefill would take about 3.1 s" in d.screen_text()
        assert "! a segment is damaged; its text is read again" in d.screen_text()
        await d.pilot.resize_terminal(100, 40)  # the log says what has no room any more
        await d.until(lambda: "prefill" not in d.screen_text())
        assert "· kv f32   " in d.screen_text()
        assert "resumed 2,202 tok in 31 ms" in d.screen_text()
        assert "resumed 2,202 tok in 31 ms, prefill would take about 3.1 s" in d.notices()

    drive(scenario, branched(), size=(150, 40))


def test_reading_shows_what_is_cached_and_what_is_computed():
    session = branched()
    session.prefill = 64
    session.gate.clear()

    async def scenario(d: Driver) -> None:
        await d.write("More?")
        await d.until(lambda: d.regions.transcript.path[-1] == 8)
        session.emit(AnswerProgress(8, 2202, 1984, 2115, 0.5))
        await d.until(lambda: "1,984 from cache · 131 of 218 computed" in d.screen_text())
        assert "reading  █" in d.screen_text()
        assert "about 332 ms left" in d.screen_text()  # 87 of 131 tokens' half second
        session.gate.set()
        await d.quiet()
        assert "computed" not in d.screen_text()

    drive(scenario, session)


def test_single_letters_are_text_in_the_editor():
    session = branched()

    async def scenario(d: Driver) -> None:
        await d.press(*"fnerdu?/")
        assert d.regions.editor.text == "fnerdu?/"
        assert not any(call[0] in ("regenerate", "delete") for call in session.calls)
        assert "Fork" not in d.screen_text().splitlines()[-1]

    drive(scenario, session)


def test_narrow_screens_show_one_region_and_tab_goes_round():
    session = branched()

    async def scenario(d: Driver) -> None:
        def shown() -> list[str]:
            return [str(r.id) for r in d.regions.query(".region") if r.display]

        assert shown() == ["talk-region"]
        await d.write("More?")  # while the tree has never been seen
        await d.quiet()
        await d.press("tab")
        assert shown() == ["tree-region"]
        last = d.screen_text().splitlines()[-1].strip()
        assert last.startswith("Tree")
        assert last.endswith("Tab Region  ? Help")
        await d.press("tab")
        assert shown() == ["talk-region"]
        assert d.regions.transcript.has_focus
        await d.press("i")
        await d.until(lambda: shown() == ["state-region"])
        await d.press("i")
        await d.until(lambda: len(shown()) == 1 and shown() != ["state-region"])
        await d.pilot.resize_terminal(130, 30)
        await d.until(lambda: shown() == ["tree-region", "talk-region"])

    drive(scenario, session, size=NARROW)


def test_the_tree_is_drawn_when_the_screen_first_has_room_for_it():
    async def scenario(d: Driver) -> None:
        await d.pilot.resize_terminal(120, 24)
        await d.until(lambda: d.regions.tree_view.region.width > 0)
        for _ in range(3):  # whatever else is drawn anew by now, it was not the tree
            await d.pilot.pause()
        assert "A partial index" in d.screen_text()  # of a branch that only the tree shows

    drive(scenario, branched(), size=NARROW)


@pytest.mark.parametrize("size", [(20, 5), (41, 9), (300, 80)])
def test_any_size_is_drawn(size):
    async def scenario(d: Driver) -> None:
        await d.press("tab", "tab", "tab")
        assert d.screen_text()
        await d.pilot.resize_terminal(80, 24)
        await d.until(lambda: ANSWER.split()[-1] in d.screen_text())

    drive(scenario, branched(), size=size)
