"""Packed weights of large models on disk: packed by one start, mapped by those after it.

A file holds the weights of one program, for the program's source (see `Program`) and layout:

    0     8    "llamaypk"
    8     32   key: SHA-256 over version, source, and each matrix's format and shape
    40    8    bytes of the whole file, little-endian
    48    ...  zeros
    4096  ...  the matrices as csrc/pack.c writes them, each from a multiple of 64 on

A file gets its name when it is complete and on the disk, and is never changed after, only removed;
whoever has mapped it keeps it. All of this is a cache: whatever goes wrong, weights are packed
again, and the answers are the same.
"""

import fcntl
import hashlib
import json
import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamay.formats import Tensor

VERSION = 1  # of what csrc/pack.c writes, and of the file
MAGIC = b"llamaypk"
HEADER_BYTES = 4096
WRITE_BYTES = 16 << 20
SUFFIX, TEMPORARY = ".packed", ".tmp"


def packed_key(source: str, tensors: Sequence[Tensor]) -> str:
    """What a file of these matrices is called; hex."""
    matrices = [(tensor.format.type_id, tensor.rows, tensor.columns) for tensor in tensors]
    return hashlib.sha256(json.dumps([VERSION, source, matrices]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PackedFolder:
    """A folder of packed weights; several processes may use it.

    min_bytes: smaller models are packed as fast as they could be mapped
    max_bytes: beyond it, what was used least recently is removed
    """

    folder: Path
    min_bytes: int = 256 << 20
    max_bytes: int = 16 << 30

    def takes(self, size: int) -> bool:
        """Whether weights of this size are kept here."""
        return self.min_bytes <= size <= self.max_bytes - HEADER_BYTES

    def load(self, key: str, size: int) -> memoryview | None:
        """The weights of that key, mapped read-only, or None if they are not here complete."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != HEADER_BYTES + size:
                    return None
                if file.read(HEADER_BYTES) != _header(key, size):
                    return None
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with suppress(OSError):
                os.utime(path)  # the time of use, by which files are removed
        except OSError:
            return None
        if hasattr(mmap, "MADV_WILLNEED"):
            mapped.madvise(mmap.MADV_WILLNEED)
        return memoryview(mapped)[HEADER_BYTES:]

    def keep(self, key: str, weights: memoryview) -> threading.Thread:
        """Starts writing weights, which must not change; a thread that no exit waits for."""
        thread = threading.Thread(
            target=self._store, args=(key, weights), name="packed weights", daemon=True
        )
        thread.start()
        return thread

    def _store(self, key: str, weights: memoryview) -> None:
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Half of what is free stays free.
            if shutil.disk_usage(self.folder).free < 2 * (HEADER_BYTES + weights.nbytes):
                return
            temporary = self._path(key).with_suffix(TEMPORARY)
            descriptor = _locked(temporary)
            if descriptor is None:
                return  # another process is writing the same
            try:
                with suppress(OSError):
                    _write(descriptor, key, weights)
                    temporary.rename(self._path(key))
            finally:
                os.close(descriptor)
            self._tidy(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / (key + SUFFIX)

    def _tidy(self, newest: Path) -> None:
        """Removes temporaries that nobody writes any more, and files beyond `max_bytes`."""
        for temporary in self.folder.glob("*" + TEMPORARY):
            descriptor = _locked(temporary)
            if descriptor is not None:
                temporary.unlink(missing_ok=True)
                os.close(descriptor)
        found = []
        for path in self.folder.glob("*" + SUFFIX):
            with suppress(FileNotFoundError):
                stat = path.stat()
                found.append((path != newest, -stat.st_mtime_ns, stat.st_size, path))
        total = 0
        for _, _, size, path in sorted(found):
            total += size
            if total > self.max_bytes:
                path.unlink(missing_ok=True)


def _header(key: str, size: int) -> bytes:
    total = (HEADER_BYTES + size).to_bytes(8, "little")
    return (MAGIC + bytes.fromhex(key) + total).ljust(HEADER_BYTES, b"\0")


def _locked(path: Path) -> int | None:
    """A descriptor of the file, made if need be, locked; None if another process writes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held the lock may have given the file its name, and nobody may change it then.
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _write(descriptor: int, key: str, weights: memoryview) -> None:
    os.ftruncate(descriptor, 0)
    for part in (memoryview(_header(key, weights.nbytes)), weights):
        for start in range(0, part.nbytes, WRITE_BYTES):
            left = part[start : start + WRITE_BYTES]
            while left:
                left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
