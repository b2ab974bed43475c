"""The journal: an append-only file of records, so that nothing that was shown is lost.

Little-endian. The header stands there twice, so that damage to one leaves the other:

    OFFSET   SIZE   FIELD
    0        8      magic "LLAMAYSJ"
    8        2      version: 1
    10       2      version of the oldest reader that can read the file: 1
    12       4      1 if the records are encrypted, else 0
    16       16     session id
    32       8      sequence number of the record before the first
    40       32     salt     \\
    72       8      nonce     > of the encryption, zeros without
    80       16     check    /
    96       16     digest of [0, 96)
    112      112    the same again
    224      ...    records

    0        4      mark f5 "REC"
    4        4      n
    8        8      sequence number: one more than that of the record before
    16       4      number of the attempt to write a record to this file, never used twice
    20       4      the first bytes of the digest of [0, 20)
    24       n      a record's JSON in ASCII; encrypted it is AES-256-GCM ciphertext and its tag
    24 + n   16     digest of the session id and [0, 24 + n)

A nonce ends in the attempt's number; authenticated are the header and the sequence number, so a
record cannot be moved to another place or another session. Digests are XXH3 of 128 bits.

A file that ends within a record was torn by a crash, and ends before that record. Any other
difference is damage: it is told, and reading goes on at the next record that is whole.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamay.errors import SessionError, SessionVersionError, SnapshotCorruptError
from llamay.kv.snapshot import Key
from llamay.kv.snapshot.encryption import Cipher
from llamay.kv.snapshot.files import to_disk
from llamay.kv.snapshot.format import DIGEST_BYTES, Encryption, digest
from llamay.session.files import create_file, new_cipher, open_cipher, unwritable, write_all
from llamay.session.records import Record, decode, encode

VERSION = 1
MAGIC = b"LLAMAYSJ"

_HEADER = struct.Struct("<8sHHI16sQ32s8s16s")
_HEADER_BYTES = _HEADER.size + DIGEST_BYTES
EMPTY_BYTES = 2 * _HEADER_BYTES  # of a journal without records
_MARK = b"\xf5REC"
_FRAME = struct.Struct("<4sIQI")
_CHECK_BYTES = 4
_PREFIX_BYTES = _FRAME.size + _CHECK_BYTES


@dataclass(frozen=True, slots=True)
class JournalText:
    """What a journal holds.

    records: (sequence number, record) of those that are whole, as they stand there
    damage:  what is wrong with it, as ends of a sentence; a torn end is not
    """

    records: list[tuple[int, Record]]
    damage: list[str]


class JournalWriter:
    """A journal that is being written; for one thread at a time."""

    def __init__(self, path: Path, session_id: bytes, sequence: int, key: Key | None) -> None:
        """Creates the file, for records after number `sequence`, in place of one that is there.

        Raises SessionError if it cannot be written.
        """
        encryption, self._cipher = new_cipher(path, key)
        self._head = _encode_header(session_id, sequence, encryption)
        self._session_id = session_id
        self._attempt = 0
        self.sequence = sequence
        self.path = path
        self.bytes = EMPTY_BYTES
        create_file(path, self._head * 2)
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise unwritable(path, error) from error

    def append(self, records: Sequence[Record], *, sync: bool) -> None:
        """Writes all of the records or none; a death of the process then loses none of them.

        sync: has the disk keep them, and those before, through a loss of power
        Raises SessionError if they cannot be written; the same may be tried again.
        """
        frames = []
        for sequence, record in enumerate(records, self.sequence + 1):
            frames.append(self._frame(sequence, encode(record).encode("ascii")))
        data = b"".join(frames)
        try:
            if os.fstat(self._descriptor).st_nlink == 0:
                raise SessionError(
                    f"{self.path}: the session's folder was deleted while it was open; "
                    "what came since is in memory only"
                )
            # What a failed attempt left is cut off before anything follows it.
            os.ftruncate(self._descriptor, self.bytes)
            write_all(self._descriptor, data)
            if sync:
                to_disk(self._descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.bytes)
            raise unwritable(self.path, error) from error
        self.bytes += len(data)
        self.sequence += len(records)

    def close(self) -> None:
        """Ends the writing; the file stays."""
        os.close(self._descriptor)

    def _frame(self, sequence: int, payload: bytes) -> bytes:
        attempt, self._attempt = self._attempt, self._attempt + 1
        if self._cipher:
            payload = self._cipher.encrypt(self._head, attempt, sequence, memoryview(payload))
        prefix = _FRAME.pack(_MARK, len(payload), sequence, attempt)
        frame = prefix + digest(prefix)[:_CHECK_BYTES] + payload
        return frame + digest(self._session_id, frame)


def read_journal(path: Path, session_id: bytes, after: int, key: Key | None) -> JournalText:
    """The records of a journal that are whole and later than number `after`; changes nothing.

    key: of the session; None if it is not encrypted
    Raises SessionError if the file cannot be read, SessionVersionError if it is newer, and
    SessionKeyError if it is encrypted with another key.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SessionError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    text = JournalText([], [])
    head = _read_head(path, data, session_id, text)
    cipher: Cipher | None = None
    if key:
        if head is None:
            return text
        _, _, _, encrypted, _, _, salt, nonce, check = _HEADER.unpack_from(head)
        if not encrypted:
            text.damage.append("it is not encrypted, unlike the session")
            return text
        cipher = open_cipher(path, salt, nonce, check, key)
    for sequence, attempt, payload in _frames(data, session_id, text):
        if sequence <= after:
            continue
        try:
            if cipher and head:
                payload = cipher.decrypt(path, head, attempt, sequence, memoryview(payload))
            record = decode(payload)
        except SnapshotCorruptError:
            text.damage.append(f"record {sequence} is not what the session's key encrypted")
        except ValueError:
            text.damage.append(f"record {sequence} makes no sense")
        else:
            text.records.append((sequence, record))
    return text


def _encode_header(session_id: bytes, sequence: int, encryption: Encryption | None) -> bytes:
    secrets = (
        (encryption.salt, encryption.nonce, encryption.check) if encryption else (b"", b"", b"")
    )
    flags = int(encryption is not None)
    head = _HEADER.pack(MAGIC, VERSION, VERSION, flags, session_id, sequence, *secrets)
    return head + digest(head)


def _read_head(path: Path, data: bytes, session_id: bytes, text: JournalText) -> bytes | None:
    """The header, from whichever copy is whole."""
    copies = [data[i * _HEADER_BYTES :][:_HEADER_BYTES] for i in (0, 1)]
    whole = [
        copy
        for copy in copies
        if len(copy) == _HEADER_BYTES
        and copy.startswith(MAGIC)
        and digest(copy[: _HEADER.size]) == copy[_HEADER.size :]
    ]
    if len(whole) < 2 or whole[0] != whole[1]:
        text.damage.append("its header is damaged")
    if not whole:
        return None
    _, version, oldest_reader, _, written_for, *_ = _HEADER.unpack_from(whole[0])
    if oldest_reader > VERSION:
        raise SessionVersionError(
            f"{path}: the journal (version {version}) needs a reader of version {oldest_reader}, "
            f"and this one is of version {VERSION}; update llamay"
        )
    if written_for != session_id:
        text.damage.append("it belongs to another session")
        return None
    return whole[0]


def _frames(data: bytes, session_id: bytes, text: JournalText) -> Iterator[tuple[int, int, bytes]]:
    """Sequence number, attempt and payload of the records whose digests are right."""
    position = EMPTY_BYTES
    while position < len(data):
        end = _frame_end(data, position, session_id)
        if end is None:
            found = _next_frame(data, position + 1, session_id)
            if found is not None or not _is_torn(data[position:]):
                stop = len(data) if found is None else found
                text.damage.append(f"{stop - position} bytes at {position} are damaged")
            if found is None:
                return
            position = found
            continue
        _, _, sequence, attempt = _FRAME.unpack_from(data, position)
        yield sequence, attempt, data[position + _PREFIX_BYTES : end - DIGEST_BYTES]
        position = end


def _frame_end(data: bytes, start: int, session_id: bytes) -> int | None:
    """Where the record that begins at `start` ends; None if none is whole there."""
    length = _payload_length(data[start : start + _PREFIX_BYTES])
    if length is None:
        return None
    end = start + _PREFIX_BYTES + length + DIGEST_BYTES
    body = memoryview(data)[start : end - DIGEST_BYTES]
    return end if digest(session_id, body) == data[end - DIGEST_BYTES : end] else None


def _payload_length(prefix: bytes) -> int | None:
    if len(prefix) < _PREFIX_BYTES or not prefix.startswith(_MARK):
        return None
    fields, check = prefix[: _FRAME.size], prefix[_FRAME.size :]
    return int(_FRAME.unpack(fields)[1]) if digest(fields)[:_CHECK_BYTES] == check else None


def _next_frame(data: bytes, start: int, session_id: bytes) -> int | None:
    while (start := data.find(_MARK, start)) >= 0:
        if _frame_end(data, start, session_id):
            return start
        start += 1
    return None


def _is_torn(rest: bytes) -> bool:
    """Whether the file's end may be the beginning of a record, or space that was never written."""
    if len(rest) < _PREFIX_BYTES:
        return rest.startswith(_MARK) or _MARK.startswith(rest)
    length = _payload_length(rest[:_PREFIX_BYTES])
    if length is None:
        return not any(rest)
    return len(rest) < _PREFIX_BYTES + length + DIGEST_BYTES
