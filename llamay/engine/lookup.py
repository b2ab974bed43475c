"""Drafts of what comes next, looked up in what came before.

A text that repeats itself (code, quotations, lists) goes on as it did the last time. What followed
the previous occurrence of the latest tokens is computed in one step with the next token, and kept
as far as sampling agrees: by the numerics contract and stateless sampling, the same tokens and the
same bits as without. Saxena, "Prompt Lookup Decoding" (2023).
"""

from collections.abc import Sequence

NGRAM = 3  # tokens that must have occurred before
MAX_DRAFT = 8
# A step with one more row costs about a third of a step with one row only, and nearly all of its
# share in a step of many: drafts must then be right more often to pay.
FEW_ROWS = 4
WORTH_IT, WORTH_IT_AMONG_MANY = 0.3, 0.7
PAUSE = 16  # tokens without a draft once they do not pay; doubles each time
MAX_PAUSE = 512


class PromptLookup:
    """Drafts for one answer; learns how often it is right."""

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], int] = {}  # n-gram -> where its follower stands
        self._indexed = 0  # followers below this position are in the table
        self._length = NGRAM
        self._rate = 1.0  # share of drafted tokens that was right lately
        self._wanted = WORTH_IT
        self._pause = PAUSE
        self._resume_at = 0

    def draft(self, history: Sequence[int], token: int, rows: int) -> list[int]:
        """What may follow `history` and then `token`, at most `MAX_DRAFT` tokens.

        history: all tokens so far, those of the last call first
        rows:    rows that the step computes without the draft
        """
        self._index(history)
        if len(history) < self._resume_at:
            return []
        self._wanted = WORTH_IT if rows < FEW_ROWS else WORTH_IT_AMONG_MANY
        at = self._followers.get((*history[1 - NGRAM :], token))
        if at is None:
            return []
        draft = list(history[at : at + self._length])
        if len(draft) < self._length:  # a short period: the draft goes on from itself
            draft.append(token)
            draft += [draft[i % len(draft)] for i in range(self._length - len(draft))]
        return draft

    def judge(self, drafted: int, right: int, position: int) -> None:
        """Learns that of `drafted` tokens the first `right` were right; position: the next."""
        self._rate += (right / drafted - self._rate) / 4
        if right == drafted:
            self._length = min(MAX_DRAFT, self._length + 2)
            self._pause = PAUSE
        elif self._rate < self._wanted:
            self._length = NGRAM
            self._rate = self._wanted  # after the pause, one more chance
            self._resume_at = position + self._pause
            self._pause = min(MAX_PAUSE, 2 * self._pause)

    def _index(self, history: Sequence[int]) -> None:
        """Takes up n-grams that have a follower now; the latest occurrence counts."""
        for end in range(max(NGRAM, self._indexed), len(history)):
            self._followers[tuple(history[end - NGRAM : end])] = end
        self._indexed = max(self._indexed, len(history))
