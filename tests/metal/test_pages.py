"""Pages are written in place: no buffer moves, no slab is copied, chunks stay few."""

import copy
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from llamay import mlx_kernels
from llamay.errors import CancelledError, UsageError
from llamay.formats import Format, KVLayout, KVPrecision
from llamay.kv import Cache
from llamay.mlx_kernels import Control, load_kernels
from llamay.mlx_kernels.metal import MetalKernels, pages
from llamay.model.decoder import Rows
from tests.metal.doubles import Doubles
from tests.model.running import extend, load_tiny, new_cache, step, tokens
from tests.tiny_models import TinyConfig


@pytest.fixture
def decoder(quick_metal, tmp_path):
    kernels = MetalKernels(quick_metal.metal_kernel)
    return load_tiny(tmp_path, TinyConfig(), Format.Q4_1, kernels)


def chunks(cache):
    return pages.PageMap(cache.store.slabs).chunks


def addresses(cache):
    return [
        np.asarray(array).__array_interface__["data"][0]
        for chunk in chunks(cache)
        for array in chunk.layers
    ]


def contents(cache):
    return [np.array(array) for chunk in chunks(cache) for array in chunk.layers]


def test_steps_write_where_the_pages_are(decoder):
    cache = new_cache(decoder)
    first, second = cache.new_context(), cache.new_context()
    extend(decoder, cache, first, tokens(70, seed=1))
    extend(decoder, cache, second, tokens(3, seed=2))
    before, written = addresses(cache), contents(cache)
    step(decoder, cache, [(first, tokens(2, seed=3)), (second, [7])])
    assert addresses(cache) == before
    changed = [(a != b).any(axis=1).sum() for a, b in zip(written, contents(cache), strict=True)]
    assert changed == [3] * len(changed)


def test_a_second_reference_makes_the_buffer_move(decoder):
    """The test above can fail."""
    cache = new_cache(decoder)
    context = cache.new_context()
    extend(decoder, cache, context, tokens(3, seed=1))
    before = addresses(cache)
    held = [copy.copy(array) for chunk in chunks(cache) for array in chunk.layers]
    extend(decoder, cache, context, [5])
    assert len(held) == len(before)
    assert not set(addresses(cache)) & set(before)


def test_a_kept_graph_writes_in_place_and_gives_what_a_new_one_gives(tmp_path):
    """The graph of a decoded token is kept; only the first of these steps traces it."""
    built, results = [], []

    class Counted(Doubles):
        def embed(self, *args):
            built.append(1)
            return super().embed(*args)

    for real in (True, False):
        kernels = MetalKernels(None if real else lambda **_: None)
        kernels.kernels = Counted()
        decoder = load_tiny(tmp_path, TinyConfig(), Format.Q4_1, kernels)
        cache = new_cache(decoder)
        context = cache.new_context()
        logits = [extend(decoder, cache, context, [3])]
        before = addresses(cache)
        logits += [extend(decoder, cache, context, [token]) for token in range(9, 29)]
        assert addresses(cache) == before
        assert sum(array.any(axis=1).sum() for array in contents(cache)) == 2 * 21
        results.append((len(built), np.concatenate(logits)))
        built.clear()
    assert [count for count, _ in results] == [1, 21]
    assert np.array_equal(results[0][1], results[1][1])


def test_a_chunk_takes_no_memory_that_was_freed_before(monkeypatch):
    """On Metal that may be larger than what is written in place."""
    calls, evaluate = [], mx.eval
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append("clear_cache"))
    monkeypatch.setattr(mx, "eval", lambda *arrays: calls.append("eval") or evaluate(*arrays))
    pages.Chunk(KVLayout(2, 1, 16, 16), 1, 1)
    assert calls == ["clear_cache", "eval"]


def test_each_layer_is_written_before_anything_reads_it(decoder, monkeypatch):
    """On Metal, what a step has read cannot be written in place before the step is done."""
    written = []
    attend = decoder.kernels.kernels.attend

    def noted(queries, positions, span, items, places, slabs, *others):
        words = np.array(slabs[0]).reshape(-1)
        written.append(np.count_nonzero(words) > 0)
        return attend(queries, positions, span, items, places, slabs, *others)

    monkeypatch.setattr(decoder.kernels.kernels, "attend", noted)
    cache = new_cache(decoder)
    extend(decoder, cache, cache.new_context(), tokens(3, seed=1))
    assert written == [True, True]


def test_copy_on_write_copies_one_page_and_moves_nothing(decoder):
    cache = new_cache(decoder)
    context = cache.new_context()
    extend(decoder, cache, context, tokens(70, seed=1))
    child = context.fork()
    before, written = addresses(cache), contents(cache)
    child.reserve(1)
    assert addresses(cache) == before
    source, target = context.page_ids[1], child.page_ids[1]
    assert source != target
    assert context.page_ids[0] == child.page_ids[0]
    for old, new in zip(written, contents(cache), strict=True):
        old, new = (array.reshape(-1, 64, array.shape[1]) for array in (old, new))
        assert np.array_equal(new[target], old[source])
        others = np.arange(len(old)) != target
        assert np.array_equal(new[others], old[others])


def test_a_cancelled_step_leaves_what_contexts_hold_as_it_was(decoder):
    cache = new_cache(decoder)
    context = cache.new_context()
    extend(decoder, cache, context, tokens(3, seed=1))
    slabs, ids = cache.store.slabs, list(context.page_ids)
    before = decoder.kernels.export_rows(slabs, ids, 0, 3)

    control = Control()
    control.cancel()
    with pytest.raises(CancelledError):
        decoder.forward(cache, [Rows(context, [5])], control)
    assert np.array_equal(decoder.kernels.export_rows(slabs, ids, 0, 3), before)
    plain = new_cache(decoder)
    expected = extend(decoder, plain, plain.new_context(), [*tokens(3, seed=1), 6])[-1:]
    assert np.array_equal(extend(decoder, cache, context, [6]), expected)


def test_a_thousand_slabs_lie_in_few_chunks_and_go_with_the_last_page():
    layout = KVLayout(1, 1, 16, 16)
    kernels = MetalKernels(lambda **_: None)
    cache = Cache(kernels, layout, pages_per_slab=1)
    contexts = [cache.new_context() for _ in range(1000)]
    for context in contexts:
        context.reserve(1)
    number = len(chunks(cache))
    assert number <= pages.MAX_CHUNKS
    places = pages.PageMap(cache.store.slabs).places(np.arange(1000, dtype=np.int32))
    assert len(set(places.tolist())) == 1000
    (pool,) = kernels._pools.values()
    for context in contexts[:990]:
        context.close()
    number = len(chunks(cache))
    assert number <= 2
    for context in contexts[990:]:
        context.close()
    assert len(pool._chunks) <= 2  # of the store's spare slabs


@pytest.mark.parametrize("precision", list(KVPrecision))
def test_exported_rows_are_those_that_were_imported(precision):
    layout = KVLayout(3, 2, 16, 16, precision)
    kernels = MetalKernels(lambda **_: None)
    cache = Cache(kernels, layout, pages_per_slab=2)
    context = cache.new_context()
    context.reserve(70)
    rows = np.random.default_rng(0).integers(0, 256, (70, layout.row_bytes), dtype=np.uint8)
    kernels.import_rows(cache.store.slabs, context.page_ids, 0, rows)
    found = kernels.export_rows(cache.store.slabs, context.page_ids, 3, 61)
    assert np.array_equal(found, rows[3:61])
    with pytest.raises(ValueError, match="outside the pages"):
        kernels.export_rows(cache.store.slabs, context.page_ids, 3, 81)
    with pytest.raises(ValueError, match="rows of"):
        kernels.import_rows(cache.store.slabs, context.page_ids, 0, rows[:, 1:])
    kernels.import_rows(cache.store.slabs, context.page_ids, 0, rows[:0])


def pretend(monkeypatch, platform, gpus):
    monkeypatch.setattr(mlx_kernels, "sys", SimpleNamespace(platform=platform))
    monkeypatch.setattr(mx, "device_count", lambda _: gpus)
    monkeypatch.delenv("LLAMAY_ISA", raising=False)


@pytest.mark.parametrize(("platform", "gpus"), [("linux", 1), ("darwin", 0)])
def test_without_metal_the_device_metal_is_refused(monkeypatch, platform, gpus):
    """Another system's GPU is none for Metal; a Mac, such as one of a virtual machine, may have
    none."""
    pretend(monkeypatch, platform, gpus)
    with pytest.raises(UsageError, match="use --device cpu"):
        load_kernels("metal")
    assert load_kernels("auto").name.startswith("cpu")


def test_a_mac_s_gpu_is_taken_unless_the_cpu_is_named(monkeypatch):
    pretend(monkeypatch, "darwin", 1)
    assert load_kernels("auto").name == load_kernels("metal").name == "metal"
    assert load_kernels("cpu").name.startswith("cpu")
    monkeypatch.setenv("LLAMAY_ISA", "scalar")
    assert load_kernels("auto").name == "cpu scalar"
    assert load_kernels("metal").name == "metal"
