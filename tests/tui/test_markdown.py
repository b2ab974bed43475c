"""Markdown in lines of a width; a model's text is data."""

import pytest
from rich.style import Style

from llamay.tui.markdown import STYLES, Markdown
from llamay.tui.text import clean

PLAIN = {name: Style.null() for name in STYLES}
NAMED = {**PLAIN, "strong": Style(bold=True), "code": Style(color="red")}


def lines(source: str, width: int = 30) -> list[str]:
    return [line.plain.rstrip() for line in Markdown(width, PLAIN).prose(clean(source))]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("# Title", ["Title"]),
        ("a **b** `c` *d*", ["a b c d"]),
        ("- a\n- b", ["• a", "• b"]),
        ("3. a\n4. b", ["3. a", "4. b"]),
        ("- a\n  - b", ["• a", "  • b"]),
        ("> a\n> b", ["▎ a b"]),
        ("a\n\nb", ["a", "", "b"]),
        ("|x|yy|\n|-|-|\n|1|2|", ["x │ yy", "──┼───", "1 │ 2"]),
        ("[see](http://a.b)", ["see (http://a.b)"]),
        ("![pic](http://a.b)", ["[pic] (http://a.b)"]),
        ("<b>bold</b> &amp; <script>", ["<b>bold</b> & <script>"]),
        (
            "[bold]not markup[/bold] [@click=quit]x[/]",
            ["[bold]not markup[/bold]", "[@click=quit]x[/]"],
        ),
    ],
)
def test_what_is_shown_of_markdown(source, expected):
    assert lines(source) == expected


def test_styles_apply_to_what_they_stand_on():
    (line,) = Markdown(30, NAMED).prose("a **b** `c`")
    styled = {line.plain[span.start : span.end]: span.style for span in line.spans}
    assert styled == {"b": NAMED["strong"], "c": NAMED["code"]}


def test_no_line_is_wider_than_asked_for():
    source = "\n\n".join(
        [
            "word " * 50,
            "x" * 100,
            "한글 " * 40,
            "👨‍👩‍👧❤️👍🏽" * 20,
            "שלום עולם " * 20,
            "กำลัง" * 30,
            "- " + "item " * 30,
            "> " + "quote " * 30,
            "|a|b|\n|-|-|\n|" + "cell " * 30 + "|x|",
            "```\n" + "y" * 100 + "\n```",
        ]
    )
    for width in (80, 20, 10):
        for line in Markdown(width, PLAIN).prose(clean(source)):
            assert line.cell_len <= width, line.plain


def test_escape_sequences_are_shown_and_reach_no_terminal():
    shown = lines("red \x1b[31mtext\x1b[0m \x9b1m \x07bell \u202eback")
    assert "\x1b" not in "".join(shown)
    assert "\\x1b[31mtext" in " ".join(shown)
    assert "\u202e" not in "".join(shown)


def test_code_keeps_its_spaces_and_is_coloured_by_its_language():
    styles = {**PLAIN, "keyword": Style(color="blue")}
    (first, second) = Markdown(30, styles).code("def f():\n    return 1", "python")
    assert second.plain.rstrip() == "      return 1"
    assert any(span.style == styles["keyword"] for span in first.spans)
    assert Markdown(30, styles).code("def", "no-such-language")[0].plain.strip() == "def"


@pytest.mark.parametrize(
    "source", ["|", "|a|\n|-|", "[](", "![](x)", "*" * 500, "> " * 100, "- " * 60, "`" * 99, "&#0;"]
)
def test_odd_sources_are_rendered(source):
    assert all(line.cell_len <= 30 for line in Markdown(30, PLAIN).prose(source))
