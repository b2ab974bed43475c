"""Two small kernels that do what real ones do, for tests of the harness itself."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

MakeKernel = Callable[..., Any]

# y[m, n] = sum over k of x[m, k] * w[n, k]: 8 rows of x and 32 of w at a time, 4 simdgroups.
PRODUCT_SOURCE = """
    constexpr short TILE = 32, PITCH = TILE + 4;
    threadgroup float xs[8 * PITCH];
    threadgroup half4 ws[TILE * TILE / 4];
    threadgroup float sums[8][TILE];
    const uint group = simdgroup_index_in_threadgroup, thread_index = thread_index_in_threadgroup;
    const int columns = x_shape[1], rows = w_shape[0], m = x_shape[0];
    const int m0 = threadgroup_position_in_grid.y * 8, n0 = threadgroup_position_in_grid.x * TILE;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int k0 = 0; k0 < columns; k0 += TILE) {
        for (uint e = thread_index; e < 8 * TILE; e += 128) {
            const int row = m0 + e / TILE, column = k0 + e % TILE;
            xs[e / TILE * PITCH + e % TILE] =
                row < m && column < columns ? x[row * columns + column] : 0.0f;
        }
        for (uint e = thread_index; e < TILE * TILE / 4; e += 128) {
            const int row = n0 + e / (TILE / 4), column = k0 + e % (TILE / 4) * 4;
            ws[e] = row < rows && column < columns
                ? *reinterpret_cast<const device half4*>(w + row * columns + column) : half4(0.0h);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (short k = 0; k < TILE; k += 8) {
            simdgroup_float8x8 a;
            simdgroup_half8x8 b;
            simdgroup_load(a, xs + k, PITCH);
            simdgroup_load(b, reinterpret_cast<threadgroup half*>(ws) + group * 8 * TILE + k, TILE,
                           ulong2(0, 0), true);
            simdgroup_multiply_accumulate(sum, a, b, sum);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    simdgroup_store(sum, &sums[0][group * 8], TILE);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = thread_index; e < 8 * TILE; e += 128) {
        const int row = m0 + e / TILE, column = n0 + e % TILE;
        if (row < m && column < rows) y[row * rows + column] = sums[e / TILE][e % TILE];
    }
"""


def product(
    make_kernel: MakeKernel, x: mx.array, w: mx.array, source: str = PRODUCT_SOURCE
) -> mx.array:
    """x: [m, k] float32; w: [n, k] float16, k a multiple of 4. Returns [m, n] float32."""
    kernel = make_kernel(name="product", input_names=["x", "w"], output_names=["y"], source=source)
    (y,) = kernel(
        inputs=[x, w],
        grid=(-(-w.shape[0] // 32) * 128, -(-x.shape[0] // 8), 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(x.shape[0], w.shape[0])],
        output_dtypes=[mx.float32],
    )
    return y


# Sums of the first `lengths[context]` positions of paged rows, one simdgroup per context; lane l
# takes the positions l, l + 32, ...
PAGED_SUM_SOURCE = """
    const uint context = threadgroup_position_in_grid.x, lane = thread_index_in_simdgroup;
    const int length = lengths[context];
    float sum = 0.0f;
    for (int position = int(lane); position < length; position += 32) {
        const int page = table[context * table_shape[1] + position / PAGE];
        sum += pages[page * PAGE + position % PAGE];
    }
    const float total = simd_sum(sum);
    if (lane == 0) sums[context] = total;
"""


def paged_sum(
    make_kernel: MakeKernel,
    pages: mx.array,
    table: mx.array,
    lengths: mx.array,
    source: str = PAGED_SUM_SOURCE,
) -> mx.array:
    """pages: [pages, page] float32; table: [contexts, most] int32; lengths: [contexts] int32.

    Returns [contexts] float32.
    """
    kernel = make_kernel(
        name="paged_sum",
        input_names=["pages", "table", "lengths"],
        output_names=["sums"],
        source=source,
    )
    (sums,) = kernel(
        inputs=[pages, table, lengths],
        template=[("PAGE", pages.shape[1])],
        grid=(32 * lengths.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[lengths.shape],
        output_dtypes=[mx.float32],
    )
    return sums


def check_product(make_kernel: MakeKernel, source: str = PRODUCT_SOURCE) -> None:
    """Whole tiles and ragged ones, against float64."""
    random = np.random.default_rng(1)
    for m, n, k in ((8, 32, 64), (11, 37, 36)):
        x = random.standard_normal((m, k)).astype(np.float32)
        w = random.standard_normal((n, k)).astype(np.float16)
        y = np.array(product(make_kernel, mx.array(x), mx.array(w), source))
        np.testing.assert_allclose(y, x.astype(np.float64) @ w.T.astype(np.float64), atol=1e-5)


def check_paged_sum(make_kernel: MakeKernel, source: str = PAGED_SUM_SOURCE) -> None:
    """Contexts that are empty, end within a page, and fill their last one, against numpy."""
    page, lengths = 16, [0, 1, 100, 48]
    random = np.random.default_rng(2)
    pages = random.integers(-100, 100, (16, page)).astype(np.float32)
    table = np.full((len(lengths), 7), -1, np.int32)
    order = iter(random.permutation(16))
    for row, length in zip(table, lengths, strict=True):
        for i in range(-(-length // page)):
            row[i] = next(order)
    sums = paged_sum(
        make_kernel, *map(mx.array, (pages, table, np.array(lengths, np.int32))), source
    )
    for total, row, length in zip(np.array(sums), table, lengths, strict=True):
        assert total == pages[row].reshape(-1)[:length].sum()
