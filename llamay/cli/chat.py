"""A plain chat in the terminal, until there is more: `llamay` without arguments."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from llamay.cli.options import ModelOptions, model_flags, sampling_flags
from llamay.cli.output import say, terminal_text
from llamay.errors import ContextFullError, UsageError
from llamay.events import Finished, TextDelta

if TYPE_CHECKING:
    from llamay.engine import Branch, Engine
    from llamay.kv import Context
    from llamay.sampling import SamplingParams


@click.command("chat")
@sampling_flags
@model_flags
def command(params: "SamplingParams", options: ModelOptions) -> None:
    """Chat with a model. Ctrl+C stops an answer, Ctrl+D ends."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8")  # whatever the locale says, and strictly
    engine = options.load()
    chat = _Chat(engine, params)
    say(f"{engine.decoder.spec.name} · {engine.decoder.kernels.name} · Ctrl+D ends")
    while (text := _next_message()) is not None:
        if text.strip():
            chat.ask(text)


def _next_message() -> str | None:
    """A line of standard input, None at its end; on a terminal, Ctrl+C takes the line back."""
    on_terminal = sys.stdin.isatty()
    while True:
        try:
            return input("> " if on_terminal else "")
        except EOFError:
            if on_terminal:
                print()
            return None
        except UnicodeDecodeError:
            if not on_terminal:
                raise UsageError("standard input: expected UTF-8 text, found other bytes") from None
            say("expected UTF-8 text; the line is ignored")
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print()
            say("Ctrl+D ends")


class _Chat:
    """One conversation: a context, and the messages whose ids it holds."""

    def __init__(self, engine: "Engine", params: "SamplingParams") -> None:
        self._engine = engine
        self._params = params
        self._template = engine.chat_template()
        self._context = engine.cache.new_context()
        self._messages: list[dict[str, str]] = []
        self._answers: dict[int, Sequence[int]] = {}  # ids of an answer, by its message's index

    def ask(self, text: str) -> None:
        """Answers one message; Ctrl+C ends the answer and keeps what came."""
        message = {"role": "user", "content": text}
        branch = self._read(message)
        if branch is None:
            return
        start = branch.context.length
        answer = self._answer(branch)
        self._answers[len(self._messages) + 1] = branch.context.tokens[start:]
        self._messages += [message, {"role": "assistant", "content": answer}]

    def _read(self, message: dict[str, str]) -> "Branch | None":
        """Reads a message; None, with the conversation as it was, if that came to no end."""
        context = self._context.fork()
        try:
            branch = self._engine.read(context, self._new_ids(context, message))
        except (ContextFullError, KeyboardInterrupt) as error:
            context.close()
            stopped = isinstance(error, KeyboardInterrupt)
            say("stopped; the message is not part of the chat" if stopped else str(error))
            return None
        self._context.close()
        self._context = context
        return branch

    def _answer(self, branch: "Branch") -> str:
        """Prints an answer as it comes, and returns it."""
        answer = ""
        try:
            for event in self._engine.generate([branch], [self._params]):
                if isinstance(event, TextDelta):
                    answer += event.text
                    print(terminal_text(event.text), end="", flush=True)
                elif isinstance(event, Finished) and event.reason == "context":
                    print(flush=True)
                    say(f"the context of {self._engine.context_size} tokens is full")
                    return answer
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print(flush=True)
        return answer

    def _new_ids(self, context: "Context", message: dict[str, str]) -> list[int]:
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
        # The last token is read in any case: the answer comes from its logits.
        kept = _common_length(ids[:-1], context.tokens)
        if kept < context.length:
            say("the template changed earlier text; reading again from there")
            context.truncate(kept)
        return ids[kept:]


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
