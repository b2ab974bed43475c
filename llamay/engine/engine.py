"""The engine: a model, its cache, and a thread on which branches decode together."""

import functools
import queue
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from llamay.engine.branch import Branch
from llamay.engine.generation import Generation, Listener, Request
from llamay.engine.model import Model
from llamay.engine.scheduler import Counters, Scheduler
from llamay.engine.worker import Worker
from llamay.errors import UsageError
from llamay.events import Event, Failed, PrefillProgress
from llamay.formats import KVPrecision
from llamay.hub import DEFAULT_MODEL, Progress
from llamay.hub.progress import silent
from llamay.kv import Cache, Context
from llamay.kv.snapshot import Extended, Key, Restored, extend_from_segments, read_snapshot
from llamay.sampling import SamplingParams, child_seed

T = TypeVar("T")


class Engine:
    """A model ready to answer, from any thread.

    >>> engine = Engine.load("smollm2:135m")
    >>> base = engine.prefill("You are reviewing a database migration.")
    >>> branches = base.fork(8)
    >>> for event in engine.generate(branches, SamplingParams(max_tokens=20)):
    ...     pass
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        *,
        context_size: int | None = None,
        worker: Worker | None = None,
    ) -> None:
        """context_size: most tokens in a context; None takes the model's own

        worker: the thread that made `model`; None starts one
        Raises UsageError for a context size below 1.
        """
        if context_size is not None and context_size < 1:
            raise UsageError(f"ctx-size: expected 1 or more, found {context_size}")
        self.model = model
        self.cache = cache
        self.context_size = context_size or model.decoder.spec.context_length
        self._worker = worker or Worker()
        # Not the engine itself, which its own thread would then keep from being collected.
        self._new_branch = functools.partial(Branch, model, self._worker)
        self._scheduler = Scheduler(model, cache, self.context_size, self._new_branch)
        self._worker.attach(self._scheduler)
        # An engine that nobody holds ends its thread.
        self.close: Callable[[], object] = weakref.finalize(self, self._worker.stop)

    @classmethod
    def load(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        device: str = "auto",
        threads: int | None = None,
        page_tokens: int = 64,
        precision: KVPrecision = KVPrecision.F32,
        context_size: int | None = None,
        budget_bytes: int | None = None,
        progress: Progress = silent,
    ) -> "Engine":
        """Opens a model by path or name; the default one is pulled if it is not here.

        budget_bytes: most memory for keys and values; None takes half of what this process may use
        Raises HubError if it cannot be found, GGUFError or UnsupportedModelError if it cannot be
        run, UsageError for an option out of range.
        """
        worker = Worker()
        try:
            opened = worker.call(
                lambda: Model.load(model, device=device, threads=threads, progress=progress)
            )
            cache = worker.call(lambda: opened.new_cache(page_tokens, precision, budget_bytes))
            return cls(opened, cache, context_size=context_size, worker=worker)
        except BaseException:
            worker.stop()
            raise

    @property
    def alive(self) -> bool:
        """Whether it still takes requests."""
        return self._worker.alive

    @property
    def counters(self) -> Counters:
        """What it has done so far, a copy."""
        return replace(self._scheduler.counters)

    def submit(self, request: Request, listener: Listener) -> Generation:
        """Starts a request; `listener` hears its events on the engine's thread.

        It must be quick and must not raise: an error of its ends the request.
        Raises EngineStoppedError.
        """
        return self._start(Generation(request, listener))

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """The events of a request as they come; closing the iterator cancels it.

        Raises what ends the request, once all that was told before has been taken.
        """
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        return self._events(Generation(request, events.put), events)

    def prefill(
        self,
        prompt: str | Sequence[int],
        *,
        start: Branch | None = None,
        on_progress: Callable[[PrefillProgress], object] = lambda progress: None,
    ) -> Branch:
        """Reads a text or tokens, after those of `start` if it is given, and waits for the end.

        What was read before is found and not read again.
        Raises ContextFullError, BudgetError, UsageError if there is nothing to read, or
        EngineStoppedError.
        """
        ids = self.model.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        generation = Generation(Request(ids, start=start), events.put)
        for event in self._events(generation, events):
            if isinstance(event, PrefillProgress):
                on_progress(event)
        return generation.branches[0]

    def generate(
        self, branches: Sequence[Branch], params: SamplingParams | Sequence[SamplingParams]
    ) -> Generator[Event, None, None]:
        """Continues branches, all in one step at a time, until each has ended.

        params: one for each branch; or one for all, and branch i then draws with the seed of the
                i-th child
        The token that ends an answer is not committed to its context. Closing the iterator stops
        all, after a whole step. Raises what ends a branch by an error; ContextBusyError if one is
        given twice or continued already, or is changed meanwhile.
        """
        if isinstance(params, SamplingParams):
            seeds = [child_seed(params.seed, index) for index in range(len(branches))]
            params = [replace(params, seed=seed) for seed in seeds]
        if len(params) != len(branches):
            raise ValueError(f"{len(branches)} branches, and {len(params)} parameters")
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        contexts = [branch.context for branch in branches]
        generation = Generation(Request((), tuple(params)), events.put, contexts)
        return self._events(generation, events)

    def restore(self, path: Path | str, *, key: Key | None = None) -> Branch:
        """A branch that continues from a snapshot file; see `restored` for what it says of itself.

        Raises SnapshotError and its kinds, or BudgetError.
        """
        return self.branch(self.restored(path, key=key).context)

    def restored(self, path: Path | str, *, key: Key | None = None) -> Restored:
        """What a snapshot file holds, with its header and whether it continues exactly."""

        def read() -> Restored:
            restored = read_snapshot(self.cache, Path(path), identity, key=key)
            self._scheduler.counters.restored_tokens += restored.context.length
            return restored

        identity = self.model.identity()
        return read() if self.model.moves_rows_anywhere else self.call(read)

    def branch(self, context: Context) -> Branch:
        """The branch of a context of this engine's cache."""
        return self._new_branch(context)

    def extend(
        self,
        context: Context,
        paths: Sequence[Path],
        history: Sequence[int],
        *,
        key: Key | None = None,
    ) -> Extended:
        """Appends to a context what it lacks of `history`; see `extend_from_segments`.

        The files are read on the calling thread, while others' answers go on.
        Raises what that does, or EngineStoppedError.
        """
        identity = self.model.identity()
        extended = extend_from_segments(
            self.cache, context, paths, identity, history, key=key, run=self.call
        )
        self._scheduler.counters.restored_tokens += extended.positions
        return extended

    def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the engine's thread, between two steps, and waits for its result.

        Raises what it raises, or EngineStoppedError.
        """
        return self._worker.call(function)

    def _start(self, generation: Generation) -> Generation:
        scheduler = self._scheduler

        def taken_up(future: Future[None]) -> None:
            error = future.exception()
            if error is not None and not generation.done.is_set():
                scheduler.refuse(generation, error)

        # The engine may have ended before its thread takes the request up.
        self._worker.post(lambda: scheduler.add(generation)).add_done_callback(taken_up)
        return generation

    def _events(
        self, generation: Generation, events: "queue.SimpleQueue[Event | None]"
    ) -> Generator[Event, None, None]:
        generation.on_done = lambda: events.put(None)
        self._start(generation)
        try:
            while (event := events.get()) is not None:
                if isinstance(event, Failed):
                    raise event.error
                yield event
        finally:
            if not generation.done.is_set():
                generation.cancel()
                generation.done.wait()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
