"""The check of kernels at first start: sound ones pass, faulty ones are replaced and named."""

import json

import numpy as np
import pytest

from llamay.engine import Engine, model
from llamay.formats import Format
from llamay.mlx_kernels import numerics_id
from llamay.mlx_kernels.metal import MetalKernels, check
from llamay.mlx_kernels.reference import ReferenceKernels
from llamay.verify import run_checks
from tests.model.running import load_tiny, plain, tokens
from tests.tiny_models import TinyConfig, write_tiny_model

CONFIG = TinyConfig(arch="qwen2")

# Kernel, a text in its source and what stands there instead, the method that is replaced, why.
FAULTS = [
    ("merge", "out[j] / total", "out[j]", "attend", "differs from the reference"),
    (
        "gate_up",
        "llamay::silu_times(gate_value, up_value)",
        "gate_value * up_value",
        "gate_up",
        "differs",
    ),
    ("logits", "= value;", "= value + (ROWS == 1 ? 1e-5f : 0.0f);", "logits", "a row depends"),
    # What decodes several branches: a tile of rows that the product norms itself.
    (
        "qkv",
        "? value + bias[n]",
        "? value + bias[n] + (NORM && ROWS > 1 ? 1e-5f : 0.0f)",
        "qkv",
        "a row depends",
    ),
    ("project_add", "residual[at] + value", "value", "project_add", "differs from the reference"),
    ("best", "owner + 1024 * int(lane)", "owner", "best", "differs from the reference"),
    ("best", "i > taken_id", "false", "best", "differs from the reference"),
    ("rotate", "? pairs : 0", "? pairs / 2 : 0", "rotate", "differs"),
]


def faulty(host, kernel, sound, broken):
    """`metal_kernel` of a system on which one kernel goes wrong."""

    def make(*, name, source, **others):
        if name == f"llamay_{kernel}":
            assert sound in source
            source = source.replace(sound, broken)
        return host.metal_kernel(name=name, source=source, **others)

    return make


def test_sound_kernels_pass_once_for_all(quick_metal, tmp_path, monkeypatch):
    file = tmp_path / "cache" / "kernels.json"
    for _ in range(2):
        kernels = MetalKernels(quick_metal.metal_kernel, checks_file=file)
        decoder = load_tiny(tmp_path, CONFIG, Format.Q4_1, kernels)
        assert (kernels.replaced, kernels.exact, kernels.name) == ({}, True, "metal")
        assert numerics_id(kernels, decoder.layout(64)) == "metal-v1-f32"
        monkeypatch.setattr(check, "check", lambda *_: pytest.fail("it was checked before"))
    assert list(json.loads(file.read_text()).values()) == [{}]


@pytest.mark.parametrize(("kernel", "sound", "broken", "method", "reason"), FAULTS)
def test_a_faulty_kernel_is_replaced_and_named(
    quick_metal, tmp_path, kernel, sound, broken, method, reason
):
    file = tmp_path / "kernels.json"
    make = faulty(quick_metal, kernel, sound, broken)
    kernels = MetalKernels(make, checks_file=file)
    decoder = load_tiny(tmp_path, CONFIG, Format.Q4_1, kernels)
    assert list(kernels.replaced) == [method]
    assert reason in kernels.replaced[method]
    assert not kernels.exact
    assert kernels.name == f"metal (not exact without {method})"
    assert kernels.numerics_id == f"metal-v1-without-{method}"
    reference = load_tiny(tmp_path, CONFIG, Format.Q4_1, ReferenceKernels())
    ids = tokens(12, seed=1)
    assert np.abs(plain(decoder, ids) - plain(reference, ids)).max() < 1e-4


REFUSAL = "[metal::Device] Unable to build metal library from source\n more"
MOMENT = "[METAL] Command buffer execution failed: Insufficient Memory."


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (RuntimeError(REFUSAL), True),
        (ValueError("a wrong shape"), True),
        (RuntimeError(MOMENT), False),
    ],
)
def test_a_kernel_that_raises_is_replaced_for_good_unless_the_error_is_of_the_moment(
    quick_metal, tmp_path, error, lasting
):
    class Refused:
        def __call__(self, **_):
            raise error

    def make(*, name, **others):
        if name == "llamay_embed":
            return Refused()
        return quick_metal.metal_kernel(name=name, **others)

    file, found = tmp_path / "kernels.json", {"embed": str(error).splitlines()[0]}
    kernels = MetalKernels(make, checks_file=file)
    load_tiny(tmp_path, CONFIG, Format.Q4_1, kernels)
    assert dict(kernels.replaced) == found
    known = list(json.loads(file.read_text()).values()) if file.exists() else []
    assert known == ([found] if lasting else [])


@pytest.mark.parametrize("damaged", [b"{", b"[]", b"\xff\xff"])
def test_a_damaged_file_of_checks_is_made_again(tmp_path, damaged, monkeypatch):
    file = tmp_path / "kernels.json"
    file.write_bytes(damaged)
    monkeypatch.setattr(check, "check", lambda *_: ({"embed": "wrong"}, True))
    kernels = MetalKernels(lambda **_: None, checks_file=file)
    load_tiny(tmp_path, CONFIG, Format.Q4_1, kernels)
    assert dict(kernels.replaced) == {"embed": "wrong"}
    assert list(json.loads(file.read_text()).values()) == [{"embed": "wrong"}]


def test_a_file_that_cannot_be_written_stops_nobody(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setattr(check, "check", lambda *_: ({"embed": "wrong"}, True))
    kernels = MetalKernels(lambda **_: None, checks_file=tmp_path / "cache" / "kernels.json")
    load_tiny(tmp_path, CONFIG, Format.Q4_1, kernels)
    assert dict(kernels.replaced) == {"embed": "wrong"}


def test_verify_shows_what_was_replaced(quick_metal, tmp_path, monkeypatch):
    """A model whose embedding kernel does not work, through the engine."""
    monkeypatch.setattr(check, "check", lambda *_: ({"embed": "differs"}, True))
    kernels = MetalKernels(quick_metal.metal_kernel, checks_file=tmp_path / "kernels.json")
    monkeypatch.setattr(model, "load_kernels", lambda *_: kernels)
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, CONFIG, Format.Q4_1)
    with Engine.load(str(path), context_size=256) as engine:
        first = next(iter(run_checks(engine, 128)))
    assert (first.check, first.result, first.detail) == (
        "kernels work here",
        "fail",
        "embed: differs",
    )
