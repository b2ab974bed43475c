"""Engines over models that tests know, and what a request told."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamay.engine import Engine, Generation, Request
from llamay.events import Event, Failed, Finished, PrefillProgress, TextDelta
from llamay.sampling import SamplingParams
from tests.tiny_models import VOCAB, random_integers


def prompt_ids(count: int, seed: int = 1) -> list[int]:
    """Random tokens."""
    return (random_integers(seed, "prompt", count) % len(VOCAB)).tolist()


@dataclass
class Told:
    """What the events said of one branch; equal for runs that computed the same."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list, compare=False)
    reason: str | None = None
    tokens: int | None = None
    error: BaseException | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def hear(self, event: Event) -> None:
        if isinstance(event, PrefillProgress):
            return
        assert self.reason is None, "an event after the end"
        assert self.error is None, "an event after a failure"
        match event:
            case TextDelta():
                self.ids += event.ids
                self.logprobs += event.logprobs
                self.texts.append(event.text)
            case Finished():
                self.reason, self.tokens = event.reason, event.tokens
            case Failed():
                self.error = event.error


class Listener:
    """Keeps what a request tells, branch by branch, and says when it has told enough."""

    def __init__(self, branches: int = 1) -> None:
        self.told = [Told() for _ in range(branches)]
        self.progress: list[PrefillProgress] = []
        self.events: list[Event] = []
        self.on_event: Callable[[Event], object] = lambda event: None
        self.heard_token = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, PrefillProgress):
            self.progress.append(event)
        else:
            self.told[event.branch].hear(event)
        if isinstance(event, TextDelta):
            self.heard_token.set()
        self.on_event(event)


def run(engine: Engine, request: Request) -> Listener:
    """Runs a request to its end."""
    listener = Listener(max(1, len(request.params)))
    wait(engine.submit(request, listener))
    return listener


def wait(*generations: Generation) -> None:
    """Until all are done."""
    for generation in generations:
        assert generation.done.wait(60), "a request came to no end"


def answer(engine: Engine, ids: Sequence[int], params: SamplingParams) -> Told:
    """One answer of an engine that finds nothing to match."""
    engine.cache.clear_tree()
    (told,) = run(engine, Request(ids, (params,), speculate=False)).told
    return told
