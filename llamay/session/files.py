"""What the session's files share: how they are created, and how encryption is opened."""

import os
from pathlib import Path

from llamay.errors import SessionError, SessionKeyError, SnapshotError, SnapshotKeyError
from llamay.kv.snapshot import Key
from llamay.kv.snapshot.encryption import Cipher, new_encryption, open_encryption
from llamay.kv.snapshot.files import new_file
from llamay.kv.snapshot.format import Encryption

_KEY_FILE = Key(b"").kdf


def create_file(path: Path, data: bytes) -> None:
    """Puts a file there, whole or not at all, and on the disk; see `new_file`.

    Raises SessionError if the folder is gone, or something cannot be written.
    """
    if not path.parent.is_dir():
        raise SessionError(f"{path.parent}: the folder is gone; put it back, or copy the session")
    try:
        with new_file(path) as file:
            write_all(file.descriptor, data)
    except SnapshotError as error:
        raise SessionError(str(error)) from error


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of it to an open file. Raises OSError, maybe after a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def unwritable(path: Path, error: OSError) -> SessionError:
    """What to raise for a file that cannot be written."""
    return SessionError(
        f"{path}: cannot be written ({error.strerror}); make room, or choose another place"
    )


def new_cipher(path: Path, key: Key | None) -> tuple[Encryption | None, Cipher | None]:
    """A new file's encryption; none without a key.

    Raises SessionKeyError for a passphrase: a session has many files, and each would take its time.
    """
    if key and key.kdf != _KEY_FILE:
        raise SessionKeyError(f"{path}: a session is encrypted with a key file; give one")
    return new_encryption(key) if key else (None, None)


def open_cipher(path: Path, salt: bytes, nonce: bytes, check: bytes, key: Key | None) -> Cipher:
    """An existing file's encryption.

    Raises SessionKeyError if the key is missing or another one, and SnapshotCorruptError if the
    file has what no writer writes.
    """
    if key is None:
        raise SessionKeyError(f"{path.parent}: the session is encrypted; give its --context-key")
    try:
        return open_encryption(path, Encryption(_KEY_FILE, salt, nonce, check), key)
    except SnapshotKeyError:
        raise SessionKeyError(
            f"{path.parent}: the session is encrypted with another key than the one given; "
            "give that one to --context-key"
        ) from None
