"""A plain chat in the terminal, until there is more: `llamay` without arguments."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from llamay.cli.options import MODEL_FLAGS, SAMPLING_FLAGS, flags, load_engine
from llamay.cli.output import say, terminal_text
from llamay.errors import ContextFullError
from llamay.events import Finished, TextDelta

if TYPE_CHECKING:
    from llamay.engine import Engine
    from llamay.sampling import SamplingParams


@click.command("chat")
@flags(SAMPLING_FLAGS, MODEL_FLAGS)
def command(
    model: str | None,
    device: str,
    threads: int | None,
    page_tokens: int,
    ctx_size: int | None,
    **sampling: Any,
) -> None:
    """Chat with a model. Ctrl+C stops an answer, Ctrl+D ends."""
    from llamay.sampling import SamplingParams

    params = SamplingParams(**sampling)
    engine = load_engine(model, device, threads, page_tokens, ctx_size)
    chat = _Chat(engine, params)
    say(f"{engine.decoder.spec.name} · {engine.decoder.kernels.name} · Ctrl+D ends")
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return
        if text.strip():
            chat.ask(text)


class _Chat:
    """One conversation: a context, and the messages whose ids it holds."""

    def __init__(self, engine: "Engine", params: "SamplingParams") -> None:
        self._engine = engine
        self._params = params
        self._template = engine.chat_template()
        self._context = engine.cache.new_context()
        self._messages: list[dict[str, str]] = []
        self._answers: dict[int, list[int]] = {}  # ids of an answer, by its message's index

    def ask(self, text: str) -> None:
        """Answers one message; Ctrl+C ends the answer and keeps what came."""
        message = {"role": "user", "content": text}
        answer, answer_ids = "", list[int]()
        try:
            branch = self._engine.read(self._context, self._new_ids(message))
            for event in self._engine.generate([branch], [self._params]):
                if isinstance(event, TextDelta):
                    answer += event.text
                    answer_ids += event.ids
                    print(terminal_text(event.text), end="", flush=True)
                elif isinstance(event, Finished) and event.reason == "context":
                    say(f"\nthe context of {self._engine.context_size} tokens is full")
        except ContextFullError as error:
            say(str(error))
            return
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print()
        self._answers[len(self._messages) + 1] = answer_ids
        self._messages += [message, {"role": "assistant", "content": answer}]

    def _new_ids(self, message: dict[str, str]) -> list[int]:
        """What the template adds for a message, after ids that stay as they are.

        If the template changed what it had made of earlier messages, the context goes back to
        where that differs.
        """
        from llamay.tokenizer import encode_segments

        delta = self._template.turn_delta(self._messages, [message])
        tokenizer = self._engine.tokenizer
        if self._messages and delta.changed_at is None:
            return encode_segments(tokenizer, delta.segments, continues=True)
        ids = encode_segments(tokenizer, delta.segments, self._answers)
        kept = _common_length(ids, self._context.tokens)
        if kept < self._context.length:
            say("the template changed earlier text; reading again from there")
            self._context.truncate(kept)
        return ids[kept:]


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
