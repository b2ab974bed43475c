import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llamay.errors import HubError
from llamay.hub import weights_digest


class Reads:
    """Counts the bytes that were hashed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, label: str, done: int, total: int | None) -> None:
        self.count = done


def digest(path: Path) -> tuple[str, bool]:
    """The digest, and whether the file was read for it."""
    reads = Reads()
    return weights_digest(path, reads), reads.count > 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"abc" * 1_000_000)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_second_time_the_file_is_not_read(model: Path) -> None:
    assert digest(model) == (sha256(model), True)
    assert digest(model) == (sha256(model), False)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def change_in_place(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def replace_with_same_size_and_time(path: Path) -> None:
    before = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(b"x" * before.st_size)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [grow, change_in_place, replace_with_same_size_and_time])
def test_a_changed_file_is_read_again(model: Path, change: Callable[[Path], None]) -> None:
    before, _ = digest(model)
    change(model)
    after, read = digest(model)
    assert read
    assert after == sha256(model) != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"null",
        b"[" * 9999,
        b'{"version": 1}',
        b'{"version": 1, "files": []}',
        b'{"version": 2, "files": {PATH: [SIZE, MTIME, INODE, ZEROS]}}',
        b'{"version": 1, "files": {PATH: null}}',
        b'{"version": 1, "files": {PATH: [SIZE, MTIME, INODE]}}',
        b'{"version": 1, "files": {PATH: [SIZE, MTIME, INODE, "0"]}}',
        b'{"version": 1, "files": {PATH: [SIZE, MTIME, INODE, 0]}}',
    ],
)
def test_a_corrupt_cache_is_ignored(home: Path, model: Path, content: bytes) -> None:
    stat = model.stat()
    for word, value in {
        b"PATH": f'"{model}"',
        b"SIZE": str(stat.st_size),
        b"MTIME": str(stat.st_mtime_ns),
        b"INODE": str(stat.st_ino),
        b"ZEROS": '"' + "0" * 64 + '"',
    }.items():
        content = content.replace(word, value.encode())
    cache = home / "llamay" / "cache" / "digests.json"
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert digest(model) == (sha256(model), True)
    assert digest(model) == (sha256(model), False)


def test_a_cache_that_cannot_be_written_costs_only_time(home: Path, model: Path) -> None:
    (home / "llamay").write_text("a file where the folder should be")
    assert digest(model) == (sha256(model), True)


def test_a_split_model_has_the_digest_of_its_parts_digests(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(part.name.encode())
    expected = hashlib.sha256(
        hashlib.sha256(parts[0].read_bytes()).digest()
        + hashlib.sha256(parts[1].read_bytes()).digest()
    )
    assert weights_digest(parts[0]) == expected.hexdigest()


def test_a_file_that_changes_while_it_is_read_is_refused(model: Path) -> None:
    with pytest.raises(HubError, match="changed while"):
        weights_digest(model, lambda label, done, total: grow(model) if done == total else None)
    assert digest(model) == (sha256(model), True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"missing\.gguf"):
        weights_digest(tmp_path / "missing.gguf")


def test_processes_at_once_lose_no_entry(tmp_path: Path) -> None:
    script = "import sys\nfrom pathlib import Path\nfrom llamay.hub import weights_digest\n"
    script += "for path in sys.argv[1:]: weights_digest(Path(path))"
    files = [tmp_path / f"{i}.gguf" for i in range(60)]
    for path in files:
        path.write_bytes(path.name.encode())
    runs = [subprocess.Popen([sys.executable, "-c", script, *files[i::3]]) for i in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert [digest(path) for path in files] == [(sha256(path), False) for path in files]
