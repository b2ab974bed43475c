"""Checks the promise of exactness on a model, row by row.

Each check computes the same tokens in two ways, each in a cache of its own, and compares the logits
of the last positions. Only a difference of exactly 0 passes. What is lossy by choice (vq8, q8) is
measured instead, as probability mass moved: half the sum of |p - q|, averaged over positions.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamay.engine import Engine, Model
from llamay.errors import UsageError
from llamay.formats import KVPrecision
from llamay.kv import Cache, Context
from llamay.mlx_kernels import Control, Float32Array, numerics_id
from llamay.mlx_kernels.cpu import CpuKernels, kernel_set_names
from llamay.model.decoder import Decoder, Rows
from llamay.session import Session, Settings

WATCHED = 64  # positions whose logits are compared
MASS_BOUND = 0.05
TOKENS = 320  # crosses a run of 256 positions, and pages of 16, 64 and 128
SAMPLES = (
    "A context is a value: it can be forked, matched, written to disk and resumed.",
    "naïve café, Straße, Ελληνικά, русский, 日本語, 한국어, العربية",
    "emoji 👩‍👩‍👧 and 🏳️‍🌈, and a tab\tand  two spaces",
    "def f(x):\n    return {'a': [1, 2, 3]}[x]  # 3.14e-10\n\n\n",
    "don't DON'T we'll I've 12345678 0x7fff",
    " leading space and trailing space ",
    "<|im_start|> is text here, and so is </s>",
)
_SESSION_SETTINGS = Settings(temperature=0, max_tokens=WATCHED)


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table: `difference` is the largest logit difference, or the mass moved."""

    check: str
    result: Literal["pass", "fail", "note"]
    difference: float | None
    detail: str


def run_checks(engine: Engine, tokens: int = TOKENS) -> Iterator[Check]:
    """Every check, in order, as each is done.

    tokens: how many are computed, from 2 * WATCHED; the context's size bounds it
    Raises UsageError if the context is too small.
    """
    if engine.context_size < 2 * WATCHED:
        raise UsageError(
            f"ctx-size: expected {2 * WATCHED} tokens or more to compare, "
            f"found {engine.context_size}"
        )
    if replaced := engine.model.decoder.kernels.replaced:
        found = "; ".join(f"{name}: {reason}" for name, reason in replaced.items())
        yield Check("kernels work here", "fail", None, found)
    checks = engine.call(lambda: _Checks(engine, tokens))
    for run in (
        checks.decode,
        checks.chunks,
        checks.batch,
        checks.threads,
        checks.page_size,
        checks.instruction_set,
        checks.fork,
        checks.prefix_hit,
        checks.snapshot,
        checks.session,
        checks.vq8,
        checks.q8,
        checks.teeth,
        checks.tokenizer,
    ):
        # A session waits for engines of its own.
        yield run() if run == checks.session else engine.call(run)


class _Checks:
    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine = engine
        self._model = engine.model
        self._decoder = engine.model.decoder
        self._page_tokens = engine.cache.store.layout.page_tokens
        self._precision = engine.cache.store.layout.precision
        self._ids = _sample_ids(engine.model, min(tokens, engine.context_size))
        self._baseline = self._logits(self._decoder)
        self._full_precision = (
            self._baseline
            if self._precision is KVPrecision.F32
            else self._logits(self._decoder, precision=KVPrecision.F32)
        )

    # --- exact rows ---

    def decode(self) -> Check:
        return self._exact("prefill == decode", self._logits(self._decoder, chunk=1))

    def chunks(self) -> Check:
        sizes = (7, 64)
        found = [self._logits(self._decoder, chunk=size) for size in sizes]
        return self._exact("chunked prefill", *found, detail=f"chunks of {_listed(sizes)}")

    def batch(self) -> Check:
        """The watched tokens, one a step, beside seven contexts of other lengths and tokens."""
        cache = self._cache()
        head, tail = self._ids[:-WATCHED], self._ids[-WATCHED:]
        context = cache.new_context()
        rows = [self._step(cache, context, head)[-1:]]
        others = [cache.new_context() for _ in range(7)]
        for index, other in enumerate(others):
            self._step(cache, other, self._ids[index : 20 * (index + 1)])
        for position, token in enumerate(tail[:-1]):
            batch = [Rows(other, [self._ids[position]]) for other in others]
            batch.insert(position % 8, Rows(context, [token]))
            logits = self._decoder.forward(cache, batch, Control())
            rows.append(logits[position % 8][None])
        return self._exact(
            "batch invariant", np.concatenate(rows), against=self._shifted(), detail="8 contexts"
        )

    def threads(self) -> Check:
        if not isinstance(self._decoder.kernels, CpuKernels):
            return Check("thread-count invariant", "note", None, "no threads to choose here")
        counts = (1, 2, 4)
        found = [self._with_kernels(CpuKernels(threads=count)) for count in counts]
        return self._exact("thread-count invariant", *found, detail=f"{_listed(counts)} threads")

    def page_size(self) -> Check:
        sizes = (16, 64, 128)
        found = [self._logits(self._decoder, page_tokens=size) for size in sizes]
        return self._exact("page-size invariant", *found, detail=f"pages of {_listed(sizes)}")

    def instruction_set(self) -> Check:
        if not isinstance(self._decoder.kernels, CpuKernels):
            return Check("instruction-set invariant", "note", None, "CPU kernels only")
        names = kernel_set_names()
        found = [self._with_kernels(CpuKernels(kernel_set=name)) for name in names]
        return self._exact("instruction-set invariant", *found, detail=_listed(names))

    def fork(self) -> Check:
        """Parent and fork write different tokens to the same positions of a page, in turns."""
        cache, ids, end = self._cache(), self._ids, len(self._ids) - 1
        split = (end - WATCHED // 2) // 16 * 16 - 3  # within a page, whatever its size
        parent = cache.new_context()
        rows = [self._step(cache, parent, ids[:split], logits=split - end + WATCHED)]
        child = parent.fork()
        rows.append(self._step(cache, child, ids[split : split + 16], logits=16))
        self._step(cache, parent, ids[: end - split])
        rows.append(self._step(cache, child, ids[split + 16 : end], logits=end - split - 16))
        return self._exact("fork is exact", np.concatenate(rows), against=self._shifted())

    def prefix_hit(self) -> Check:
        cache = self._cache()
        context = cache.new_context()
        shared = len(self._ids) - WATCHED
        others = [(token + 1) % self._decoder.vocab_size for token in self._ids[shared:][:10]]
        self._step(cache, context, [*self._ids[:shared], *others])
        cache.retain(context)
        context.close()
        hit = cache.match(self._ids)
        detail = f"{hit.length} tokens from the tree"
        if hit.length != shared:
            return Check("prefix hit is exact", "fail", None, f"{detail}, expected {shared}")
        found = self._step(cache, hit, self._ids[shared:], logits=WATCHED)
        return self._exact("prefix hit is exact", found, detail=detail)

    def snapshot(self) -> Check:
        """Saved from one page size, resumed into another."""
        from llamay.kv.snapshot import read_snapshot, write_snapshot

        cache, other = self._cache(), self._cache(16 if self._page_tokens != 16 else 64)
        context = cache.new_context()
        self._step(cache, context, self._ids[:-WATCHED])
        identity = self._model.identity()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "verify.llamayctx"
            write_snapshot(context, path, identity)
            restored = read_snapshot(other, path, identity).context
        found = self._step(other, restored, self._ids[-WATCHED:], logits=WATCHED)
        return self._exact("snapshot resumes", found)

    def session(self) -> Check:
        """An answer that the end of its session interrupted goes on, on pages of another size."""
        name = "session resumes"
        if self._model.template is None:
            return Check(name, "note", None, "the model has no chat template")
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            with self._engine_of(self._page_tokens) as engine:
                session = Session.create(home, engine, "verify", settings=_SESSION_SETTINGS)
                _, (answer,) = session.send(SAMPLES[0])
                _wait(session, lambda: len(session.tree.node(answer).ids) >= WATCHED // 4)
                session.close()
            with self._engine_of(16 if self._page_tokens != 16 else 64) as engine:
                session = Session.open(home, "verify", engine)
                if session.tree.node(answer).state == "done":
                    _, (answer,) = session.send(SAMPLES[4])
                else:
                    session.resume(answer)
                _wait(session, lambda: session.tree.node(answer).state == "done")
                history = session.tree.history(answer)
                restored = engine.counters.restored_tokens
                found = engine.call(lambda: self._logits_after(engine.cache, history))
                session.close()
        expected = self._engine.call(lambda: self._logits_after(self._cache(), history))
        detail = f"{len(history)} tokens, {restored} of them from files"
        return self._exact(name, found, against=expected, detail=detail)

    # --- measured rows ---

    def vq8(self) -> Check:
        moved, detail = self._mass_moved(self._logits(self._decoder, precision=KVPrecision.VQ8))
        detail += "; values quantised, keys exact"
        return Check("vq8 kv cache", "pass" if moved < MASS_BOUND else "fail", moved, detail)

    def q8(self) -> Check:
        moved, detail = self._mass_moved(self._logits(self._decoder, precision=KVPrecision.Q8))
        return Check("q8 kv cache", "note", moved, f"{detail}; keys quantised too")

    def teeth(self) -> Check:
        """A cache that keeps one bit of every value must break the bound that vq8 keeps."""
        cache = self._cache(precision=KVPrecision.F32)
        context = cache.new_context()
        rows = [self._step(cache, context, self._ids[:-WATCHED])[-1:]]
        _keep_one_bit(cache, context, 0)
        for token in self._ids[-WATCHED:-1]:
            rows.append(self._step(cache, context, [token]))
            _keep_one_bit(cache, context, context.length - 1)
        moved, detail = self._mass_moved(np.concatenate(rows), self._shifted(KVPrecision.F32))
        result: Literal["pass", "fail"] = "pass" if moved > MASS_BOUND else "fail"
        return Check(
            "vq8 bound has teeth", result, moved, f"a one-bit cache {detail}, over the 5 % bound"
        )

    def tokenizer(self) -> Check:
        tokenizer = self._model.tokenizer
        wrong = sum(
            tokenizer.decode(tokenizer.encode(text), start_of_text=True) != text for text in SAMPLES
        )
        detail = f"{len(SAMPLES) - wrong} of {len(SAMPLES)} samples exact"
        return Check("tokenizer round trip", "fail" if wrong else "pass", None, detail)

    # --- parts ---

    def _cache(
        self,
        page_tokens: int | None = None,
        precision: KVPrecision | None = None,
        decoder: Decoder | None = None,
    ) -> Cache:
        decoder = decoder or self._decoder
        layout = decoder.layout(page_tokens or self._page_tokens, precision or self._precision)
        return Cache(decoder.kernels, layout, numerics=numerics_id(decoder.kernels, layout))

    def _engine_of(self, page_tokens: int) -> Engine:
        """Another engine with the same model."""
        return Engine(self._model, self._model.new_cache(page_tokens, self._precision))

    def _logits_after(self, cache: Cache, history: Sequence[int]) -> Float32Array:
        """[1, vocab] of the position after `history`; what the cache knows is not computed."""
        context = cache.match(history)
        if context.length == len(history):
            return self._decoder.last_logits(cache, context)[None]
        return self._step(cache, context, history[context.length :])[-1:]

    def _step(
        self, cache: Cache, context: Context, ids: Sequence[int], logits: int = 1
    ) -> Float32Array:
        return self._decoder.forward(cache, [Rows(context, ids, logits)], Control())

    def _logits(
        self,
        decoder: Decoder,
        chunk: int | None = None,
        page_tokens: int | None = None,
        precision: KVPrecision | None = None,
    ) -> Float32Array:
        """[WATCHED, vocab]: after each of the last tokens, computed in chunks."""
        cache = self._cache(page_tokens, precision, decoder)
        context = cache.new_context()
        watched: list[Float32Array] = []
        for start in range(0, len(self._ids), chunk or len(self._ids)):
            ids = self._ids[start : start + (chunk or len(self._ids))]
            count = max(0, min(len(ids), start + len(ids) - (len(self._ids) - WATCHED)))
            watched.append(decoder.forward(cache, [Rows(context, ids, count)], Control()))
        context.close()
        return np.concatenate(watched)

    def _with_kernels(self, kernels: CpuKernels) -> Float32Array:
        return self._logits(self._model.decoder_on(kernels))

    def _shifted(self, precision: KVPrecision | None = None) -> Float32Array:
        """[WATCHED, vocab]: after the token before each watched one, in one prefill."""
        cache = self._cache(precision=precision)
        return self._step(cache, cache.new_context(), self._ids[:-1], logits=WATCHED)

    def _exact(
        self,
        name: str,
        *found: Float32Array,
        against: Float32Array | None = None,
        detail: str = "",
    ) -> Check:
        expected = self._baseline if against is None else against
        difference = max(float(np.abs(logits - expected).max()) for logits in found)
        if not self._decoder.kernels.exact:
            return Check(name, "note", difference, "these kernels do not promise exactness")
        return Check(name, "pass" if difference == 0 else "fail", difference, detail)

    def _mass_moved(
        self, logits: Float32Array, against: Float32Array | None = None
    ) -> tuple[float, str]:
        expected = self._full_precision if against is None else against
        moved = np.abs(_softmax(logits) - _softmax(expected)).sum(axis=1) / 2
        agreed = int((logits.argmax(axis=1) == expected.argmax(axis=1)).sum())
        worst = int(moved.argmax())
        detail = (
            f"moves {moved.mean():.1%} of the probability mass over {WATCHED} positions "
            f"(worst {moved[worst]:.1%}), greedy agrees at {agreed}"
        )
        return float(moved.mean()), detail


def _wait(session: Session, condition: Callable[[], bool]) -> None:
    """Until the condition holds or no answer is under way."""
    changed = threading.Event()
    session.subscribe(lambda event: changed.set())
    while not condition() and any(
        node.state in ("queued", "reading", "writing") for node in session.tree.nodes.values()
    ):
        changed.wait(1)
        changed.clear()


def _keep_one_bit(cache: Cache, context: Context, start: int) -> None:
    """Replaces values from `start` on by their signs times their mean size; keys stay."""
    store = cache.store
    rows = store.kernels.export_rows(store.slabs, context.page_ids, start, context.length)
    layout = store.layout
    shape = (len(rows), layout.layers, 2, layout.kv_heads, layout.head_dim)
    values = rows.view(np.float32).reshape(shape)[:, :, 1]
    values[:] = np.sign(values) * np.abs(values).mean(axis=-1, keepdims=True)
    store.kernels.import_rows(store.slabs, context.page_ids, start, rows)


def _softmax(logits: Float32Array) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    weights = np.exp(shifted - shifted.max(axis=1, keepdims=True))
    mass: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return mass


def _sample_ids(model: Model, count: int) -> list[int]:
    """`count` tokens of real text."""
    text = "\n".join(SAMPLES)
    ids = model.encode_prompt(text)
    while len(ids) < count:
        ids += model.tokenizer.encode(f"\n{len(ids)}: {text}")
    return ids[:count]


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))
