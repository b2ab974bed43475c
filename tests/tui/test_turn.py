"""Turns of the transcript as lines."""

import pytest
from rich.style import Style

from llamay.tui.markdown import STYLES, Markdown
from llamay.tui.turn import Heading, Turn

LOOK = Markdown(40, {name: Style.null() for name in STYLES})


def turn(role: str = "assistant") -> Turn:
    made = Turn(1, role)
    made.set_look(LOOK, 40)
    return made


def lines(turn: Turn) -> list[str]:
    turn.settle_lines(0, 10_000)
    return [turn.line(y)[1].plain.rstrip() for y in range(turn.height)]


def test_heading_text_foot_and_a_gap():
    it = turn()
    it.show("Some *text*.", Heading("Model", "#1 of 2"), [("error", "it failed")])
    assert lines(it) == ["Model" + " " * 28 + "#1 of 2", "Some text.", "it failed", ""]


def test_what_is_written_has_a_mark_at_its_end_only():
    it = turn()
    for text in ("", "One", "One\n\n", "One\n\n# Two\n", "One\n\n# Two\nThree"):
        it.show(text, Heading("M"), writing=True)
        assert "".join(lines(it)).count("▌") == 1
        assert [line for line in lines(it) if line][-1].endswith("▌")
    it.show("One\n\n# Two\nThree", Heading("M"))
    assert "▌" not in "".join(lines(it))


def test_a_text_that_grows_looks_like_one_that_came_at_once():
    text = "# A\n\nsome words\n\n- x\n- y\n\n```python\ndef f(): pass\n```\nend" * 3
    whole, grown = turn(), turn()
    whole.show(text, Heading("M"))
    for end in range(0, len(text), 5):
        grown.show(text[:end], Heading("M"), writing=True)
        lines(grown)
    grown.show(text, Heading("M"))
    assert lines(grown) == lines(whole)


def test_a_text_that_becomes_another_is_shown_anew():
    it = turn()
    it.show("first text", Heading("M"))
    it.show("second", Heading("M"))
    assert lines(it)[1:-1] == ["second"]


def test_thinking_is_folded_until_asked_for():
    it = turn()
    it.show("<think>one two three</think>\nAnswer", Heading("M"))
    assert lines(it)[1:-1] == ["▸ thinking, 3 words", "Answer"] or lines(it)[1] == (
        "▸ thinking, 3 words"
    )
    assert it.can_unfold
    it.toggle()
    assert "┊ one two three" in lines(it)


def test_a_long_message_is_folded_until_asked_for():
    it = turn("user")
    it.show("\n".join(f"line {i}" for i in range(100)), Heading("You"))
    assert len(lines(it)) == 1 + 12 + 2
    assert "88 more lines" in lines(it)[13]
    it.toggle()
    assert len(lines(it)) == 1 + 100 + 2


def test_messages_are_shown_as_they_were_typed():
    it = turn("user")
    it.show("# not *a* heading\n  indented", Heading("You"))
    assert lines(it)[1:-1] == ["# not *a* heading", "  indented"]


@pytest.mark.parametrize("width", [1, 5, 200])
def test_any_width(width):
    it = Turn(1, "assistant")
    it.set_look(Markdown(width, {name: Style.null() for name in STYLES}), width)
    it.show("words and `code`\n\n|a|b|\n|-|-|\n|1|2|\n\n- item", Heading("M", "#1 of 2"))
    assert max(map(len, lines(it)[1:])) <= max(width, 9)  # a table of two columns has 9
