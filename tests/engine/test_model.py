"""A model stays what was opened, whatever becomes of its file."""

import hashlib
from pathlib import Path

import pytest

from llamay.engine import Engine
from llamay.errors import HubError
from llamay.mlx_kernels import machine
from llamay.mlx_kernels.reference import ReferenceKernels
from tests.engine.running import prompt_ids
from tests.scripted_model import byte_ids, write_endless_model, write_scripted_model

REPLACED = "tiny.gguf: the model's file was replaced or changed since it was opened; open it again"


@pytest.fixture
def path(tmp_path: Path, empty_home: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_endless_model(path)
    return path


def replace_file(path: Path, flipped: int = -1) -> None:
    """Puts another file of the same size in its place, as a careful writer does."""
    data = bytearray(path.read_bytes())
    data[flipped] ^= 1
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


def test_the_identity_of_a_file_that_was_replaced_is_refused(path: Path, tmp_path: Path) -> None:
    engine = Engine.load(str(path), threads=1)
    branch = engine.prefill(prompt_ids(5))
    replace_file(path)
    target = tmp_path / "context.llamayctx"
    with pytest.raises(HubError, match=REPLACED):
        branch.save(target)
    assert not target.exists()
    other = Engine.load(str(path), threads=1)
    other.prefill(prompt_ids(5)).save(target)
    with pytest.raises(HubError, match=REPLACED):
        engine.restore(target)


def test_a_file_that_is_replaced_while_it_is_hashed_is_refused(path: Path) -> None:
    model = Engine.load(str(path), threads=1).model
    with pytest.raises(HubError, match="changed"):
        model.identity(lambda label, done, total: replace_file(path) if done == total else None)
    with pytest.raises(HubError, match=REPLACED):
        model.identity()


def test_the_identity_is_that_of_the_file_that_was_opened(path: Path) -> None:
    """Also once it was replaced, if the digest was known before."""
    opened = hashlib.sha256(path.read_bytes()).hexdigest()
    model = Engine.load(str(path), threads=1).model
    assert model.identity().weights_sha256 == opened
    replace_file(path)
    assert model.identity().weights_sha256 == opened
    path.unlink()
    assert model.identity().weights_sha256 == opened


def test_a_file_that_is_gone_is_told(path: Path) -> None:
    model = Engine.load(str(path), threads=1).model
    path.unlink()
    with pytest.raises(HubError, match=r"tiny.gguf: .*No such file.*put it back and open it again"):
        model.identity()


def test_other_kernels_take_no_other_file(path: Path) -> None:
    model = Engine.load(str(path), threads=1).model
    assert model.decoder_on(ReferenceKernels()).layout_sha256 == model.decoder.layout_sha256
    write_scripted_model(path, byte_ids(b"ab"))
    with pytest.raises(HubError, match=REPLACED):
        model.decoder_on(ReferenceKernels())


def test_half_of_a_containers_memory_is_for_contexts(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = tmp_path / "sys" / "fs" / "cgroup"
    groups.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    (groups / "memory.max").write_text(f"{100 << 20}\n")
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    store = Engine.load(str(path), threads=1).cache.store
    assert (50 << 20) - store.page_bytes < store.max_pages * store.page_bytes <= 50 << 20
