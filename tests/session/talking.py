"""Sessions over tiny models, and what they told."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from llamay.engine import Engine, Request
from llamay.events import (
    AnswerEnded,
    AnswerFailed,
    AnswerProgress,
    AnswerText,
    Event,
    SessionEvent,
    TextDelta,
)
from llamay.mlx_kernels import Control
from llamay.sampling import SamplingParams
from llamay.session import Session
from llamay.session.tree import Tree

E = TypeVar("E")

LONG = "one two three four five six seven eight nine ten " * 46  # over 2,000 tokens of a tiny model


@dataclass
class Ear:
    """Hears a session, and says when something has happened."""

    events: list[SessionEvent] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, event: SessionEvent) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type[E], count: int = 1) -> list[E]:
        """Until so many events of a kind came."""
        with self.changed:
            came = self.changed.wait_for(lambda: len(self.of(kind)) >= count, 60)
        assert came, f"{len(self.of(kind))} of {count} {kind.__name__}: {self.events[-20:]}"
        return self.of(kind)

    def wait_ended(self, *nodes: int) -> None:
        """Until these answers have ended, in whatever way, as often as they are named."""

        def ended() -> list[int]:
            return sorted(e.node for e in self.events if isinstance(e, AnswerEnded | AnswerFailed))

        def come() -> bool:
            return all(ended().count(node) >= nodes.count(node) for node in nodes)

        with self.changed:
            assert self.changed.wait_for(come, 60), f"{nodes} have not ended: {self.events[-20:]}"

    def wait_tokens(self, node: int, count: int) -> None:
        """Until an answer has told so many tokens."""

        def told() -> int:
            return sum(len(e.ids) for e in self.of(AnswerText) if e.node == node)

        with self.changed:
            assert self.changed.wait_for(lambda: told() >= count, 60), f"{told()} of {count}"

    def wait_read(self, node: int, count: int) -> None:
        """Until so many tokens of an answer's prompt are read."""

        def read() -> int:
            return max([e.done for e in self.of(AnswerProgress) if e.node == node], default=0)

        with self.changed:
            assert self.changed.wait_for(lambda: read() >= count, 60), f"{read()} of {count}"


def hear(session: Session) -> Ear:
    ear = Ear()
    session.subscribe(ear)
    return ear


@contextmanager
def engine_of(model: Path, step_s: float = 0.0, **options: Any) -> Iterator[Engine]:
    """step_s: what a step takes at least, so that there is a time between steps"""
    with Engine.load(str(model), threads=1, **options) as engine:

        def slowed(step: Callable[[], Any], control: Control) -> Any:
            time.sleep(step_s)
            return step()

        if step_s:
            around_steps(engine, slowed)
        yield engine
        engine.cache.check()


def around_steps(
    engine: Engine, around: Callable[[Callable[[], Any], Control], Any]
) -> Callable[[], None]:
    """Has `around` run each step, which it is given with its control; returns what ends that."""
    decoder = engine.model.decoder
    step = decoder.step

    def wrapped(*arguments: Any) -> Any:
        return around(lambda: step(*arguments), arguments[2])

    decoder.step = wrapped  # type: ignore[method-assign]
    return lambda: setattr(decoder, "step", step)


@dataclass
class Plain:
    """What an engine writes that knows nothing."""

    ids: list[int]
    logprobs: list[float]
    text: str


def plain(model: Path, ids: Sequence[int], params: SamplingParams, **options: Any) -> Plain:
    """An answer without any session, in an engine of its own."""
    told = Plain([], [], "")

    def listen(event: Event) -> None:
        if isinstance(event, TextDelta):
            told.ids += event.ids
            told.logprobs += event.logprobs
            told.text += event.text

    with Engine.load(str(model), threads=1, **options) as engine:
        generation = engine.submit(Request(ids, (params,), speculate=False), listen)
        assert generation.done.wait(60)
        assert generation.error is None, generation.error
    return told


def written(tree: Tree, node: int) -> Plain:
    """What an answer of a session has."""
    answer = tree.node(node)
    return Plain(answer.ids, answer.logprobs, answer.text)
