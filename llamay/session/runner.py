"""Starts answers, and brings computed state back from disk, on a thread of its own.

What a request needs is taken from memory, else from segment files, else computed, in this order.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence

from llamay.engine import Branch, Engine, Request
from llamay.errors import LlamayError
from llamay.events import (
    AnswerEnded,
    AnswerFailed,
    AnswerStarted,
    Notice,
    Resumed,
    SessionEvent,
    TreeChanged,
)
from llamay.session.answers import Answers, sampling_params
from llamay.session.finding import Finder, Found
from llamay.session.folder import SessionFolder
from llamay.session.node import Node
from llamay.session.prompts import Prompts
from llamay.session.records import RUNNING, AppendIds, NodeState, Record, SetState
from llamay.session.saver import Saver
from llamay.session.states import States
from llamay.session.writing import Writer


class Runner:
    """Answers of one session, from the moment they are asked for."""

    def __init__(
        self,
        writer: Writer,
        states: States,
        saver: Saver,
        engine: Engine,
        folder: SessionFolder,
        weights: str,
        prefill_tokens_per_s: float | None,
    ) -> None:
        """prefill_tokens_per_s: as measured before, if it was"""
        self._writer = writer
        self._tree = writer.tree
        self._states = states
        self._saver = saver
        self._engine = engine
        self._finder = Finder(writer, states, engine, folder, weights)
        self._prompts = Prompts(engine.model, weights, self._tree.info.created)
        self._wake = threading.Condition()
        self._jobs: deque[tuple[int, ...]] = deque()
        self._waiting: dict[int, list[tuple[int, ...]]] = {}  # by the answer that they continue
        self._bare: deque[int] | None = deque()  # leaves to bring back; None: to be looked up
        self._looked_at: frozenset[int] = frozenset()
        self._closing = False
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._thread = threading.Thread(target=self._run, name="llamay-session", daemon=True)
        self._thread.start()

    # --- for any thread ---

    def start(self, answers: Sequence[int]) -> None:
        """Starts queued answers to one user's turn, or goes on with one that has tokens."""
        with self._wake:
            self._jobs.append(tuple(answers))
            self._wake.notify()

    def settle(self) -> None:
        """Has the contexts that are kept be those of the visible leaves, soon."""
        with self._wake:
            self._bare = None
            self._wake.notify()

    def stop(self, nodes: Sequence[int]) -> None:
        """Ends answers, under way or not, as far as they are."""
        with self._writer.lock:
            for node in nodes:
                answers = self._states.answers(node)
                if answers is None:
                    if self._tree.node(node).state == "queued":
                        self._give_up(node, "stopped")
                elif answers.generation and answers.is_running(node):
                    if all(other in nodes for other in answers.nodes):
                        answers.generation.cancel()
                    else:
                        answers.generation.stop(answers.nodes.index(node))

    def look_at(self, nodes: Sequence[int]) -> None:
        """Answers to read and write first."""
        with self._writer.lock:
            self._looked_at = frozenset(nodes)
            for answers in self._states.under_way():
                if answers.generation:
                    answers.generation.priority = self._priority(answers.nodes)

    def close(self, deadline: float) -> None:
        """Ends everything under way as `interrupted`, and the thread.

        deadline: on the monotonic clock; the engine gets no more time than that
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        with self._writer.lock:
            under_way = self._states.under_way()
            for node in list(self._tree.nodes.values()):
                if node.state == "queued":
                    self._give_up(node.id, "interrupted")
            for answers in under_way:
                answers.interrupted = True
                if answers.generation:
                    answers.generation.cancel()
        for answers in under_way:
            if answers.generation:
                answers.generation.done.wait(max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))

    # --- on its own thread ---

    def _run(self) -> None:
        self._resume()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._jobs or self._bare != deque())
                if self._closing:
                    return
                job = self._jobs.popleft() if self._jobs else None
            if job:
                self._start(job)
            else:
                self._restore_one()

    def _start(self, job: tuple[int, ...]) -> None:
        try:
            with self._writer.lock:
                nodes = [self._tree.node(id) for id in job if self._is_queued(id)]
                if not nodes:
                    return
                user = self._tree.node(nodes[0].parent)
                if self._waits(job, user):
                    return
            if self._read_turn(job, user):
                self._submit([node.id for node in nodes], user.id)
        except Exception as error:  # whatever it is, nobody waits for answers that never come
            self._fail(job, error)

    def _waits(self, job: tuple[int, ...], user: Node) -> bool:
        """Whether the answer that a turn continues is still written; the job then comes again."""
        if self._tree.node(user.parent).state not in RUNNING:
            return False
        self._waiting.setdefault(user.parent, []).append(job)
        return True

    def _read_turn(self, job: tuple[int, ...], user: Node) -> bool:
        """Gives a user's turn its tokens, if it has none yet; False if the job has to wait.

        So too those before it that were stopped before they had any.
        """
        with self._writer.lock:
            path = [self._tree.node(id) for id in self._tree.path(user.id)]
        for turn in path:
            if turn.role == "user" and not turn.ids and not self._render(job, turn):
                return False
        return True

    def _render(self, job: tuple[int, ...], user: Node) -> bool:
        turn = self._prompts.turn(self._tree, self._writer.lock, user.id)
        events: list[SessionEvent] = [TreeChanged((user.id,))]
        if turn.notice:
            events.append(Notice(turn.notice, "info"))
        with self._writer.lock:
            if self._waits(job, user):  # what it continues goes on since
                return False
            record = AppendIds(user.id, 0, turn.ids, keeps=turn.keeps)
            self._writer.change(record, events=events)
        return True

    def _submit(self, ids: Sequence[int], user: int) -> None:
        with self._writer.lock:
            first = self._tree.node(ids[0])
            history = self._tree.history(first.id if first.ids else user)
        state = self._finder.find(first.id if first.ids else user, history)
        exact = state.branch.context.numerics == self._engine.cache.numerics
        known = 0 if exact else state.branch.length
        with self._writer.lock:
            nodes = [self._tree.node(id) for id in ids if self._is_queued(id)]
            if not nodes or self._closing:
                state.branch.close()
                return
            params = [
                sampling_params(self._tree.effective(node.id), node.seed or 0) for node in nodes
            ]
            answers = Answers(
                nodes,
                len(history),
                self._engine.cache.store.layout.page_tokens,
                on_page=lambda node: self._page_full(state.branch, node),
                on_end=lambda node: self._ended(answers, state.branch, node),
                known=known,
            )
            request = Request(
                history[known:],
                tuple(params),
                start=None if exact else state.branch,
                answered=len(nodes[0].ids),
                priority=self._priority(answers.nodes),
                keep_read=True,
            )
            self._announce(nodes, state, len(history))
            answers.generation = self._engine.submit(
                request, lambda event: self._writer.later(lambda: answers.told(event))
            )
            self._states.begin(answers)

    def _announce(self, nodes: Sequence[Node], state: Found, length: int) -> None:
        records: list[Record] = []
        events: list[SessionEvent] = []
        rest = length - state.memory - state.disk
        for node in nodes:
            records.append(SetState(node.id, "reading", seconds=node.seconds))
            events.append(AnswerStarted(node.id, state.memory, state.disk, rest))
        events.append(TreeChanged(tuple(node.id for node in nodes)))
        self._writer.change(*records, events=events)

    def _fail(self, job: Sequence[int], error: Exception) -> None:
        known = isinstance(error, LlamayError)
        message = str(error) if known else f"unexpected {type(error).__name__}: {error}"
        with self._writer.lock:
            for node in job:
                waits = node in self._tree.nodes and self._tree.nodes[node].state in RUNNING
                if waits and self._states.answers(node) is None:
                    self._writer.change(
                        SetState(node, "failed", error=message),
                        events=[AnswerFailed(node, message), TreeChanged((node,))],
                    )
                    self._release(node)
        self.settle()

    # --- what is left when answers have ended ---

    def _page_full(self, prepared: Branch, node: int) -> None:
        """On the writer's thread: there is more to save of an answer.

        prepared: what its request was made of; the request has its own by now
        """
        prepared.close()
        self._saver.save(node)

    def _ended(self, answers: Answers, prepared: Branch, node: int) -> None:
        """On the writer's thread: an answer's end is written."""
        prepared.close()
        if answers.prefill_tokens_per_s:
            self.prefill_tokens_per_s = answers.prefill_tokens_per_s
        with self._writer.lock:
            self._states.end(answers, node)
            self._release(node)
        self._saver.save(node)
        self.settle()

    def _release(self, node: int) -> None:
        """Starts what waited for an answer to end."""
        for job in self._waiting.pop(node, ()):
            self.start(job)

    def _give_up(self, node: int, state: NodeState) -> None:
        record = SetState(node, state, "cancelled", seconds=self._tree.node(node).seconds)
        tokens = len(self._tree.node(node).ids)
        self._writer.change(
            record, events=[AnswerEnded(node, "cancelled", tokens, 0.0), TreeChanged((node,))]
        )
        self._release(node)

    def _is_queued(self, id: int) -> bool:
        return id in self._tree.nodes and self._tree.nodes[id].state == "queued"

    def _priority(self, nodes: Sequence[int]) -> int:
        return int(not self._looked_at.isdisjoint(nodes))

    # --- leaves whose state is not in memory ---

    def _resume(self) -> None:
        """After opening: the state of the active path first, then that of the other leaves."""
        begun = time.monotonic()
        leaves = self._states.settle()
        with self._writer.lock:
            place = self._tree.place
            leaves.sort(key=lambda leaf: place not in self._tree.path(leaf))
        tokens = 0
        for i, leaf in enumerate(leaves):
            with self._wake:
                if self._closing or self._jobs:
                    self._bare = None
                    return
            state = self._restore(leaf)
            tokens += state.disk if state else 0
            if tokens and i in (0, len(leaves) - 1):
                self._writer.tell(
                    Resumed(tokens, time.monotonic() - begun, self._prefill_seconds(tokens))
                )

    def _prefill_seconds(self, tokens: int) -> float | None:
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else None

    def _restore_one(self) -> None:
        with self._wake:
            look = self._bare is None
            if look:
                self._bare = deque()
        if look:
            bare = self._states.settle()
            with self._wake:
                if self._bare == deque():
                    self._bare.extend(bare)
            return
        with self._wake:
            node = self._bare.popleft() if self._bare else None
        if node is not None:
            self._restore(node)

    def _restore(self, node: int) -> Found | None:
        """Keeps a leaf's context again, as far as it is in memory or on disk."""
        try:
            with self._writer.lock:
                if not (self._tree.visible(node) and self._states.is_bare(node)):
                    return None
                history = self._tree.history(node)
            state = self._finder.find(node, history, gentle=True)
            self._states.keep_restored(node, state.branch)
            self._states.park(node)
            return state
        except Exception as error:  # whatever it is, the branch is computed when it is needed
            self._finder.warn(str(error))
            return None
