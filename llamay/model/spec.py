"""What a decoder is, as data read from GGUF metadata.

Keys are those of the GGUF specification (ggml's `docs/gguf.md`); defaults are llama.cpp's.
"""

from dataclasses import dataclass
from functools import partial
from math import sqrt

import numpy as np

from llamay.errors import GGUFError, UnsupportedModelError
from llamay.gguf import GGUFFile
from llamay.mlx_kernels.program import Activation, Rope
from llamay.model.conversions import with_usual_metadata
from llamay.model.rope import LONGROPE, PLAIN, RopeScaling, build_rope, read_scaling


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture differs from the others.

    rope_interleaved: rope rotates pairs (2i, 2i + 1), as llama's converted weights expect
    activation:       of the feed-forward part's gate
    head_norms:       each head's queries and keys are normed
    post_norms:       what attention and feed-forward add to the stream is normed
    scaled_embedding: the embedding is multiplied with the root of its length
    fused:            q, k and v are one tensor, gate and up another
    window:           positions that a layer sees if the file names no `attention.sliding_window`;
                      0 for all; None if the file's is ignored
    full_every:       every so many layers, one sees all positions in spite of the window; 0: none
    local_rope_base:  rope's base in layers with a window, which is not scaled; None: as in others
    soft_caps:        of attention's scores and of logits, if the file names none; 0 for none
    wide_heads:       a model of so many layers scales scores as if its heads were hidden / heads
    """

    rope_interleaved: bool = False
    activation: Activation = "silu"
    head_norms: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    fused: bool = False
    window: int | None = None
    full_every: int = 0
    local_rope_base: float | None = None
    soft_caps: tuple[float, float] = (0.0, 0.0)
    wide_heads: int = 0


ARCHITECTURES = {
    "llama": Architecture(rope_interleaved=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(head_norms=True),
    "gemma2": Architecture(
        activation="gelu",
        post_norms=True,
        scaled_embedding=True,
        window=4096,
        full_every=2,
        soft_caps=(50.0, 30.0),
        wide_heads=46,
    ),
    "gemma3": Architecture(
        activation="gelu",
        head_norms=True,
        post_norms=True,
        scaled_embedding=True,
        window=0,
        full_every=6,
        local_rope_base=10000.0,
        wide_heads=62,
    ),
    "phi3": Architecture(fused=True, window=0),
}
SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)

MAX_LAYERS = 4096  # what the kernels take; tensors are only looked for in layers that there may be
HEAD_DIM_MULTIPLE = 16  # the kernels' lanes
MAX_HEAD_DIM = 1024  # what their buffers hold


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and constants of a decoder; counts, not bytes.

    context_length:  positions that the model was trained for
    windows:         of each layer, see `Attention`
    local_rope_base: rope's base in layers with a window; None: as in the others
    soft_caps:       of attention's scores and of logits; 0 for none
    """

    architecture: str
    name: str
    num_layers: int
    hidden: int
    feed_forward: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope_dim: int
    rope_base: float
    rope_scaling: RopeScaling
    local_rope_base: float | None
    windows: tuple[int, ...]
    soft_caps: tuple[float, float]

    @property
    def traits(self) -> Architecture:
        """How its architecture differs from the others."""
        return ARCHITECTURES[self.architecture]

    @property
    def attention_scale(self) -> float:
        """Factor of q.k: 1 / sqrt(head_dim), for most."""
        wide = self.num_layers == self.traits.wide_heads
        return 1 / sqrt(max(1, self.hidden // self.num_heads) if wide else self.head_dim)

    @property
    def embedding_scale(self) -> float:
        """Factor of a token's vector."""
        return sqrt(self.hidden) if self.traits.scaled_embedding else 1.0

    def ropes(self, frequency_factors: list[float] | None) -> tuple[Rope, ...]:
        """The rotary embedding, and then that of layers with a window, if it is another.

        frequency_factors: the file's divisors of frequencies, if any
        """
        interleaved = self.traits.rope_interleaved
        bases = (self.rope_base, self.rope_scaling, frequency_factors)
        ropes = [build_rope(self.rope_dim, *bases, interleaved)]
        if self.local_rope_base is not None:
            ropes.append(build_rope(self.rope_dim, self.local_rope_base, PLAIN, None, interleaved))
        return tuple(ropes)

    def rope_of(self, layer: int) -> int:
        """Index of the layer's rope."""
        return int(self.local_rope_base is not None and self.windows[layer] > 0)


def read_spec(file: GGUFFile) -> DecoderSpec:
    """The decoder that a file describes.

    Raises UnsupportedModelError for an architecture or a variant of one that llamay does not run,
    GGUFError for keys that are missing, of a wrong type or out of range.
    """
    file = with_usual_metadata(file)
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )

    count = partial(_count, file, architecture)
    experts = file.get(f"{architecture}.expert_count", int, 0)
    if experts:
        raise UnsupportedModelError(
            f"{file.path}: mixture-of-experts models ({experts} experts) are not supported"
        )
    num_heads, hidden = count("attention.head_count"), count("embedding_length")
    head_dim = count("attention.key_length", max(1, hidden // num_heads))
    num_layers, scaling = count("block_count", most=MAX_LAYERS), read_scaling(file, architecture)
    context_length = count("context_length")
    if scaling.kind == LONGROPE:
        context_length = min(context_length, scaling.original_context)
    spec = DecoderSpec(
        architecture=architecture,
        name=file.get("general.name", str, file.path.stem),
        num_layers=num_layers,
        hidden=hidden,
        feed_forward=count("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        rope_dim=count("rope.dimension_count", head_dim),
        rope_base=file.get(f"{architecture}.rope.freq_base", float, 10000.0),
        rope_scaling=scaling,
        local_rope_base=_local_rope_base(file, architecture),
        windows=_windows(file, architecture, num_layers),
        soft_caps=_soft_caps(file, architecture),
    )
    _check(file, spec)
    return spec


def _count(
    file: GGUFFile,
    architecture: str,
    key: str,
    default: int | None = None,
    *,
    most: int = 2**31 - 1,
) -> int:
    full_key = f"{architecture}.{key}"
    value = file.get(full_key, int) if default is None else file.get(full_key, int, default)
    if not 1 <= value <= most:
        raise GGUFError(
            f"{file.path}: key {full_key!r}: expected a count from 1 to {most}, found {value}; "
            "use a complete conversion of the model"
        )
    return value


def _local_rope_base(file: GGUFFile, architecture: str) -> float | None:
    base = ARCHITECTURES[architecture].local_rope_base
    if base is None:
        return None
    return file.get(f"{architecture}.rope.freq_base_swa", float, base)


def _soft_caps(file: GGUFFile, architecture: str) -> tuple[float, float]:
    scores, logits = ARCHITECTURES[architecture].soft_caps
    return (
        file.get(f"{architecture}.attn_logit_softcapping", float, scores),
        file.get(f"{architecture}.final_logit_softcapping", float, logits),
    )


def _windows(file: GGUFFile, architecture: str, num_layers: int) -> tuple[int, ...]:
    """Of each layer, how many positions it sees; 0 for all."""
    traits = ARCHITECTURES[architecture]
    if traits.window is None:
        return (0,) * num_layers
    key = f"{architecture}.attention.sliding_window"
    window = file.get(key, int, traits.window)
    pattern = file.metadata.get(f"{key}_pattern", traits.full_every)
    if isinstance(pattern, np.ndarray) and np.isin(pattern, (0, 1)).all():
        windowed = [bool(each) for each in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
        windowed = [pattern == 0 or (layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        windowed = []
    if len(windowed) != num_layers or not 0 <= window <= 2**31 - 1:
        raise GGUFError(
            f"{file.path}: key {key!r} or {key + '_pattern'!r}: expected a number of positions, "
            f"and a period or a value for each of {num_layers} layers; use another conversion"
        )
    return tuple(window if each else 0 for each in windowed)


def _check(file: GGUFFile, spec: DecoderSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise GGUFError(
            f"{file.path}: expected {spec.num_heads} heads to be a multiple of the KV heads, "
            f"found {spec.num_kv_heads}; use a complete conversion of the model"
        )
    if spec.head_dim % HEAD_DIM_MULTIPLE or spec.head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"{file.path}: head size {spec.head_dim} is not supported, "
            f"only multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}"
        )
    if spec.rope_dim % 2 or spec.rope_dim > spec.head_dim:
        raise GGUFError(
            f"{file.path}: key '{spec.architecture}.rope.dimension_count': expected an even "
            f"number up to {spec.head_dim}, found {spec.rope_dim}; use another conversion"
        )
    value_dim = file.get(f"{spec.architecture}.attention.value_length", int, spec.head_dim)
    if value_dim != spec.head_dim:
        raise UnsupportedModelError(
            f"{file.path}: values of size {value_dim} beside keys of size {spec.head_dim} "
            "are not supported"
        )
    bases = [spec.rope_base, *([] if spec.local_rope_base is None else [spec.local_rope_base])]
    if not (0 < spec.norm_eps < 1 and all(1 <= base < 1e30 for base in bases)):
        raise GGUFError(
            f"{file.path}: expected a norm epsilon between 0 and 1 and rope bases from 1, found "
            f"{spec.norm_eps} and {bases}; use a complete conversion of the model"
        )
    if not all(cap == 0 or 1e-3 <= cap <= 1e3 for cap in spec.soft_caps):
        raise GGUFError(
            f"{file.path}: expected soft caps of scores and of logits of 0, or from 0.001 to 1000, "
            f"found {list(spec.soft_caps)}; use a complete conversion of the model"
        )
