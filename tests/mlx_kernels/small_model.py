"""A tiny model on the CPU kernels alone: no cache, and pages that are numpy arrays."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamay.formats import Format, KVLayout, KVPrecision
from llamay.gguf import open_gguf
from llamay.mlx_kernels import Control, Slabs, Step
from llamay.mlx_kernels.cpu import CpuKernels
from llamay.model.decoder import compile_program
from llamay.model.spec import read_spec
from tests.tiny_models import VOCAB, TinyConfig, random_integers, write_tiny_model

FORMATS = (Format.F32, Format.F16, Format.Q4_0, Format.Q4_1, Format.Q8_0)
# For the matrices in turn, so that products of one layer read activations of both kinds.
MIXED = (
    Format.Q4_K, Format.Q6_K, Format.Q5_0, Format.Q8_0, Format.Q5_K, Format.BF16, Format.Q2_K,
    Format.IQ4_NL, Format.Q3_K, Format.Q5_1, Format.IQ4_XS, Format.Q4_0, Format.F16,
)  # fmt: skip
PAGE_TOKENS = 16


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids of the tiny models."""
    ids: list[int] = (random_integers(seed, "tokens", count) % len(VOCAB)).tolist()
    return ids


class SmallModel:
    """A tiny model and `contexts` contexts of up to `positions` positions each."""

    def __init__(
        self,
        config: TinyConfig,
        format: Format | Sequence[Format],
        kernel_set: str,
        *,
        threads: int = 1,
        contexts: int = 1,
        positions: int = 64,
        precision: KVPrecision = KVPrecision.F32,
    ) -> None:
        kernels = CpuKernels(threads)
        kernels.kernel_set = kernel_set
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tiny.gguf"
            write_tiny_model(path, config, format)
            with open_gguf(path) as file:
                self._run = kernels.prepare(compile_program(read_spec(file), file))
        counts = (config.layers, config.kv_heads, config.head_dim)
        layout = KVLayout(*counts, PAGE_TOKENS, precision)
        pages = -(-positions // PAGE_TOKENS)
        memory = np.zeros((contexts * pages, kernels.page_bytes(layout)), np.uint8)
        self._slabs = Slabs(layout, contexts * pages, [memory])
        self._page_table = np.arange(contexts * pages, dtype=np.int32).reshape(contexts, pages)
        self._lengths = [0] * contexts

    def step(
        self, new_tokens: Sequence[list[int]], control: Control | None = None
    ) -> NDArray[np.float32] | None:
        """Appends tokens to the first contexts; the logits of every row, None if cancelled."""
        starts = self._lengths[: len(new_tokens)]
        spans = [np.arange(s, s + len(t)) for s, t in zip(starts, new_tokens, strict=True)]
        positions = np.concatenate(spans).astype(np.int32)
        step = Step(
            tokens=np.concatenate(new_tokens).astype(np.int32),
            positions=positions,
            contexts=np.repeat(np.arange(len(spans)), [len(s) for s in spans]).astype(np.int32),
            writes=np.ones(len(positions), dtype=np.bool_),
            page_table=self._page_table,
            logit_rows=np.arange(len(positions), dtype=np.int32),
        )
        found = self._run(step, self._slabs, control or Control())
        if found is None:
            return None
        self._lengths[: len(spans)] = [int(span[-1]) + 1 for span in spans]
        return found.logits
