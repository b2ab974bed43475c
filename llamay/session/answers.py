"""Answers of one request on their way from the engine into the tree."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from llamay.engine import Generation
from llamay.events import (
    AnswerEnded,
    AnswerFailed,
    AnswerProgress,
    AnswerText,
    Event,
    Failed,
    Finished,
    PrefillProgress,
    SessionEvent,
    TextDelta,
    TreeChanged,
)
from llamay.sampling import SamplingParams
from llamay.session.node import Node
from llamay.session.records import AppendIds, NodeState, Record, SetState, Settings
from llamay.session.speed import MIN_TOKENS
from llamay.session.writing import Told

READ_S = 1.0  # after which what was read of a prompt since is saved

_SAMPLING = {field.name for field in fields(SamplingParams)}


def sampling_params(settings: Settings, seed: int | None = None) -> SamplingParams:
    """What an answer is sampled with. Raises UsageError for a value out of range.

    seed: the answer's own
    """
    names = [field.name for field in fields(settings) if field.name in _SAMPLING]
    values = {name: getattr(settings, name) for name in names}
    params = SamplingParams(**{name: item for name, item in values.items() if item is not None})
    return params if seed is None else replace(params, seed=seed)


class Answers:
    """What a request's events mean for the tree; `told` is for the writer's thread.

    nodes:     the answer of each of the request's branches; length: tokens of each, all before
               included
    known:     tokens of the prompt that the request was not given, since they were known before
    on_page:   called, with the answer, when there is more to save of it: now and then while its
               prompt is read, at its first token, and when a page is full
    on_end:    called, with the answer, when its end is written
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        length: int,
        page_tokens: int,
        *,
        on_page: Callable[[int], object],
        on_end: Callable[[int], object],
        known: int = 0,
    ) -> None:
        self.nodes = [node.id for node in nodes]
        self._start = length - len(nodes[0].ids)
        self._page_tokens = page_tokens
        self._on_page = on_page
        self._on_end = on_end
        self.known = known
        self.generation: Generation | None = None
        self.interrupted = False  # what is cancelled from now on is, because the session closes
        self.prefill_tokens_per_s: float | None = None
        self._count = [len(node.ids) for node in nodes]
        self._read_saved_s = 0.0  # since the request came
        self._seconds = [node.seconds or 0.0 for node in nodes]
        self._begun = [False] * len(nodes)
        self._rest = [""] * len(nodes)  # text that came without tokens
        self._running = set(range(len(nodes)))

    def is_running(self, node: int) -> bool:
        """Whether it has not ended yet."""
        return node in self.nodes and self.nodes.index(node) in self._running

    def told(self, event: Event) -> Told | None:
        """What to write, apply and tell."""
        match event:
            case PrefillProgress():
                return self._progress(event)
            case TextDelta() if not event.ids:
                # What the engine held back. If the answer was cancelled, it may still go on, and
                # then its text is that of its tokens.
                self._rest[event.branch] = event.text
                return None
            case TextDelta():
                return self._text(event)
            case Finished():
                return self._finished(event)
            case Failed():
                message = str(event.error)
                state = SetState(
                    self.nodes[event.branch], "failed", error=message, seconds=self._spent(event)
                )
                return self._end(event.branch, state, AnswerFailed(state.node, message))

    def _progress(self, event: PrefillProgress) -> Told:
        total, cached = event.total + self.known, event.cached + self.known
        if event.done >= MIN_TOKENS and event.seconds > 0:
            self.prefill_tokens_per_s = event.done / event.seconds
        events = [
            AnswerProgress(node, total, cached, cached + event.done, event.seconds)
            for node in self.nodes
        ]
        if event.seconds < self._read_saved_s + READ_S:
            return Told(events=events)
        self._read_saved_s = event.seconds
        return Told(events=events, then=lambda: self._on_page(self.nodes[0]))

    def _text(self, event: TextDelta) -> Told:
        node, branch = self.nodes[event.branch], event.branch
        records: list[Record] = []
        events: list[SessionEvent] = []
        begins = not self._begun[branch]
        if begins:
            self._begun[branch] = True
            records.append(SetState(node, "writing", seconds=self._seconds[branch] or None))
            events.append(TreeChanged((node,)))
        records.append(AppendIds(node, self._count[branch], event.ids, event.logprobs, event.text))
        before = self._start + self._count[branch]
        self._count[branch] += len(event.ids)
        events.append(AnswerText(node, event.ids, event.logprobs, event.text))
        pages = before // self._page_tokens, (before + len(event.ids)) // self._page_tokens
        if begins or pages[0] != pages[1]:
            return Told(records, events, then=lambda: self._on_page(node))
        return Told(records, events)

    def _finished(self, event: Finished) -> Told:
        branch, node = event.branch, self.nodes[event.branch]
        tokens, seconds = self._count[branch], self._spent(event)
        state: NodeState = "done"
        if event.reason == "cancelled":
            state = "interrupted" if self.interrupted else "stopped"
        told = self._end(
            branch,
            SetState(node, state, event.reason, seconds=seconds),
            AnswerEnded(node, event.reason, tokens, seconds),
        )
        if state == "done" and (rest := self._rest[branch]):
            return Told(
                [AppendIds(node, tokens, text=rest), *told.records],
                [AnswerText(node, (), (), rest), *told.events],
                then=told.then,
            )
        return told

    def _spent(self, event: Finished | Failed) -> float:
        seconds = event.seconds if isinstance(event, Finished) else 0.0
        return self._seconds[event.branch] + seconds

    def _end(self, branch: int, state: SetState, event: SessionEvent) -> Told:
        self._running.discard(branch)
        node = state.node
        return Told([state], [event, TreeChanged((node,))], then=lambda: self._on_end(node))
