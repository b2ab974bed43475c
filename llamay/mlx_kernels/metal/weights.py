"""A program's tensors as MLX arrays: matrices as bytes of the file, vectors as float32."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from llamay.errors import UnsupportedModelError
from llamay.formats import Format, Tensor
from llamay.mlx_kernels import Float32Array
from llamay.mlx_kernels.program import (
    AttentionInput,
    AttentionOutput,
    FeedForward,
    Logits,
    Program,
    matrices,
)

UNIT = 16  # columns of a row of weights that a lane takes at once


@dataclass(frozen=True, slots=True)
class Matrix:
    """data: [rows, bytes of a row] uint8, blocks as they lie in the file.

    Of two dimensions, as MLX counts each in 32 bits, and a matrix may have more bytes.
    """

    data: mx.array
    format: Format
    rows: int
    columns: int


class Weights:
    """Looks arrays up by tensor."""

    def __init__(self, program: Program) -> None:
        """Raises UnsupportedModelError for a tensor without a Metal kernel."""
        self._matrices: dict[int, Matrix] = {}
        self._vectors: dict[int, mx.array] = {}
        self._biases: dict[int, mx.array | None] = {}
        self._head_norms: dict[int, mx.array | None] = {}
        for operation in program.operations:
            for tensor in matrices(operation):
                if id(tensor) not in self._matrices:
                    self._matrices[id(tensor)] = _matrix(tensor)
            if isinstance(operation, AttentionInput | FeedForward | Logits):
                self._vectors[id(operation.norm)] = mx.array(_vector(operation.norm))
            if isinstance(operation, AttentionOutput | FeedForward) and operation.post_norm:
                weight = operation.post_norm.weight
                self._vectors[id(weight)] = mx.array(_vector(weight))
            if isinstance(operation, AttentionInput):
                self._biases[operation.layer] = _joined_bias(operation)
                self._head_norms[operation.layer] = _joined_head_norms(operation)

    def matrix(self, tensor: Tensor) -> Matrix:
        """A matrix of the program."""
        return self._matrices[id(tensor)]

    def vector(self, tensor: Tensor) -> mx.array:
        """[columns] float32: a norm of the program."""
        return self._vectors[id(tensor)]

    def bias(self, layer: int) -> mx.array | None:
        """[query, key and value outputs] float32, or None if the layer has no bias."""
        return self._biases[layer]

    def head_norms(self, layer: int) -> mx.array | None:
        """[2, head_dim] float32, of queries and of keys, or None if the layer has no such norms."""
        return self._head_norms[layer]


def _matrix(tensor: Tensor) -> Matrix:
    if tensor.columns % UNIT:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r}: expected rows of a multiple of {UNIT} weights, found "
            f"{tensor.columns}; use --device cpu"
        )
    data = np.frombuffer(tensor.data, dtype=np.uint8).reshape(tensor.rows, -1)
    return Matrix(mx.array(data), tensor.format, tensor.rows, tensor.columns)


def _vector(tensor: Tensor) -> Float32Array:
    if tensor.format is not Format.F32:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r}: expected F32, found {tensor.format.name}; "
            "use another conversion of the model"
        )
    return np.frombuffer(tensor.data, dtype=np.float32)


def _joined_bias(operation: AttentionInput) -> mx.array | None:
    parts = [
        (operation.query, operation.query_bias),
        (operation.key, operation.key_bias),
        (operation.value, operation.value_bias),
    ]
    if all(bias is None for _, bias in parts):
        return None
    return mx.array(
        np.concatenate(
            [
                np.zeros(weights.rows, np.float32) if bias is None else _vector(bias)
                for weights, bias in parts
            ]
        )
    )


def _joined_head_norms(operation: AttentionInput) -> mx.array | None:
    if operation.query_norm is None or operation.key_norm is None:
        return None
    return mx.array(np.stack([_vector(operation.query_norm), _vector(operation.key_norm)]))
