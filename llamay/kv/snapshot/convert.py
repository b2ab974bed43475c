"""Writes a snapshot again: in another precision, encrypted, or no longer."""

import time
from dataclasses import replace
from pathlib import Path

from llamay.errors import SnapshotWeightsError
from llamay.formats import KVPrecision
from llamay.kv.snapshot import numerics
from llamay.kv.snapshot.encryption import Key
from llamay.kv.snapshot.format import encode_head, llamay_version, version_of
from llamay.kv.snapshot.parallel import cores
from llamay.kv.snapshot.source import open_source
from llamay.kv.snapshot.writer import SnapshotInfo, write_file
from llamay.mlx_kernels import ByteArray, convert_rows


def convert_snapshot(
    path: Path,
    target: Path,
    *,
    kv: KVPrecision | None = None,
    key: Key | None = None,
    target_key: Key | None = None,
) -> SnapshotInfo:
    """Writes what the snapshot at `path` holds to `target`, which may be the same; needs no model.

    kv:  precision of the new file, None to leave it
    key: opens the old file; target_key: encrypts the new one, None writes it in the clear
    A segment stays one.
    Raises what `read_snapshot` and `write_snapshot` raise for a file; SnapshotWeightsError for
    version 2, which lacks what the current version says of the weights.
    """
    start = time.perf_counter()
    with open_source(path) as source:
        old = source.header
        if old.weights_sha256 is None:
            raise SnapshotWeightsError(
                f"{path}: version {old.version} does not say which weights made it; "
                "resume it with its model and save it again"
            )
        precision = kv or old.precision
        cipher = source.unlock(key)
        head = encode_head(*source.head(cipher))
        lossless = old.lossless and numerics.holds(precision, old.cache_precision)
        loses = not lossless and not numerics.holds(precision, old.precision)
        header = replace(
            old,
            version=version_of(old.start, old.parent),
            llamay=llamay_version(),
            numerics=numerics.marked(old.numerics, precision.value) if loses else old.numerics,
            precision=precision,
            lossless=lossless,
            encryption=None,
        )
        layout = old.layout(old.precision)

        def export(start: int, end: int, out: ByteArray) -> ByteArray:
            chunk = 1 + (start - old.start) // old.chunk_positions
            rows = source.chunk(chunk, cipher).reshape(-1, old.row_bytes)
            if precision is not old.precision:
                return convert_rows(rows, layout, old.precision, precision)
            out[:] = rows
            return out

        file = write_file(target, header, head, export, target_key, cores())
    seconds = time.perf_counter() - start - file.fsync_seconds
    return SnapshotInfo(file.bytes, seconds, file.fsync_seconds)
