"""Faults that a GPU would pass over are caught, each by what is named."""

import mlx.core as mx
import pytest

from tests.metal.examples import (
    PAGED_SUM_SOURCE,
    PRODUCT_SOURCE,
    MakeKernel,
    check_paged_sum,
    check_product,
)
from tests.metal.executor import HostMetal, MetalError

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def without(source: str, text: str, occurrence: int) -> str:
    """The source without an occurrence of a text, counted from 0."""
    parts = source.split(text)
    assert len(parts) > occurrence + 1
    return text.join(parts[: occurrence + 1]) + text.join(["", *parts[occurrence + 1 :]])[len(text) :]


def replaced(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1
    return source.replace(old, new)


def test_the_examples_are_right(metal: HostMetal) -> None:
    check_product(metal.metal_kernel)
    check_paged_sum(metal.metal_kernel)


@pytest.mark.parametrize("occurrence", range(PRODUCT_SOURCE.count(BARRIER)))
@pytest.mark.parametrize("schedule", ["forward", "reverse"])
def test_each_missing_barrier_makes_wrong_values_in_one_schedule(
    schedule: str, occurrence: int
) -> None:
    source = PRODUCT_SOURCE
    host = HostMetal([schedule])
    parts = source.split(BARRIER)
    source = BARRIER.join(parts[: occurrence + 1]) + BARRIER.join(parts[occurrence + 1 :])
    assert source.count(BARRIER) == PRODUCT_SOURCE.count(BARRIER) - 1
    with pytest.raises(AssertionError):
        check_product(host.metal_kernel, source)
