"""The tensors of a decoder, by GGUF's names, checked against its spec before they are used."""

from collections.abc import Sequence

from llamay.errors import GGUFError
from llamay.formats import Tensor
from llamay.gguf import GGUFFile


class Weights:
    """Looks tensors up by name and checks their shapes."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """A tensor of shape [rows, columns]. Raises GGUFError if it is missing or another."""
        return self._checked(name, (rows, columns))

    def fused(self, name: str, rows: Sequence[int], columns: int) -> list[Tensor]:
        """Matrices [rows, columns] that one tensor holds, one below the other.

        Raises GGUFError if it is missing or of another shape.
        """
        whole = self.matrix(name, sum(rows), columns)
        row_bytes = whole.format.row_bytes(columns)
        parts, start = [], 0
        for number, count in enumerate(rows):
            data = whole.data[start * row_bytes : (start + count) * row_bytes]
            parts.append(Tensor(f"{name}[{number}]", whole.format, (count, columns), data))
            start += count
        return parts

    def vector(self, name: str, length: int) -> Tensor:
        """A tensor of shape [length]. Raises GGUFError if it is missing or another."""
        return self._checked(name, (length,))

    def optional_vector(self, name: str, length: int) -> Tensor | None:
        """A tensor of shape [length], or None if the file has none of that name."""
        return self._checked(name, (length,)) if name in self._file.tensors else None

    def embedding(self, hidden: int) -> Tensor:
        """`token_embd.weight`, whose number of rows is the vocabulary."""
        tensor = self._file.tensors.get("token_embd.weight")
        return self.matrix("token_embd.weight", tensor.rows if tensor else 0, hidden)

    def head(self, embedding: Tensor) -> Tensor:
        """`output.weight`, or the embedding where the two are tied."""
        if "output.weight" not in self._file.tensors:
            return embedding
        return self.matrix("output.weight", embedding.rows, embedding.columns)

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise GGUFError(
                f"{self._file.path}: tensor {name!r}: expected shape {list(shape)}, found no such "
                "tensor; use a complete conversion of the model"
            )
        if tensor.shape != shape:
            raise GGUFError(
                f"{self._file.path}: tensor {name!r}: expected shape {list(shape)}, found "
                f"{list(tensor.shape)}; use a complete conversion of the model"
            )
        return tensor
