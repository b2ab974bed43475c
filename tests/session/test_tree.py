"""The tree of turns, against small trees worked out by hand."""

import json
import time

import pytest

from llamay.errors import SessionError
from llamay.session.records import (
    AddNode,
    AppendIds,
    Delete,
    Edit,
    Purge,
    Record,
    Redo,
    SegmentRef,
    SetLabel,
    SetPlace,
    SetSegments,
    SetSettings,
    SetState,
    Settings,
    Undo,
    decode,
    encode,
)
from llamay.session.tree import Tree


def asked() -> Tree:
    """One message (1) with two answers (2 of tokens 13 14, 3 of token 15)."""
    tree = Tree(Settings(system="Be brief.", seed=7))
    tree.apply(
        Edit(
            (
                AddNode(1, 0, "user", "Hello", ids=(10, 11, 12)),
                AddNode(2, 1, "assistant", seed_index=0, state="writing"),
                AddNode(3, 1, "assistant", seed_index=1, state="writing"),
                SetPlace(2),
            )
        )
    )
    tree.apply(AppendIds(2, 0, (13,), (-0.5,), "Hi"))
    tree.apply(AppendIds(2, 1, (14,), (-0.25,), " there"))
    tree.apply(AppendIds(3, 0, (15,), (-1.5,), "Hm"))
    return tree


def test_history_is_the_ids_along_the_path() -> None:
    tree = asked()
    assert tree.history(2) == [10, 11, 12, 13, 14]
    assert tree.history(3) == [10, 11, 12, 15]
    assert (tree.start(2), tree.length(2)) == (3, 5)
    assert tree.node(2).text == "Hi there"


def test_a_turn_may_keep_only_the_beginning_of_its_parents_history() -> None:
    tree = asked()
    tree.apply(AddNode(4, 2, "user", "And?", ids=(20, 21), keeps=4))
    assert tree.history(4) == [10, 11, 12, 13, 20, 21]
    assert (tree.start(4), tree.length(4)) == (4, 6)


def test_a_queued_turn_follows_its_parent_until_it_has_tokens_of_its_own() -> None:
    tree = asked()
    tree.apply(AddNode(4, 3, "user", "Go on", state="queued"))
    tree.apply(AppendIds(3, 1, (16,), (-1.0,), "m"))
    assert (tree.start(4), tree.length(4)) == (5, 5)
    tree.apply(AppendIds(4, 0, (20,)))
    tree.apply(AppendIds(3, 2, (17,), (-1.0,), "!"))
    assert tree.history(4) == [10, 11, 12, 15, 16, 20]
    assert (tree.start(4), tree.length(4)) == (5, 6)


def test_settings_add_up_along_the_path() -> None:
    tree = asked()
    tree.apply(SetSettings(1, Settings(temperature=0.5, seed=9)))
    tree.apply(SetSettings(2, Settings(temperature=1.5)))
    assert tree.effective(2) == Settings(system="Be brief.", temperature=1.5, seed=9)
    assert tree.effective(3) == Settings(system="Be brief.", temperature=0.5, seed=9)


def test_messages_are_the_texts_along_the_path() -> None:
    assert asked().messages(2) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi there"},
    ]


def test_child_0_goes_on_with_the_seed_and_others_have_their_own() -> None:
    tree = asked()
    assert tree.seed(1, 0) == 7
    assert len({tree.seed(1, i) for i in range(100)}) == 100


def test_seed_indices_are_never_used_twice_even_after_a_purge() -> None:
    tree = asked()
    assert tree.next_seed_index(1) == 2
    tree.apply(Delete(3))
    assert tree.next_seed_index(1) == 2
    tree.apply(Purge())
    assert tree.next_seed_index(1) == 2
    assert 3 not in tree.nodes


def test_ids_of_nodes_are_never_used_twice_even_after_an_undo() -> None:
    tree = asked()
    tree.apply(Undo())
    tree.apply(Purge())
    with pytest.raises(SessionError, match="4 or more as its number"):
        tree.apply(AddNode(1, 0, "user", "Hello"))
    assert tree.next_id == 4


def test_undo_takes_a_message_and_its_answers_back_as_one() -> None:
    tree = asked()
    assert tree.undo_phrase == 'message "Hello"'
    tree.apply(Undo())
    assert (list(tree.walk()), tree.place, tree.can_undo) == ([0], 0, False)
    tree.apply(Redo())
    assert (list(tree.walk()), tree.place, tree.can_redo) == ([0, 1, 2, 3], 2, False)


def test_undo_and_redo_cover_labels_settings_and_deletes() -> None:
    tree = asked()
    tree.apply(SetLabel(2, "first"))
    tree.apply(SetLabel(2, "second"))
    tree.apply(SetSettings(2, Settings(top_k=5)))
    tree.apply(Delete(2))
    seen: list[tuple[str | None, str | None, int | None, bool]] = []
    while tree.can_undo:
        node = tree.nodes[2]
        seen.append((tree.undo_phrase, node.label, node.settings.top_k, tree.visible(2)))
        tree.apply(Undo())
    assert seen == [
        ('deletion of "Hi there"', "second", 5, False),
        ("settings", "second", 5, True),
        ('label "second"', "second", None, True),
        ('label "first"', "first", None, True),
        ('message "Hello"', None, None, True),
    ]
    while tree.can_redo:
        tree.apply(Redo())
    assert (tree.nodes[2].label, tree.nodes[2].settings.top_k, tree.visible(2)) == (
        "second",
        5,
        False,
    )


def test_an_edit_that_changes_one_thing_twice_is_undone_to_what_was_before() -> None:
    tree = asked()
    tree.apply(Edit((SetLabel(2, "a"), SetLabel(2, "b"))))
    tree.apply(Undo())
    assert tree.nodes[2].label is None
    tree.apply(Redo())
    assert tree.nodes[2].label == "b"


def test_an_edit_after_an_undo_ends_what_could_be_redone() -> None:
    tree = asked()
    tree.apply(Undo())
    tree.apply(AddNode(4, 0, "user", "Other"))
    with pytest.raises(SessionError, match="nothing to redo"):
        tree.apply(Redo())


def test_the_place_moves_up_out_of_what_is_deleted() -> None:
    tree = asked()
    tree.apply(AddNode(4, 2, "user", "And?"))
    tree.apply(SetPlace(4))
    tree.apply(Delete(2))
    assert tree.place == 1
    tree.apply(Undo())
    assert tree.place == 4


@pytest.mark.parametrize(
    "record",
    [
        AddNode(4, 3, "assistant"),
        AddNode(4, 1, "user"),
        AddNode(4, 99, "user"),
        AddNode(3, 2, "user"),
        AddNode(4, 2, "user", ids=(1,), keeps=6),
        AppendIds(2, 1, (5,), (-1.0,)),
        AppendIds(2, 3, (5,), (-1.0,)),
        AppendIds(2, 2, (5,)),
        AppendIds(2, 2, (5,), (-1.0,), keeps=1),
        AppendIds(99, 0, (5,), (-1.0,)),
        SetState(99, "done"),
        SetSegments(99),
        SetPlace(99),
        SetLabel(99, "x"),
        Delete(0),
        Redo(),
        Edit((SetLabel(2, "x"), Delete(99))),
        Edit((AddNode(4, 2, "user", "y"), SetPlace(4), Delete(99))),
        Edit((Undo(),)),
    ],
    ids=str,
)
def test_a_record_that_does_not_fit_changes_nothing(record: Record) -> None:
    tree, same = asked(), asked()
    with pytest.raises(SessionError):
        tree.apply(record)
    assert vars(tree) == vars(same)


def test_search_finds_texts_and_labels_in_any_case() -> None:
    tree = asked()
    tree.apply(SetLabel(3, "STRASSE"))
    assert tree.search("THERE") == [2]
    assert tree.search("straße") == [3]
    tree.apply(Delete(3))
    assert tree.search("straße") == []


def test_records_come_back_from_json_as_they_were() -> None:
    records: list[Record] = [
        AppendIds(2, 0, (1, 2), (-0.1, -1e-300), "\ud800\x00é"),
        Edit((AddNode(4, 2, "user", ids=(7,), settings=Settings(stop=("a", "b"))), Undo())),
        SetSegments(3, (SegmentRef("a", 0, 64, 100), SegmentRef("b", 64, 65, 10))),
        SetState(2, "failed", error="No room."),
        SetLabel(1),
        Purge(),
    ]
    for record in records:
        assert decode(encode(record)) == record


@pytest.mark.parametrize(
    "value", [None, [], {}, {"record": "Nope"}, {"record": "Undo", "x": 1}, {"record": "SetLabel"}]
)
def test_other_json_is_no_record(value: object) -> None:
    with pytest.raises(ValueError, match="not a record"):
        decode(json.dumps(value))


def test_long_answers_and_large_trees_stay_quick() -> None:
    tree = Tree()
    start = time.perf_counter()
    last = 0
    for _ in range(150):
        user = tree.next_id
        tree.apply(AddNode(user, last, "user", "q", ids=(1,) * 50))
        last = user + 1
        tree.apply(AddNode(last, user, "assistant", ids=(2,) * 100, logprobs=(-1.0,) * 100))
    for i in range(20_000):
        tree.apply(AppendIds(last, 100 + i, (i,), (-1.0,), "word "))
        if i % 1000 == 0:
            tree.history(last)
    assert len(tree.history(last)) == 150 * 150 + 20_000
    assert time.perf_counter() - start < 3
