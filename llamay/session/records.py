"""What can happen to a session: small values that `Tree.apply` takes and the journal keeps.

Replaying the same records on the same tree gives the same tree. As JSON a record is an object of
its class's name and those fields that are not at their defaults.
"""

import json
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeAlias

Role: TypeAlias = Literal["root", "user", "assistant"]
NodeState: TypeAlias = Literal[
    "queued", "reading", "writing", "done", "stopped", "interrupted", "failed"
]
RUNNING: tuple[NodeState, ...] = ("queued", "reading", "writing")


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


# Fields of a record or a value in it, with their defaults. No value equals a new object.
_FIELDS = {
    kind: [
        (field.name, object() if field.default is MISSING else field.default)
        for field in fields(kind)
    ]
    for kind in (*_RECORDS.values(), Settings, Info, SegmentRef)
}


def encode(record: Record) -> str:
    """The record as JSON in ASCII."""
    return json.dumps(record, default=to_json)


def decode(text: str | bytes) -> Record:
    """The record that `encode` made a text of. Raises ValueError if it is none."""
    return _record(json.loads(text))


def to_json(value: Any) -> dict[str, Any]:
    """What `json.dumps` takes as `default` for records and the values in them."""
    kind = type(value)
    pairs = ((name, getattr(value, name), default) for name, default in _FIELDS[kind])
    result = {name: item for name, item, default in pairs if item != default}
    if kind.__name__ in _RECORDS:
        result["record"] = kind.__name__
    return result


def from_json(kind: type[Any], values: dict[str, Any]) -> Any:
    """A record or a value in one, out of its fields.

    Raises TypeError, ValueError or LookupError if they do not fit.
    """
    return kind(**{name: _value(name, value) for name, value in values.items()})


def _value(name: str, value: Any) -> Any:
    match name:
        case "settings":
            return from_json(Settings, value)
        case "info":
            return from_json(Info, value)
        case "segments":
            return tuple(from_json(SegmentRef, item) for item in value)
        case "changes":
            return tuple(map(_record, value))
        case _:
            return tuple(value) if type(value) is list else value


def _record(value: Any) -> Record:
    try:
        kind = _RECORDS[value.pop("record")]
        record: Record = from_json(kind, value)
        return record
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a record of this version ({error!r})") from None
