"""Rows and connectors of the tree."""

from llamay.tui.tree_rows import rows

from .main_app import branched


def drawn(session, folded=(), only=None) -> list[str]:
    return [f"{row.first}{row.node}" for row in rows(session.tree, folded, only)]


def test_only_children_stand_below_their_parent_and_branches_are_indented():
    session = branched()
    session.send("Rewrite it", at=0)
    assert drawn(session) == ["0", "├─1", "│ ├─2", "│ │ 5", "│ │ 6", "│ ├─3", "│ └─4", "└─7", "  8"]


def test_further_lines_of_a_row_carry_the_connectors_on():
    session = branched()
    found = {row.node: row.rest for row in rows(session.tree, ())}
    assert found == {0: "", 1: "│ ", 2: "│ ", 5: "│ ", 6: "│ ", 3: "│ ", 4: "  "}


def test_a_folded_turn_says_how_many_it_hides():
    found = rows(branched().tree, {2})
    assert [(row.node, row.below) for row in found] == [(0, 0), (1, 0), (2, 2), (3, 0), (4, 0)]


def test_matches_are_shown_with_what_is_above_them_even_if_folded():
    assert drawn(branched(), folded={1}, only={6}) == ["0", "1", "2", "5", "6"]


def test_a_conversation_of_300_turns_that_never_branches_is_one_column():
    session = branched()
    for _ in range(150):
        session.send("again")
    assert {row.first for row in rows(session.tree, ())} == {"", "├─", "│ ", "└─"}
