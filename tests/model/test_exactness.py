"""A row's logits depend on its context alone: every way of computing them gives the same bits."""

import contextlib
import ctypes
import hashlib
import itertools
import json
import platform
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llamay.formats import Format
from llamay.gguf import open_gguf
from llamay.mlx_kernels import _cpu
from llamay.mlx_kernels.cpu import log_sum_exp, sample
from llamay.model.decoder import Decoder
from tests.gguf_writer import float_tensor, write_gguf
from tests.model.running import (
    FORMATS,
    MIXED,
    config_for,
    cpu_kernels,
    extend,
    instruction_set,
    load_tiny,
    loader,
    new_cache,
    plain,
    same_bits,
    step,
    tokens,
)
from tests.tiny_models import TinyConfig, tiny_metadata, tiny_tensors

ROOT = Path(__file__).resolve().parent.parent.parent
ISAS = _cpu.kernel_sets()
THREADS = (1, 2, 3)
CHUNKS = (None, 1, 7, 64, 256)
PAGES = (16, 64, 128)

# The main context crosses a run of 256 positions; in batches, seven others join for its last 50
# tokens, each with a history of another length.
LENGTH, JOIN = 300, 250
COMPANIONS = [11 * number for number in range(1, 8)]
MODELS = [(arch, format) for arch in ("llama", "qwen2") for format in FORMATS]
MODELS += [("llama", MIXED), ("qwen3", Format.Q4_0), ("gemma2", Format.Q4_1)]
MODELS += [("gemma3", Format.Q8_0), ("phi3", Format.F16)]
FULL = ("llama", Format.Q4_1)
EVERY = 7  # shares no divisor with the number of threads, chunks, pages or batches


def model_id(model):
    return f"{model[0]}-{'mixed' if model[1] is MIXED else model[1].name}"


@pytest.fixture(scope="module", params=MODELS, ids=model_id)
def model(request, tmp_path_factory):
    """(what was asked for, decoders by instruction set and threads, plain logits by context)."""
    arch, format = request.param
    load = loader(tmp_path_factory.mktemp("model"), config_for(format, arch=arch), format)
    reference = load("scalar", 1)
    wanted = [plain(reference, tokens(LENGTH, seed=0))]
    wanted += [plain(reference, companion(number)) for number in range(7)]
    return request.param, load, wanted


def companion(number):
    return tokens(COMPANIONS[number] + LENGTH - JOIN, seed=1 + number)


def run_matrix_entry(decoder, chunk, page_tokens, batched):
    """Logits by context: the main one's, and if batched those of the seven that join it."""
    cache = new_cache(decoder, page_tokens)
    histories = COMPANIONS if batched else []
    ids = [tokens(LENGTH, seed=0)] + [companion(number) for number in range(len(histories))]
    contexts = [cache.new_context() for _ in ids]
    logits = [[] for _ in ids]
    for index, length in enumerate(histories, 1):
        logits[index].append(extend(decoder, cache, contexts[index], ids[index][:length], chunk))
    size = chunk or LENGTH
    for start in range(0, LENGTH, size):
        batch = [(contexts[0], ids[0][start : start + size])]
        if start + size > JOIN:
            joined = max(start, JOIN) - JOIN, min(start + size, LENGTH) - JOIN
            batch += [
                (contexts[index], ids[index][length + joined[0] : length + joined[1]])
                for index, length in enumerate(histories, 1)
            ]
        for index, part in enumerate(step(decoder, cache, batch)):
            logits[index].append(part)
    cache.check()
    return [np.concatenate(parts) for parts in logits]


@pytest.mark.parametrize("isa", ISAS)
def test_threads_chunks_pages_and_batches_change_no_bit(model, isa):
    asked, load, wanted = model
    matrix = list(itertools.product(THREADS, CHUNKS, PAGES, (False, True)))
    if asked != FULL:
        matrix = matrix[(MODELS.index(asked) + ISAS.index(isa)) % EVERY :: EVERY]
    differing = [
        (entry, index)
        for entry in matrix
        for index, logits in enumerate(run_matrix_entry(load(isa, entry[0]), *entry[1:]))
        if not same_bits(logits, wanted[index])
    ]
    assert not differing


@pytest.fixture(
    scope="module", params=[FULL, ("qwen2", Format.Q8_0), ("gemma2", Format.Q8_0)], ids=model_id
)
def load(request, tmp_path_factory):
    arch, format = request.param
    return loader(tmp_path_factory.mktemp("model"), config_for(format, arch=arch), format)


# Either side of a page's end, of a run's end, of both, and in the first page.
FORK_POINTS = (511, 512, 513, 319, 320, 321, 256, 40)


@pytest.mark.parametrize("isa", ISAS)
def test_forks_of_one_prefix_continue_like_contexts_of_their_own(load, isa):
    decoder, base = load(isa, 2), tokens(520, seed=20)
    cache = new_cache(decoder)
    trunk = cache.new_context()
    extend(decoder, cache, trunk, base)
    forks = []
    for point in FORK_POINTS:
        forks.append(trunk.fork())
        forks[-1].truncate(point)
    own = [tokens(11, seed=30 + index) for index in range(len(forks))]
    logits = [[] for _ in forks]
    # Six steps of one row each, then one of five each: attention's two schedules.
    for start, end in [*((i, i + 1) for i in range(6)), (6, 11)]:
        batch = [(fork, ids[start:end]) for fork, ids in zip(forks, own, strict=True)]
        for index, part in enumerate(step(decoder, cache, batch)):
            logits[index].append(part)
        cache.check()
    for point, ids, parts in zip(FORK_POINTS, own, logits, strict=True):
        wanted = plain(load(ISAS[0], 1), base[:point] + ids)[point:]
        assert same_bits(np.concatenate(parts), wanted), point
    trunk.truncate(300)
    again = extend(decoder, cache, trunk, base[300:])
    assert same_bits(again, plain(load(ISAS[0], 1), base)[300:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("prefill", [2, 9, 10, 40])
def test_prefill_and_decode_rows_share_a_step(load, isa, prefill):
    """With the seven others that makes 9 rows, 16 and 17 (where the schedule changes), and 47."""
    decoder = load(isa, 2)
    cache = new_cache(decoder)
    lengths = (290, 3, 16, 63, 64, 256, 257, 270)
    batch, wanted = [], []
    for index, length in enumerate(lengths):
        ids = tokens(length + (prefill if index == 0 else 1), seed=50 + index)
        context = cache.new_context()
        extend(decoder, cache, context, ids[:length])
        batch.append((context, ids[length:]))
        wanted.append(plain(load(ISAS[0], 1), ids)[length:])
    logits = step(decoder, cache, batch)
    assert [same_bits(a, b) for a, b in zip(logits, wanted, strict=True)] == [True] * len(batch)


@pytest.mark.parametrize(("source", "target"), [(16, 128), (128, 64), (64, 16)])
def test_rows_moved_to_other_pages_and_another_set_continue_exactly(load, source, target):
    ids, cut = tokens(300, seed=60), 277
    first, second = load(ISAS[0], 2), load(ISAS[-1], 1)
    before, after = new_cache(first, source), new_cache(second, target)
    context, restored = before.new_context(), after.new_context()
    extend(first, before, context, ids[:cut])
    rows = first.kernels.export_rows(before.store.slabs, context.page_ids, 0, cut)
    restored.reserve(cut)
    second.kernels.import_rows(after.store.slabs, restored.page_ids, 0, rows)
    restored.commit(ids[:cut])
    logits = extend(second, after, restored, ids[cut:])
    assert same_bits(logits, plain(load(ISAS[0], 1), ids)[cut:])


# --- what else lives in the process --------------------


def digest_of_a_run(folder):
    """SHA-256 over the logits, samples and sums of a fresh tiny model, loading included."""
    decoder = load_tiny(folder, TinyConfig(rope="yarn"), Format.Q4_1, cpu_kernels(ISAS[0], 2))
    digest = hashlib.sha256()
    logits = plain(decoder, tokens(300, seed=70))
    digest.update(logits.tobytes())
    for row in logits[:32]:
        digest.update(struct.pack("<d", log_sum_exp(row)))
        for uniform in (0.0, 0.3, 0.77, 0.999):
            options = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
            digest.update(struct.pack("<i", sample(row, **options, uniform=uniform)))
    return digest.hexdigest()


DIGEST_SCRIPT = """
import json, pathlib, sys
import numpy as np
from numpy._core import _multiarray_umath as umath
from tests.model.test_exactness import digest_of_a_run
features = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__[name]]
print(json.dumps([features, digest_of_a_run(pathlib.Path(sys.argv[1]))]))
"""


def test_numpy_without_its_cpu_features_changes_no_bit(tmp_path, monkeypatch):
    def run():
        command = [sys.executable, "-c", DIGEST_SCRIPT, str(tmp_path)]
        return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)

    features, digest = run()
    assert digest == digest_of_a_run(tmp_path)
    if features:  # a processor without any has nothing to disable
        monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", " ".join(features))
        assert run() == [[], digest]


FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000, "arm64": 0x400000}[platform.machine()]
# Where fenv_t holds the control word, and its bits that flush subnormals to zero.
FLUSHING = {
    ("Linux", "x86_64"): (28, 0x8040),
    ("Linux", "aarch64"): (0, 1 << 24),
    ("Darwin", "arm64"): (8, 1 << 24),
    ("Darwin", "x86_64"): (4, 0x8040),
}[platform.system(), platform.machine()]


@contextlib.contextmanager
def rounding_upward():
    libc = ctypes.CDLL(None)
    assert libc.fesetround(FE_UPWARD) == 0
    try:
        yield
        assert libc.fegetround() == FE_UPWARD, "the caller's rounding mode was not given back"
    finally:
        libc.fesetround(0)


@contextlib.contextmanager
def flushing_subnormals():
    libc = ctypes.CDLL(None)
    saved = ctypes.create_string_buffer(64)
    libc.fegetenv(saved)
    offset, bits = FLUSHING
    flushing = bytearray(saved.raw)
    (control,) = struct.unpack_from("<I", flushing, offset)
    struct.pack_into("<I", flushing, offset, control | bits)
    libc.fesetenv(bytes(flushing))
    try:
        yield
    finally:
        libc.fesetenv(saved)


@pytest.mark.parametrize("isa", ISAS)
def test_the_callers_rounding_mode_changes_no_logit(tmp_path, isa):
    ids = tokens(300, seed=71)
    wanted = plain(load_tiny(tmp_path, TinyConfig(), Format.Q4_1, cpu_kernels(isa, 2)), ids)
    with rounding_upward():
        kernels = cpu_kernels(isa, 2)  # its threads inherit the mode
    decoder = load_tiny(tmp_path, TinyConfig(), Format.Q4_1, kernels)
    with rounding_upward():
        found = plain(decoder, ids)
    assert same_bits(found, wanted)


@pytest.mark.parametrize("isa", ISAS)
def test_the_callers_rounding_mode_changes_no_sample(isa):
    logits = np.array(tokens(271, seed=72), dtype=np.float32) / np.float32(37)

    def everything():
        options = {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
        drawn = [sample(logits, **options, uniform=number / 64) for number in range(64)]
        return drawn, log_sum_exp(logits), _cpu.log(0.3), _cpu.rope_frequencies(32, 10000.0)

    with instruction_set(isa):
        wanted = everything()
        with rounding_upward():
            found = everything()
    assert found == wanted


@pytest.mark.parametrize("isa", ISAS)
def test_the_caller_flushing_subnormals_changes_no_logit(tmp_path, isa):
    config, ids = TinyConfig(), tokens(20, seed=73)
    tensors = tiny_tensors(config)
    head = tensors["output.weight"]
    tiny = np.frombuffer(head.data, "<f4").reshape(head.shape) * np.float32(2.0**-125)
    path = tmp_path / "subnormal.gguf"
    write_gguf(path, tiny_metadata(config), tensors | {"output.weight": float_tensor(tiny)})

    def run():
        with open_gguf(path) as file:
            return plain(Decoder(file, cpu_kernels(isa, 2)), ids)

    wanted = run()
    assert np.count_nonzero(wanted) > wanted.size / 2
    assert np.abs(wanted).max() < np.finfo(np.float32).tiny * 16
    with flushing_subnormals():
        found = run()
    assert same_bits(found, wanted)


# --- the default model --------------------


@pytest.mark.model
def test_the_default_model_is_exact(default_model_path):
    """290 tokens on the fast sets; the scalar set is too slow for more than a few."""
    with open_gguf(default_model_path) as file:
        decoders = {
            (isa, threads): Decoder(file, cpu_kernels(isa, threads))
            for isa, threads in [(ISAS[0], 2), (ISAS[0], 1), (ISAS[-2], 3), (ISAS[-1], 2)]
        }
    ids = [1 + number * 7919 % 49000 for number in range(290)]
    best = decoders[ISAS[0], 2]
    wanted = plain(best, ids)
    cases = [
        ((ISAS[0], 1), 64, 16, 290),
        ((ISAS[-2], 3), None, 128, 290),
        ((ISAS[0], 2), 7, 64, 290),
        ((ISAS[0], 2), 1, 128, 64),
        ((ISAS[-1], 2), 5, 64, 12),
    ]
    for key, chunk, page_tokens, count in cases:
        cache = new_cache(decoders[key], page_tokens)
        logits = extend(decoders[key], cache, cache.new_context(), ids[:count], chunk)
        assert same_bits(logits, wanted[:count]), (key, chunk, page_tokens)
    cache = new_cache(best)
    trunk = cache.new_context()
    extend(best, cache, trunk, ids[:257])
    forks = [trunk.fork() for _ in range(8)]
    forks[0].truncate(256)
    forks[1].truncate(192)
    batch = [(fork, ids[fork.length : fork.length + 1]) for fork in forks]
    for (fork, _), logits in zip(batch, step(best, cache, batch), strict=True):
        assert same_bits(logits, wanted[fork.length - 1 : fork.length])
