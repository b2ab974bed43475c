"""Runs a program's steps: a graph each, and one evaluation."""

import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from llamay.formats import KVLayout
from llamay.mlx_kernels import Best, Control, DeviceUse, Slabs, Step, StepLogits, _cpu
from llamay.mlx_kernels.metal.ahead import Found, Layers, StepAhead, StepGraph
from llamay.mlx_kernels.metal.forward import Forward
from llamay.mlx_kernels.metal.kernels import Kernels
from llamay.mlx_kernels.metal.pages import PageMap, finish
from llamay.mlx_kernels.metal.schedule import ROWS
from llamay.mlx_kernels.metal.step import Plan, StepInputs
from llamay.mlx_kernels.metal.weights import Weights
from llamay.mlx_kernels.program import Program

Graph: TypeAlias = Callable[[dict[str, Any], Layers], tuple[mx.array, Found, Layers]]

KEPT = 16  # graphs of each model


class Runner:
    """Implements `RunStep`."""

    def __init__(
        self,
        kernels: Kernels,
        program: Program,
        weights: Weights,
        keeps: bool,
        ahead: StepAhead,
        use: DeviceUse,
    ) -> None:
        """keeps: whether graphs of few rows are kept: building them takes longer than a small model

        ahead, use: of the kernel set
        """
        self._kernels, self._program, self._weights = kernels, program, weights
        self._keeps, self._ahead, self._use = keeps, ahead, use
        self._graph = lru_cache(maxsize=KEPT)(self._new_graph)
        self._launches: dict[Plan, int] = {}

    def __call__(self, step: Step, slabs: Slabs, control: Control) -> StepLogits | None:
        """See `KernelSet.prepare`."""
        program = self._program
        if step.tokens.min() < 0 or step.tokens.max() >= program.vocab_size:
            raise ValueError(f"a token is not in the vocabulary of {program.vocab_size}")
        if control.cancelled:
            return None
        page_map = PageMap(slabs)

        def make_next() -> None:
            if self._keeps_graphs_of(len(step.tokens)):
                self._ahead.make(program, step, page_map, lambda next: self._made(next, page_map))

        current = self._ahead.take(program, step, page_map) or self._made(step, page_map)
        for chunk, written in zip(page_map.chunks, current.layers, strict=True):
            chunk.layers = written
        layers = [array for chunk in current.layers for array in chunk]
        started = time.perf_counter()
        finish([current.logits, *current.found, *layers], make_next)
        self._use.seconds += time.perf_counter() - started
        self._use.submissions += 1
        self._use.dispatches += current.launches
        control.words[1] = len(program.operations)
        # A view: who needs no whole row reads none.
        return StepLogits(np.asarray(current.logits), best_of(current.found))

    def _keeps_graphs_of(self, rows: int) -> bool:
        return self._keeps and rows <= ROWS

    def _made(self, step: Step, page_map: PageMap) -> StepGraph:
        inputs = StepInputs(step, self._program, page_map)
        graph = self._graph(inputs.plan, page_map.layout)
        made = graph(inputs.arrays, [chunk.layers for chunk in page_map.chunks])
        return StepGraph(inputs.arrays["tokens"], self._launches[inputs.plan], *made)

    def _new_graph(self, plan: Plan, layout: KVLayout) -> Graph:
        def build(arrays: dict[str, Any], layers: Layers) -> tuple[mx.array, Found, Layers]:
            kernels, program = self._kernels, self._program
            before = kernels.launches
            forward = Forward(kernels, program, self._weights, layout, plan, arrays, layers)
            for operation in program.operations:
                forward.apply(operation)
            self._launches[plan] = kernels.launches - before + forward.launches
            return forward.stream, forward.best, layers

        return mx.compile(build) if self._keeps_graphs_of(plan.rows) else build


def best_of(found: Found) -> tuple[Best, ...]:
    """Of each row of what `Kernels.best` gave, or of nothing."""
    if not found:
        return ()
    values, ids, totals = map(np.array, found)
    sums = [_cpu.log(int(total) * 2.0**-40) if total else math.nan for total in totals]
    return tuple(
        Best(row, ids[index], float(row[0]) + total)
        for index, (row, total) in enumerate(zip(values, sums, strict=True))
    )
