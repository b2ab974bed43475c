"""What a decoder is, as data read from GGUF metadata.

Keys are those of the GGUF specification (ggml's `docs/gguf.md`); defaults are llama.cpp's.
"""

from dataclasses import dataclass

from llamay.errors import GGUFError, UnsupportedModelError
from llamay.gguf import GGUFFile
from llamay.mlx_kernels.program import Rope
from llamay.model.rope import RopeScaling, build_rope, read_scaling


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture differs from the others.

    rope_interleaved: rope rotates pairs (2i, 2i + 1), as llama's converted weights expect
    """

    rope_interleaved: bool


ARCHITECTURES = {
    "llama": Architecture(rope_interleaved=True),
    "qwen2": Architecture(rope_interleaved=False),
}
SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)

HEAD_DIM_MULTIPLE = 16  # the kernels' lanes
MAX_HEAD_DIM = 1024  # what their buffers hold


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and constants of a decoder; counts, not bytes.

    context_length: positions that the model was trained for
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

    @property
    def attention_scale(self) -> float:
        """Factor of q.k: 1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    def rope(self, frequency_factors: list[float] | None) -> Rope:
        """The rotary embedding; `frequency_factors` is the file's `rope_freqs.weight`, if any."""
        interleaved = ARCHITECTURES[self.architecture].rope_interleaved
        return build_rope(
            self.rope_dim, self.rope_base, self.rope_scaling, frequency_factors, interleaved
        )


def read_spec(file: GGUFFile) -> DecoderSpec:
    """The decoder that a file describes.

    Raises UnsupportedModelError for an architecture or a variant of one that llamay does not run,
    GGUFError for keys that are missing, of a wrong type or out of range.
    """
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )

    def count(key: str, default: int | None = None) -> int:
        full_key = f"{architecture}.{key}"
        value = file.get(full_key, int) if default is None else file.get(full_key, int, default)
        if not 1 <= value <= 2**31 - 1:
            raise GGUFError(
                f"{file.path}: key {full_key!r}: expected a count from 1, found {value}; "
                "use a complete conversion of the model"
            )
        return value

    experts = file.get(f"{architecture}.expert_count", int, 0)
    if experts:
        raise UnsupportedModelError(
            f"{file.path}: mixture-of-experts models ({experts} experts) are not supported"
        )
    num_heads, hidden = count("attention.head_count"), count("embedding_length")
    head_dim = count("attention.key_length", max(1, hidden // num_heads))
    spec = DecoderSpec(
        architecture=architecture,
        name=file.get("general.name", str, file.path.stem),
        num_layers=count("block_count"),
        hidden=hidden,
        feed_forward=count("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=count("context_length"),
        norm_eps=file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        rope_dim=count("rope.dimension_count", head_dim),
        rope_base=file.get(f"{architecture}.rope.freq_base", float, 10000.0),
        rope_scaling=read_scaling(file, architecture),
    )
    _check(file, spec)
    return spec


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
    if not (0 < spec.norm_eps < 1 and 1 <= spec.rope_base < 1e30):
        raise GGUFError(
            f"{file.path}: expected a norm epsilon between 0 and 1 and a rope base from 1, found "
            f"{spec.norm_eps} and {spec.rope_base}; use a complete conversion of the model"
        )
