"""Calls are as those of `mx.fast.metal_kernel`: their grids, inputs, outputs and templates."""

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.executor import HostMetal
from tests.metal.signature import TYPE_NAMES

SIZES = [1, 7, 8, 33]  # on both sides of 8 elements, where inputs change their address space


def copied(metal: HostMetal, x: mx.array, expression: str = "x[i]") -> mx.array:
    kernel = metal.metal_kernel(
        name="copy",
        input_names=["x"],
        output_names=["y"],
        source=f"const uint i = thread_position_in_grid.x; y[i] = {expression};",
    )
    (y,) = kernel(
        inputs=[x],
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return y


@pytest.mark.parametrize("size", SIZES)
def test_inputs_of_all_sizes_arrive(quick_metal: HostMetal, size: int) -> None:
    x = mx.arange(size).astype(mx.float32)
    assert mx.array_equal(copied(quick_metal, x), x)


def test_arrays_of_all_types_arrive_and_come_back(quick_metal: HostMetal) -> None:
    numbered = list(enumerate(TYPE_NAMES))
    kernel = quick_metal.metal_kernel(
        name="types",
        input_names=[f"x{n}" for n, _ in numbered],
        output_names=[f"y{n}" for n, _ in numbered],
        source="const uint i = thread_position_in_grid.x;"
        + "".join(f"y{n}[i] = x{n}[i];" for n, _ in numbered),
    )
    arrays = [(mx.arange(12) * 11).astype(dtype).reshape(3, 4) for dtype in TYPE_NAMES]
    outputs = kernel(
        inputs=arrays,
        grid=(12, 1, 1),
        threadgroup=(12, 1, 1),
        output_shapes=[(3, 4)] * len(arrays),
        output_dtypes=list(TYPE_NAMES),
    )
    for x, y in zip(arrays, outputs, strict=True):
        assert y.dtype == x.dtype
        assert mx.array_equal(y, x)


def test_numbers_are_references_and_templates_types_and_integers(metal: HostMetal) -> None:
    kernel = metal.metal_kernel(
        name="scaled",
        input_names=["x", "scale"],
        output_names=["y", "z"],
        source="""
            const uint i = thread_position_in_grid.x;
            y[i] = T(x[i] * scale + N);
            z[i] = FLAG ? x_shape[0] * 10 + x_ndim : 0;
        """,
    )
    y, z = kernel(
        inputs=[mx.arange(8).astype(mx.float32), 0.5],
        template=[("T", mx.float16), ("N", -3), ("FLAG", True)],
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
        output_shapes=[(2, 4), (8,)],
        output_dtypes=[mx.float16, mx.int32],
    )
    assert y.dtype == mx.float16
    assert y.shape == (2, 4)
    assert y.reshape(8).tolist() == [i / 2 - 3 for i in range(8)]
    assert z.tolist() == [81] * 8


def test_a_strided_input_has_its_strides_if_that_is_wanted(metal: HostMetal) -> None:
    x = mx.arange(24).astype(mx.float32).reshape(4, 6)[1:, 1:4]
    kernel = metal.metal_kernel(
        name="strided",
        input_names=["x"],
        output_names=["y"],
        source="""
            const uint column = thread_position_in_grid.x, row = thread_position_in_grid.y;
            y[row * 3 + column] = x[row * x_strides[0] + column * x_strides[1]];
        """,
        ensure_row_contiguous=False,
    )
    (y,) = kernel(
        inputs=[x],
        grid=(3, 3, 1),
        threadgroup=(3, 3, 1),
        output_shapes=[(3, 3)],
        output_dtypes=[mx.float32],
    )
    assert mx.array_equal(y, x)


def test_threadgroups_at_the_edges_are_smaller(metal: HostMetal) -> None:
    kernel = metal.metal_kernel(
        name="edges",
        input_names=["x"],
        output_names=["y"],
        source="""
            const uint2 at = thread_position_in_grid.xy;
            y[at.y * 70 + at.x] = int(threads_per_threadgroup.x * 1000
                + threads_per_threadgroup.y * 100 + simdgroups_per_threadgroup * 10
                + threadgroup_position_in_grid.x);
        """,
    )
    (y,) = kernel(
        inputs=[mx.zeros(1)],
        grid=(70, 3, 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(3, 70)],
        output_dtypes=[mx.int32],
    )
    corners = np.array(y)[[0, 0, 2, 2], [0, 69, 0, 69]]
    assert corners.tolist() == [32220, 6212, 32110, 6112]


def test_outputs_begin_with_the_value_given(metal: HostMetal) -> None:
    kernel = metal.metal_kernel(
        name="partly", input_names=["x"], output_names=["y"], source="y[2] = 0;"
    )
    for dtype, value in ((mx.float32, 1.5), (mx.int32, 3)):
        (y,) = kernel(
            inputs=[mx.zeros(1)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(4,)],
            output_dtypes=[dtype],
            init_value=value,
        )
        assert y.tolist() == [value, value, 0, value]


def test_launches_are_counted_by_kernel(quick_metal: HostMetal) -> None:
    for size in SIZES:
        copied(quick_metal, mx.zeros(size))
    assert quick_metal.launches == {"copy": len(SIZES)}
