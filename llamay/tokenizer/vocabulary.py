"""A GGUF file's vocabulary: tokens, their types, and the ids with a role.

Keys and defaults follow the GGUF specification (`tokenizer.ggml.*`) and, where it is silent,
llama.cpp's `llama-vocab.cpp`, so that the same file gives the same ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from llamay.errors import GGUFError

T = TypeVar("T")

PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# A generation ends at any of these, whatever the file says of their type.
STOP_NAMES = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~["
)

# Roles that older files leave to be found by name: the metadata key, the names, and whether the
# token ends a generation.
NAMED_ROLES: tuple[tuple[str, str, bool], ...] = (
    (
        "fim_pre_token_id",
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> "
        "<|prefix|>",
        False,
    ),
    (
        "fim_suf_token_id",
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> "
        "<|suffix|>",
        False,
    ),
    (
        "fim_mid_token_id",
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> "
        "<|middle|>",
        False,
    ),
    ("fim_pad_token_id", "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]", True),
    ("fim_rep_token_id", "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>", True),
    ("fim_sep_token_id", "<|file_sep|>", True),
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id; made by `read_vocabulary`.

    tokens:   spelling by id (byte-level BPE: in its byte alphabet; SentencePiece: U+2581 for a
              space); bytes that are not UTF-8 are lone surrogates (`surrogateescape`)
    ids:      spelling -> id
    types:    [vocab_size] int32, TokenType by id as the file says
    scores:   [vocab_size] float32; zeros if the file has none
    control_ids: tokens of type CONTROL, and those known by name to have a control token's role
    stop_ids: ids that end a generation: the file's eos, eot and eom, and those known by name
    """

    tokens: list[str]
    ids: dict[str, int]
    types: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    bos_id: int | None
    eos_id: int | None
    control_ids: frozenset[int]
    stop_ids: frozenset[int]

    def ids_of_type(self, *kinds: TokenType) -> list[int]:
        """The ids whose type is one of `kinds`, ascending."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, kinds)).tolist()
        return ids


def read_vocabulary(
    metadata: Mapping[str, Any], source: str, default_ids: Mapping[str, int]
) -> Vocabulary:
    """Read and check the `tokenizer.ggml` lists of a file; changes nothing.

    source:      the file's name, for error messages
    default_ids: ids that the tokenizer's family implies when the file gives none, by key

    Raises GGUFError if a list is missing, of the wrong type or length, or names a token twice.
    """
    tokens = _strings(metadata, source, "tokens")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        _reject_duplicate(tokens, source)
    types = _numbers(metadata, source, "token_type", len(tokens), TokenType.NORMAL)
    types = types.astype(np.int32)
    scores = _numbers(metadata, source, "scores", len(tokens), 0.0).astype(np.float32)
    given = {
        key: _id(metadata, source, key, len(tokens), default_ids.get(key))
        for key in ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")
    }
    stops = {ids[name] for name in STOP_NAMES.split() if name in ids}
    control = stops | set(np.flatnonzero(types == TokenType.CONTROL).tolist())
    stops.update(i for key, i in given.items() if i is not None and key != "bos_token_id")
    for key, names, ends in NAMED_ROLES:
        token_id = _id(metadata, source, key, len(tokens), None)
        if token_id is None:
            token_id = min((ids[name] for name in names.split() if name in ids), default=None)
            control.update(() if token_id is None else (token_id,))
        if ends and token_id is not None:
            stops.add(token_id)
    return Vocabulary(
        tokens=tokens,
        ids=ids,
        types=types,
        scores=scores,
        bos_id=given["bos_token_id"],
        eos_id=given["eos_token_id"],
        control_ids=frozenset(control),
        stop_ids=frozenset(stops),
    )


def read_value(metadata: Mapping[str, Any], source: str, key: str, kind: type[T], default: T) -> T:
    """The value of `tokenizer.ggml.<key>`, or the default if the file has none.

    Raises GGUFError if it is of another kind.
    """
    value = metadata.get(PREFIX + key, default)
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        _reject(source, key, f"a value of type {kind.__name__}", type(value).__name__)
    return value


def read_merges(metadata: Mapping[str, Any], source: str) -> list[str]:
    """The BPE merges in order of rank, each two spellings with a space between.

    Raises GGUFError if the list is missing or not of strings.
    """
    return _strings(metadata, source, "merges")


def _strings(metadata: Mapping[str, Any], source: str, key: str) -> list[str]:
    values = metadata.get(PREFIX + key)
    if values is None:
        _reject(source, key, "a list of strings", "no such key")
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        _reject(source, key, "a list of strings", type(values).__name__)
    strings = list(values)
    for kind in set(map(type, strings)) - {str}:
        _reject(source, key, "a list of strings", f"an entry of type {kind.__name__}")
    return strings


def _numbers(
    metadata: Mapping[str, Any], source: str, key: str, count: int, default: float
) -> npt.NDArray[Any]:
    values = metadata.get(PREFIX + key)
    if values is None:
        return np.full(count, default)
    try:
        numbers = np.asarray(values)
    except ValueError:
        _reject(source, key, "a list of numbers", "a list of lists")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        _reject(source, key, "a list of numbers", f"{numbers.ndim} dimensions of {numbers.dtype}")
    if len(numbers) < count:
        _reject(source, key, f"one entry for each of the {count} tokens", f"{len(numbers)} entries")
    return numbers[:count]


def _id(
    metadata: Mapping[str, Any], source: str, key: str, count: int, default: int | None
) -> int | None:
    """An id outside the vocabulary counts as not given: files write -1 for "none"."""
    value = read_value(metadata, source, key, int, -1)
    if 0 <= value < count:
        return value
    return default if default is not None and default < count else None


def _reject_duplicate(tokens: list[str], source: str) -> NoReturn:
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if token in seen:
            _reject(source, "tokens", "different tokens", f"{token!r} at {seen[token]} and {i}")
        seen[token] = i
    raise AssertionError("called without a duplicate")


def _reject(source: str, key: str, expected: str, found: str) -> NoReturn:
    raise GGUFError(
        f"{source}: {PREFIX}{key}: expected {expected}, found {found}; "
        "get the file again or convert the model anew."
    )
