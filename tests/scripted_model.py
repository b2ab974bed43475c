"""Models of which tests know what they say: a scripted one, and one that never ends its answer."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.gguf_writer import float_tensor, write_gguf
from tests.tiny_models import CONTROL_TOKENS, VOCAB, TinyConfig, tiny_metadata, tiny_tensors

CONFIG = TinyConfig(hidden=288, layers=1, heads=1, kv_heads=1, head_dim=16, ffn=32)
END = VOCAB.index("<|im_end|>")


def byte_ids(data: bytes) -> list[int]:
    """The tokens that are one byte each."""
    return [len(CONTROL_TOKENS) + byte for byte in data]


def write_scripted_model(path: Path, *chains: Sequence[int], **metadata: Any) -> None:
    """Writes a model in which each token has one successor, whatever stands before it.

    Attention and feed-forward add nothing, embeddings are distinct axes, and the head maps a
    token's axis to its successor: that one has a logit of 17, all others have 0.

    chains:   token ids, each followed by the next; what the chains leave open is followed by END
    metadata: keys and values of the file that are not the tiny models'; None leaves a key out
    """
    successors = np.full(len(VOCAB), END)
    for chain in chains:
        successors[list(chain[:-1])] = chain[1:]
    assert all(
        successors[token] == following for chain in chains for token, following in pairwise(chain)
    ), "a token with two successors"
    embeddings = np.eye(len(VOCAB), CONFIG.hidden, dtype=np.float32)
    head = np.zeros_like(embeddings)
    head[successors, np.arange(len(VOCAB))] = 1
    tensors = {
        name: float_tensor(
            (np.ones if name.endswith("norm.weight") else np.zeros)(tensor.shape, np.float32)
        )
        for name, tensor in tiny_tensors(CONFIG).items()
    }
    tensors["token_embd.weight"] = float_tensor(embeddings)
    tensors["output.weight"] = float_tensor(head)
    values = {
        key: value for key, value in (tiny_metadata(CONFIG) | metadata).items() if value is not None
    }
    write_gguf(path, values, tensors)


def write_endless_model(path: Path) -> None:
    """Writes a model with random weights that knows no token to end an answer."""
    config = TinyConfig(context_length=9999)
    metadata = tiny_metadata(config)
    metadata["tokenizer.ggml.tokens"] = ["<|a|>", "<|b|>", "<|c|>", *VOCAB[3:]]
    del metadata["tokenizer.ggml.eos_token_id"]
    write_gguf(path, metadata, tiny_tensors(config))
