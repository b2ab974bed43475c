"""Reads a snapshot into a cache, or shows one; nothing is published before all is verified."""

from dataclasses import dataclass
from pathlib import Path

from llamay.errors import (
    SnapshotCorruptError,
    SnapshotLayoutError,
    SnapshotSegmentError,
    SnapshotWeightsError,
)
from llamay.kv.cache import Cache
from llamay.kv.context import Context
from llamay.kv.snapshot import numerics
from llamay.kv.snapshot.encryption import Cipher, Key
from llamay.kv.snapshot.format import Header, Identity
from llamay.kv.snapshot.parallel import row_threads
from llamay.kv.snapshot.source import Source, open_source
from llamay.mlx_kernels import ByteArray, convert_rows


@dataclass(frozen=True, slots=True)
class Restored:
    """A context that a snapshot gave.

    exact:   whether it continues, bit for bit, what was saved
    warning: what the user should know, a sentence without a full stop, or None
    """

    context: Context
    header: Header
    exact: bool
    warning: str | None


@dataclass(frozen=True, slots=True)
class Check:
    """One row of what `show_snapshot` found; result: pass, fail or note."""

    name: str
    result: str
    detail: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A snapshot's header, its size, and what was checked."""

    header: Header
    bytes: int
    checks: tuple[Check, ...]


def read_snapshot(
    cache: Cache,
    path: Path,
    identity: Identity,
    *,
    key: Key | None = None,
    allow_legacy: bool = True,
) -> Restored:
    """A new context in `cache` that holds what the file says.

    identity:     of the model that will continue it
    allow_legacy: whether a file without digests (version 2) may be restored by layout alone
    All or nothing: on any error the cache is as it was, what it retains for `match` included.
    Raises BudgetError, SnapshotLayoutError, SnapshotWeightsError, SnapshotCorruptError,
    SnapshotVersionError, SnapshotKeyError, SnapshotSegmentError for a segment, or SnapshotError if
    the file cannot be read.
    """
    with open_source(path) as source:
        header = source.header
        if header.start:
            raise SnapshotSegmentError(
                f"{path}: expected a whole snapshot, found a segment from position {header.start} "
                "on; resume the session that it belongs to"
            )
        check_identity(path, header, cache, identity, allow_legacy)
        cipher = source.unlock(key)
        own = cache.store.layout.precision
        id_, same = numerics.restored(header.numerics, header.cache_precision, cache.numerics, own)
        context = cache.new_context(id_)
        try:
            with context.in_use():
                context.check_room(header.tokens)
                if would_forget(context, header.tokens, cache):
                    source.verify(cipher)
                _fill(context, source, cipher)
        except BaseException:
            context.close()
            raise
    exact = same and header.lossless
    warnings = [] if exact else [inexact(id_)]
    if header.weights_sha256 is None:
        warnings.insert(0, _NO_WEIGHTS.format(header.version))
    return Restored(context, header, exact, "; ".join(warnings) or None)


def _fill(context: Context, source: Source, cipher: Cipher | None) -> None:
    header = source.header
    own = context.layout.precision
    tokens, logits = source.head(cipher)
    context.reserve(header.tokens)

    def take(chunk: int, data: ByteArray) -> None:
        rows = data.reshape(-1, header.row_bytes)
        if header.precision is not own:
            rows = convert_rows(rows, header.layout(own), header.precision, own)
        context.import_rows(header.positions(chunk)[0], rows)

    source.each_chunk(cipher, range(1, header.chunk_count), take, row_threads(context))
    context.commit(tokens)
    context.logits = logits


def would_forget(context: Context, count: int, cache: Cache) -> bool:
    """Whether room for `count` more positions may need pages that nobody uses: parked, retained."""
    page_tokens = context.layout.page_tokens
    pages = -(-(context.length + count) // page_tokens) - len(context.page_ids)
    copied = context.length % page_tokens > 0
    free, _ = cache.room()
    return free is not None and pages + copied > free


def check_identity(
    path: Path, header: Header, cache: Cache, identity: Identity, allow_legacy: bool = False
) -> None:
    """Raises SnapshotLayoutError or SnapshotWeightsError for another model's file."""
    layout = cache.store.layout
    for name, expected, found in (
        ("architecture", identity.architecture, header.architecture),
        ("layers", layout.layers, header.layers),
        ("KV heads", layout.kv_heads, header.kv_heads),
        ("head size", layout.head_dim, header.head_dim),
        ("vocabulary size", identity.vocab_size, header.vocab_size),
        ("layout digest", identity.layout_sha256, header.layout_sha256),
    ):
        if expected != found:
            raise SnapshotLayoutError(
                f"{path}: the snapshot is of another kind of model: expected {name} {expected}, "
                f"found {found}; use the model that it was made with"
            )
    if header.weights_sha256 is None and not allow_legacy:
        raise SnapshotWeightsError(
            f"{path}: expected a snapshot of weights {identity.weights_sha256}, found version "
            f"{header.version}, which does not say; make it again"
        )
    if header.weights_sha256 not in (None, identity.weights_sha256):
        raise SnapshotWeightsError(
            f"{path}: expected a snapshot of weights {identity.weights_sha256}, found one of "
            f"{header.weights_sha256}; use the model and adapters that it was made with"
        )


def inexact(id_: str) -> str:
    """The warning for a context of this numerics id that does not continue what was saved."""
    return f"continues, not bit-exact ({id_})"


_NO_WEIGHTS = (
    "version {} does not say which weights made it: only the layout and the size were checked"
)


def show_snapshot(path: Path, *, key: Key | None = None) -> Shown:
    """What a file says and whether its bytes are whole; needs no model.

    Without its key, an encrypted file's digests are verified and its secrets are not looked at.
    Raises like `read_snapshot` if already the header or the size is wrong, or the key.
    """
    with open_source(path) as source:
        header = source.header
        cipher = source.unlock(key) if key else None
        checks = [Check("header", "pass", "complete and of the right size")]
        try:
            source.verify(cipher)
            checks.append(_verified(source))
        except SnapshotCorruptError as error:
            checks.append(Check("digests", "fail", str(error)))
        if header.encryption:
            detail = "opened with the key" if cipher else "give the key to check what it protects"
            whole = checks[-1].result == "pass"
            checks.append(Check("encryption", "pass" if cipher and whole else "note", detail))
    return Shown(header, source.bytes, tuple(checks))


def _verified(source: Source) -> Check:
    if not source.header.has_digests:
        return Check("digests", "note", f"version {source.header.version} has none")
    return Check("digests", "pass", f"{source.header.chunk_count} chunks as they were written")
