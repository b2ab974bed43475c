"""What a decoded token launches on the GPU, counted in MLX's own graph.

`mx.export_function` traces a step that calls the real `mx.fast.metal_kernel`, which needs no GPU as
long as nothing is evaluated; the graph is then written out, and its primitives are counted.
"""

import io
import re
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import pytest

from llamay.formats import Format, KVPrecision
from llamay.kv import Cache
from llamay.mlx_kernels import Control
from llamay.mlx_kernels.metal import MetalKernels
from llamay.model.decoder import Rows
from tests.model.running import load_tiny, tokens
from tests.tiny_models import CONFIGS, TinyConfig

# Primitives that give another view of the same memory and launch nothing: rows of a step are
# contiguous.
VIEWS = {"Squeeze", "Broadcast", "Reshape"}
CONFIG = TinyConfig(arch="qwen2", layers=3)
GEMMA = replace(CONFIGS["gemma2"], layers=3)


class EvaluationError(Exception):
    """Raised in place of the evaluation."""


def primitives_of_a_step(decoder, precision, counts, monkeypatch, folder, best=0):
    """Primitives of the graph of one step, of contexts with so many new tokens each."""
    cache = Cache(decoder.kernels, decoder.layout(64, precision))
    contexts = [cache.new_context() for _ in counts]
    for context, count in zip(contexts, counts, strict=True):
        context.reserve(count)
    found = []

    def evaluate(*arrays):
        graph = io.StringIO()
        mx.export_to_dot(graph, *arrays)
        found.append(Counter(re.findall(r'label ="(\w+)"', graph.getvalue())))
        raise EvaluationError

    def step(x):
        batch = [
            Rows(c, tokens(n, seed=1), best=best) for c, n in zip(contexts, counts, strict=True)
        ]
        with pytest.raises(EvaluationError):
            decoder.step(cache, batch, Control())
        return x + 1

    monkeypatch.setattr(mx, "async_eval", evaluate)
    mx.export_function(str(folder / "step.mlxfn"), step, mx.zeros(1))
    (primitives,) = found  # one evaluation
    return primitives


def launches(primitives):
    return sum(count for name, count in primitives.items() if name not in VIEWS)


@pytest.fixture
def decoder(tmp_path):
    return load_tiny(tmp_path, CONFIG, Format.Q4_1, MetalKernels())


@pytest.mark.parametrize("precision", list(KVPrecision))
@pytest.mark.parametrize("contexts", [1, 8])
@pytest.mark.parametrize("best", [0, 1, 40])
def test_a_decoded_token_takes_8_launches_a_layer_and_2_besides_or_3_with_the_largest_logits(
    decoder, precision, contexts, best, monkeypatch, tmp_path
):
    counts = [1] * contexts
    found = primitives_of_a_step(decoder, precision, counts, monkeypatch, tmp_path, best)
    assert launches(found) == 8 * CONFIG.layers + 2 + (best > 0)
    assert found["Scatter"] == CONFIG.layers


def test_a_prefill_takes_10_launches_a_layer_and_3_besides(decoder, monkeypatch, tmp_path):
    """Norms by themselves; the last row picked."""
    found = primitives_of_a_step(decoder, KVPrecision.F32, [256], monkeypatch, tmp_path)
    assert launches(found) == 10 * CONFIG.layers + 3


@pytest.mark.parametrize(
    ("config", "a_layer"),
    [(replace(CONFIG, arch="qwen3"), 8), (GEMMA, 10), (replace(GEMMA, arch="gemma3"), 10)],
)
def test_norms_of_heads_take_no_launch_and_norms_of_what_is_added_one_each(
    config, a_layer, monkeypatch, tmp_path
):
    decoder = load_tiny(tmp_path, config, Format.Q4_1, MetalKernels())
    for count, more in [(1, 2), (256, 2 * config.layers + 3)]:
        found = primitives_of_a_step(decoder, KVPrecision.F32, [count], monkeypatch, tmp_path)
        assert launches(found) == a_layer * config.layers + more
