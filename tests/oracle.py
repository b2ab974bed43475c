"""The forward pass of every architecture in plain numpy: the source of expected logits in tests.

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
    tensors: Mapping[str, F32], metadata: Mapping[str, Any], positions: int, *, local: bool
) -> tuple[F64, F64]:
    """Cosines and sines [positions, head_dim / 2] of each position's and pair's rotation.

    local: of gemma3's layers with a window
    """
    arch = metadata["general.architecture"]

    def rope(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.rope.{key}", default)

    head_dim = _head_dim(metadata)
    base = rope("freq_base_swa", 10000.0) if local else rope("freq_base", 10000.0)
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    magnitude = rope("scaling.attn_factor", 1.0)
    if local:
        angles = np.arange(positions)[:, None] * frequencies
        return np.cos(angles), np.sin(angles)
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
    for divisors in ("rope_freqs.weight", "rope_factors_short.weight"):
        if divisors in tensors:
            frequencies = frequencies / tensors[divisors].astype(np.float64)
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


def _soft_capped(x: F64, cap: float) -> F64:
    return cap * np.tanh(x / cap) if cap else x


def _causal_attention(q: F32, k: F32, v: F32, window: int, cap: float) -> F32:
    """q [n, heads, d], k and v [n, kv_heads, d] -> [n, heads * d].

    Row i reads rows 0..i, or only the last `window` of them if that is not 0.
    """
    n, heads, head_dim = q.shape
    group = heads // k.shape[1]
    unseen = np.triu(np.ones((n, n), bool), 1)
    if window:
        unseen |= np.tril(np.ones((n, n), bool), -window)
    out = np.empty_like(q)
    for head in range(heads):
        scores = (q[:, head] @ k[:, head // group].T).astype(np.float64) / np.sqrt(head_dim)
        scores = np.where(unseen, -np.inf, _soft_capped(scores, cap))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:, head] = weights @ v[:, head // group]
    return out.reshape(n, heads * head_dim)


def _activated(gate: F32, arch: str) -> F32:
    if arch not in ("gemma2", "gemma3"):
        silu: F32 = gate / (1 + np.exp(-gate))
        return silu
    gelu: F32 = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return gelu


FULL_EVERY = {"gemma2": 2, "gemma3": 6, "phi3": 0}  # 0: no layer sees all, if there is a window


def _window(metadata: Mapping[str, Any], layer: int) -> int:
    """How many positions a layer's rows see, 0 for all."""
    arch = metadata["general.architecture"]
    key = f"{arch}.attention.sliding_window"
    every = metadata.get(f"{key}_pattern", FULL_EVERY.get(arch, 1))
    return 0 if every and (layer + 1) % every == 0 else metadata.get(key, 0)


def forward(tensors: Mapping[str, F32], metadata: Mapping[str, Any], ids: Sequence[int]) -> F32:
    """Logits [len(ids), vocab] float32 after each token of one context that starts at 0.

    tensors:  GGUF tensor name -> dequantised weights, rows first ([outputs, inputs])
    metadata: the file's keys and values
    """
    arch = metadata["general.architecture"]
    heads = metadata[f"{arch}.attention.head_count"]
    kv_heads = metadata.get(f"{arch}.attention.head_count_kv", heads)
    eps = metadata[f"{arch}.attention.layer_norm_rms_epsilon"]
    caps = [metadata.get(f"{arch}.{of}_logit_softcapping", 0) for of in ("attn", "final")]
    n, head_dim = len(ids), _head_dim(metadata)
    tables = [rope_tables(tensors, metadata, n, local=local) for local in (False, True)]

    def linear(name: str, x: F32) -> F32:
        y: F32 = x @ tensors[f"{name}.weight"].T
        return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y

    def normed(name: str, x: F32) -> F32:
        """x itself if the model has no such norm."""
        weight = tensors.get(f"{name}.weight")
        return x if weight is None else _rms_norm(x, weight, eps)

    x = tensors["token_embd.weight"][np.asarray(ids)]
    if arch.startswith("gemma"):
        x = x * np.sqrt(np.float32(x.shape[1]))
    for layer in range(metadata[f"{arch}.block_count"]):
        blk, window = f"blk.{layer}", _window(metadata, layer)
        cos, sin = tables[arch == "gemma3" and window > 0]
        h = normed(f"{blk}.attn_norm", x)
        if arch == "phi3":
            splits = [heads * head_dim, (heads + kv_heads) * head_dim]
            q, k, v = np.split(linear(f"{blk}.attn_qkv", h), splits, axis=1)
        else:
            q, k, v = (linear(f"{blk}.attn_{part}", h) for part in "qkv")
        q, k, v = (part.reshape(n, -1, head_dim) for part in (q, k, v))
        q, k = normed(f"{blk}.attn_q_norm", q), normed(f"{blk}.attn_k_norm", k)
        q, k = (_rotate(part, cos, sin, interleaved=arch == "llama") for part in (q, k))
        h = linear(f"{blk}.attn_output", _causal_attention(q, k, v, window, caps[0]))
        x = x + normed(f"{blk}.post_attention_norm", h)
        h = normed(f"{blk}.ffn_norm", x)
        if arch == "phi3":
            gate, up = np.split(linear(f"{blk}.ffn_up", h), 2, axis=1)
        else:
            gate, up = linear(f"{blk}.ffn_gate", h), linear(f"{blk}.ffn_up", h)
        h = linear(f"{blk}.ffn_down", _activated(gate, arch) * up)
        x = x + normed(f"{blk}.post_ffw_norm", h)
    h = normed("output_norm", x)
    logits = linear("output" if "output.weight" in tensors else "token_embd", h)
    return _soft_capped(logits, caps[1]).astype(np.float32)
