"""Products with quantised weights, embedding and norm against numpy in float64, in every format."""

import mlx.core as mx
import numpy as np
import pytest

from llamay.formats import Format, Tensor
from llamay.mlx_kernels.metal.kernels import Kernels
from llamay.mlx_kernels.metal.weights import Matrix, Weights
from llamay.mlx_kernels.program import Embed, Program, Rope
from tests.metal.quants import recorded_matrix

FORMATS = list(Format)
EPS = 1e-5


def names(format):
    return format.name


def activations(rows, columns, seed=1):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def normed(x, norm):
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * norm


def silu(x):
    return x / (1 + np.exp(np.minimum(-x, 700)))


def gelu(x):
    """Its approximation by tanh."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"silu": silu, "gelu": gelu}


def assert_near(found, expected, terms):
    """Within what float32 sums of `terms` (the sum of the sizes of what is added) may lose."""
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert (np.abs(found - expected) <= 4e-6 * terms + 1e-30).all()


def same_bits(a, b):
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("format", FORMATS, ids=names)
def test_products_are_those_of_the_recorded_values_and_rows_do_not_matter(metal, format):
    """Rows on both sides of a tile of 8; outputs that no tile divides; one turn and several."""
    kernels = Kernels(metal.metal_kernel)
    for outputs, columns in [(7, max(32, format.block_len)), (21, 768)]:
        weights, values = recorded_matrix(format, outputs, columns)
        x, residual = activations(17, columns), activations(17, outputs, seed=2)
        expected = residual + x.astype(np.float64) @ values.T.astype(np.float64)
        terms = np.abs(residual) + np.abs(x).astype(np.float64) @ np.abs(values).T

        def run(rows, x=x, residual=residual, weights=weights):
            return np.array(kernels.project(mx.array(x[rows]), weights, mx.array(residual[rows])))

        together = run(slice(0, 17))
        assert_near(together, expected, terms)
        for start, end in [(0, 1), (16, 17), (2, 9), (0, 8), (3, 12)]:
            assert same_bits(run(slice(start, end)), together[start:end]), (start, end)


def test_a_product_without_a_residual(metal):
    kernels, (weights, _) = Kernels(metal.metal_kernel), recorded_matrix(Format.Q4_1, 21, 96)
    x = mx.array(activations(11, 96))
    added = np.array(kernels.project(x, weights, mx.zeros((11, 21))))
    for rows in (slice(0, 11), slice(0, 1), slice(3, 8)):
        assert same_bits(np.array(kernels.project(x[rows], weights, None)), added[rows])


@pytest.mark.parametrize("format", FORMATS, ids=names)
def test_embedding_gives_the_recorded_values(metal, format):
    columns = max(512, format.block_len)
    table, values = recorded_matrix(format, 12, columns)
    kernels = Kernels(metal.metal_kernel)
    for tokens in ([11], [3, 0, 11, 3, 5, 6, 7, 8, 9]):
        padded = mx.array(np.pad(tokens, (0, -len(tokens) % 8)).astype(np.int32))
        found = np.array(kernels.embed(padded, len(tokens), table, 1.0))
        np.testing.assert_allclose(
            found, values[tokens], rtol=1e-6, atol=2e-7 * np.abs(values).max()
        )
        scaled = np.array(kernels.embed(padded, len(tokens), table, 22.6))
        assert same_bits(scaled, found * np.float32(22.6))


def norm_and_inputs(rows, columns):
    norm = np.random.default_rng(3).uniform(0.5, 1.5, columns).astype(np.float32)
    return norm, activations(rows, columns) * np.float32(3)


@pytest.mark.parametrize("columns", [16, 64, 576, 896])
def test_norm(metal, columns):
    norm, x = norm_and_inputs(10, columns)
    kernels = Kernels(metal.metal_kernel)
    found = np.array(kernels.rms_norm(mx.array(x), mx.array(norm), EPS))
    expected = normed(x, norm)
    assert_near(found, expected, np.abs(expected))
    assert same_bits(np.array(kernels.rms_norm(mx.array(x[4:5]), mx.array(norm), EPS)), found[4:5])


def test_norm_of_what_is_added_to_a_residual(metal):
    norm, x = norm_and_inputs(10, 576)
    residual, kernels = activations(10, 576, seed=2), Kernels(metal.metal_kernel)

    def run(rows):
        given = mx.array(x[rows]), mx.array(norm), EPS, mx.array(residual[rows])
        return np.array(kernels.rms_norm(*given))

    together, expected = run(slice(0, 10)), normed(x, norm)
    assert_near(together, residual + expected, np.abs(residual) + np.abs(expected))
    assert same_bits(run(slice(4, 5)), together[4:5])


def rows_alone_and_together(run, x):
    """Results of 11 rows at once (normed by a kernel of their own), checked against 1 and 5."""
    together = run(x)
    for start, end in [(0, 1), (10, 11), (5, 10)]:
        assert same_bits(run(x[start:end]), together[start:end]), (start, end)
    return together


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_of_three_formats(metal, bias):
    columns, counts = 256, (48, 16, 32)
    kernels, (norm, x) = Kernels(metal.metal_kernel), norm_and_inputs(11, columns)
    made = [
        recorded_matrix(format, rows, columns, seed)
        for seed, (format, rows) in enumerate(
            zip((Format.Q4_K, Format.Q4_0, Format.Q6_K), counts, strict=True)
        )
    ]
    added = activations(1, sum(counts), seed=4)[0] if bias else np.zeros(sum(counts))

    def run(x):
        given = mx.array(added) if bias else None
        matrices = [matrix for matrix, _ in made]
        return np.array(kernels.qkv(mx.array(x), mx.array(norm), EPS, matrices, given))

    values = np.concatenate([values for _, values in made]).astype(np.float64)
    n = normed(x, norm)
    assert_near(
        rows_alone_and_together(run, x),
        n @ values.T + added,
        np.abs(n) @ np.abs(values).T + np.abs(added),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_and_up(metal, activation):
    columns, outputs = 96, 37
    kernels, (norm, x) = Kernels(metal.metal_kernel), norm_and_inputs(11, columns)
    gate, gate_values = recorded_matrix(Format.Q4_1, outputs, columns)
    up, up_values = recorded_matrix(Format.Q8_0, outputs, columns, seed=1)

    def run(x):
        return np.array(kernels.gate_up(mx.array(x), mx.array(norm), EPS, gate, up, activation))

    n = normed(x, norm)
    g, u = n @ gate_values.T.astype(np.float64), n @ up_values.T.astype(np.float64)
    wide = np.abs(n) @ np.abs(gate_values).T * (np.abs(u) + 1) + np.abs(n) @ np.abs(up_values).T * (
        np.abs(g) + 1
    )
    with np.errstate(over="ignore"):
        assert_near(rows_alone_and_together(run, x), ACTIVATIONS[activation](g) * u, wide)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_any_size_stay_finite(metal, activation):
    """Of -200, -50, 0, 50 and 200: no exp overflows."""
    gates = np.array([-200, -50, -1, 0, 1, 50, 200], np.float32)
    weights = np.zeros((len(gates), 16), np.float32)
    weights[:, 0] = gates
    ones = np.zeros((len(gates), 16), np.float32)
    ones[:, 0] = 1
    gate, up = (
        Matrix(mx.array(w.view(np.uint8)), Format.F32, len(gates), 16) for w in (weights, ones)
    )
    x = np.zeros((1, 16), np.float32)
    x[0, 0] = 1
    norm = np.ones(16, np.float32)
    factor = normed(x, norm)[0, 0]
    given = mx.array(x), mx.array(norm), EPS, gate, up, activation
    found = np.array(Kernels(metal.metal_kernel).gate_up(*given))
    expected = ACTIVATIONS[activation](gates.astype(np.float64) * factor) * factor
    np.testing.assert_allclose(found[0], expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("soft_cap", [0.0, 0.5, 30.0])
def test_logits(metal, soft_cap):
    columns, vocab = 64, 271
    kernels, (norm, x) = Kernels(metal.metal_kernel), norm_and_inputs(11, columns)
    head, values = recorded_matrix(Format.Q8_0, vocab, columns)

    def run(x):
        return np.array(kernels.logits(mx.array(x), mx.array(norm), EPS, head, soft_cap))

    n = normed(x, norm)
    expected, terms = n @ values.T.astype(np.float64), np.abs(n) @ np.abs(values).T
    if soft_cap:
        expected = soft_cap * np.tanh(expected / soft_cap)
    assert_near(rows_alone_and_together(run, x), expected, terms + soft_cap)


def test_a_soft_cap_holds_for_logits_of_any_size_and_hides_none_that_is_not_finite(metal):
    weights = np.zeros((7, 16), np.float32)
    weights[:, 0] = [0, 1e-3, -1e-3, 200, -200, np.inf, np.nan]
    head = Matrix(mx.array(weights.view(np.uint8)), Format.F32, 7, 16)
    ones = mx.ones((1, 16))
    found = np.array(Kernels(metal.metal_kernel).logits(ones, ones[0], 0.0, head, 30.0))[0]
    np.testing.assert_allclose(found[:5], [0, 1e-3, -1e-3, 30, -30], rtol=0, atol=1e-4)
    assert np.isnan(found[5:]).all()


def test_no_dimension_of_a_matrix_counts_all_its_bytes():
    """MLX refuses dimensions from 2^31 on; large embeddings of 16-bit floats have more bytes."""
    tensor = Tensor("table", Format.F16, (5, 32), bytes(5 * 64))
    program = Program(32, 1, 1, 32, 5, 1.0, (Rope((1.0,), False),), (Embed(tensor),))
    assert Weights(program).matrix(tensor).data.shape == (5, 64)
