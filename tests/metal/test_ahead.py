"""The next step's graph is made ahead: used when it is the right one, never when it is not."""

import gc

import numpy as np
import pytest

from llamay.errors import CancelledError
from llamay.formats import Format
from llamay.kv import Cache
from llamay.mlx_kernels import Control
from llamay.mlx_kernels.metal import MetalKernels
from llamay.mlx_kernels.metal.ahead import StepAhead
from llamay.model.decoder import Rows
from tests.metal.doubles import Doubles
from tests.metal.test_pages import addresses
from tests.model.running import load_tiny, tokens
from tests.tiny_models import CONFIGS, TinyConfig


class Runs:
    """The same steps with graphs made ahead and without; demands equal results."""

    def __init__(self, folder, monkeypatch, config):
        self.hits = []
        real = StepAhead.take

        def take(ahead, *arguments):
            graph = real(ahead, *arguments)
            self.hits.append(graph is not None)
            return graph

        monkeypatch.setattr(StepAhead, "take", take)
        self.decoders = []
        for make_kernel in (None, lambda **_: None):
            kernels = MetalKernels(make_kernel)
            kernels.kernels = Doubles()
            self.decoders.append(load_tiny(folder, config, Format.Q4_1, kernels))

    def new_caches(self, page_tokens=16):
        return [
            Cache(decoder.kernels, decoder.layout(page_tokens), pages_per_slab=32)
            for decoder in self.decoders
        ]

    def step(self, caches, batch, best=0):
        """batch: (contexts of both, tokens). Returns whether a graph made ahead was used."""
        found = []
        self.hits.clear()
        for index, decoder in enumerate(self.decoders):
            rows = [Rows(contexts[index], ids, len(ids), best) for contexts, ids in batch]
            found.append(decoder.step(caches[index], rows, Control()))
        ahead, plain = found
        np.testing.assert_array_equal(ahead.logits, plain.logits)
        assert len(ahead.best) == len(plain.best)
        for one, other in zip(ahead.best, plain.best, strict=True):
            np.testing.assert_array_equal(one.ids, other.ids)
        hit, never = self.hits
        assert not never
        return hit


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return Runs(tmp_path, monkeypatch, TinyConfig())


@pytest.fixture
def windowed_runs(tmp_path, monkeypatch):
    """Of a model with a window in one layer, and a rope for each."""
    return Runs(tmp_path, monkeypatch, CONFIGS["gemma3"])


def new_contexts(caches):
    return [cache.new_context() for cache in caches]


def forks(contexts):
    return [context.fork() for context in contexts]


def test_decoding_uses_it_but_where_a_page_begins(runs):
    caches = runs.new_caches()
    context = new_contexts(caches)
    runs.step(caches, [(context, tokens(5, seed=1))])
    hits = [runs.step(caches, [(context, [token])], best=1) for token in range(20, 60)]
    # The first follows a prefill; positions 16 and 32 take a page.
    assert [5 + index for index, hit in enumerate(hits) if not hit] == [5, 16, 32]


def test_windows_move_on_and_each_rope_turns(windowed_runs):
    """Past the first window's end; also of rows whose windows begin elsewhere."""
    caches = windowed_runs.new_caches(64)
    trunk = new_contexts(caches)
    windowed_runs.step(caches, [(trunk, tokens(15, seed=1))])
    branch = forks(trunk)
    windowed_runs.step(caches, [(trunk, tokens(5, seed=2)), (branch, [7])])
    hits = [windowed_runs.step(caches, [(trunk, [t]), (branch, [t + 1])]) for t in range(20)]
    assert hits == [False] + [True] * 19


def test_it_writes_in_place(runs):
    caches = runs.new_caches()
    context = new_contexts(caches)
    runs.step(caches, [(context, [1])])
    before = [addresses(cache) for cache in caches]
    assert [runs.step(caches, [(context, [token])]) for token in range(9)] == [True] * 9
    assert [addresses(cache) for cache in caches] == before


def test_eight_branches_of_one_prefix(runs):
    caches = runs.new_caches()
    trunk = new_contexts(caches)
    runs.step(caches, [(trunk, tokens(20, seed=1))])
    branches = [trunk, *(forks(trunk) for _ in range(7))]
    hits = []
    for turn in range(9):
        hits.append(runs.step(caches, [(b, [3 * i + turn]) for i, b in enumerate(branches)], 3))
    assert hits == [False] + [True] * 8
    # One of them ends; two others change places.
    branches = [branches[1], branches[0], *branches[2:7]]
    assert not runs.step(caches, [(b, [i]) for i, b in enumerate(branches)], 3)
    for cache in caches:
        cache.check()


def test_what_happens_between_two_steps_is_seen(runs):
    caches = runs.new_caches(64)
    context = new_contexts(caches)
    runs.step(caches, [(context, tokens(3, seed=1))])
    before = [addresses(cache) for cache in caches]

    def decode(hit, *arguments):
        assert runs.step(caches, [(context, [7])], *arguments) == hit

    decode(False)
    decode(True)
    decode(False, 1)  # asks for the largest now
    decode(True, 1)
    children = forks(context)  # the page is shared: the next token copies it
    decode(False, 1)
    decode(True, 1)
    assert not runs.step(caches, [(children, [9])], 1)
    decode(False, 1)
    for contexts in (context, children):  # rows from elsewhere, into the page that is read
        for one in contexts:
            with one.in_use():
                rows = one.export_rows(0, 2)
                one._store.kernels.import_rows(one._store.slabs, one.page_ids, 0, rows[::-1].copy())
        decode(False, 1)
    for one in context:
        one.truncate(one.length - 1)
    decode(False, 1)
    assert not runs.step(caches, [(context, [1, 2, 3])], 1)  # a draft
    decode(False, 1)
    decode(True, 1)
    assert [addresses(cache) for cache in caches] == before


def test_caches_that_share_memory_do_not_take_each_other_s(runs):
    caches, others = runs.new_caches(), runs.new_caches()
    contexts, foreign = new_contexts(caches), new_contexts(others)
    for token in range(5):
        runs.step(caches, [(contexts, [token])])
        runs.step(others, [(foreign, [token + 9])])
    assert runs.step(others, [(foreign, [1])])
    assert not runs.step(caches, [(contexts, [1])])


def test_a_cancelled_step_uses_nothing_up(runs):
    caches = runs.new_caches()
    contexts = new_contexts(caches)
    runs.step(caches, [(contexts, [1])])
    control = Control()
    control.cancel()
    for decoder, cache, context in zip(runs.decoders, caches, contexts, strict=True):
        with pytest.raises(CancelledError):
            decoder.forward(cache, [Rows(context, [5])], control)
    assert runs.step(caches, [(contexts, [6])])


def test_it_goes_with_the_memory_that_it_reads(runs):
    caches = runs.new_caches()
    contexts = new_contexts(caches)
    runs.step(caches, [(contexts, [1])])
    ahead = runs.decoders[0].kernels._ahead
    assert ahead._made is not None
    del caches, contexts
    gc.collect()
    assert ahead._made is None
