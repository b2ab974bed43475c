from pathlib import Path

import numpy as np
import pytest

from llamay.formats import Format
from llamay.hub.listing import ModelEntry, list_models
from tests.gguf_writer import TensorData, float_tensor, write_gguf

F32_ROW = float_tensor(np.zeros((1, 32), np.float32))
Q8_0_ROWS = TensorData(Format.Q8_0, (4, 32), bytes(4 * 34))


def only_entry() -> ModelEntry:
    (entry,) = list_models()
    return entry


@pytest.fixture
def path(home: Path) -> Path:
    path = home / "llamay" / "models" / "some" / "model.gguf"
    path.parent.mkdir(parents=True)
    return path


def test_a_supported_model_is_described(path: Path) -> None:
    tensors = {"norm": F32_ROW, "weight": Q8_0_ROWS}
    write_gguf(path, {"general.architecture": "llama"}, tensors)
    entry = only_entry()
    assert (entry.name, entry.store, entry.path) == ("some:model", "llamay", path)
    assert entry.size_bytes == path.stat().st_size
    assert (entry.architecture, entry.quantisation) == ("llama", "Q8_0")
    assert entry.supported
    assert entry.reason is None


def test_the_files_word_for_a_mix_is_taken(path: Path) -> None:
    # 15 is LLAMA_FTYPE_MOSTLY_Q4_K_M in llama.cpp's llama.h.
    metadata = {"general.architecture": "llama", "general.file_type": 15}
    write_gguf(path, metadata, {"weight": Q8_0_ROWS})
    assert only_entry().quantisation == "Q4_K_M"


def test_an_architecture_that_is_not_supported_is_named(path: Path) -> None:
    write_gguf(path, {"general.architecture": "mamba"}, {"weight": F32_ROW})
    entry = only_entry()
    assert not entry.supported
    assert entry.architecture == "mamba"
    assert entry.reason is not None
    assert "mamba" in entry.reason
    assert "llama" in entry.reason


@pytest.mark.parametrize("content", [b"", b"no GGUF at all", b"GGUF\3\0\0\0" + b"\xff" * 64])
def test_a_damaged_file_is_listed_with_the_reason(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    entry = only_entry()
    assert not entry.supported
    assert entry.architecture is entry.quantisation is None
    assert entry.reason
    assert str(path) not in entry.reason


def test_a_split_model_is_listed_once_with_the_size_of_all_parts(path: Path) -> None:
    parts = [path.with_name(f"m-0000{number}-of-00002.gguf") for number in (1, 2)]
    for index, part in enumerate(parts):
        metadata = {
            "general.architecture": "llama",
            "split.no": np.uint16(index),
            "split.count": np.uint16(2),
            "split.tensors.count": np.int32(2),
        }
        write_gguf(part, metadata, {f"weight.{index}": F32_ROW})
    entry = only_entry()
    assert entry.supported
    assert entry.size_bytes == sum(part.stat().st_size for part in parts)
