"""How fast this machine reads prompts, from one start to the next: `speeds.json`."""

import json
from contextlib import suppress
from pathlib import Path

from llamay.errors import SessionError
from llamay.session.files import create_file

FILE = "speeds.json"
MIN_TOKENS = 64  # of a prompt that says something about speed


def read_speed(home: Path, model: str) -> float | None:
    """Tokens per second of prefill that were measured last; None if none were.

    model: weights and numerics id, in one
    """
    speed = _read(home).get(model)
    return speed if isinstance(speed, int | float) and speed > 0 else None


def write_speed(home: Path, model: str, tokens_per_s: float) -> None:
    """Remembers what was measured, if that can be written."""
    speeds = {**_read(home), model: round(tokens_per_s, 1)}
    with suppress(SessionError):
        create_file(home / FILE, json.dumps(speeds, indent=1).encode("ascii"))


def _read(home: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        speeds = json.loads((home / FILE).read_bytes())
        if isinstance(speeds, dict):
            return speeds
    return {}
