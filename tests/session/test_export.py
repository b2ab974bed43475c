"""A tree as lines, as Markdown and as an object, against what it should look like."""

from llamay.session.export import draw, to_markdown, to_object
from llamay.session.records import AddNode, SetLabel, SetState
from llamay.session.tree import Tree
from tests.session.sessions import RECORDS, tree_after


def example() -> Tree:
    tree = tree_after(RECORDS)
    tree.apply(SetLabel(3, "best"))
    tree.apply(SetState(3, "interrupted"))
    tree.apply(AddNode(5, 0, "user", "Another\nbeginning"))
    return tree


def test_the_tree_is_drawn_with_connectors() -> None:
    assert list(draw(example())) == [
        "system: Be brief.",
        "├─ 1 you: Hi (2 tokens)",
        "│  ├─ 2 answer: ac (2 tokens) <- here",
        "│  │  └─ 4 you: And? (1 tokens)",
        "│  └─ 3 answer: b (1 tokens, interrupted) [best]",
        "└─ 5 you: Another beginning (0 tokens)",
    ]


def test_a_branch_in_markdown_is_a_conversation() -> None:
    tree = example()
    assert to_markdown(tree, "Title", tree.path(4)) == (
        "# Title\n\n## System\n\nBe brief.\n\n## You\n\nHi\n\n## Answer\n\nac\n\n## You\n\nAnd?\n"
    )


def test_a_whole_tree_in_markdown_says_what_follows_what() -> None:
    tree = example()
    headings = [
        line for line in to_markdown(tree, "Title", list(tree.walk())).splitlines() if "#" in line
    ]
    assert headings == [
        "# Title",
        "## System",
        "## You 1",
        "## Answer 2",
        "## You 4",
        "## Answer 3, to 1 [best] (interrupted)",
        "## You 5, to begin with",
    ]


def test_an_object_has_every_id_and_its_position() -> None:
    tree = example()
    value = to_object(tree, "name", tree.path(2))
    assert (value["name"], value["model"], value["place"]) == ("name", "m", 2)
    turns = [(turn["id"], turn["parent"], turn["ids"], turn["position"]) for turn in value["turns"]]
    assert turns == [(0, None, [], 0), (1, 0, [1, 2], 0), (2, 1, [3, 5], 2)]
    assert value["turns"][0]["settings"] == {"system": "Be brief.", "seed": 7}
