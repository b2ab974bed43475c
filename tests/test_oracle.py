"""The oracle against values recorded from other programs, and the tiny models it is used on."""

import json
from pathlib import Path

import numpy as np
import pytest

from llamay.formats import Format
from tests.oracle import dequantise, forward
from tests.quantisers import quantise
from tests.tiny_models import (
    TinyConfig,
    float_weights,
    interleave_rope_rows,
    tiny_metadata,
    tiny_tensors,
)

TESTDATA = Path(__file__).resolve().parent.parent / "testdata"


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


@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
def test_dequantised_values_have_the_bits_of_gguf_py(format):
    recorded = np.load(TESTDATA / "quants" / f"{format.name.lower()}.npz")
    blocks, values = recorded["blocks"], recorded["values"]
    ours = dequantise(format, blocks.tobytes(), values.shape)
    np.testing.assert_array_equal(ours.view(np.uint32), values.view(np.uint32))


# Half a step of a block's scale (one step in formats whose range has a largest value of one sign
# only), in units of its largest weight or, with minima, its range; plus what rounding the scales
# and minima of sub-blocks to a few bits adds.
STEPS = {
    Format.F16: 2**-11,
    Format.BF16: 2**-7,
    Format.Q4_0: 1 / 8,
    Format.Q4_1: 1 / 15,
    Format.Q5_0: 1 / 16,
    Format.Q5_1: 1 / 31,
    Format.Q8_0: 0.5 / 127,
    Format.IQ4_NL: 0.13,
    Format.Q2_K: 0.5 / 3 * 2 + 1 / 15,
    Format.Q3_K: 1 / 3.5,
    Format.Q4_K: 0.5 / 15 * 2 + 1 / 63,
    Format.Q5_K: 0.5 / 31 * 2 + 1 / 63,
    Format.Q6_K: 1 / 32 + 1 / 127,
    Format.IQ4_XS: 0.17,
}


@pytest.mark.parametrize("format", STEPS, ids=lambda format: format.name)
def test_quantised_weights_are_within_the_formats_step(format):
    weights = float_weights(TinyConfig(hidden=256))["blk.0.ffn_gate.weight"]
    back = dequantise(format, quantise(weights, format), weights.shape)
    length = format.block_len if format.block_len > 1 else 32
    error = np.abs(back - weights).reshape(-1, length).max(axis=1)
    largest = np.abs(weights).reshape(-1, length).max(axis=1)
    assert (error <= largest * (STEPS[format] + 2**-9)).all()


@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
def test_zero_blocks_quantise_to_zero_weights(format):
    data = quantise(np.zeros((2, 256), np.float32), format)
    assert not dequantise(format, data, (2, 256)).any()


def test_interleaving_puts_each_rope_pair_side_by_side():
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert interleave_rope_rows(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
