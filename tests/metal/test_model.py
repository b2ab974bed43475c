"""Whole models through the Metal kernels and MLX's graph: near the oracle, and exact among
themselves."""

from dataclasses import replace

import numpy as np
import pytest

from llamay.formats import Format, KVPrecision
from llamay.gguf import open_gguf
from llamay.kv import Cache
from llamay.mlx_kernels import Control
from llamay.mlx_kernels.metal import MetalKernels, schedule
from llamay.mlx_kernels.reference import ReferenceKernels
from llamay.model.decoder import Decoder, Rows
from tests import oracle
from tests.gguf_writer import TensorData, float_tensor, write_gguf
from tests.metal.quants import recorded_bytes
from tests.model.running import (
    FORMATS,
    cpu_kernels,
    extend,
    load_tiny,
    plain,
    same_bits,
    step,
    tokens,
)
from tests.tiny_models import CONFIGS, TinyConfig, tiny_metadata, tiny_tensors

# Both sides of a tile of 8 rows, of pages of 16 and of a run of 256 positions.
LENGTH, PREFILL = 270, 245


@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_tiny_models_give_the_references_logits(quick_metal, tmp_path, arch, format):
    """Of more positions than the models' windows have."""
    config, ids = CONFIGS[arch], tokens(33, seed=1)
    kernels = MetalKernels(quick_metal.metal_kernel)
    found = plain(load_tiny(tmp_path, config, format, kernels), ids)
    expected = plain(load_tiny(tmp_path, config, format, ReferenceKernels()), ids)
    assert np.abs(found - expected).max() < 1e-4


# --- exactness --------------------


# The windows end within a run, reach into the run before, or leave a run out; one layer has none.
MODELS = [
    (TinyConfig(), Format.Q4_1, KVPrecision.F32),
    (TinyConfig(arch="qwen2"), Format.Q8_0, KVPrecision.F16),
    (TinyConfig(), Format.F16, KVPrecision.VQ8),
    (TinyConfig(arch="qwen2"), Format.Q4_0, KVPrecision.Q8),
    (replace(CONFIGS["gemma2"], window=100), Format.Q4_1, KVPrecision.F32),
    (replace(CONFIGS["gemma3"], window=260), Format.Q8_0, KVPrecision.F16),
    (replace(CONFIGS["gemma3"], window=9), Format.Q4_0, KVPrecision.Q8),
]


class Model:
    """A tiny model, and the logits of LENGTH tokens of one context in one step."""

    def __init__(self, folder, metal, config, format, precision):
        self.decoder = load_tiny(folder, config, format, MetalKernels(metal.metal_kernel))
        self.precision, self.ids = precision, tokens(LENGTH, seed=2)
        cache = self.cache()
        self.wanted = extend(self.decoder, cache, cache.new_context(), self.ids)

    def cache(self, page_tokens=64):
        layout = self.decoder.layout(page_tokens, self.precision)
        return Cache(self.decoder.kernels, layout, pages_per_slab=2)

    def prefilled(self, cache, count=PREFILL):
        context = cache.new_context()
        self.decoder.forward(cache, [Rows(context, self.ids[:count], 0)], Control())
        return context

    def differs(self, logits, start):
        """The first position from `start` on whose logits are not the wanted bits, or None."""
        for at, row in enumerate(logits, start):
            if not same_bits(row, self.wanted[at]):
                return at
        return None


@pytest.fixture(
    scope="module", params=MODELS, ids=lambda m: f"{m[0].arch}-{m[1].name}-{m[2].value}"
)
def model(request, shared_metal, tmp_path_factory):
    return Model(tmp_path_factory.mktemp("model"), shared_metal, *request.param)


def test_prefill_is_decode(model):
    cache = model.cache()
    context = model.prefilled(cache)
    assert (
        model.differs(extend(model.decoder, cache, context, model.ids[PREFILL:], 1), PREFILL)
        is None
    )


@pytest.mark.parametrize(("chunk", "page_tokens"), [(7, 16), (64, 128), (9, 48)])
def test_chunks_and_pages_change_no_bit(model, chunk, page_tokens):
    cache = model.cache(page_tokens)
    logits = extend(model.decoder, cache, cache.new_context(), model.ids, chunk)
    assert model.differs(logits, 0) is None


def test_attention_in_spans_of_rows_changes_no_bit(model, monkeypatch):
    """As when the results of all rows and runs would be too large to hold at once."""
    monkeypatch.setattr(schedule, "PARTIAL_BYTES", 60_000)
    cache = model.cache()
    logits = extend(model.decoder, cache, cache.new_context(), model.ids)
    assert model.differs(logits, 0) is None


def test_other_contexts_in_the_step_change_no_bit(model):
    cache = model.cache(16)
    context = model.prefilled(cache)
    others = [cache.new_context() for _ in range(9)]
    for number, other in enumerate(others):
        extend(model.decoder, cache, other, tokens(3 + 31 * number, seed=10 + number), 64)
    at = PREFILL
    for size in (1, 2, 1, 9, 8):
        batch = [(other, tokens(1 + at % 3, seed=at)) for other in others]
        batch.insert(at % 10, (context, model.ids[at : at + size]))
        logits = step(model.decoder, cache, batch)[at % 10]
        assert model.differs(logits, at) is None
        at += size
    cache.check()


def test_forks_of_one_prefix_continue_exactly(model):
    cache = model.cache()
    trunk = model.prefilled(cache, 262)
    points = [262, 262, 257, 256, 255, 64, 63, 1]
    forks = [trunk.fork() for _ in points]
    for fork, point in zip(forks, points, strict=True):
        fork.truncate(point)
    for _ in range(3):
        batch = [(fork, model.ids[fork.length : fork.length + 1]) for fork in forks]
        for (fork, _), logits in zip(batch, step(model.decoder, cache, batch), strict=True):
            assert model.differs(logits, fork.length - 1) is None
        cache.check()


def test_a_matched_prefix_continues_exactly_and_last_logits_are_found_again(model):
    cache = model.cache()
    context = model.prefilled(cache)
    cache.retain(context)
    context.close()
    hit = cache.match([*model.ids[:101], 0, 0])
    assert hit.length == 101
    assert model.differs([model.decoder.last_logits(cache, hit)], 100) is None
    assert model.differs(extend(model.decoder, cache, hit, model.ids[101:110]), 101) is None


def test_rows_on_other_pages_continue_exactly(model):
    before, after = model.cache(16), model.cache(128)
    context, restored = model.prefilled(before), after.new_context()
    with context.in_use():
        rows = context.export_rows(0, PREFILL)
    with restored.in_use():
        restored.reserve(PREFILL)
        restored.import_rows(0, rows)
        restored.commit(model.ids[:PREFILL])
    logits = extend(model.decoder, after, restored, model.ids[PREFILL:])
    assert model.differs(logits, PREFILL) is None


# --- every format --------------------


def test_a_model_of_all_formats_is_near_the_oracle_and_exact(quick_metal, tmp_path):
    """Two layers whose matrices have 14 formats; the embedding has the fifteenth."""
    config = TinyConfig(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, tied=False)
    formats = iter([Format.Q6_K, *(f for f in Format if f is not Format.Q6_K), Format.Q5_K])
    tensors, values = {}, {}
    for name, tensor in tiny_tensors(config).items():
        if len(tensor.shape) == 1:  # norms; small, as the recorded values are large
            values[name] = oracle.dequantise(Format.F32, tensor.data, tensor.shape) / 32
            tensors[name] = float_tensor(values[name])
            continue
        format = next(formats)
        data, values[name] = recorded_bytes(format, *tensor.shape, most=8)
        tensors[name] = TensorData(format, tensor.shape, data)
    path, ids = tmp_path / "all.gguf", tokens(20, seed=4)
    write_gguf(path, tiny_metadata(config), tensors)
    with open_gguf(path) as file:
        decoder = Decoder(file, MetalKernels(quick_metal.metal_kernel))
    found = plain(decoder, ids)
    expected = oracle.forward(values, tiny_metadata(config), ids)
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    cache = Cache(decoder.kernels, decoder.layout(64))
    assert same_bits(extend(decoder, cache, cache.new_context(), ids, 1), found)


# --- the default model --------------------


@pytest.mark.model
def test_the_default_model_decodes_like_the_cpu(quick_metal, default_model_path):
    """10 tokens of a prefill, 8 decoded; the CPU's activations have 8 bits, hence the tolerance."""
    with open_gguf(default_model_path) as file:
        decoder = Decoder(file, MetalKernels(quick_metal.metal_kernel))
        cpu = Decoder(file, cpu_kernels("scalar", 2))
    ids = [504, 2966, 282, 4649, 314, 7042, 30, 378, 2966]
    ids += [282, 6367, 314, 9048, 30, 378, 2966, 282, 260]
    # A slab of one page: the host copies what a kernel reads at each call.
    cache = Cache(decoder.kernels, decoder.layout(64), pages_per_slab=1)
    context = cache.new_context()
    prefilled = extend(decoder, cache, context, ids[:10])
    assert same_bits(decoder.last_logits(cache, context), prefilled[-1])
    decoded = extend(decoder, cache, context, ids[10:], 1)
    found, expected = np.concatenate([prefilled, decoded]), plain(cpu, ids)
    difference = found - expected
    assert np.sqrt((difference**2).mean()) < 0.2
    top = np.partition(expected, -2, axis=1)[:, -2:]
    clear = top[:, 1] - top[:, 0] > 1
    assert clear.sum() > 5
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[clear].all()
