"""A request to the engine, and what becomes of it."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llamay.engine.answer import Answer
from llamay.engine.branch import Branch
from llamay.events import Event
from llamay.kv import Context
from llamay.sampling import SamplingParams

Listener: TypeAlias = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to read, and answers to write after them.

    ids:      the tokens; what was read before of them is found and not read again
    params:   one for each answer; all answers continue from one reading, and decode together
    start:    a branch that `ids` are read after, in a fork of it; None: nothing stands before them
    answered: the last tokens, of `start` and `ids` together, that an earlier run of this answer
              wrote; the answer then goes on as if it had never stopped
    priority: higher ones are read first
    speculate: whether likely tokens are computed ahead; the answer is the same without
    keep_read: whether what was read stays, a branch for each answer, if it is cancelled before all
              was
    """

    ids: Sequence[int]
    params: tuple[SamplingParams, ...] = ()
    start: Branch | None = None
    answered: int = 0
    priority: int = 0
    speculate: bool = True
    keep_read: bool = False


class Generation:
    """A request under way. The methods are for any thread; the rest is the scheduler's.

    priority: may be changed at any time
    done:     set when nothing more will happen
    branches: from the first event of an answer on, one for each answer; the one that was read if no
              answer was asked for
    reading:  what is read, from when it is taken up; grows step by step until the answers begin
    error:    what ended it, or None
    """

    def __init__(
        self, request: Request, listener: Listener, contexts: Sequence[Context] | None = None
    ) -> None:
        """contexts: continued themselves, one for each answer; the request then has no ids."""
        self.request = request
        self.listener = listener
        self.priority = request.priority
        self.done = threading.Event()
        self.branches: list[Branch] = []
        self.reading: Branch | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.stopped: set[int] = set()  # branches that are cancelled by themselves
        self.on_cancel: Callable[[], object] = lambda: None
        self.on_done: Callable[[], object] = lambda: None
        self.continues_given = contexts is not None  # then they stay whatever happens
        # A request waits (no contexts), reads (one context and tokens left), then writes.
        self.contexts = list(contexts or ())
        self.unread: Sequence[int] = request.ids
        self.cached = 0
        self.answers: list[Answer] = []
        self.started = time.perf_counter()

    def cancel(self) -> None:
        """Ends it within a step; what was written stays in its branches."""
        self.cancelled = True
        self.on_cancel()

    def stop(self, branch: int) -> None:
        """Ends one of its answers after the step under way; the others go on."""
        self.stopped.add(branch)
