"""The CPU kernels against the numerics contract in plain numpy: whole models, equal bits."""

from dataclasses import replace

import pytest

from llamay.formats import Format
from llamay.gguf import open_gguf
from llamay.mlx_kernels import _cpu
from llamay.model.decoder import compile_program
from tests import contract
from tests.model.running import (
    FORMATS,
    MIXED,
    config_for,
    cpu_kernels,
    load_tiny,
    plain,
    same_bits,
    tokens,
)
from tests.tiny_models import CONFIGS, TinyConfig

# Three runs of 256 positions, so that partial results are merged twice.
LONG = TinyConfig(layers=1, heads=2, kv_heads=1)


def expected(folder, decoder, ids):
    """What the contract gives for the model that `load_tiny` has written to the folder."""
    with open_gguf(folder / "tiny.gguf") as file:
        return contract.forward(compile_program(decoder.spec, file), ids)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_every_set_gives_the_bits_of_the_contract(tmp_path, format, arch):
    config, ids = TinyConfig(arch=arch, head_dim=32), tokens(40, seed=1)
    wanted = None
    for isa in _cpu.kernel_sets():
        decoder = load_tiny(tmp_path, config, format, cpu_kernels(isa))
        if wanted is None:
            wanted = expected(tmp_path, decoder, ids)
        assert same_bits(plain(decoder, ids), wanted), isa


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_mixed_formats_have_the_bits_of_the_contract(tmp_path, arch):
    """In one layer, some products read activations in blocks of 32 and others in blocks of 256."""
    config, ids = config_for(MIXED, arch=arch), tokens(40, seed=4)
    wanted = None
    for isa in _cpu.kernel_sets():
        decoder = load_tiny(tmp_path, config, MIXED, cpu_kernels(isa))
        if wanted is None:
            wanted = expected(tmp_path, decoder, ids)
        assert same_bits(plain(decoder, ids), wanted), isa


@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("format", [Format.F32, Format.Q4_1], ids=lambda f: f.name)
def test_every_architecture_has_the_bits_of_the_contract(tmp_path, format, arch):
    """Norms of heads and after each half, windows, soft caps, gelu, two ropes, fused matrices."""
    ids = tokens(40, seed=5)
    wanted = None
    for isa in _cpu.kernel_sets():
        decoder = load_tiny(tmp_path, CONFIGS[arch], format, cpu_kernels(isa))
        if wanted is None:
            wanted = expected(tmp_path, decoder, ids)
        assert same_bits(plain(decoder, ids), wanted), isa


@pytest.mark.parametrize("window", [1, 16, 100, 256, 300, 600])
def test_windows_over_runs_of_256_positions_are_as_the_contract_says(tmp_path, window):
    config = replace(LONG, arch="gemma2", layers=2, window=window, soft_cap=2.0)
    ids = tokens(560, seed=6)
    for isa in _cpu.kernel_sets():
        decoder = load_tiny(tmp_path, config, Format.Q8_0, cpu_kernels(isa))
        if isa == _cpu.kernel_sets()[0]:
            wanted = expected(tmp_path, decoder, ids)
        assert same_bits(plain(decoder, ids), wanted), isa


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_scaled_rope_has_the_bits_of_the_contract(tmp_path, rope):
    ids = tokens(40, seed=2)
    decoder = load_tiny(tmp_path, TinyConfig(rope=rope), FORMATS[0])
    assert same_bits(plain(decoder, ids), expected(tmp_path, decoder, ids))


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_runs_of_256_positions_are_merged_as_the_contract_says(tmp_path, format):
    ids = tokens(560, seed=3)
    decoder = load_tiny(tmp_path, LONG, format)
    assert same_bits(plain(decoder, ids), expected(tmp_path, decoder, ids))
