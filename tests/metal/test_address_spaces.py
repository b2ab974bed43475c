"""clang refuses what Apple's compiler would; collected where scripts/check_metal gives a clang."""

import mlx.core as mx
import pytest

from tests.metal.address_spaces import check_address_spaces
from tests.metal.executor import MetalError
from tests.metal.signature import Kernel, Operand, variant_of

BODY = """
    threadgroup float tile[32];
    const uint i = thread_index_in_threadgroup;
    tile[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const device float4* vectors = reinterpret_cast<const device float4*>(x);
    const float4 v = vectors[i / 4];
    y[i] = tile[i ^ 1] + dot(v, float4(1.0f)) + float(half4(v).x);
"""


def check(source: str, constant: bool = False) -> None:
    kernel = Kernel("spaces", ("x",), ("y",), source)
    check_address_spaces(variant_of(kernel, [Operand(mx.float32, 1, constant)], [mx.float32], ()))


def test_a_right_text_passes() -> None:
    check(BODY)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("const device float4* vectors", "const float4* vectors"),
        ("const device float4* vectors", "const constant float4* vectors"),
        ("const device float4*>(x)", "const float4*>(x)"),
        ("threadgroup float tile[32];", "threadgroup float tile[32]; float* p = tile;"),
        ("const float4 v", "const half4 v"),
        ("y[i] =", "x[i] = 0.0f; y[i] ="),
        ("dot(v, float4(1.0f))", "max(v.x, 1)"),
        ("dot(v, float4(1.0f))", "unheard_of(v)"),
    ],
)
def test_a_wrong_text_is_refused(old: str, new: str) -> None:
    assert old in BODY
    with pytest.raises(MetalError, match="clang refuses"):
        check(BODY.replace(old, new))


def test_a_pointer_to_device_memory_does_not_fit_a_small_input() -> None:
    with pytest.raises(MetalError, match="clang refuses"):
        check(BODY, constant=True)
