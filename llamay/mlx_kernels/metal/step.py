"""What a step tells the kernels, beside its activations: small arrays made by the host.

Arrays have 8 elements or more, so that the kernels' signature never changes.
"""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from llamay.mlx_kernels import Int32Array, Program, Rope, Step
from llamay.mlx_kernels.metal.pages import PageMap, Writer
from llamay.mlx_kernels.metal.schedule import spans


class StepInputs:
    """A step as the kernels take it.

    tokens, positions: [rows] int32, padded to a multiple of 8
    cosine, sine:      [rows, pairs] float32, rows padded
    pages:             [contexts, width] int32, places of the page table's pages, width padded
    spans:             of attention
    """

    def __init__(self, step: Step, program: Program, page_map: PageMap) -> None:
        page_tokens = page_map.layout.page_tokens
        self.rows = len(step.tokens)
        self.tokens, self.positions = padded(step.tokens), padded(step.positions)
        self.cosine, self.sine = rope_tables(step.positions, program.rope)
        places = page_map.places(step.page_table)
        self.pages = padded(places)
        of_row = places[step.contexts, step.positions // page_tokens]
        self.writer = Writer(page_map, np.where(step.writes, of_row, -1), step.positions)
        result_bytes = program.num_heads * (program.head_dim + 2) * 4
        self.spans = spans(step, page_tokens, result_bytes)


def padded(values: Int32Array) -> mx.array:
    """int32, with zeros up to a multiple of 8 in the last dimension."""
    before = [(0, 0)] * (values.ndim - 1)
    return mx.array(np.pad(values, [*before, (0, -values.shape[-1] % 8)]).astype(np.int32))


def sine_cosine(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of 0 <= x < 2^20: Taylor series about the nearest multiple of pi / 2, as csrc/fixed_math.h.

    No function of libm takes part, so the bits are the same on every machine.
    """
    turns = np.rint(x * float.fromhex("0x1.45f306dc9c883p-1"))
    rest = (x - turns * float.fromhex("0x1.921fb544p+0")) - turns * float.fromhex(
        "0x1.0b4611a4p-34"
    )
    rest = rest - turns * float.fromhex("0x1.13198a2e03707p-65")
    square = rest * rest
    sine, cosine = np.ones_like(rest), np.ones_like(rest)
    for k in range(18, 1, -2):
        sine = 1.0 - sine * square / (k * (k + 1))
        cosine = 1.0 - cosine * square / (k * (k - 1))
    sine = sine * rest
    quarter = turns.astype(np.int64) & 3
    return (
        np.choose(quarter, [sine, cosine, -sine, -cosine]),
        np.choose(quarter, [cosine, -sine, -cosine, sine]),
    )


def rope_tables(positions: Int32Array, rope: Rope) -> tuple[mx.array, mx.array]:
    """Cosine and sine of each row's position: [rows, pairs] float32 each, rows padded to 8."""
    rows = np.pad(positions, (0, -len(positions) % 8))
    sine, cosine = sine_cosine(rows[:, None] * np.array(rope.inverse))
    return (
        mx.array((cosine * rope.magnitude).astype(np.float32)),
        mx.array((sine * rope.magnitude).astype(np.float32)),
    )
