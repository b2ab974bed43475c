"""What a model would have written instead: the likeliest tokens at a place of a context."""

from collections.abc import Sequence

import numpy as np

from llamay.engine import Engine
from llamay.kv import Context
from llamay.mlx_kernels import Float32Array
from llamay.mlx_kernels.cpu import log_sum_exp


def alternatives(
    engine: Engine, context: Context, before: Sequence[int], count: int
) -> list[tuple[str, float]]:
    """The likeliest tokens after `before`, each with its text and its log-probability.

    context: holds `before` at its beginning, else the list is empty; nothing is written to it
    Waits for the engine, which computes one row. The logarithms are those that an answer has.
    """

    def logits() -> tuple[Float32Array, float] | None:
        if not before or list(context.tokens[: len(before)]) != list(before):
            return None
        decoder, fork = engine.model.decoder, context.fork()
        try:
            fork.truncate(len(before))
            raw = decoder.last_logits(engine.cache, fork)
        finally:
            fork.close()
        best = decoder.kernels.best(raw[None], 1)
        return raw, best[0].log_sum_exp if best else log_sum_exp(raw)

    found = engine.call(logits)
    if found is None:
        return []
    raw, total = found
    likeliest = np.argsort(-raw, kind="stable")[:count]  # ties go to the lower id
    tokenizer = engine.model.tokenizer
    return [
        (tokenizer.token_bytes(int(id)).decode("utf-8", "replace"), float(raw[id]) - total)
        for id in likeliest
    ]
