"""A plain chat, line by line: `llamay` without arguments where there is no terminal."""

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from llamay.cli.answers import Choice
from llamay.cli.options import ModelOptions
from llamay.cli.output import say, terminal_text
from llamay.errors import ContextFullError, UsageError
from llamay.events import Finished, TextDelta

if TYPE_CHECKING:
    from llamay.engine import Engine
    from llamay.sampling import SamplingParams


def chat(params: "SamplingParams", options: ModelOptions) -> None:
    """Chats with a model. Ctrl+C stops an answer, Ctrl+D ends."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8")  # whatever the locale says, and strictly
    engine = options.load()
    conversation = _Chat(engine, params)
    say(f"{engine.model.name} · {engine.model.decoder.kernels.name} · Ctrl+D ends")
    while (text := _next_message()) is not None:
        if text.strip():
            conversation.ask(text)


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
    """One conversation: the messages, and the tokens that they are to the model."""

    def __init__(self, engine: "Engine", params: "SamplingParams") -> None:
        self._engine = engine
        self._params = params
        self._template = engine.model.chat_template()
        self._ids: list[int] = []
        self._messages: list[dict[str, str]] = []
        self._answers: dict[int, Sequence[int]] = {}  # ids of an answer, by its message's index

    def ask(self, text: str) -> None:
        """Answers one message; Ctrl+C ends the answer and keeps what came."""
        from llamay.engine import Request

        message = {"role": "user", "content": text}
        ids = self._with(message)
        answer = Choice()
        try:
            with closing(self._engine.stream(Request(ids, (self._params,)))) as events:
                for event in events:
                    if isinstance(event, TextDelta):
                        answer.add(event)
                        print(terminal_text(event.text), end="", flush=True)
                    elif isinstance(event, Finished):
                        answer.finish_reason = event.reason
        except ContextFullError as error:
            say(str(error))
            return
        except KeyboardInterrupt:
            if not answer.ids:
                say("stopped; the message is not part of the chat")
                return
            print(" [stopped]", end="")
        print(flush=True)
        if answer.finish_reason == "context":
            say(f"the context of {self._engine.context_size} tokens is full")
        self._ids = [*ids, *answer.ids]
        self._answers[len(self._messages) + 1] = answer.ids
        self._messages += [message, {"role": "assistant", "content": answer.text}]

    def _with(self, message: dict[str, str]) -> list[int]:
        """The ids of the conversation with one more message; those there were stay as they are,
        unless the template changed what it had made of earlier messages."""
        from llamay.tokenizer.chat import encode_segments

        delta = self._template.turn_delta(self._messages, [message])
        tokenizer = self._engine.model.tokenizer
        if self._messages and delta.changed_at is None:
            return [*self._ids, *encode_segments(tokenizer, delta.segments, continues=True)]
        ids = encode_segments(tokenizer, delta.segments, self._answers)
        if ids[: len(self._ids)] != self._ids:
            say("the template changed earlier text; reading again from there")
        return ids
