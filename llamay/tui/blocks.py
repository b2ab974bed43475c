"""A growing answer in blocks: what is complete never changes, only what is last grows.

So a token costs what the last block costs, however long the answer is.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["prose", "code", "thinking"]

_MAX_CHARS = 2000  # a paragraph or line longer than this goes on in a new block
_MAX_LINES = 100  # so do code and thinking
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$")
_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])[ \t]")
_HEADING = re.compile(r"#{1,6}(?:[ \t]|$)")
_THINKING, _END_OF_THINKING = "<think>", "</think>"
_MARKERS = (_THINKING, "```", "~~~")


@dataclass(slots=True)
class Block:
    """A piece of an answer.

    source:   its Markdown; of code and thinking, the text inside
    gap:      whether an empty line stands before it
    language: of code, as the answer names it
    goes_on:  whether it continues the block before it, of the same kind
    lines:    how many its source has
    """

    kind: Kind
    source: str = ""
    gap: bool = False
    language: str = ""
    goes_on: bool = False
    lines: int = 0

    def append(self, line: str) -> None:
        """Adds a line."""
        self.source = f"{self.source}\n{line}" if self.lines else line
        self.lines += 1


class Blocks:
    """Takes an answer's text piece by piece.

    complete: blocks that will not change; growing: those after them, anew with each piece
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.complete: list[Block] = []
        self.growing: list[Block] = []
        self._cutter = _Cutter(self.complete)
        self._line = ""

    def feed(self, text: str) -> None:
        """Appends text."""
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            self._take(line)
        while len(rest) > _MAX_CHARS:
            cut = rest.rfind(" ", _MAX_CHARS // 2, _MAX_CHARS) + 1 or _MAX_CHARS
            self._cutter.take(rest[:cut])
            self._cutter.close()
            rest = rest[cut:]
        self._line = rest
        self.growing = self._cutter.trial(rest)

    def finish(self) -> None:
        """Nothing more comes: all blocks are complete."""
        self._take(self._line)
        self._cutter.close()
        self._line, self.growing = "", []

    def _take(self, line: str) -> None:
        for piece in _pieces(line):
            self._cutter.take(piece)


def _pieces(line: str) -> Iterator[str]:
    for start in range(0, max(len(line), 1), _MAX_CHARS):
        yield line[start : start + _MAX_CHARS]


class _Cutter:
    """Cuts lines into blocks, the complete ones to `done`."""

    def __init__(self, done: list[Block]) -> None:
        self._done = done
        self._open: Block | None = None
        self._blank = False  # whether the line before was empty
        self._fence = ""  # what ends the code that is open
        self._last: Kind | None = None  # of the block before the next one

    def trial(self, line: str) -> list[Block]:
        """The blocks after the complete ones, if `line` came next; changes nothing."""
        stripped = line.strip()
        if stripped and any(marker.startswith(stripped) for marker in _MARKERS):
            line = ""  # may become a marker, which is not shown
        trial = _Cutter([])
        trial._open = replace(self._open) if self._open else None
        trial._blank, trial._fence, trial._last = self._blank, self._fence, self._last
        if line:
            trial.take(line)
        trial.close()
        return trial._done

    def take(self, line: str) -> None:
        """Takes a whole line."""
        if self._open and self._open.kind == "thinking":
            self._take_thinking(self._open, line)
        elif self._open and self._open.kind == "code":
            self._take_code(self._open, line)
        elif not line.strip():
            self._blank = True
        elif line.lstrip().startswith(_THINKING):
            block = self._begin("thinking")
            self._take_thinking(block, line.lstrip().removeprefix(_THINKING))
        elif fence := _FENCE.match(line):
            self._begin("code", language=fence[2])
            self._fence = fence[1]
        else:
            self._take_prose(line)

    def close(self) -> None:
        """Completes the block that is open."""
        if self._open:
            self._done.append(self._open)
        self._open = None

    def _take_prose(self, line: str) -> None:
        block = self._open
        if block is None or self._begins_block(block, line):
            block = self._begin("prose")
        elif self._blank:
            block.append("")
        block.append(line)
        self._blank = False
        if _HEADING.match(line) or len(block.source) > _MAX_CHARS:
            self.close()

    def _begins_block(self, block: Block, line: str) -> bool:
        if self._blank:  # what is indented goes on with the item before it
            return not (_ITEM.match(block.source) and line.startswith(("  ", "\t")))
        return bool(_HEADING.match(line) or _ITEM.match(line))

    def _take_code(self, block: Block, line: str) -> None:
        stripped = line.strip()
        if stripped.startswith(self._fence) and not stripped.strip(self._fence[0]):
            self.close()
            return
        if block.lines >= _MAX_LINES:
            block = self._begin("code", language=block.language, goes_on=True)
        block.append(line)

    def _take_thinking(self, block: Block, line: str) -> None:
        thought, end, rest = line.partition(_END_OF_THINKING)
        if block.lines >= _MAX_LINES:
            block = self._begin("thinking", goes_on=True)
        if thought.strip() or block.lines:
            block.append(thought)
        if end:
            self.close()
            if rest.strip():
                self.take(rest.lstrip())

    def _begin(self, kind: Kind, *, language: str = "", goes_on: bool = False) -> Block:
        self.close()
        apart = self._blank or kind != "prose" or self._last not in (None, "prose")
        gap = apart and self._last is not None and not goes_on
        self._open = Block(kind, gap=gap, language=language, goes_on=goes_on)
        self._last, self._blank = kind, False
        return self._open
