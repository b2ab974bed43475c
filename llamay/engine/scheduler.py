"""What runs in the next step: every answer under way, and a piece of what is being read.

One thread calls all of this. Which requests share a step changes no bit of any of them.
"""

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from llamay.engine.answer import Answer
from llamay.engine.branch import Branch
from llamay.engine.generation import Generation
from llamay.engine.model import Model
from llamay.errors import CancelledError, ContextBusyError, ContextFullError, UsageError
from llamay.events import Event, Failed, Finished, PrefillProgress
from llamay.kv import Cache, Context
from llamay.mlx_kernels import Control, Float32Array, StepLogits
from llamay.model.decoder import Rows

STEP_SECONDS = 0.05  # a step's share of reading is chosen so that it lasts about this long
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 32, 512
MAX_ANSWERS = 64  # in a step


@dataclass(slots=True)
class Counters:
    """What an engine has done since it was made.

    prefilled: tokens of prompts that were computed; matched: found in memory instead; restored:
               read from files instead
    decoded:   tokens written as answers; drafted: computed ahead; accepted: those that were right
    """

    prefilled_tokens: int = 0
    matched_tokens: int = 0
    restored_tokens: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """One context's rows of a step; what takes their logits, and what takes an error instead."""

    generation: Generation
    rows: Rows
    advance: Callable[[StepLogits], list[Event]]
    fail: Callable[[BaseException], list[Event]]


class Scheduler:
    """Requests under way, in the order in which they came.

    new_branch: makes a branch of a context, for whoever made a request
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        context_size: int,
        new_branch: Callable[[Context], Branch],
    ) -> None:
        self._model = model
        self._cache = cache
        self._context_size = context_size
        self._new_branch = new_branch
        self._running: list[Generation] = []
        self._in_step: list[Generation] = []
        self._control = Control()
        self._step_tokens = MIN_STEP_TOKENS
        self.counters = Counters()

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._running)

    def add(self, generation: Generation) -> None:
        """Takes up a request; one for contexts that are continued already ends by an error."""
        generation.on_cancel = self.interrupt
        continued = {id(context) for other in self._running for context in _continued(other)}
        for context in generation.contexts:
            if id(context) in continued:
                busy = "the branch is continued already; fork it to continue it"
                self.refuse(generation, ContextBusyError(busy))
                return
            continued.add(id(context))
        self._running.append(generation)

    def refuse(self, generation: Generation, error: BaseException) -> None:
        """Ends a request by an error instead of taking it up."""
        self._running.append(generation)
        self._tell(generation, self._failed(generation, error))

    def interrupt(self) -> None:
        """From any thread: stops the step under way if all of it was cancelled."""
        if all(generation.cancelled for generation in self._in_step):
            self._control.cancel()

    def fail_all(self, error: BaseException) -> None:
        """Ends every request with an error."""
        for generation in list(self._running):
            self._tell(generation, self._failed(generation, error))

    def step(self) -> None:
        """Runs one step of what is under way, and tells the listeners."""
        for generation in list(self._running):
            if generation.cancelled:
                self._tell(generation, self._cancelled(generation))
            elif generation.stopped:
                self._tell(generation, self._stopped(generation))
        reading = self._next_to_read()
        parts = self._answer_parts()
        if reading:
            room = self._step_tokens - sum(len(part.rows.tokens) for part in parts)
            parts.append(self._reading_part(reading, max(room, MIN_STEP_TOKENS // 2)))
        if parts:
            begun = time.perf_counter()
            self.counters.steps += 1
            self._run(parts)
            if reading:
                rows = sum(len(part.rows.tokens) for part in parts)
                self._adapt(rows, time.perf_counter() - begun)

    # --- what to run ---

    def _by_priority(self) -> list[Generation]:
        return sorted(self._running, key=lambda generation: -generation.priority)

    def _next_to_read(self) -> Generation | None:
        """The first request with tokens left to read; those before it that have none begin.

        One reads at a time, so that the next finds what this one has read.
        """
        for generation in self._by_priority():
            if generation.answers:
                continue
            try:
                if not generation.contexts:
                    self._admit(generation)
                if generation.unread:
                    return generation
                self._tell(generation, self._begin(generation))
            except Exception as error:
                self._tell(generation, self._failed(generation, error))
        return None

    def _admit(self, generation: Generation) -> None:
        """Finds what is known of a request's tokens, and makes room for all of the rest.

        Raises UsageError, ContextFullError or BudgetError if it cannot run.
        """
        request = generation.request
        if request.start is not None:
            context = request.start.context.fork()
        else:
            if not request.ids:
                raise UsageError("prompt: expected at least one token, found none")
            context = self._cache.match(request.ids)
            generation.cached = context.length
            self.counters.matched_tokens += context.length
            generation.unread = request.ids[context.length :]
        generation.contexts = [context]
        generation.reading = self._new_branch(context)
        needed = context.length + len(generation.unread)
        if needed > self._context_size:
            raise ContextFullError(
                f"the context holds {self._context_size} tokens, and {needed} are needed; "
                "use a larger --ctx-size or a shorter text"
            )
        context.reserve(len(generation.unread))

    def _answer_parts(self) -> list[_Part]:
        """The next token of every answer; of too many, those that waited for longest."""
        pairs = [(g, a) for g in self._by_priority() for a in g.answers if not a.ended]
        if len(pairs) > MAX_ANSWERS:
            pairs.sort(key=lambda pair: (-pair[0].priority, pair[1].last_step))
            del pairs[MAX_ANSWERS:]
        parts = []
        for generation, answer in pairs:
            answer.last_step = self.counters.steps
            rows = answer.rows(len(pairs), generation.request.speculate)
            fail = functools.partial(self._answer_failed, generation, answer)
            parts.append(_Part(generation, rows, answer.advance, fail))
        return parts

    def _reading_part(self, generation: Generation, room: int) -> _Part:
        chunk = generation.unread[:room]
        last = len(chunk) == len(generation.unread)
        return _Part(
            generation,
            Rows(generation.contexts[0], chunk, logits=int(last)),
            lambda found: self._read(generation, len(chunk), found.logits),
            lambda error: self._failed(generation, error),
        )

    # --- running it ---

    def _run(self, parts: Sequence[_Part]) -> None:
        """Computes the parts together. If that fails, each by itself, so that only what is to
        blame ends."""
        self._in_step = [part.generation for part in parts]
        self._control = Control()
        try:
            with ExitStack() as owned:
                # Until drafts are judged: nobody may fork what is not certain.
                for part in parts:
                    owned.enter_context(part.rows.context.in_use())
                rows = [part.rows for part in parts]
                found = self._model.decoder.step(self._cache, rows, self._control)
                told = _advance(parts, found)
        except CancelledError:
            return  # the next step begins with taking out what was cancelled
        except Exception as error:
            if len(parts) > 1:
                for part in parts:
                    if not part.generation.done.is_set():  # by what a listener raised
                        self._run([part])
                return
            told = {parts[0].generation: parts[0].fail(error)}
        finally:
            self._in_step = []
        # Every branch is whole before anybody hears of one.
        for generation, events in told.items():
            self._tell(generation, events)

    def _read(self, generation: Generation, count: int, logits: Float32Array) -> list[Event]:
        """`count` more tokens of a request were read; logits of the last one if it was the last."""
        generation.unread = generation.unread[count:]
        self.counters.prefilled_tokens += count
        context = generation.contexts[0]
        seconds = time.perf_counter() - generation.started
        done = len(generation.request.ids) - generation.cached - len(generation.unread)
        total = len(generation.request.ids)
        events: list[Event] = [PrefillProgress(total, generation.cached, done, seconds)]
        if not generation.unread:
            context.logits = logits[-1].copy()
            events += self._begin(generation)
        return events

    def _begin(self, generation: Generation) -> list[Event]:
        """All is read: the answers begin, each in a context of its own."""
        request = generation.request
        context = generation.contexts[0]
        if request.ids:
            self._cache.retain(context)
        self._branch_out(generation)
        events: list[Event] = []
        for index, params in enumerate(request.params):
            answer = Answer(
                index,
                generation.contexts[index],
                params,
                self._model.tokenizer,
                self._context_size,
                request.answered,
            )
            generation.answers.append(answer)
        for answer in generation.answers:
            last = self._last_logits(answer.context)[None]
            best = self._model.decoder.kernels.best(last, answer.best_wanted)
            events += answer.begin(StepLogits(last, best))
        return events

    def _branch_out(self, generation: Generation) -> None:
        """Gives each answer a context of its own, which continues from what was read."""
        missing = len(generation.request.params) - len(generation.contexts)
        generation.contexts += [generation.contexts[0].fork() for _ in range(missing)]
        generation.branches = [self._new_branch(context) for context in generation.contexts]

    def _last_logits(self, context: Context) -> Float32Array:
        """Those that the context has, or computed again; no page is copied."""
        if context.logits is None:
            context.logits = self._model.decoder.last_logits(self._cache, context)
        return context.logits

    # --- how requests end ---

    def _tell(self, generation: Generation, events: Sequence[Event]) -> None:
        """Passes events on; ends the request with its last answer, or if nobody listens."""
        try:
            for event in events:
                generation.listener(event)
        except Exception as error:
            self._failed(generation, error)
        reading = generation.error is None and (generation.unread or not generation.branches)
        if not reading and all(answer.ended for answer in generation.answers):
            self._finish(generation)

    def _finish(self, generation: Generation) -> None:
        for answer in generation.answers:
            self.counters.decoded_tokens += answer.written
            self.counters.drafted_tokens += answer.drafted
            self.counters.accepted_tokens += answer.accepted
            if not answer.failed:
                self._cache.retain(answer.context)
        self._running.remove(generation)
        generation.done.set()
        generation.on_done()

    def _failed(self, generation: Generation, error: BaseException) -> list[Event]:
        """Ends what is left of a request; what was being read is forgotten."""
        generation.error = error
        if generation.answers:
            return [event for a in generation.answers if not a.ended for event in a.fail(error)]
        generation.reading = None
        if not generation.continues_given:
            for context in generation.contexts:
                context.close()
        generation.unread = ()
        return [Failed(index, error) for index in range(max(1, len(generation.request.params)))]

    def _answer_failed(
        self, generation: Generation, answer: Answer, error: BaseException
    ) -> list[Event]:
        generation.error = error
        return answer.fail(error)

    def _stopped(self, generation: Generation) -> list[Event]:
        """Ends those of a request's answers that were stopped by themselves."""
        stopped = [a for a in generation.answers if a.index in generation.stopped and not a.ended]
        return [event for answer in stopped for event in answer.end("cancelled")]

    def _cancelled(self, generation: Generation) -> list[Event]:
        if generation.answers:
            return [e for a in generation.answers if not a.ended for e in a.end("cancelled")]
        error = CancelledError("the request was cancelled while it was read")
        if generation.request.keep_read and generation.contexts:
            context = generation.contexts[0]
            context.truncate(context.length)  # gives back what the rest would have filled
            self._branch_out(generation)
            generation.error, generation.unread = error, ()
        else:
            self._failed(generation, error)
        count = len(generation.request.params)
        if not count:
            return [Failed(0, error)]
        return [Finished(index, "cancelled", 0, 0.0) for index in range(count)]

    def _adapt(self, rows: int, seconds: float) -> None:
        """Sizes the next step; the contract makes it free of consequences."""
        if rows < self._step_tokens:
            return  # the rest of a prompt says little about a whole step
        fitting = int(rows * STEP_SECONDS / max(seconds, 1e-6))
        self._step_tokens = max(MIN_STEP_TOKENS, min(MAX_STEP_TOKENS, fitting // 16 * 16))


def _continued(generation: Generation) -> list[Context]:
    """The contexts that a request still writes to."""
    if not generation.answers:
        return generation.contexts
    return [answer.context for answer in generation.answers if not answer.ended]


def _advance(parts: Sequence[_Part], found: StepLogits) -> dict[Generation, list[Event]]:
    """Gives each part its logits; what it tells, by request. An error ends that part only."""
    told: dict[Generation, list[Event]] = {}
    row = 0
    for part in parts:
        own = found.rows(row, row + part.rows.logits)
        row += part.rows.logits
        context = part.rows.context
        before = context.length - len(part.rows.certain)
        try:
            events = part.advance(own)
        except Exception as error:
            context.truncate(before)  # nothing of the step was told
            events = part.fail(error)
        told.setdefault(part.generation, []).extend(events)
    return told
