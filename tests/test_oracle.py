"""The oracle against values recorded from other programs, and the tiny models it is used on."""

import json
from pathlib import Path

import numpy as np
import pytest

from llamay.formats import Format
from tests.oracle import dequantise, forward
from tests.tiny_models import (
    TinyConfig,
    float_weights,
    interleave_rope_rows,
    quantise,
    tiny_metadata,
    tiny_tensors,
)

TESTDATA = Path(__file__).resolve().parent.parent / "testdata"
ORACLE_FORMATS = (Format.F32, Format.F16, Format.Q4_0, Format.Q4_1, Format.Q8_0)


@pytest.mark.parametrize(
    "path", sorted((TESTDATA / "transformers").glob("*.npz")), ids=lambda p: p.stem
)
def test_oracle_gives_the_logits_of_transformers(path):
    recorded = np.load(path)
    config = TinyConfig(**json.loads(str(recorded["config"])))
    tensors = {
        name: dequantise(tensor.format, tensor.data, tensor.shape)
        for name, tensor in tiny_tensors(config).items()
    }
    logits = forward(tensors, tiny_metadata(config), recorded["ids"])
    assert np.abs(logits - recorded["logits"]).max() < 2e-5


@pytest.mark.parametrize("format", ORACLE_FORMATS)
def test_dequantised_values_have_the_bits_of_gguf_py(format):
    recorded = np.load(TESTDATA / "quants" / f"{format.name.lower()}.npz")
    blocks, values = recorded["blocks"], recorded["values"]
    ours = dequantise(format, blocks.tobytes(), values.shape)
    np.testing.assert_array_equal(ours.view(np.uint32), values.view(np.uint32))


# Half a step of the block's scale, in units of its largest weight, plus float16's rounding.
@pytest.mark.parametrize(
    ("format", "largest_error"),
    [(Format.Q4_0, 1 / 8), (Format.Q4_1, 1 / 15), (Format.Q8_0, 0.5 / 127)],
)
def test_quantised_weights_are_within_the_formats_step(format, largest_error):
    weights = float_weights(TinyConfig())["blk.0.ffn_gate.weight"]
    back = dequantise(format, quantise(weights, format), weights.shape)
    error = np.abs(back - weights).reshape(-1, 32).max(axis=1)
    largest = np.abs(weights).reshape(-1, 32).max(axis=1)
    assert (error <= largest * (largest_error + 2**-9)).all()


def test_zero_blocks_quantise_to_zero_weights():
    for format in ORACLE_FORMATS:
        data = quantise(np.zeros((2, 32), np.float32), format)
        assert not dequantise(format, data, (2, 32)).any()


def test_interleaving_puts_each_rope_pair_side_by_side():
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert interleave_rope_rows(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
