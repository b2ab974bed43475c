"""`sample` against its definition in a few lines of float64 numpy, on every instruction set."""

import numpy as np
import pytest

from llamay.mlx_kernels import _cpu
from llamay.mlx_kernels.cpu import sample
from tests.model.running import instruction_set

ISAS = _cpu.kernel_sets()
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def draw(logits, uniform, **options):
    return sample(np.asarray(logits, np.float32), **(DEFAULTS | options), uniform=uniform)


def distribution(logits, *, temperature, top_k, top_p, min_p):
    """(ids in order, their probabilities) that remain of float32 logits."""
    logits = np.asarray(logits, np.float32).astype(np.float64)
    order = np.lexsort((np.arange(len(logits)), -logits))[: top_k or None]
    shares = np.exp(logits[order] - logits.max())
    before = np.cumsum(shares) - shares
    keep = (before < top_p * shares.sum()) & (shares >= min_p * shares[0])
    keep[0] = True
    order = order[keep]
    weights = np.exp((logits[order] - logits.max()) / temperature)
    return order, weights / weights.sum()


OPTIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 256},
    {"top_k": 257},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 0.5},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "none")
@pytest.mark.parametrize("count", [1, 17, 271, 1200])
def test_each_token_is_drawn_for_its_share_of_the_uniforms(count, options, isa):
    """Token number i for uniforms within [sum of shares before i, sum with i): the inverse CDF.

    So over equally spaced uniforms the frequencies are the probabilities. Uniforms closer to an
    edge than float32 rounding of the weights are left out.
    """
    logits = (np.random.default_rng(count).normal(size=count) * 3).astype(np.float32)
    logits[::5] = np.round(logits[::5])  # some are equal
    ids, probabilities = distribution(logits, **(DEFAULTS | options))
    ends = np.cumsum(probabilities)
    with instruction_set(isa):
        for uniform in (np.arange(200) + 0.5) / 200:
            if np.abs(ends - uniform).min() > 1e-6:
                wanted = ids[np.searchsorted(ends, uniform, side="right")]
                assert draw(logits, float(uniform), **options) == wanted


def test_ties_go_to_the_lower_id():
    logits = [1.0, 5.0, 5.0, 2.0, 5.0]
    assert draw(logits, 0.999, top_k=1) == 1
    assert {draw(logits, u / 100, top_k=2) for u in range(100)} == {1, 2}
    assert [draw(logits, u, top_k=3) for u in (0.0, 0.34, 0.67)] == [1, 2, 4]
    assert {draw([0.0] * 50, u / 100, top_k=5) for u in range(100)} == {0, 1, 2, 3, 4}


def test_a_low_temperature_takes_the_largest_logit():
    logits = np.random.default_rng(5).normal(size=1000).astype(np.float32)
    for uniform in (0.0, 0.5, 0.999999):
        assert draw(logits, uniform, temperature=1e-6) == logits.argmax()
        assert draw(logits, uniform, temperature=1e-300) == logits.argmax()


def test_a_high_temperature_makes_all_alike():
    found = [draw([0.0, 1.0, 2.0, 3.0], (u + 0.5) / 400, temperature=1e9) for u in range(400)]
    assert np.bincount(found).tolist() == [100, 100, 100, 100]


def test_zero_takes_the_most_likely_and_the_last_uniform_one_that_can_be():
    logits = np.full(3000, -1e30, np.float32)
    logits[[7, 100, 2999]] = [0.5, 1.0, 0.1]
    last = np.nextafter(1.0, 0.0)
    assert draw(logits, 0.0) == 100
    assert draw(logits, float(last)) == 2999
    rng = np.random.default_rng(6)
    for _ in range(200):
        logits = (rng.normal(size=300) * 2).astype(np.float32)
        logits[rng.integers(0, 300, size=100)] = -1e30
        assert logits[draw(logits, float(last))] > -1e30


def test_the_most_likely_token_always_passes_the_filters():
    logits = [3.0, 4.0, 3.9]
    for options in ({"top_p": 1e-9}, {"top_p": -1.0}, {"min_p": 2.0}, {"top_k": 1, "top_p": 0.0}):
        assert {draw(logits, u / 50, **options) for u in range(50)} == {1}


def test_infinitely_unlikely_tokens_are_never_drawn():
    logits = [-np.inf, 1.0, -np.inf, 1.0, -np.inf]
    assert {draw(logits, u / 500) for u in range(500)} == {1, 3}


def test_every_set_draws_the_same():
    rng = np.random.default_rng(7)
    for _ in range(50):
        logits = (rng.normal(size=271) * 4).astype(np.float32)
        uniform, options = float(rng.random()), OPTIONS[rng.integers(len(OPTIONS))]
        found = set()
        for isa in ISAS:
            with instruction_set(isa):
                found.add(draw(logits, uniform, **options))
        assert len(found) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": np.nan},
        {"top_k": -1},
        {"uniform": 1.0},
        {"uniform": -0.1},
        {"uniform": np.nan},
    ],
)
def test_options_out_of_range_raise(options):
    arguments = DEFAULTS | {"uniform": 0.5} | options
    with pytest.raises(ValueError, match="out of range"):
        sample(np.zeros(4, np.float32), **arguments)


def test_logits_are_read_through_strides():
    logits = np.array([0, 9, 1, 9, 5, 9], np.float32)[::2]
    assert draw(logits, 0.0) == 2
