"""SentencePiece BPE, run by the `sentencepiece` library on a model built from the vocabulary."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import sentencepiece

from llamay.tokenizer.vocabulary import TokenType

SPACE = "\u2581"

# Piece types of sentencepiece_model.proto.
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6
_MODEL_BPE = 2


class SentencePieceBPE:
    """Text without special tokens -> ids; usable from several threads."""

    def __init__(
        self, tokens: Sequence[str], scores: npt.NDArray[np.float32], types: npt.NDArray[np.int32]
    ) -> None:
        """Build the model.

        Control and unknown tokens never come out of text. Characters that are no token become
        their bytes' tokens, or nothing if the vocabulary lacks one of the 256.
        """
        self._num_ids = len(tokens)
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(_model_bytes(tokens, scores, types))

    def encode(self, text: str) -> list[int]:
        """The ids of `text` (no lone surrogates)."""
        ids: list[int] = self._processor.EncodeAsIds(text)
        if ids and max(ids) >= self._num_ids:
            return [token_id for token_id in ids if token_id < self._num_ids]
        return ids


def byte_value(spelling: str) -> int | None:
    """The byte that a token spelled `<0xHH>` stands for; None for any other spelling."""
    if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
        try:
            return int(spelling[3:5], 16)
        except ValueError:
            return None
    return None


def _model_bytes(
    tokens: Sequence[str], scores: npt.NDArray[np.float32], types: npt.NDArray[np.int32]
) -> bytes:
    """A serialized ModelProto: the pieces in order of id, then one unknown piece of our own."""
    byte_tokens = {
        byte_value(token)
        for token, kind in zip(tokens, types.tolist(), strict=True)
        if kind == TokenType.BYTE
    }
    has_all_bytes = len(byte_tokens - {None}) == 256
    piece_types: dict[int, int] = {
        TokenType.CONTROL: _CONTROL,
        TokenType.UNKNOWN: _CONTROL,
        TokenType.BYTE: _BYTE if has_all_bytes else _CONTROL,
    }
    spellings = [token.encode("utf-8", "surrogateescape") for token in tokens]
    kinds = [piece_types.get(kind, _NORMAL) for kind in types.tolist()]
    unknown = "<unk>"
    while unknown in tokens:
        unknown += ">"
    spellings.append(unknown.encode())
    kinds.append(_UNKNOWN)
    parts = _pieces(spellings, np.append(scores, np.float32(0)), kinds)
    trainer = _varint_field(3, _MODEL_BPE) + _varint_field(35, int(has_all_bytes))
    trainer += _bytes_field(45, unknown.encode()) + _varint_field(40, len(tokens))
    normalizer = _bytes_field(1, b"identity")
    normalizer += b"".join(_varint_field(field, value) for field, value in ((3, 0), (4, 0), (5, 1)))
    parts.append(_bytes_field(2, trainer))
    parts.append(_bytes_field(3, normalizer))
    return b"".join(parts)


def _pieces(
    spellings: Sequence[bytes], scores: npt.NDArray[np.float32], kinds: Sequence[int]
) -> list[bytes]:
    """Fields 1 of ModelProto: piece (1, string), score (2, float), type (3, enum).

    One expression a piece: there may be 262,144, while somebody waits.
    """
    varints = [_varint(length) for length in range(max(map(len, spellings)) + 16)]
    numbers = scores.astype("<f4").tobytes()
    parts = []
    for index, (spelling, kind) in enumerate(zip(spellings, kinds, strict=True)):
        length = varints[len(spelling)]
        whole = varints[len(spelling) + len(length) + 8]
        score = numbers[4 * index : 4 * index + 4]
        parts.append(b"\n%b\n%b%b\x15%b\x18%c" % (whole, length, spelling, score, kind))
    return parts


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
