"""The graph of the step that is likely next, made while the GPU runs the one before.

Decoding goes on with the same contexts, each a position further, so that of the next step only the
tokens are unknown. Its graph is made with an array of zeros for them, into whose memory they are
written once they are known. A step that is another one gets a graph of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias
from weakref import ref

import mlx.core as mx
import numpy as np

from llamay.mlx_kernels import Int32Array, Step
from llamay.mlx_kernels.metal.pages import Chunk, PageMap
from llamay.mlx_kernels.program import Program

Layers: TypeAlias = list[list[mx.array]]  # [chunks][layers]
Found: TypeAlias = tuple[mx.array, ...]  # as `Kernels.best` gives them, or nothing


@dataclass(frozen=True, slots=True)
class StepGraph:
    """What a step computes, not yet evaluated.

    tokens:   the array that the graph takes them from
    launches: how many kernels it launches, MLX's own included
    layers:   of every chunk, as the step leaves them
    """

    tokens: mx.array
    launches: int
    logits: mx.array
    found: Found
    layers: Layers


class StepAhead:
    """Holds the graph of the step that is likely next.

    It refers to the layers that it reads: whatever writes to them has to `take` or `forget` it
    before, or it would be wrong, and they would be copied.
    """

    def __init__(self) -> None:
        self._made: _Made | None = None

    def forget(self, _: object = None) -> None:
        """Lets go of what was made."""
        self._made = None

    def take(self, program: Program, step: Step, page_map: PageMap) -> StepGraph | None:
        """The graph, its tokens filled in, if it is that of `step`; it is made for one use."""
        made, self._made = self._made, None
        if made is None or not made.is_for(program, step, page_map):
            return None
        np.asarray(made.graph.tokens)[: len(step.tokens)] = step.tokens
        return made.graph

    def make(
        self, program: Program, step: Step, page_map: PageMap, build: Callable[[Step], StepGraph]
    ) -> None:
        """Makes the graph of what is likely to follow `step`, if anything is."""
        following = next_step(step, page_map.layout.page_tokens)
        if following is not None:
            # It goes when the memory goes that it reads.
            chunks = tuple(ref(chunk, self.forget) for chunk in page_map.chunks)
            self._made = _Made(program, following, chunks, page_map.first, build(following))


@dataclass(frozen=True, slots=True)
class _Made:
    """A graph, and what it was made for."""

    program: Program
    step: Step
    chunks: tuple["ref[Chunk]", ...]
    first: Int32Array
    graph: StepGraph

    def is_for(self, program: Program, step: Step, page_map: PageMap) -> bool:
        chunks = [chunk() for chunk in self.chunks]
        return (
            program is self.program
            and chunks == page_map.chunks
            and np.array_equal(self.first, page_map.first)
            and self.step.best == step.best
            and all(
                np.array_equal(getattr(self.step, name), getattr(step, name))
                for name in ("positions", "contexts", "writes", "page_table", "logit_rows")
            )
        )


def next_step(step: Step, page_tokens: int) -> Step | None:
    """The step that decodes one more token of each context; None if `step` decodes none or a
    context needs a page that nobody knows yet."""
    rows = len(step.tokens)
    decodes = len(step.logit_rows) == rows == len(np.unique(step.contexts)) and step.writes.all()
    positions = step.positions + 1
    if not decodes or not (positions % page_tokens).all():
        return None
    return replace(step, tokens=np.zeros_like(step.tokens), positions=positions)
