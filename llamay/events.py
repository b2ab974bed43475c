"""What a generation tells whoever watches it; plain data, no arrays."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """The prompt is being read.

    total, cached, done: tokens of the prompt, those that were found and not computed, and those
                         that were computed so far
    seconds:             since the request came
    """

    total: int
    cached: int
    done: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A branch went on by tokens.

    branch:   its index
    ids:      the tokens, committed to its context
    logprobs: natural logarithm of each token's probability under the model, before sampling options
    text:     what became complete with them; may be empty, and may hold back what could be the
              beginning of a stop text
    """

    branch: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A branch ended.

    reason:  stop (the model ended its turn or wrote a stop text), length (max_tokens), context (the
             context is full), or cancelled
    tokens:  how many the answer has
    seconds: since the prompt was read
    """

    branch: int
    reason: FinishReason
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A branch ended by an error, whose text is a sentence for the user; others go on."""

    branch: int
    error: BaseException


Event: TypeAlias = PrefillProgress | TextDelta | Finished | Failed


# --- what a session tells: nodes are ids of its tree ---


@dataclass(frozen=True, slots=True)
class TreeChanged:
    """Nodes were added or removed, or their state, label or settings changed."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlaceChanged:
    """The next message continues from this node."""

    node: int


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """An answer's prompt is known: tokens taken from memory, from disk, and to be computed."""

    node: int
    memory: int
    disk: int
    prefill: int


@dataclass(frozen=True, slots=True)
class AnswerProgress:
    """An answer's prompt is being read: `done` of `total` tokens are known.

    cached: those of them that were found in memory or on disk, and not computed
    """

    node: int
    total: int
    cached: int
    done: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AnswerText:
    """An answer went on by tokens; fields as TextDelta's."""

    node: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """An answer ended; reasons as Finished's."""

    node: int
    reason: FinishReason
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AnswerFailed:
    """An answer ended by an error; the message is its sentence."""

    node: int
    message: str


@dataclass(frozen=True, slots=True)
class Saved:
    """What a node's branch has computed is on disk."""

    node: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """A session was opened with its computed state.

    prefill_seconds: what computing it again would take, from measured speed; None if unknown
    """

    tokens: int
    seconds: float
    prefill_seconds: float | None


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence for the user."""

    message: str
    level: Literal["info", "warning", "error"]


SessionEvent: TypeAlias = (
    TreeChanged
    | PlaceChanged
    | AnswerStarted
    | AnswerProgress
    | AnswerText
    | AnswerEnded
    | AnswerFailed
    | Saved
    | Resumed
    | Notice
)
