"""Text and figures as the screens show them."""

import math

import pytest
from rich.cells import cell_len

from llamay.tui import text
from llamay.tui.wrapped import Mark, Wrapped


def test_nothing_that_a_terminal_obeys_stays():
    unsafe = [chr(code) for code in range(32)] + ["\x7f", "\x9b", "\u2028", "\u202e", "\ud800"]
    cleaned = text.clean("".join(unsafe))
    assert [char for char in cleaned if not char.isprintable()] == ["\t", "\n"]


def test_letters_and_combining_marks_stay_and_emoji_are_one_by_one():
    given = "naïve e\u0301 你好 ক্\u200dষ [bold]"
    assert text.clean(given) == given
    assert text.clean("👩\u200d👩\u200d👧 👍🏽 ❤\ufe0f") == "👩👩👧 👍 ❤"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.count(1984), "1,984"),
        (text.plural(1, "page"), "1 page"),
        (text.plural(2202, "branch"), "2,202 branches"),
        (text.size(1023), "1023 B"),
        (text.size(210 << 20), "210 MiB"),
        (text.size((1 << 30) - 1), "1.0 GiB"),
        (text.size_of(1_181_116_006, 8 << 30), "1.1 / 8.0 GiB"),
        (text.size_of(5 << 20, 8 << 30), "5.0 MiB / 8.0 GiB"),
        (text.duration(0.0312), "31 ms"),
        (text.duration(3.14), "3.1 s"),
        (text.duration(125), "2 min 5 s"),
        (text.rate(9.94), "9.9 tok/s"),
        (text.rate(118.4), "118 tok/s"),
        (text.share(math.log(0.412)), "41.2 %"),
        (text.share(math.log(0.0004)), "< 0.1 %"),
        (text.ago(59), "now"),
        (text.ago(3 * 3600 + 5), "3 h"),
    ],
)
def test_figures(shown, expected):
    assert shown == expected


@pytest.mark.parametrize("line", ["short", "你好世界" * 5, "e\u0301" * 30, ""])
def test_a_line_that_is_fitted_has_its_width(line):
    assert cell_len(text.fit(line, 11)) == 11


TEXT = "A unique index on 你好世界 and\nmore " + "x" * 50 + "\t👩\u200d👩\u200d👧 e\u0301nd\n\nlast"


@pytest.mark.parametrize("width", [2, 7, 22, 80])
def test_a_text_that_grows_has_the_lines_of_the_whole_one(width):
    grown, whole = Wrapped(), Wrapped()
    for end in range(len(TEXT) + 1):
        grown.update(TEXT[:end], width)
    whole.update(TEXT, width)
    assert [line.plain for line in grown.lines] == [line.plain for line in whole.lines]
    assert all(cell_len(line.plain.rstrip()) <= width for line in whole.lines)


@pytest.mark.parametrize(("start", "below"), [(0, "A"), (18, "你"), (27, "more"), (36, "xx")])
def test_a_caret_is_below_the_place_that_is_marked(start, below):
    wrapped = Wrapped()
    wrapped.update(TEXT, 22, Mark(start, start + 1, "parts here"))
    lines = [line.plain for line in wrapped.lines]
    row = next(row for row, line in enumerate(lines) if "^" in line)
    column = cell_len(lines[row].partition("^")[0])
    before = lines[row - 1]
    at = next(i for i in range(len(before) + 1) if cell_len(before[:i]) == column)
    assert before[at:].startswith(below)
