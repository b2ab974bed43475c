"""The engine's thread: every array call is made on it, because MLX's streams belong to a thread."""

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from llamay.engine.scheduler import Scheduler
from llamay.errors import EngineStoppedError

T = TypeVar("T")
_Call: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class Worker:
    """A thread that runs what others ask of it, and the scheduler's steps between."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()  # None ends the thread
        self._lock = threading.Lock()  # nothing enters the inbox after the thread's last look
        self._scheduler: Scheduler | None = None
        self._stopped: EngineStoppedError | None = None
        self._thread = threading.Thread(target=self._run, name="llamay-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still takes what is asked of it."""
        return self._stopped is None

    def attach(self, scheduler: Scheduler) -> None:
        """Gives it the steps to run. Raises EngineStoppedError."""

        def attach() -> None:
            self._scheduler = scheduler

        self.call(attach)

    def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the thread, between two steps, and waits for its result.

        Raises what it raises, or EngineStoppedError.
        """
        if threading.current_thread() is self._thread:
            return function()
        return self.post(function).result()

    def post(self, function: Callable[[], T]) -> "Future[T]":
        """`call` without waiting. Raises EngineStoppedError."""
        future: Future[T] = Future()
        self._put((future, function))
        return future

    def stop(self) -> None:
        """Ends the thread after the step under way, and every request with an error."""
        with contextlib.suppress(EngineStoppedError):
            self._put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, message: "_Call | None") -> None:
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            self._inbox.put(message)

    def _run(self) -> None:
        error = EngineStoppedError("the engine was closed")
        try:
            while self._serve():
                if self._scheduler is not None:
                    self._scheduler.step()
        except BaseException as cause:
            error = EngineStoppedError(
                f"the engine's thread ended by an error, {type(cause).__name__}: {cause}; "
                "start llamay again, what was saved is whole"
            )
            error.__cause__ = cause
        with self._lock:
            self._stopped = error
        if self._scheduler is not None:
            self._scheduler.fail_all(error)
        while not self._inbox.empty():
            if (message := self._inbox.get()) is not None:
                message[0].set_exception(error)
        # What MLX keeps for this thread, such as compiled graphs, must go before the thread does.
        if mlx := sys.modules.get("mlx.core"):
            mlx.clear_streams()

    def _serve(self) -> bool:
        """Runs what was asked; waits for that if there are no steps to run. False to stop."""
        while True:
            idle = self._scheduler is None or not self._scheduler.busy
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if message is None:
                return False
            future, function = message
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del message, future, function  # which may hold the engine, while nothing is asked
