"""Rope, pages in every precision, and attention over them, against numpy in float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from llamay.errors import UnsupportedModelError
from llamay.formats import Format, KVLayout, KVPrecision
from llamay.mlx_kernels import Step, has_metal
from llamay.mlx_kernels.metal import MetalKernels
from llamay.mlx_kernels.metal.kernels import MAX_GROUP, Kernels
from llamay.mlx_kernels.metal.pages import PAGE_BITS, row_words
from llamay.mlx_kernels.metal.schedule import RUN, spans
from llamay.mlx_kernels.metal.step import rope_tables
from llamay.mlx_kernels.program import Rope
from llamay.mlx_kernels.reference import _decode, _encode
from tests.model.running import load_tiny
from tests.tiny_models import TinyConfig

SCALE = 0.11
EPS = 1e-5
LARGEST = float(np.finfo(np.float32).max)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def same_bits(a, b):
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


# --- rope and what is stored ---


def rotated(x, positions, rope):
    """x: [rows, heads, head_dim], as float64."""
    angles = positions[:, None, None] * np.array(rope.inverse)
    cosine, sine = np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude
    half = len(rope.inverse)
    out = x.astype(np.float64)
    first, second = np.s_[..., :half], np.s_[..., half : 2 * half]
    if rope.interleaved:
        first, second = np.s_[..., 0 : 2 * half : 2], np.s_[..., 1 : 2 * half : 2]
    a, b = out[first].copy(), out[second].copy()
    out[first], out[second] = a * cosine - b * sine, a * sine + b * cosine
    return out


def normed(heads, norms):
    """[rows, heads, head_dim] float64: each head after RMS norm."""
    wide = heads.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPS) * norms


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "pairs", "precision"),
    [
        (16, 8, KVPrecision.F32),
        (48, 20, KVPrecision.F16),
        (64, 32, KVPrecision.VQ8),
        (128, 64, KVPrecision.Q8),
        (256, 64, KVPrecision.Q8),
    ],
)
def test_rope_and_rows_as_they_are_stored(
    metal, head_dim, pairs, precision, interleaved, head_norms
):
    rows, heads, kv_heads = 9, 6, 2
    layout = KVLayout(1, kv_heads, head_dim, 16, precision)
    rope = Rope(tuple(1e4 ** -(np.arange(pairs) / pairs)), interleaved, 1.25)
    positions = np.array([0, 1, 2, 77, 255, 4096, 100_000, 5, 6], dtype=np.int32)
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim)
    qkv[3] = 0
    qkv[4] *= 1e6
    tables = [mx.contiguous(table[:rows]) for table in rope_tables(positions, rope)]
    norms = 1 + random(2, head_dim, seed=3) / 4
    given = mx.array(qkv), mx.array(norms) if head_norms else None, EPS, *tables
    queries, stored = Kernels(metal.metal_kernel).rotate(*given, layout, interleaved)
    split = qkv.reshape(rows, -1, head_dim)
    turned = split[:, : heads + kv_heads]
    if head_norms:
        turned = normed(turned, np.repeat(norms, [heads, kv_heads], axis=0))
    expected = rotated(turned, positions, rope)
    found = np.array(queries).reshape(rows, heads, head_dim)
    size = np.abs(turned).max(axis=(1, 2), keepdims=True)
    assert (np.abs(found - expected[:, :heads]) <= 1e-6 * size).all()
    # What is stored is what the kernel rotated, encoded as the reference does; keys that f32 pages
    # hold are the rotated ones.
    exact = replace(layout, precision=KVPrecision.F32)
    _, plain = Kernels(metal.metal_kernel).rotate(*given, exact, interleaved)
    vectors = np.array(plain).view(np.float32).reshape(rows, 2, kv_heads, head_dim)
    assert (np.abs(vectors[:, 0] - expected[:, heads:]) <= 1e-6 * size).all()
    assert same_bits(vectors[:, 1], split[:, heads + kv_heads :])
    parts = [
        _encode(vectors[:, part], element).reshape(rows, -1)
        for part, element in enumerate(precision.elements)
    ]
    words = np.ascontiguousarray(np.concatenate(parts, axis=1)).view(np.uint32)
    assert np.array_equal(np.array(stored), words)


@pytest.mark.parametrize("precision", list(KVPrecision))
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, LARGEST, -7e4, 2.0**-100, 2.0**-101])
def test_extreme_values_are_stored_as_the_reference_stores_them(metal, precision, value):
    layout = KVLayout(1, 1, 16, 16, precision)
    values = np.zeros(16, np.float32)
    values[5], values[9] = value, value / 3
    qkv = np.concatenate([random(32), values])[None]
    no_turn = mx.ones((1, 8)), mx.zeros((1, 8))
    given = mx.array(qkv), None, EPS, *no_turn
    _, stored = Kernels(metal.metal_kernel).rotate(*given, layout, False)
    key_bytes = precision.vector_bytes(16)[0]
    with np.errstate(invalid="ignore"):
        expected = _decode(_encode(values, precision.elements[1]), precision.elements[1])
    found = np.array(stored).view(np.uint8).reshape(-1)[key_bytes:]
    np.testing.assert_array_equal(_decode(found, precision.elements[1]), expected)


# --- attention ---


class Pages:
    """Contexts of random keys and values on pages in two chunks, some pages shared."""

    def __init__(self, layout, lengths, shared=0, rows=None, window=0, soft_cap=0.0):
        """shared: positions that all contexts have in common, from 0 on.

        rows: keys and values [kv_heads, head_dim] that are not random, by position
        window, soft_cap: of their attention, see `program.Attention`
        """
        self.layout, size = layout, layout.page_tokens
        self.window, self.soft_cap = window, soft_cap
        width = -(-max(lengths) // size)
        ids, self.table = iter(np.random.default_rng(5).permutation(1000)), []
        for number, length in enumerate(lengths):
            own = [int(next(ids)) for _ in range(-(-length // size))]
            if number:
                own[: shared // size] = self.table[0][: shared // size]
            self.table.append(own + [-1] * (width - len(own)))
        self.table = np.array(self.table, dtype=np.int32)
        order = {page: place for place, page in enumerate(np.unique(self.table[self.table >= 0]))}
        half = (len(order) + 1) // 2
        self.places = np.zeros_like(self.table)
        slabs = np.zeros((2, half * size, row_words(layout)), np.uint32)
        slabs[:] = 0xFFFFFFFF  # what is not written is NaN
        self.keys, self.values = (
            [np.zeros((n, layout.kv_heads, layout.head_dim)) for n in lengths] for _ in range(2)
        )
        for context, length in enumerate(lengths):
            for position in range(length):
                page = self.table[context, position // size]
                chunk, at = divmod(order[page], half)
                self.places[context, position // size] = chunk << PAGE_BITS | at
                vectors = (rows or {}).get(position)
                if vectors is None:
                    seed = int(page) * size + position % size
                    vectors = random(2, layout.kv_heads, layout.head_dim, seed=seed)
                words, self.keys[context][position], self.values[context][position] = self._row(
                    np.asarray(vectors, dtype=np.float32)
                )
                slabs[chunk, at * size + position % size] = words
        self.slabs = [mx.array(slab) for slab in slabs]

    def _row(self, vectors):
        """Words of a position, and the keys and values that they stand for."""
        layout = self.layout
        raw = [_encode(vectors[i], element) for i, element in enumerate(layout.precision.elements)]
        words = np.concatenate([part.reshape(-1) for part in raw]).view(np.uint32)
        return words, *(
            _decode(part, element)
            for part, element in zip(raw, layout.precision.elements, strict=True)
        )

    def expected(self, queries, contexts, positions):
        """[rows, heads * head_dim] float64."""
        group = queries.shape[1] // self.layout.head_dim // self.layout.kv_heads
        out = []
        for row, context, position in zip(queries, contexts, positions, strict=True):
            q = row.reshape(-1, self.layout.head_dim).astype(np.float64)
            first = max(0, position + 1 - self.window) if self.window else 0
            keys, values = (
                part[context][first : position + 1].repeat(group, axis=1)
                for part in (self.keys, self.values)
            )
            scores = np.einsum("hd,thd->ht", q, keys) * SCALE
            if self.soft_cap:
                scores = self.soft_cap * np.tanh(scores / self.soft_cap)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out.append(np.einsum("ht,thd->hd", weights, values).reshape(-1))
        return np.array(out)

    def attend(self, metal, queries, contexts, positions, rows=slice(None)):
        """What the kernels give for some of the rows, run together."""
        contexts, positions = np.array(contexts)[rows], np.array(positions)[rows]
        count = len(contexts)
        step = Step(
            tokens=np.zeros(count, np.int32),
            positions=positions.astype(np.int32),
            contexts=contexts.astype(np.int32),
            writes=np.zeros(count, np.bool_),
            page_table=self.table,
            logit_rows=np.zeros(0, np.int32),
        )
        ((span, items),) = spans(step, self.layout.page_tokens, 1)
        padded = np.pad(positions, (0, -count % 8)).astype(np.int32)
        places = np.pad(self.places, ((0, 0), (0, -self.places.shape[1] % 8)))
        found = Kernels(metal.metal_kernel).attend(
            mx.array(queries[rows]), mx.array(padded), span, mx.array(items), mx.array(places),
            self.slabs, SCALE, self.layout, self.window, self.soft_cap,
        )  # fmt: skip
        return np.array(found)


def assert_rows_do_not_matter(pages, metal, queries, contexts, positions, slices):
    """All rows together near float64, and slices of them with the same bits. Returns the rows."""
    together = pages.attend(metal, queries, contexts, positions)
    expected = pages.expected(queries, contexts, positions)
    assert np.abs(together - expected).max() < 2e-5 * np.abs(expected).max()
    for rows in slices:
        assert same_bits(pages.attend(metal, queries, contexts, positions, rows), together[rows])
    return together


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group", "page_tokens", "precision"),
    [
        (16, 2, 2, 16, KVPrecision.F32),
        (64, 3, 3, 64, KVPrecision.F32),
        (64, 2, 7, 16, KVPrecision.F16),
        (128, 1, 4, 64, KVPrecision.VQ8),
        (80, 1, 1, 48, KVPrecision.Q8),
        (256, 1, 2, 128, KVPrecision.Q8),
        (128, 1, 24, 64, KVPrecision.F16),
        (64, 1, MAX_GROUP, 16, KVPrecision.F32),
    ],
)
def test_attention_of_rows_alone_and_together(
    metal, head_dim, kv_heads, group, page_tokens, precision
):
    """Rows at the ends of tiles of 32, of pages and of runs; a context of one row, one of many."""
    pages = Pages(KVLayout(1, kv_heads, head_dim, page_tokens, precision), [300, 34])
    contexts = [0] * 11 + [1]
    positions = [0, 1, 31, 32, 63, 64, 255, 256, 257, 298, 299, 33]
    queries = random(12, kv_heads * group * head_dim, seed=9) * np.float32(3)
    slices = (slice(0, 1), slice(9, 10), slice(11, 12), slice(3, 9))
    assert_rows_do_not_matter(pages, metal, queries, contexts, positions, slices)


# Less than a tile, of several tiles, of several runs, of more than there is; 20 and 100 begin after
# the first run for some rows and not for others of an item.
@pytest.mark.parametrize("window", [1, 20, 32, 100, 256, 300, 1000])
@pytest.mark.parametrize("precision", list(KVPrecision))
def test_attention_in_a_window_and_with_a_soft_cap(metal, window, precision):
    """Rows at the ends of tiles and runs, and where windows begin there; other pages."""
    contents = {position: random(2, 1, 32, seed=position) for position in range(600)}
    positions = [0, 19, 20, 31, 32, 99, 100, 131, 254, 255, 256, 274, 275, 276, 354, 355, 356]
    positions += [510, 511, 512, 567, 568, 599, 33, 300]
    contexts = [0] * 23 + [1] * 2
    queries = random(len(positions), 3 * 32, seed=9) * np.float32(3)
    found = []
    for page_tokens in (16, 48, 128):
        pages = Pages(
            KVLayout(1, 1, 32, page_tokens, precision), [600, 301], 0, contents, window, 1.5
        )
        slices = [slice(at, at + 1) for at in (0, 8, 13, 22, 24)] + [slice(9, 16)]
        given = queries, contexts, positions, slices if page_tokens == 16 else []
        found.append(assert_rows_do_not_matter(pages, metal, *given))
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_what_lies_outside_a_window_counts_for_nothing(metal):
    """Whether it is in the first tile of the window or before, and whatever it is."""
    layout, position, window = KVLayout(1, 1, 16, 16, KVPrecision.F32), RUN + 50, 40
    outside = np.full((2, 1, 16), np.nan)
    rows = dict.fromkeys(range(position + 1 - window), outside)
    pages = Pages(layout, [position + 1], rows=rows, window=window)
    queries = random(1, 2 * 16, seed=9)
    assert_rows_do_not_matter(pages, metal, queries, [0], [position], [])


@pytest.mark.parametrize("window", [0, 40])
def test_the_largest_score_is_one_of_those_that_are_seen(metal, window):
    """However far they all are below 0, at the window's ends too."""
    values = random(RUN + 51, 1, 16, seed=1)
    rows = {position: (np.full((1, 16), -200), value) for position, value in enumerate(values)}
    layout = KVLayout(1, 1, 16, 16, KVPrecision.F32)
    pages = Pages(layout, [RUN + 51], rows=rows, window=window)
    queries = np.full((1, 16), 1 / SCALE / 16, np.float32)  # scores are the mean of a key
    assert_rows_do_not_matter(pages, metal, queries, [0], [RUN + 50], [])


@pytest.mark.skipif(has_metal(), reason="reads what does not exist if it fails")
@pytest.mark.parametrize("positions", [[560], [530, 545, 560]])
def test_pages_that_nobody_sees_are_not_read(metal, positions):
    pages = Pages(KVLayout(1, 1, 16, 32, KVPrecision.F32), [561], window=40)
    pages.places[0, : (positions[0] + 1 - 40) // 32] = 15 << PAGE_BITS | 1000
    queries = random(len(positions), 2 * 16, seed=9)
    assert_rows_do_not_matter(pages, metal, queries, [0] * len(positions), positions, [])


def test_more_query_heads_than_threadgroup_memory_holds_are_refused(tmp_path):
    config = TinyConfig(heads=MAX_GROUP + 1, kv_heads=1)
    kernels = MetalKernels(lambda **_: None)
    with pytest.raises(UnsupportedModelError, match="found 32; use --device cpu"):
        load_tiny(tmp_path, config, Format.Q4_1, kernels)


@pytest.mark.parametrize("window", [0, 50, 300])
def test_branches_of_one_prefix_share_a_pass_and_change_no_bit(metal, window):
    """Windows that begin in one of the prefix's runs for some, and after it for others."""
    layout = KVLayout(1, 1, 16, 64, KVPrecision.F32)
    lengths = [520, 513, 600, 530, 514, 515, 580, 516, 517]
    pages = Pages(layout, lengths, shared=512, window=window)
    positions = [length - 1 for length in lengths]
    queries = random(9, 2 * 16, seed=9)
    step = Step(
        np.zeros(9, np.int32), np.array(positions, np.int32), np.arange(9, dtype=np.int32),
        np.zeros(9, np.bool_), pages.table, np.zeros(0, np.int32),
    )  # fmt: skip
    ((_, items),) = spans(step, 64, 1)
    runs = items[:, 1]
    # Two runs of the prefix, each in items of 8 rows and 1; the rest each on its own.
    assert sorted(runs.tolist()) == [0, 0, 1, 1] + [2] * 9
    alone = [slice(row, row + 1) for row in range(9)]
    assert_rows_do_not_matter(pages, metal, queries, range(9), positions, alone)


@pytest.mark.parametrize(
    ("far", "value"),
    [([3, 40, RUN + 2, RUN + 39], 1e37), (range(RUN), 1e35), (range(RUN, RUN + 40), 1e35)],
    ids=["single ones", "first run", "second run"],
)
def test_a_score_far_below_the_largest_counts_for_nothing(metal, far, value):
    """Whatever its value is: its weight is 0, in its tile and where runs are merged."""
    rows = {position: (np.full((1, 16), -200), np.full((1, 16), value)) for position in far}
    pages = Pages(KVLayout(1, 1, 16, 16, KVPrecision.F32), [RUN + 40], rows=rows)
    queries = np.full((1, 16), 1 / SCALE / 16, np.float32)  # scores are the mean of a key
    found = pages.attend(metal, queries, [0], [RUN + 39])
    expected = pages.expected(queries, [0], [RUN + 39])
    assert np.abs(found - expected).max() < 1e-5


@pytest.mark.parametrize("soft_cap", [0.0, 0.5, 50.0])
def test_scores_of_any_size_stay_finite(metal, soft_cap):
    layout = KVLayout(1, 1, 16, 16, KVPrecision.F32)
    pages = Pages(layout, [RUN + 40], soft_cap=soft_cap)
    queries = random(2, 2 * 16, seed=9) * np.float32(1000)
    found = pages.attend(metal, queries, [0, 0], [RUN + 38, RUN + 39])
    expected = pages.expected(queries, [0, 0], [RUN + 38, RUN + 39])
    assert np.abs(found - expected).max() < 1e-3
