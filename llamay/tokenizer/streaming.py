"""Ids -> text as they come, whole characters only."""

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamay.tokenizer.tokenizer import Tokenizer


class StreamingDecoder:
    """Decodes ids fed one at a time; the pieces, joined, are what `Tokenizer.decode` gives."""

    def __init__(self, tokenizer: "Tokenizer", *, start_of_text: bool = False) -> None:
        """Start empty; `start_of_text` as in `Tokenizer.decode`."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = start_of_text and tokenizer.adds_space_prefix

    def feed(self, token_id: int) -> str:
        """The text that became complete with this id; often empty within a character."""
        data = self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            data = data.removeprefix(b" ")
            self._drop_space = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left: U+FFFD if the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)
