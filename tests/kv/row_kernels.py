"""A kernel set whose pages are rows one after another, and what snapshot tests need around it."""

import json
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamay.formats import KVLayout, KVPrecision
from llamay.kv import Cache, Context
from llamay.kv.snapshot import Identity, Key, write_segment
from llamay.mlx_kernels import Best, Float32Array, RunStep, Slabs
from llamay.mlx_kernels.program import Program

Rows = NDArray[np.uint8]

VOCAB = 50
SCALE = np.float32(5123 / 2**17)  # no multiple of it but 0 is a float16
IDENTITY = Identity("made-up", VOCAB, "1a" * 32, "2b" * 32)


class RowKernels:
    """Slab: [pages, page_tokens, row_bytes] uint8; import_delay_s: how long an import takes."""

    name = "rows"
    row_threads = 2
    numerics_id = "rows"

    def __init__(self) -> None:
        self.import_delay_s = 0.0

    def prepare(self, program: Program) -> RunStep:
        raise NotImplementedError

    def best(self, logits: Float32Array, count: int) -> tuple[Best, ...]:
        raise NotImplementedError

    def new_slab(self, layout: KVLayout, pages: int) -> Rows:
        return np.full((pages, layout.page_tokens, layout.row_bytes), 0xAA, np.uint8)

    def page_bytes(self, layout: KVLayout) -> int:
        return layout.page_tokens * layout.row_bytes

    def copy_page(self, slabs: Slabs, source: int, target: int) -> None:
        self._page(slabs, target)[:] = self._page(slabs, source)

    def export_rows(
        self, slabs: Slabs, pages: Sequence[int], start: int, end: int, out: Rows | None = None
    ) -> Rows:
        size = slabs.layout.page_tokens
        if out is None:
            out = np.empty((end - start, slabs.layout.row_bytes), np.uint8)
        assert out.shape == (end - start, slabs.layout.row_bytes)
        for row, position in zip(out, range(start, end), strict=True):
            row[:] = self._page(slabs, pages[position // size])[position % size]
        return out

    def import_rows(self, slabs: Slabs, pages: Sequence[int], start: int, rows: Rows) -> None:
        time.sleep(self.import_delay_s)
        size = slabs.layout.page_tokens
        assert rows.shape == (len(rows), slabs.layout.row_bytes)
        for position, row in enumerate(rows, start):
            self._page(slabs, pages[position // size])[position % size] = row

    def _page(self, slabs: Slabs, page: int) -> Rows:
        slab: Rows = slabs.arrays[page // slabs.pages_per_slab]
        entry: Rows = slab[page % slabs.pages_per_slab]
        return entry


def new_cache(
    page_tokens: int = 4,
    precision: KVPrecision = KVPrecision.F32,
    *,
    numerics: str | None = None,
    layers: int = 1,
    budget_pages: int | None = None,
) -> Cache:
    """A cache of few pages a slab; its numerics id is as kernel sets make them."""
    layout = KVLayout(layers, 1, 16, page_tokens, precision)
    page_bytes = page_tokens * layout.row_bytes
    return Cache(
        RowKernels(),
        layout,
        numerics=f"rows-v1-{precision.value}" if numerics is None else numerics,
        pages_per_slab=3,
        budget_bytes=None if budget_pages is None else budget_pages * page_bytes,
    )


def f32_rows(count: int, layout: KVLayout, salt: int = 0) -> NDArray[np.float32]:
    """Values [count, layers * 2 * kv_heads, head_dim], some of them zero or tiny.

    The largest of every vector is 127 times SCALE, so that it is quantised with that.
    """
    heads = layout.layers * 2 * layout.kv_heads
    words = np.random.Philox(key=[7, salt]).random_raw(count * heads * layout.head_dim)
    values = (words % 2001).astype(np.float32) / 256 - 3.9
    values[words % 13 == 0] *= np.float32(1e-3)
    values[words % 97 == 0] = 0
    values = values.reshape(count, heads, layout.head_dim)
    values[:, :, 3] = 127 * SCALE
    return values


def encode(values: NDArray[np.float32], precision: KVPrecision) -> Rows:
    """Rows of these values in a precision, as the byte table has them.

    values: [count, vectors, head_dim], keys and values of one KV head in turn
    """
    count, vectors, _ = values.shape
    parts = []
    for vector in range(vectors):
        x = values[:, vector]
        quantised = precision is KVPrecision.Q8 or (precision is KVPrecision.VQ8 and vector % 2)
        if quantised:
            q = np.rint(x / SCALE).astype(np.int8)
            parts += [np.full((count, 1), SCALE).view(np.uint8), q.view(np.uint8)]
        elif precision is KVPrecision.F16:
            parts.append(x.astype("<f2").view(np.uint8))
        else:
            parts.append(np.ascontiguousarray(x).view(np.uint8))
    return np.concatenate(parts, axis=1)


def decode(rows: Rows, precision: KVPrecision, layout: KVLayout) -> NDArray[np.float32]:
    """The reverse of `encode`, for any scale: [count, vectors, head_dim]."""
    at, values = 0, []
    for vector in range(layout.layers * 2 * layout.kv_heads):
        is_value = vector // layout.kv_heads % 2 == 1
        if precision is KVPrecision.Q8 or (precision is KVPrecision.VQ8 and is_value):
            scale = np.ascontiguousarray(rows[:, at : at + 4]).view("<f4")
            q = np.ascontiguousarray(rows[:, at + 4 : at + 4 + layout.head_dim]).view(np.int8)
            values.append(scale * q.astype(np.float32))
            at += 4 + layout.head_dim
            continue
        kind = "<f2" if precision is KVPrecision.F16 else "<f4"
        size = np.dtype(kind).itemsize * layout.head_dim
        values.append(np.ascontiguousarray(rows[:, at : at + size]).view(kind).astype(np.float32))
        at += size
    assert at == rows.shape[1]
    return np.stack(values, axis=1)


def fill(cache: Cache, tokens: Sequence[int], salt: int = 0, *, logits: bool = False) -> Context:
    """A context of these tokens with rows of its own."""
    context = cache.new_context()
    append(cache, context, tokens, salt)
    if logits:
        context.logits = np.arange(VOCAB, dtype=np.float32) / 3 - 5
    return context


def append(cache: Cache, context: Context, tokens: Sequence[int], salt: int = 0) -> None:
    """A step of a context: its rows are a function of the positions and `salt` only."""
    layout, start = cache.store.layout, context.length
    rows = encode(f32_rows(start + len(tokens), layout, salt), layout.precision)
    context.reserve(len(tokens))
    kernels = cache.store.kernels
    kernels.import_rows(cache.store.slabs, context.page_ids, start, rows[start:])
    context.commit(tokens)


def rows_of(cache: Cache, context: Context) -> bytes:
    """All committed rows."""
    store = cache.store
    return store.kernels.export_rows(store.slabs, context.page_ids, 0, context.length).tobytes()


def write_chain(
    folder: Path, context: Context, cuts: list[int], key: Key | None = None
) -> list[Path]:
    """Segments between these positions, the last with logits if the context has them."""
    paths = []
    for start, end in pairwise(cuts):
        path, parent = folder / f"{start}-{end}", paths[-1].name if paths else ""
        write_segment(path, IDENTITY, context, start, end, parent=parent, key=key)
        paths.append(path)
    return paths


def as_version_2(data: bytes) -> bytes:
    """The same snapshot as version 2, by the byte table."""
    size = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[16 : 16 + size])
    chunks = 1 + -(-header["tokens"] // header["chunk_positions"])
    del header["weights_sha256"]
    text = json.dumps(header).encode()
    body = data[16 + size + 16 : len(data) - 16 * (chunks + 1)]
    return struct.pack("<8sHHI", b"LLAMAYCX", 2, 2, len(text)) + text + body


@dataclass(frozen=True)
class State:
    """What must not change when something fails: bytes, counts and answers."""

    bytes: tuple[bytes, ...]
    counts: tuple[int, ...]
    answers: tuple[object, ...]


def state_of(cache: Cache, contexts: Sequence[Context] = ()) -> State:
    """Checks every invariant, and describes the cache and these contexts."""
    cache.check()
    retained = cache.retained_tokens()
    matches = [cache.match(tokens) for tokens in retained]
    held = [*contexts, *matches]
    state = State(
        bytes=tuple(rows_of(cache, context) for context in held),
        counts=(
            cache.live_pages,
            cache.store.slab_bytes,
            cache.tree_bytes,
            *(cache.store.ids.ref_count(page) for context in held for page in context.page_ids),
        ),
        answers=(
            tuple(retained),
            *(
                (context.length, tuple(context.tokens), tuple(context.page_ids), context.numerics)
                for context in held
            ),
        ),
    )
    for context in matches:
        context.close()
    return state
