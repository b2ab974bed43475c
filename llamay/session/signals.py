"""Leaving a session when the process is told to end."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from llamay.session.leaving import Goodbye
from llamay.session.session import Session

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def saved_on_signals(session: Session, ended: Callable[[int, Goodbye], object]) -> Iterator[None]:
    """Within, SIGTERM, SIGHUP and SIGINT close the session, whatever the main thread does.

    ended: called with the signal's number when the session is closed, on a thread of its own, where
           closing went on too; it sees to it that the process ends
    A second signal changes nothing: closing takes less than a second. For the main thread only.
    """
    told = threading.Event()

    def close(number: int) -> None:
        ended(number, session.close())

    def handle(number: int, frame: FrameType | None) -> None:
        if not told.is_set():
            told.set()
            threading.Thread(target=close, args=(number,), name="llamay-leaving").start()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
