"""`llamay generate`: streams a completion, or several from one prefill."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamay.cli.answers import prompt_text, read_prompt, stream_answers
from llamay.cli.options import ModelOptions, model_flags, sampling_flags
from llamay.cli.output import print_json

if TYPE_CHECKING:
    from llamay.engine import Engine
    from llamay.sampling import SamplingParams


@click.command("generate")
@click.option("-p", "--prompt", help="The text to continue, or with --chat the message.")
@click.option("--file", "file", type=click.Path(path_type=Path), help="Text that goes before -p.")
@click.option("--chat", is_flag=True, help="Use the model's chat template.")
@click.option("--system", metavar="TEXT", help="System prompt; implies --chat.")
@click.option("--n", "count", type=click.IntRange(1, 256), default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one object at the end.")
@sampling_flags
@model_flags
def command(
    prompt: str | None,
    file: Path | None,
    chat: bool,
    system: str | None,
    count: int,
    as_json: bool,
    params: "SamplingParams",
    options: ModelOptions,
) -> None:
    """Stream a completion of a prompt.

    The prompt comes from -p, from --file, or from standard input. With --n, branches are forked
    from one prefill and decode together; branch i draws with a seed derived from --seed and i, so
    that the first equals what --n 1 writes.
    """
    from dataclasses import replace

    from llamay.sampling import child_seed

    text = prompt_text(prompt, file)
    begun = time.perf_counter()
    engine = options.load()
    opened = time.perf_counter()
    as_chat = chat or system is not None
    ids = _chat_ids(engine, text, system) if as_chat else engine.model.encode_prompt(text)
    branch = read_prompt(engine, ids)
    prefilled = time.perf_counter()
    branches = [branch, *branch.fork(count - 1)]
    each = [replace(params, seed=child_seed(params.seed, index)) for index in range(count)]
    choices = stream_answers(engine, branches, each, show=not as_json)
    if as_json:
        print_json(
            {
                "model": options.name,
                "prompt_ids": ids,
                "cached_tokens": 0,
                "choices": [vars(choice) for choice in choices],
                "timings": {
                    "open_s": opened - begun,
                    "prefill_s": prefilled - opened,
                    "prefill_tokens": len(ids),
                    "decode_s": time.perf_counter() - prefilled,
                    "decode_tokens": sum(len(choice.ids) for choice in choices),
                },
            }
        )


def _chat_ids(engine: "Engine", text: str, system: str | None) -> list[int]:
    from llamay.tokenizer import encode_segments

    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return encode_segments(engine.model.tokenizer, engine.model.chat_template().render(messages))
