"""Writes a context to a file, its rows exported, hashed and written at the same time."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from llamay.formats import KVPrecision
from llamay.kv.context import Context
from llamay.kv.snapshot import numerics
from llamay.kv.snapshot.encryption import Cipher, Key, new_encryption
from llamay.kv.snapshot.files import NewFile, new_file
from llamay.kv.snapshot.format import (
    WHOLE_VERSION,
    Header,
    Identity,
    chunk_positions,
    digest,
    encode_head,
    encode_header,
    llamay_version,
)
from llamay.mlx_kernels import ByteArray, Float32Array, convert_rows

BUFFERS = 4  # chunks in memory: one being filled, the others on their way to the file

# Rows of positions [start, end), in the payload's precision; written to `out` if it has their size.
Export: TypeAlias = Callable[[int, int, ByteArray], ByteArray]


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A written file; `seconds` without `fsync_seconds`, which the disk took."""

    bytes: int
    seconds: float
    fsync_seconds: float


def write_snapshot(
    context: Context,
    path: Path,
    identity: Identity,
    *,
    kv: KVPrecision | None = None,
    key: Key | None = None,
    owner: str = "",
    marking: str = "",
    logits: bool = True,
) -> SnapshotInfo:
    """Writes what the context holds to `path`; changes nothing in memory.

    kv:     precision of the payload; None is f32, which loses nothing
    logits: whether the last logits go with it, if the context has them
    The calling thread owns the context meanwhile. A file that was at `path` is replaced when the
    new one is on the disk, and stays as it was if anything fails.
    Raises ContextBusyError, or SnapshotError if the file cannot be written.
    """
    start = time.perf_counter()
    with context.in_use():
        own = context.layout.precision
        last = context.logits if logits else None
        header = new_header(context, identity, kv or KVPrecision.F32, context.length, last)
        header = replace(header, owner=owner, marking=marking)
        head = encode_head(context.tokens, last)

        def export(start: int, end: int, out: ByteArray) -> ByteArray:
            if header.precision is own:
                return context.export_rows(start, end, out)
            rows = context.export_rows(start, end)
            return convert_rows(rows, header.layout(own), own, header.precision)

        file = write_file(path, header, head, export, key)
    return SnapshotInfo(
        file.bytes, time.perf_counter() - start - file.fsync_seconds, file.fsync_seconds
    )


def write_file(path: Path, header: Header, head: bytes, export: Export, key: Key | None) -> NewFile:
    """Writes a whole file of the current version; the header's encryption is set from `key`.

    head: tokens and logits
    """
    cipher = None
    if key is not None:
        encryption, cipher = new_encryption(key)
        header = replace(header, encryption=encryption)
    preamble = encode_header(header)
    with new_file(path) as file:
        preamble_digest = digest(preamble)
        file.write(preamble + preamble_digest)
        chunks = _Chunks(file, header, preamble, cipher)
        with ThreadPoolExecutor(1, thread_name_prefix="snapshot-write") as thread:
            digests = chunks.write(thread, head, export)
        table = b"".join(digests)
        file.write(table + digest(preamble, preamble_digest, table))
    return file


class _Chunks:
    """The chunks' way into a file."""

    def __init__(
        self, file: NewFile, header: Header, preamble: bytes, cipher: Cipher | None
    ) -> None:
        self._file, self._header, self._preamble, self._cipher = file, header, preamble, cipher

    def write(self, thread: ThreadPoolExecutor, head: bytes, export: Export) -> list[bytes]:
        """Writes all on `thread`, while the next is exported on this one; returns their digests."""
        header = self._header
        digests = [self._submit(thread, 0, memoryview(head)).result()]
        rows = min(header.chunk_positions, header.tokens)
        buffers = [np.empty((rows, header.row_bytes), dtype=np.uint8) for _ in range(BUFFERS)]
        pending: deque[Future[bytes]] = deque()
        for chunk in range(1, header.chunk_count):
            if len(pending) == BUFFERS:
                digests.append(pending.popleft().result())
            start, end = header.positions(chunk)
            out = buffers[chunk % BUFFERS][: end - start]
            data = export(start, end, out)
            pending.append(self._submit(thread, chunk, data.data.cast("B")))
        return digests + [future.result() for future in pending]

    def _submit(self, thread: ThreadPoolExecutor, chunk: int, data: memoryview) -> "Future[bytes]":
        if self._cipher is None:
            # Here, where the rows are still in this core's cache.
            return thread.submit(self._append, data, digest(data))
        return thread.submit(self._append_encrypted, self._cipher, chunk, data)

    def _append(self, data: memoryview, data_digest: bytes) -> bytes:
        self._file.write(data)
        return data_digest

    def _append_encrypted(self, cipher: Cipher, chunk: int, data: memoryview) -> bytes:
        stored = cipher.encrypt(self._preamble, chunk, self._header.chunk_count, data)
        self._file.write(stored)
        return digest(stored)


def new_header(
    context: Context,
    identity: Identity,
    precision: KVPrecision,
    tokens: int,
    logits: Float32Array | None,
) -> Header:
    """The header of a plain, whole snapshot of so many of the context's tokens."""
    layout = context.layout
    lossless = numerics.holds(precision, layout.precision)
    id_ = context.numerics if lossless else numerics.marked(context.numerics, precision.value)
    return Header(
        version=WHOLE_VERSION,
        llamay=llamay_version(),
        architecture=identity.architecture,
        vocab_size=identity.vocab_size,
        layout_sha256=identity.layout_sha256,
        weights_sha256=identity.weights_sha256,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        numerics=id_,
        cache_precision=layout.precision,
        precision=precision,
        lossless=lossless,
        tokens=tokens,
        logits=0 if logits is None else identity.vocab_size,
        chunk_positions=chunk_positions(replace(layout, precision=precision).row_bytes),
        owner="",
        marking="",
        encryption=None,
    )
