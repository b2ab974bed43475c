"""GGUF vocabulary -> tokenizer, streaming UTF-8.

Chat templates are in `llamay.tokenizer.chat`, imported apart: Jinja takes a while to load.
"""

from llamay.tokenizer.streaming import StreamingDecoder
from llamay.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamingDecoder", "Tokenizer"]
