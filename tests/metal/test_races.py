"""Races for threadgroup memory are found; collected only where $LLAMAY_METAL_RACES is set."""

import mlx.core as mx
import pytest

from tests.metal.executor import HostMetal, MetalError

SIMDGROUP_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
THREADGROUP_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def run(body: str) -> mx.array:
    kernel = HostMetal(["forward"]).metal_kernel(
        name="race",
        input_names=["x"],
        output_names=["y"],
        source="threadgroup float t[64]; const uint i = thread_index_in_threadgroup;" + body,
    )
    (y,) = kernel(
        inputs=[mx.arange(64).astype(mx.float32)],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )
    return y


def test_barriers_order_accesses() -> None:
    body = f"""
        t[i] = x[i]; {SIMDGROUP_BARRIER}
        y[i] = t[i ^ 1]; {SIMDGROUP_BARRIER}
        t[i] = simd_sum(y[i]); {THREADGROUP_BARRIER}
        y[i] = t[63 - i] + t[0]; {THREADGROUP_BARRIER}
        t[i ^ 33] = 1.0f;
    """
    assert run(body)[0].item() == 48 * 32 - 16 + 496


@pytest.mark.parametrize(
    "body",
    [
        "t[i] = x[i]; y[i] = simd_sum(1.0f); y[i] = t[i ^ 1];",  # a reduction is no barrier
        f"t[i] = x[i]; {SIMDGROUP_BARRIER} y[i] = t[i ^ 32];",  # nor is one of half of the threads
        f"t[i] = x[i]; {THREADGROUP_BARRIER} y[i] = t[i ^ 1]; simd_sum(1.0f); t[i] = 2.0f;",
        "t[i % 2] = x[i];",
    ],
)
def test_accesses_without_a_barrier_are_races(body: str) -> None:
    with pytest.raises(MetalError, match="race for threadgroup memory"):
        run(body)
