"""Reading a prompt and streaming answers in the terminal, for the commands that do."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llamay.cli.output import progress_line, say, terminal_text
from llamay.errors import UsageError
from llamay.events import Event, Finished, PrefillProgress, TextDelta

if TYPE_CHECKING:
    from llamay.engine import Branch, Engine
    from llamay.sampling import SamplingParams


@dataclass
class Choice:
    """What one branch has written so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def add(self, delta: TextDelta) -> None:
        """Takes up what the branch went on by."""
        self.ids += delta.ids
        self.logprobs += delta.logprobs
        self.text += delta.text


class Streamer:
    """Prints branches one after the other: the first as it comes, the next when it has ended."""

    def __init__(self, count: int, seeds: Sequence[int]) -> None:
        self._texts = [""] * count
        self._ended = [False] * count
        self._seeds = seeds
        self._current = 0
        self._heading()

    def show(self, event: Event) -> None:
        """Takes up what happened to a branch, and prints what can be printed."""
        if isinstance(event, TextDelta):
            self._texts[event.branch] += event.text
        elif isinstance(event, Finished):
            self._ended[event.branch] = True
        self._print()

    def _print(self) -> None:
        while self._current < len(self._texts):
            text, self._texts[self._current] = self._texts[self._current], ""
            print(terminal_text(text), end="", flush=True)
            if not self._ended[self._current]:
                return
            print(flush=True)
            self._current += 1
            self._heading()

    def _heading(self) -> None:
        if 1 < len(self._texts) > self._current:
            gap = "\n" if self._current else ""
            print(f"{gap}── {self._current + 1} · seed {self._seeds[self._current]} ──")


def best(choices: Sequence[Choice]) -> int:
    """The choice whose tokens were the most likely on average under the model."""
    means = [
        sum(choice.logprobs) / len(choice.logprobs) if choice.logprobs else float("-inf")
        for choice in choices
    ]
    return means.index(max(means))


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The file's text, then `prompt`; standard input if neither is given.

    Raises UsageError if there is none of them, or one that is not UTF-8.
    """
    if prompt is None and file is None:
        if sys.stdin.isatty():
            raise UsageError("prompt: expected -p TEXT, --file FILE or text on standard input")
        return _decoded(sys.stdin.buffer.read(), "standard input")
    parts = []
    if file is not None:
        try:
            parts.append(_decoded(file.read_bytes(), str(file)))
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    if prompt is not None:
        parts.append(prompt)
    return "\n\n".join(parts)


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: expected UTF-8 text; byte {error.start} is not") from None


def read_prompt(engine: "Engine", ids: Sequence[int], start: "Branch | None" = None) -> "Branch":
    """Reads tokens, after those of `start`, with a line on the terminal while that takes time."""
    with progress_line() as show:

        def tell(progress: PrefillProgress) -> None:
            count = progress.total - progress.cached
            rest = progress.seconds / progress.done * (count - progress.done)
            show(f"reading {progress.done} of {count} tokens · {rest:.1f} s left", rest)

        return engine.prefill(ids, start=start, on_progress=tell)


def stream_answers(
    engine: "Engine",
    branches: Sequence["Branch"],
    params: Sequence["SamplingParams"],
    *,
    show: bool,
) -> list[Choice]:
    """Generates all branches together; prints them if `show`. Returns what each wrote."""
    choices = [Choice() for _ in branches]
    streamer = Streamer(len(branches), [p.seed for p in params]) if show else None
    for event in engine.generate(branches, params):
        if isinstance(event, TextDelta):
            choices[event.branch].add(event)
        elif isinstance(event, Finished):
            choices[event.branch].finish_reason = event.reason
            if event.reason == "context":
                say(
                    f"branch {event.branch + 1} ended: the context of {engine.context_size} tokens "
                    "is full; a larger --ctx-size or a shorter prompt makes room"
                )
        if streamer:
            streamer.show(event)
    return choices
