from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview | NDArray[np.generic]

_Matrix = tuple[int, int, int, Buffer]
_Layout = tuple[int, int, int, int, str]

def kernel_sets() -> list[str]: ...
def packed_bytes(type_id: int, rows: int, columns: int, /) -> int: ...
def pack(type_id: int, rows: int, columns: int, source: Buffer, target: Buffer, /) -> None: ...
def pack_all(
    pool: Pool, matrices: Sequence[tuple[int, int, int, Buffer, Buffer]], release: bool, /
) -> None: ...
def dequantize_row(
    type_id: int, rows: int, columns: int, packed: Buffer, row: int, out: Buffer, /
) -> None: ...
def matmul(
    kernel_set: str,
    type_id: int,
    rows: int,
    columns: int,
    packed: Buffer,
    planes: int,
    x: Buffer,
    out: Buffer,
    /,
) -> None: ...
def page_bytes(layout: _Layout, /) -> int: ...
def export_rows(
    layout: _Layout,
    slabs: Sequence[Any],
    pages_per_slab: int,
    pages: Buffer,
    start: int,
    rows: Buffer,
    /,
) -> None: ...
def import_rows(
    layout: _Layout,
    slabs: Sequence[Any],
    pages_per_slab: int,
    pages: Buffer,
    start: int,
    rows: Buffer,
    /,
) -> None: ...
def convert_rows(source: _Layout, target: _Layout, rows: Buffer, out: Buffer, /) -> None: ...
def rope_frequencies(dim: int, base: float, /) -> list[float]: ...
def log(x: float, /) -> float: ...
def log_sum_exp(kernel_set: str, logits: Buffer, /) -> float: ...
def sample(
    kernel_set: str,
    logits: Buffer,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    /,
) -> int: ...

class Pool:
    def __init__(self, threads: int, /) -> None: ...
    @property
    def threads(self) -> int: ...

class Program:
    def __init__(
        self,
        kernel_set: str,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab: int,
        rope_interleaved: bool,
        rope_inverse: Buffer,
        rope_magnitudes: Buffer,
        attention_scale: float,
        /,
    ) -> None: ...
    def add_embed(self, table: _Matrix, scale: float, /) -> None: ...
    def add_attention_input(
        self,
        layer: int,
        norm: Buffer,
        eps: float,
        query: _Matrix,
        key: _Matrix,
        value: _Matrix,
        query_bias: Buffer | None,
        key_bias: Buffer | None,
        value_bias: Buffer | None,
        query_norm: Buffer | None,
        key_norm: Buffer | None,
        rope: int,
        /,
    ) -> None: ...
    def add_attention(self, layer: int, window: int, soft_cap: float, /) -> None: ...
    def add_attention_output(
        self, weights: _Matrix, post_norm: Buffer | None, post_eps: float, /
    ) -> None: ...
    def add_feed_forward(
        self,
        norm: Buffer,
        eps: float,
        gate: _Matrix,
        up: _Matrix,
        down: _Matrix,
        activation: str,
        post_norm: Buffer | None,
        post_eps: float,
        /,
    ) -> None: ...
    def add_logits(self, norm: Buffer, eps: float, head: _Matrix, soft_cap: float, /) -> None: ...
    def run(
        self,
        pool: Pool,
        tokens: Buffer,
        positions: Buffer,
        contexts: Buffer,
        writes: Buffer,
        page_table: Buffer,
        max_pages: int,
        layout: _Layout,
        slabs: Sequence[Any],
        pages_per_slab: int,
        logit_rows: Buffer,
        logits: Buffer,
        control: Buffer,
        /,
    ) -> bool: ...
