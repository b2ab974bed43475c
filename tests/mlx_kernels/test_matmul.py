"""Packing and matrix products of single matrices, on every instruction set.

Expected values: gguf-py's recorded ones for dequantising; for products the numerics contract in
plain numpy (bit for bit) and float64 arithmetic (within a bound on rounding).
"""

import mmap
from pathlib import Path

import numpy as np
import pytest

from llamay.formats import Format, Tensor
from llamay.mlx_kernels import _cpu
from tests import contract
from tests.model.running import same_bits
from tests.oracle import dequantise
from tests.quantisers import quantise
from tests.tiny_models import random_integers

# Byte offsets of a block's float16 scale and minimum, from ggml's ggml-common.h.
F16_OFFSETS = {
    Format.Q2_K: (80, 82), Format.Q3_K: (108,), Format.Q6_K: (208,),
    **dict.fromkeys((Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K), (0, 2)),
    **dict.fromkeys((Format.Q4_0, Format.Q5_0, Format.Q8_0, Format.IQ4_NL, Format.IQ4_XS), (0,)),
}  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent.parent
ISAS = _cpu.kernel_sets()
FORMATS = tuple(Format)
FLOATS = (Format.F32, Format.F16, Format.BF16)
QUANTISED = tuple(format for format in Format if format not in FLOATS)


def random_matrix(rows, columns, seed):
    """Uniform in [-1, 1), exact in float32."""
    integers = random_integers(seed, "matrix", rows * columns)
    return (integers * 2.0**-15).astype(np.float32).reshape(rows, columns)


def tensor(format, values):
    data = quantise(values, format)
    return Tensor("weights", format, values.shape, memoryview(data))


def pack(weights):
    arguments = (weights.format.type_id, weights.rows, weights.columns)
    packed = bytearray(_cpu.packed_bytes(*arguments))
    _cpu.pack(*arguments, weights.data, packed)
    return (*arguments, packed)


def multiply(isa, weights, planes, x):
    out = np.full((len(x), weights.rows), np.nan, np.float32)
    _cpu.matmul(isa, *pack(weights), planes, x, out)
    return out


def dequantised_rows(weights):
    packed = pack(weights)
    out = np.empty((weights.rows, weights.columns), np.float32)
    for row in range(weights.rows):
        _cpu.dequantize_row(*packed, row, out[row])
    return out


# --- packing --------------------


@pytest.mark.parametrize("rows", [64, 32, 1])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_packed_rows_read_back_with_the_bits_of_gguf_py(format, rows):
    """The 64 recorded blocks as 64 rows of one block, 32 of two, and one of 64."""
    recorded = np.load(ROOT / "testdata" / "quants" / f"{format.name.lower()}.npz")
    columns = 64 // rows * format.block_len
    data = memoryview(recorded["blocks"].tobytes())
    found = dequantised_rows(Tensor("weights", format, (rows, columns), data))
    assert same_bits(found, recorded["values"].reshape(rows, columns))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_rows_that_fill_no_group_are_packed_whole(format, rows):
    columns = 3 * max(format.block_len, 32)
    weights = tensor(format, random_matrix(rows, columns, seed=1))
    assert same_bits(dequantised_rows(weights), dequantise(format, weights.data, weights.shape))


@pytest.mark.parametrize(
    "arguments",
    [
        (15, 16, 256),
        (9, 16, 32),
        (14, 16, 128),
        (-1, 16, 32),
        (2, 16, 33),
        (2, 0, 32),
        (2, -16, 32),
        (2, 2**31, 32),
        (2, 16, 2**40),
        (0, 2**31 - 1, 2**31 - 1),
    ],
)
def test_matrices_that_cannot_be_packed_raise(arguments):
    with pytest.raises(ValueError, match=r"no CPU kernel|cannot be packed"):
        _cpu.packed_bytes(*arguments)


def test_wrong_sizes_of_buffers_raise():
    source, packed = bytes(18 * 16), bytearray(_cpu.packed_bytes(2, 16, 32))
    out = np.zeros(32, np.float32)
    x, y = np.zeros((2, 32), np.float32), np.zeros((2, 16), np.float32)
    _cpu.pack(2, 16, 32, source, packed)
    _cpu.dequantize_row(2, 16, 32, packed, 15, out)
    _cpu.matmul("scalar", 2, 16, 32, packed, 1, x, y)
    for call, arguments in [
        (_cpu.pack, (2, 16, 32, source[:-1], packed)),
        (_cpu.pack, (2, 16, 32, source + b"\0", packed)),
        (_cpu.pack, (2, 16, 32, source, packed[:-1])),
        (_cpu.dequantize_row, (2, 16, 32, packed[:-1], 0, out)),
        (_cpu.dequantize_row, (2, 16, 32, packed, 16, out)),
        (_cpu.dequantize_row, (2, 16, 32, packed, -1, out)),
        (_cpu.dequantize_row, (2, 16, 32, packed, 0, out[:-1])),
        (_cpu.matmul, ("sse", 2, 16, 32, packed, 1, x, y)),
        (_cpu.matmul, ("scalar", 2, 16, 32, packed[:-1], 1, x, y)),
        (_cpu.matmul, ("scalar", 2, 16, 32, packed, 0, x, y)),
        (_cpu.matmul, ("scalar", 2, 16, 32, packed, 3, x, y)),
        (_cpu.matmul, ("scalar", 2, 16, 32, packed, 1, x[:1, :-1], y)),
        (_cpu.matmul, ("scalar", 2, 16, 32, packed, 1, x[:0], y[:0])),
        (_cpu.matmul, ("scalar", 2, 16, 32, packed, 1, x, y[:1])),
    ]:
        with pytest.raises((ValueError, BufferError)):
            call(*arguments)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mapped", [False, True])
def test_matrices_packed_together_are_packed_as_each_alone(tmp_path, threads, mapped):
    matrices = [
        tensor(format, random_matrix(rows, max(format.block_len, 32), seed=format.type_id + rows))
        for format in (Format.F16, Format.Q4_1, Format.Q6_K)
        for rows in (5, 1024, 2100)
    ]
    expected = [pack(weights) for weights in matrices]
    sources = [weights.data for weights in matrices]
    if mapped:
        path = tmp_path / "weights"
        path.write_bytes(b"".join(sources))
        with path.open("rb") as file:
            file_bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        ends = np.cumsum([len(source) for source in sources])
        sources = [file_bytes[e - len(s) : e] for e, s in zip(ends, sources, strict=True)]
    targets = [bytearray(len(packed)) for *_, packed in expected]
    shapes = [shape for *shape, _ in expected]
    tasks = [(*a, s, t) for a, s, t in zip(shapes, sources, targets, strict=True)]
    _cpu.pack_all(_cpu.Pool(threads), tasks, mapped)
    assert targets == [packed for *_, packed in expected]
    assert sources == [weights.data for weights in matrices]  # what was let go comes back


def test_packing_together_refuses_what_packing_alone_refuses():
    source, packed = bytes(18 * 16), bytearray(_cpu.packed_bytes(2, 16, 32))
    good, pool = (2, 16, 32, source, packed), _cpu.Pool(2)
    _cpu.pack_all(pool, [], False)
    for bad in [(2, 16, 32, source[:-1], packed), (2, 16, 32, source, packed[:-1])]:
        with pytest.raises(ValueError, match="bytes"):
            _cpu.pack_all(pool, [good, bad], False)
    for pool_given, tasks in [(pool, 5), (pool, [list(good)]), (pool, [good[:4]]), (None, [good])]:
        with pytest.raises(TypeError):
            _cpu.pack_all(pool_given, tasks, False)
    packed.append(0)  # nobody holds it


# --- products --------------------


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_products_have_the_bits_of_the_contract_for_any_number_of_rows(format, planes):
    """1 to 30 activation rows: every width of tile, whole and padded; groups alone and paired."""
    for rows, blocks in [(1, 1), (33, 3), (80, 2)]:
        columns = blocks * max(format.block_len, 32)
        weights = tensor(format, random_matrix(rows, columns, seed=2))
        x = random_matrix(30, columns, seed=3)
        wanted = contract.matmul(weights, planes, x)
        for isa in ISAS:
            for count in range(1, 31):
                found = multiply(isa, weights, planes, x[:count])
                assert same_bits(found, wanted[:count]), (isa, rows, columns, count)


def crafted_activations(columns):
    """Rows whose blocks are hard to quantise, among them ones of any size."""
    base = random_matrix(16, columns, seed=4)
    rows = [
        np.full(columns, 127), np.full(columns, -127), np.tile([127, -127], columns // 2),
        np.zeros(columns), np.full(columns, -0.0), base[0] * 1e-38, base[1] * 1e30,
        base[2] * 2.0**-100, base[3] * 2.0**-93, base[4] * 2.0**-126, np.full(columns, 1e-45),
        np.resize([1e30, 1e-30], columns), np.resize([0.5, 1.5, 2.5, -0.5, 127], columns),
        np.resize(np.repeat([1e-38, 1e30, 0, 1], 32), columns), np.full(columns, 3e38),
        np.r_[np.nan, base[5][1:]], np.r_[base[5][:-1], np.nan], np.r_[np.inf, base[5][1:]],
    ]  # fmt: skip
    return np.array(rows, dtype=np.float32)


def extreme_weights(format, rows, columns):
    """Quants and sub-blocks' scales at one end, at the other, and of both signs; scales and minima
    of any size."""
    scales = np.array([1, -1, 0, 2.0**-24, -(2.0**-14), 65504, 0.001, -0.37], np.float16)
    patterns = np.array([0x80, 0x7F, 0x81, 0x00, 0xFF, 0x0F, 0xF0, 0x80], np.uint8)
    count = rows * columns // format.block_len
    index = np.arange(count)
    blocks = np.repeat(patterns[index % 8][:, None], format.block_bytes, axis=1)
    for number, offset in enumerate(F16_OFFSETS[format]):
        halves = scales[index // (3 + 2 * number) % 8]
        blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(count, 2)
    return Tensor("weights", format, (rows, columns), memoryview(blocks.tobytes()))


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
def test_extreme_weights_and_activations_have_the_bits_of_the_contract(format, planes):
    columns = 3 * format.block_len
    weights, x = extreme_weights(format, 40, columns), crafted_activations(columns)
    wanted = contract.matmul(weights, planes, x)
    assert np.isfinite(wanted[[0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 12]]).all()
    numbers = ~np.isnan(wanted)  # NaN has many bits
    for isa in ISAS:
        found = multiply(isa, weights, planes, x)
        np.testing.assert_array_equal(np.isnan(found), ~numbers)
        assert same_bits(found[numbers], wanted[numbers]), isa


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sign", [1, -1])
def test_w_of_minus_128_times_x_of_127_does_not_saturate(isa, sign):
    """32 products of -128 and +-127, exactly; 16-bit sums of pairs would stop at -32768."""
    block = np.float16(1).tobytes() + b"\x80" * 32
    weights = Tensor("weights", Format.Q8_0, (1, 32), memoryview(block))
    x = np.full((1, 32), 127 * sign, np.float32)
    assert multiply(isa, weights, 1, x).tolist() == [[32 * -128 * 127 * sign]]
    assert multiply(isa, weights, 2, x).tolist() == [[32 * -128 * 127 * sign]]


@pytest.mark.parametrize("isa", ISAS)
def test_hand_computed_products(isa):
    """Q4_1: d = 0.5, m = -2, all q = 3, so w = -0.5; Q4_0: d = 2, q = 5, so w = -6."""
    x = np.arange(32, dtype=np.float32)[None] * 127 / 31  # quantised exactly to within 1/2
    x = np.rint(x)
    total = float(x.sum())
    halves = np.array([0.5, -2], np.float16).tobytes()
    q4_1 = Tensor("weights", Format.Q4_1, (1, 32), memoryview(halves + b"\x33" * 16))
    q4_0 = Tensor(
        "weights", Format.Q4_0, (1, 32), memoryview(np.float16(2).tobytes() + b"\x55" * 16)
    )
    assert multiply(isa, q4_1, 1, x).tolist() == [[-0.5 * total]]
    assert multiply(isa, q4_0, 1, x).tolist() == [[-6 * total]]


@pytest.mark.parametrize("isa", ISAS)
def test_hand_computed_products_of_superblocks(isa):
    """Q6_K: d = 0.5, s = -128, code 63, so w = -1984; Q4_K: d = 2, s = 1, q = 15, dmin = -1, m = 2,
    so w = 32; Q2_K: d = 1, s = 15, q = 3, dmin = 2, m = 15, so w = 15."""
    halves = [np.array(pair, np.float16).tobytes() for pair in ([0.5], [2, -1], [1, 2])]
    cases = {
        Format.Q6_K: (b"\xff" * 192 + b"\x80" * 16 + halves[0], -1984),
        Format.Q4_K: (halves[1] + b"\1" * 4 + b"\2" * 4 + b"\x21" * 4 + b"\xff" * 128, 32),
        Format.Q2_K: (b"\xff" * 80 + halves[2], 15),
    }
    x = (np.arange(256, dtype=np.float32) % 255 - 127)[None]  # its own quantisation: the scale is 1
    x[0, 5] = 127
    for format, (block, weight) in cases.items():
        weights = Tensor("weights", format, (1, 256), memoryview(block))
        assert dequantised_rows(weights).tolist() == [[weight] * 256]
        for planes in (1, 2):
            assert multiply(isa, weights, planes, x).tolist() == [[weight * float(x.sum())]]


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
def test_activations_lose_half_a_step_at_most(format, planes):
    """|y - w.x| <= sum |w| * (half a step of the block) + rounding, with w.x in float64."""
    step, span = 0.5 / 127 / (256 / 1.02 if planes == 2 else 1), format.block_len
    weights = tensor(format, random_matrix(48, 6 * span, seed=5))
    x = random_matrix(9, 6 * span, seed=6)
    dense = dequantise(format, weights.data, weights.shape).astype(np.float64)
    exact = x.astype(np.float64) @ dense.T
    largest = np.abs(x).reshape(9, 6, span).max(axis=2)
    sizes = np.abs(dense).reshape(48, 6, span).sum(axis=2)
    bound = largest @ sizes.T * step + np.abs(x).astype(np.float64) @ np.abs(dense).T * 2e-6
    error = np.abs(multiply(ISAS[0], weights, planes, x) - exact)
    assert (error <= bound).all()
    assert error.max() > bound.max() / 200, "the bound is far too wide to mean anything"


@pytest.mark.parametrize("format", FLOATS, ids=lambda f: f.name)
def test_float_products_are_those_of_float64_within_rounding(format):
    weights, x = tensor(format, random_matrix(48, 100, seed=7)), random_matrix(9, 100, seed=8)
    dense = dequantise(format, weights.data, weights.shape).astype(np.float64)
    exact = x.astype(np.float64) @ dense.T
    bound = np.abs(x).astype(np.float64) @ np.abs(dense).T * 100 * 2.0**-24
    for isa in ISAS:
        assert (np.abs(multiply(isa, weights, 1, x) - exact) <= bound).all()


def test_the_emulated_fma_rounds_once():
    """Against exact rational arithmetic, with sums that cancel, tie and differ in size."""
    from fractions import Fraction

    a, b, c = (random_matrix(1, 4000, seed=seed)[0] for seed in (10, 11, 12))
    sizes = (random_integers(13, "sizes", 4000) % 60 - 30).astype(np.int32)
    c = np.ldexp(c, sizes)
    c[::3] = -(a[::3] * b[::3])  # what is left is the product's own rounding error
    c[1::7] = np.float32(2.0**24)
    found = contract.fma(a, b, c)
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), found, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        error = abs(Fraction(float(got)) - exact)
        for neighbour in (
            np.nextafter(got, np.float32(-1e30)),
            np.nextafter(got, np.float32(1e30)),
        ):
            other = abs(Fraction(float(neighbour)) - exact)
            assert error < other or (error == other and got.view(np.uint32) % 2 == 0)
