"""A snapshot file appears whole or not at all, whatever fails while it is written."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamay.errors import SnapshotError
from llamay.kv import Context
from llamay.kv.snapshot import (
    Key,
    extend_from_segments,
    files,
    format,
    read_snapshot,
    sweep,
    write_segment,
    write_snapshot,
)
from tests.kv.row_kernels import IDENTITY, fill, new_cache, rows_of, state_of

ROOT = Path(__file__).parents[2]
TOKENS = list(range(13))
NAME = "x.llamayctx"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "GROUP", 1)
    monkeypatch.setattr(format, "CHUNK_BYTES", 300)  # 2 positions


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def fail_at(monkeypatch: pytest.MonkeyPatch, function: str, nth: int, error: int) -> None:
    """Makes the nth call of a function of `os` fail."""
    real, calls = getattr(os, function), iter(range(1, 10_000))

    def failing(*args: object, **kwargs: object) -> object:
        if next(calls) == nth:
            raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    monkeypatch.setattr(f"llamay.kv.snapshot.files.os.{function}", failing)


def snapshot(context: Context, path: Path, key: Key | None = None) -> None:
    write_snapshot(context, path, IDENTITY, key=key)


def segment(context: Context, path: Path, key: Key | None = None) -> None:
    write_segment(path, IDENTITY, context, 3, context.length, parent="x", key=key)


WRITERS = pytest.mark.parametrize("write", [snapshot, segment])
Writer = Callable[[Context, Path, Key | None], None]


def assert_holds(path: Path, context: Context, key: Key | None = None) -> None:
    """A snapshot or a segment gives back the context."""
    cache = new_cache()
    again = fill(cache, context.tokens[:3])
    extend_from_segments(cache, again, [path], IDENTITY, context.tokens, key=key)
    whole = fill(cache, context.tokens)
    assert rows_of(cache, again) == rows_of(cache, whole)


@WRITERS
@pytest.mark.parametrize("key", [None, Key(bytes(32))], ids=["plain", "encrypted"])
@pytest.mark.parametrize("nth", range(1, 9))
def test_failing_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Writer, nth: int, key: Key | None
) -> None:
    cache = new_cache()
    context = fill(cache, TOKENS[:11], logits=True)
    path = tmp_path / NAME
    path.write_bytes(b"old")
    before = state_of(cache, [context])
    with monkeypatch.context() as patched:
        # 1 header, 1 + 6 chunks (of a segment 1 + 4), 1 digests
        fail_at(patched, "pwrite", nth if write is snapshot else min(nth, 7), errno.ENOSPC)
        with pytest.raises(SnapshotError, match="No space left on device") as failed:
            write(context, path, key)
    assert str(path) in str(failed.value)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == [NAME]
    assert state_of(cache, [context]) == before
    write(context, path, key)  # and nobody owns the context any more
    assert_holds(path, context, key)


@pytest.mark.parametrize(("function", "nth"), [("fsync", 1), ("open", 1)])
def test_other_failures_leave_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, nth: int
) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"old")
    with monkeypatch.context() as patched:
        fail_at(patched, function, nth, errno.EIO)
        with pytest.raises(SnapshotError, match="Input/output error"):
            write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == [NAME]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, cache, path = os.pwrite, new_cache(), tmp_path / NAME
    with monkeypatch.context() as patched:
        patched.setattr(
            "llamay.kv.snapshot.files.os.pwrite",
            lambda descriptor, data, at: real(descriptor, data[: max(1, len(data) // 3)], at),
        )
        context = fill(cache, TOKENS)
        write_snapshot(context, path, IDENTITY)
    assert rows_of(cache, read_snapshot(cache, path, IDENTITY).context) == rows_of(cache, context)


def test_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, context = tmp_path / NAME, fill(new_cache(), TOKENS)
    path.write_bytes(b"old")

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "export_rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_snapshot(context, path, IDENTITY)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == [NAME]


def test_data_is_on_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        done.append("folder" if os.fstat(descriptor).st_mode & 0o40000 else "data")
        real_sync(descriptor)

    def replace(path: Path, target: Path) -> Path:
        done.append("name")
        return real_replace(path, target)

    monkeypatch.setattr(files.os, "fsync", sync)
    monkeypatch.delattr(files.fcntl, "F_FULLFSYNC", raising=False)
    monkeypatch.setattr(Path, "replace", replace)
    info = write_snapshot(fill(new_cache(), TOKENS), tmp_path / NAME, IDENTITY)
    assert done == ["data", "name", "folder"]
    assert info.fsync_seconds > 0


def test_file_and_new_folders_are_private(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        path = tmp_path / "a" / "b" / NAME
        write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY)
    finally:
        os.umask(old_mask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    context = fill(new_cache(), TOKENS)
    for path, reason in [
        (tmp_path / "file" / NAME, "directory"),
        (tmp_path / "folder", "directory"),
        (tmp_path / ("n" * 300), "name too long"),
    ]:
        with pytest.raises(SnapshotError, match=reason) as refused:
            write_snapshot(context, path, IDENTITY)
        assert str(path) in str(refused.value)
    assert names(tmp_path) == ["file", "folder"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "llamay-test", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        # Not a skip: the simulated failures above test the same property on every machine.
        pytest.xfail("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@WRITERS
def test_full_disk_leaves_the_old_file(small_disk: Path, write: Writer) -> None:
    cache, path = new_cache(), small_disk / NAME
    write(fill(cache, TOKENS), path, None)
    old = path.read_bytes()
    with pytest.raises(SnapshotError, match="No space left on device"):
        write(fill(cache, list(range(50)) * 12), path, None)  # 75 KiB of rows
    assert path.read_bytes() == old
    assert names(small_disk) == [NAME]


@WRITERS
def test_file_that_may_not_be_so_large_leaves_the_old_file(tmp_path: Path, write: Writer) -> None:
    cache, path = new_cache(), tmp_path / NAME
    write(fill(cache, TOKENS), path, None)
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    large = fill(cache, list(range(50)) * 12)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 2**10, limits[1]))
    try:
        with pytest.raises(SnapshotError, match="File too large"):
            write(large, path, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old
    assert names(tmp_path) == [NAME]


KILLED = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from llamay.kv.snapshot import files, format, write_segment, write_snapshot
    from tests.kv.row_kernels import IDENTITY, fill, new_cache

    format.GROUP, format.CHUNK_BYTES = 1, 300
    stop_at, path, kind = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    calls, real_write, real_replace = 0, files.NewFile.write, Path.replace

    def stop() -> None:
        print("here", flush=True)
        time.sleep(60)

    def write(self, data, offset):
        global calls
        calls += 1
        if calls == stop_at:
            real_write(self, memoryview(data)[: len(data) // 2], offset)
            stop()
        real_write(self, data, offset)

    def replace(self, target):
        if stop_at == 0:
            stop()
        return real_replace(self, target)

    files.NewFile.write, Path.replace = write, replace
    context = fill(new_cache(), list(range(13)))
    if kind == "snapshot":
        write_snapshot(context, path, IDENTITY)
    else:
        write_segment(path, IDENTITY, context, 3, 13, parent="x")
""")


@pytest.mark.parametrize(
    ("write", "stop_at"),
    [(snapshot, 1), (snapshot, 5), (snapshot, 0), (segment, 4), (segment, 0)],
    ids=lambda value: (
        {1: "header", 0: "before the rename"}.get(value, "rows")
        if isinstance(value, int)
        else value.__name__
    ),
)
def test_killed_writer_leaves_the_old_file(tmp_path: Path, write: Writer, stop_at: int) -> None:
    cache, path = new_cache(), tmp_path / NAME
    context = fill(cache, [7, 7, 7, 7])
    write(context, path, None)
    old = path.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(stop_at), str(path), write.__name__],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        assert len(names(tmp_path)) == 2
        sweep(tmp_path)  # while it lives, its file stays
        assert len(names(tmp_path)) == 2
        child.send_signal(signal.SIGKILL)
    assert path.read_bytes() == old
    assert len(names(tmp_path)) == 2
    write(context, tmp_path / "y.llamayctx", None)
    assert names(tmp_path) == [NAME, "y.llamayctx"]
    assert_holds(path, context)


def test_sweep_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    keep = [".llamay-0123.tmp", "llamay-0123456789abcdef.tmp", ".llamay-0123456789abcdeg.tmp", NAME]
    for name in [*keep, ".llamay-0123456789abcdef.tmp"]:
        (tmp_path / name).touch()
    (tmp_path / ".llamay-aaaaaaaaaaaaaaaa.tmp").symlink_to(tmp_path / NAME)
    sweep(tmp_path)
    assert names(tmp_path) == sorted([*keep, ".llamay-aaaaaaaaaaaaaaaa.tmp"])
    sweep(tmp_path / "missing")


def test_writer_whose_new_file_was_swept_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, swept = files.fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not swept:  # between creation and lock, a sweep comes by
            swept.extend(tmp_path.glob(".llamay-*"))
            swept[0].unlink()
        real(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    cache = new_cache()
    write_snapshot(fill(cache, TOKENS), tmp_path / NAME, IDENTITY)
    assert len(swept) == 1
    assert names(tmp_path) == [NAME]
    assert read_snapshot(cache, tmp_path / NAME, IDENTITY).exact


def test_reader_of_the_old_file_is_not_disturbed(tmp_path: Path) -> None:
    cache, path = new_cache(), tmp_path / NAME
    write_snapshot(fill(cache, TOKENS), path, IDENTITY)
    with path.open("rb") as reader:
        start = reader.read(100)
        write_snapshot(fill(cache, [1, 2]), path, IDENTITY)
        assert len(start + reader.read()) > path.stat().st_size
    assert read_snapshot(cache, path, IDENTITY).context.length == 2


def test_snapshot_seconds_leave_the_disk_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "to_disk", lambda descriptor: time.sleep(0.3))
    info = write_snapshot(fill(new_cache(), TOKENS), tmp_path / NAME, IDENTITY)
    assert info.fsync_seconds >= 0.3
    assert info.seconds < 0.3
