"""`llamay generate`: streams a completion, or several from one prefill."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamay.cli.answers import Choice, best, prompt_text, read_prompt, stream_answers
from llamay.cli.options import ModelOptions, key_flag, model_flags, sampling_flags
from llamay.cli.output import print_json, terminal_text
from llamay.errors import SessionError, UsageError

if TYPE_CHECKING:
    from llamay.engine import Engine
    from llamay.sampling import SamplingParams


@click.command("generate")
@click.option("-p", "--prompt", help="The text to continue, or with --chat the message.")
@click.option("--file", "file", type=click.Path(path_type=Path), help="Text that goes before -p.")
@click.option("--chat", is_flag=True, help="Use the model's chat template.")
@click.option("--system", metavar="TEXT", help="System prompt; implies --chat.")
@click.option("--session", "session_name", metavar="NAME", help="Chat in a saved session.")
@key_flag
@click.option("--n", "count", type=click.IntRange(1, 256), default=1, show_default=True)
@click.option("--best-of", type=click.IntRange(1, 256), help="Of so many, print the likeliest.")
@click.option("--json", "as_json", is_flag=True, help="Print one object at the end.")
@sampling_flags
@model_flags
def command(
    prompt: str | None,
    file: Path | None,
    chat: bool,
    system: str | None,
    session_name: str | None,
    context_key: Path | None,
    count: int,
    best_of: int | None,
    as_json: bool,
    params: "SamplingParams",
    options: ModelOptions,
) -> None:
    """Stream a completion of a prompt.

    The prompt comes from -p, from --file, or from standard input. With --n, branches are forked
    from one prefill and decode together; branch i draws with a seed derived from --seed and i, so
    that the first equals what --n 1 writes. --best-of does the same and prints the answer with the
    highest mean log-probability. With --session, the prompt is the next message of a session that
    is saved, or of a new one; the flags of sampling hold from this message on.
    """
    if best_of is not None and count != 1:
        raise UsageError("best-of: expected --n or --best-of, found both")
    if context_key is not None and session_name is None:
        raise UsageError("context-key: expected --session NAME with it, found none")
    text = prompt_text(prompt, file)
    count = best_of or count
    if session_name is not None:
        _in_session(session_name, text, system, context_key, count, best_of, as_json, options)
    else:
        as_chat = chat or system is not None
        _alone(text, as_chat, system, count, best_of, as_json, params, options)


def _alone(
    text: str,
    as_chat: bool,
    system: str | None,
    count: int,
    best_of: int | None,
    as_json: bool,
    params: "SamplingParams",
    options: ModelOptions,
) -> None:
    from dataclasses import replace

    from llamay.sampling import child_seed

    begun = time.perf_counter()
    engine = options.load()
    opened = time.perf_counter()
    ids = _chat_ids(engine, text, system) if as_chat else engine.model.encode_prompt(text)
    branch = read_prompt(engine, ids)
    prefilled = time.perf_counter()
    branches = [branch, *branch.fork(count - 1)]
    each = [replace(params, seed=child_seed(params.seed, index)) for index in range(count)]
    choices = stream_answers(engine, branches, each, show=not (as_json or best_of))
    timings = {
        "open_s": opened - begun,
        "prefill_s": prefilled - opened,
        "prefill_tokens": len(ids),
        "decode_s": time.perf_counter() - prefilled,
        "decode_tokens": sum(len(choice.ids) for choice in choices),
    }
    figures = {"model": options.name, "prompt_ids": ids, "cached_tokens": 0}
    _print(figures, choices, best(choices) if best_of else None, timings, as_json)


def _in_session(
    name: str,
    text: str,
    system: str | None,
    key_file: Path | None,
    count: int,
    best_of: int | None,
    as_json: bool,
    options: ModelOptions,
) -> None:
    from llamay.cli.session_answers import answer_in, given_settings, open_session

    begun = time.perf_counter()
    session, settings = open_session(name, options, given_settings(system), key_file)
    try:
        opened = time.perf_counter()
        answered = answer_in(session, text, count, settings, show=not (as_json or best_of))
        ended = time.perf_counter()
        chosen = best(answered.choices) if best_of else None
        if chosen is not None:
            session.go(answered.nodes[chosen])
    finally:
        goodbye = session.close()
    timings = {
        "open_s": opened - begun,
        "prefill_s": answered.prefill_s,
        "prefill_tokens": answered.prefilled,
        "decode_s": ended - opened - answered.prefill_s,
        "decode_tokens": sum(len(choice.ids) for choice in answered.choices),
    }
    figures = {
        "model": session.tree.info.model,
        "session": session.name,
        "prompt_ids": answered.prompt_ids,
        "cached_tokens": answered.known,
    }
    _print(figures, answered.choices, chosen, timings, as_json)
    if answered.errors:
        raise SessionError(answered.errors[0])
    if goodbye.problem:
        raise SessionError(goodbye.problem)


def _print(
    figures: dict[str, Any],
    choices: Sequence[Choice],
    chosen: int | None,
    timings: dict[str, float],
    as_json: bool,
) -> None:
    """The object that --json asks for; or the chosen answer, where nothing was streamed."""
    if as_json:
        best_one = {} if chosen is None else {"best": chosen}
        listed = [vars(choice) for choice in choices]
        print_json({**figures, "choices": listed, **best_one, "timings": timings})
    elif chosen is not None:
        print(terminal_text(choices[chosen].text))


def _chat_ids(engine: "Engine", text: str, system: str | None) -> list[int]:
    from llamay.tokenizer.chat import encode_segments

    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return encode_segments(engine.model.tokenizer, engine.model.chat_template().render(messages))
