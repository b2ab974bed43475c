"""Shapes that no tile divides: on every instruction set the contract's bits, however rows come.

The vocabulary of tiny models is 271, a prime.
"""

from dataclasses import replace

import pytest

from llamay.formats import Format, KVPrecision
from llamay.gguf import open_gguf
from llamay.kv import Cache
from llamay.mlx_kernels import _cpu
from llamay.model.decoder import compile_program
from tests import contract
from tests.model.running import (
    cpu_kernels,
    extend,
    load_tiny,
    new_cache,
    plain,
    same_bits,
    step,
    tokens,
)
from tests.tiny_models import TinyConfig

ISAS = _cpu.kernel_sets()
# Formats with blocks of 32, for the matrices in turn.
FORMATS = (
    Format.Q4_1, Format.Q5_0, Format.Q8_0, Format.IQ4_NL, Format.F16, Format.Q5_1, Format.Q4_0,
)  # fmt: skip


def shape(heads, kv_heads, head_dim, hidden, ffn, **others):
    return TinyConfig(
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        ffn=ffn,
        **others,
    )


WINDOWED = {"arch": "gemma2", "tied": True, "soft_cap": 1.5}


# Groups of 1 to 16 queries a key, heads of 32 to 256, odd multiples of 32 for rows and columns.
SHAPES = [
    shape(1, 1, 32, 32, 96),
    shape(2, 2, 256, 96, 160),
    shape(4, 2, 128, 160, 32),
    shape(3, 1, 96, 224, 352),
    shape(5, 1, 64, 96, 224),
    shape(7, 1, 160, 32, 96),
    shape(16, 2, 32, 288, 96),
    shape(16, 1, 48, 96, 32),
    shape(5, 1, 80, 96, 32, window=9, **WINDOWED),
    shape(16, 2, 32, 32, 96, window=33, **WINDOWED),
]
LONG = [
    shape(16, 1, 32, 32, 32),
    shape(3, 1, 256, 32, 32),
    shape(16, 1, 32, 32, 32, window=100, **WINDOWED),
]


def shape_id(config):
    sizes = f"{config.heads}x{config.head_dim}-kv{config.kv_heads}-{config.hidden}-{config.ffn}"
    return f"{sizes}-window{config.window}" if config.window else sizes


def expected(folder, decoder, ids):
    with open_gguf(folder / "tiny.gguf") as file:
        return contract.forward(compile_program(decoder.spec, file), ids)


def decoders(folder, config):
    """One for each instruction set, on two threads, the scalar one first."""
    for isa in reversed(ISAS):
        yield isa, load_tiny(folder, config, FORMATS, cpu_kernels(isa, 2))


@pytest.mark.parametrize("config", SHAPES, ids=shape_id)
def test_bits_are_those_of_the_contract_in_one_step_and_in_many(tmp_path, config):
    ids, wanted = tokens(45, seed=1), None
    for isa, decoder in decoders(tmp_path, config):
        if wanted is None:
            wanted = expected(tmp_path, decoder, ids)
        assert same_bits(plain(decoder, ids), wanted), isa
        for chunk in (1, 7):
            cache = new_cache(decoder, 16)
            found = extend(decoder, cache, cache.new_context(), ids, chunk)
            assert same_bits(found, wanted), (isa, chunk)


@pytest.mark.parametrize("config", LONG, ids=shape_id)
def test_runs_are_merged_as_the_contract_says(tmp_path, config):
    ids, wanted = tokens(270, seed=2), None
    for isa, decoder in decoders(tmp_path, config):
        if wanted is None:
            wanted = expected(tmp_path, decoder, ids)
        cache = new_cache(decoder)
        context = cache.new_context()
        found = [
            extend(decoder, cache, context, ids[:255]),
            extend(decoder, cache, context, ids[255:]),
        ]
        assert same_bits(found[0], wanted[:255]), isa
        assert same_bits(found[1], wanted[255:]), isa


@pytest.mark.parametrize("config", SHAPES, ids=shape_id)
def test_branches_of_one_prefix_are_like_contexts_of_their_own(tmp_path, config):
    base, wanted = tokens(70, seed=3), None
    branches = [[*base[:point], *tokens(2, seed=4 + point)] for point in (70, 64, 33, 70, 1)]
    for isa, decoder in decoders(tmp_path, config):
        if wanted is None:
            wanted = [plain(decoder, ids) for ids in branches]
        cache = new_cache(decoder)
        trunk = cache.new_context()
        extend(decoder, cache, trunk, base)
        forks = [trunk.fork() for _ in branches]
        for fork, ids in zip(forks, branches, strict=True):
            fork.truncate(len(ids) - 2)
        for _ in range(2):
            batch = [
                (fork, ids[fork.length : fork.length + 1])
                for fork, ids in zip(forks, branches, strict=True)
            ]
            for (fork, _), logits, own in zip(
                batch, step(decoder, cache, batch), wanted, strict=True
            ):
                assert same_bits(logits, own[fork.length - 1 : fork.length]), isa


@pytest.mark.parametrize("precision", list(KVPrecision)[1:], ids=lambda p: p.value)
@pytest.mark.parametrize("config", SHAPES, ids=shape_id)
def test_other_precisions_have_the_bits_of_the_scalar_set(tmp_path, config, precision):
    ids, wanted = tokens(45, seed=5), None
    for isa, decoder in decoders(tmp_path, config):
        for chunk in (None, 1, 7):
            layout = replace(decoder.layout(32), precision=precision)
            cache = Cache(decoder.kernels, layout, pages_per_slab=2)
            found = extend(decoder, cache, cache.new_context(), ids, chunk)
            if wanted is None:
                wanted = found
                assert not same_bits(found, plain(decoder, ids)), "the precision plays no part"
            assert same_bits(found, wanted), (isa, chunk)
