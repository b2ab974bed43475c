"""Text and figures as the screens show them; model text is data and commands no terminal."""

import math
import re

from rich.cells import cell_len, set_cell_size

# The style of less important text within a Content, where `$text-muted` is not muted: it has no
# background to be mixed with.
MUTED = "$foreground 60%"

# What a terminal obeys or what moves text out of its column: control characters (tab and line feed
# apart), line and paragraph separators, surrogates, and marks that turn the direction of what
# follows. Other format characters join letters and emoji, and stay.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)

# Emoji of several characters, whose width terminals do not agree on: they are shown one by one,
# without variation selectors and skin tones.
_EMOJI = "\u203c-\u3299\U0001f000-\U0001faff"
_JOINS_EMOJI = re.compile(
    f"[\ufe0e\ufe0f]|(?<=[{_EMOJI}])[\U0001f3fb-\U0001f3ff]"
    f"|(?<=[{_EMOJI}\ufe0f])\u200d(?=[{_EMOJI}])"
)


def clean(text: str) -> str:
    """`text`, its lines and tabs kept, with everything that a terminal obeys written as escapes."""
    return _JOINS_EMOJI.sub("", _UNSAFE.sub(_escape, text))


def one_line(text: str) -> str:
    """`text` cleaned and on one line, runs of white space as one space."""
    return clean(" ".join(text.split()))


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")


def count(number: int) -> str:
    """1984 -> "1,984"."""
    return f"{number:,}"


def plural(number: int, word: str) -> str:
    """3, "page" -> "3 pages"; words whose plural takes an s (branch and the like: es)."""
    if number == 1:
        return f"1 {word}"
    return f"{count(number)} {word}{'es' if word.endswith(('ch', 'sh', 's', 'x')) else 's'}"


def size(num_bytes: int) -> str:
    """Bytes of memory in binary units: 225443840 -> "215 MiB"."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, units = num_bytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}" if value < 9.95 else f"{value:.0f} {units[0]}"


def size_of(num_bytes: int, all_bytes: int) -> str:
    """A part of a memory: "1.1 / 8.0 GiB"; each with its unit if they differ."""
    part, whole = size(num_bytes), size(all_bytes)
    number, unit = part.split(" ")
    return f"{number} / {whole}" if whole.endswith(f" {unit}") else f"{part} / {whole}"


def duration(seconds: float) -> str:
    """A time with two or three digits: "31 ms", "3.1 s", "2 min 5 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def rate(tokens_per_s: float) -> str:
    """Tokens per second: "118 tok/s"; a digit after the point below ten."""
    return f"{tokens_per_s:.1f} tok/s" if tokens_per_s < 9.95 else f"{tokens_per_s:.0f} tok/s"


def share(logprob: float) -> str:
    """A natural logarithm of a probability as a percentage: "41.2 %"."""
    percent = 100 * math.exp(logprob)
    if 0 < percent < 0.05:
        return "< 0.1 %"
    return f"{percent:.1f} %"


def ago(seconds: float) -> str:
    """How long ago something was: "now", "5 min", "3 h", "12 d"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def fit(line: str, width: int) -> str:
    """`line` in exactly `width` cells: cut, with an ellipsis at its end, or filled with spaces."""
    if cell_len(line) > width:
        line = set_cell_size(line, max(width - 1, 0)).rstrip() + "…"
    return set_cell_size(line, width)
