"""Keys and values in four precisions: rounded by a fixed rule, equal bits however they are read."""

import functools
import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from llamay.formats import Format, KVLayout, KVPrecision
from llamay.gguf import open_gguf
from llamay.mlx_kernels import Control, Slabs, Step, _cpu, convert_rows, numerics_id
from llamay.mlx_kernels.reference import ReferenceKernels
from llamay.model.decoder import compile_program
from llamay.model.spec import read_spec
from tests import contract
from tests.model.running import cpu_kernels, same_bits, tokens
from tests.tiny_models import TinyConfig, random_integers, write_tiny_model

ISAS = _cpu.kernel_sets()
F32, F16, VQ8, Q8 = KVPrecision
FLAT = KVLayout(1, 1, 16)  # a row is one head's keys and one head's values
SMALLEST = np.float32(2.0**-100)  # vectors below are stored as zeros
PAGES_PER_SLAB = 3

each_precision = pytest.mark.parametrize("precision", KVPrecision, ids=lambda p: p.value)
each_isa = pytest.mark.parametrize("isa", ISAS)


# --- the rule of rounding --------------------


def as_rows(vectors):
    """Float32 rows of FLAT whose keys and values are both these vectors, [n, 16]."""
    return np.concatenate([vectors, vectors], axis=1).astype(np.float32).view(np.uint8)


def to(precision, rows, source=F32):
    return convert_rows(rows, FLAT, source, precision)


def quantised(vectors):
    """(scales [n], integers [n, 16]) of vectors stored in 8 bits."""
    rows = to(Q8, as_rows(vectors))
    assert np.array_equal(rows[:, :20], rows[:, 20:])
    return rows[:, :4].copy().view(np.float32)[:, 0], rows[:, 4:20].view(np.int8)


def expected_scales(vectors):
    """max / 127 rounded to float32, then up to 16 significant bits, by arithmetic on float64."""
    largest = np.abs(vectors).max(axis=1).astype(np.float64)
    fraction, exponent = np.frexp((largest / 127).astype(np.float32).astype(np.float64))
    scales = np.ldexp(np.ceil(fraction * 2**16), exponent - 16).astype(np.float32)
    return np.where(largest < SMALLEST, np.float32(0), scales)


def scaled_by(scales, seed):
    """Vectors that are integers times a scale, 127 times it among them."""
    integers = random_integers(seed, "integers", 16 * len(scales)).reshape(-1, 16) % 255 - 127
    integers[:, 0] = np.where(integers[:, 0] < 0, -127, 127)
    return integers, (integers * scales[:, None]).astype(np.float32)


def random_vectors(count, seed):
    """Of every size that float32 holds, from below what is stored as zero, in all its bits."""
    high, low = (random_integers(seed, half, 16 * count) for half in ("high", "low"))
    values = (2.0**16 * high + low).reshape(-1, 16) / 2.0**31
    exponents = random_integers(seed, "exponents", count) % 236 - 109
    return np.ldexp(values, exponents[:, None]).astype(np.float32)


CRAFTED = np.zeros((8, 16), np.float32)
CRAFTED[1] = 1e-38
CRAFTED[2] = np.linspace(-1, 1, 16) * 1e30
CRAFTED[3, 5] = 1e30
CRAFTED[3, 6:] = 1.0
CRAFTED[4, 7] = SMALLEST
CRAFTED[5, 7] = np.nextafter(SMALLEST, np.float32(0))
CRAFTED[6, ::2] = -0.0
CRAFTED[7] = np.arange(16) - 7.5


def test_a_hand_computed_vector():
    vector = np.zeros((1, 16))
    vector[0, :9] = [127, -127, 63.5, 62.5, 0.5, 1.5, -0.5, -2.5, 0.49]
    scales, integers = quantised(vector)
    assert scales.tolist() == [1.0]
    assert integers[0, :9].tolist() == [127, -127, 64, 62, 0, 2, 0, -2, 0]
    # 1 / 127 is 0x3c010204 as a float32; the last 8 bits are not 0, so the next 16-bit value.
    scales, integers = quantised(np.eye(1, 16))
    assert scales.view(np.uint32).tolist() == [0x3C010300]
    assert integers[0, :2].tolist() == [127, 0]


def test_scales_are_those_of_the_formula():
    vectors = np.concatenate([random_vectors(100_000, seed=1), CRAFTED])
    scales, integers = quantised(vectors)
    wanted = expected_scales(vectors)
    assert np.array_equal(scales, wanted)
    assert {0.0} < set(scales.tolist())
    live = scales > 0
    assert np.array_equal(integers[live], np.rint(vectors[live] / scales[live, None]))
    assert not integers[~live].any()
    assert np.array_equal(np.abs(integers[live]).max(axis=1), np.full(live.sum(), 127))


@pytest.mark.parametrize("exponent", [-122, -37, -15, 0, 105])
def test_every_scale_of_16_bits_comes_back(exponent):
    """2^15 scales in each of two binades; the least and the greatest that occur among them."""
    mantissas = np.arange(2**15, 2**16)
    scales = np.concatenate([np.ldexp(mantissas, exponent), np.ldexp(mantissas, exponent + 1)])
    scales = scales[(127 * scales >= SMALLEST) & (127 * scales <= np.finfo(np.float32).max)]
    assert len(scales) > 2**14
    integers, vectors = scaled_by(scales, seed=2)
    found, found_integers = quantised(vectors)
    assert np.array_equal(found, scales.astype(np.float32))
    assert np.array_equal(found_integers, integers)


@pytest.mark.parametrize("precision", [F16, VQ8, Q8], ids=lambda p: p.value)
def test_rounding_again_changes_no_byte(precision):
    rows = to(precision, as_rows(np.concatenate([random_vectors(50_000, seed=4), CRAFTED])))
    restored = to(F32, rows, precision)
    assert np.array_equal(to(precision, restored), rows)
    assert np.array_equal(to(precision, rows, precision), rows)
    keys = slice(0, FLAT.head_dim * 4)
    if precision is VQ8:
        assert np.array_equal(rows[:, keys], restored[:, keys])


def test_the_largest_floats_stay_finite():
    vector = np.full((1, 16), np.finfo(np.float32).max)
    restored = to(F32, to(Q8, as_rows(vector)), Q8).view(np.float32)
    assert np.isfinite(restored).all()
    assert np.allclose(restored, vector[0, 0], rtol=1e-4)
    assert np.array_equal(to(Q8, restored.view(np.uint8)), to(Q8, as_rows(vector)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(bad):
    vectors = np.ones((1, 16))
    vectors[0, 3] = bad
    restored = to(F32, to(Q8, as_rows(vectors)), Q8)
    assert np.isnan(restored.view(np.float32)).all()
    assert np.array_equal(to(Q8, restored), to(Q8, as_rows(vectors)))


def test_halves_are_those_of_ieee_754():
    """Every half, the floats between two of them and their neighbours, against numpy's."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    values = np.concatenate([halves, middles, np.nextafter(middles, 0), np.nextafter(middles, 9e9)])
    values = np.concatenate([values, -values, [1e-38, -1e-38]]).astype(np.float32)
    values = np.resize(values, (-(-len(values) // 16), 16))
    found = to(F16, as_rows(values)).view(np.uint16)[:, :16]
    assert np.array_equal(found, values.astype(np.float16).view(np.uint16))


def test_halves_are_never_infinite_and_keep_nan():
    vectors = np.zeros((1, 16))
    vectors[0, :6] = [65504, 65519, 65520, 1e30, -1e30, np.nan]
    found = to(F16, as_rows(vectors)).view(np.float16)[0, :6]
    assert found[:5].tolist() == [65504, 65504, 65504, 65504, -65504]
    assert np.isnan(found[5])


@each_precision
def test_the_reference_kernels_round_by_the_same_rule(precision):
    """Written here as float32, read back by the reference in its own way of rounding."""
    kernels, vectors = ReferenceKernels(), np.concatenate([random_vectors(300, seed=5), CRAFTED])
    layout = replace(FLAT, precision=precision)
    slabs = Slabs(layout, 5, [kernels.new_slab(layout, 5)])
    rows = as_rows(vectors)
    plain = Slabs(FLAT, 5, slabs.arrays)
    kernels.import_rows(plain, range(5), 0, rows)
    found = kernels.export_rows(slabs, range(5), 0, len(rows))
    assert np.array_equal(found, to(precision, rows))
    kernels.import_rows(slabs, range(5), 0, found)
    assert np.array_equal(kernels.export_rows(slabs, range(5), 0, len(rows)), found)


@pytest.mark.parametrize("rows", [np.zeros((3, 127), np.uint8), np.zeros((1, 32), np.float32)])
def test_rows_of_another_size_are_not_converted(rows):
    with pytest.raises(ValueError, match="rows of 128 bytes are needed"):
        to(Q8, rows)


def test_sizes_of_rows():
    layout = KVLayout(30, 3, 64)
    sizes = {p.value: replace(layout, precision=p).row_bytes for p in KVPrecision}
    assert sizes == {
        "f32": 30 * 2 * 3 * 64 * 4,
        "f16": 30 * 2 * 3 * 64 * 2,
        "vq8": 30 * 3 * (64 * 4 + 4 + 64),
        "q8": 30 * 2 * 3 * (4 + 64),
    }


def test_the_numerics_id_names_the_precision():
    kernels = cpu_kernels(ISAS[0])
    ids = {numerics_id(kernels, replace(FLAT, precision=p)) for p in KVPrecision}
    ids |= {numerics_id(ReferenceKernels(), replace(FLAT, precision=p)) for p in KVPrecision}
    assert len(ids) == 8
    assert numerics_id(kernels, FLAT) == f"{kernels.numerics_id}-f32"


# --- models --------------------

# Heads of 80: value tiles of every width. 290 positions: more than a run of 256, a rest of a page.
CONFIG = TinyConfig(head_dim=80)
LENGTHS = (290, 100, 37)
ONE_LAYER = TinyConfig(layers=1, heads=2, kv_heads=1, head_dim=32)


class Model:
    """A tiny model on one kernel set."""

    def __init__(self, path, kernels, config):
        self.kernels, self.config = kernels, config
        with open_gguf(path) as file:
            self.program = compile_program(read_spec(file), file)
            self.run = kernels.prepare(self.program)

    def pages(self, precision, page_tokens=64, contexts=1):
        return Pages(self, precision, page_tokens, contexts)


class Pages:
    """Contexts of up to 320 positions, whose pages stand in slabs in no order."""

    def __init__(self, model, precision, page_tokens, contexts):
        config, count = model.config, -(-320 // page_tokens)
        layout = KVLayout(config.layers, config.kv_heads, config.head_dim, page_tokens, precision)
        ids = np.random.default_rng(1).permutation(contexts * count).astype(np.int32)
        slabs = [
            model.kernels.new_slab(layout, PAGES_PER_SLAB)
            for _ in range(-(-len(ids) // PAGES_PER_SLAB))
        ]
        self.model, self.table = model, ids.reshape(contexts, count)
        self.slabs = Slabs(layout, PAGES_PER_SLAB, slabs)

    def step(self, batch, writes=None):
        """Logits of every row, by entry of the batch of (context, first position, tokens)."""
        counts = [len(ids) for _, _, ids in batch]
        contexts = [context for context, _, _ in batch]
        positions = np.concatenate([np.arange(s, s + len(ids)) for _, s, ids in batch])
        step = Step(
            tokens=np.concatenate([ids for _, _, ids in batch]).astype(np.int32),
            positions=positions.astype(np.int32),
            contexts=np.repeat(contexts, counts).astype(np.int32),
            writes=np.repeat(writes or [True] * len(batch), counts),
            page_table=self.table,
            logit_rows=np.arange(len(positions), dtype=np.int32),
        )
        logits = self.model.run(step, self.slabs, Control()).logits
        return np.split(logits, np.cumsum(counts)[:-1])

    def extend(self, ids, context=0, start=0, chunk=None):
        chunk = chunk or len(ids)
        cuts = range(0, len(ids), chunk)
        parts = [self.step([(context, start + at, ids[at : at + chunk])])[0] for at in cuts]
        return np.concatenate(parts)

    def content(self):
        return [np.array(memoryview(slab)) for slab in self.slabs.arrays]

    def export(self, start, end, context=0):
        return self.model.kernels.export_rows(self.slabs, self.table[context], start, end)

    def imports(self, start, rows, context=0):
        self.model.kernels.import_rows(self.slabs, self.table[context], start, rows)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Models by instruction set and threads."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path, CONFIG, Format.Q4_1)
    return functools.cache(lambda isa, threads=1: Model(path, cpu_kernels(isa, threads), CONFIG))


@pytest.fixture(scope="module")
def wanted(load):
    """Logits by precision and context: each alone, in one step, on the scalar set."""

    @functools.cache
    def logits(precision):
        return [
            load("scalar").pages(precision).extend(tokens(length, seed=10 + context))
            for context, length in enumerate(LENGTHS)
        ]

    return logits


MATRIX = list(itertools.product((1, 2, 3), (None, 1, 7, 64), (16, 64, 128), (False, True)))
EVERY = 13  # shares no divisor with what the matrix is made of


@each_precision
@each_isa
def test_threads_chunks_pages_and_batches_change_no_bit(load, wanted, precision, isa):
    offset = ISAS.index(isa) + 3 * list(KVPrecision).index(precision)
    for threads, chunk, page_tokens, batched in MATRIX[offset % EVERY :: EVERY]:
        ids = [tokens(n, seed=10 + c) for c, n in enumerate(LENGTHS[: 3 if batched else 1])]
        pages = load(isa, threads).pages(precision, page_tokens, contexts=len(ids))
        size, logits = chunk or LENGTHS[0], [[] for _ in ids]
        for start in range(0, LENGTHS[0], size):
            going = [context for context, own in enumerate(ids) if start < len(own)]
            parts = pages.step([(c, start, ids[c][start : start + size]) for c in going])
            for context, part in zip(going, parts, strict=True):
                logits[context].append(part)
        for context, parts in enumerate(logits):
            found = np.concatenate(parts)
            case = (threads, chunk, page_tokens, context)
            assert same_bits(found, wanted(precision)[context]), case


def test_precisions_differ(wanted):
    for a, b in itertools.combinations(KVPrecision, 2):
        assert not same_bits(wanted(a)[0], wanted(b)[0])


@each_precision
def test_stored_rows_are_the_rounded_rows_of_f32(load, precision):
    """Of the first layer: what it reads does not depend on the cache."""
    ids, model = tokens(100, seed=10), load(ISAS[0], 2)
    exact, rounded = model.pages(F32), model.pages(precision)
    exact.extend(ids)
    rounded.extend(ids)
    layout = exact.slabs.layout
    first = replace(layout, layers=1)
    rows = np.ascontiguousarray(exact.export(0, 100)[:, : first.row_bytes])
    found = rounded.export(0, 100)[:, : replace(first, precision=precision).row_bytes]
    assert np.array_equal(found, convert_rows(rows, first, F32, precision))


# --- against the contract --------------------


def stored(x, element):
    """[..., head_dim + 1]: what is stored of vectors, as numbers, and its scale."""
    ones = np.ones((*x.shape[:-1], 1), np.float32)
    if element == "f4":
        return np.concatenate([x, ones], axis=-1)
    if element == "f2":
        return np.concatenate([x.astype(np.float16).astype(np.float32), ones], axis=-1)
    scales = expected_scales(x.reshape(-1, x.shape[-1])).reshape(ones.shape)
    return np.concatenate([np.rint(x / scales), scales], axis=-1)


def attend_run(q, keys, values, seen, scale, soft_cap):
    """`contract.attend_run` of stored keys and values."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
    scores = np.zeros((*q.shape[:2], len(keys)), np.float32)
    for d in range(q.shape[2]):
        scores = contract.fma(keys.T[d][None], q[:, :, d, None], scores)
    scores = contract.soft_capped(scores * keys.T[-1][None] * np.float32(scale), soft_cap)
    scores = np.where(seen[:, None], scores, np.float32(-np.inf))
    largest = scores.max(axis=2)
    weights = contract.exp32(scores - largest[:, :, None])
    lanes = np.zeros((*q.shape[:2], contract.LANES), np.float32)
    for start in range(0, len(keys), contract.LANES):
        part = weights[:, :, start : start + contract.LANES]
        lanes[:, :, : part.shape[2]] += part
    weights, acc = weights * values.T[-1][None], np.zeros_like(q)
    for t in range(len(keys)):
        added = contract.fma(weights[:, :, t, None], values[None, t, :, :-1], acc)
        acc = np.where(seen[:, t, None, None], added, acc)
    return largest, contract.sum_lanes(lanes), acc


def exact_attention(q, k, v, scale, window, soft_cap):
    """The formula in float64, of stored keys and values; no window, no cap."""
    assert not window
    assert not soft_cap
    k, v = (x[..., :-1].astype(np.float64) * x[..., -1:] for x in (k, v))
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("phd,thd->hpt", q, k.repeat(group, axis=1)) * scale
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hpt,thd->phd", weights, v.repeat(group, axis=1)).astype(np.float32)


@pytest.fixture(scope="module")
def float_model(tmp_path_factory):
    """One layer of float32 weights, so that only keys and values are rounded."""
    path = tmp_path_factory.mktemp("model") / "float.gguf"
    write_tiny_model(path, ONE_LAYER, Format.F32)
    return functools.cache(lambda isa: Model(path, cpu_kernels(isa), ONE_LAYER))


@pytest.fixture
def rounding_contract(monkeypatch):
    """Makes `contract.forward` store keys and values in a precision."""
    attention_input = contract.attention_input

    def choose(precision):
        def stored_input(program, operation, stream):
            q, k, v = attention_input(program, operation, stream)
            return q, *(stored(x, e) for x, e in zip((k, v), precision.elements, strict=True))

        monkeypatch.setattr(contract, "attention_input", stored_input)

    return choose


@each_precision
def test_every_set_gives_the_bits_of_the_contract(
    float_model, rounding_contract, monkeypatch, precision
):
    ids = tokens(280, seed=30)
    rounding_contract(precision)
    monkeypatch.setattr(contract, "attend_run", attend_run)
    expected = contract.forward(float_model(ISAS[0]).program, ids)
    for isa in ISAS:
        assert same_bits(float_model(isa).pages(precision).extend(ids), expected), isa


@each_precision
def test_logits_are_those_of_the_formula(float_model, rounding_contract, monkeypatch, precision):
    ids = tokens(280, seed=30)
    found = float_model(ISAS[0]).pages(precision).extend(ids)
    rounding_contract(precision)
    monkeypatch.setattr(contract, "attention", exact_attention)
    expected = contract.forward(float_model(ISAS[0]).program, ids)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < 2e-6
    if precision is not F32:  # the bound tells the precisions apart
        exact = float_model(ISAS[0]).pages(F32).extend(ids)
        assert np.abs(found - exact).max() / np.abs(exact).max() > 10 * error


@each_precision
def test_the_reference_kernels_agree(tmp_path, float_model, precision):
    path, ids = tmp_path / "float.gguf", tokens(40, seed=31)
    write_tiny_model(path, ONE_LAYER, Format.F32)
    reference = Model(path, ReferenceKernels(), ONE_LAYER).pages(precision, page_tokens=16)
    found, wanted = reference.extend(ids), float_model(ISAS[0]).pages(precision).extend(ids)
    # An element that lies between two numbers may be rounded to either, by a little error in it.
    np.testing.assert_allclose(found, wanted, atol=2e-3 * np.abs(wanted).max())
    rows = reference.export(0, 40)
    reference.imports(0, rows)
    assert np.array_equal(reference.export(0, 40), rows)


# --- rows --------------------


def crafted_rows(layout, count, seed):
    """Rows of random and of crafted vectors, in the layout's precision."""
    heads = count * layout.layers * 2 * layout.kv_heads
    vectors = random_integers(seed, "rows", heads * layout.head_dim) / 2.0**12
    vectors = vectors.reshape(heads, layout.head_dim)
    for at, crafted in enumerate(np.tile(CRAFTED, layout.head_dim // 16)):
        vectors[5 + at :: 23] = crafted
    rows = vectors.astype(np.float32).reshape(count, -1).view(np.uint8)
    return convert_rows(rows, layout, F32, layout.precision)


@each_precision
@pytest.mark.parametrize(("source", "target"), [(16, 128), (128, 64), (64, 16)])
def test_rows_moved_to_other_pages_and_another_set_continue_exactly(
    load, wanted, precision, source, target
):
    ids, cut = tokens(LENGTHS[0], seed=10), 277
    before = load(ISAS[0], 2).pages(precision, source)
    before.extend(ids[:cut])
    rows = before.export(0, cut)
    after = load(ISAS[-1]).pages(precision, target, contexts=2)
    for start, end in itertools.pairwise([0, 1, 16, 23, 25, 140, 256, cut]):
        after.imports(start, rows[start:end], context=1)
    assert np.array_equal(after.export(0, cut, context=1), rows)
    logits = after.extend(ids[cut:], context=1, start=cut)
    assert same_bits(logits, wanted(precision)[0][cut:])


@each_precision
@pytest.mark.parametrize("threads", [1, 2])
def test_an_import_changes_its_positions_only(load, precision, threads):
    pages = load(ISAS[0], threads).pages(precision, 64, contexts=2)
    old = crafted_rows(pages.slabs.layout, 300, seed=40)
    new = crafted_rows(pages.slabs.layout, 300, seed=41)
    pages.imports(0, old)
    pages.imports(0, new, context=1)
    for start, end in [(0, 0), (0, 1), (17, 18), (30, 34), (48, 64), (60, 200), (299, 300)]:
        pages.imports(start, new[start:end])
        old[start:end] = new[start:end]
        assert np.array_equal(pages.export(0, 300), old), (start, end)
        assert np.array_equal(pages.export(start, end), new[start:end])
    assert np.array_equal(pages.export(0, 300, context=1), new)


@each_precision
def test_crafted_rows_are_read_alike_by_every_set(load, precision):
    logits = []
    for isa in ISAS:
        pages = load(isa).pages(precision, contexts=2)
        pages.imports(0, crafted_rows(pages.slabs.layout, 280, seed=42))
        logits.append(pages.extend(tokens(3, seed=43), start=280))
    assert np.isfinite(logits[0]).all()
    assert all(same_bits(other, logits[0]) for other in logits[1:])


@each_precision
def test_rows_fill_the_array_given(load, precision):
    pages = load(ISAS[0]).pages(precision)
    rows = crafted_rows(pages.slabs.layout, 50, seed=44)
    pages.imports(0, rows)
    out = np.zeros((30, rows.shape[1]), np.uint8)
    kernels = pages.model.kernels
    assert kernels.export_rows(pages.slabs, pages.table[0], 11, 41, out) is out
    assert np.array_equal(out, rows[11:41])


@pytest.mark.parametrize("start", [-1, 315, 5000, 2**40])
@pytest.mark.parametrize("reference", [False, True])
def test_rows_outside_the_pages_are_refused(load, start, reference):
    kernels = ReferenceKernels() if reference else load(ISAS[0]).kernels
    slabs = Slabs(FLAT, 5, [kernels.new_slab(FLAT, 5)])
    rows = as_rows(np.ones((6, 16)))
    with pytest.raises((ValueError, OverflowError)):
        kernels.import_rows(slabs, range(5), start, rows)
    with pytest.raises((ValueError, OverflowError)):
        kernels.export_rows(slabs, range(5), start, start + 6)
    with pytest.raises(ValueError, match="6 rows of 128 bytes are needed"):
        kernels.export_rows(slabs, range(5), 0, 6, rows[:5])
    with pytest.raises(ValueError, match="rows of 128 bytes are needed"):
        kernels.import_rows(slabs, range(5), 0, rows[:, :100])
    assert not kernels.export_rows(slabs, range(5), 0, 320).any()


def test_rows_move_while_a_program_runs_on_the_same_threads(load, wanted):
    model, stop, rounds = load(ISAS[0], 3), threading.Event(), []
    layout = KVLayout(16, 4, 64, precision=Q8)
    slabs = Slabs(layout, 3, [model.kernels.new_slab(layout, 3)])
    rows = crafted_rows(layout, 192, seed=45)

    def move():
        while not stop.is_set():
            model.kernels.import_rows(slabs, range(3), 0, rows)
            rounds.append(np.array_equal(model.kernels.export_rows(slabs, range(3), 0, 192), rows))

    mover = threading.Thread(target=move)
    mover.start()
    try:
        while len(rounds) < 20 and mover.is_alive():
            logits = model.pages(Q8).extend(tokens(LENGTHS[0], seed=10), chunk=3)
            assert same_bits(logits, wanted(Q8)[0])
    finally:
        stop.set()
        mover.join()
    assert len(rounds) >= 20
    assert all(rounds)


# --- rows that only ask --------------------


@each_precision
@each_isa
def test_a_row_that_only_asks_gives_the_same_logits_and_writes_nothing(
    load, wanted, precision, isa
):
    ids = [tokens(n, seed=10 + c) for c, n in enumerate(LENGTHS)]
    pages = load(isa, 2).pages(precision, 64, contexts=4)
    pages.extend(ids[0])
    pages.extend(ids[1][:60], context=1)
    pages.table[2] = pages.table[0]  # a fork: it asks too, at other positions
    before = pages.content()
    asked = [(0, 0), (0, 15), (0, 16), (0, 255), (0, 256), (0, 289), (2, 100), (2, 288)]
    batch = [(context, at, [ids[0][at]]) for context, at in asked]
    for (_, at), logits in zip(asked, pages.step(batch, [False] * 8), strict=True):
        assert same_bits(logits, wanted(precision)[0][at : at + 1]), at
    assert all(map(np.array_equal, pages.content(), before))
    mixed = [(0, 260, ids[0][260:]), (1, 60, ids[1][60:])]
    logits = pages.step(mixed, [False, True])
    assert same_bits(logits[0], wanted(precision)[0][260:])
    assert same_bits(logits[1], wanted(precision)[1][60:])
    # Another token's keys and values would be other ones: they must not get there.
    content = pages.content()
    pages.step([(0, 200, [1 + token for token in ids[0][200:290]])], [False])
    assert all(map(np.array_equal, pages.content(), content))


@each_precision
@pytest.mark.parametrize("reference", [False, True])
def test_a_row_that_only_asks_reads_its_own_position_from_the_page(
    tmp_path, float_model, precision, reference
):
    model = float_model(ISAS[0])
    if reference:
        write_tiny_model(tmp_path / "float.gguf", ONE_LAYER, Format.F32)
        model = Model(tmp_path / "float.gguf", ReferenceKernels(), ONE_LAYER)
    ids, pages = tokens(20, seed=50), model.pages(precision, 16)
    logits = pages.extend(ids)
    content = pages.content()
    (asked,) = pages.step([(0, 19, ids[19:])], [False])
    np.testing.assert_allclose(asked[0], logits[19], rtol=1e-4, atol=1e-4)
    assert all(map(np.array_equal, pages.content(), content))
    pages.imports(19, pages.export(3, 4))
    (other,) = pages.step([(0, 19, ids[19:])], [False])
    assert np.abs(other[0] - logits[19]).max() > 1e-2
