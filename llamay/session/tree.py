"""The tree of turns: pure data, changed by records only.

A node is a turn. Its history, the token ids that a model reads, is what its parent's history keeps
of it and then its own ids:

    history(node) = history(parent)[:keeps] + ids    its own positions: [keeps, keeps + len(ids))

Deleting hides, so that it can be undone, until a purge.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from llamay.errors import SessionError
from llamay.sampling import child_seed
from llamay.session.edits import Edits, Step, phrase
from llamay.session.node import Node
from llamay.session.records import (
    NO_INFO,
    NO_SETTINGS,
    AddNode,
    AppendIds,
    Delete,
    Edit,
    Info,
    NodeState,
    Purge,
    Record,
    Redo,
    Role,
    SegmentRef,
    SetInfo,
    SetLabel,
    SetPlace,
    SetSegments,
    SetSettings,
    SetState,
    Settings,
    Undo,
)

__all__ = ["ROOT", "Node", "NodeState", "Role", "SegmentRef", "Settings", "Tree"]

ROOT = 0


class Tree:
    """All turns of a session.

    info:    what the session says of itself
    place:   the node that the next message continues from
    next_id: the id of the next node; ids are never used twice
    """

    def __init__(self, settings: Settings = NO_SETTINGS, info: Info = NO_INFO) -> None:
        self.info = info
        self.place = ROOT
        self.next_id = 1
        self.nodes = {ROOT: Node(ROOT, ROOT, "root", [""], keeps=0, settings=settings)}
        self.edits = Edits()
        self._children: dict[int, list[int]] = {ROOT: []}

    @classmethod
    def restored(
        cls,
        info: Info,
        nodes: Iterable[Node],
        *,
        place: int,
        next_id: int,
        edits: Edits,
    ) -> "Tree":
        """The tree of these nodes, the root first and parents before their children.

        Raises ValueError or LookupError if they are none.
        """
        tree = cls(info=info)
        for node in nodes:
            if node.id != ROOT:
                tree._children[node.parent].append(node.id)
                tree._children[node.id] = []
            tree.nodes[node.id] = node
        edited = [step.node for done in (*edits.made, *edits.undone) for step in done.steps]
        if not tree.visible(place) or not tree.nodes.keys() >= set(edited):
            raise ValueError("turns are missing")
        tree.place, tree.next_id, tree.edits = place, next_id, edits
        return tree

    @property
    def root(self) -> Node:
        """The node that every history begins at; it has no ids."""
        return self.nodes[ROOT]

    def node(self, id: int) -> Node:
        """The node, hidden or not. Raises SessionError if there is none."""
        try:
            return self.nodes[id]
        except KeyError:
            raise SessionError(f"turn {id} is not in this session; see its tree") from None

    def children(self, id: int) -> list[int]:
        """The children that are not hidden, in the order they were made."""
        return [child for child in self._children[id] if not self.nodes[child].hidden]

    def path(self, id: int) -> list[int]:
        """The nodes from the root to `id`, both of them."""
        path = [self.node(id).id]
        while path[-1] != ROOT:
            path.append(self.nodes[path[-1]].parent)
        return path[::-1]

    def visible(self, id: int) -> bool:
        """Whether the node is there and neither it nor anything above it is hidden."""
        return id in self.nodes and not any(self.nodes[i].hidden for i in self.path(id))

    def walk(self, id: int = ROOT) -> Iterator[int]:
        """The visible nodes from `id` down, each before its children."""
        waiting = [id]
        while waiting:
            yield (node := waiting.pop())
            waiting += reversed(self.children(node))

    def leaves(self) -> list[int]:
        """The visible nodes without visible children, in the order of the tree."""
        return [id for id in self.walk() if not self.children(id)]

    def search(self, text: str) -> list[int]:
        """The visible nodes with `text` in what they say or in their label, in whatever case."""
        wanted = text.casefold()
        return [
            id
            for id in self.walk()
            if wanted in self.nodes[id].text.casefold()
            or wanted in (self.nodes[id].label or "").casefold()
        ]

    def start(self, id: int) -> int:
        """The position of the node's first own token."""
        node = self.node(id)
        return self.length(node.parent) if node.keeps is None else node.keeps

    def length(self, id: int) -> int:
        """How many tokens the node's history has."""
        own = 0
        while True:
            node = self.node(id)
            own += len(node.ids)
            if node.keeps is not None:
                return node.keeps + own
            id = node.parent

    def history(self, id: int) -> list[int]:
        """The token ids up to and with the node's own."""
        ids: list[int] = []
        for node in map(self.nodes.__getitem__, self.path(id)):
            if node.keeps is not None:
                del ids[node.keeps :]
            ids += node.ids
        return ids

    def effective(self, id: int) -> Settings:
        """The settings that hold at the node: the overrides along its path."""
        settings = NO_SETTINGS
        for node in self.path(id):
            settings = self.nodes[node].settings.over(settings)
        return settings

    def messages(self, id: int) -> list[dict[str, str]]:
        """The conversation up to and with the node, as chat templates take it."""
        system = self.effective(id).system
        messages = [{"role": "system", "content": system}] if system else []
        for node in map(self.nodes.__getitem__, self.path(id)[1:]):
            messages.append({"role": node.role, "content": node.text})
        return messages

    def next_seed_index(self, user: int) -> int:
        """The first seed index that no answer to the turn ever had, deleted ones included."""
        first = self.node(user).first_free_seed
        indices = (self.nodes[child].seed_index for child in self._children[user])
        return max([first, *(index + 1 for index in indices if index is not None)])

    def seed(self, user: int, index: int) -> int:
        """The seed of the answer with that seed index to a user's turn."""
        return child_seed(self.effective(user).seed or 0, index)

    @property
    def has_hidden(self) -> bool:
        """Whether a purge would forget nodes."""
        return any(node.hidden for node in self.nodes.values())

    @property
    def can_undo(self) -> bool:
        """Whether there is an edit to take back."""
        return bool(self.edits.made)

    @property
    def can_redo(self) -> bool:
        """Whether there is an edit to make again."""
        return bool(self.edits.undone)

    @property
    def undo_phrase(self) -> str | None:
        """What an undo would take back, such as `2 answers`; None if there is nothing."""
        return phrase(self.edits.made, self.nodes)

    @property
    def redo_phrase(self) -> str | None:
        """What a redo would bring back; None if there is nothing."""
        return phrase(self.edits.undone, self.nodes)

    def apply(self, record: Record) -> tuple[int, ...]:
        """Makes a change and returns the nodes that it added, hid, showed or changed.

        Raises SessionError, with nothing changed, if the record does not fit the tree.
        """
        match record:
            case AddNode() | SetLabel() | SetSettings() | Delete():
                return self._edit((record,))
            case Edit():
                return self._edit(record.changes)
            case Undo():
                return self._go_back(*self.edits.undo(self.nodes, self.place))
            case Redo():
                return self._go_back(*self.edits.redo(self.nodes, self.place))
            case Purge():
                return self._purge()
            case SetInfo():
                self.info = record.info
                return ()
            case SetPlace():
                self._require_visible(record.node)
                self.place = record.node
                return ()
            case AppendIds():
                return self._append(record)
            case SetSegments():
                return self._set_segments(record)
            case SetState():
                node = self.node(record.node)
                node.state, node.error = record.state, record.error
                node.finish_reason, node.seconds = record.finish_reason, record.seconds
                return (node.id,)

    def _set_segments(self, record: SetSegments) -> tuple[int, ...]:
        position, end = self.start(record.node), self.length(record.node)
        for segment in record.segments:
            if not position <= segment.start < segment.end <= end:
                raise SessionError(
                    f"segment {segment.name} has positions [{segment.start}, {segment.end}), "
                    f"expected some of [{position}, {end}) of turn {record.node}"
                )
            position = segment.end
        self.nodes[record.node].segments = record.segments
        return ()

    def _append(self, record: AppendIds) -> tuple[int, ...]:
        node = self.node(record.node)
        if record.at != len(node.ids):
            raise SessionError(
                f"turn {node.id} has {len(node.ids)} tokens, so none can follow the first "
                f"{record.at}; a record is missing"
            )
        self._check_logprobs(node.role, record)
        if record.keeps is not None and node.keeps is not None:
            raise SessionError(f"turn {node.id} has its place already; it cannot move")
        if record.ids and node.keeps is None:
            node.keeps = self._kept(node.parent, record.keeps)
        node.ids += record.ids
        node.logprobs += record.logprobs
        if record.text:
            node.pieces.append(record.text)
        return (node.id,)

    def _edit(self, changes: tuple[Record, ...]) -> tuple[int, ...]:
        place, next_id = self.place, self.next_id
        steps: list[Step] = []
        try:
            for change in changes:
                steps += self._step(change)
        except SessionError:
            for step in reversed(steps):
                setattr(self.nodes[step.node], step.attribute, step.before)
            self._forget([id for id in self.nodes if id >= next_id])
            self.place, self.next_id = place, next_id
            raise
        if steps:
            self.edits.add(steps, place)
        self._settle()
        return tuple(step.node for step in steps)

    def _step(self, change: Record) -> list[Step]:
        match change:
            case AddNode():
                self._add(change)
                return [Step("hidden", change.id, True, False)]
            case SetLabel():
                return [self._set(change.node, "label", change.label)]
            case SetSettings():
                return [self._set(change.node, "settings", change.settings)]
            case Delete(node=node) if node != ROOT:
                return [self._set(node, "hidden", True)]
            case SetPlace():
                self._require_visible(change.node)
                self.place = change.node
                return []
            case _:
                raise SessionError(f"{change} is no edit of a tree; make it by itself")

    def _set(self, id: int, attribute: str, value: Any) -> Step:
        self._require_visible(id)
        before = getattr(self.nodes[id], attribute)
        setattr(self.nodes[id], attribute, value)
        return Step(attribute, id, before, value)

    def _add(self, new: AddNode) -> None:
        self._require_visible(new.parent)
        parent = self.nodes[new.parent]
        answers = new.role == "assistant" and parent.role == "user"
        asks = new.role == "user" and parent.role != "user"
        if new.id < self.next_id or not (answers or asks):
            raise SessionError(
                f"turn {new.id} ({new.role}) cannot follow turn {parent.id} ({parent.role}); "
                f"expected an answer after a message, and {self.next_id} or more as its number"
            )
        self._check_logprobs(new.role, new)
        keeps = new.keeps
        if keeps is not None or new.ids:
            keeps = self._kept(new.parent, keeps)
        self.nodes[new.id] = Node(
            new.id,
            new.parent,
            new.role,
            [new.text],
            list(new.ids),
            list(new.logprobs),
            keeps,
            settings=new.settings,
            seed_index=new.seed_index,
            seed=new.seed,
            state=new.state,
            created=new.created,
            model=new.model,
        )
        self._children[new.id] = []
        self._children[new.parent].append(new.id)
        self.next_id = new.id + 1

    def _kept(self, parent: int, keeps: int | None) -> int:
        length = self.length(parent)
        if keeps is None:
            return length
        if not 0 <= keeps <= length:
            raise SessionError(f"turn {parent} has {length} tokens; {keeps} of them cannot be kept")
        return keeps

    def _check_logprobs(self, role: Role, record: AddNode | AppendIds) -> None:
        expected = len(record.ids) if role == "assistant" else 0
        if len(record.logprobs) != expected:
            raise SessionError(
                f"expected {expected} log-probabilities with {len(record.ids)} tokens of a {role} "
                f"turn, found {len(record.logprobs)}"
            )

    def _require_visible(self, id: int) -> None:
        if not self.visible(id):
            raise SessionError(f"turn {id} is not in this session, or deleted; see its tree")

    def _go_back(self, place: int, steps: list[Step]) -> tuple[int, ...]:
        self.place = place
        self._settle()
        return tuple(step.node for step in steps)

    def _settle(self) -> None:
        """Moves the place up to where it is visible."""
        for id in self.path(self.place):
            if self.nodes[id].hidden:
                self.place = self.nodes[id].parent
                return

    def _purge(self) -> tuple[int, ...]:
        seen = set(self.walk())
        gone = [id for id in self.nodes if id not in seen]
        for id in gone:
            parent = self.nodes[self.nodes[id].parent]
            parent.first_free_seed = max(parent.first_free_seed, self.next_seed_index(parent.id))
        self._forget(gone)
        self.edits.clear()
        return tuple(gone)

    def _forget(self, gone: list[int]) -> None:
        for id in gone:
            self._children[self.nodes[id].parent].remove(id)
        for id in gone:
            del self.nodes[id], self._children[id]
