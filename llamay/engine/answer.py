"""One answer while it is being written."""

import time

from llamay.engine.lookup import PromptLookup
from llamay.engine.stop_text import StopText
from llamay.errors import ContextBusyError
from llamay.events import Event, Failed, Finished, FinishReason, TextDelta
from llamay.kv import Context
from llamay.mlx_kernels import StepLogits
from llamay.model.decoder import Rows
from llamay.sampling import SamplingParams, best_wanted, choose
from llamay.tokenizer import StreamingDecoder, Tokenizer


class Answer:
    """A context that goes on token by token.

    After `begin` and after each `advance`, the next token is chosen and not yet committed; what
    ends an answer is never committed.

    index:    its branch in the request
    answered: tokens at the context's end that an earlier run of this answer wrote
    """

    def __init__(
        self,
        index: int,
        context: Context,
        params: SamplingParams,
        tokenizer: Tokenizer,
        context_size: int,
        answered: int = 0,
    ) -> None:
        self.index = index
        self.context = context
        self.last_step = 0  # number of the step that it was in last
        self._params = params
        self._tokenizer = tokenizer
        self._context_size = context_size
        self._decoder = StreamingDecoder(tokenizer)
        self._stop = StopText(params.stop)
        self._history = list(context.tokens)
        self._ids = self._history[len(self._history) - answered :]
        for token in self._ids:
            self._stop.feed(self._decoder.feed(token))
        self._found: tuple[StepLogits, int] | None = None  # and the last committed position's row
        self._chosen = (0, 0.0)  # the next token and its log-probability
        self._draft: list[int] = []
        self._lookup = PromptLookup()
        self._started = time.perf_counter()
        self._reason: FinishReason | None = None
        self.failed = False
        self.written = self.drafted = self.accepted = 0  # tokens

    @property
    def ended(self) -> bool:
        """Whether it has told its end."""
        return self.failed or self._reason is not None

    @property
    def best_wanted(self) -> int:
        """How many of a row's largest logits `begin` and `advance` want."""
        return best_wanted(self._params)

    def begin(self, found: StepLogits) -> list[Event]:
        """found: one row, the context's last position."""
        self._found = found, 0
        self._choose()
        return self._ending()

    def rows(self, step_rows: int, speculate: bool) -> Rows:
        """The chosen token, and what may follow it.

        step_rows: rows that the step computes anyway
        """
        self._draft = self._drafted(step_rows) if speculate else []
        tokens = [self._chosen[0], *self._draft]
        return Rows(self.context, tokens, len(tokens), self.best_wanted, len(self._draft))

    def advance(self, found: StepLogits) -> list[Event]:
        """Takes the logits of a step's rows, and commits what was right of its draft.

        Raises ContextBusyError if the step continued something else than the answer.
        """
        start = self.context.length - 1
        if start != len(self._history):
            raise ContextBusyError(
                f"the branch was changed while it was continued: it held {start} tokens, and its "
                f"answer was at {len(self._history)}; fork it to change it"
            )
        first = len(self._ids)
        logprobs, text = [self._chosen[1]], [self._commit(found, 0)]
        for row, guess in enumerate(self._draft, 1):
            if self._reason or self._chosen[0] != guess:
                break
            logprobs.append(self._chosen[1])
            text.append(self._commit(found, row))
        if self._draft:
            right = len(logprobs) - 1
            self.drafted += len(self._draft)
            self.accepted += right
            self._lookup.judge(len(self._draft), right, len(self._history))
            self.context.commit(self._draft[:right])
            self.context.truncate(self.context.length)  # gives back what the rest was to have
        ids = tuple(self._ids[first:])
        return [TextDelta(self.index, ids, tuple(logprobs), "".join(text)), *self._ending()]

    def end(self, reason: FinishReason) -> list[Event]:
        """Ends it here; keeps the last logits with the context."""
        self._reason = reason
        return self._ending()

    def fail(self, error: BaseException) -> list[Event]:
        """Ends it by an error; its context is what the last step left."""
        self.failed = True
        return [Failed(self.index, error)]

    def _commit(self, found: StepLogits, row: int) -> str:
        """Takes up the chosen token, whose logits this row has, and chooses the next."""
        self._found = found, row
        token = self._chosen[0]
        self.written += 1
        self._ids.append(token)
        self._history.append(token)
        text = self._stop.feed(self._decoder.feed(token))
        self._choose()
        return text

    def _choose(self) -> None:
        assert self._found is not None
        found, row = self._found
        self._chosen = choose(
            found.logits[row], self._params, self._history, self._ids, found.best_of(row)
        )
        self._reason = self._end(self._chosen[0])

    def _end(self, token: int) -> FinishReason | None:
        """Why the answer ends before `token`, or None."""
        if self._stop.found or token in self._tokenizer.stop_ids:
            return "stop"
        if self._params.max_tokens is not None and len(self._ids) >= self._params.max_tokens:
            return "length"
        if len(self._history) >= self._context_size:
            return "context"
        return None

    def _drafted(self, step_rows: int) -> list[int]:
        """A draft that takes no further page, and that neither the context's size nor max_tokens
        cuts off."""
        position, page_tokens = len(self._history), self.context.layout.page_tokens
        room = min(page_tokens - 1 - position % page_tokens, self._context_size - position - 1)
        if self._params.max_tokens is not None:
            room = min(room, self._params.max_tokens - len(self._ids) - 1)
        draft = self._lookup.draft(self._history, self._chosen[0], step_rows)
        return draft[: max(0, room)]

    def _ending(self) -> list[Event]:
        if self._reason is None:
            return []
        if self._found is not None and self.context.length == len(self._history):
            found, row = self._found
            # A copy: the row is a view into what the whole batch computed.
            self.context.logits = found.logits[row].copy()
        events: list[Event] = []
        if rest := self._stop.feed(self._decoder.flush()) + self._stop.flush():
            events.append(TextDelta(self.index, (), (), rest))
        seconds = time.perf_counter() - self._started
        return [*events, Finished(self.index, self._reason, len(self._ids), seconds)]
