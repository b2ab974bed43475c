"""Logits -> token. Stateless: the random number of a position depends on (seed, position) only.

So a restored or forked context needs no generator state, and an answer does not depend on what
else is in the batch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamay.errors import UsageError
from llamay.mlx_kernels import Best, Float32Array
from llamay.mlx_kernels.cpu import log_sum_exp, sample

MAX_BEST = 64  # logits that a device is asked to find
PENALTY_WINDOW = 64  # tokens that repeat_penalty looks back, as in llama.cpp
MAX_SEED = 2**64 - 1
_MASK = 2**32 - 1
_FORK_DOMAIN = 1  # fourth counter word of Philox for seeds; 0 for positions


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    temperature:       0 takes the most likely token
    top_k:             keeps the k most likely; 0 keeps all
    top_p:             keeps the most likely that together hold this share
    min_p:             keeps those at least this share as likely as the most likely one
    repeat_penalty:    divides (negative ones: multiplies) logits of the last 64 tokens; 1 is off
    presence_penalty:  subtracted from logits of tokens generated before
    frequency_penalty: subtracted for each time a token was generated before
    seed:              0 to 2^64 - 1
    max_tokens:        None goes on until the model stops or the context is full
    stop:              texts that end the answer; they are not part of it
    Raises UsageError for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100")
        _require("top-k", self.top_k, self.top_k >= 0, "0 or more")
        _require("top-p", self.top_p, 0 < self.top_p <= 1, "more than 0, up to 1")
        _require("min-p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        repeat = self.repeat_penalty
        _require("repeat-penalty", repeat, 0.01 <= repeat <= 100, "0.01 to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name.replace("_", "-"), value, -100 <= value <= 100, "-100 to 100")
        _require("seed", self.seed, 0 <= self.seed <= MAX_SEED, "0 to 2^64 - 1")
        limit = self.max_tokens
        _require("max-tokens", limit, limit is None or limit >= 1, "1 or more")
        _require("stop", self.stop, all(self.stop), "texts that are not empty")


def _require(name: str, value: object, ok: bool, expected: str) -> None:
    if not ok:
        raise UsageError(f"{name}: expected {expected}, found {value}")


def best_wanted(params: SamplingParams) -> int:
    """How many of the largest logits `choose` is given best; it reads no others if they suffice."""
    return _enough(params) or 1


def choose(
    logits: Float32Array,
    params: SamplingParams,
    history: Sequence[int],
    generated: Sequence[int],
    best: Best | None = None,
) -> tuple[int, float]:
    """The next token and its log-probability under the model; changes nothing.

    logits:    [vocab] float32, of the position before the next
    history:   all tokens before the next; their count is the next token's position
    generated: those of them that this answer wrote
    best:      `best_wanted` or more of the logits, where a device found them
    Which token it is does not depend on whether `best` is given.
    """
    enough = _enough(params)
    if best is not None and 0 < enough < len(logits):
        token = int(best.ids[_drawn(best.values[:enough], params, len(history))])
    elif _penalises(params):
        penalised = _penalised(logits, params, history[-PENALTY_WINDOW:], generated)
        token = _drawn(penalised, params, len(history))
    else:
        token = _drawn(logits, params, len(history))
    total = log_sum_exp(logits) if best is None else best.log_sum_exp
    return token, float(logits[token]) - total


def _enough(params: SamplingParams) -> int:
    """How many of the largest logits decide; 0 if that may take all."""
    if _penalises(params):
        return 0
    if params.temperature == 0:
        return 1
    return params.top_k if params.top_k <= MAX_BEST else 0


def _drawn(logits: Float32Array, params: SamplingParams, position: int) -> int:
    """The index of the logit that is chosen."""
    if params.temperature == 0:
        return int(np.argmax(logits))  # the first, so ties go to the lower id
    return sample(
        logits,
        temperature=params.temperature,
        top_k=min(params.top_k, len(logits)),
        top_p=params.top_p,
        min_p=params.min_p,
        uniform=uniform(params.seed, position),
    )


def _penalises(params: SamplingParams) -> bool:
    return (params.repeat_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)


def _penalised(
    logits: Float32Array, params: SamplingParams, window: Sequence[int], generated: Sequence[int]
) -> Float32Array:
    """A copy with the penalties; single IEEE operations, so the same bits everywhere."""
    logits = logits.copy()
    seen = np.unique(np.asarray(window, dtype=np.int64))
    factor = np.float32(params.repeat_penalty)
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    for token, count in Counter(generated).items():
        penalty = params.presence_penalty + count * params.frequency_penalty
        logits[token] -= np.float32(penalty)
    return logits


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: 53 bits of Philox(seed, position)."""
    first, second, _, _ = philox(seed, (position & _MASK, position >> 32, 0, 0))
    return ((second << 32 | first) >> 11) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """The seed of child `index` of a fork; child 0 goes on with the parent's."""
    if index == 0:
        return seed
    first, second, _, _ = philox(seed, (index & _MASK, index >> 32, 0, _FORK_DOMAIN))
    return second << 32 | first


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32 with 10 rounds: four random words of 32 bits, from a key of 64 bits.

    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 4.
    """
    low, high = key & _MASK, key >> 32
    a, b, c, d = counter
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (second >> 32) ^ b ^ low,
            second & _MASK,
            (first >> 32) ^ d ^ high,
            first & _MASK,
        )
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return a, b, c, d
