"""A turn of a session: plain data, changed by `Tree` only."""

import threading
from dataclasses import dataclass, field

from llamay.session.records import NO_SETTINGS, NodeState, Role, SegmentRef, Settings

_joining = threading.Lock()


@dataclass(slots=True)
class Node:
    """A turn; read it, and change it by records.

    keeps:      None while the node has no ids of its own: all that its parent has
    ids:        the tokens that it adds; logprobs: one for each id of an answer
    settings:   what is set at this node; `Tree.effective` has what holds
    seed_index: of an answer: which child of its user's turn; seed: what it was sampled with
    created:    seconds since 1970; seconds: generation time
    model:      weights_sha256 of what made or read its ids
    hidden:     deleted or undone, by itself; what is below a hidden node is not seen either
    first_free_seed: seed indices below it were used by answers that are gone for good
    """

    id: int
    parent: int
    role: Role
    pieces: list[str]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    keeps: int | None = None
    label: str | None = None
    settings: Settings = NO_SETTINGS
    seed_index: int | None = None
    seed: int | None = None
    state: NodeState = "done"
    finish_reason: str | None = None
    error: str | None = None
    created: float = 0.0
    seconds: float | None = None
    model: str | None = None
    segments: tuple[SegmentRef, ...] = ()
    hidden: bool = False
    first_free_seed: int = 0

    @property
    def text(self) -> str:
        """What the turn says; an answer's grows by pieces, joined when somebody looks."""
        if len(self.pieces) != 1:
            with _joining:  # other threads look too, and one may be appending
                count = len(self.pieces)
                self.pieces[:count] = ["".join(self.pieces[:count])]
        return self.pieces[0]

    def preview(self, columns: int = 32) -> str:
        """The beginning of the text on one line of at most so many characters."""
        line = " ".join(self.text.split())
        return line if len(line) <= columns else line[: columns - 1] + "…"
