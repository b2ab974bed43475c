"""GGUF vocabulary -> tokenizer, chat template, streaming UTF-8."""

from llamay.tokenizer.chat import ChatTemplate, Segment, TurnDelta, encode_segments
from llamay.tokenizer.streaming import StreamingDecoder
from llamay.tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Segment",
    "StreamingDecoder",
    "Tokenizer",
    "TurnDelta",
    "encode_segments",
]
