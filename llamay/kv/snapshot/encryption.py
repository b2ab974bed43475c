"""Secrecy and authenticity of a snapshot's chunks: AES-256-GCM.

    secret   32 bytes: a key file's content, or scrypt(passphrase, salt, n, r, p)
    key      HKDF-SHA256(secret, salt) gives 48 bytes: the file's key, then a check of 16 that the
             header holds
    nonce    8 random bytes that the header holds, then the chunk's index in 4
    AAD      the file's bytes [0, 16 + H), then the chunk's index and the count of chunks in 8 each

The salt is new for every file, so no two files share a key, and no two chunks of one a nonce. The
header is authenticated by every chunk, and there is always one.

The library is imported where a key is used: it takes longer to load than a snapshot without one.
"""

import hmac
import os
import struct
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from llamay.errors import SnapshotKeyError
from llamay.kv.snapshot.format import Encryption, damaged

KEY_BYTES = 32
SALT_BYTES = 32
NONCE_BYTES = 8
CHECK_BYTES = 16
# OWASP's Password Storage Cheat Sheet: 128 MiB, a few tenths of a second.
SCRYPT_N, SCRYPT_R, SCRYPT_P = 2**17, 8, 1
MAX_SCRYPT_BYTES = 2**28  # 128 n r: what a file may make its reader allocate
MAX_SCRYPT_P = 4

_FILE, _PASSPHRASE = "hkdf-sha256", "scrypt"
_NAMES = {_FILE: "key file", _PASSPHRASE: "passphrase"}
_INFO = b"llamay snapshot"


@dataclass(frozen=True, slots=True)
class Key:
    """What opens encrypted snapshots; made by `from_file`, `from_passphrase` or `random`."""

    secret: bytes = field(repr=False)
    kdf: str = _FILE

    @classmethod
    def from_file(cls, path: Path) -> "Key":
        """The key in a file of 32 random bytes. Raises SnapshotKeyError for another file."""
        try:
            with path.open("rb") as file:
                secret = file.read(KEY_BYTES + 1)
        except OSError as error:
            raise SnapshotKeyError(
                f"{path}: the key cannot be read ({error.strerror}); check the path"
            ) from error
        if len(secret) != KEY_BYTES:
            found = f"more than {KEY_BYTES}" if len(secret) > KEY_BYTES else str(len(secret))
            raise SnapshotKeyError(
                f"{path}: expected a key of {KEY_BYTES} bytes, found {found}; "
                f"make one with `head -c {KEY_BYTES} /dev/urandom`"
            )
        return cls(secret)

    @classmethod
    def from_passphrase(cls, text: str) -> "Key":
        """The key that a text stands for; however its letters are composed."""
        if not text:
            raise SnapshotKeyError("the passphrase is empty; give one")
        return cls(unicodedata.normalize("NFC", text).encode(), _PASSPHRASE)

    @classmethod
    def random(cls) -> "Key":
        """A key that nobody else has."""
        return cls(os.urandom(KEY_BYTES))


class Cipher:
    """Encrypts or decrypts the chunks of one file."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._nonce = nonce

    def encrypt(self, head: bytes, chunk: int, count: int, data: bytes | memoryview) -> bytes:
        """Ciphertext and tag of chunk `chunk` of `count`; head: the file's bytes [0, 16 + H)."""
        return self._cipher.encrypt(self._nonce_of(chunk), data, _aad(head, chunk, count))

    def decrypt(self, path: Path, head: bytes, chunk: int, count: int, data: memoryview) -> bytes:
        """The reverse. Raises SnapshotCorruptError if anything is not as it was encrypted."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(self._nonce_of(chunk), data, _aad(head, chunk, count))
        except InvalidTag:
            raise damaged(path, f"chunk {chunk} is not what its key encrypted") from None

    def _nonce_of(self, chunk: int) -> bytes:
        return self._nonce + struct.pack("<I", chunk)


def _aad(head: bytes, chunk: int, count: int) -> bytes:
    return head + struct.pack("<QQ", chunk, count)


def new_encryption(key: Key) -> tuple[Encryption, Cipher]:
    """A new file's way to its key."""
    cost = (SCRYPT_N, SCRYPT_R, SCRYPT_P) if key.kdf == _PASSPHRASE else (0, 0, 0)
    salt, nonce = os.urandom(SALT_BYTES), os.urandom(NONCE_BYTES)
    file_key, check = _derive(key, salt, *cost)
    return Encryption(key.kdf, salt, nonce, check, *cost), Cipher(file_key, nonce)


def open_encryption(path: Path, encryption: Encryption, key: Key | None) -> Cipher:
    """The cipher of an existing file.

    Raises SnapshotKeyError if `key` is missing, of the other kind or not the file's, and
    SnapshotCorruptError if the header asks for what no writer writes.
    """
    _check_encryption(path, encryption)
    wanted = _NAMES[encryption.kdf]
    if key is None:
        raise SnapshotKeyError(f"{path}: the snapshot is encrypted; give its {wanted}")
    if key.kdf != encryption.kdf:
        raise SnapshotKeyError(
            f"{path}: expected the {wanted} that the snapshot is encrypted with, "
            f"found a {_NAMES[key.kdf]}; give the {wanted}"
        )
    file_key, check = _derive(key, encryption.salt, encryption.n, encryption.r, encryption.p)
    if not hmac.compare_digest(check, encryption.check):
        raise SnapshotKeyError(
            f"{path}: the snapshot is encrypted with another {wanted} than the one given; "
            "give that one"
        )
    return Cipher(file_key, encryption.nonce)


def _check_encryption(path: Path, encryption: Encryption) -> None:
    sizes = (len(encryption.salt), len(encryption.nonce), len(encryption.check))
    if encryption.kdf not in _NAMES or sizes != (SALT_BYTES, NONCE_BYTES, CHECK_BYTES):
        raise damaged(path, "its header describes an unknown encryption")
    n, r, p = encryption.n, encryption.r, encryption.p
    if encryption.kdf == _FILE:
        return
    if n < 2 or n & (n - 1) or r < 8 or not 1 <= p <= MAX_SCRYPT_P:
        raise damaged(path, f"its header asks for scrypt with n = {n}, r = {r}, p = {p}")
    if 128 * n * r > MAX_SCRYPT_BYTES:
        raise damaged(path, f"its passphrase would take {128 * n * r} bytes to try")


def _derive(key: Key, salt: bytes, n: int, r: int, p: int) -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    secret = key.secret
    if key.kdf == _PASSPHRASE:
        secret = Scrypt(salt=salt, length=KEY_BYTES, n=n, r=r, p=p).derive(secret)
    derived = HKDF(SHA256(), KEY_BYTES + CHECK_BYTES, salt=salt, info=_INFO).derive(secret)
    return derived[:KEY_BYTES], derived[KEY_BYTES:]
