"""The engine: a model, its cache, and branches that decode together.

One thread at a time; `Control.cancel` may come from any.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from llamay.errors import ContextFullError, UsageError
from llamay.events import Event, Finished, FinishReason, PrefillProgress, TextDelta
from llamay.formats import KVPrecision
from llamay.gguf import open_gguf
from llamay.hub import DEFAULT_MODEL, Progress, resolve, weights_digest
from llamay.hub.progress import silent
from llamay.kv import Cache, Context
from llamay.kv.snapshot import Identity
from llamay.mlx_kernels import Control, Float32Array, KernelSet, load_kernels, numerics_id
from llamay.model.decoder import Decoder, Rows
from llamay.sampling import SamplingParams, choose
from llamay.tokenizer import ChatTemplate, StreamingDecoder, Tokenizer

STEP_SECONDS = 0.05  # a prefill step's size is chosen to last about this long
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 32, 512
MAX_PAGE_TOKENS = 1024


def machine_memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class StopText:
    """Watches an answer's text for stop texts; holds back what could be the start of one.

    The first to be complete ends the answer; of those complete at once, the longest. So it does not
    matter how the text is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that is surely part of the answer; after a stop text, nothing more."""
        if self.found:
            return ""
        text = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self.found, self._held = True, ""
            _, start = min(found)
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


@dataclass
class Branch:
    """A context together with the logits of its last position: what the next token comes from."""

    context: Context
    logits: Float32Array


@dataclass
class _Answer:
    """A branch while it is being generated."""

    index: int
    branch: Branch
    params: SamplingParams
    decoder: StreamingDecoder
    stop: StopText
    history: list[int]
    ids: list[int] = field(default_factory=list)


class Engine:
    """A model ready to answer."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        source: str,
        *,
        page_tokens: int = 64,
        precision: KVPrecision = KVPrecision.F32,
        context_size: int | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        """source is the path of the model's file.

        context_size: most tokens in a context; None takes the model's own
        budget_bytes: most memory for keys and values; None takes half of the machine's
        Raises UsageError for a page size that the kernels do not take.
        """
        if page_tokens not in range(16, MAX_PAGE_TOKENS + 1, 16):
            raise UsageError(
                f"page-tokens: expected a multiple of 16 up to {MAX_PAGE_TOKENS}, "
                f"found {page_tokens}"
            )
        if context_size is not None and context_size < 1:
            raise UsageError(f"ctx-size: expected 1 or more, found {context_size}")
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.source = source
        self.context_size = context_size or decoder.spec.context_length
        layout = decoder.layout(page_tokens, precision)
        self.cache = Cache(
            decoder.kernels,
            layout,
            numerics=numerics_id(decoder.kernels, layout),
            budget_bytes=machine_memory() // 2 if budget_bytes is None else budget_bytes,
        )
        self._template: str | None = None
        self._step_tokens = MIN_STEP_TOKENS

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

        Raises HubError if it cannot be found, GGUFError or UnsupportedModelError if it cannot be
        run, UsageError for an option out of range.
        """
        path = resolve(model, progress)
        kernels: KernelSet = load_kernels(device, threads)
        with open_gguf(path) as file, ThreadPoolExecutor(1) as executor:
            # The tokenizer's library and the packing of weights both run without the interpreter.
            tokenizer = executor.submit(Tokenizer.from_metadata, file.metadata, str(path))
            decoder = Decoder(file, kernels)
            engine = cls(
                decoder,
                tokenizer.result(),
                str(path),
                page_tokens=page_tokens,
                precision=precision,
                context_size=context_size,
                budget_bytes=budget_bytes,
            )
            engine._template = file.metadata.get("tokenizer.chat_template")
        if engine.tokenizer.vocab_size > decoder.vocab_size:
            raise UsageError(
                f"{path}: the tokenizer has {engine.tokenizer.vocab_size} tokens, the model only "
                f"{decoder.vocab_size}; use another conversion of the model"
            )
        return engine

    def identity(self, progress: Progress = silent) -> Identity:
        """What this model's contexts belong to. The first call may hash the whole file."""
        return Identity(
            self.decoder.spec.architecture,
            self.decoder.vocab_size,
            self.decoder.layout_sha256,
            weights_digest(Path(self.source), progress),
        )

    def decoder_on(self, kernels: KernelSet) -> Decoder:
        """The same model on other kernels. Raises GGUFError if its file has become unreadable."""
        with open_gguf(self.source) as file:
            return Decoder(file, kernels)

    def chat_template(self) -> ChatTemplate:
        """The file's chat template. Raises TemplateError if it has none or a broken one."""
        metadata = {"tokenizer.chat_template": self._template}
        return ChatTemplate.from_metadata(metadata, self.tokenizer, self.source)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a plain text, with bos if the model wants one; never empty.

        Raises UsageError if nothing would be left to read.
        """
        ids = self.tokenizer.encode(text)
        bos = self.tokenizer.bos_id
        if bos is not None and (self.tokenizer.add_bos or not ids):
            ids.insert(0, bos)
        if not ids:
            raise UsageError("prompt: expected some text, found none")
        return ids

    def prefill(
        self, context: Context, ids: Sequence[int], control: Control | None = None
    ) -> Iterator[PrefillProgress | Branch]:
        """Reads tokens into a context; yields progress after each step, at the end the branch.

        Raises ContextFullError, with the context as it was, if they do not fit; CancelledError
        leaves what earlier steps have read.
        """
        control = control or Control()
        if context.length + len(ids) > self.context_size:
            raise ContextFullError(
                f"the context holds {self.context_size} tokens, and {context.length} + {len(ids)} "
                "are needed; use a larger --ctx-size or a shorter text"
            )
        begun, done = time.perf_counter(), 0
        while done < len(ids):
            chunk = ids[done : done + self._step_tokens]
            done += len(chunk)
            rows = Rows(context, chunk, logits=int(done == len(ids)))
            started = time.perf_counter()
            logits = self.decoder.forward(self.cache, [rows], control)
            self._adapt(len(chunk), time.perf_counter() - started)
            yield PrefillProgress(len(ids), 0, done, time.perf_counter() - begun)
        if ids:
            context.logits = logits[0]
            yield Branch(context, logits[0])

    def read(self, context: Context, ids: Sequence[int], control: Control | None = None) -> Branch:
        """`prefill` without its progress. Raises UsageError if there is nothing to read."""
        for event in self.prefill(context, ids, control):
            if isinstance(event, Branch):
                return event
        raise UsageError("prompt: expected at least one token, found none")

    def resume(self, context: Context) -> Branch:
        """The branch of a context that holds tokens: its own last logits, or computed again.

        Nothing is written and no page is copied.
        """
        if context.logits is None:
            context.logits = self.decoder.last_logits(self.cache, context)
        return Branch(context, context.logits)

    def fork(self, branch: Branch) -> Branch:
        """A branch that continues from here; no page is copied."""
        return Branch(branch.context.fork(), branch.logits)

    def generate(
        self,
        branches: Sequence[Branch],
        params: Sequence[SamplingParams],
        control: Control | None = None,
    ) -> Iterator[Event]:
        """Continues branches, all in one step at a time, until each has ended.

        params: one for each branch
        The token that ends an answer is not committed to its context.
        Raises CancelledError, with the contexts as after the last step that was told.
        """
        control = control or Control()
        begun = time.perf_counter()
        running = [
            _Answer(
                index,
                branch,
                options,
                StreamingDecoder(self.tokenizer),
                StopText(options.stop),
                list(branch.context.tokens),
            )
            for index, (branch, options) in enumerate(zip(branches, params, strict=True))
        ]
        while running:
            going: list[_Answer] = []
            chosen: list[tuple[int, float]] = []
            for answer in running:
                token, logprob = choose(
                    answer.branch.logits, answer.params, answer.history, answer.ids
                )
                reason = self._end(answer, token)
                if reason:
                    yield from self._finish(answer, reason, time.perf_counter() - begun)
                else:
                    going.append(answer)
                    chosen.append((token, logprob))
            running = going
            if not running:
                return
            rows = [Rows(a.branch.context, [c[0]]) for a, c in zip(running, chosen, strict=True)]
            logits = self.decoder.forward(self.cache, rows, control)
            # All of the step before any event: a listener that leaves finds every branch whole.
            for answer, (token, _), row in zip(running, chosen, logits, strict=True):
                answer.branch.logits = row
                answer.ids.append(token)
                answer.history.append(token)
            for answer, (token, logprob) in zip(running, chosen, strict=True):
                text = answer.stop.feed(answer.decoder.feed(token))
                yield TextDelta(answer.index, (token,), (logprob,), text)

    def _end(self, answer: _Answer, token: int) -> FinishReason | None:
        """Why the answer ends before `token`, or None."""
        if answer.stop.found or token in self.tokenizer.stop_ids:
            return "stop"
        if answer.params.max_tokens is not None and len(answer.ids) >= answer.params.max_tokens:
            return "length"
        if answer.branch.context.length >= self.context_size:
            return "context"
        return None

    @staticmethod
    def _finish(answer: _Answer, reason: FinishReason, seconds: float) -> Iterator[Event]:
        # A copy: the row is a view into what the whole batch computed.
        answer.branch.context.logits = answer.branch.logits.copy()
        rest = answer.stop.feed(answer.decoder.flush()) + answer.stop.flush()
        if rest:
            yield TextDelta(answer.index, (), (), rest)
        yield Finished(answer.index, reason, len(answer.ids), seconds)

    def _adapt(self, tokens: int, seconds: float) -> None:
        """Sizes the next prefill step; the contract makes it free of consequences."""
        if tokens < self._step_tokens:
            return  # a rest of the prompt says little about a whole step
        fitting = int(tokens * STEP_SECONDS / max(seconds, 1e-6))
        self._step_tokens = max(MIN_STEP_TOKENS, min(MAX_STEP_TOKENS, fitting // 16 * 16))
