"""Names of sessions: they are names of folders, so they are safe on every file system."""

import unicodedata

from llamay.errors import UsageError

_SLUG_LENGTH = 40
_MAX_BYTES = 120
_FALLBACK = "session"
_OTHERS = "-_. "


def slug(text: str) -> str:
    """A name from the beginning of a text: letters and digits in lower case, joined by hyphens."""
    words = "".join(char if _is_word(char) else " " for char in _normal(text[:1000])).split()
    name = ""
    for word in words:
        longer = f"{name}-{word}" if name else word[:_SLUG_LENGTH]
        if len(longer) > _SLUG_LENGTH:
            break
        name = longer
    while len(name.encode()) > _MAX_BYTES:
        name = name[:-1]
    return name or _FALLBACK


def checked_name(name: str) -> str:
    """The name a user gave, if a folder may have it on every system. Raises UsageError."""
    normal = unicodedata.normalize("NFC", name)
    fits = 0 < len(normal.encode("utf-8", "replace")) <= _MAX_BYTES
    if not fits or not all(_is_word(c) or c in _OTHERS for c in normal) or not _is_word(normal[0]):
        raise UsageError(
            f"{name!r}: expected a name of letters, digits, spaces and {_OTHERS.strip()}, of at "
            f"most {_MAX_BYTES} bytes, that begins with a letter or digit; such as {slug(name)!r}"
        )
    if not _is_word(normal[-1]):
        raise UsageError(f"{name!r}: expected a name that ends with a letter or digit")
    return normal


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", text).casefold())


def _is_word(char: str) -> bool:
    return unicodedata.category(char)[0] in "LNM"
