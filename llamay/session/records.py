"""What can happen to a session: small values that `Tree.apply` takes and the journal keeps.

Replaying the same records on the same tree gives the same tree. As JSON a record is an object of
its class's name and those fields that are not at their defaults.
"""

from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal, TypeAlias

Role: TypeAlias = Literal["root", "user", "assistant"]
NodeState: TypeAlias = Literal[
    "queued", "reading", "writing", "done", "stopped", "interrupted", "failed"
]


@dataclass(frozen=True, slots=True)
class Settings:
    """Overrides of a node and what comes after it; None is what holds before it.

    system: the system prompt; the rest is as in `llamay.sampling.SamplingParams`
    """

    system: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None

    def over(self, base: "Settings") -> "Settings":
        """`base` with these overrides."""
        if self == NO_SETTINGS:
            return base
        names = (field.name for field in fields(self))
        own = {name: getattr(self, name) for name in names}
        return Settings(
            **{name: getattr(base, name) if own[name] is None else own[name] for name in own}
        )


NO_SETTINGS = Settings()


@dataclass(frozen=True, slots=True)
class Info:
    """What a session says of itself.

    title:          None takes the first message
    parent:         the id of the session that it is a copy of
    model:          the model's name, as its user gave it
    weights_sha256: of that model
    created:        seconds since 1970
    """

    title: str | None = None
    parent: str | None = None
    model: str | None = None
    weights_sha256: str | None = None
    created: float = 0.0


NO_INFO = Info()


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A file with the state of positions [start, end) of a node's history, among its own tokens.

    name: of the file, in the session's folder of segments; bytes: its size
    """

    name: str
    start: int
    end: int
    bytes: int


@dataclass(frozen=True, slots=True)
class AddNode:
    """A new turn, at the end of its parent's children.

    id:    `Tree.next_id` or more
    keeps: how many tokens of the parent's history it keeps; None is all that the parent has when
           the node gets its first token
    seed_index, seed: of an answer; see `Tree.seed`
    model: weights_sha256 of what makes or reads its ids
    """

    id: int
    parent: int
    role: Role
    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    keeps: int | None = None
    settings: Settings = NO_SETTINGS
    seed_index: int | None = None
    seed: int | None = None
    state: NodeState = "done"
    created: float = 0.0
    model: str | None = None


@dataclass(frozen=True, slots=True)
class AppendIds:
    """Tokens that a node goes on by; text: what became complete with them.

    at:       how many tokens the node has before, so that a lost record leaves no hole
    logprobs: one for each id of an answer, none for a user's turn
    keeps:    with the first tokens of a turn that was queued: as in `AddNode`
    """

    node: int
    at: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    keeps: int | None = None


@dataclass(frozen=True, slots=True)
class SetState:
    """How far a turn is; seconds: what its generation took."""

    node: int
    state: NodeState
    finish_reason: str | None = None
    error: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SetSegments:
    """All segments of a node, in order of positions."""

    node: int
    segments: tuple[SegmentRef, ...] = ()


@dataclass(frozen=True, slots=True)
class SetInfo:
    """What the session says of itself from now on."""

    info: Info = NO_INFO


@dataclass(frozen=True, slots=True)
class SetLabel:
    """A user's mark on a turn; None takes it off."""

    node: int
    label: str | None = None


@dataclass(frozen=True, slots=True)
class SetSettings:
    """A node's overrides from now on, all of them."""

    node: int
    settings: Settings = NO_SETTINGS


@dataclass(frozen=True, slots=True)
class Delete:
    """Hides a node and all below it, until an undo or for good at the next purge."""

    node: int


@dataclass(frozen=True, slots=True)
class SetPlace:
    """Where the next message goes."""

    node: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Several changes, any but undo, redo and purge, that are undone and written as one."""

    changes: "tuple[Record, ...]" = ()


@dataclass(frozen=True, slots=True)
class Undo:
    """Takes the last edit back that is not taken back."""


@dataclass(frozen=True, slots=True)
class Redo:
    """Makes the edit again that was taken back last."""


@dataclass(frozen=True, slots=True)
class Purge:
    """Forgets hidden nodes and what could be undone."""


Record: TypeAlias = (
    AddNode
    | AppendIds
    | SetState
    | SetSegments
    | SetInfo
    | SetLabel
    | SetSettings
    | Delete
    | SetPlace
    | Edit
    | Undo
    | Redo
    | Purge
)

_RECORDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        AddNode,
        AppendIds,
        SetState,
        SetSegments,
        SetInfo,
        SetLabel,
        SetSettings,
        Delete,
        SetPlace,
        Edit,
        Undo,
        Redo,
        Purge,
    )
}


def to_json(value: Any) -> Any:
    """A record, or one of the values in it, as what `json` writes."""
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if type(value).__name__ in _RECORDS:
        return {"record": type(value).__name__, **values_to_json(value)}
    if isinstance(value, Settings | Info | SegmentRef):
        return values_to_json(value)
    return value


def values_to_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults."""
    pairs = ((field, getattr(value, field.name)) for field in fields(value))
    return {field.name: to_json(item) for field, item in pairs if item != _default(field)}


def from_json(value: Any) -> Record:
    """The reverse of `to_json` for a record. Raises ValueError if it is none."""
    try:
        kind = _RECORDS[value["record"]]
        record: Record = values_from_json(kind, {k: v for k, v in value.items() if k != "record"})
        return record
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a record of this version ({error!r})") from None


def values_from_json(kind: type[Any], values: dict[str, Any]) -> Any:
    """A dataclass out of its fields. Raises TypeError or ValueError if they do not fit."""
    nested = {"settings": Settings, "info": Info}
    read: dict[str, Any] = {}
    for name, value in values.items():
        if name in nested:
            read[name] = values_from_json(nested[name], value)
        elif name == "segments":
            read[name] = tuple(values_from_json(SegmentRef, item) for item in value)
        elif name == "changes":
            read[name] = tuple(from_json(item) for item in value)
        else:
            read[name] = tuple(value) if isinstance(value, list) else value
    return kind(**read)


def _default(field: "Field[Any]") -> Any:
    # What has no default is always written: no value equals a new object.
    return object() if field.default is MISSING else field.default
