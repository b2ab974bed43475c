"""A file that appears whole or not at all.

It is written beside its place under a temporary name, and renamed when it is on the disk. Whoever
writes a temporary file holds a lock on it, so one without a lock was left by a process that died.
"""

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from llamay.errors import SnapshotError

Bytes: TypeAlias = bytes | memoryview

_TEMPORARY = re.compile(r"\.llamay-[0-9a-f]{16}\.tmp")


class NewFile:
    """A file in the making; written by several threads, each at places of its own."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.bytes = 0
        self.fsync_seconds = 0.0

    def allocate(self, size: int) -> None:
        """Has the file system find room for `size` bytes: then writing them is faster."""
        self.bytes = size
        if hasattr(os, "posix_fallocate"):
            with suppress(OSError):  # the writes will say what is wrong
                os.posix_fallocate(self.descriptor, 0, size)

    def write(self, data: Bytes, offset: int) -> None:
        """Writes from an offset on. Raises OSError."""
        view = memoryview(data).cast("B")
        while view:
            count = os.pwrite(self.descriptor, view, offset)
            view, offset = view[count:], offset + count


@contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """What the body writes becomes the file at `path` if it ends without an error.

    The file has mode 0600; folders that are missing are made with 0700. After an error, or the
    process's death at any moment, the file that was there before is as it was.
    Raises SnapshotError if something cannot be written.
    """
    try:
        _make_folders(path.parent)
        sweep(path.parent)
        temporary, descriptor = _create(path.parent)
        try:
            file = NewFile(descriptor)
            yield file
            start = time.perf_counter()
            to_disk(descriptor)
            temporary.replace(path)
            folder_to_disk(path.parent)
            file.fsync_seconds = time.perf_counter() - start
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SnapshotError(
            f"{path}: cannot be written ({error.strerror}); make room, or choose another place"
        ) from error


def sweep(folder: Path) -> None:
    """Removes temporary files in `folder` whose writers are gone; leaves those being written."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name):
                _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)


def _create(folder: Path) -> tuple[Path, int]:
    """A new, locked temporary file."""
    while True:
        path = folder / f".llamay-{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a sweep met it before it had its lock
            os.close(descriptor)
            continue
        except OSError:  # no locks here: then no sweep can take one either
            return path, descriptor
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


def _make_folders(folder: Path) -> None:
    for missing in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
        missing.mkdir(0o700, exist_ok=True)


def to_disk(descriptor: int) -> None:
    """Has the disk keep a file, through a loss of power. Raises OSError."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # on macOS, fsync leaves data in the drive's own cache
        with suppress(OSError):  # which not every file system knows
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def folder_to_disk(folder: Path) -> None:
    """Has the disk keep a folder's entries, through a loss of power. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
