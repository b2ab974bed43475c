"""What opens models and sessions for the screens; they hold sessions, never engines."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llamay.session import Session


class Host(Protocol):
    """Opens one model and one session at a time. `open` waits; all else is quick.

    home:  llamay's folder, with `keys.toml`
    model: the name of the model in use, as its user gave it
    """

    home: Path
    model: str

    @property
    def title(self) -> list[str]:
        """The model's name, device and kernels, and KV precision; empty before a model is open."""

    def open(
        self, name: str | None, model: str | None, told: Callable[[str], None]
    ) -> "Session":
        """Opens a session by name, with its own model or `model`.

        A name that is not known is a new session's. None is the last session, or a new one if
        there is none. `told` hears how far loading is, on the calling thread.
        Raises LlamayError; what was open before is then closed.
        """

    def close(self) -> None:
        """Lets the model go; sessions are closed before."""
