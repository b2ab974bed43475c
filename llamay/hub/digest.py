"""SHA-256 of a model's weights, remembered so that a large file is read for it only once."""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llamay.errors import HubError
from llamay.hub import paths
from llamay.hub.files import CHUNK_BYTES
from llamay.hub.progress import Progress, silent
from llamay.hub.stores import model_files

_VERSION = 1


def weights_digest(path: Path, progress: Progress = silent) -> str:
    """SHA-256 of the model at `path`, in lower-case hex; changes nothing but the cache of digests.

    For a split model, `path` is its first part, and the digest is taken over the digests (32 bytes
    each) of all parts in order. A file is hashed again when its size, mtime or inode has changed.
    Raises HubError if a file cannot be read or changes meanwhile.
    """
    digests = [_file_digest(file, progress) for file in model_files(path)]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def remember_digest(path: Path, sha256: str) -> None:
    """Notes the digest of a file that was hashed while it was written; may fail silently."""
    with suppress(OSError):
        _store(path.resolve(), _stamp(path.stat()), sha256)


def _file_digest(path: Path, progress: Progress) -> str:
    try:
        path = path.resolve()
        stamp = _stamp(path.stat())
        entry = _load().get(str(path))
        if entry is not None and entry[:3] == stamp:
            return str(entry[3])
        sha256 = _hash(path, progress)
        if _stamp(path.stat()) != stamp:
            raise HubError(
                f"{path}: the file changed while it was read; repeat when it is complete"
            )
    except OSError as error:
        raise HubError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    with suppress(OSError):
        _store(path, stamp, sha256)
    return sha256


def _hash(path: Path, progress: Progress) -> str:
    hasher = hashlib.sha256()
    done, label = 0, f"hashing {path.name}"
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        buffer = bytearray(CHUNK_BYTES)
        while count := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
            done += count
            progress(label, done, size)
    return hasher.hexdigest()


def _stamp(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _cache_file() -> Path:
    return paths.cache_dir() / "digests.json"


def _load() -> dict[str, list[int | str]]:
    """The entries [size, mtime_ns, inode, sha256] by path; those that are malformed are dropped."""
    try:
        content = json.loads(_cache_file().read_bytes())
        if content["version"] != _VERSION:
            return {}
        return {path: entry for path, entry in content["files"].items() if _is_entry(entry)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 4:
        return False
    *numbers, sha256 = entry
    if not all(type(number) is int for number in numbers) or not isinstance(sha256, str):
        return False
    return len(sha256) == 64 and set(sha256) <= set("0123456789abcdef")


def _store(path: Path, stamp: list[int], sha256: str) -> None:
    with _lock():
        files = {known: entry for known, entry in _load().items() if Path(known).exists()}
        files[str(path)] = [*stamp, sha256]
        text = json.dumps({"version": _VERSION, "files": files}, indent=1)
        target = _cache_file()
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextmanager
def _lock() -> Iterator[None]:
    """Keeps other processes from storing; without it, one of two new entries could be lost."""
    folder = paths.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "digests.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # Under the lock, whatever else is here was left by a process that was killed.
        for stale in folder.glob("digests.json.*"):
            stale.unlink(missing_ok=True)
        yield
