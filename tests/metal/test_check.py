"""The check of kernels at first start: sound ones pass, faulty ones are replaced and named."""

import json
from dataclasses import replace

import numpy as np
import pytest

from llamay.engine import Engine, model
from llamay.formats import Format
from llamay.gguf import open_gguf
from llamay.mlx_kernels import numerics_id
from llamay.mlx_kernels.metal import MetalKernels, check
from llamay.mlx_kernels.program import (
    Attention,
    AttentionInput,
    AttentionOutput,
    FeedForward,
    Logits,
    PostNorm,
)
from llamay.mlx_kernels.reference import ReferenceKernels
from llamay.model.decoder import compile_program
from llamay.model.spec import read_spec
from llamay.verify import run_checks
from tests.model.running import load_tiny, plain, tokens
from tests.tiny_models import CONFIGS, TinyConfig, write_tiny_model

CONFIG = TinyConfig(arch="qwen2")
# Of all that a program may ask for, all but biases.
MOST = replace(CONFIGS["gemma3"], soft_cap=50.0, logit_soft_cap=30.0)

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
    ("logits", ": value;", ": value + (ROWS == 1 ? 1e-5f : 0.0f);", "logits", "a row depends"),
    # What decodes several branches: a tile of rows that the product norms itself.
    (
        "qkv",
        "? value + bias[n]",
        "? value + bias[n] + (NORM && ROWS > 1 ? 1e-5f : 0.0f)",
        "qkv",
        "a row depends",
    ),
    ("project", "residual[at] + value", "value", "project", "differs from the reference"),
    ("best", "owner + 1024 * int(lane)", "owner", "best", "differs from the reference"),
    ("best", "i > taken_id", "false", "best", "differs from the reference"),
    ("rotate", "? 0 : pairs", "? 0 : pairs / 2", "rotate", "differs"),
]
FAULTS_OF_MOST = [
    ("embed", "minimum) * scale", "minimum)", "embed"),
    ("rotate", "? 0 : HEAD_DIM", "? HEAD_DIM : 0", "rotate"),
    (
        "attend",
        "score = llamay::soft_capped(score, soft_cap)",
        "score = min(score, 2.0f)",
        "attend",
    ),
    ("attend", "- int(lane)) < uint(window)", "- int(lane)) < 256", "attend"),
    ("merge", "end - sizes[3]", "0", "attend"),
    ("gate_up", "gelu_times(gate_value", "silu_times(gate_value", "gate_up"),
    ("project", ": value;", ": value * 2.0f;", "project"),
    ("rms_norm", "residual[at])", "0.0f)", "rms_norm"),
    ("logits", "CAPPED ? capped", "CAPPED ? value", "logits"),
]


def faulty(host, kernel, sound, broken):
    """`metal_kernel` of a system on which one kernel goes wrong."""

    def make(*, name, source, **others):
        if name == f"llamay_{kernel}":
            assert sound in source
            source = source.replace(sound, broken)
        return host.metal_kernel(name=name, source=source, **others)

    return make


@pytest.mark.parametrize("config", [CONFIG, MOST], ids=["qwen2", "gemma3"])
def test_sound_kernels_pass_once_for_all(quick_metal, tmp_path, monkeypatch, config):
    file = tmp_path / "cache" / "kernels.json"
    for _ in range(2):
        kernels = MetalKernels(quick_metal.metal_kernel, checks_file=file)
        decoder = load_tiny(tmp_path, config, Format.Q4_1, kernels)
        assert (kernels.replaced, kernels.exact, kernels.name) == ({}, True, "metal")
        assert numerics_id(kernels, decoder.layout(64)) == "metal-v1-f32"
        monkeypatch.setattr(check, "check", lambda *_: pytest.fail("it was checked before"))
    assert list(json.loads(file.read_text()).values()) == [{}]


@pytest.mark.parametrize(
    ("config", "kernel", "sound", "broken", "method", "reason"),
    [(CONFIG, *fault) for fault in FAULTS]
    + [(MOST, *fault, "differs from the reference") for fault in FAULTS_OF_MOST],
)
def test_a_faulty_kernel_is_replaced_and_named(
    quick_metal, tmp_path, config, kernel, sound, broken, method, reason
):
    file = tmp_path / "kernels.json"
    make = faulty(quick_metal, kernel, sound, broken)
    kernels = MetalKernels(make, checks_file=file)
    decoder = load_tiny(tmp_path, config, Format.Q4_1, kernels)
    assert list(kernels.replaced) == [method]
    assert reason in kernels.replaced[method]
    assert not kernels.exact
    assert kernels.name == f"metal (not exact without {method})"
    assert kernels.numerics_id == f"metal-v1-without-{method}"
    reference = load_tiny(tmp_path, config, Format.Q4_1, ReferenceKernels())
    ids = tokens(33, seed=1)
    assert np.abs(plain(decoder, ids) - plain(reference, ids)).max() < 1e-4


def test_a_program_that_needs_other_variants_is_checked_again(tmp_path):
    """Each of a layer's operations changed in one respect that selects a variant."""
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, CONFIGS["qwen3"], Format.Q4_1)
    with open_gguf(path) as file:
        program = compile_program(read_spec(file), file)
    norm = program.operations[1].norm
    changes = {
        AttentionInput: [{"query_bias": norm}, {"query_norm": None, "key_norm": None}],
        Attention: [{"window": 20}, {"soft_cap": 2.0}],
        AttentionOutput: [{"post_norm": PostNorm(norm, 1e-5)}],
        FeedForward: [{"post_norm": PostNorm(norm, 1e-5)}, {"activation": "gelu"}],
        Logits: [{"soft_cap": 2.0}],
    }
    fingerprints = [check._fingerprint(program)]
    for index, operation in enumerate(program.operations):
        if index <= 4 or isinstance(operation, Logits):
            for change in changes.get(type(operation), []):
                operations = list(program.operations)
                operations[index] = replace(operation, **change)
                other = replace(program, operations=tuple(operations))
                fingerprints.append(check._fingerprint(other))
    assert len(set(fingerprints)) == len(fingerprints) == 9
    assert check._fingerprint(replace(program, source="another file")) == fingerprints[0]


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
