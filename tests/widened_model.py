"""The default model with rows that are a multiple of every format's block, in any weight format.

Hidden 576 becomes 768 and three groups of three heads become four, all by zeros, which leaves the
logits as they were but for rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamay.formats import Format
from llamay.gguf import GGUFFile
from tests import oracle
from tests.gguf_writer import TensorData
from tests.quantisers import quantise

F32 = NDArray[np.float32]

HIDDEN, WIDE = 576, 768
GROUPS, HEADS_IN_GROUP, HEAD_DIM = 3, 3, 64
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class WidenedModel:
    """metadata: of the file, the tokenizer's too; weights: float32 by GGUF's names."""

    metadata: Mapping[str, Any]
    weights: Mapping[str, F32]

    def tensors(self, format: Format) -> dict[str, TensorData]:
        """As they go into a file, matrices rounded to the format."""
        return {name: _rounded(values, format) for name, values in self.weights.items()}


def widen(file: GGUFFile) -> WidenedModel:
    """Of the default model's file."""
    weights = {
        name: _widened(name, oracle.dequantise(tensor.format, tensor.data, tensor.shape))
        for name, tensor in file.tensors.items()
    }
    eps = file.metadata["llama.attention.layer_norm_rms_epsilon"] * HIDDEN / WIDE
    changed = {
        "embedding_length": WIDE,
        "attention.head_count": (GROUPS + 1) * HEADS_IN_GROUP,
        "attention.head_count_kv": GROUPS + 1,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": eps,
    }
    return WidenedModel(
        {**file.metadata, **{f"llama.{key}": value for key, value in changed.items()}}, weights
    )


def _widened(name: str, values: F32) -> F32:
    """A norm's weights make up for a mean over more values."""
    if values.ndim == 1:
        return np.pad(values * np.float32(np.sqrt(HIDDEN / WIDE)), (0, WIDE - HIDDEN))
    rows = 0
    if name.endswith(("attn_q.weight", "attn_output.weight", "ffn_down.weight")):
        rows = WIDE - HIDDEN
    elif name.endswith(("attn_k.weight", "attn_v.weight")):
        rows = HEAD_DIM
    columns = WIDE - HIDDEN if values.shape[1] == HIDDEN else 0
    return np.pad(values, ((0, rows), (0, columns)))


def _rounded(values: F32, format: Format) -> TensorData:
    kind = format if values.ndim == 2 else Format.F32
    starts = range(0, len(values), ROWS_AT_ONCE)
    data = b"".join(quantise(values[at : at + ROWS_AT_ONCE], kind) for at in starts)
    return TensorData(kind, values.shape, data)
