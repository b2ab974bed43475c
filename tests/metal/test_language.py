"""The shim computes what the Metal Shading Language says; expected values: numpy's, or by hand."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.metal.executor import HostMetal

LANES = np.arange(32, dtype=np.float32)


def ran(
    metal: HostMetal,
    source: str,
    inputs: dict[str, mx.array],
    count: int = 32,
    dtype: mx.Dtype = mx.float32,
    threads: int = 32,
    header: str = "",
) -> NDArray[np.generic]:
    """`count` elements of the output `y`; `i` is the thread."""
    kernel = metal.metal_kernel(
        name="language",
        input_names=list(inputs),
        output_names=["y"],
        source="const uint i = thread_position_in_grid.x;" + source,
        header=header,
    )
    (y,) = kernel(
        inputs=list(inputs.values()),
        grid=(threads, 1, 1),
        threadgroup=(min(threads, 256), 1, 1),
        output_shapes=[(count,)],
        output_dtypes=[dtype],
    )
    return np.array(y.view(mx.uint16) if dtype == mx.bfloat16 else y)


def test_half_is_rounded_after_each_operation(metal: HostMetal) -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(1024).astype(np.float16) for _ in range(3))
    inputs = {"a": mx.array(a), "b": mx.array(b), "c": mx.array(c)}
    y = ran(metal, "y[i] = a[i] * b[i] + c[i];", inputs, 1024, mx.float16, 1024)
    assert np.array_equal(y, a * b + c)


def test_float_products_are_not_fused_unless_asked(metal: HostMetal) -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(1024).astype(np.float32) for _ in range(3))
    inputs = {"a": mx.array(a), "b": mx.array(b), "c": mx.array(c)}
    y = ran(metal, "y[i] = a[i] * b[i] + c[i];", inputs, 1024, threads=1024)
    assert np.array_equal(y, a * b + c)
    y = ran(metal, "y[i] = fma(a[i], b[i], c[i]);", inputs, 1024, threads=1024)
    exact = a.astype(np.float64) * b + c  # its own rounding does not matter to these values
    assert np.array_equal(y, exact.astype(np.float32))


def test_bfloat_rounds_to_nearest_even(metal: HostMetal) -> None:
    x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    x[:6] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf, -np.inf, np.nan, 0
    y = ran(metal, "y[i] = bfloat16_t(x[i]);", {"x": mx.array(x)}, 1024, mx.bfloat16, 1024)
    assert np.array_equal(y, np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16)))
    assert y[0] == 0x3F80  # ties go to the even neighbour
    assert y[1] == 0x3F82


def test_vectors_and_swizzles(metal: HostMetal) -> None:
    source = """
        float4 v = float4(x[0], x[1], x[2], x[3]);
        const float2 wy = v.wy;
        y[0] = wy.x * 10.0f + wy.y;
        v.xz = wy;
        y[1] = dot(v, float4(1000.0f, 100.0f, 10.0f, 1.0f));
        v.zw = v.xy;
        y[2] = dot(v, float4(1000.0f, 100.0f, 10.0f, 1.0f));
        const uchar4 q = uchar4(0x21, 0x43, 0x65, 0x87);
        y[3] = dot(float4(q & uchar4(0x0F)), float4(1000.0f, 100.0f, 10.0f, 1.0f));
        y[4] = dot(float4(q >> 4), float4(1000.0f, 100.0f, 10.0f, 1.0f));
        const half4 h = half4(float4(2.0f, 3.0f, 4.0f, 5.0f));
        y[5] = float(h.x * h.y) + float(h[3]);
        const int3 c = int3(int2(7, 8), 9);
        y[6] = float(c.z * 100 + c.y * 10 + c.x);
        y[7] = any(v == float4(4.0f)) ? 1.0f : 0.0f;
        y[8] = all(v == float4(4.0f)) ? 1.0f : 0.0f;
        y[9] = as_type<float>(as_type<uint>(1.5f));
        y[10] = float(as_type<uint>(q) >> 24);
        y[11] = max(v, 2.5f).x + min(v.zw, float2(3.0f)).y + clamp(v, 0.0f, 1.0f).y;
        packed_float3 p = packed_float3(float3(1.0f, 2.0f, 3.0f));
        y[12] = float3(p).z * 10.0f + float(sizeof(packed_float3)) + float(sizeof(float3));
        v *= 2.0f;
        y[13] = v.y;
        y[14] = float((int4(7, -7, 9, 2) % 4).z);
        y[15] = select(1.0f, 2.0f, x[0] > 0.0f) + float4(fast::exp(float4(0.0f))).w;
    """
    y = ran(metal, source, {"x": mx.array([1.0, 2, 3, 4])}, 16, threads=1)
    # v is (1, 2, 3, 4), then (4, 2, 2, 4), then (4, 2, 4, 2)
    expected = [42, 4224, 4242, 1357, 2468, 11, 987, 1, 0, 1.5, 0x87, 4 + 2 + 1, 58, 4, 1, 3]
    assert y.tolist() == expected


def test_integers(metal: HostMetal) -> None:
    source = """
        y[0] = extract_bits(0xABCDu, 4, 8);
        y[1] = popcount(0xF0F0u);
        y[2] = clz(1u) * 100 + ctz(8u);
        y[3] = int(mulhi(0x80000000u, 6u));
        y[4] = extract_bits(int(0xF0), 4, 4);
        y[5] = char(200) < 0;
        y[6] = int(uchar(200)) + abs(-5) + max(2, 3) + min(2u, 3u);
        y[7] = int(rint(2.5f)) * 100 + int(rint(3.5f)) * 10 + int(round(2.5f));
    """
    y = ran(metal, source, {"x": mx.zeros(1)}, 8, mx.int32, threads=1)
    assert y.tolist() == [0xBC, 8, 3103, 3, -1, 1, 200 + 5 + 3 + 2, 243]


def test_maths_is_numpys_within_rounding(metal: HostMetal) -> None:
    functions = ["exp", "exp2", "log", "sqrt", "sin", "cos", "tanh", "floor", "trunc"]
    x = np.linspace(0.1, 7, 64, dtype=np.float32)
    for space in ("", "metal::fast::", "metal::precise::"):
        lines = [f"y[{k * 64} + i] = {space}{name}(x[i]);" for k, name in enumerate(functions)]
        y = ran(metal, "\n".join(lines), {"x": mx.array(x)}, 64 * len(functions), threads=64)
        for name, row in zip(functions, y.reshape(-1, 64), strict=True):
            np.testing.assert_allclose(row, getattr(np, name)(x), rtol=1e-6, atol=1e-6)


def test_reductions_and_shuffles(metal: HostMetal) -> None:
    source = """
        y[i] = simd_shuffle_xor(x[i], 1) + simd_shuffle(x[i], 31 - i);
        y[32 + i] = simd_prefix_exclusive_sum(x[i]);
        y[64 + i] = simd_prefix_inclusive_sum(x[i]);
        y[96 + i] = simd_max(x[i]) * 1000.0f + simd_broadcast(x[i], 5) + simd_broadcast_first(x[i]);
        y[128 + i] = simd_shuffle_and_fill_up(x[i], -1.0f, 2);
        y[160 + i] = simd_any(i == 9) && !simd_all(i == 9) ? simd_min(x[i]) : -1.0f;
        y[192 + i] = simd_sum(float4(x[i])).w + float(simd_sum(int(i)));
    """
    y = ran(metal, source, {"x": mx.array(LANES)}, 224).reshape(7, 32)
    lanes = LANES.astype(int)
    assert np.array_equal(y[0], (lanes ^ 1) + (31 - lanes))
    assert np.array_equal(y[1], np.cumsum(LANES) - LANES)
    assert np.array_equal(y[2], np.cumsum(LANES))
    assert np.array_equal(y[3], np.full(32, 31005))
    assert np.array_equal(y[4], np.where(lanes < 2, -1, lanes - 2))
    assert np.array_equal(y[5], np.zeros(32))
    assert np.array_equal(y[6], np.full(32, 992))


def test_lanes_that_returned_do_not_count(metal: HostMetal) -> None:
    source = "if (i >= 40) return; y[i] = simd_sum(1.0f);"
    y = ran(metal, source, {"x": mx.zeros(1)}, 64, threads=64)
    assert y[:40].tolist() == [32] * 32 + [8] * 8


def test_matrices(metal: HostMetal) -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.integers(-9, 9, (8, 8)).astype(np.float32) for _ in range(3))
    source = """
        simdgroup_float8x8 left, right, sum;
        simdgroup_load(left, a, 8);
        simdgroup_load(right, b, 8, ulong2(0, 0), true);
        simdgroup_load(sum, c);
        simdgroup_multiply_accumulate(sum, left, right, sum);
        simdgroup_store(sum, y, 8);
        simdgroup_half8x8 twice(2.0h);
        simdgroup_float8x8 product;
        simdgroup_multiply(product, left, twice);
        simdgroup_store(product, y + 64, 8);
        y[128 + 2 * i] = left.thread_elements()[0];
        y[129 + 2 * i] = left.thread_elements()[1];
    """
    inputs = {"a": mx.array(a), "b": mx.array(b), "c": mx.array(c)}
    y = ran(metal, source, inputs, 192).reshape(3, 64)
    assert np.array_equal(y[0].reshape(8, 8), a @ b.T + c)
    assert np.array_equal(y[1].reshape(8, 8), 2 * a)
    # Lanes 0 to 3 hold two rows of the upper left quarter, 8 to 11 of the upper right one.
    assert y[2].reshape(32, 2)[[0, 1, 2, 8]].tolist() == [
        a[0, :2].tolist(),
        a[0, 2:4].tolist(),
        a[1, :2].tolist(),
        a[0, 4:6].tolist(),
    ]


def test_atomics_add_up(metal: HostMetal) -> None:
    kernel = metal.metal_kernel(
        name="count",
        input_names=["x"],
        output_names=["y"],
        source="""
            const uint i = thread_position_in_grid.x;
            atomic_fetch_add_explicit(&y[i % 3], 1, memory_order_relaxed);
        """,
        atomic_outputs=True,
    )
    (y,) = kernel(
        inputs=[mx.zeros(1)],
        grid=(1000, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(3,)],
        output_dtypes=[mx.int32],
        init_value=0,
    )
    assert y.tolist() == [334, 333, 333]
