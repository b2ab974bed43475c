"""Text <-> token ids, by the vocabulary of a GGUF file; the ids are llama.cpp's."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llamay.errors import UnsupportedModelError
from llamay.tokenizer.bpe import CHAR_TO_BYTE, ByteLevelBPE
from llamay.tokenizer.pretokenizer import FAMILIES
from llamay.tokenizer.special import SpecialToken, SpecialTokens
from llamay.tokenizer.spm import SPACE, SentencePieceBPE, byte_value
from llamay.tokenizer.streaming import StreamingDecoder
from llamay.tokenizer.vocabulary import (
    TokenType,
    Vocabulary,
    read_merges,
    read_value,
    read_vocabulary,
)

_SURROGATES = re.compile("[\ud800-\udfff]")
_SPM_DEFAULT_IDS = {"bos_token_id": 1, "eos_token_id": 2}
# Phi-3's own tokenizer takes white space after its special tokens away, save after these.
_PHI3_KEEPS_SPACE = frozenset(("<unk>", "<s>", "<|endoftext|>"))


class _TextEncoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """A file's tokenizer; immutable, usable from several threads.

    bos_id, eos_id:    None if the file has none
    add_bos:           a sequence starts with `bos_id`; `encode` leaves that to its caller
    stop_ids:          ids that end a generation: the file's eos, eot and eom, and those whose
                       name says so (`<|im_end|>`, `<|eot_id|>`, `<end_of_turn>`, ...: see
                       `vocabulary.STOP_NAMES`)
    adds_space_prefix: `encode` puts a space before text that starts a sequence (SentencePiece)
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: _TextEncoder,
        *,
        add_bos: bool,
        adds_space_prefix: bool,
        special_tokens_strip: bool,
    ) -> None:
        """Use `Tokenizer.from_metadata`."""
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._special = SpecialTokens(_special_tokens(vocabulary, special_tokens_strip))
        self._byte_level = isinstance(encoder, ByteLevelBPE)
        self._bytes: dict[int, bytes] = {}
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.add_bos = add_bos and self.bos_id is not None
        self.stop_ids = vocabulary.stop_ids
        self.adds_space_prefix = adds_space_prefix

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str) -> "Tokenizer":
        """Build the tokenizer that `tokenizer.ggml.*` describes; `source` names the file in errors.

        Raises UnsupportedModelError for a tokenizer model or pre-tokenizer that is not known, and
        GGUFError for lists that are missing or do not fit together.
        """
        model = read_value(metadata, source, "model", str, "")
        if model == "gpt2":
            return cls._byte_level_bpe(metadata, source)
        if model == "llama":
            return cls._sentencepiece(metadata, source)
        raise UnsupportedModelError(
            f"{source}: tokenizer.ggml.model is {model!r}, but only 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece) are supported; use a model of another family."
        )

    @classmethod
    def _byte_level_bpe(cls, metadata: Mapping[str, Any], source: str) -> "Tokenizer":
        name = read_value(metadata, source, "pre", str, "") or "default"
        family = FAMILIES.get(name)
        if family is None:
            raise UnsupportedModelError(
                f"{source}: tokenizer.ggml.pre is {name!r}, but only {', '.join(sorted(FAMILIES))} "
                "are supported; use a model of another family."
            )
        vocabulary = read_vocabulary(metadata, source, {})
        is_llama = family in ("llama-bpe", "tekken")  # or of Mistral, which follows it
        encoder = ByteLevelBPE(
            _text_ids(vocabulary),
            read_merges(metadata, source),
            family,
            ignore_merges=is_llama,
        )
        return cls(
            vocabulary,
            encoder,
            add_bos=read_value(metadata, source, "add_bos_token", bool, is_llama),
            adds_space_prefix=False,
            special_tokens_strip=_is_phi3(metadata),
        )

    @classmethod
    def _sentencepiece(cls, metadata: Mapping[str, Any], source: str) -> "Tokenizer":
        vocabulary = read_vocabulary(metadata, source, _SPM_DEFAULT_IDS)
        return cls(
            vocabulary,
            SentencePieceBPE(vocabulary.tokens, vocabulary.scores, vocabulary.types),
            add_bos=read_value(metadata, source, "add_bos_token", bool, True),
            adds_space_prefix=read_value(metadata, source, "add_space_prefix", bool, True),
            special_tokens_strip=_is_phi3(metadata),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the ids are 0 to `vocab_size - 1`."""
        return len(self._vocabulary.tokens)

    def encode(
        self,
        text: str,
        *,
        special: bool = False,
        guards: Sequence[int] = (),
        continues: bool = False,
    ) -> list[int]:
        """The ids of `text`, without bos; lone surrogates count as U+FFFD.

        special:   control tokens spelled out in `text` become those tokens; otherwise, they are
                   text like any other. User-defined tokens are matched in both cases.
        guards:    with `special`, offsets where user text spells a control token: none is matched
                   that starts at or crosses one (`chat.Segment.guards`)
        continues: the text goes on after other text, so no space is put before it
        """
        text = _SURROGATES.sub("\ufffd", text)
        after_special = not continues
        output: list[int] = []
        for piece in self._special.partition(text, control=special, guards=guards):
            if isinstance(piece, int):
                output.append(piece)
                after_special = True
            else:
                prefix = " " if after_special and self.adds_space_prefix else ""
                output += self._encoder.encode(prefix + piece)
                after_special = False
        return output

    def decode(self, ids: Sequence[int], *, start_of_text: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, control tokens nothing.

        start_of_text: the ids start a sequence: the space that `encode` put there is taken away
        """
        decoder = StreamingDecoder(self, start_of_text=start_of_text)
        return "".join(map(decoder.feed, ids)) + decoder.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: none for control, unknown and unused ones."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._spelled_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """The token's spelling in the vocabulary, such as `<|im_end|>`; for display."""
        return self._vocabulary.tokens[token_id]

    def token_id(self, text: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None."""
        return self._vocabulary.ids.get(text)

    def is_control(self, token_id: int) -> bool:
        """Whether the token is a control token: it steers the model and is never shown."""
        return token_id in self._vocabulary.control_ids

    @property
    def control_texts(self) -> frozenset[str]:
        """The spellings that `encode(..., special=True)` turns into control tokens."""
        return frozenset(token.text for token in self._special if token.control)

    def _spelled_bytes(self, token_id: int) -> bytes:
        spelling = self._vocabulary.tokens[token_id]
        kind = int(self._vocabulary.types[token_id])
        if token_id in self._vocabulary.control_ids:
            return b""
        if kind == TokenType.USER_DEFINED:
            return spelling.encode("utf-8", "surrogateescape")
        if kind == TokenType.BYTE and (byte := byte_value(spelling)) is not None:
            return bytes((byte,))
        if kind != TokenType.NORMAL:
            return b""
        if not self._byte_level:
            return spelling.replace(SPACE, " ").encode("utf-8", "surrogateescape")
        return b"".join(
            bytes((CHAR_TO_BYTE[char],))
            if char in CHAR_TO_BYTE
            else char.encode("utf-8", "surrogateescape")
            for char in spelling
        )


def _text_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """The tokens that text may become: no control tokens, whatever the merges say."""
    ids = dict(vocabulary.ids)
    for i in vocabulary.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN):
        del ids[vocabulary.tokens[i]]
    if _SURROGATES.search("".join(ids)):
        ids = {text: i for text, i in ids.items() if not _SURROGATES.search(text)}
    return ids


def _special_tokens(vocabulary: Vocabulary, strip: bool) -> list[SpecialToken]:
    user_defined = set(vocabulary.ids_of_type(TokenType.USER_DEFINED)) - vocabulary.control_ids
    control = vocabulary.control_ids.union(vocabulary.ids_of_type(TokenType.UNKNOWN))
    return [
        SpecialToken(
            id=i,
            text=text,
            control=i in control,
            strips_right=strip and text not in _PHI3_KEEPS_SPACE,
        )
        for i in control | user_defined
        if not _SURROGATES.search(text := vocabulary.tokens[i])
    ]


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    name = str(metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name
