"""The table of `llamay verify`: every row passes, and every row notices what it is there for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamay import verify
from llamay.engine import Engine
from llamay.engine import engine as engine_module
from llamay.errors import UsageError
from llamay.formats import KVPrecision
from llamay.kv import Cache, Context
from llamay.kv.snapshot import Extended
from llamay.mlx_kernels import ByteArray, Control, Float32Array, RunStep, Slabs, Step, StepLogits
from llamay.mlx_kernels.cpu import CpuKernels
from llamay.mlx_kernels.program import Program
from llamay.model.decoder import Decoder, Rows
from llamay.tokenizer import Tokenizer
from llamay.verify import WATCHED, Check, run_checks
from tests.tiny_models import TinyConfig, write_tiny_model

# Two chunks of 64 and a rest of 2, 66 tokens before those watched; no multiple of 7 or 16.
TOKENS = 130

EXACT_ROWS = (
    "prefill == decode",
    "chunked prefill",
    "batch invariant",
    "thread-count invariant",
    "page-size invariant",
    "instruction-set invariant",
    "fork is exact",
    "prefix hit is exact",
    "snapshot resumes",
    "session resumes",
)
OTHER_ROWS = ("vq8 kv cache", "q8 kv cache", "vq8 bound has teeth", "tokenizer round trip")

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _no_models(empty_home: Path) -> None:
    """Digests are not noted in the user's home."""


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "llama.gguf"
    write_tiny_model(path, TinyConfig())
    return path


@pytest.fixture(scope="module")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "qwen2.gguf"
    write_tiny_model(path, TinyConfig(arch="qwen2", heads=6, kv_heads=3, head_dim=32))
    return path


def table(path: Path, tokens: int = TOKENS, **options: Any) -> dict[str, Check]:
    """The rows by name, in order."""
    checks = list(run_checks(Engine.load(str(path), **options), tokens))
    assert len({check.check for check in checks}) == len(checks)
    return {check.check: check for check in checks}


@pytest.mark.parametrize("precision", KVPrecision)
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen2"])
def test_every_exact_row_is_exactly_0(
    model: str, precision: KVPrecision, request: pytest.FixtureRequest
) -> None:
    checks = table(request.getfixturevalue(model), precision=precision, page_tokens=16)
    assert tuple(checks) == EXACT_ROWS + OTHER_ROWS
    for name in EXACT_ROWS:
        assert (checks[name].result, checks[name].difference) == ("pass", 0), name
    assert [checks[name].result for name in OTHER_ROWS] == ["pass", "note", "pass", "pass"]
    moved = [checks[name].difference for name in OTHER_ROWS[:3]]
    assert moved[0] is not None
    assert moved[1] is not None
    assert moved[2] is not None
    assert 0 < moved[0] < 0.05 < moved[2] < 1
    assert 0 < moved[1] < moved[2]


@pytest.mark.parametrize("tokens", [128, 129, 144, 458])
def test_any_number_of_tokens_will_do(tiny_llama: Path, tokens: int) -> None:
    # After 458 - 64 tokens comes the first token again.
    checks = table(tiny_llama, tokens)
    assert {checks[name].result for name in EXACT_ROWS} == {"pass"}
    assert checks["prefix hit is exact"].detail == f"{tokens - WATCHED} tokens from the tree"


def test_the_context_s_size_bounds_the_tokens(tiny_llama: Path) -> None:
    checks = table(tiny_llama, 8192, context_size=128)
    assert checks["prefix hit is exact"].detail == "64 tokens from the tree"
    with pytest.raises(UsageError, match=r"ctx-size: expected 128 .* found 127"):
        table(tiny_llama, context_size=127)


def test_kernels_that_promise_nothing_get_notes(tiny_llama: Path) -> None:
    checks = table(tiny_llama, 128, device="reference")
    assert {checks[name].result for name in EXACT_ROWS} == {"note"}
    assert checks["thread-count invariant"].difference is None
    assert checks["chunked prefill"].difference is not None
    assert [checks[name].result for name in OTHER_ROWS] == ["pass", "note", "pass", "pass"]


# Faults, each on the side that one row looks at.


def next_up(values: Float32Array) -> Float32Array:
    """The next larger floats: an error of one unit in the last place."""
    return np.nextafter(values, np.float32(np.inf))


def in_forward(where: Callable[[Cache, list[Rows]], bool]) -> Patch:
    """Steps that `where` picks give logits that are off by one unit in the last place."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = Decoder.forward

        def forward(self: Decoder, cache: Cache, batch: Any, control: Control) -> Float32Array:
            logits = real(self, cache, batch, control)
            return next_up(logits) if where(cache, batch) else logits

        monkeypatch.setattr(Decoder, "forward", forward)

    return patch


def in_kernels(**wanted: object) -> Patch:
    """Kernels made with these arguments give logits that are off, in one place."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real_init, real_prepare = CpuKernels.__init__, CpuKernels.prepare
        faulty: list[CpuKernels] = []

        def init(self: CpuKernels, *arguments: Any, **given: Any) -> None:
            real_init(self, *arguments, **given)
            if given == wanted:
                faulty.append(self)

        def prepare(self: CpuKernels, program: Program) -> RunStep:
            run = real_prepare(self, program)

            def off(step: Step, slabs: Slabs, control: Control) -> StepLogits | None:
                found = run(step, slabs, control)
                assert found is not None
                row = found.logits[len(found.logits) // 2]
                row[7] = next_up(row[7])
                return found

            return off if self in faulty else run

        monkeypatch.setattr(CpuKernels, "__init__", init)
        monkeypatch.setattr(CpuKernels, "prepare", prepare)

    return patch


def without_copy_on_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "_writable", lambda self, index: None)


def fork_s_last_row_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Context.fork

    def fork(self: Context) -> Context:
        child = real(self)
        child.reserve(1)
        kernels, slabs = child._store.kernels, child._store.slabs
        rows = kernels.export_rows(slabs, child.page_ids, child.length - 1, child.length)
        kernels.import_rows(slabs, child.page_ids, child.length - 1, raised(rows))
        return child

    monkeypatch.setattr(Context, "fork", fork)


def raised(rows: ByteArray) -> ByteArray:
    """Rows of float32 values, all off by one unit in the last place."""
    return next_up(rows.view(np.float32)).view(np.uint8)


def match_gives_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Cache.match

    def match(self: Cache, tokens: Any) -> Context:
        hit, store = real(self, tokens), self.store
        rows = store.kernels.export_rows(store.slabs, hit.page_ids, 0, hit.length)
        store.kernels.import_rows(store.slabs, hit.page_ids, 0, raised(rows))
        return hit

    monkeypatch.setattr(Cache, "match", match)


def match_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "match", lambda self, tokens: self.new_context())


def match_goes_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Cache.match

    def match(self: Cache, tokens: Any) -> Context:
        return real(self, next(iter(self.retained_tokens()), tokens)[:67])

    monkeypatch.setattr(Cache, "match", match)


def restored_rows_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Context.import_rows
    monkeypatch.setattr(
        Context, "import_rows", lambda self, start, rows: real(self, start, raised(rows))
    )


def restored_rows_are_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Context.import_rows
    monkeypatch.setattr(
        Context,
        "import_rows",
        lambda self, start, rows: real(self, start, np.roll(rows, 1, axis=0).copy()),
    )


def segments_give_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine_module.extend_from_segments

    def extend(cache: Cache, context: Context, *arguments: Any, **options: Any) -> Extended:
        extended = real(cache, context, *arguments, **options)
        store = cache.store
        rows = store.kernels.export_rows(store.slabs, context.page_ids, 0, context.length)
        store.kernels.import_rows(store.slabs, context.page_ids, 0, raised(rows))
        context.logits = None
        return extended

    monkeypatch.setattr(engine_module, "extend_from_segments", extend)


def alone(count: int) -> Callable[[Cache, list[Rows]], bool]:
    """Whether a step has one context with `count` tokens."""
    return lambda cache, batch: len(batch) == 1 and len(batch[0].tokens) == count


FAULTS: list[tuple[str, str, Patch]] = [
    ("prefill == decode", "single tokens", in_forward(alone(1))),
    ("chunked prefill", "chunks of 7", in_forward(alone(7))),
    (
        "chunked prefill",
        "chunks of 64",
        in_forward(lambda cache, batch: (len(batch[0].tokens), batch[0].logits) == (64, 62)),
    ),
    ("batch invariant", "eight contexts", in_forward(lambda cache, batch: len(batch) == 8)),
    ("thread-count invariant", "one thread", in_kernels(threads=1)),
    ("thread-count invariant", "four threads", in_kernels(threads=4)),
    (
        "page-size invariant",
        "large pages",
        in_forward(lambda cache, batch: cache.store.layout.page_tokens == 128),
    ),
    ("instruction-set invariant", "scalar", in_kernels(kernel_set="scalar")),
    ("fork is exact", "a shared page is written", without_copy_on_write),
    ("fork is exact", "its last row is off", fork_s_last_row_is_off),
    ("prefix hit is exact", "rows are off", match_gives_other_rows),
    ("prefix hit is exact", "nothing is found", match_finds_nothing),
    ("prefix hit is exact", "a token too many", match_goes_too_far),
    ("snapshot resumes", "rows are off", restored_rows_are_off),
    ("snapshot resumes", "rows are displaced", restored_rows_are_one_late),
    ("session resumes", "segments give other rows", segments_give_other_rows),
]


def test_every_exact_row_has_its_fault() -> None:
    assert {row for row, _, _ in FAULTS} == set(EXACT_ROWS)


@pytest.mark.parametrize(
    ("row", "patch"), [pytest.param(row, patch, id=f"{row}: {what}") for row, what, patch in FAULTS]
)
def test_a_fault_fails_its_row_and_no_other(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, row: str, patch: Patch
) -> None:
    patch(monkeypatch)
    checks = table(tiny_llama, threads=3)
    failed = {name for name, check in checks.items() if check.result == "fail"}
    # A session rests on forks, matches and files.
    assert failed - {"session resumes"} == {row} - {"session resumes"}
    assert row in failed
    assert checks[row].difference != 0


def test_the_teeth_row_fails_when_one_bit_is_not_too_few(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_keep_one_bit", lambda *arguments: None)
    checks = table(tiny_llama, 128)
    assert [name for name, c in checks.items() if c.result == "fail"] == ["vq8 bound has teeth"]
    assert checks["vq8 bound has teeth"].difference == 0


def test_the_vq8_row_measures_the_mass_moved(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vq8 cache that knows nothing gives every token the same probability."""
    engine = Engine.load(str(tiny_llama))
    context = engine.cache.new_context()
    ids = verify._sample_ids(engine.model, TOKENS)
    logits = engine.model.decoder.forward(engine.cache, [Rows(context, ids, WATCHED)], Control())
    odds = np.exp(logits.astype(np.longdouble))
    p = odds / odds.sum(axis=1, keepdims=True)
    moved = float(np.maximum(p - 1 / p.shape[1], 0).sum(axis=1).mean())

    real = Decoder.forward

    def forward(self: Decoder, cache: Cache, batch: Any, control: Control) -> Float32Array:
        logits = real(self, cache, batch, control)
        blind = cache.store.layout.precision is KVPrecision.VQ8
        return np.zeros_like(logits) if blind else logits

    monkeypatch.setattr(Decoder, "forward", forward)
    checks = table(tiny_llama)
    assert [name for name, check in checks.items() if check.result == "fail"] == ["vq8 kv cache"]
    assert checks["vq8 kv cache"].difference == pytest.approx(moved, rel=1e-9)


def test_the_tokenizer_row_counts_the_samples(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Tokenizer.decode

    def decode(self: Tokenizer, ids: Any, **options: Any) -> str:
        return real(self, ids, **options).replace("日", "月")

    monkeypatch.setattr(Tokenizer, "decode", decode)
    row = table(tiny_llama, 128)["tokenizer round trip"]
    assert (row.result, row.detail) == ("fail", f"{len(verify.SAMPLES) - 1} of 7 samples exact")
