"""The snapshot file: one context, position-major, independent of the page size that held it.

A segment is a snapshot of positions [s, s + n) only, which needs others for those before; a whole
one has s = 0. Little-endian. H bytes of header, n tokens, v logits, c positions a chunk, k chunks:

    OFFSET   SIZE   FIELD
    0        8      magic "LLAMAYCX"
    8        2      version: 3, or 4 if s > 0 or there is a parent
    10       2      version of the oldest reader that can read the file: the same
    12       4      H, at most 65536
    16       H      header: a JSON object in ASCII, see `Header`; spaces after it put chunk 1 at a
                    multiple of 64 bytes
    16 + H   16     digest of everything before
    32 + H   ...    chunk 0: n tokens int32, then v logits float32 of the last position, or none
    ...      ...    chunk i: rows of positions s + [(i - 1) c, i c), the last chunk up to s + n;
                    k = 1 + n/c rounded up
    ...      16 k   digest of each chunk, as stored
    ...      16     digest of [0, 32 + H) and the chunks' digests, so of everything

A row is what kernel sets exchange, in the precision that the header names:

    [layer][key, value][kv head] of  f32  float32 [head_dim]
                                     f16  float16 [head_dim]
                                     vq8  keys as f32, values as q8
                                     q8   float32 scale, int8 [head_dim]

Digests are XXH3 of 128 bits in canonical form; they guard against damage, not against intent.
Encrypted, a chunk is AES-256-GCM ciphertext and its tag of 16 bytes; see `encryption`.

Version 3 has no `start` and no `parent` in its header, which are then 0 and "". Version 2 is the
same without the digests and the header's `weights_sha256`, and never encrypted.
"""

import importlib.metadata
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llamay.errors import SnapshotCorruptError, SnapshotError, SnapshotVersionError
from llamay.formats import KVLayout, KVPrecision
from llamay.mlx_kernels import Float32Array

LEGACY_VERSION = 2
WHOLE_VERSION = 3
SEGMENT_VERSION = 4
VERSION = SEGMENT_VERSION  # of this reader
MAGIC = b"LLAMAYCX"
DIGEST_BYTES = 16
TAG_BYTES = 16
MAX_HEADER_BYTES = 65536
GROUP = 16  # positions that kernel sets move together: the least in a new file's chunk
# A chunk of this size is digested and moved while it is in the processor's caches.
CHUNK_BYTES = 2**21
MAX_CHUNK_BYTES = 2**26  # at f32, unless one position is larger

_PREAMBLE = struct.Struct("<8sHHI")
_MAX_CHUNK_POSITIONS = 4096
_ALIGNMENT = 64  # copies between addresses that are 16 bytes apart, modulo 4096, take long
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Identity:
    """What a context was computed by; given by whoever owns the model. Digests in lower-case hex.

    layout_sha256:  of the names and shapes of all tensors
    weights_sha256: of the weights, combined with the adapters'
    """

    architecture: str
    vocab_size: int
    layout_sha256: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Encryption:
    """How the chunks' key is found, and how their nonces begin; not secret.

    check: tells a wrong key from damage
    n, r, p: cost of scrypt; 0 for a key file
    """

    kdf: str
    salt: bytes
    nonce: bytes
    check: bytes
    n: int = 0
    r: int = 0
    p: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of its context, apart from the tokens.

    weights_sha256:  None in version 2
    layers, kv_heads, head_dim: of the rows
    numerics:        numerics id of the context, with a mark for everything lossy in its history
    cache_precision: what the context was kept at
    precision:       what the rows are stored at
    lossless:        whether the rows give back the bits that the context had
    tokens, logits:  counts; logits is the vocabulary's size or 0
    chunk_positions: positions in a chunk
    start:           the first position; more than 0 in a segment
    parent:          a segment's name for what holds the positions before; its writer's own affair
    """

    version: int
    llamay: str
    architecture: str
    vocab_size: int
    layout_sha256: str
    weights_sha256: str | None
    layers: int
    kv_heads: int
    head_dim: int
    numerics: str
    cache_precision: KVPrecision
    precision: KVPrecision
    lossless: bool
    tokens: int
    logits: int
    chunk_positions: int
    owner: str
    marking: str
    encryption: Encryption | None
    start: int = 0
    parent: str = ""

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.tokens

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        return self.layout(self.precision).row_bytes

    @property
    def chunk_count(self) -> int:
        """Chunks, the one of tokens and logits among them."""
        return 1 + -(-self.tokens // self.chunk_positions)

    @property
    def has_digests(self) -> bool:
        """Whether the file carries digests."""
        return self.version != LEGACY_VERSION

    def layout(self, precision: KVPrecision) -> KVLayout:
        """The layout of rows in a precision; its page size means nothing."""
        return KVLayout(self.layers, self.kv_heads, self.head_dim, precision=precision)

    def positions(self, chunk: int) -> tuple[int, int]:
        """The positions [start, end) of chunk 1, 2, ..."""
        start = self.start + (chunk - 1) * self.chunk_positions
        return start, min(start + self.chunk_positions, self.end)

    def chunk_bytes(self, chunk: int) -> int:
        """Bytes of a chunk as it is stored."""
        tag = TAG_BYTES if self.encryption else 0
        if chunk == 0:
            return 4 * (self.tokens + self.logits) + tag
        start, end = self.positions(chunk)
        return (end - start) * self.row_bytes + tag

    def chunk_offset(self, chunk: int) -> int:
        """Where a chunk begins, counted from the first."""
        if chunk == 0:
            return 0
        # All chunks of rows but the last have the size of the first of them.
        return self.chunk_bytes(0) + (chunk - 1) * self.chunk_bytes(1)

    @property
    def body_bytes(self) -> int:
        """Bytes of all chunks as they are stored."""
        tags = TAG_BYTES * self.chunk_count if self.encryption else 0
        return 4 * (self.tokens + self.logits) + self.tokens * self.row_bytes + tags


def digest(*parts: bytes | memoryview) -> bytes:
    """XXH3 of 128 bits over the parts in order."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def llamay_version() -> str:
    """The version of this package."""
    return importlib.metadata.version("llamay")


def version_of(start: int, parent: str) -> int:
    """The version of a new file: no higher than it must be, so that older readers can read it."""
    return SEGMENT_VERSION if start or parent else WHOLE_VERSION


def chunk_positions(layout: KVLayout) -> int:
    """How many positions a new file's chunks hold: groups of 16 that fit in 2 MiB, or one."""
    positions = min(CHUNK_BYTES // layout.row_bytes, _MAX_CHUNK_POSITIONS)
    most = MAX_CHUNK_BYTES // replace(layout, precision=KVPrecision.F32).row_bytes
    return max(1, min(positions // GROUP * GROUP or GROUP, most))


def encode_header(header: Header) -> bytes:
    """The file's bytes [0, 16 + H).

    Raises SnapshotError if owner and marking do not fit.
    """
    fields: dict[str, Any] = {
        name: getattr(header, name) for name in _FIELDS if name not in ("version", "encryption")
    }
    fields["cache_precision"] = header.cache_precision.value
    fields["precision"] = header.precision.value
    if header.version == LEGACY_VERSION:
        del fields["weights_sha256"]
    if not header.start and not header.parent:
        del fields["start"], fields["parent"]
    fields["encryption"] = None
    if header.encryption:
        encryption = {name: getattr(header.encryption, name) for name in _ENCRYPTION_FIELDS}
        for name in ("salt", "nonce", "check"):
            encryption[name] = encryption[name].hex()
        fields["encryption"] = encryption
    text = json.dumps(fields).encode("ascii")
    rows_at = _PREAMBLE.size + len(text) + DIGEST_BYTES + header.chunk_bytes(0)
    text += b" " * (-rows_at % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise SnapshotError(
            f"the snapshot's header takes {len(text)} bytes of at most {MAX_HEADER_BYTES}; "
            "shorten owner or marking"
        )
    return _PREAMBLE.pack(MAGIC, header.version, header.version, len(text)) + text


def encode_head(tokens: Sequence[int], logits: Float32Array | None) -> bytes:
    """Chunk 0, not encrypted."""
    data = np.asarray(tokens, dtype="<i4").tobytes()
    return data if logits is None else data + logits.astype("<f4").tobytes()


_FIELDS = tuple(Header.__dataclass_fields__)
_ENCRYPTION_FIELDS = tuple(Encryption.__dataclass_fields__)


def decode_preamble(path: Path, data: bytes) -> tuple[int, int]:
    """Version and header size of the file's first 16 bytes.

    Raises SnapshotCorruptError if they are not a snapshot's, SnapshotVersionError if it is newer.
    """
    if len(data) < _PREAMBLE.size or not data.startswith(MAGIC):
        raise SnapshotCorruptError(
            f"{path}: expected a snapshot, which begins with {MAGIC.decode()}, found something "
            "else or too little; check the path"
        )
    _, version, min_reader, header_bytes = _PREAMBLE.unpack_from(data)
    if min_reader > VERSION:
        raise SnapshotVersionError(
            f"{path}: the snapshot (version {version}) needs a reader of version {min_reader}, "
            f"and this one is of version {VERSION}; update llamay"
        )
    if version < LEGACY_VERSION or min_reader > version:
        raise damaged(path, f"its version says {version} for readers from {min_reader}")
    if header_bytes > MAX_HEADER_BYTES:
        raise damaged(path, f"its header claims {header_bytes} of at most {MAX_HEADER_BYTES} bytes")
    return version, header_bytes


PREAMBLE_BYTES = _PREAMBLE.size


def decode_header(path: Path, version: int, text: bytes) -> Header:
    """The header out of its JSON text; fields that it does not know are left alone.

    Raises SnapshotCorruptError if a field is missing, of another type or out of range.
    """
    try:
        fields = json.loads(text)
        return _header(version, fields)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise damaged(path, f"its header cannot be read ({error})") from None


def _header(version: int, fields: Any) -> Header:
    legacy = version == LEGACY_VERSION
    if legacy and "weights_sha256" in fields:
        raise ValueError("version 2 with a weights digest")
    if version < SEGMENT_VERSION and ("start" in fields or "parent" in fields):
        raise ValueError(f"version {version} with a start or a parent")
    fields = {"start": 0, "parent": "", **fields}
    header = Header(
        version=version,
        llamay=_text(fields, "llamay"),
        architecture=_text(fields, "architecture"),
        vocab_size=_count(fields, "vocab_size", 1),
        layout_sha256=_text(fields, "layout_sha256"),
        weights_sha256=None if legacy else _text(fields, "weights_sha256"),
        layers=_count(fields, "layers", 1),
        kv_heads=_count(fields, "kv_heads", 1),
        head_dim=_count(fields, "head_dim", 1),
        numerics=_text(fields, "numerics"),
        cache_precision=KVPrecision(_text(fields, "cache_precision")),
        precision=KVPrecision(_text(fields, "precision")),
        lossless=_flag(fields, "lossless"),
        tokens=_count(fields, "tokens", 0),
        logits=_count(fields, "logits", 0),
        chunk_positions=_count(fields, "chunk_positions", 1),
        owner=_text(fields, "owner"),
        marking=_text(fields, "marking"),
        encryption=_encryption(fields["encryption"]),
        start=_count(fields, "start", 0),
        parent=_text(fields, "parent"),
    )
    if header.end > _MAX_COUNT:
        raise ValueError(f"{header.tokens} tokens from position {header.start} on")
    if header.logits not in (0, header.vocab_size):
        raise ValueError(f"{header.logits} logits for a vocabulary of {header.vocab_size}")
    if legacy and header.encryption:
        raise ValueError("version 2 with encryption")
    rows = min(header.chunk_positions, header.tokens)
    if rows > 1 and rows * header.layout(KVPrecision.F32).row_bytes > MAX_CHUNK_BYTES:
        raise ValueError(f"chunks of {rows} positions")
    return header


def _encryption(fields: Any) -> Encryption | None:
    if fields is None:
        return None
    return Encryption(
        kdf=_text(fields, "kdf"),
        salt=bytes.fromhex(_text(fields, "salt")),
        nonce=bytes.fromhex(_text(fields, "nonce")),
        check=bytes.fromhex(_text(fields, "check")),
        n=_count(fields, "n", 0),
        r=_count(fields, "r", 0),
        p=_count(fields, "p", 0),
    )


def _text(fields: Any, name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not a text")
    return value


def _count(fields: Any, name: str, least: int) -> int:
    value = fields[name]
    if type(value) is not int or not least <= value <= _MAX_COUNT:
        raise ValueError(f"{name} is not a number from {least} to {_MAX_COUNT}")
    return value


def _flag(fields: Any, name: str) -> bool:
    value = fields[name]
    if not isinstance(value, bool):
        raise TypeError(f"{name} is neither true nor false")
    return value


def damaged(path: Path, what: str) -> SnapshotCorruptError:
    """The error for a file whose bytes are not what was written."""
    return SnapshotCorruptError(f"{path}: the snapshot is damaged: {what}; use another copy")
