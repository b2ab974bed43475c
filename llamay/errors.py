"""The errors that llamay raises on purpose; each message is one sentence with its remedy.

A message names the file, key, tensor or flag, what was expected and what was found, so that the
command line can print it as it stands.
"""


class LlamayError(Exception):
    """Root of every error that a user can meet; the command line prints it and exits with 1."""


class UsageError(LlamayError):
    """The request itself is wrong (a flag, a name); the command line exits with 2."""


class GGUFError(LlamayError):
    """A GGUF file cannot be read: truncated, inconsistent, or of an unknown version."""


class UnsupportedModelError(LlamayError):
    """The file is sound, but its architecture, tokenizer or quantisation is not supported."""


class HubError(LlamayError):
    """A model cannot be found, downloaded or verified."""


class TemplateError(LlamayError):
    """The file's chat template is missing or cannot be rendered."""


class ContextFullError(LlamayError):
    """The tokens do not fit in the context; the message gives both counts."""


class ContextBusyError(LlamayError):
    """A context is in use by another owner; nothing was changed."""


class BudgetError(LlamayError):
    """The context memory budget has no room; the message gives the figures."""


class SnapshotError(LlamayError):
    """A snapshot cannot be read or written."""


class SnapshotLayoutError(SnapshotError):
    """A snapshot is of a model with another architecture or layout."""


class SnapshotWeightsError(SnapshotError):
    """A snapshot is of a model with other weights, or does not say with which."""


class SnapshotCorruptError(SnapshotError):
    """A snapshot's bytes are not what was written."""


class SnapshotVersionError(SnapshotError):
    """A snapshot is of a newer format version than this llamay reads."""


class SnapshotSegmentError(SnapshotError):
    """A segment is given where a whole snapshot is needed, or does not continue what it should."""


class SnapshotKeyError(SnapshotError):
    """A snapshot's key is missing or is another one, or a key cannot be read."""


class SessionError(LlamayError):
    """A session cannot be read, written or changed as asked."""


class SessionBusyError(SessionError):
    """Another process has the session open."""


class SessionCorruptError(SessionError):
    """A session's files are not what was written, and nothing else has what they held."""


class SessionVersionError(SessionError):
    """A session is of a newer format version than this llamay reads."""


class SessionKeyError(SessionError):
    """A session's key is missing or is another one."""


class CancelledError(LlamayError):
    """A step was cancelled; nothing that it computed was published."""


class EngineStoppedError(LlamayError):
    """The engine was closed, or its thread ended by an error; it takes no more requests."""


class NumericsError(LlamayError):
    """The model produced logits that are not finite."""
