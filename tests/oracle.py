"""A llama and qwen2 forward pass in plain numpy: the source of expected logits in tests.

Written for clarity only, from the published descriptions of the models and of the GGUF format,
and without any code of llamay but the table of formats. It is itself checked against recorded
values of `transformers` (logits) and of gguf-py (dequantised weights): `tests/test_oracle.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamay.formats import Format
from tests.block_codes import block_codes

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bytes = bytes | memoryview


def dequantise(format: Format, data: Bytes, shape: Sequence[int]) -> F32:
    """The float32 values of a tensor's bytes, in numpy's shape (outermost first).

    Block layouts as in ggml's `ggml-common.h`.
    """
    match format:
        case Format.F32:
            values = np.frombuffer(data, "<f4").astype(np.float32)
        case Format.F16:
            values = np.frombuffer(data, "<f2").astype(np.float32)
        case Format.BF16:
            values = (np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)).view(np.float32)
        case _:
            values = block_codes(format, data).values()
    return values.reshape(shape)


def _yarn_frequencies(frequencies: F64, rope: Callable[..., Any], head_dim: int) -> F64:
    """YaRN (arXiv 2309.00071): fast pairs keep their frequency, slow ones are interpolated.

    A pair is fast if it turns more than beta_fast times over the original context, slow if it
    turns less than beta_slow times; between the two (rounded outwards to whole pairs) the mix
    is linear in the pair's number.
    """
    base = rope("freq_base", 10000.0)
    original = rope("scaling.original_context_length")

    def pair_turning(turns: float) -> float:
        return float(head_dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base)))

    low = max(np.floor(pair_turning(rope("scaling.yarn_beta_fast", 32.0))), 0)
    high = min(np.ceil(pair_turning(rope("scaling.yarn_beta_slow", 1.0))), head_dim - 1)
    slowness = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    mixed: F64 = frequencies * ((1 - slowness) + slowness / rope("scaling.factor"))
    return mixed


def rope_tables(
    tensors: Mapping[str, F32], metadata: Mapping[str, Any], positions: int
) -> tuple[F64, F64]:
    """Cosines and sines [positions, head_dim / 2] of each position's and pair's rotation."""
    arch = metadata["general.architecture"]

    def rope(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.rope.{key}", default)

    head_dim = _head_dim(metadata)
    frequencies = rope("freq_base", 10000.0) ** (-np.arange(0, head_dim, 2) / head_dim)
    magnitude = 1.0
    match rope("scaling.type", "none"):
        case "none":
            pass
        case "linear":
            frequencies = frequencies / rope("scaling.factor")
        case "yarn":
            frequencies = _yarn_frequencies(frequencies, rope, head_dim)
            magnitude = 1 + 0.1 * np.log(rope("scaling.factor"))
        case other:
            raise NotImplementedError(f"rope scaling {other!r}")
    if "rope_freqs.weight" in tensors:
        frequencies = frequencies / tensors["rope_freqs.weight"].astype(np.float64)
    angles = np.arange(positions)[:, None] * frequencies
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude


def _head_dim(metadata: Mapping[str, Any]) -> int:
    arch = metadata["general.architecture"]
    default = metadata[f"{arch}.embedding_length"] // metadata[f"{arch}.attention.head_count"]
    return int(metadata.get(f"{arch}.attention.key_length", default))


def _rotate(x: F32, cos: F64, sin: F64, *, interleaved: bool) -> F32:
    """Rotates pairs of x [n, heads, head_dim]: elements (2i, 2i+1), or (i, i + head_dim/2)."""
    half = x.shape[-1] // 2
    first = np.s_[..., 0::2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1::2] if interleaved else np.s_[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    out = np.empty_like(x)
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[first] * sin + x[second] * cos
    return out


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    mean_square = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    normed: F32 = (x / np.sqrt(mean_square + eps) * weight).astype(np.float32)
    return normed


def _causal_attention(q: F32, k: F32, v: F32) -> F32:
    """q [n, heads, d], k and v [n, kv_heads, d] -> [n, heads * d]; row i reads rows 0..i."""
    n, heads, head_dim = q.shape
    group = heads // k.shape[1]
    future = np.triu(np.ones((n, n), bool), 1)
    out = np.empty_like(q)
    for head in range(heads):
        scores = (q[:, head] @ k[:, head // group].T).astype(np.float64) / np.sqrt(head_dim)
        scores[future] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:, head] = weights @ v[:, head // group]
    return out.reshape(n, heads * head_dim)


def forward(tensors: Mapping[str, F32], metadata: Mapping[str, Any], ids: Sequence[int]) -> F32:
    """Logits [len(ids), vocab] float32 after each token of one context that starts at 0.

    tensors:  GGUF tensor name -> dequantised weights, rows first ([outputs, inputs])
    metadata: the file's keys and values; architecture `llama` or `qwen2`
    """
    arch = metadata["general.architecture"]
    heads = metadata[f"{arch}.attention.head_count"]
    kv_heads = metadata.get(f"{arch}.attention.head_count_kv", heads)
    eps = metadata[f"{arch}.attention.layer_norm_rms_epsilon"]
    n, head_dim = len(ids), _head_dim(metadata)
    cos, sin = rope_tables(tensors, metadata, n)

    def linear(name: str, x: F32) -> F32:
        y: F32 = x @ tensors[f"{name}.weight"].T
        return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y

    def rotate(x: F32) -> F32:
        return _rotate(x, cos, sin, interleaved=arch == "llama")

    x = tensors["token_embd.weight"][np.asarray(ids)]
    for layer in range(metadata[f"{arch}.block_count"]):
        blk = f"blk.{layer}"
        h = _rms_norm(x, tensors[f"{blk}.attn_norm.weight"], eps)
        q = rotate(linear(f"{blk}.attn_q", h).reshape(n, heads, head_dim))
        k = rotate(linear(f"{blk}.attn_k", h).reshape(n, kv_heads, head_dim))
        v = linear(f"{blk}.attn_v", h).reshape(n, kv_heads, head_dim)
        x = x + linear(f"{blk}.attn_output", _causal_attention(q, k, v))
        h = _rms_norm(x, tensors[f"{blk}.ffn_norm.weight"], eps)
        gate, up = linear(f"{blk}.ffn_gate", h), linear(f"{blk}.ffn_up", h)
        x = x + linear(f"{blk}.ffn_down", gate / (1 + np.exp(-gate)) * up)
    h = _rms_norm(x, tensors["output_norm.weight"], eps)
    return linear("output" if "output.weight" in tensors else "token_embd", h)
