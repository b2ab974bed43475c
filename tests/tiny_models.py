"""Small random models of every architecture, the same bytes on every machine.

Weights are random integers times a power of two: no transcendental function and no float rounding
takes part, so `float_weights` gives the same bits everywhere, and so do the files written.
"""

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llamay.formats import Format
from tests.gguf_writer import TensorData, write_gguf
from tests.quantisers import quantise

F32 = NDArray[np.float32]
ArchName = Literal["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]
RopeKind = Literal["none", "linear", "llama3", "yarn", "longrope"]

# Chosen so that with heads of 16 or 32 some pairs are kept, some blended and some interpolated.
LINEAR_FACTOR = 4.0
YARN_FACTOR = 4.0
YARN_ORIGINAL_CONTEXT = 1024
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ORIGINAL_CONTEXT = 256
LONGROPE_ORIGINAL_CONTEXT = 1024

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "Ġ t", "h e", "Ġt he", "i n", "e r", "a n", "Ġ a", "o n", "Ġ w", "r e", "Ġa n", "l l",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """Shape of a tiny model; the vocabulary is fixed (`VOCAB`).

    window, full_every: of layers' attention, see `llamay.model.spec`; 0: not named in the file
    soft_cap, logit_soft_cap: 0: not named in the file
    """

    arch: ArchName = "llama"
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    rope: RopeKind = "none"
    tied: bool = False
    seed: int = 1
    rope_base: float = 10000.0
    rms_eps: float = 2.0**-17
    context_length: int = 4096
    window: int = 0
    full_every: int = 0
    soft_cap: float = 0.0
    logit_soft_cap: float = 0.0


# Of each architecture, one that uses all that it has; windows end within a run of 256 positions.
CONFIGS: dict[str, TinyConfig] = {
    "llama": TinyConfig(),
    "qwen2": TinyConfig(arch="qwen2"),
    "qwen3": TinyConfig(arch="qwen3", head_dim=32),
    "gemma2": TinyConfig(
        arch="gemma2", tied=True, window=20, soft_cap=2.0, logit_soft_cap=3.0, head_dim=32
    ),
    "gemma3": TinyConfig(arch="gemma3", tied=True, window=20, full_every=2, rope_base=1e6),
    "phi3": TinyConfig(arch="phi3", window=20, rope="longrope", head_dim=32, hidden=128),
}


def _byte_characters() -> list[str]:
    """GPT-2's character for each byte: itself if printable, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


# 3 control tokens, 256 bytes, 12 merged tokens: 271, a prime, so that no kernel's tile divides it.
VOCAB = (*CONTROL_TOKENS, *_byte_characters(), *(merge.replace(" ", "") for merge in MERGES))


def random_integers(seed: int, name: str, count: int) -> NDArray[np.int64]:
    """`count` integers in [-32768, 32767], uniform, a function of (seed, name) only."""
    words = np.random.Philox(key=[seed, zlib.crc32(name.encode())]).random_raw(count)
    return (words >> np.uint64(48)).astype(np.int64) - 32768


def _shapes(config: TinyConfig) -> dict[str, tuple[int, ...]]:
    """GGUF tensor name -> numpy shape, in the order of the file; `rope_freqs` not included."""
    vocab, hidden, ffn = len(VOCAB), config.hidden, config.ffn
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden)}
    for layer in range(config.layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (q_rows, hidden),
            "attn_k.weight": (kv_rows, hidden),
            "attn_v.weight": (kv_rows, hidden),
            "attn_output.weight": (hidden, q_rows),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (ffn, hidden),
            "ffn_up.weight": (ffn, hidden),
            "ffn_down.weight": (hidden, ffn),
        }
        if config.arch == "qwen2":
            block |= {
                "attn_q.bias": (q_rows,),
                "attn_k.bias": (kv_rows,),
                "attn_v.bias": (kv_rows,),
            }
        if config.arch in ("qwen3", "gemma3"):
            block |= {"attn_q_norm.weight": (config.head_dim,)}
            block |= {"attn_k_norm.weight": (config.head_dim,)}
        if config.arch in ("gemma2", "gemma3"):
            block |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
        if config.arch == "phi3":
            for part in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
                del block[f"{part}.weight"]
            block |= {"attn_qkv.weight": (q_rows + 2 * kv_rows, hidden)}
            block |= {"ffn_up.weight": (2 * ffn, hidden)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not config.tied:
        shapes["output.weight"] = (vocab, hidden)
    return shapes


def float_weights(config: TinyConfig) -> dict[str, F32]:
    """Exact float32 weights by GGUF name; q and k rows in the order of transformers.

    Matrices are uniform in +-2^-k with 2^-k near 2/sqrt(columns), so that activations keep a
    size near 1; norms lie in [0.75, 1.25), biases in [-1, 1).
    """
    weights = {}
    for name, shape in _shapes(config).items():
        integers = random_integers(config.seed, name, int(np.prod(shape))).reshape(shape)
        if name.endswith("norm.weight"):
            weights[name] = (integers * 2.0**-17 + 1).astype(np.float32)
        elif name.endswith("bias"):
            weights[name] = (integers * 2.0**-15).astype(np.float32)
        else:
            halvings = shape[-1].bit_length() // 2 - 1
            weights[name] = (integers * 2.0 ** (-15 - halvings)).astype(np.float32)
    return weights


def interleave_rope_rows(rows: F32, heads: int) -> F32:
    """Reorders each head's rows from (i, i + d/2) pairs to (2i, 2i + 1) pairs.

    GGUF files of architecture llama store attn_q and attn_k like this, for rope on neighbours
    (the convention of Meta's original checkpoints); qwen2 files keep the order of transformers.
    """
    half = rows.shape[0] // heads // 2
    new_order = [
        head * 2 * half + pair + side * half
        for head in range(heads)
        for pair in range(half)
        for side in (0, 1)
    ]
    return rows[new_order]


def llama3_rope_factors(config: TinyConfig) -> F32:
    """What divides each pair's frequency (tensor rope_freqs.weight) in Llama 3.1's scaling.

    Wavelengths under original/high_freq_factor stay, those over original/low_freq_factor are
    stretched by `factor`, and those between are blended by the turns over the original context.
    """
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    turns = LLAMA3_ORIGINAL_CONTEXT * config.rope_base**-exponents / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / LLAMA3["factor"])).astype(np.float32)


def longrope_factors(config: TinyConfig) -> dict[str, F32]:
    """Divisors of each pair's frequency, up to the original context and beyond it."""
    pairs = np.arange(config.head_dim // 2, dtype=np.float32)
    return {"short": 1 + pairs / 16, "long": 1 + pairs / 2}


def longrope_attention_factor(config: TinyConfig) -> float:
    """Factor of sine and cosine: section 3.3 of the Phi-3 report's LongRoPE."""
    stretch = config.context_length / LONGROPE_ORIGINAL_CONTEXT
    return math.sqrt(1 + math.log(stretch) / math.log(LONGROPE_ORIGINAL_CONTEXT))


def tiny_tensors(
    config: TinyConfig, format: Format | Sequence[Format] = Format.F32
) -> dict[str, TensorData]:
    """The file's tensors: matrices in `format`, vectors in F32, q and k as the file has them.

    Of several formats the matrices take one after the other, and begin again.
    """
    formats = itertools.cycle([format] if isinstance(format, Format) else format)
    weights = float_weights(config)
    if config.rope == "llama3":
        weights["rope_freqs.weight"] = llama3_rope_factors(config)
    if config.rope == "longrope":
        for kind, factors in longrope_factors(config).items():
            weights[f"rope_factors_{kind}.weight"] = factors
    tensors = {}
    for name, values in weights.items():
        if config.arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = config.heads if name.endswith("attn_q.weight") else config.kv_heads
            values = interleave_rope_rows(values, heads)
        tensor_format = next(formats) if values.ndim == 2 else Format.F32
        data = quantise(values, tensor_format)
        tensors[name] = TensorData(tensor_format, values.shape, data)
    return tensors


def _rope_metadata(config: TinyConfig) -> dict[str, Any]:
    match config.rope:
        case "linear":
            return {"scaling.type": "linear", "scaling.factor": LINEAR_FACTOR}
        case "yarn":
            return {
                "scaling.type": "yarn",
                "scaling.factor": YARN_FACTOR,
                "scaling.original_context_length": YARN_ORIGINAL_CONTEXT,
            }
        case "longrope":
            return {
                "scaling.original_context_length": LONGROPE_ORIGINAL_CONTEXT,
                "scaling.attn_factor": longrope_attention_factor(config),
            }
    return {}


def _attention_metadata(config: TinyConfig) -> dict[str, Any]:
    keys = {
        "attention.sliding_window": config.window,
        "attention.sliding_window_pattern": config.full_every,
        "attn_logit_softcapping": config.soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }
    return {key: value for key, value in keys.items() if value}


def tiny_metadata(config: TinyConfig) -> dict[str, Any]:
    """The file's keys and values, tokenizer and chat template included."""
    architecture = {
        "context_length": config.context_length,
        "embedding_length": config.hidden,
        "block_count": config.layers,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        "vocab_size": len(VOCAB),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_base,
        **{f"rope.{key}": value for key, value in _rope_metadata(config).items()},
        **_attention_metadata(config),
    }
    control = len(CONTROL_TOKENS)
    return {
        "general.architecture": config.arch,
        "general.name": f"tiny {config.arch}",
        **{f"{config.arch}.{key}": value for key, value in architecture.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if config.arch == "qwen2" else "smollm",
        "tokenizer.ggml.tokens": list(VOCAB),
        # ggml's token types: 3 control, 1 normal.
        "tokenizer.ggml.token_type": np.array(
            [3] * control + [1] * (len(VOCAB) - control), np.int32
        ),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": VOCAB.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": VOCAB.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_tiny_model(
    path: Path, config: TinyConfig, format: Format | Sequence[Format] = Format.F32
) -> None:
    """Writes a whole model file: weights, tokenizer, chat template."""
    write_gguf(path, tiny_metadata(config), tiny_tensors(config, format))
