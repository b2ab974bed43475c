"""Tables and plain types that every layer shares; imports nothing of ours.

The tensor formats are those of the GGUF specification (ggml's `docs/gguf.md` and the block
structures of `ggml-common.h`): a row is a sequence of blocks, each `block_len` weights in
`block_bytes` bytes.
"""

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    """A weight format: value is (ggml type id, weights in a block, bytes in a block)."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)
    BF16 = (30, 1, 2)

    @property
    def type_id(self) -> int:
        """ggml's number for this type, as GGUF files store it."""
        return self.value[0]

    @property
    def block_len(self) -> int:
        """Weights in one block."""
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.value[2]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights; `columns` is a multiple of `block_len`."""
        return columns // self.block_len * self.block_bytes


FORMAT_BY_TYPE_ID = {format.type_id: format for format in Format}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it lies in a file: a read-only view, nothing copied.

    shape: outermost first (numpy's order; GGUF stores the reverse); rows are contiguous
    data:  the tensor's bytes, `rows * format.row_bytes(columns)` of them
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    data: memoryview

    @property
    def columns(self) -> int:
        """Weights in a row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return count


class KVPrecision(Enum):
    """How keys and values are stored; the value is the name that users and files give it."""

    F32 = "f32"
    F16 = "f16"
    VQ8 = "vq8"  # keys float32, values quantised
    Q8 = "q8"  # both quantised

    @property
    def elements(self) -> tuple[str, str]:
        """What keys and values are stored as: f4, f2, or i1 with a float32 scale for each head."""
        match self:
            case KVPrecision.F32:
                return "f4", "f4"
            case KVPrecision.F16:
                return "f2", "f2"
            case KVPrecision.VQ8:
                return "f4", "i1"
            case KVPrecision.Q8:
                return "i1", "i1"

    def vector_bytes(self, head_dim: int) -> tuple[int, int]:
        """Bytes of one head's keys and of its values at one position, scales included."""
        keys, values = (
            head_dim * int(element[1]) + (4 if element == "i1" else 0) for element in self.elements
        )
        return keys, values


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a model's keys and values in a page.

    layers, kv_heads, head_dim: counts of the model
    page_tokens: positions in a page

    A position's row, which is what leaves the kernels, is [layers][keys, values][kv_heads] vectors;
    a quantised vector is its scale, float32, and then int8 [head_dim]. All is little-endian.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int = 64
    precision: KVPrecision = KVPrecision.F32

    @property
    def row_bytes(self) -> int:
        """Bytes of one position's row."""
        return self.layers * self.kv_heads * sum(self.precision.vector_bytes(self.head_dim))
