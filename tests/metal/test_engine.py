"""Answers of an engine on the kernels: where a token's choice is left to them, nothing changes."""

import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from llamay.engine import Engine, model
from llamay.engine.generation import Request
from llamay.errors import NumericsError
from llamay.events import Failed, TextDelta
from llamay.formats import Format
from llamay.gguf import open_gguf
from llamay.kv import Cache
from llamay.mlx_kernels import Control
from llamay.mlx_kernels.metal import MetalKernels
from llamay.model.decoder import Decoder, Rows
from llamay.sampling import SamplingParams
from tests.gguf_writer import write_gguf
from tests.tiny_models import TinyConfig, tiny_metadata, tiny_tensors, write_tiny_model

PARAMS = (
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=1.5, seed=3, max_tokens=9),
    SamplingParams(temperature=1.5, top_k=3, seed=4, max_tokens=9),
    SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=5, max_tokens=9),
    SamplingParams(temperature=0, repeat_penalty=1.3, max_tokens=9),
)


class WithoutBest(MetalKernels):
    """Leaves the choice to the host, as the CPU's kernels do."""

    def prepare(self, program):
        run = super().prepare(program)
        return lambda step, slabs, control: run(replace(step, best=0), slabs, control)

    def best(self, logits, count):
        return ()


def answers(kernels, path, monkeypatch, requests):
    """(ids, log-probabilities) of each answer after one prompt, in order."""
    monkeypatch.setattr(model, "load_kernels", lambda *_: kernels)
    found = []
    with Engine.load(str(path), context_size=256) as engine:
        for params in requests:
            told = [([], []) for _ in params]
            for event in engine.stream(Request(list(range(3, 25)), params)):
                assert not isinstance(event, Failed)
                if isinstance(event, TextDelta):
                    told[event.branch][0].extend(event.ids)
                    told[event.branch][1].extend(event.logprobs)
            found += told
    return found


def test_tokens_are_those_that_the_host_chooses_and_the_batch_changes_no_bit(
    quick_metal, empty_home, tmp_path, monkeypatch
):
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, TinyConfig(), Format.Q4_1)
    kernels = MetalKernels(quick_metal.metal_kernel)
    together = answers(kernels, path, monkeypatch, [PARAMS])
    assert quick_metal.launches["llamay_best"] > 9
    alone = answers(kernels, path, monkeypatch, [(params,) for params in PARAMS])
    assert alone == together
    assert all(len(ids) == len(logprobs) == 9 for ids, logprobs in together)
    on_host = answers(WithoutBest(quick_metal.metal_kernel), path, monkeypatch, [PARAMS])
    for (ids, logprobs), (host_ids, host_logprobs) in zip(together, on_host, strict=True):
        assert ids == host_ids
        np.testing.assert_allclose(logprobs, host_logprobs, atol=1e-6)


def test_the_engine_s_thread_clears_what_mlx_keeps_for_it(empty_home, tmp_path, monkeypatch):
    """MLX 0.32 may crash when a thread ends that has not."""
    path, threads = tmp_path / "tiny.gguf", []
    write_tiny_model(path, TinyConfig(), Format.Q4_1)
    monkeypatch.setattr(mx, "clear_streams", lambda: threads.append(threading.current_thread()))
    with Engine.load(str(path), context_size=256) as engine:
        own = engine.call(threading.current_thread)
        assert threads == []
    assert threads == [own]


def test_logits_that_are_not_finite_end_a_step_whether_or_not_rows_are_read(quick_metal, tmp_path):
    tensors = tiny_tensors(TinyConfig(), Format.F32)
    norm = tensors["output_norm.weight"]
    damaged = np.frombuffer(norm.data, np.float32) * np.float32(np.inf)
    tensors["output_norm.weight"] = replace(norm, data=damaged.tobytes())
    path = tmp_path / "damaged.gguf"
    write_gguf(path, tiny_metadata(TinyConfig()), tensors)
    with open_gguf(path) as file:
        decoder = Decoder(file, MetalKernels(quick_metal.metal_kernel))
    cache = Cache(decoder.kernels, decoder.layout(64))
    context = cache.new_context()
    for best in (0, 1, 40):
        with pytest.raises(NumericsError):
            decoder.step(cache, [Rows(context, [1, 2], 2, best)], Control())
        assert context.length == 0
