"""Random edits, undos and restarts of a tree, against a model that computes all anew each time."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamay.session.records import (
    AddNode,
    AppendIds,
    Delete,
    Edit,
    Purge,
    Record,
    Redo,
    SetLabel,
    SetPlace,
    SetSettings,
    Settings,
    Undo,
    decode,
    encode,
)
from llamay.session.tree import Tree
from llamay.session.tree_json import tree_from_json
from tests.session.sessions import same


@dataclass
class Turn:
    """What no undo changes of a turn; before: the history that it follows, once it has ids."""

    parent: int
    role: str
    ids: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)


class TreeMachine(RuleBasedStateMachine):
    """The model: a list of edits, of which the first `count` hold, and the turns' tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.records: list[Record] = []
        self.turns = {0: Turn(0, "root")}
        self.edits: list[list[tuple[str, int, Any]]] = []
        self.base = self.count = 0
        self.next_id = 1

    def state(self) -> tuple[set[int], dict[int, Any], dict[int, Any]]:
        """The visible turns, their labels and their temperatures."""
        shown, labels, temperatures = {0}, dict[int, Any](), dict[int, Any]()
        for edit in self.edits[: self.count]:
            for what, id, value in edit:
                match what:
                    case "add":
                        shown.add(id)
                    case "delete":
                        shown.discard(id)
                    case "label":
                        labels[id] = value
                    case "settings":
                        temperatures[id] = value
        seen = {id for id in shown if all(above in shown for above in self.above(id))}
        return seen, labels, temperatures

    def above(self, id: int) -> list[int]:
        path = []
        while id:
            id = self.turns[id].parent
            path.append(id)
        return path

    def history(self, id: int) -> list[int]:
        turn = self.turns[id]
        if id and not turn.ids:
            return self.history(turn.parent)
        return turn.before + turn.ids

    def visible(self, *roles: str) -> list[int]:
        return sorted(id for id in self.state()[0] if self.turns[id].role in roles)

    def edit(self, record: Record, steps: list[tuple[str, int, Any]]) -> None:
        self.edits[self.count :] = [steps]
        self.count += 1
        self.do(record)

    def do(self, record: Record) -> None:
        self.records.append(record)
        self.tree.apply(record)

    @rule(data=st.data(), answers=st.integers(0, 3), ids=st.lists(st.integers(0, 9), max_size=3))
    def send(self, data: st.DataObject, answers: int, ids: list[int]) -> None:
        parent = data.draw(st.sampled_from(self.visible("root", "assistant")))
        user = self.next_id
        below = list(range(user + 1, user + 1 + answers))
        self.next_id += 1 + answers
        self.turns[user] = Turn(parent, "user", ids, self.history(parent))
        self.turns |= {id: Turn(user, "assistant") for id in below}
        adds = [AddNode(user, parent, "user", "q", ids=tuple(ids))]
        adds += [AddNode(id, user, "assistant", seed_index=i) for i, id in enumerate(below)]
        self.edit(Edit((*adds, SetPlace(user))), [("add", id, None) for id in (user, *below)])

    @precondition(lambda self: self.visible("user"))
    @rule(data=st.data())
    def regenerate(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.visible("user")))
        id, self.next_id = self.next_id, self.next_id + 1
        self.turns[id] = Turn(user, "assistant")
        index = self.tree.next_seed_index(user)
        self.edit(AddNode(id, user, "assistant", seed_index=index), [("add", id, None)])

    @rule(data=st.data(), ids=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def write(self, data: st.DataObject, ids: list[int]) -> None:
        there = sorted(id for id, turn in self.turns.items() if turn.role == "assistant")
        if there:
            id = data.draw(st.sampled_from(there))
            turn, at = self.turns[id], len(self.turns[id].ids)
            if not turn.ids:
                turn.before = self.history(turn.parent)
            turn.ids += ids
            self.do(AppendIds(id, at, tuple(ids), (-1.0,) * len(ids), "t" * len(ids)))

    @rule(data=st.data(), label=st.sampled_from([None, "a", "b"]))
    def label(self, data: st.DataObject, label: str | None) -> None:
        id = data.draw(st.sampled_from(self.visible("root", "user", "assistant")))
        self.edit(SetLabel(id, label), [("label", id, label)])

    @rule(data=st.data(), temperature=st.sampled_from([None, 0.5, 1.0]))
    def set_settings(self, data: st.DataObject, temperature: float | None) -> None:
        id = data.draw(st.sampled_from(self.visible("root", "user", "assistant")))
        record = SetSettings(id, Settings(temperature=temperature))
        self.edit(record, [("settings", id, temperature)])

    @precondition(lambda self: self.visible("user", "assistant"))
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.visible("user", "assistant")))
        self.edit(Delete(id), [("delete", id, None)])

    @precondition(lambda self: self.count > self.base)
    @rule()
    def undo(self) -> None:
        self.count -= 1
        self.do(Undo())

    @precondition(lambda self: self.count < len(self.edits))
    @rule()
    def redo(self) -> None:
        self.count += 1
        self.do(Redo())

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.visible("root", "user", "assistant")))
        self.do(SetPlace(id))

    @rule()
    def purge(self) -> None:
        seen, labels, temperatures = self.state()
        self.turns = {id: turn for id, turn in self.turns.items() if id in seen}
        kept = [("add", id, None) for id in seen]
        kept += [("label", id, label) for id, label in labels.items() if id in seen]
        kept += [("settings", id, value) for id, value in temperatures.items() if id in seen]
        self.edits, self.base, self.count = [kept], 1, 1
        self.do(Purge())

    @rule()
    def restart(self) -> None:
        self.tree = tree_from_json(same(self.tree))

    @invariant()
    def agrees_with_the_model(self) -> None:
        seen, labels, temperatures = self.state()
        tree = self.tree
        assert set(tree.walk()) == seen
        assert tree.place in seen
        for id in seen:
            node, turn = tree.node(id), self.turns[id]
            assert (node.parent, node.role, node.ids) == (turn.parent, turn.role, turn.ids)
            assert node.label == labels.get(id)
            path = [*reversed(self.above(id)), id]
            assert tree.path(id) == path
            assert tree.history(id) == self.history(id)
            assert tree.length(id) == len(self.history(id))
            set_there = [temperatures.get(i) for i in path if temperatures.get(i) is not None]
            assert tree.effective(id).temperature == (set_there[-1] if set_there else None)

    def teardown(self) -> None:
        replayed = Tree()
        for record in self.records:
            replayed.apply(decode(encode(record)))
        assert same(replayed) == same(self.tree)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
