"""Each weight format's arithmetic against float32 with the same weights, on real text.

How much rounding to the format spoils the model plays no part: both read the rounded weights.
llama.cpp's own distance is recorded for each format, of the same bytes (scripts/record_accuracy).
"""

import json
from pathlib import Path

import numpy as np
import pytest

from llamay.formats import Format, Tensor
from llamay.gguf import GGUFFile, open_gguf
from llamay.mlx_kernels import load_kernels
from llamay.model.decoder import Decoder
from tests import oracle
from tests.model.running import plain
from tests.widened_model import widen

pytestmark = [pytest.mark.model, pytest.mark.deep]

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = json.loads((ROOT / "testdata" / "accuracy" / "formats.json").read_text())
ROUNDING = 1e-8  # of float32, in formats that multiply float activations


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def widened(default_model_path):
    with open_gguf(default_model_path) as file:
        return widen(file)


def test_the_widened_model_is_the_default_one(widened, default_model_path):
    ids = RECORDED["ids"][:40]
    with open_gguf(default_model_path) as file:
        weights = {
            name: oracle.dequantise(tensor.format, tensor.data, tensor.shape)
            for name, tensor in file.tensors.items()
        }
        wanted = oracle.forward(weights, file.metadata, ids)
    found = oracle.forward(widened.weights, widened.metadata, ids)
    np.testing.assert_allclose(found, wanted, atol=1e-2)


@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
def test_mean_divergence_is_at_most_llama_cpps(widened, format):
    """KL(float32 || ours) over 400 tokens."""
    assert len(RECORDED["ids"]) == 400
    tensors = {
        name: Tensor(name, tensor.format, tensor.shape, memoryview(tensor.data))
        for name, tensor in widened.tensors(format).items()
    }
    weights = {
        name: oracle.dequantise(tensor.format, tensor.data, tensor.shape)
        for name, tensor in tensors.items()
    }
    exact = log_softmax(oracle.forward(weights, widened.metadata, RECORDED["ids"]))
    del weights
    file = GGUFFile((Path("widened"),), dict(widened.metadata), tensors, ())
    found = log_softmax(plain(Decoder(file, load_kernels("cpu")), RECORDED["ids"]))
    divergence = (np.exp(exact) * (exact - found)).sum(axis=1)
    assert divergence.min() > -1e-9  # it is a divergence
    float_weights = format in (Format.F32, Format.F16, Format.BF16)
    assert divergence.mean() <= (ROUNDING if float_weights else RECORDED["mean_kl"][format.name])
