"""Which rows attend together: those that see the same pages share one pass over them."""

from dataclasses import dataclass

import numpy as np

from llamay.mlx_kernels import Int32Array, Step

RUN = 256  # positions; attention is reduced in runs of these, counted from 0
ROWS = 8  # most rows of an item
ITEM = 4 + ROWS  # columns of an item
PARTIAL_BYTES = 64 * 2**20  # of the runs' results held at once


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, end) of a step, whose runs' results are held at once.

    tile: most rows of an item, 1 or 8
    runs: how many runs the longest row has
    """

    start: int
    end: int
    tile: int
    runs: int


def spans(step: Step, page_tokens: int, bytes_per_run: int) -> list[tuple[Span, Int32Array]]:
    """The step's rows in spans; bytes_per_run: of one row's result for one run.

    With each span its items, [items, 12] int32: line of the page table, run, rows in use, 0, the
    rows.
    """
    rows = len(step.tokens)
    runs = int(step.positions.max()) // RUN + 1
    size = max(1, PARTIAL_BYTES // (runs * bytes_per_run))
    return [
        _span(step, page_tokens, start, min(rows, start + size)) for start in range(0, rows, size)
    ]


def _span(step: Step, page_tokens: int, start: int, end: int) -> tuple[Span, Int32Array]:
    groups = _groups(step, page_tokens, start, end)
    tile = ROWS if any(len(rows) > 1 for rows in groups.values()) else 1
    items = []
    for (run, line, _), rows in groups.items():
        for at in range(0, len(rows), tile):
            part = rows[at : at + tile]
            items.append([line, run, len(part), 0, *part, *[part[0]] * (ITEM - 4 - len(part))])
    runs = int(step.positions[start:end].max()) // RUN + 1
    return Span(start, end, tile, runs), np.array(items, dtype=np.int32)


def _groups(
    step: Step, page_tokens: int, start: int, end: int
) -> dict[tuple[int, int, bytes], list[int]]:
    """Rows by (run, line of the page table that shows its pages, those pages' ids).

    Contexts share a run if it is full and its pages are the same.
    """
    groups: dict[tuple[int, int, bytes], list[int]] = {}
    lines: dict[tuple[int, bytes], int] = {}
    contexts = step.contexts[start:end]
    for context in np.unique(contexts):
        rows = start + np.flatnonzero(contexts == context)
        positions = step.positions[rows]
        for run in range(int(positions.max()) // RUN + 1):
            seeing = rows[positions >= run * RUN]
            first, last = run * RUN // page_tokens, (run * RUN + RUN - 1) // page_tokens
            pages = step.page_table[context, first : last + 1].tobytes()
            if positions.min() < run * RUN + RUN - 1:  # not full for all: on its own
                pages = b""
                line = int(context)
            else:
                line = lines.setdefault((run, pages), int(context))
            groups.setdefault((run, line, pages), []).extend(seeing.tolist())
    return groups
