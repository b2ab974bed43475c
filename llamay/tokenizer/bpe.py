"""Byte-level BPE: words of a pre-tokenizer, merged by the `tokenizers` library."""

from collections.abc import Iterable, Mapping

from tokenizers.models import BPE

from llamay.tokenizer.pretokenizer import PreTokenizer

# GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others for U+0100 and up.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_REST = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_TO_CHAR = dict(zip(_PRINTABLE, map(chr, _PRINTABLE), strict=True)) | {
    byte: chr(0x100 + i) for i, byte in enumerate(_REST)
}
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}

_MAX_CACHED_WORDS = 1 << 16
_MAX_CACHED_LEN = 64


class ByteLevelBPE:
    """Text without special tokens -> ids; usable from several threads."""

    def __init__(
        self,
        ids: Mapping[str, int],
        merges: Iterable[str],
        family: str,
        *,
        ignore_merges: bool,
    ) -> None:
        """Build the merge table; takes about 0.2 s for 150,000 tokens.

        ids:    the spellings that text may become, in the byte alphabet
        merges: "left right" in order of rank; those with a spelling that is not in `ids` are
                left out, since they can never give a token
        family: a value of `pretokenizer.FAMILIES`
        ignore_merges: a word that is a token as it stands is not merged
        """
        self._ids = ids
        self._pre_tokenizer = PreTokenizer(family)
        self._ignore_merges = ignore_merges
        self._num_ids = 1 + max(ids.values(), default=-1)
        vocab = dict(ids)
        for char in BYTE_TO_CHAR.values():
            # A byte without a token takes part as a symbol that nothing merges with.
            vocab.setdefault(char, self._num_ids + ord(char))
        self._bpe = _build(vocab, merges)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of `text` (no lone surrogates); bytes without a token give none."""
        cache = self._cache
        output: list[int] = []
        for word in self._pre_tokenizer.split(text):
            ids = cache.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(word) <= _MAX_CACHED_LEN:
                    if len(cache) >= _MAX_CACHED_WORDS:
                        self._cache = cache = {}
                    cache[word] = ids
            output += ids
        return output

    def _encode_word(self, word: str) -> list[int]:
        spelling = word.encode().decode("latin-1").translate(BYTE_TO_CHAR)
        if self._ignore_merges and (token_id := self._ids.get(spelling)) is not None:
            return [token_id]
        return [token.id for token in self._bpe.tokenize(spelling) if token.id < self._num_ids]


def _build(vocab: dict[str, int], merges: Iterable[str]) -> BPE:
    # The first of two equal merges counts.
    merges = list(dict.fromkeys(merges))
    halves = iter(" ".join(merges).split(" "))
    pairs = list(zip(halves, halves, strict=False))
    if len(pairs) != len(merges) or next(halves, None) is not None:
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        return BPE(vocab, pairs)
    except Exception:
        # The library refuses merges of spellings that are not in the vocabulary.
        return BPE(vocab, [pair for pair in pairs if {*pair, "".join(pair)} <= vocab.keys()])
