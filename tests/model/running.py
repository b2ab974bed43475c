"""Running models in tests: kernels by instruction set, whole sequences in chunks and batches."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llamay.formats import Format
from llamay.gguf import open_gguf
from llamay.kv import Cache, Context
from llamay.mlx_kernels import Control, KernelSet
from llamay.mlx_kernels.cpu import CpuKernels
from llamay.model.decoder import Decoder, Rows
from tests.mlx_kernels.small_model import FORMATS as FORMATS
from tests.mlx_kernels.small_model import MIXED as MIXED
from tests.tiny_models import CONFIGS, VOCAB, TinyConfig, random_integers, write_tiny_model

F32 = NDArray[np.float32]

PAGES_PER_SLAB = 8  # small, so that slabs come and go


@contextlib.contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """LLAMAY_ISA, which kernels read when they are made, and the sampler when it is called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMAY_ISA", name)
        yield


def cpu_kernels(isa: str, threads: int = 1) -> CpuKernels:
    with instruction_set(isa):
        return CpuKernels(threads)


def config_for(format: Format | Sequence[Format], **changes: Any) -> TinyConfig:
    """A tiny model's shape, wide enough for the blocks of the format or formats."""
    formats = [format] if isinstance(format, Format) else format
    if max(each.block_len for each in formats) > 32:
        changes = {"hidden": 256, "ffn": 256, "head_dim": 64} | changes
    return replace(CONFIGS[changes.get("arch", "llama")], **changes)


def load_tiny(
    folder: Path,
    config: TinyConfig,
    format: Format | Sequence[Format],
    kernels: KernelSet | None = None,
) -> Decoder:
    path = folder / "tiny.gguf"
    write_tiny_model(path, config, format)
    with open_gguf(path) as file:
        return Decoder(file, kernels or CpuKernels(1))


def loader(
    folder: Path, config: TinyConfig, format: Format | Sequence[Format]
) -> Callable[[str, int], Decoder]:
    """Decoders of one tiny model by (instruction set, threads), each made once."""

    @functools.cache
    def decoder(isa: str, threads: int = 1) -> Decoder:
        return load_tiny(folder, config, format, cpu_kernels(isa, threads))

    return decoder


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids of the tiny models."""
    return (random_integers(seed, "tokens", count) % len(VOCAB)).tolist()


def new_cache(decoder: Decoder, page_tokens: int = 64) -> Cache:
    return Cache(decoder.kernels, decoder.layout(page_tokens), pages_per_slab=PAGES_PER_SLAB)


def step(decoder: Decoder, cache: Cache, batch: Sequence[tuple[Context, list[int]]]) -> list[F32]:
    """One step of (context, new tokens); the logits of every row, by context."""
    rows = [Rows(context, ids, len(ids)) for context, ids in batch]
    logits = decoder.forward(cache, rows, Control())
    return np.split(logits, np.cumsum([len(ids) for _, ids in batch])[:-1])


def extend(
    decoder: Decoder, cache: Cache, context: Context, ids: list[int], chunk: int | None = None
) -> F32:
    """Appends `ids` in steps of `chunk` (None: one step) and returns the logits of every row."""
    size = chunk or len(ids)
    starts = range(0, len(ids), size)
    parts = [step(decoder, cache, [(context, ids[at : at + size])])[0] for at in starts]
    return np.concatenate(parts)


def plain(decoder: Decoder, ids: list[int]) -> F32:
    """Logits of every row of one fresh context, in one step."""
    cache = new_cache(decoder)
    return extend(decoder, cache, cache.new_context(), ids)


def same_bits(a: F32, b: F32) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))
