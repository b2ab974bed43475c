"""A model as a flat list of coarse operations, which a kernel set prepares its own way."""

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from llamay.formats import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding.

    inverse:     [rotated dimensions / 2] radians per position
    interleaved: rotates pairs (2i, 2i + 1) if set, else (i, i + rotated / 2)
    magnitude:   factor of sine and cosine (YaRN's attention factor; 1 otherwise)
    """

    inverse: tuple[float, ...]
    interleaved: bool
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Embed:
    """stream = table[token]; table: [vocab, hidden]."""

    table: Tensor


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """Norm, q/k/v with optional bias, rope; k and v are written to the row's page.

    norm: [hidden] float32; weights: [heads * head_dim, hidden]; bias: [heads * head_dim] or None
    """

    layer: int
    norm: Tensor
    eps: float
    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of every row over its context's pages, positions 0 to its own."""

    layer: int


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """stream += weights . attention; weights: [hidden, heads * head_dim]."""

    weights: Tensor


@dataclass(frozen=True, slots=True)
class FeedForward:
    """stream += down . (silu(gate . n) * (up . n)), n = norm(stream)."""

    norm: Tensor
    eps: float
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Logits:
    """logits = head . norm(stream) for the rows that ask; head: [vocab, hidden]."""

    norm: Tensor
    eps: float
    head: Tensor


Operation: TypeAlias = Embed | AttentionInput | Attention | AttentionOutput | FeedForward | Logits


def matrices(operation: Operation) -> tuple[Tensor, ...]:
    """The weights of an operation that rows are multiplied with, or looked up in."""
    match operation:
        case Embed():
            return (operation.table,)
        case AttentionInput():
            return (operation.query, operation.key, operation.value)
        case Attention():
            return ()
        case AttentionOutput():
            return (operation.weights,)
        case FeedForward():
            return (operation.gate, operation.up, operation.down)
        case Logits():
            return (operation.head,)
        case _:
            assert_never(operation)


@dataclass(frozen=True, slots=True)
class Program:
    """A model's forward pass.

    source: names what the weights were read from, and another for every other content; "" if
            nothing does
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    attention_scale: float
    rope: Rope
    operations: tuple[Operation, ...]
    source: str = ""
