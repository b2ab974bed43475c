"""What a user's turn is to the model: the tokens that the chat template adds for it.

Tokens of earlier turns stay as they are, unless the template makes something else of them now.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile

from llamay.engine import Model
from llamay.session.node import Node
from llamay.session.tree import Tree
from llamay.tokenizer.chat import ChatTemplate, encode_segments

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn adds.

    keeps:  how many of the tokens before it stay; None: all
    notice: a sentence for the user if some do not
    """

    ids: tuple[int, ...]
    keeps: int | None = None
    notice: str | None = None


@dataclass(frozen=True, slots=True)
class _Before:
    """What stands before a turn, and the turn's own message as the last of `messages`.

    first:   which message is the first turn's (the one before it is the system prompt)
    history: the tokens of all turns
    """

    nodes: Sequence[Node]
    messages: Sequence[Message]
    first: int
    history: Sequence[int]

    @property
    def answers(self) -> dict[int, Sequence[int]]:
        """The ids of answers by the index of their message."""
        pairs = enumerate(self.nodes, self.first)
        return {i: node.ids for i, node in pairs if node.role == "assistant"}


class Prompts:
    """Renders turns for one model; for one thread at a time.

    weights: weights_sha256 of the model; started: when the session began, in seconds since 1970,
             which is what templates with a date are told: text does not change overnight
    """

    def __init__(self, model: Model, weights: str, started: float) -> None:
        self._model = model
        self._weights = weights
        self._now = datetime.fromtimestamp(started)
        self._template: ChatTemplate | None = None
        self._checked: set[tuple[int, str]] = set()  # (turn, system prompt) rendered as it stands

    def turn(self, tree: Tree, lock: threading.RLock, user: int) -> Turn:
        """The tokens of a user's turn that has none yet; what stands before it is finished.

        lock: guards `tree`; it is not held while text is rendered
        Raises TemplateError if the model has no chat template, or it refuses the messages.
        """
        with lock:
            path = [tree.node(id) for id in tree.path(user)[1:]]
            messages = tree.messages(user)
            history = tree.history(path[-1].parent)
        before = _Before(path[:-1], messages, len(messages) - len(path), history)
        if not before.nodes:
            return Turn(tuple(self._whole(messages, {})))
        if any(node.model not in (None, self._weights) for node in before.nodes):
            return self._of_another_model(before)
        if not self._stands(before):
            ids = self._whole(messages, before.answers)
            return self._replacing(before, ids, "the system prompt changed")
        delta = self._chat_template().turn_delta(messages[:-1], messages[-1:], now=self._now)
        tokenizer = self._model.tokenizer
        if delta.changed_at is None:
            return Turn(tuple(encode_segments(tokenizer, delta.segments, continues=True)))
        ids = encode_segments(tokenizer, delta.segments, before.answers)
        return self._replacing(before, ids, "the chat template changed earlier text")

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = self._model.chat_template()
        return self._template

    def _whole(
        self, messages: Sequence[Message], answers: Mapping[int, Sequence[int]]
    ) -> list[int]:
        segments = self._chat_template().render(messages, now=self._now)
        return encode_segments(self._model.tokenizer, segments, answers)

    def _stands(self, before: _Before) -> bool:
        """Whether the tokens of earlier turns begin as they would be rendered now."""
        turn, end = _last_rendered_whole(before.nodes)
        messages = before.messages[: before.first + turn + 1]
        system = messages[0]["content"] if before.first else ""
        known = (before.nodes[turn].id, system)
        if known not in self._checked:
            if self._whole(messages, before.answers) != list(before.history[:end]):
                return False
            self._checked.add(known)
        return True

    def _replacing(self, before: _Before, ids: Sequence[int], why: str) -> Turn:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before.history, ids, strict=False))
        keeps = min(sum(1 for _ in same), len(ids) - 1)
        again = len(ids) - keeps
        return Turn(tuple(ids[keeps:]), keeps, f"{why}: {again:,} tokens are read again")

    def _of_another_model(self, before: _Before) -> Turn:
        """All of the conversation is this turn's own: nothing another model computed is of use."""
        decode = self._model.tokenizer.decode
        answers = [node for node in before.nodes if node.role == "assistant"]
        size = self._model.tokenizer.vocab_size
        same = all(
            max(node.ids, default=0) < size and decode(node.ids).startswith(node.text)
            for node in answers
        )
        ids = self._whole(before.messages, before.answers if same else {})
        name = self._model.name
        notice = (
            f"{name} reads all {len(ids):,} tokens of what another model wrote"
            if same
            else f"{name} has another tokenizer: the text is tokenised anew, {len(ids):,} tokens"
        )
        return Turn(tuple(ids), 0, notice)


def _last_rendered_whole(nodes: Sequence[Node]) -> tuple[int, int]:
    """The last turn that did not just continue what stood before it, and where its tokens end."""
    turn = end = length = 0
    for i, node in enumerate(nodes):
        keeps = length if node.keeps is None else node.keeps
        length_before, length = length, keeps + len(node.ids)
        if i == 0 or (node.role == "user" and keeps < length_before):
            turn, end = i, length
    return turn, end
