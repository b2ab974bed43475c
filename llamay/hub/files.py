"""Files that appear whole or not at all: written as NAME.part by one process at a time."""

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from llamay.errors import HubError

CHUNK_BYTES = 1 << 20


def part_path(target: Path) -> Path:
    """Where `target` is written until it is whole."""
    return target.with_name(target.name + ".part")


@contextmanager
def locked_part(target: Path) -> Iterator[FileIO]:
    """Opens `target`'s part file for reading and writing, and holds it against other processes.

    Waits while another process holds it. What an earlier run left is still in the file. The lock
    goes with the process, so a killed one blocks nobody. After waiting, `target` may exist.
    Raises HubError if the folder cannot be written.
    """
    part = part_path(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = FileIO(os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+")
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held the lock before may have renamed or removed the file that we opened.
            if part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat()):
                break
            file.close()
    with file:
        yield file


def append(file: FileIO, data: bytes, target: Path) -> None:
    """Writes all of `data` at the position of the part file of `target`."""
    view = memoryview(data)
    with disk_errors(target):
        # A disk that fills up takes a part of the data before it refuses the rest.
        while view:
            view = view[file.write(view) :]


def publish(file: FileIO, target: Path) -> None:
    """Makes the locked part file `file` durable and gives it its name, in one step."""
    with disk_errors(target):
        sync(file.fileno())
        part_path(target).replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sync(descriptor: int) -> None:
    """Forces a file's bytes to the device; on macOS fsync alone leaves them in the drive."""
    if sys.platform == "darwin":
        with suppress(OSError):  # not every file system there has it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    os.fsync(descriptor)


def check_space(target: Path, needed_bytes: int) -> None:
    """Raises HubError if `needed_bytes` more do not fit where `target`, whose folder exists, is."""
    with disk_errors(target):
        free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise HubError(
            f"{target.parent}: {needed_bytes / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB "
            "are free; make room, or set LLAMAY_HOME to a folder on a larger disk"
        )


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turns the system's errors while `target` is written into HubError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HubError(
                f"{target.parent}: the disk is full; make room and repeat, "
                "or set LLAMAY_HOME to a folder on a larger disk"
            ) from error
        raise HubError(
            f"{error.filename or target}: cannot be written ({error.strerror}); make the folder "
            "writable or set LLAMAY_HOME to one that is"
        ) from error
