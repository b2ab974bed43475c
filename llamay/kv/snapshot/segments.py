"""Parts of contexts on disk: what branches share is stored once, and read back once.

    files of a branch     [0, 70)  [50, 90)  [90, 120)   each from where it leaves the one before
    what is used of them  [0, 50)  [50, 90)  [90, end)   less what the context holds already

The files are read and written on the calling thread; what touches pages goes through `run`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from llamay.errors import SnapshotSegmentError
from llamay.formats import KVPrecision
from llamay.kv.cache import Cache
from llamay.kv.context import Context
from llamay.kv.snapshot import numerics
from llamay.kv.snapshot.encryption import Key
from llamay.kv.snapshot.format import Identity, encode_head, version_of
from llamay.kv.snapshot.parallel import cores, row_threads
from llamay.kv.snapshot.reader import check_identity, inexact, would_forget
from llamay.kv.snapshot.source import Source, open_source
from llamay.kv.snapshot.writer import SnapshotInfo, new_header, write_file
from llamay.mlx_kernels import ByteArray, Float32Array, convert_rows

T = TypeVar("T")


class Run(Protocol):
    """Runs a function on the thread that may touch pages, and returns or raises what it does.

    It is called by several threads at once, and never by that thread.
    """

    def __call__(self, work: Callable[[], T], /) -> T: ...


@dataclass(frozen=True, slots=True)
class Extended:
    """What segments gave to a context.

    positions: how many were read; bytes: of files, as stored
    exact:     whether they continue, bit for bit, what was saved
    warning:   what the user should know, a sentence without a full stop, or None
    """

    positions: int
    bytes: int
    exact: bool
    warning: str | None


def write_segment(
    path: Path,
    identity: Identity,
    context: Context,
    start: int,
    end: int,
    *,
    parent: str = "",
    key: Key | None = None,
    logits: bool = True,
    run: Run | None = None,
) -> SnapshotInfo:
    """Writes positions [start, end) of a context to `path`, at the cache's own precision.

    parent: a name for what holds the positions before; the file carries it
    logits: whether the last logits go with it, if the context ends at `end` and has them
    run:    None lets the calling thread own the context meanwhile; otherwise the context is owned
            only within each call of `run`, one for every chunk (2 MiB), and the caller sees to it
            that positions [start, end) stay: a fork does
    With start 0 and no parent the file is a plain snapshot. Otherwise as `write_snapshot`.
    Raises ContextBusyError, SnapshotError if the file cannot be written, or ValueError for a part
    that is empty or not there.
    """
    begun = time.perf_counter()
    owned = _owned(context, run)

    def describe() -> tuple[Sequence[int], Float32Array | None]:
        last = context.logits if logits and end == context.length else None
        return context.tokens[start:end], last

    def export(begin: int, stop: int, out: ByteArray) -> ByteArray:
        return owned(lambda: context.export_rows(begin, stop, out))

    if not 0 <= start < end <= context.length:
        raise ValueError(f"no positions [{start}, {end}) in a context of {context.length}")
    with _whole(context, run):
        tokens, last = owned(describe)
        header = new_header(context, identity, context.layout.precision, len(tokens), last)
        header = replace(header, version=version_of(start, parent), start=start, parent=parent)
        head, threads = encode_head(tokens, last), _threads(context, run)
        file = write_file(path, header, head, export, key, threads)
    seconds = time.perf_counter() - begun - file.fsync_seconds
    return SnapshotInfo(file.bytes, seconds, file.fsync_seconds)


def extend_from_segments(
    cache: Cache,
    context: Context,
    paths: Sequence[Path],
    identity: Identity,
    history: Sequence[int],
    *,
    key: Key | None = None,
    run: Run | None = None,
) -> Extended:
    """Appends what the context lacks of `history`, read from the segments of its branch.

    context: of `cache`, such as `cache.match(history)` gives; what it holds is not read again
    paths:   the branch's files from its root on, each used from its own start up to the next one's;
             only those that are needed are opened, the last first
    history: the tokens that the context has in the end; the files' must be the same
    run:     None lets the calling thread own the context meanwhile; otherwise the context is owned
             only within each call of `run`, one for every chunk (2 MiB) and a few besides
    The last logits are set if the last file ends with `history` and has them. A loss that a file
    tells of becomes a mark of the context's numerics id.
    All or nothing: all that is used is verified before it is published, and on any error the
    context is as long as it was, with what the cache retains and has parked untouched by damage.
    Raises SnapshotSegmentError if the files do not continue the context as `history` does, what
    `read_snapshot` raises for each, or ValueError if the context does not begin like `history`.
    """
    length, owned = context.length, _owned(context, run)
    if list(context.tokens) != list(history[:length]):
        raise ValueError(f"the context's {length} tokens do not begin the history")
    if length == len(history):
        return Extended(0, 0, True, None)
    chain = _Chain(cache, paths, identity, history, length, key, _threads(context, run))
    with _whole(context, run):
        context.check_room(len(history) - length)
        if would_forget(context, len(history) - length, cache):
            chain.read(lambda start, rows: None)
        try:
            owned(lambda: context.reserve(len(history) - length))
            chain.read(lambda start, rows: owned(lambda: context.import_rows(start, rows)))
            owned(lambda: _publish(context, chain))
        except BaseException:
            owned(lambda: context.truncate(length))
            raise
    warning = None if chain.exact else inexact(context.numerics)
    return Extended(len(history) - length, chain.bytes, chain.exact, warning)


class _Chain:
    """The files of a branch, read from the last to the first that is needed."""

    def __init__(
        self,
        cache: Cache,
        paths: Sequence[Path],
        identity: Identity,
        history: Sequence[int],
        length: int,
        key: Key | None,
        threads: int,
    ) -> None:
        self._cache, self._paths, self._identity, self._key = cache, paths, identity, key
        self.history, self._length, self._threads = history, length, threads
        self.numerics = cache.numerics
        self.exact = True
        self.bytes = 0
        self.logits: Float32Array | None = None

    def read(self, take: Callable[[int, ByteArray], None]) -> None:
        """Verifies all that is needed and gives the rows, from a position on, to `take`.

        Leaves in the attributes what the files said.
        """
        self.bytes, end = 0, len(self.history)
        for path in reversed(self._paths):
            with open_source(path) as source:
                end = self._read_file(path, source, end, take)
            if end == self._length:
                return
        raise SnapshotSegmentError(
            f"the session's segments lack positions [{self._length}, {end}); read them anew from "
            "the text"
        )

    def _read_file(
        self, path: Path, source: Source, end: int, take: Callable[[int, ByteArray], None]
    ) -> int:
        """Reads what is needed of a file up to `end`; returns where that begins."""
        header, own = source.header, self._cache.store.layout.precision
        check_identity(path, header, self._cache, self._identity)
        if not header.start <= end <= header.end:
            raise SnapshotSegmentError(
                f"{path}: expected a segment that reaches position {end}, found positions "
                f"[{header.start}, {header.end}); use the file that its session names"
            )
        cipher = source.unlock(self._key)
        tokens, logits = source.head(cipher)
        if tokens[: end - header.start] != list(self.history[header.start : end]):
            raise SnapshotSegmentError(
                f"{path}: the segment's tokens are not the session's; use the file that its "
                "session names"
            )
        if end == len(self.history) == header.end:
            self.logits = logits
        self._remember_numerics(header.numerics, header.cache_precision, header.lossless)
        begin, first = max(header.start, self._length), header.start
        size = header.chunk_positions
        needed = range(1 + (begin - first) // size, 1 + -(-(end - first) // size))

        def take_part(chunk: int, data: ByteArray) -> None:
            start, stop = header.positions(chunk)
            rows = data.reshape(-1, header.row_bytes)
            rows = rows[max(begin - start, 0) : min(stop, end) - start]
            if header.precision is not own:
                rows = convert_rows(rows, header.layout(own), header.precision, own)
            take(max(begin, start), rows)

        source.each_chunk(cipher, needed, take_part, self._threads)
        self.bytes += sum(header.chunk_bytes(chunk) for chunk in (0, *needed))
        return begin

    def _remember_numerics(self, saved: str, precision: KVPrecision, lossless: bool) -> None:
        own = self._cache.store.layout.precision
        id_, same = numerics.restored(saved, precision, self._cache.numerics, own)
        self.numerics = numerics.joined(self.numerics, id_)
        self.exact = self.exact and same and lossless


def _publish(context: Context, chain: _Chain) -> None:
    context.commit(chain.history[context.length :])
    context.numerics = numerics.joined(context.numerics, chain.numerics)
    context.logits = chain.logits


def _threads(context: Context, run: Run | None) -> int:
    """How many threads work on chunks: with `run`, rows are moved elsewhere, one call at a time."""
    return row_threads(context) if run is None else cores()


def _owned(context: Context, run: Run | None) -> Run:
    """A way to run functions as the context's owner."""

    def owned(work: Callable[[], T], /) -> T:
        def as_owner() -> T:
            with context.in_use():
                return work()

        return work() if run is None else run(as_owner)

    return owned


def _whole(context: Context, run: Run | None) -> AbstractContextManager[None]:
    """Ownership for all the time, unless each call of `run` has its own."""
    return context.in_use() if run is None else nullcontext()
