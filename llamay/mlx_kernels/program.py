"""A model as a flat list of coarse operations, which a kernel set prepares its own way."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from llamay.formats import Tensor

Activation: TypeAlias = Literal["silu", "gelu"]  # gelu: its approximation by tanh


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
    """stream = scale * table[token]; table: [vocab, hidden]."""

    table: Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """Norm, q/k/v with optional bias, norm of each head's q and k, rope; k and v to the row's page.

    rope:    index of the program's
    norm:    [hidden] float32
    weights: [heads * head_dim, hidden]
    bias:    [heads * head_dim] or None
    query_norm, key_norm: [head_dim] float32, or None if there is no norm of heads
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
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    rope: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of every row over its context's pages.

    window:   how many positions a row sees, its own the last; 0 for all from 0 on
    soft_cap: a score s becomes soft_cap * tanh(s / soft_cap); 0 for none
    """

    layer: int
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class PostNorm:
    """Norm of what a layer's half adds to the stream; weight: [hidden] float32."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """stream += norm(weights . attention); weights: [hidden, heads * head_dim]."""

    weights: Tensor
    post_norm: PostNorm | None = None


@dataclass(frozen=True, slots=True)
class FeedForward:
    """stream += post_norm(down . (activation(gate . n) * (up . n))), n = norm(stream)."""

    norm: Tensor
    eps: float
    gate: Tensor
    up: Tensor
    down: Tensor
    activation: Activation = "silu"
    post_norm: PostNorm | None = None


@dataclass(frozen=True, slots=True)
class Logits:
    """logits = head . norm(stream) for the rows that ask; head: [vocab, hidden].

    soft_cap: as of `Attention`
    """

    norm: Tensor
    eps: float
    head: Tensor
    soft_cap: float = 0.0


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

    ropes:  all of the same number of pairs and order
    source: names what the weights were read from, and another for every other content; "" if
            nothing does
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    attention_scale: float
    ropes: tuple[Rope, ...]
    operations: tuple[Operation, ...]
    source: str = ""
