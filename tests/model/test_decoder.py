"""A decoder refuses unusable files with one sentence, and damaged numbers with NumericsError."""

import re
import struct
from dataclasses import replace

import numpy as np
import pytest

from llamay.errors import GGUFError, NumericsError, UnsupportedModelError
from llamay.formats import Format
from llamay.gguf import open_gguf
from llamay.mlx_kernels import Control, _cpu
from llamay.mlx_kernels.cpu import CpuKernels
from llamay.mlx_kernels.reference import ReferenceKernels
from llamay.model.decoder import Decoder, Rows
from tests.gguf_writer import TensorData, float_tensor, write_gguf
from tests.model.running import FORMATS, cpu_kernels, extend, new_cache, plain
from tests.tiny_models import CONFIGS, TinyConfig, tiny_metadata, tiny_tensors


def decoder_of(folder, metadata, tensors, kernels=None):
    path = write_gguf(folder / "changed.gguf", metadata, tensors)
    with open_gguf(path) as file:
        return Decoder(file, kernels or CpuKernels(1))


def changed(metadata, key, value):
    """`metadata` with a key set, or taken out for None."""
    rest = {name: old for name, old in metadata.items() if name != key}
    return rest if value is None else rest | {key: value}


def refusal(error_class, folder, metadata, tensors):
    """The message of the error, which must be one sentence that begins with the file's path."""
    with pytest.raises(error_class) as caught:
        decoder_of(folder, metadata, tensors)
    assert type(caught.value) is error_class
    message = str(caught.value)
    assert "\n" not in message
    assert ". " not in message.removeprefix(str(folder))
    return message


MISSING = [
    "general.architecture",
    "llama.context_length",
    "llama.embedding_length",
    "llama.block_count",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", MISSING)
def test_a_missing_key_is_named(tmp_path, key):
    config = TinyConfig()
    metadata = changed(tiny_metadata(config), key, None)
    message = refusal(GGUFError, tmp_path, metadata, tiny_tensors(config))
    assert key in message
    assert message.startswith(str(tmp_path / "changed.gguf"))


WRONG = [
    ("llama.block_count", 0, GGUFError),
    ("llama.block_count", -1, GGUFError),
    ("llama.block_count", "two", GGUFError),
    ("llama.block_count", 2.0, GGUFError),
    ("llama.block_count", 3, GGUFError),
    ("llama.block_count", 4097, GGUFError),
    ("llama.block_count", 2**31 - 1, GGUFError),
    ("llama.embedding_length", 96, GGUFError),
    ("llama.embedding_length", np.uint64(2**63), GGUFError),
    ("llama.feed_forward_length", 64, GGUFError),
    ("llama.attention.head_count", 3, GGUFError),
    ("llama.attention.head_count", 8, GGUFError),
    ("llama.attention.head_count_kv", 3, GGUFError),
    ("llama.attention.head_count_kv", 1, GGUFError),
    ("llama.attention.head_count_kv", np.array([2, 2], np.int32), GGUFError),
    ("llama.attention.key_length", 24, UnsupportedModelError),
    ("llama.attention.key_length", 32, UnsupportedModelError),
    ("llama.attention.value_length", 32, UnsupportedModelError),
    ("llama.attention.layer_norm_rms_epsilon", 0.0, GGUFError),
    ("llama.attention.layer_norm_rms_epsilon", float("nan"), GGUFError),
    ("llama.attention.layer_norm_rms_epsilon", float("inf"), GGUFError),
    ("llama.rope.dimension_count", 15, GGUFError),
    ("llama.rope.dimension_count", 18, GGUFError),
    ("llama.rope.freq_base", 0.5, GGUFError),
    ("llama.rope.freq_base", float("inf"), GGUFError),
    ("llama.rope.freq_base", float("nan"), GGUFError),
    ("llama.rope.scaling.type", "longrope", UnsupportedModelError),
    ("llama.rope.scaling.original_context_length", 0, GGUFError),
    ("llama.rope.scaling.attn_factor", 0.0, GGUFError),
    ("llama.rope.scaling.attn_factor", float("nan"), GGUFError),
    ("llama.rope.scaling.attn_factor", 1e30, GGUFError),
    ("llama.expert_count", 8, UnsupportedModelError),
    ("general.architecture", "mamba", UnsupportedModelError),
    ("general.architecture", 5, GGUFError),
]


@pytest.mark.parametrize(("key", "value", "error_class"), WRONG)
def test_a_wrong_value_is_refused_in_one_sentence(tmp_path, key, value, error_class):
    config = TinyConfig()
    metadata = changed(tiny_metadata(config), key, value)
    message = refusal(error_class, tmp_path, metadata, tiny_tensors(config))
    assert str(tmp_path / "changed.gguf") in message


@pytest.mark.parametrize("factor", [0.0, 0.5, -4.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_rope_factor_that_stretches_nothing_is_refused(tmp_path, kind, factor):
    config = TinyConfig(rope=kind)
    metadata = changed(tiny_metadata(config), "llama.rope.scaling.factor", factor)
    message = refusal(GGUFError, tmp_path, metadata, tiny_tensors(config))
    assert "llama.rope.scaling.factor" in message


def test_heads_larger_than_the_kernels_hold_are_refused(tmp_path):
    config = TinyConfig(head_dim=1040)
    message = refusal(UnsupportedModelError, tmp_path, tiny_metadata(config), tiny_tensors(config))
    assert "head size 1040" in message


@pytest.mark.parametrize("factor", [0.0, 1e-12, 0.99, float("nan"), float("inf"), -1.0])
def test_rope_divisors_below_one_are_refused(tmp_path, factor):
    config = TinyConfig(rope="llama3")
    tensors = tiny_tensors(config)
    divisors = np.ones(config.head_dim // 2, np.float32)
    divisors[3] = factor
    tensors["rope_freqs.weight"] = float_tensor(divisors)
    message = refusal(GGUFError, tmp_path, tiny_metadata(config), tensors)
    assert "rope_freqs.weight" in message


def test_rope_divisors_that_are_not_float32_are_refused(tmp_path):
    config = TinyConfig(rope="llama3")
    tensors = tiny_tensors(config)
    tensors["rope_freqs.weight"] = float_tensor(np.ones(config.head_dim // 2, np.float16))
    message = refusal(UnsupportedModelError, tmp_path, tiny_metadata(config), tensors)
    assert "rope_freqs.weight" in message
    assert "F16" in message


TENSORS = [
    "token_embd.weight",
    "output_norm.weight",
    "blk.1.attn_norm.weight",
    "blk.0.attn_q.weight",
    "blk.1.attn_k.weight",
    "blk.0.attn_v.weight",
    "blk.1.attn_output.weight",
    "blk.1.ffn_norm.weight",
    "blk.0.ffn_gate.weight",
    "blk.1.ffn_up.weight",
    "blk.1.ffn_down.weight",
]


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_tensor_is_named_with_the_shape_it_should_have(tmp_path, name):
    config = TinyConfig()
    tensors = tiny_tensors(config)
    shape = tensors.pop(name).shape
    message = refusal(GGUFError, tmp_path, tiny_metadata(config), tensors)
    assert repr(name) in message
    if name != "token_embd.weight":  # its rows are the vocabulary, which only it says
        assert str(list(shape)) in message


@pytest.mark.parametrize("name", [*TENSORS[1:], "output.weight"])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path, name):
    config = TinyConfig()
    tensors = tiny_tensors(config)
    right = tensors[name].shape
    wrong = (right[0] + 32, *right[1:])
    tensors[name] = float_tensor(np.zeros(wrong, np.float32))
    message = refusal(GGUFError, tmp_path, tiny_metadata(config), tensors)
    assert re.search(re.escape(f"{name!r}: expected shape {list(right)}"), message)
    assert str(list(wrong)) in message


@pytest.mark.parametrize("bias", ["attn_q.bias", "attn_k.bias", "attn_v.bias"])
def test_a_bias_of_another_length_is_refused(tmp_path, bias):
    config = TinyConfig(arch="qwen2")
    tensors = tiny_tensors(config) | {f"blk.0.{bias}": float_tensor(np.zeros(16, np.float32))}
    assert bias in refusal(GGUFError, tmp_path, tiny_metadata(config), tensors)


def test_a_norm_that_is_not_float32_is_refused_by_name(tmp_path):
    config = TinyConfig()
    norm = float_tensor(np.ones(config.hidden, np.float16))
    tensors = tiny_tensors(config) | {"blk.1.ffn_norm.weight": norm}
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_norm\.weight.*F32.*F16"):
        decoder_of(tmp_path, tiny_metadata(config), tensors)


# --- numbers that are none --------------------

HALVES = {Format.F16, Format.Q4_0, Format.Q4_1, Format.Q8_0}


def poisoned(tensor, number):
    """The tensor with its first weight, or its first block's scale, replaced by `number`."""
    code = "<e" if tensor.format in HALVES else "<f"
    raw = struct.pack(code, number)
    return TensorData(tensor.format, tensor.shape, raw + tensor.data[len(raw) :])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_norm.weight", "blk.0.attn_q.weight", "blk.1.attn_v.weight", "output.weight",
     "blk.0.ffn_up.weight", "blk.1.ffn_down.weight"],
)  # fmt: skip
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_weights_that_are_no_numbers_give_numerics_error(tmp_path, format, name, number):
    config = TinyConfig()
    tensors = tiny_tensors(config, format)
    healthy = decoder_of(tmp_path, tiny_metadata(config), tensors)
    assert np.isfinite(plain(healthy, [5, 6, 7])).all()
    tensors[name] = poisoned(tensors[name], number)
    for isa in _cpu.kernel_sets():
        decoder = decoder_of(tmp_path, tiny_metadata(config), tensors, cpu_kernels(isa))
        cache = new_cache(decoder)
        context = cache.new_context()
        with pytest.raises(NumericsError):
            extend(decoder, cache, context, [5, 6, 7])
        assert (context.length, cache.live_pages) == (0, 0)


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q.weight", "blk.0.attn_v.weight", "blk.0.ffn_gate.weight",
     "blk.0.post_attention_norm.weight", "blk.1.post_ffw_norm.weight", "output_norm.weight"],
)  # fmt: skip
def test_soft_caps_hide_no_weights_that_are_no_numbers(tmp_path, name):
    tensors = tiny_tensors(CONFIGS["gemma2"])
    tensors[name] = poisoned(tensors[name], float("nan"))
    damage_is_noticed(tmp_path, CONFIGS["gemma2"], tensors)


def test_soft_caps_hide_no_infinite_logits(tmp_path):
    config = replace(CONFIGS["gemma2"], tied=False)
    tensors = tiny_tensors(config)
    head = np.frombuffer(tensors["output.weight"].data, np.float32).copy()
    head[: config.hidden] = 3e38
    tensors["output.weight"] = float_tensor(head.reshape(tensors["output.weight"].shape))
    damage_is_noticed(tmp_path, config, tensors)


def damage_is_noticed(folder, config, tensors):
    for kernels in (*map(cpu_kernels, _cpu.kernel_sets()), ReferenceKernels()):
        decoder = decoder_of(folder, tiny_metadata(config), tensors, kernels)
        with pytest.raises(NumericsError):
            plain(decoder, [5, 6, 7])


# --- steps --------------------


@pytest.mark.parametrize("kernels", [CpuKernels, ReferenceKernels])
def test_rows_want_as_many_logits_as_they_ask_for(tmp_path, kernels):
    config = TinyConfig()
    decoder = decoder_of(tmp_path, tiny_metadata(config), tiny_tensors(config), kernels())
    cache = new_cache(decoder)
    a, b, c = (cache.new_context() for _ in range(3))
    batch = [Rows(a, [1, 2, 3], 2), Rows(b, [4, 5], 0), Rows(c, [6], 1)]
    logits = decoder.forward(cache, batch, Control())
    wanted = [plain(decoder, [1, 2, 3])[1:], plain(decoder, [6])]
    np.testing.assert_allclose(logits, np.concatenate(wanted), atol=1e-4)
    assert [list(x.tokens) for x in (a, b, c)] == [[1, 2, 3], [4, 5], [6]]
    nothing = decoder.forward(cache, [Rows(b, [7], 0)], Control())
    assert nothing.shape == (0, decoder.vocab_size)


@pytest.mark.parametrize("kernels", [CpuKernels, ReferenceKernels])
@pytest.mark.parametrize("token", [-1, 271, 2**31 - 1])
def test_a_token_outside_the_vocabulary_raises_and_changes_nothing(tmp_path, kernels, token):
    config = TinyConfig()
    decoder = decoder_of(tmp_path, tiny_metadata(config), tiny_tensors(config), kernels())
    cache = new_cache(decoder)
    context = cache.new_context()
    extend(decoder, cache, context, [1, 2])
    with pytest.raises((ValueError, IndexError)):
        decoder.forward(cache, [Rows(context, [3, token])], Control())
    assert list(context.tokens) == [1, 2]
    cache.check()


class OutOfMemory(CpuKernels):
    """Has memory for so many slabs."""

    slabs_left = 1

    def new_slab(self, layout, pages):
        if self.slabs_left == 0:
            raise MemoryError
        self.slabs_left -= 1
        return super().new_slab(layout, pages)


def test_a_step_without_memory_leaves_every_context_as_it_was(tmp_path):
    """The first context and the second's copied page fit in the one slab; the second's rest not."""
    config = TinyConfig()
    decoder = decoder_of(tmp_path, tiny_metadata(config), tiny_tensors(config), OutOfMemory(1))
    cache = new_cache(decoder, 16)
    first, trunk = cache.new_context(), cache.new_context()
    extend(decoder, cache, trunk, [1] * 20)
    second = trunk.fork()
    live = cache.live_pages
    batch = [Rows(first, [1] * 40, 1), Rows(second, [2] * 100, 1)]
    with pytest.raises(MemoryError):
        decoder.forward(cache, batch, Control())
    assert (first.length, second.length, cache.live_pages) == (0, 20, live)
    cache.check()
    logits = extend(decoder, cache, second, [3])
    np.testing.assert_array_equal(logits, extend(decoder, cache, trunk, [3]))


@pytest.mark.parametrize("batch", ["twice", "no tokens", "logits of other rows"])
def test_a_batch_that_makes_no_sense_is_refused(tmp_path, batch):
    config = TinyConfig()
    decoder = decoder_of(tmp_path, tiny_metadata(config), tiny_tensors(config), CpuKernels(1))
    cache = new_cache(decoder)
    context, other = cache.new_context(), cache.new_context()
    extend(decoder, cache, context, [1, 2])
    extend(decoder, cache, other, [1])
    rows = {
        "twice": [Rows(context, [3]), Rows(context, [4])],
        "no tokens": [Rows(context, [3]), Rows(other, [])],
        "logits of other rows": [Rows(other, [3]), Rows(context, [4], logits=2)],
    }[batch]
    with pytest.raises(ValueError, match="a context"):
        decoder.forward(cache, rows, Control())
    assert (list(context.tokens), list(other.tokens)) == ([1, 2], [1])
    cache.check()
