"""What the stores hold: size, architecture, quantisation, and whether llamay can run it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llamay.errors import LlamayError
from llamay.gguf import GGUFFile, open_gguf
from llamay.hub.stores import Stored, list_stored, model_files
from llamay.model.spec import SUPPORTED_ARCHITECTURES

# `general.file_type` of files whose tensors are in several formats, after llama.cpp's llama_ftype;
# others are described well enough by their most common format.
_MIXED_FILE_TYPES = {
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model on this machine.

    name, store, path: as in `Stored`
    size_bytes:        of all its files
    architecture, quantisation: None where the header cannot be read
    reason:            why llamay cannot run it; None if it can
    """

    name: str
    store: str
    path: Path
    size_bytes: int
    architecture: str | None
    quantisation: str | None
    reason: str | None

    @property
    def supported(self) -> bool:
        """Whether llamay can run it, as far as the header tells."""
        return self.reason is None


def list_models() -> Iterator[ModelEntry]:
    """Describes every model in every store, reading headers only."""
    return map(_describe, list_stored())


def _describe(stored: Stored) -> ModelEntry:
    architecture = quantisation = reason = None
    try:
        with open_gguf(stored.path) as file:
            architecture = file.get("general.architecture", str)
            quantisation = _quantisation(file)
            if architecture not in SUPPORTED_ARCHITECTURES:
                supported = ", ".join(SUPPORTED_ARCHITECTURES)
                reason = f"architecture {architecture} is not one of {supported}"
    except LlamayError as error:
        # The message starts with the path, which the entry has already.
        reason = str(error).removeprefix(f"{stored.path}: ")
    return ModelEntry(
        stored.name,
        stored.store,
        stored.path,
        sum(map(_size, model_files(stored.path))),
        architecture,
        quantisation,
        reason,
    )


def _quantisation(file: GGUFFile) -> str | None:
    """The file's own word for its mix of formats, else the format that most weights are in."""
    file_type = file.get("general.file_type", int, -1)
    if file_type in _MIXED_FILE_TYPES:
        return _MIXED_FILE_TYPES[file_type]
    weights: Counter[str] = Counter()
    for tensor in file.tensors.values():
        weights[tensor.format.name] += tensor.rows * tensor.columns
    return weights.most_common(1)[0][0] if weights else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
