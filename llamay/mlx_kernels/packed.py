"""Packed weights of large models on disk: packed by one start, mapped by those after it.

A file holds the weights of one program, for the program's source (see `Program`) and layout:

    0     8    "llamaypk"
    8     32   key: SHA-256 over version, source, and each matrix's format and shape
    40    8    bytes of the whole file, little-endian
    48    ...  zeros
    4096  ...  the matrices as csrc/pack.c writes them, each from a multiple of 64 on
    ...   16   XXH3 of 128 bits over each 16 MiB of the matrices; the last may be shorter

A file gets its name when it is complete and on the disk, and is never changed after, only removed;
whoever has mapped it keeps it. All digests are verified whenever a file is mapped. What a process
could not finish before it ended, the next one that packs the same continues. All of this is a
cache: whatever goes wrong, weights are packed again, and the answers are the same.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from llamay.formats import Tensor

VERSION = 2  # of what csrc/pack.c writes, and of the file
MAGIC = b"llamaypk"
HEADER_BYTES = 4096
CHUNK_BYTES = 16 << 20  # that are written, and have a digest, together
DIGEST_BYTES = 16
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
        return size >= self.min_bytes and _file_bytes(size) <= self.max_bytes

    def load(self, key: str, size: int, threads: int) -> memoryview | None:
        """The weights of that key, mapped read-only, or None if they are not here unharmed.

        A damaged file is removed. threads: how many may verify
        """
        path = self._path(key)
        with suppress(OSError):
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == _file_bytes(size):
                    mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                    if _is_whole(mapped, key, size, threads):
                        with suppress(OSError):
                            os.utime(path)  # the time of use, by which files are removed
                        return mapped[HEADER_BYTES : HEADER_BYTES + size]
            path.unlink()
        return None

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
            temporary = self._path(key).with_suffix(TEMPORARY)
            descriptor = _locked(temporary)
            if descriptor is None:
                return  # another process is writing the same
            try:
                self._remove_abandoned()
                # Half of what is free stays free, the same if a part is written already.
                free = shutil.disk_usage(self.folder).free + os.fstat(descriptor).st_size
                if free < 2 * _file_bytes(weights.nbytes):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                _write(descriptor, key, weights)
                temporary.rename(self._path(key))
            except OSError:
                temporary.unlink(missing_ok=True)
                return
            finally:
                os.close(descriptor)
            self._remove_unused(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / (key + SUFFIX)

    def _remove_abandoned(self) -> None:
        """Removes temporaries that nobody writes any more."""
        for temporary in self.folder.glob("*" + TEMPORARY):
            descriptor = _locked(temporary)
            if descriptor is not None:
                temporary.unlink(missing_ok=True)
                os.close(descriptor)

    def _remove_unused(self, newest: Path) -> None:
        """Removes what was used least recently, beyond `max_bytes`."""
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


def _file_bytes(size: int) -> int:
    """Bytes of a file with so many bytes of weights."""
    return HEADER_BYTES + size + -(-size // CHUNK_BYTES) * DIGEST_BYTES


def _header(key: str, size: int) -> bytes:
    total = _file_bytes(size).to_bytes(8, "little")
    return (MAGIC + bytes.fromhex(key) + total).ljust(HEADER_BYTES, b"\0")


def _chunks(weights: memoryview) -> Iterator[memoryview]:
    for start in range(0, weights.nbytes, CHUNK_BYTES):
        yield weights[start : start + CHUNK_BYTES]


def _file_parts(key: str, weights: memoryview) -> Iterator[bytes | memoryview]:
    """What a file holds, in order."""
    yield _header(key, weights.nbytes)
    digests = []
    for chunk in _chunks(weights):
        digests.append(xxhash.xxh3_128_digest(chunk))
        yield chunk
    yield b"".join(digests)


def _is_whole(mapped: memoryview, key: str, size: int, threads: int) -> bool:
    """Whether a file of the right size holds what was written to it."""
    if mapped[:HEADER_BYTES] != _header(key, size):
        return False
    weights, digests = mapped[HEADER_BYTES:][:size], mapped[HEADER_BYTES + size :]
    with ThreadPoolExecutor(threads) as executor:
        return b"".join(executor.map(xxhash.xxh3_128_digest, _chunks(weights))) == digests


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
    """Writes what is not there yet: the same weights are packed to the same bytes by all."""
    done = os.lseek(descriptor, 0, os.SEEK_END)
    for part in _file_parts(key, weights):
        left = memoryview(part)[done:]
        done = max(0, done - len(part))
        while left:
            left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
