"""`llamay generate`: streams a completion, or several from one prefill."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamay.cli.options import MODEL_FLAGS, SAMPLING_FLAGS, flags, load_engine
from llamay.cli.output import print_json, progress_line, say, terminal_text
from llamay.errors import UsageError
from llamay.events import Event, Finished, PrefillProgress, TextDelta

if TYPE_CHECKING:
    from llamay.engine import Branch, Engine
    from llamay.sampling import SamplingParams


@dataclass
class _Choice:
    """What one branch has written so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def add(self, delta: TextDelta) -> None:
        self.ids += delta.ids
        self.logprobs += delta.logprobs
        self.text += delta.text


class _Streamer:
    """Prints branches one after the other: the first as it comes, the next when it has ended."""

    def __init__(self, count: int, seeds: Sequence[int]) -> None:
        self._texts = [""] * count
        self._ended = [False] * count
        self._seeds = seeds
        self._current = 0
        self._heading()

    def show(self, event: Event) -> None:
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


@click.command("generate")
@click.option("-p", "--prompt", help="The text to continue, or with --chat the message.")
@click.option("--file", "file", type=click.Path(path_type=Path), help="Text that goes before -p.")
@click.option("--chat", is_flag=True, help="Use the model's chat template.")
@click.option("--system", metavar="TEXT", help="System prompt; implies --chat.")
@click.option("--n", "count", type=click.IntRange(1, 256), default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one object at the end.")
@flags(SAMPLING_FLAGS, MODEL_FLAGS)
def command(
    prompt: str | None,
    file: Path | None,
    chat: bool,
    system: str | None,
    count: int,
    as_json: bool,
    model: str | None,
    device: str,
    threads: int | None,
    kv: str,
    page_tokens: int,
    ctx_size: int | None,
    **sampling: Any,
) -> None:
    """Stream a completion of a prompt.

    The prompt comes from -p, from --file, or from standard input. With --n, branches are forked
    from one prefill and decode together; branch i draws with a seed derived from --seed and i, so
    that the first equals what --n 1 writes.
    """
    from dataclasses import replace

    from llamay.sampling import SamplingParams, child_seed

    params = SamplingParams(**sampling)
    text = _prompt_text(prompt, file)
    begun = time.perf_counter()
    engine = load_engine(model, device, threads, kv, page_tokens, ctx_size)
    opened = time.perf_counter()
    ids = (
        _chat_ids(engine, text, system)
        if chat or system is not None
        else engine.encode_prompt(text)
    )
    branch = _prefill(engine, ids)
    prefilled = time.perf_counter()
    seeds = [child_seed(params.seed, index) for index in range(count)]
    branches = [branch, *(engine.fork(branch) for _ in range(count - 1))]
    choices = _generate(engine, branches, [replace(params, seed=s) for s in seeds], as_json)
    ended = time.perf_counter()
    if as_json:
        print_json(
            {
                "model": str(model or "smollm2:135m"),
                "prompt_ids": ids,
                "cached_tokens": 0,
                "choices": [vars(choice) for choice in choices],
                "timings": {
                    "open_s": opened - begun,
                    "prefill_s": prefilled - opened,
                    "prefill_tokens": len(ids),
                    "decode_s": ended - prefilled,
                    "decode_tokens": sum(len(choice.ids) for choice in choices),
                },
            }
        )


def _prompt_text(prompt: str | None, file: Path | None) -> str:
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


def _chat_ids(engine: "Engine", text: str, system: str | None) -> list[int]:
    from llamay.tokenizer import encode_segments

    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return encode_segments(engine.tokenizer, engine.chat_template().render(messages))


def _prefill(engine: "Engine", ids: Sequence[int]) -> "Branch":
    """Reads the prompt, with a bar on the terminal while that takes time."""
    context = engine.cache.new_context()
    with progress_line() as show:
        for event in engine.prefill(context, ids):
            if not isinstance(event, PrefillProgress):
                return event
            rest = event.seconds / event.done * (event.total - event.done)
            show(f"reading {event.done} of {event.total} tokens · {rest:.1f} s left", rest)
    raise UsageError("prompt: expected at least one token, found none")


def _generate(
    engine: "Engine",
    branches: Sequence["Branch"],
    params: Sequence["SamplingParams"],
    as_json: bool,
) -> list[_Choice]:
    choices = [_Choice() for _ in branches]
    streamer = None if as_json else _Streamer(len(branches), [p.seed for p in params])
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
