"""Rotary embedding frequencies, with the ways of stretching them to longer contexts.

Linear scaling: Chen et al., "Extending Context Window of LLMs via Position Interpolation"; YaRN:
Peng et al., "YaRN: Efficient Context Window Extension of LLMs", section 3, with its default ramp
(32 and 1 rotations). Llama 3's scaling comes as a tensor of divisors, `rope_freqs.weight`; Phi-3's
(Ding et al., "LongRoPE") as two, `rope_factors_short.weight` up to the original context and
`rope_factors_long.weight` beyond. Which of these a position's keys have would depend on how long
its context becomes, so the short ones are used, and the original context is the longest.
"""

from dataclasses import dataclass
from math import ceil, floor, pi

from llamay.errors import GGUFError, UnsupportedModelError
from llamay.gguf import GGUFFile
from llamay.mlx_kernels import _cpu
from llamay.mlx_kernels.program import Rope

YARN_FAST_ROTATIONS = 32.0
YARN_SLOW_ROTATIONS = 1.0
LONGROPE = "longrope"
FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_short.weight"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rope is stretched.

    kind:             none, linear, yarn or longrope
    factor:           how much longer the context is than the original one
    attention_factor: of sine and cosine
    """

    kind: str
    factor: float
    original_context: int
    attention_factor: float


PLAIN = RopeScaling("none", 1.0, 1, 1.0)


def read_scaling(file: GGUFFile, architecture: str) -> RopeScaling:
    """The rope scaling that a file names.

    Raises UnsupportedModelError for another kind, GGUFError for numbers out of range.
    """
    prefix = f"{architecture}.rope"
    linear = file.get(f"{prefix}.scale_linear", float, 1.0)  # the key before rope.scaling.*
    kind = file.get(f"{prefix}.scaling.type", str, "linear" if linear != 1 else "none")
    if kind in ("none", LONGROPE) and SHORT_FACTORS in file.tensors:
        kind = LONGROPE
    elif kind == LONGROPE:
        raise UnsupportedModelError(
            f"{file.path}: rope scaling {LONGROPE!r} is not supported without {SHORT_FACTORS!r}"
        )
    factor = file.get(f"{prefix}.scaling.factor", float, linear)
    if kind not in ("none", "linear", "yarn", LONGROPE):
        raise UnsupportedModelError(
            f"{file.path}: rope scaling {kind!r} is not supported; "
            "supported are linear, yarn and longrope"
        )
    if not 1 <= factor < 1e6:
        raise GGUFError(
            f"{file.path}: key '{prefix}.scaling.factor': expected a number from 1, "
            f"found {factor}; use a complete conversion of the model"
        )
    trained = file.get(f"{architecture}.context_length", int)
    original = file.get(f"{prefix}.scaling.original_context_length", int, trained)
    attention_factor = file.get(f"{prefix}.scaling.attn_factor", float, 1.0)
    if original < 1 or not 0 < attention_factor < 1e3:
        raise GGUFError(
            f"{file.path}: keys '{prefix}.scaling.original_context_length' and '.attn_factor': "
            f"expected positive numbers, found {original} and {attention_factor}; "
            "use a complete conversion of the model"
        )
    return RopeScaling(kind, factor, original, attention_factor)


def build_rope(
    dim: int,
    base: float,
    scaling: RopeScaling,
    frequency_factors: list[float] | None,
    interleaved: bool,
) -> Rope:
    """The rotation of each pair of dimensions; `frequency_factors` [dim / 2] divide it."""
    inverse = _cpu.rope_frequencies(dim, base)
    if frequency_factors:
        inverse = [f / factor for f, factor in zip(inverse, frequency_factors, strict=True)]
    magnitude = scaling.attention_factor
    if scaling.kind == "linear":
        inverse = [f / scaling.factor for f in inverse]
    elif scaling.kind == "yarn":
        kept = _yarn_kept(dim, base, scaling.original_context)
        inverse = [
            f * keep + f / scaling.factor * (1 - keep)
            for f, keep in zip(inverse, kept, strict=True)
        ]
        magnitude *= 1 + 0.1 * _cpu.log(scaling.factor)
    return Rope(tuple(inverse), interleaved, magnitude)


def _yarn_kept(dim: int, base: float, original_context: int) -> list[float]:
    """How much of each pair's own frequency stays: 1 for fast pairs, falling to 0 for slow ones."""

    def pair_of(rotations: float) -> float:
        """The pair that turns so many times over the original context."""
        if base == 1:
            return 0.0
        return dim * _cpu.log(original_context / (rotations * 2 * pi)) / (2 * _cpu.log(base))

    low = max(0, floor(pair_of(YARN_FAST_ROTATIONS)))
    high = min(dim - 1, ceil(pair_of(YARN_SLOW_ROTATIONS)))
    span = max(0.001, high - low)
    return [1 - min(1.0, max(0.0, (pair - low) / span)) for pair in range(dim // 2)]
