"""One process at a time has a session open; the lock ends with the process, however it ends."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from llamay.errors import SessionBusyError, SessionError
from llamay.session.files import unwritable

NAME = "lock"
_TRIES = 5
_WAIT_S = 0.02


class Lock:
    """Held from construction to `release`."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock of a session's folder.

        Raises SessionBusyError, with the owner's process id, if somebody has it, and SessionError
        if the folder is gone or cannot be written.
        """
        path = folder / NAME
        try:
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except FileNotFoundError:
            raise SessionError(f"{folder}: there is no session; see `llamay sessions`") from None
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            self._lock(path)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode("ascii"), 0)
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, OSError):
                raise unwritable(path, error) from error
            raise

    def release(self) -> None:
        """Lets others have the session."""
        os.close(self._descriptor)

    def _lock(self, path: Path) -> None:
        for remaining in reversed(range(_TRIES)):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not remaining:
                    raise _busy(path) from None
                time.sleep(_WAIT_S)  # whoever looks for an owner has it for a moment
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(self._descriptor)):
                return
        raise SessionError(f"{path.parent}: the session was removed just now")


def owner_of(folder: Path) -> str | None:
    """Who has the session open, such as `process 123`; None if nobody has."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(folder / NAME)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _owner(path: Path) -> str:
    with suppress(OSError):
        if (text := path.read_bytes()[:20]).isdigit():
            return f"process {text.decode('ascii')}"
    return "another process"


def _busy(path: Path) -> SessionBusyError:
    return SessionBusyError(
        f"{path.parent}: {_owner(path)} has the session open; close it there, or open another"
    )
