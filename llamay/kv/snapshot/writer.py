"""Writes a context to a file, its rows exported, digested and written by several threads."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from llamay.formats import KVPrecision
from llamay.kv.context import Context
from llamay.kv.snapshot import numerics
from llamay.kv.snapshot.encryption import Key, new_encryption
from llamay.kv.snapshot.files import Bytes, NewFile, new_file
from llamay.kv.snapshot.format import (
    DIGEST_BYTES,
    WHOLE_VERSION,
    Header,
    Identity,
    chunk_positions,
    digest,
    encode_head,
    encode_header,
    llamay_version,
)
from llamay.kv.snapshot.parallel import page_buffer, row_threads, share_out
from llamay.mlx_kernels import ByteArray, Float32Array, convert_rows

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

        file = write_file(path, header, head, export, key, row_threads(context))
    return SnapshotInfo(
        file.bytes, time.perf_counter() - start - file.fsync_seconds, file.fsync_seconds
    )


def write_file(
    path: Path, header: Header, head: bytes, export: Export, key: Key | None, threads: int
) -> NewFile:
    """Writes a whole file; the header's encryption is set from `key`.

    head: tokens and logits; threads: that call `export`, in no order
    """
    cipher = None
    if key is not None:
        encryption, cipher = new_encryption(key)
        header = replace(header, encryption=encryption)
    preamble = encode_header(header)
    preamble_digest = digest(preamble)
    body, count = len(preamble) + DIGEST_BYTES, header.chunk_count
    end = body + header.body_bytes
    digests = [b""] * count
    with new_file(path) as file:
        file.allocate(end + (count + 1) * DIGEST_BYTES)
        file.write(preamble + preamble_digest, 0)

        def write(chunk: int, data: Bytes) -> None:
            if cipher:
                data = cipher.encrypt(preamble, chunk, count, data)
            digests[chunk] = digest(data)  # while it is in this core's cache
            file.write(data, body + header.chunk_offset(chunk))

        def work(chunks: Iterator[int]) -> None:
            buffer = page_buffer(header.chunk_positions * header.row_bytes)
            for chunk in chunks:
                start, end = header.positions(chunk)
                out = buffer[: (end - start) * header.row_bytes].reshape(end - start, -1)
                write(chunk, export(start, end, out).data.cast("B"))

        write(0, head)
        share_out(range(1, count), threads, work)
        table = b"".join(digests)
        file.write(table + digest(preamble, preamble_digest, table), end)
    return file


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
        chunk_positions=chunk_positions(replace(layout, precision=precision)),
        owner="",
        marking="",
        encryption=None,
    )
