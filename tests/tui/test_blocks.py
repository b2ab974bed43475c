"""Cutting an answer into blocks: however it comes, and at a cost that does not grow."""

import time

import pytest

from llamay.tui.blocks import Block, Blocks

ANSWER = """<think>
Which one?
The second.</think>

# An index
Use it, because
it is quick.

- one
- two

  more of two
1. first

```sql
SELECT 1;

```
After *that*.
"""


def cut(*pieces: str) -> list[Block]:
    blocks = Blocks()
    for piece in pieces:
        blocks.feed(piece)
    blocks.finish()
    return blocks.complete


def test_an_answer_in_blocks():
    found = [(block.kind, block.source) for block in cut(ANSWER)]
    assert found == [
        ("thinking", "Which one?\nThe second."),
        ("prose", "# An index"),
        ("prose", "Use it, because\nit is quick."),
        ("prose", "- one"),
        ("prose", "- two\n\n  more of two"),
        ("prose", "1. first"),
        ("code", "SELECT 1;\n"),
        ("prose", "After *that*."),
    ]
    assert cut(ANSWER)[6].language == "sql"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_pieces_of_any_size_give_the_same_blocks(size):
    pieces = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    assert cut(*pieces) == cut(ANSWER)


def test_complete_blocks_never_change_while_the_answer_grows():
    blocks, before = Blocks(), []
    for char in ANSWER * 3:
        blocks.feed(char)
        shown = [(block.kind, block.source) for block in blocks.complete]
        assert shown[: len(before)] == before
        before = shown


def test_all_text_is_shown_at_any_time():
    blocks = Blocks()
    for word in ["One ", "two\n", "three", ".\n\n", "- four", "\n", "`five`"]:
        blocks.feed(word)
    shown = " ".join(block.source for block in [*blocks.complete, *blocks.growing])
    assert shown.split() == ["One", "two", "three.", "-", "four", "`five`"]


def test_what_may_become_a_marker_is_not_shown_as_text():
    blocks = Blocks()
    blocks.feed("Text\n``")
    assert [block.source for block in blocks.growing] == ["Text"]


def test_code_without_an_end_is_code():
    assert [block.kind for block in cut("```\nx = 1\n")] == ["code"]


def test_a_token_of_a_long_answer_costs_no_more_than_one_of_a_short_one():
    def seconds(blocks: Blocks) -> float:
        begun = time.process_time()
        for _ in range(200):
            blocks.feed("word ")
        return time.process_time() - begun

    for unbroken in ("word ", "line\n", "```\n" + "code\n" * 10):
        blocks = Blocks()
        first = min(seconds(blocks) for _ in range(3))
        blocks.feed(unbroken * 20_000)
        assert min(seconds(blocks) for _ in range(3)) < 20 * first + 0.02
