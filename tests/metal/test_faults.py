"""Faults that a GPU would pass over, or answer with garbage or a hang, are caught and named."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.metal import executor
from tests.metal.examples import (
    PAGED_SUM_SOURCE,
    PRODUCT_SOURCE,
    check_paged_sum,
    check_product,
)
from tests.metal.executor import HostMetal, MetalError

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
LOOP = "for (int k0 = 0; k0 < columns; k0 += TILE) {"
STORE = "simdgroup_store(sum, "
SUM = "const float total = simd_sum(sum);"


def edited(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1
    return source.replace(old, new)


def ran(
    metal: HostMetal, source: str, x: mx.array | None = None, threads: int = 32, **more: Any
) -> mx.array:
    """The output of a kernel with an input `x` and an output `y` of 32 floats."""
    kernel = metal.metal_kernel(
        name="small", input_names=["x"], output_names=["y"], source=source, **more
    )
    (y,) = kernel(
        inputs=[mx.arange(32).astype(mx.float32) if x is None else x],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
    )
    return y


def test_the_examples_are_right(metal: HostMetal) -> None:
    check_product(metal.metal_kernel)
    check_paged_sum(metal.metal_kernel)


@pytest.mark.parametrize("occurrence", range(PRODUCT_SOURCE.count(BARRIER)))
def test_a_missing_barrier_shows_in_every_schedule(occurrence: int) -> None:
    parts = PRODUCT_SOURCE.split(BARRIER)
    source = BARRIER.join(parts[: occurrence + 1]) + BARRIER.join(parts[occurrence + 1 :])
    for schedule in executor.SCHEDULES:
        with pytest.raises(AssertionError):
            check_product(HostMetal([schedule]).metal_kernel, source)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "row < m && column < rows) y",
            "column < rows) y",
            r"after the end of output y\n.*y\[row \* rows",
        ),
        ("row < m && column < columns ?", "column < columns ?", "after the end of input x"),
        ("row < rows && column < columns\n", "row < rows\n", "after the end of input w"),
        ("w + row * columns", "w - 4 + row * columns", "8 bytes before the start of input w"),
        ("w + row * columns", "w + 1 + row * columns", "misaligned access.*\n.*byte 2 of input w"),
        ("e % TILE] =", "e % TILE + 33] =", r"index 288 is outside an array.*\n.*line 2\d: xs"),
        (
            "y[row * rows",
            "const_cast<device float*>(x)[0] = 0; y[row * rows",
            "byte 0 of input x, read-only",
        ),
        (
            "float sums[8][TILE];",
            "float sums[8][TILE], big[7168]; big[x_shape[1]] = 0.0f;",
            "threadgroup memory; 32768 are allowed",
        ),
        (
            "threadgroup half4 ws[TILE * TILE / 4];",
            "threadgroup half narrow[TILE * TILE];"
            " threadgroup half4* ws = reinterpret_cast<threadgroup half4*>(narrow);",
            "misaligned access",
        ),
        (
            LOOP,
            f"{LOOP} if (thread_index < 64) {BARRIER}",
            r"threads are apart: one at threadgroup_barrier in line \d+, another in line \d+",
        ),
        (LOOP, f"{LOOP} if (k0 && thread_index == 5) break;", "threads are apart"),
        (LOOP, f"if (group == 3) return; {LOOP}", "96 threads wait at threadgroup_barrier, 32 ret"),
        (STORE, f"if (thread_index % 2) {STORE}", "64 threads wait in simdgroup_store, 64 at"),
        (STORE, f"{BARRIER.replace('mem_threadgroup', 'mem_none')} {STORE}", "orders no memory"),
    ],
)
def test_a_fault_in_a_tiled_product_is_named(
    metal: HostMetal, old: str, new: str, message: str
) -> None:
    with pytest.raises(MetalError, match=message):
        check_product(metal.metal_kernel, edited(PRODUCT_SOURCE, old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "position / PAGE];",
            "position / PAGE] + (position == 99 ? 1 << 20 : 0);",
            r"after the end of input pages\n.*sum \+= pages",
        ),
        ("position < length", "position < 7 * PAGE", "4 bytes before the start of input pages"),
        (
            SUM,
            "float total; if (lane < 16) total = simd_sum(sum);\nelse total = simd_sum(-sum);",
            r"apart: one in simd_sum in line \d+, another in simd_sum in line \d+",
        ),
        (SUM, f"if (lane == 40) {SUM} const float total = 0.0f;", None),
        (SUM, f"if (lane % 2 == 0) return; {SUM}", None),
        ("float sum = 0.0f;", "float sum;", None),
    ],
)
def test_a_fault_in_a_walk_over_pages_is_named_or_gives_wrong_sums(
    metal: HostMetal, old: str, new: str, message: str | None
) -> None:
    with pytest.raises(AssertionError, match=message):
        check_paged_sum(metal.metal_kernel, edited(PAGED_SUM_SOURCE, old, new))


def test_lanes_that_race_for_an_element_depend_on_the_schedule(metal: HostMetal) -> None:
    source = "y[thread_position_in_grid.x / 2] = x[thread_position_in_grid.x];"
    with pytest.raises(MetalError, match=r"y depends on the order of threads: 16 elements differ"):
        ran(metal, source)


def test_a_shuffle_from_a_lane_beyond_the_simdgroup_is_nan(metal: HostMetal) -> None:
    lane = "const uint lane = thread_index_in_simdgroup;"
    y = ran(metal, f"{lane} y[lane] = simd_shuffle_down(x[lane], 1);")
    assert mx.array_equal(y[:31], mx.arange(1, 32))
    assert mx.isnan(y[31]).item()


@pytest.mark.parametrize("value", ["NAN", "-INFINITY", "x[3] * 1e9f", "x[3] - 5.0f"])
def test_a_float_that_no_such_integer_can_hold_is_named(metal: HostMetal, value: str) -> None:
    kind = "uint" if value.endswith("5.0f") else "int"
    with pytest.raises(MetalError, match="a float that no such integer can hold"):
        ran(metal, f"y[0] = float({kind}({value}));")


def test_what_a_kernel_does_not_write_is_nan_unless_initialised(metal: HostMetal) -> None:
    y = ran(metal, "if (thread_index_in_simdgroup == 3) y[3] = x[3];")
    assert mx.array_equal(mx.isnan(y), mx.arange(32) != 3)


def test_a_missing_simdgroup_barrier_reads_fresh_threadgroup_memory(metal: HostMetal) -> None:
    source = """
        threadgroup float tile[32];
        const uint lane = thread_index_in_simdgroup;
        tile[lane] = x[lane];
        BARRIER
        y[lane] = tile[lane ^ 1];
    """
    barrier = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    swapped = mx.arange(32).reshape(16, 2)[:, ::-1].reshape(32)
    assert mx.array_equal(ran(metal, source.replace("BARRIER", barrier)), swapped)
    for wrong in ("", barrier.replace("mem_threadgroup", "mem_none")):
        with pytest.raises(MetalError, match="depends on the order of threads"):
            ran(metal, source.replace("BARRIER", wrong))


def test_division_by_zero_and_endless_loops_end(
    metal: HostMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MetalError, match="integer division by zero"):
        ran(metal, "y[thread_index_in_simdgroup] = 7 / int(x[0]);")
    monkeypatch.setattr(executor, "TIMEOUT_S", 1)
    with pytest.raises(MetalError, match="no end"):
        ran(metal, "while (x[0] == 0.0f) y[thread_index_in_simdgroup] += 1.0f;")


def test_the_harness_works_on_after_a_fault(metal: HostMetal) -> None:
    good = "y[thread_index_in_threadgroup] = simd_sum(x[thread_index_in_threadgroup]);"
    for bad in ("y[1 << 20] = 0.0f;", "if (thread_index_in_threadgroup == 0) simd_sum(x[0]);"):
        with pytest.raises(MetalError):
            ran(metal, f"{bad} simd_max(x[0]); {good}")
        assert mx.array_equal(ran(metal, good), mx.full(32, 496))


def limits() -> dict[str, tuple[Callable[[HostMetal], object], str]]:
    body = "y[thread_index_in_threadgroup % 32] = x[0];"
    many = [f"x{i}" for i in range(31)]

    def with_many_inputs(metal: HostMetal) -> object:
        kernel = metal.metal_kernel(
            name="many", input_names=many, output_names=["y"], source="y[0] = x0[0];"
        )
        return kernel(
            inputs=[mx.zeros(8)] * len(many),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )

    return {
        "threads": (lambda metal: ran(metal, body, threads=1025), "1025 threads"),
        "empty grid": (lambda metal: ran(metal, body, threads=0), "0 threads|empty"),
        "buffers": (with_many_inputs, "32 buffers"),
        "strided input": (
            lambda metal: ran(metal, body, mx.zeros((8, 8))[:, :2]),
            "x is strided, so that MLX copies it",
        ),
        "text": (lambda metal: ran(metal, "y[0] = x[0]"), "does not compile"),
        "implicit bfloat": (lambda metal: ran(metal, "bfloat b = x[0];"), "does not compile"),
        "implicit vector": (
            lambda metal: ran(metal, "half4 h = float4(x[0]);"),
            "does not compile",
        ),
        "mixed maximum": (lambda metal: ran(metal, "y[0] = max(x[0], 0);"), "ambiguous"),
        "matrix of part of a simdgroup": (
            lambda metal: ran(metal, "simdgroup_float8x8 m; simdgroup_load(m, x);", threads=16),
            "in a simdgroup that is not whole",
        ),
    }


@pytest.mark.parametrize("limit", limits())
def test_what_metal_or_mlx_would_refuse_is_refused(metal: HostMetal, limit: str) -> None:
    run, message = limits()[limit]
    with pytest.raises(MetalError, match=message):
        run(metal)
