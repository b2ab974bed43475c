"""Splits text into the words that byte-level BPE may not merge across.

A pre-tokenizer is a few regular expressions over Unicode classes. The classes are those of
Unicode 15.1, which llama.cpp uses too, and not the running Python's, so that a text has the same
ids everywhere. To keep the expressions small and fast, a text is first mapped to one byte for each
character: ASCII stays, everything else becomes a byte that stands for its class.
"""

import re
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from llamay.tokenizer.unicode_classes import LETTERS, NUMBERS, PUNCTUATION, WHITESPACE

_LETTER, _NUMBER, _SPACE, _PUNCTUATION, _OTHER = range(0x80, 0x85)

_L = rb"A-Za-z\x80"
_N = rb"0-9\x81"
_S = rb"\t-\r \x82"
_P = rb"!-#%-*,-/:;?@\[-\]_{}\x83"

_SPACES = b"[%s]+(?![^%s])|[%s]+" % (_S, _S, _S)
_GPT2 = b"'(?:[stmd]|re|ve|ll)| ?[%s]+| ?[%s]+| ?[^%s%s%s]+|" % (_L, _N, _S, _L, _N) + _SPACES
_SHORT = b"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"  # what is left of a verb
_QWEN2 = (
    _SHORT
    + b"|[^\r\n%s%s]?[%s]+|[%s]%%s" % (_L, _N, _L, _N)
    + b"| ?[^%s%s%s]+[\r\n]*|[%s]*[\r\n]+|" % (_S, _L, _N, _S)
    + _SPACES
)
# Words begin at a capital letter; letters above ASCII are of either case.
_TEKKEN = (
    rb"[^\r\n%s%s]?(?:[A-Z\x80]*[a-z\x80]+|[A-Z\x80]+[a-z\x80]*)%%s|[%s]%%s" % (_L, _N, _N)
    + b"| ?[^%s%s%s]+[\r\n/]*|[%s]*[\r\n]+|" % (_S, _L, _N, _S)
    + _SPACES
)

# The expressions of each family, applied in order, each within the pieces of the one before.
_PATTERNS: dict[str, tuple[bytes, ...]] = {
    "default": (b"[%s$+<=>^~|]+" % _P, _GPT2, b"[%s]+" % _N, b"[0-9]{3}"),
    "gpt-2": (_GPT2,),
    "smollm": (b"[%s]" % _N, _GPT2),
    "qwen2": (_QWEN2 % b"",),
    "llama-bpe": (_QWEN2 % b"{1,3}",),
    "dbrx": (_QWEN2 % b"{1,3}",),
    "tekken": (_TEKKEN % (b"", b""),),
    "gpt-4o": (_TEKKEN % (b"(?:%s)?" % _SHORT, b"{1,3}"),),
}

# The names that files give to each family in `tokenizer.ggml.pre`.
FAMILIES: dict[str, str] = {
    name: family
    for family, names in {
        "default": "default",
        "gpt-2": "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion",
        "smollm": "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        "qwen2": "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open",
        "llama-bpe": "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        "dbrx": "dbrx smaug-bpe",
        "tekken": "tekken",
        "gpt-4o": "gpt-4o llama4 kanana2 talkie",
    }.items()
    for name in names.split()
}


class PreTokenizer:
    """One family's splitting rule; immutable."""

    def __init__(self, family: str) -> None:
        """Compile the rule of `family`, a value of FAMILIES."""
        self._patterns = tuple(re.compile(pattern) for pattern in _PATTERNS[family])

    def split(self, text: str) -> Iterator[str]:
        """Yield the words of `text` (no lone surrogates) in order; joined, they are `text`."""
        classes = text.encode() if text.isascii() else _classes(text)
        ends = [len(text)]
        for pattern in self._patterns:
            ends = _split_pieces(pattern, classes, ends)
        start = 0
        for end in ends:
            yield text[start:end]
            start = end


def _split_pieces(pattern: re.Pattern[bytes], classes: bytes, ends: list[int]) -> list[int]:
    """Split every piece at the edges of the pattern's matches; a piece is matched on its own."""
    split: list[int] = []
    start = 0
    for end in ends:
        last = start
        for match in pattern.finditer(classes, start, end):
            match_start, match_end = match.span()
            if match_start > last:
                split.append(match_start)
            split.append(match_end)
            last = match_end
        if last < end:
            split.append(end)
        start = end
    return split


def _classes(text: str) -> bytes:
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    classes: bytes = _class_table()[codes].tobytes()
    return classes


@cache
def _class_table() -> npt.NDArray[np.uint8]:
    """[0x110000] uint8: ASCII as it is, else the byte of the code point's class."""
    table = np.full(0x110000, _OTHER, np.uint8)
    for value, ranges in (
        (_LETTER, LETTERS),
        (_NUMBER, NUMBERS),
        (_PUNCTUATION, PUNCTUATION),
        (_SPACE, WHITESPACE),
    ):
        for item in ranges.split():
            first, _, last = item.partition("-")
            table[int(first, 16) : int(last or first, 16) + 1] = value
    table[:0x80] = np.arange(0x80)
    return table
