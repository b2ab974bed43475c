"""Two calm themes, dark and light, and which of them the user chose."""

from contextlib import suppress
from pathlib import Path

from textual.theme import Theme

DARK, LIGHT = "llamay-dark", "llamay-light"
_FILE = "theme.txt"

THEMES = (
    Theme(
        name=DARK,
        primary="#7aa2f7",
        secondary="#9aa5ce",
        accent="#e0af68",
        success="#9ece6a",
        warning="#ff9e64",
        error="#f7768e",
        foreground="#c8d0e0",
        background="#14161b",
        surface="#1b1e25",
        panel="#22262f",
        dark=True,
    ),
    Theme(
        name=LIGHT,
        primary="#2f5fb3",
        secondary="#54627a",
        accent="#8f5902",
        success="#3d7a1f",
        warning="#a8500b",
        error="#b3263f",
        foreground="#24292f",
        background="#fafafa",
        surface="#f2f2f2",
        panel="#e6e8eb",
        dark=False,
    ),
)


def saved_theme(home: Path) -> str | None:
    """The theme that the user chose before; None if there is none that is known."""
    with suppress(OSError, UnicodeDecodeError):
        name = (home / _FILE).read_text("utf-8").strip()
        return name if name in (DARK, LIGHT) else None
    return None


def save_theme(home: Path, name: str) -> None:
    """Keeps a theme for the next starts, in llamay's folder."""
    with suppress(OSError):  # the next start then goes by the terminal's background
        home.mkdir(parents=True, exist_ok=True)
        (home / _FILE).write_text(f"{name}\n", "utf-8")
