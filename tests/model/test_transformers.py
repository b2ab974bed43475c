"""Tiny models with float32 weights against the recorded logits of `transformers`."""

import json
from pathlib import Path

import numpy as np
import pytest

from llamay.formats import Format
from llamay.mlx_kernels import _cpu
from llamay.mlx_kernels.reference import ReferenceKernels
from tests.model.running import cpu_kernels, load_tiny, plain
from tests.tiny_models import CONFIGS, TinyConfig

RECORDED = sorted(
    (Path(__file__).resolve().parent.parent.parent / "testdata" / "transformers").glob("*.npz")
)


@pytest.mark.parametrize("kernels", [*_cpu.kernel_sets(), "reference"])
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_logits_are_those_of_transformers(tmp_path, path, kernels):
    recorded = np.load(path)
    config = TinyConfig(**json.loads(str(recorded["config"])))
    set_ = ReferenceKernels() if kernels == "reference" else cpu_kernels(kernels)
    logits = plain(load_tiny(tmp_path, config, Format.F32, set_), recorded["ids"].tolist())
    assert logits.shape == recorded["logits"].shape
    assert np.abs(logits - recorded["logits"]).max() < 1e-3


def test_every_architecture_and_rope_scaling_is_recorded():
    configs = [json.loads(str(np.load(path)["config"])) for path in RECORDED]
    assert {config["arch"] for config in configs} == set(CONFIGS)
    assert {config["rope"] for config in configs} == {
        "none",
        "linear",
        "llama3",
        "yarn",
        "longrope",
    }
    assert {config["tied"] for config in configs} == {True, False}
