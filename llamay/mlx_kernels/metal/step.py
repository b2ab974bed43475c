"""What a step tells the kernels, beside its activations: small arrays made by the host.

Arrays have 8 elements or more, so that the kernels' signature never changes.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from llamay.mlx_kernels import Int32Array, Step
from llamay.mlx_kernels.metal.pages import PageMap
from llamay.mlx_kernels.metal.schedule import Span, spans
from llamay.mlx_kernels.program import Program, Rope


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a step that its graph depends on, beside the arrays' shapes.

    spans:   of attention
    targets: (index of a chunk, whether only some of the step's rows are written there)
    logits:  how many rows want them
    picked:  whether those are not all
    best:    how many of the largest of each are wanted
    """

    rows: int
    spans: tuple[Span, ...]
    targets: tuple[tuple[int, bool], ...]
    logits: int
    picked: bool
    best: int


class StepInputs:
    """A step as the kernels take it: its plan, and its arrays by name.

    tokens, positions: [rows] int32, padded to a multiple of 8
    cosine, sine:      of each rope, [rows, pairs] float32, rows padded
    pages:             [contexts, width] int32, places of the page table's pages, width padded
    items:             of each span, [items, 12] int32
    picks:             [logits] int32, the rows that want them
    written, rows:     of each target, the step's rows that go there and the chunk's rows, int32
    """

    def __init__(self, step: Step, program: Program, page_map: PageMap) -> None:
        page_tokens = page_map.layout.page_tokens
        places = page_map.places(step.page_table)
        tables = [rope_tables(step.positions, rope) for rope in program.ropes]
        result_bytes = program.num_heads * (program.head_dim + 2) * 4
        parts = spans(step, page_tokens, result_bytes)
        of_row = places[step.contexts, step.positions // page_tokens]
        targets = page_map.targets(np.where(step.writes, of_row, -1), step.positions)
        count = len(step.tokens)
        self.plan = Plan(
            rows=count,
            spans=tuple(span for span, _ in parts),
            targets=tuple((chunk, len(written) < count) for chunk, written, _ in targets),
            logits=len(step.logit_rows),
            picked=not np.array_equal(step.logit_rows, np.arange(count)),
            best=min(step.best, program.vocab_size),
        )
        self.arrays: dict[str, Any] = {
            "tokens": padded(step.tokens),
            "positions": padded(step.positions),
            "cosine": [cosine for cosine, _ in tables],
            "sine": [sine for _, sine in tables],
            "pages": padded(places),
            "items": [mx.array(items) for _, items in parts],
            "picks": mx.array(step.logit_rows),
            "written": [mx.array(written) for _, written, _ in targets],
            "rows": [mx.array(rows) for _, _, rows in targets],
        }


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
