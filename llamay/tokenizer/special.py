"""Finds the special tokens in a text and cuts it into ids and plain pieces."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_STRIPPED = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is matched as a whole before the text around it is tokenised.

    control:      matched only where control tokens are asked for; user-defined ones always are
    strips_right: takes the white space after it away with it
    """

    id: int
    text: str
    control: bool
    strips_right: bool = False


class SpecialTokens:
    """The special tokens of a vocabulary; immutable."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        """Order them as they are matched: the longest (in bytes of UTF-8) first."""
        self._tokens = [
            (token, frozenset(token.text))
            for token in sorted(tokens, key=lambda token: (-len(token.text.encode()), token.id))
        ]

    def __iter__(self) -> Iterator[SpecialToken]:
        return (token for token, _ in self._tokens)

    def partition(
        self, text: str, *, control: bool, guards: Sequence[int] = ()
    ) -> Iterator[int | str]:
        """Yield the ids of special tokens and the non-empty pieces of text between them.

        control: match control tokens too
        guards:  offsets into `text`, ascending; no control token is matched whose first
                 character lies at one, or that crosses one

        A longer token is matched before a shorter one, wherever in the text they are.
        """
        letters = set(text)
        pieces: list[tuple[int, int] | int] = [(0, len(text))] if text else []
        for token, token_letters in self._tokens:
            if (control or not token.control) and token_letters <= letters and token.text in text:
                pieces = self._cut(text, pieces, token, guards)
        for piece in pieces:
            yield piece if isinstance(piece, int) else text[piece[0] : piece[1]]

    @staticmethod
    def _cut(
        text: str, pieces: list[tuple[int, int] | int], token: SpecialToken, guards: Sequence[int]
    ) -> list[tuple[int, int] | int]:
        """Cut every piece at the token's occurrences."""
        cut: list[tuple[int, int] | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                cut.append(piece)
                continue
            start, end = piece
            pos = start
            while (found := text.find(token.text, pos, end)) != -1:
                after = found + len(token.text)
                if token.control and _is_guarded(guards, found, after):
                    pos = found + 1
                    continue
                if found > start:
                    cut.append((start, found))
                cut.append(token.id)
                while token.strips_right and after < end and text[after] in _STRIPPED:
                    after += 1
                start = pos = after
            if start < end:
                cut.append((start, end))
        return cut


def _is_guarded(guards: Sequence[int], start: int, end: int) -> bool:
    first = bisect_left(guards, start)
    return first < len(guards) and guards[first] < end
