"""What is read from a file's keys, against the models' published configurations."""

import numpy as np
import pytest

from llamay.engine.model import Model
from llamay.errors import GGUFError
from llamay.gguf import open_gguf
from llamay.mlx_kernels.cpu import CpuKernels
from llamay.model.decoder import Decoder
from llamay.model.spec import SUPPORTED_ARCHITECTURES, read_spec
from tests.gguf_writer import float_tensor, write_gguf
from tests.tiny_models import CONFIGS, VOCAB, TinyConfig, tiny_metadata, tiny_tensors

FACTORS = "rope_factors_short.weight"


def spec_of(folder, arch, tensors=(), **changes):
    """Of a file with these keys of the architecture changed; None takes a key out."""
    metadata = tiny_metadata(TinyConfig(arch=arch))
    for key, value in changes.items():
        name = f"{arch}.{key.replace('__', '.')}"
        metadata.pop(name, None)
        if value is not None:
            metadata[name] = value
    path = write_gguf(folder / "spec.gguf", metadata, dict(tensors))
    with open_gguf(path) as file:
        return read_spec(file)


def test_every_architecture_has_a_tiny_model():
    assert set(CONFIGS) == set(SUPPORTED_ARCHITECTURES)


def test_gemma_2_sees_4096_positions_in_every_other_layer(tmp_path):
    spec = spec_of(tmp_path, "gemma2", block_count=6)
    assert spec.windows == (4096, 0) * 3
    assert spec.soft_caps == (50.0, 30.0)
    assert {spec.rope_of(layer) for layer in range(6)} == {0}
    assert len(spec.ropes(None)) == 1


def test_gemma_3_sees_all_positions_in_every_sixth_layer(tmp_path):
    base = {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    spec = spec_of(tmp_path, "gemma3", block_count=13, attention__sliding_window=1024, **base)
    windowed = [1024] * 5 + [0]
    assert list(spec.windows) == [*windowed, *windowed, 1024]
    assert [spec.rope_of(layer) for layer in range(6)] == [1, 1, 1, 1, 1, 0]
    far, near = spec.ropes(None)
    head_dim = spec.head_dim
    assert far.inverse[1] == pytest.approx(1e6 ** (-2 / head_dim) / 8)
    assert near.inverse[1] == pytest.approx(1e4 ** (-2 / head_dim))
    assert spec.soft_caps == (0.0, 0.0)


def test_gemma_3_without_a_window_has_one_rope_and_sees_everything(tmp_path):
    spec = spec_of(tmp_path, "gemma3", block_count=2)
    assert spec.windows == (0, 0)
    assert [spec.rope_of(layer) for layer in range(2)] == [0, 0]


def test_gemma_3_as_ollama_converts_it(tmp_path):
    """Other names of rope's bases, and a cap of logits that the model does not have."""
    keys = {
        "rope__freq_base": None,
        "rope__global__freq_base": 2e6,
        "rope__local__freq_base": 20000.0,
        "attention__sliding_window": 512,
        "final_logit_softcapping": 30.0,
    }
    spec = spec_of(tmp_path, "gemma3", block_count=6, **keys)
    assert (spec.rope_base, spec.local_rope_base) == (2e6, 20000.0)
    assert spec.soft_caps == (0.0, 0.0)
    assert spec.rope_scaling.factor == 1


def test_gemma_3_with_images_as_ollama_converts_it(tmp_path):
    """4B: no epsilon, no rope at all, and a token for images that the embedding lacks."""
    keys = {
        "rope__freq_base": None,
        "attention__layer_norm_rms_epsilon": None,
        "mm__tokens_per_image": 256,
        "attention__sliding_window": 1024,
    }
    spec = spec_of(tmp_path, "gemma3", block_count=34, **keys)
    assert spec.norm_eps == pytest.approx(1e-6)
    assert (spec.rope_base, spec.local_rope_base) == (1e6, 1e4)
    far, near = spec.ropes(None)
    assert far.inverse[0] == pytest.approx(1 / 8)
    assert near.inverse[0] == 1


def test_a_token_for_images_that_has_no_row_is_left_out(tmp_path):
    config = CONFIGS["gemma3"]
    metadata = tiny_metadata(config) | {"gemma3.mm.tokens_per_image": 256}
    metadata["tokenizer.ggml.tokens"] = [*VOCAB, "<image_soft_token>"]
    types = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = np.append(types, np.int32(3)).astype(np.int32)
    path = write_gguf(tmp_path / "images.gguf", metadata, tiny_tensors(config))
    model = Model.load(str(path), threads=1)
    assert model.tokenizer.vocab_size == model.decoder.vocab_size == len(VOCAB)


def test_ollamas_gemma_3_has_the_turns_of_gemma(tmp_path):
    metadata = tiny_metadata(CONFIGS["gemma3"]) | {"gemma3.rope.local.freq_base": 1e4}
    del metadata["tokenizer.chat_template"]
    path = write_gguf(tmp_path / "turns.gguf", metadata, tiny_tensors(CONFIGS["gemma3"]))
    template = Model.load(str(path), threads=1).chat_template()
    messages = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"},
    ]
    bos = VOCAB[metadata["tokenizer.ggml.bos_token_id"]]
    assert "".join(segment.text for segment in template.render(messages)) == (
        f"{bos}<start_of_turn>user\nBe terse.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\nYes?<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (3, (9, 9, 0, 9)),
        (0, (9, 9, 9, 9)),
        (1, (0, 0, 0, 0)),
        (np.array([True, False, False, True]), (9, 0, 0, 9)),
    ],
)
def test_a_file_may_name_the_layers_with_a_window(tmp_path, pattern, windows):
    keys = {"attention__sliding_window": 9, "attention__sliding_window_pattern": pattern}
    assert spec_of(tmp_path, "gemma3", block_count=4, **keys).windows == windows


@pytest.mark.parametrize(
    "keys",
    [
        {"attention__sliding_window": -1},
        {"attention__sliding_window": 2**31},
        {"attention__sliding_window": "many"},
        {"attention__sliding_window_pattern": -1},
        {"attention__sliding_window_pattern": "some"},
        {"attention__sliding_window_pattern": np.array([True])},
        {"attention__sliding_window_pattern": True},
        {"attention__sliding_window_pattern": np.array([0, 1, 2, 0])},
        {"attention__sliding_window_pattern": np.array([0.0, 1.0, np.nan, 0.0])},
        {"attn_logit_softcapping": -1.0},
        {"attn_logit_softcapping": float("nan")},
        {"final_logit_softcapping": float("inf")},
        {"rope__freq_base_swa": 0.0},
    ],
)
def test_windows_caps_and_bases_out_of_range_are_refused(tmp_path, keys):
    with pytest.raises(GGUFError):
        spec_of(tmp_path, "gemma3", block_count=4, **keys)


def test_windows_of_models_that_do_not_use_them_are_ignored(tmp_path):
    """Qwen 2 configurations name one beside `use_sliding_window: false`."""
    assert spec_of(tmp_path, "qwen2", attention__sliding_window=7).windows == (0, 0)


@pytest.mark.parametrize(
    ("arch", "layers", "hidden", "heads", "head_dim", "divisor"),
    [
        ("gemma2", 26, 2304, 8, 256, 256),
        ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),  # 27B: query_pre_attn_scalar
        ("gemma3", 48, 3840, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),  # 27B
        ("qwen3", 28, 1024, 16, 128, 128),
    ],
)
def test_scores_are_scaled_as_each_model_was_trained(
    tmp_path, arch, layers, hidden, heads, head_dim, divisor
):
    keys = {
        "block_count": layers,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    spec = spec_of(tmp_path, arch, **{key.replace(".", "__"): v for key, v in keys.items()})
    assert spec.attention_scale == pytest.approx(divisor**-0.5, rel=1e-15)


def test_more_heads_than_columns_divide_nothing_by_zero(tmp_path):
    keys = {"block_count": 62, "embedding_length": 32, "attention__head_count": 64}
    assert np.isfinite(spec_of(tmp_path, "gemma3", **keys).attention_scale)


def test_embeddings_are_scaled_in_gemma_only(tmp_path):
    assert spec_of(tmp_path, "gemma2", embedding_length=2304).embedding_scale == 48.0
    assert spec_of(tmp_path, "qwen3").embedding_scale == 1.0


def test_longrope_goes_as_far_as_the_original_context(tmp_path):
    """Beyond it, the other divisors would change what was computed before."""
    keys = {
        "context_length": 131072,
        "rope__scaling__original_context_length": 4096,
        "rope__scaling__attn_factor": 1.19,
    }
    divisors = np.linspace(1, 2, 8, dtype=np.float32)
    spec = spec_of(tmp_path, "phi3", {FACTORS: float_tensor(divisors)}, **keys)
    assert spec.context_length == 4096
    (rope,) = spec.ropes(divisors.tolist())
    expected = 10000.0 ** (-np.arange(0, 16, 2) / 16) / divisors
    np.testing.assert_allclose(rope.inverse, expected, rtol=1e-12)
    assert rope.magnitude == pytest.approx(1.19)


def test_fused_tensors_of_another_shape_are_refused(tmp_path):
    config = TinyConfig(arch="phi3")
    tensors = tiny_tensors(config)
    name = "blk.1.ffn_up.weight"
    tensors[name] = float_tensor(np.zeros((config.ffn, config.hidden), np.float32))
    path = write_gguf(tmp_path / "fused.gguf", tiny_metadata(config), tensors)

    with open_gguf(path) as file, pytest.raises(GGUFError, match=r"blk\.1\.ffn_up"):
        Decoder(file, CpuKernels(1))
