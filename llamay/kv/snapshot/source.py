"""An open snapshot file: sizes checked before allocating, chunks verified."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from llamay.errors import SnapshotError, SnapshotKeyError
from llamay.kv.snapshot.encryption import Cipher, Key, open_encryption
from llamay.kv.snapshot.format import (
    DIGEST_BYTES,
    LEGACY_VERSION,
    PREAMBLE_BYTES,
    damaged,
    decode_header,
    decode_preamble,
    digest,
)
from llamay.kv.snapshot.parallel import cores, page_buffer, share_out
from llamay.mlx_kernels import ByteArray, Float32Array


class Source:
    """A file whose header and size are as they should be; made by `open_source`.

    bytes: its size
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self.bytes = os.fstat(descriptor).st_size
        start = self._read(0, min(PREAMBLE_BYTES, self.bytes))
        version, header_bytes = decode_preamble(path, start)
        self._body = PREAMBLE_BYTES + header_bytes
        self._preamble = self._read(0, self._body)
        self._digests: list[bytes] = []
        if version == LEGACY_VERSION:
            self.header = decode_header(path, version, self._preamble[PREAMBLE_BYTES:])
            self._check_size(0)
        else:
            self._read_digests(version)

    def _read_digests(self, version: int) -> None:
        """Verifies the header and the chunks' digests, and sets `header`."""
        stored = self._read(self._body, DIGEST_BYTES)
        if stored != digest(self._preamble):
            raise damaged(self._path, "the header's digest differs")
        self.header = decode_header(self._path, version, self._preamble[PREAMBLE_BYTES:])
        self._body += DIGEST_BYTES
        count = self.header.chunk_count
        self._check_size((count + 1) * DIGEST_BYTES)
        table = self._read(self._body + self.header.body_bytes, count * DIGEST_BYTES)
        over_all = self._read(self.bytes - DIGEST_BYTES, DIGEST_BYTES)
        if over_all != digest(self._preamble, stored, table):
            raise damaged(self._path, "the digest over all differs")
        self._digests = [table[i : i + DIGEST_BYTES] for i in range(0, len(table), DIGEST_BYTES)]

    def _check_size(self, digest_bytes: int) -> None:
        expected = self._body + self.header.body_bytes + digest_bytes
        if expected != self.bytes:
            raise damaged(
                self._path, f"expected {expected} bytes by its header, found {self.bytes}"
            )

    def unlock(self, key: Key | None) -> Cipher | None:
        """The cipher of an encrypted file, None for another.

        Raises SnapshotKeyError if the key is missing, wrong or has nothing to open: who gives a key
        relies on what it authenticates.
        """
        if self.header.encryption is not None:
            return open_encryption(self._path, self.header.encryption, key)
        if key is not None:
            raise SnapshotKeyError(
                f"{self._path}: the snapshot is not encrypted, and a key was given; leave it out"
            )
        return None

    def head(self, cipher: Cipher | None) -> tuple[list[int], Float32Array | None]:
        """The tokens and the last logits."""
        header = self.header
        data = self.chunk(0, cipher)
        tokens = data[: 4 * header.tokens].view("<i4")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < header.vocab_size:
            raise damaged(self._path, f"it has tokens outside 0 to {header.vocab_size - 1}")
        if not header.logits:
            return tokens.tolist(), None
        logits = data[4 * header.tokens :].view("<f4").astype(np.float32)
        if not np.isfinite(logits).all():
            raise damaged(self._path, "it has logits that are not finite")
        return tokens.tolist(), logits

    def each_chunk(
        self,
        cipher: Cipher | None,
        chunks: range,
        take: Callable[[int, ByteArray], object],
        threads: int,
    ) -> None:
        """Gives chunks of rows, read, verified and decrypted, to `take`: index and [bytes].

        With several threads, each gives those that it has read, in no order.
        """

        def work(items: Iterator[int]) -> None:
            buffer = page_buffer(self.header.chunk_bytes(1))
            for chunk in items:
                take(chunk, self.chunk(chunk, cipher, buffer))

        share_out(chunks, threads, work)

    def verify(self, cipher: Cipher | None) -> None:
        """Reads and verifies all; with a cipher or without encryption, tokens and logits too."""
        if cipher or not self.header.encryption:
            self.head(cipher)
        else:
            self.chunk(0, None)
        rows = range(1, self.header.chunk_count)
        self.each_chunk(cipher, rows, lambda chunk, data: None, cores())

    def chunk(
        self, chunk: int, cipher: Cipher | None, buffer: ByteArray | None = None
    ) -> ByteArray:
        """Reads a chunk, into `buffer` if there is one, verifies and decrypts it."""
        size = self.header.chunk_bytes(chunk)
        buffer = page_buffer(size) if buffer is None else buffer[:size]
        self._read_into(buffer.data, self._body + self.header.chunk_offset(chunk))
        if self._digests and self._digests[chunk] != digest(buffer.data):
            raise damaged(self._path, f"the digest of chunk {chunk} differs")
        if cipher is None:
            return buffer
        count = self.header.chunk_count
        return np.frombuffer(
            cipher.decrypt(self._path, self._preamble, chunk, count, buffer.data),
            dtype=np.uint8,
        )

    def _read(self, offset: int, size: int) -> bytes:
        if offset + size > self.bytes:
            raise damaged(self._path, f"expected {offset + size} bytes or more, found {self.bytes}")
        data = bytearray(size)
        self._read_into(memoryview(data), offset)
        return bytes(data)

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        while buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise _unreadable(self._path, error) from error
            if count == 0:
                raise damaged(self._path, "it became shorter while it was read")
            buffer, offset = buffer[count:], offset + count


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """The snapshot at `path`, its header and size checked.

    Raises SnapshotError if it cannot be read, SnapshotCorruptError or SnapshotVersionError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SnapshotError(f"{path}: expected a snapshot file, found something else")
        yield Source(path, descriptor)
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: OSError) -> SnapshotError:
    return SnapshotError(f"{path}: the snapshot cannot be read ({error.strerror}); check the path")
