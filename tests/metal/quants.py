"""Weights in every format, with the values that gguf-py recorded for their blocks."""

from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from llamay.formats import Format
from llamay.mlx_kernels.metal.weights import Matrix

QUANTS = Path(__file__).resolve().parents[2] / "testdata" / "quants"


def recorded_bytes(
    format: Format, rows: int, columns: int, seed: int = 0, most: float = 1e4
) -> tuple[bytes, NDArray[np.float32]]:
    """Recorded blocks in random order, of values up to `most`, and their values [rows, columns]."""
    recorded = np.load(QUANTS / f"{format.name.lower()}.npz")
    blocks, values = recorded["blocks"], recorded["values"]
    usable = np.flatnonzero((np.abs(values) < most).all(axis=1))
    assert len(usable) > 10
    shape = rows, columns // format.block_len
    chosen = np.random.default_rng(seed).choice(usable, size=shape)
    return blocks[chosen].tobytes(), values[chosen].reshape(rows, columns)


def recorded_matrix(
    format: Format, rows: int, columns: int, seed: int = 0
) -> tuple[Matrix, NDArray[np.float32]]:
    """A matrix of recorded blocks, and its values [rows, columns]."""
    data, values = recorded_bytes(format, rows, columns, seed)
    blocks = np.frombuffer(data, np.uint8).reshape(rows, -1)
    return Matrix(mx.array(blocks), format, rows, columns), values
