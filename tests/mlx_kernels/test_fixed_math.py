"""The kernels' own exp and log, sine and cosine, against the C library's to within a few ulp.

fixed_log is `_cpu.log`; fixed_exp shows in rope frequencies; the float exp of the kernels in
log_sum_exp; sine and cosine in the keys of a decoder.
"""

import math
import random

import numpy as np
import pytest

from llamay.mlx_kernels import _cpu
from tests import contract

ISAS = _cpu.kernel_sets()


def test_log_is_accurate_to_1e_15():
    rng = random.Random(1)
    values = [rng.uniform(0.5, 2) for _ in range(2000)]
    values += [math.exp(rng.uniform(-690, 690)) for _ in range(2000)]
    values += [1.0, 2.0, 0.5, math.e, math.sqrt(2), math.nextafter(1, 2), math.nextafter(1, 0)]
    for x in values:
        assert abs(_cpu.log(x) - math.log(x)) <= 1e-15 * max(1, 2 * abs(math.log(x))), x


def test_log_near_one_keeps_its_relative_accuracy():
    for exponent in range(1, 50):
        x = 1 + 2.0**-exponent
        assert _cpu.log(x) == pytest.approx(math.log(x), rel=1e-15)


@pytest.mark.parametrize("x", [0.0, -1.0, math.inf, -math.inf, math.nan, 5e-324, 1e-310])
def test_log_of_what_has_none_raises(x):
    with pytest.raises(ValueError, match="normal positive"):
        _cpu.log(x)


@pytest.mark.parametrize("base", [1.0, 10000.0, 500000.0, 1e6, 1e29])
@pytest.mark.parametrize("dim", [2, 32, 64, 128, 256])
def test_rope_frequencies_are_powers_of_the_base(dim, base):
    found = _cpu.rope_frequencies(dim, base)
    assert len(found) == dim // 2
    for i, frequency in enumerate(found):
        # An error of 1e-16 in log(base) weighs as much as log(base) is large.
        assert frequency == pytest.approx(base ** (-2 * i / dim), rel=2e-14)


@pytest.mark.parametrize(
    ("dim", "base"), [(3, 10.0), (-2, 10.0), (4, 0.5), (4, math.nan), (4, math.inf)]
)
def test_rope_frequencies_out_of_range_raise(dim, base):
    with pytest.raises(ValueError, match="out of range"):
        _cpu.rope_frequencies(dim, base)


def test_sine_and_cosine_are_accurate_to_1e_15_up_to_a_million_radians():
    """Of the contract in numpy, whose bits the kernels' rope tables have (test_contract)."""
    rng = random.Random(2)
    angles = [rng.uniform(0, 10) for _ in range(2000)] + [
        rng.uniform(0, 2**20) for _ in range(2000)
    ]
    angles += [n * math.pi / 4 for n in range(64)] + [0.0, 1e-300, 2.0**20 - 1]
    sines, cosines = contract.sine_cosine(np.array(angles))
    for angle, sine, cosine in zip(angles, sines.tolist(), cosines.tolist(), strict=True):
        assert abs(sine - math.sin(angle)) < 1e-15
        assert abs(cosine - math.cos(angle)) < 1e-15


@pytest.mark.parametrize("isa", ISAS)
def test_log_sum_exp_is_that_of_float64(isa):
    rng = np.random.default_rng(3)
    for count in (1, 15, 16, 17, 271, 50_001):
        for size in (0.01, 3, 40):
            logits = (rng.normal(size=count) * size).astype(np.float32)
            shifted = np.exp(logits.astype(np.float64) - logits.max())
            wanted = float(logits.max()) + math.log(math.fsum(shifted.tolist()))
            assert _cpu.log_sum_exp(isa, logits) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_exp_is_accurate_to_two_ulp_and_has_the_bits_of_the_contract(isa):
    """log_sum_exp of (0, x) is log(1 + e^x), which gives e^x back."""
    for x in np.linspace(-30, 0, 500, dtype=np.float32):
        one = float(contract.exp32(np.array([x]))[0])
        assert one == pytest.approx(math.exp(float(x)), rel=2**-22)
        assert _cpu.log_sum_exp(isa, np.array([0, x], np.float32)) == _cpu.log(1 + one)


def test_log_sum_exp_has_the_same_bits_on_every_set():
    rng = np.random.default_rng(4)
    for count in (1, 7, 16, 33, 271, 1000):
        logits = (rng.normal(size=count) * 8).astype(np.float32)
        assert len({_cpu.log_sum_exp(isa, logits) for isa in ISAS}) == 1


@pytest.mark.parametrize("logits", [b"", b"\0" * 7])
def test_logits_that_are_no_floats_raise(logits):
    with pytest.raises(ValueError, match="float32"):
        _cpu.log_sum_exp("scalar", logits)
