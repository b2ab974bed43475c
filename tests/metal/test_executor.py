"""The executor runs kernels as Metal would."""

import mlx.core as mx
import numpy as np

from tests.metal.executor import HostMetal


def test_a_kernel_with_template_threadgroup_memory_and_simd_sum(metal: HostMetal) -> None:
    kernel = metal.metal_kernel(
        name="neighbours",
        input_names=["x", "scale"],
        output_names=["y"],
        source="""
            threadgroup float tile[64];
            const uint i = thread_position_in_grid.x, local = thread_index_in_threadgroup;
            tile[local] = x[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            const float sum = simd_sum(x[i]);
            if (i < uint(x_shape[0])) y[i] = T(tile[local ^ 1] * scale + sum);
        """,
    )
    x = mx.arange(128).astype(mx.float32)
    (y,) = kernel(
        inputs=[x, 2.0],
        template=[("T", mx.float16)],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(128,)],
        output_dtypes=[mx.float16],
    )
    lanes = np.arange(128, dtype=np.float32)
    sums = lanes.reshape(4, 32).sum(axis=1).repeat(32)
    expected = lanes.reshape(64, 2)[:, ::-1].reshape(128) * 2 + sums
    assert np.array_equal(np.array(y), expected.astype(np.float16))
    assert metal.launches == {"neighbours": 1}
