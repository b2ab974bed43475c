"""The harness compiles, byte for byte, the text that MLX compiles."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from llamay.formats import Format
from llamay.kv import Cache
from llamay.mlx_kernels import Control
from llamay.mlx_kernels.metal import MetalKernels
from llamay.mlx_kernels.metal.kernels import SIGNATURES
from llamay.model.decoder import Rows
from tests.metal.signature import ATTRIBUTES, Kernel, Operand, Template, variant_of
from tests.model.running import load_tiny, tokens
from tests.tiny_models import CONFIGS

GRID = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1)}


def mlx_text(
    kernel: Kernel,
    inputs: list[mx.array],
    outputs: list[mx.Dtype],
    template: Template,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> str:
    """What MLX prints when a function that calls the kernel is exported, which needs no GPU."""
    call: dict[str, Any] = {"output_dtypes": outputs, "output_shapes": [(4,)] * len(outputs)}
    if template:
        call["template"] = list(template)
    made = mx.fast.metal_kernel(**vars(kernel))
    capfd.readouterr()
    mx.export_function(
        str(folder / "exported.mlxfn"),
        lambda *arrays: made(inputs=list(arrays), verbose=True, **GRID, **call),
        *inputs,
    )
    printed = capfd.readouterr().out
    return printed.split("```\n", 1)[1].rsplit("\n```", 1)[0]


def kernel_of(inputs: list[str], outputs: list[str], source: str, **more: Any) -> Kernel:
    return Kernel("case", tuple(inputs), tuple(outputs), source, **more)


X = mx.zeros((4, 16))
THREAD = "uint i = thread_position_in_grid.x;"
ALL_ATTRIBUTES = " ".join(f"(void){name};" for name in ATTRIBUTES)

CASES = {
    "plain": (kernel_of(["x"], ["y"], THREAD + "y[i] = x[i];"), [X], [mx.float32], ()),
    "no attribute": (kernel_of(["x"], ["y"], "y[0] = x[0];"), [X], [mx.float32], ()),
    "all attributes": (kernel_of(["x"], ["y"], ALL_ATTRIBUTES), [X], [mx.float32], ()),
    "seven elements": (
        kernel_of(["x", "z"], ["y"], THREAD),
        [mx.zeros((7,), mx.uint8), mx.zeros((8,), mx.int8)],
        [mx.float16],
        (),
    ),
    "scalars": (
        kernel_of(["x", "s"], ["y"], THREAD + "s_shape; s_ndim;"),
        [X, mx.array(1.5)],
        [mx.bfloat16],
        (),
    ),
    "empty": (kernel_of(["x"], ["y"], THREAD), [mx.zeros((0,), mx.int64)], [mx.uint64], ()),
    "forms of inputs": (
        kernel_of(["x", "ax"], ["y"], THREAD + "ax_shape[0]; x_strides[1]; // x_ndim"),
        [X, mx.zeros((3, 3, 1), mx.int16)],
        [mx.uint16],
        (),
    ),
    "two outputs": (
        kernel_of(["x"], ["y", "z"], THREAD),
        [X],
        [mx.uint32, mx.bool_],
        (),
    ),
    "header": (
        kernel_of(["x"], ["y"], THREAD, header="constant float half_pi = 1.5707963f;\n"),
        [X],
        [mx.float32],
        (),
    ),
    "template": (
        kernel_of(["x"], ["y"], THREAD + "y[i] = T(x[i] * N);", header="// none\n"),
        [X],
        [mx.float16],
        [("T", mx.float16), ("N", -3), ("FLAG", True), ("OFF", False), ("U", mx.int32)],
    ),
    "atomic outputs": (
        kernel_of(["x"], ["y"], THREAD, atomic_outputs=True),
        [X],
        [mx.int32],
        (),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_what_mlx_writes(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel, inputs, outputs, template = CASES[case]
    text = variant_of(kernel, [Operand.of(x) for x in inputs], outputs, template).text
    assert text == mlx_text(kernel, inputs, outputs, template, tmp_path, capfd)


@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])
def test_so_is_that_of_every_kernel_of_a_model(
    quick_metal: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], arch: str
) -> None:
    """Each variant that a prefill of 9 rows and the decoding of 1 row call, whatever their size."""
    calls = {}

    def make(**made: Any) -> Any:
        kernel = quick_metal.metal_kernel(**made)

        def call(**given: Any) -> list[mx.array]:
            calls[made["name"], tuple(given["template"]), given["inputs"][0].shape[:1]] = (
                made,
                given,
            )
            return kernel(**given)

        return call

    decoder = load_tiny(tmp_path, CONFIGS[arch], Format.Q4_1, MetalKernels(make))
    cache = Cache(decoder.kernels, decoder.layout(64))
    context = cache.new_context()
    for ids in (tokens(9, seed=1), [7]):
        decoder.step(cache, [Rows(context, ids, len(ids), best=2)], Control())
    assert {name for name, *_ in calls} == {f"llamay_{name}" for name in SIGNATURES}
    for made, given in calls.values():
        names = {part: tuple(made[part]) for part in ("input_names", "output_names")}
        kernel = Kernel(made["name"], **names, source=made["source"], header=made["header"])
        inputs, outputs, template = (
            given[part] for part in ("inputs", "output_dtypes", "template")
        )
        text = variant_of(kernel, [Operand.of(x) for x in inputs], outputs, template).text
        assert text == mlx_text(kernel, inputs, outputs, template, tmp_path, capfd)
