"""The largest logits, and the sum of all their exp, against numpy."""

import math

import mlx.core as mx
import numpy as np
import pytest

from llamay.mlx_kernels.metal.kernels import Kernels
from llamay.sampling import SamplingParams, best_wanted, choose
from tests import contract

THREADS = 1024  # each looks after the logits t, t + 1024, ...; 32 of them at once find the next


def random_logits(rows, vocab, scale=3.0):
    return np.random.default_rng(vocab).normal(size=(rows, vocab), scale=scale).astype(np.float32)


def expected(logits, count):
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    with np.errstate(over="ignore"):
        shares = contract.exp32(logits - logits.max(axis=1, keepdims=True))
    units = np.floor(shares.astype(np.float64) * 2.0**40).astype(np.int64)
    return np.take_along_axis(logits, ids, axis=1), ids, units.sum(axis=1)


def assert_best(metal, logits, count):
    found = Kernels(metal.metal_kernel).best(mx.array(logits), count)
    for part, wanted in zip(found, expected(logits, count), strict=True):
        np.testing.assert_array_equal(np.array(part), wanted)


@pytest.mark.parametrize("vocab", [33, 271, 1023, 1024, 1025, 33_001])
@pytest.mark.parametrize("count", [1, 2, 33])
def test_random_logits(metal, vocab, count):
    assert_best(metal, random_logits(2, vocab), count)


def test_a_row_alone_and_among_others(metal):
    logits = random_logits(9, 1500)
    assert_best(metal, logits, 40)
    assert_best(metal, logits[4:5], 40)


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros(3000),
        np.arange(3000) // 7,
        -(np.arange(3000) // 7),
        np.where(np.arange(3000) % 2, 0.0, -0.0),
        np.repeat([1.0, 5.0, 3.0], 1000),
    ],
    ids=["equal", "ascending", "descending", "zeros of both signs", "plateaus"],
)
def test_ties_go_to_the_lower_id(metal, logits):
    assert_best(metal, logits.astype(np.float32)[None], 40)


@pytest.mark.parametrize("thread", [0, 31, 500, 1023])
def test_one_thread_has_all_of_the_largest(metal, thread):
    """More of them than its simdgroup looks at in one turn, with ties."""
    logits = random_logits(1, 45 * THREADS, scale=0.1)
    own = logits[0, thread::THREADS]
    own[:] = 10 + np.random.default_rng(1).permutation(len(own)) // 3
    assert_best(metal, logits, 40)


@pytest.mark.parametrize("scale", [1e-3, 30, 1e38])
def test_logits_of_any_size(metal, scale):
    assert_best(metal, np.clip(random_logits(2, 2100), -3, 3) * np.float32(scale), 3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 63, 1024, 2499])
def test_a_logit_that_is_not_finite_is_told(metal, value, at):
    logits = random_logits(3, 2500)
    logits[1, at] = value
    totals = np.array(Kernels(metal.metal_kernel).best(mx.array(logits), 2)[2])
    assert totals[1] == 0
    assert (totals[[0, 2]] == expected(logits[[0, 2]], 1)[2]).all()


@pytest.mark.parametrize("top_k", [1, 2, 40])
def test_the_same_token_is_chosen_as_from_all_logits(quick_metal, top_k):
    from llamay.mlx_kernels.metal import MetalKernels

    rng = np.random.default_rng(top_k)
    logits = rng.normal(size=(40, 700), scale=2).astype(np.float32)
    logits[20:] = np.round(logits[20:])  # ties
    found = MetalKernels(quick_metal.metal_kernel).best(logits, 40)
    for row, best in zip(logits, found, strict=True):
        for top_p, min_p in [(1, 0), (0.95, 0.05), (0.5, 0), (1, 0.3)]:
            for temperature in (0, 0.7, 1.5):
                params = SamplingParams(
                    temperature, top_k, top_p, min_p, seed=int(rng.integers(99))
                )
                assert best_wanted(params) == (1 if temperature == 0 else top_k)
                token, logprob = choose(row, params, [1, 2, 3], [], best)
                plain_token, plain_logprob = choose(row, params, [1, 2, 3], [])
                assert token == plain_token
                assert logprob == pytest.approx(plain_logprob, abs=1e-6)


def test_where_all_logits_decide_only_the_sum_is_taken(quick_metal):
    from llamay.mlx_kernels.metal import MetalKernels

    logits = random_logits(1, 700)
    (best,) = MetalKernels(quick_metal.metal_kernel).best(logits, 1)
    wide = logits[0].astype(np.float64)
    assert best.log_sum_exp == pytest.approx(math.log(np.exp(wide).sum()), abs=1e-6)
    for params in (
        SamplingParams(top_k=0, seed=3),
        SamplingParams(top_k=65, seed=4),
        SamplingParams(temperature=0, repeat_penalty=1.5),
        SamplingParams(presence_penalty=1.0),
    ):
        assert best_wanted(params) == 1
        token, logprob = choose(logits[0], params, [5] * 9, [5], best)
        assert token == choose(logits[0], params, [5] * 9, [5])[0]
        assert logprob == float(logits[0, token]) - best.log_sum_exp
