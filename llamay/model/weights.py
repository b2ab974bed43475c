"""The tensors of a decoder, by GGUF's names, checked against its spec before they are used."""

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
