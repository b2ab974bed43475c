"""A session's folder is whole after any end of its process, and errors say what is wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamay.errors import (
    SessionBusyError,
    SessionCorruptError,
    SessionError,
    SessionKeyError,
    SessionVersionError,
)
from llamay.kv.snapshot import Key
from llamay.kv.snapshot.format import digest
from llamay.session.folder import create_folder, open_folder
from llamay.session.loading import MANIFEST, PREVIOUS, load
from llamay.session.lock import owner_of
from llamay.session.records import Delete, Purge, SegmentRef, SetLabel, SetSegments
from tests.session.sessions import KEY, OTHER_KEY, RECORDS, make, new_tree, owner, same, tree_after

ROOT = Path(__file__).parents[2]
KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])


@pytest.mark.parametrize("mode", ["random", "reader", "every-call", "errors", "full"])
def test_a_session_is_whole_after_deaths_errors_and_a_full_disk(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-m", "tests.session.dying", mode, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_second_process_is_told_who_has_the_session_open(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make(path).release()
    with owner(path) as process:
        with pytest.raises(SessionBusyError, match=f"process {process.pid} has the session open"):
            open_folder(path)
        assert owner_of(path) == f"process {process.pid}"
        assert same(load(path).tree) == same(load(path).tree)
    assert owner_of(path) is None
    open_folder(path).release()


def test_a_session_is_open_once_in_one_process_too(tmp_path: Path) -> None:
    folder = make(tmp_path / "s")
    with pytest.raises(SessionBusyError, match=f"process {os.getpid()}"):
        open_folder(tmp_path / "s")
    folder.release()


@KEYS
def test_every_changed_byte_of_session_json_is_told_and_loses_nothing(
    tmp_path: Path, key: Key | None
) -> None:
    path = tmp_path / "s"
    folder = make(path, RECORDS[:2], key)
    tree = tree_after(RECORDS[:2])
    folder.checkpoint(tree)
    folder.append([SetLabel(1, "after")])
    tree.apply(SetLabel(1, "after"))
    folder.release()
    data, expected = (path / MANIFEST).read_bytes(), same(tree)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        (path / MANIFEST).write_bytes(changed)
        loaded = load(path, key)
        assert loaded.notices
        assert same(loaded.tree) == expected
    (path / MANIFEST).unlink()
    assert same(load(path, key).tree) == expected


def test_a_damaged_session_json_is_kept_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "s"
    folder = make(path)
    folder.checkpoint(tree_after(RECORDS))
    folder.release()
    (path / MANIFEST).write_bytes(b"{}")
    folder = open_folder(path)
    assert len(folder.notices) == 1
    folder.release()
    assert (path / f"{MANIFEST}.damaged").read_bytes() == b"{}"
    loaded = load(path)
    assert (loaded.notices, same(loaded.tree)) == ([], same(tree_after(RECORDS)))


def test_a_new_session_survives_damage_to_its_first_session_json(tmp_path: Path) -> None:
    make(tmp_path / "s").release()
    (tmp_path / "s" / MANIFEST).write_bytes(b"")
    assert same(load(tmp_path / "s").tree) == same(tree_after(RECORDS))


def test_without_a_whole_session_json_the_session_is_refused_and_left_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    make(path).release()
    for name in (MANIFEST, PREVIOUS):
        (path / name).write_bytes(b"{}")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(SessionCorruptError, match="the file is damaged"):
        open_folder(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@KEYS
def test_the_same_tree_comes_from_an_old_and_a_new_session_json(
    tmp_path: Path, key: Key | None
) -> None:
    path = tmp_path / "s"
    folder = make(path, RECORDS[:4], key)
    old = (path / MANIFEST).read_bytes()
    folder.checkpoint(tree_after(RECORDS[:4]))
    folder.append(RECORDS[4:])
    folder.release()
    expected = same(tree_after(RECORDS))
    assert same(load(path, key).tree) == expected
    (path / MANIFEST).write_bytes(old)
    assert (load(path, key).notices, same(load(path, key).tree)) == ([], expected)


def test_a_checkpoint_may_be_made_before_its_last_records_are_written(tmp_path: Path) -> None:
    folder = make(tmp_path / "s", RECORDS[:4])
    checkpoint = folder.encode(tree_after(RECORDS), pending=len(RECORDS) - 4)
    folder.append(RECORDS[4:])
    folder.write(checkpoint)
    folder.append([SetLabel(1, "after")])
    folder.release()
    expected = tree_after([*RECORDS, SetLabel(1, "after")])
    assert same(load(tmp_path / "s").tree) == same(expected)


def test_journals_that_neither_session_json_needs_are_removed(tmp_path: Path) -> None:
    path, tree = tmp_path / "s", tree_after(RECORDS)
    folder = make(path)
    for label in "abcd":
        folder.checkpoint(tree)
        tree.apply(SetLabel(1, label))
        folder.append([SetLabel(1, label)])
    folder.release()
    count = len(RECORDS)  # session.json has 3 labels, the one before 2
    journals = {file.name for file in path.iterdir() if file.name.startswith("journal")}
    assert journals == {f"journal-{count + 2}", f"journal-{count + 3}"}
    (path / MANIFEST).write_bytes(b"{")
    assert same(load(path).tree) == same(tree)


def test_turns_that_were_being_written_are_interrupted_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make(path, RECORDS[:4]).release()
    assert load(path).tree.node(2).state == "writing"
    folder = open_folder(path)
    assert [folder.tree.node(id).state for id in (1, 2, 3)] == [
        "done",
        "interrupted",
        "interrupted",
    ]
    folder.release()
    assert same(load(path).tree) == same(folder.tree)


def test_deletes_last_when_the_session_closes_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tree = tree_after(RECORDS)
    folder = make(path)
    (path / "segments").mkdir()
    segments = {}
    for node, end in ((2, 4), (3, 3)):
        name = folder.segments.new_name(node, 2, end)
        folder.segments.path(name).write_bytes(b"rows")
        segments[node] = name
        folder.append([record := SetSegments(node, (SegmentRef(name, 2, end, 4),))])
        tree.apply(record)
    folder.append([Delete(3)])
    tree.apply(Delete(3))
    assert folder.segments.sweep(tree) == 0
    folder.close(tree)
    assert [file.name for file in (path / "segments").iterdir()] == [segments[2]]
    expected = tree_after([*RECORDS, SetSegments(2, tree.node(2).segments), Delete(3), Purge()])
    assert same(load(path).tree) == same(expected)
    assert owner_of(path) is None


@pytest.mark.parametrize("change", ["moved", "deleted", "replaced"])
def test_a_folder_that_is_gone_is_told(tmp_path: Path, change: str) -> None:
    path = tmp_path / "s"
    folder = make(path)
    if change == "moved":
        path.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(path)
    if change == "replaced":
        path.mkdir()
    if change != "moved":
        with pytest.raises(SessionError, match="deleted while it was open"):
            folder.append([SetLabel(1, "lost")])
    with pytest.raises(SessionError, match="moved or deleted while it was open"):
        folder.checkpoint(tree_after(RECORDS))
    folder.release()
    assert not (path / MANIFEST).exists()


def test_a_read_only_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    make(path).release()
    real = os.open

    def read_only(name: str, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied", str(name))
        return real(name, flags, mode)

    monkeypatch.setattr("llamay.session.lock.os.open", read_only)
    with pytest.raises(SessionError, match=r"lock: cannot be written \(Permission denied\)"):
        open_folder(path)
    assert same(load(path).tree) == same(tree_after(RECORDS))


def test_a_folder_without_a_session_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SessionError, match="there is no session"):
            load(path)
        with pytest.raises(SessionError, match="there is no session"):
            open_folder(path)
    with pytest.raises(FileExistsError):
        create_folder(make(tmp_path / "s").path, new_tree())
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_keys_that_do_not_fit_are_errors_of_their_own(tmp_path: Path) -> None:
    make(tmp_path / "secret", RECORDS, KEY).release()
    make(tmp_path / "plain", RECORDS).release()
    for key, text in ((None, "is encrypted; give"), (OTHER_KEY, "with another key")):
        with pytest.raises(SessionKeyError, match=text):
            load(tmp_path / "secret", key)
        with pytest.raises(SessionKeyError, match=text):
            open_folder(tmp_path / "secret", key)
    with pytest.raises(SessionKeyError, match="is not encrypted"):
        open_folder(tmp_path / "plain", KEY)
    with pytest.raises(SessionKeyError, match="a key file"):
        create_folder(tmp_path / "new", new_tree(), Key.from_passphrase("x"))
    assert owner_of(tmp_path / "secret") is None


def test_a_newer_version_is_told_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make(path).release()
    first, rest = (path / MANIFEST).read_bytes().split(b"\n", 1)
    start = b'{"llamay_session":3,"oldest_reader":2,"digest":"'
    newer = start + digest(start, b'",\n', rest).hex().encode() + b'",\n' + rest
    (path / MANIFEST).write_bytes(newer)
    with pytest.raises(SessionVersionError, match=r"version 3.*needs a reader of version 2"):
        open_folder(path)
    assert (path / MANIFEST).read_bytes() == newer
    assert len(first) == len(start) + 34


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "sessions" / "s"
    make(path).release()
    modes = {file.stat().st_mode & 0o777 for file in path.iterdir()}
    assert (modes, path.stat().st_mode & 0o777) == ({0o600}, 0o700)
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
