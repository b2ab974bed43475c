"""The GGUF file reader: metadata as Python values, tensors as views into the mapped file."""

from llamay.gguf.reader import GGUFFile, open_gguf, source_now

__all__ = ["GGUFFile", "open_gguf", "source_now"]
