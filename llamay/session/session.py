"""A session: a conversation tree over contexts, saved as it goes; what front ends use."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from llamay.engine import Engine
from llamay.errors import SessionError
from llamay.events import Notice, PlaceChanged, SessionEvent, TreeChanged
from llamay.kv.snapshot import Key
from llamay.session.alternatives import alternatives
from llamay.session.answers import sampling_params
from llamay.session.asking import ask, further_answers, message_of, place_of_message, resumable
from llamay.session.catalog import Catalog
from llamay.session.duplicate import branch_of, write_duplicate
from llamay.session.folder import SessionFolder
from llamay.session.leaving import Goodbye, leave
from llamay.session.loading import Loaded
from llamay.session.naming import Naming
from llamay.session.opening import open_files
from llamay.session.records import (
    NO_SETTINGS,
    RUNNING,
    AddNode,
    Delete,
    Edit,
    Info,
    Record,
    Redo,
    SetInfo,
    SetLabel,
    SetPlace,
    SetSettings,
    SetState,
    Settings,
    Undo,
)
from llamay.session.running import Running
from llamay.session.states import Figures, PageCell, Where
from llamay.session.tree import Tree
from llamay.session.writing import Listener, Writer
from llamay.tokenizer import StreamingDecoder


class Session:
    """A conversation tree and the answers under way in it.

    Methods are for any thread, quick, and never wait for the engine unless they say so. Listeners
    are called on one thread, and must not close the session there.

    tree:      read it, and change it by the methods here
    read_only: why nothing can be changed, a sentence; or None
    """

    def __init__(
        self,
        home: Path,
        opened: SessionFolder | Loaded,
        path: Path,
        engine: Engine | None,
        key: Key | None,
    ) -> None:
        """Use `create` or `open`."""
        folder = opened if isinstance(opened, SessionFolder) else None
        self.id = opened.id.hex()
        self.tree = tree = opened.tree
        self.read_only: str | None = None
        self._home = home
        self._path = path
        self._key = key
        self._folder = folder
        self._engine = engine
        self._writer = Writer(tree, folder)
        self._lock = self._writer.lock
        self._running: Running | None = None
        self._naming: Naming | None = None
        self._goodbye: Goodbye | None = None
        self._closing = threading.Lock()

    @classmethod
    def create(
        cls,
        home: Path,
        engine: Engine,
        name: str | None = None,
        system: str = "",
        settings: Settings = NO_SETTINGS,
        key: Key | None = None,
        parent: str | None = None,
        model: str | None = None,
    ) -> "Session":
        """A new session below `home`.

        name:   None takes one from the first message
        key:    encrypts everything in it
        parent: the id of the session that it belongs under
        model:  what its user calls the engine's model; None takes the file's path
        Raises UsageError for a name or settings that cannot be, SessionError if it is taken or
        nothing can be written.
        """
        sampling_params(settings)
        if system:
            settings = replace(settings, system=system)
        weights = engine.model.identity().weights_sha256
        info = Info(None, parent, model or engine.model.source, weights, time.time())
        tree = Tree(settings, info)
        catalog = Catalog(home)
        folder = catalog.create(tree, name=name, key=key)
        catalog.set_last(folder.name)
        session = cls(home, folder, folder.path, engine, key)
        if name is None:
            session._naming = Naming(home, folder, session._writer)
        session._start()
        return session

    @classmethod
    def open(
        cls, home: Path, name: str, engine: Engine | None, key: Key | None = None
    ) -> "Session":
        """A session that was created before; its state comes back in the background.

        engine: None, or of a model with other weights, opens it read-only
        Raises SessionBusyError if a process has it open, and what `Catalog.open` raises.
        """
        opened, why = open_files(home, name, engine, key)
        writable = isinstance(opened, SessionFolder)
        path = Catalog(home).path(name)
        session = cls(home, opened, path, engine if writable else None, key)
        session._tell_notices(opened.notices)
        if why is None:
            session._start()
        else:
            session.read_only = f"{session.name} is read-only: {why}"
            session._tell_notices([session.read_only])
        return session

    # --- what it is ---

    @property
    def name(self) -> str:
        """The session's name."""
        return self._folder.name if self._folder else self._path.name

    @property
    def place(self) -> int:
        """The node that the next message continues from."""
        return self.tree.place

    def subscribe(self, listener: Listener) -> None:
        """Has `listener` hear every event; the first one also what was told before it came."""
        self._writer.subscribe(listener)

    # --- turns ---

    def go(self, node: int) -> None:
        """Makes a node the place of the next message."""
        self._change(SetPlace(node))

    def send(
        self,
        text: str,
        at: int | None = None,
        n: int = 1,
        settings: Settings = NO_SETTINGS,
    ) -> tuple[int, list[int]]:
        """Adds a user's turn and starts `n` answers to it, decoding together; returns their ids.

        at:       the node it continues from; None: the place
        settings: what is set at the turn
        While the answer that it continues is written, it waits for its end.
        """
        sampling_params(settings)
        with self._lock:
            parent = self.place if at is None else at
            user = self.tree.next_id
            turns = ask(self.tree, user, parent, text, n, self._weights, settings)
            answers = [turn.id for turn in turns[1:]]
            self._change(Edit((*turns, SetPlace(answers[0]))))
            self._begin(answers)
        if self._naming:
            self._naming.take(text)
        return user, answers

    def send_to(self, nodes: Sequence[int], text: str) -> list[int]:
        """Sends one text to several branches, whose answers decode together; returns these."""
        with self._lock:
            turns: list[AddNode] = []
            for node in nodes:
                user = self.tree.next_id + len(turns)
                turns += ask(self.tree, user, node, text, 1, self._weights)
            answers = [turn.id for turn in turns if turn.role == "assistant"]
            self._change(Edit(tuple(turns)))
            for answer in answers:
                self._begin([answer])
        return answers

    def edit(self, user_id: int, text: str, n: int = 1) -> tuple[int, list[int]]:
        """Sends another text in place of a user's turn, beside it."""
        return self.send(text, place_of_message(self.tree, user_id), n)

    def regenerate(self, id: int, n: int = 1) -> list[int]:
        """Further answers to the user's turn that `id` is or answers, with seeds not used yet."""
        self._require()
        with self._lock:
            user = message_of(self.tree, id)
            if user.model not in (None, self._weights):
                return self.edit(user.id, user.text, n)[1]  # its tokens are another model's
            answers = further_answers(self.tree, user.id, n, self._weights)
            ids = [answer.id for answer in answers]
            self._change(Edit((*answers, SetPlace(ids[0]))))
            self._begin(ids)
        return ids

    def sample(self, id: int, n: int) -> list[int]:
        """`regenerate`, for several."""
        return self.regenerate(id, n)

    def resume(self, answer_id: int) -> None:
        """Goes on with an interrupted, stopped or failed answer as if it had never ended."""
        self._require()
        with self._lock:
            node = resumable(self.tree, answer_id, self._weights)
            self._change(SetState(answer_id, "queued", seconds=node.seconds))
            self._begin([answer_id])

    def stop(self, answer_id: int | None = None) -> None:
        """Ends an answer where it is; None: all that are under way or wait."""
        runner = self._require().runner
        with self._lock:
            running = [node.id for node in self.tree.nodes.values() if node.state in RUNNING]
            runner.stop([id for id in running if answer_id in (None, id)])

    def look_at(self, nodes: Iterable[int]) -> None:
        """What is on the screen: its answers are read and written first."""
        if self._running:
            self._running.runner.look_at(list(nodes))

    def pieces(self, id: int) -> list[str]:
        """The text that each of a turn's tokens completes."""
        node = self.tree.node(id)
        if self._engine is None:
            return [node.text]
        decoder = StreamingDecoder(self._engine.model.tokenizer)
        return [decoder.feed(token) for token in node.ids]

    def alternatives(self, id: int, index: int, n: int = 4) -> list[tuple[str, float]]:
        """The likeliest tokens where a turn has its token `index`, with their log-probabilities.

        Waits for the engine. Empty if the state before the token is not in memory.
        """
        states, engine = self._require().states, self._engine
        with self._lock:
            before = self.tree.history(id)[: self.tree.start(id) + index]
            context = states.source(id)
        if context is None or engine is None:
            return []
        return alternatives(engine, context, before, n)

    def continue_with_model(self) -> None:
        """Lets a session go on that was made with other weights: this model reads the text anew.

        Raises SessionError if there is no model, or nothing that keeps it from going on.
        """
        if self._engine is None or self._folder is None or self._running is not None:
            raise SessionError(self.read_only or f"{self.name} has its own model already")
        model = self._engine.model
        weights = model.identity().weights_sha256
        info = replace(self.tree.info, model=model.source, weights_sha256=weights)
        self._writer.change(SetInfo(info))
        self._start()

    # --- edits ---

    def label(self, id: int, text: str) -> None:
        """Marks a turn; an empty text takes the mark off."""
        self._change(SetLabel(id, text or None))

    def set_settings(self, id: int, settings: Settings) -> None:
        """Sets what holds from a node on. Raises UsageError for a value out of range."""
        sampling_params(settings)
        self._change(SetSettings(id, settings))

    def delete(self, id: int) -> None:
        """Hides a node and all below it; answers under way there are stopped."""
        self._change(Delete(id))

    def undo(self) -> str:
        """Takes the last edit back and says what that was. Raises SessionError if there is none."""
        with self._lock:
            phrase = self.tree.undo_phrase
            self._change(Undo())
        return f"undid: {phrase}"

    def redo(self) -> str:
        """Makes the edit again that was taken back last."""
        with self._lock:
            phrase = self.tree.redo_phrase
            self._change(Redo())
        return f"did again: {phrase}"

    def duplicate(self, id: int, name: str | None = None) -> str:
        """Makes a new session of the turns up to `id`, and returns its name.

        What is saved of their state goes with them. Waits for the disk.
        Raises UsageError for a name that cannot be, SessionError if nothing can be written.
        """
        with self._lock:
            tree = branch_of(self.tree, id, self.id)
        path = self._folder.path if self._folder else self._path
        return write_duplicate(self._home, path, tree, name, self._key)

    # --- figures ---

    def where(self, id: int) -> Where:
        """Where the state of a turn's branch is."""
        if self._running is None:
            return Where(self.tree.length(id), 0, 0, "none")
        return self._running.states.where(id)

    def page_map(self, id: int) -> tuple[PageCell, ...]:
        """The pages of a turn's branch, in order of positions."""
        return self._running.states.page_map(id) if self._running else ()

    def figures(self) -> Figures:
        """What the engine holds. Raises SessionError without one."""
        return self._require().states.figures()

    # --- the end ---

    def save(self, wait: bool = True) -> None:
        """Has everything that ended on disk, and session.json; waits for that, if asked to.

        Raises SessionError if it waits and something could not be written.
        """
        running = self._require()
        with self._lock:
            leaves = self.tree.leaves()
        running.save(leaves, wait)

    def close(self) -> Goodbye:
        """Ends answers under way as `interrupted`, saves what fits in a second, and gives the
        session up. Waits for that; a second call returns the same.

        A session that took no name, since nobody wrote anything in it, is not kept.
        """
        with self._closing:
            if self._goodbye is None:
                unnamed = self._naming is not None and not self._naming.taken
                opened = self._folder or self._path
                self._goodbye = leave(self._home, opened, self._writer, self._running, unnamed)
        return self._goodbye

    # --- within ---

    @property
    def _weights(self) -> str | None:
        return self.tree.info.weights_sha256

    def _start(self) -> None:
        """Has the session run, on the model that it says is its own."""
        assert self._engine is not None
        assert self._folder is not None
        weights = self._engine.model.identity().weights_sha256
        self.read_only = None
        self._running = Running(self._home, self._folder, self._engine, self._writer, weights)

    def _tell_notices(self, sentences: Sequence[str]) -> None:
        self._writer.tell(*(Notice(sentence, "warning") for sentence in sentences))

    def _require(self) -> Running:
        if self._running is None or self._goodbye is not None:
            raise SessionError(self.read_only or f"{self.name} is closed; open it again")
        return self._running

    def _change(self, record: Record) -> None:
        """Makes a user's change, stops answers that it hid, and tells."""
        runner = self._require().runner
        with self._lock:
            place = self.place
            nodes = self._writer.change(record)
            hidden = [
                id
                for id, node in self.tree.nodes.items()
                if node.state in RUNNING and not self.tree.visible(id)
            ]
            events: list[SessionEvent] = [TreeChanged(nodes)] if nodes else []
            if self.place != place or isinstance(record, SetPlace):
                events.append(PlaceChanged(self.place))
            self._writer.tell(*events)
            if hidden:
                runner.stop(hidden)
        if nodes:
            runner.settle()

    def _begin(self, answers: Sequence[int]) -> None:
        self._require().runner.start(answers)
