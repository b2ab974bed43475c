"""How long work in the hub tells its caller how far it is."""

from typing import Protocol


class Progress(Protocol):
    """Called as work proceeds; `done` may fall back to 0 when a download has to start over."""

    def __call__(self, label: str, done: int, total: int | None) -> None:
        """Takes what is worked on, bytes done, and bytes in all where that is known."""


def silent(label: str, done: int, total: int | None) -> None:
    """Reports to nobody."""
