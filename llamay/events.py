"""What a generation tells whoever watches it; plain data, no arrays."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """The prompt is being read: `done` of `total` tokens, `cached` of them not computed."""

    total: int
    cached: int
    done: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A branch went on by tokens.

    branch:   its index
    ids:      the tokens, committed to its context
    logprobs: natural logarithm of each token's probability under the model, before sampling options
    text:     what became complete with them; may be empty, and may hold back what could be the
              beginning of a stop text
    """

    branch: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A branch ended.

    reason: stop (the model ended its turn or wrote a stop text), length (max_tokens), or context
            (the context is full)
    seconds: since its first step; tokens: how many it wrote
    """

    branch: int
    reason: FinishReason
    tokens: int
    seconds: float


Event: TypeAlias = PrefillProgress | TextDelta | Finished
