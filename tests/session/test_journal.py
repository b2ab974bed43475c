"""A journal keeps every record that is whole, and says of every byte that is not as written."""

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from llamay.errors import SessionError, SessionKeyError, SessionVersionError
from llamay.kv.snapshot import Key
from llamay.kv.snapshot.format import digest
from llamay.session.folder import open_folder
from llamay.session.journal import EMPTY_BYTES, JournalWriter, read_journal
from llamay.session.loading import Loaded, load
from llamay.session.records import Record, SetLabel
from tests.session.sessions import KEY, OTHER_KEY, RECORDS, make, same, tree_after

KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
JOURNAL = "journal-0"
TREES = [tree_after(RECORDS[:count]) for count in range(len(RECORDS) + 1)]


def starts(data: bytes) -> list[int]:
    """Where the records begin, by the lengths that the format's table says they have."""
    positions = [EMPTY_BYTES]
    while positions[-1] < len(data):
        start = positions[-1]
        positions.append(start + 40 + int.from_bytes(data[start + 4 : start + 8], "little"))
    return positions


def session(tmp_path: Path, key: Key | None) -> tuple[Path, bytes]:
    path = tmp_path / "s"
    make(path, RECORDS, key).release()
    return path, (path / JOURNAL).read_bytes()


def loaded_with(path: Path, journal: bytes, key: Key | None) -> Loaded:
    (path / JOURNAL).write_bytes(journal)
    return load(path, key)


def assert_keeps(loaded: Loaded, count: int) -> None:
    """The first `count` records hold, and no turn has a hole or what was never there."""
    whole = TREES[-1]
    for node in TREES[count].nodes.values():
        kept = loaded.tree.node(node.id)
        assert kept.text.startswith(node.text)
        assert kept.ids[: len(node.ids)] == node.ids
    for node in loaded.tree.nodes.values():
        full = whole.node(node.id)
        assert full.ids[: len(node.ids)] == node.ids
        assert full.text.startswith(node.text)


@KEYS
def test_a_journal_cut_anywhere_ends_before_the_record_that_was_cut(
    tmp_path: Path, key: Key | None
) -> None:
    path, data = session(tmp_path, key)
    ends = starts(data)
    assert len(ends) == len(RECORDS) + 1
    assert ends[-1] == len(data)
    expected = [same(tree) for tree in TREES]
    for size in range(EMPTY_BYTES, len(data) + 1):
        loaded = loaded_with(path, data[:size], key)
        count = sum(end <= size for end in ends[1:])
        assert loaded.notices == []
        assert (loaded.sequence, same(loaded.tree)) == (count, expected[count])


@KEYS
def test_a_header_cut_anywhere_is_told(tmp_path: Path, key: Key | None) -> None:
    path, data = session(tmp_path, key)
    for size in range(EMPTY_BYTES):
        loaded = loaded_with(path, data[:size], key)
        assert loaded.sequence == 0
        assert "header is damaged" in loaded.notices[0]


@KEYS
def test_every_changed_byte_is_told_and_costs_no_other_record(
    tmp_path: Path, key: Key | None
) -> None:
    path, data = session(tmp_path, key)
    ends = starts(data)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        loaded = loaded_with(path, bytes(changed), key)
        assert loaded.notices, position
        before = sum(end <= position for end in ends[1:])
        assert_keeps(loaded, len(RECORDS) if position < EMPTY_BYTES else before)
        if before < len(RECORDS) - 1:
            assert loaded.sequence == len(RECORDS)  # what follows is read


@KEYS
def test_an_end_that_was_never_written_counts_as_cut(tmp_path: Path, key: Key | None) -> None:
    path, data = session(tmp_path, key)
    loaded = loaded_with(path, data + bytes(4096), key)
    assert (loaded.notices, same(loaded.tree)) == ([], same(TREES[-1]))


def rearranged(parts: list[bytes]) -> Iterator[list[bytes]]:
    """The records without one, with two exchanged, and with one twice."""
    for i in range(len(parts) - 1):
        yield parts[:i] + parts[i + 1 :]
        yield [*parts[:i], parts[i + 1], parts[i], *parts[i + 2 :]]


@KEYS
def test_records_dropped_or_exchanged_are_told(tmp_path: Path, key: Key | None) -> None:
    path, data = session(tmp_path, key)
    ends = starts(data)
    parts = [data[a:b] for a, b in pairwise(ends)]
    for i, others in enumerate(rearranged(parts)):
        loaded = loaded_with(path, data[:EMPTY_BYTES] + b"".join(others), key)
        assert "missing" in loaded.notices[0]
        assert_keeps(loaded, i // 2)


@KEYS
def test_records_of_another_session_are_told_and_not_taken(tmp_path: Path, key: Key | None) -> None:
    _, data = session(tmp_path, key)
    other, _ = session(tmp_path / "other", key)
    own = (other / JOURNAL).read_bytes()
    for moved in (data, own[:EMPTY_BYTES] + data[EMPTY_BYTES:]):
        loaded = loaded_with(other, moved, key)
        assert (loaded.sequence, len(loaded.notices)) == (0, 1)


def test_an_encrypted_record_cannot_take_another_number(tmp_path: Path) -> None:
    path, data = session(tmp_path, KEY)
    first, second, third = starts(data)[1:4]
    forged = bytearray(data[second:third])  # record 3 as record 2, with a digest that is right
    forged[8:16] = (2).to_bytes(8, "little")
    forged[20:24] = digest(bytes(forged[:20]))[:4]
    forged[-16:] = digest(load(path, KEY).id, bytes(forged[:-16]))
    loaded = loaded_with(path, data[:first] + bytes(forged) + data[second:], KEY)
    assert "record 2 is not what the session's key encrypted" in loaded.notices[0]


def test_a_journal_that_is_not_encrypted_is_not_taken_into_an_encrypted_session(
    tmp_path: Path,
) -> None:
    path, _ = session(tmp_path, KEY)
    (path / JOURNAL).unlink()
    writer = JournalWriter(path / JOURNAL, load(path, KEY).id, 0, None)
    writer.append([SetLabel(0, "forged")], sync=False)
    writer.close()
    loaded = load(path, KEY)
    assert loaded.tree.root.label is None
    assert "it is not encrypted, unlike the session" in loaded.notices[0]


def test_nothing_readable_is_in_an_encrypted_journal(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make(path, [SetLabel(0, "plainly secret")], KEY).release()
    files = [file.read_bytes() for file in path.iterdir()]
    assert len(files) == 4
    assert not any(b"plainly" in data or b"SetLabel" in data for data in files)


def test_no_nonce_is_used_twice_for_other_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = JournalWriter(tmp_path / JOURNAL, bytes(16), 0, KEY)
    attempts: list[bytes] = []

    def full(descriptor: int, data: bytes) -> None:
        attempts.append(data)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("llamay.session.journal.write_all", full)
        for label in ("a", "b"):
            with pytest.raises(SessionError, match="No space left"):
                writer.append([SetLabel(0, label)], sync=False)
    writer.append([SetLabel(0, "c")], sync=True)
    writer.close()
    attempts.append((tmp_path / JOURNAL).read_bytes()[EMPTY_BYTES:])
    assert [data[8:16] for data in attempts] == [(1).to_bytes(8, "little")] * 3
    assert len({data[16:20] for data in attempts}) == 3
    text = read_journal(tmp_path / JOURNAL, bytes(16), 0, KEY)
    assert text.records == [(1, SetLabel(0, "c"))]


@pytest.mark.parametrize("at_once", [True, False])
def test_what_a_failed_write_left_is_cut_off_at_once_or_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    writer = JournalWriter(tmp_path / JOURNAL, bytes(16), 0, None)
    records: list[Record] = [SetLabel(0, "a"), SetLabel(0, "b")]
    real, failed = os.ftruncate, list[bool]()

    def all_but_one(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:-1])
        failed.append(True)
        raise OSError(28, "No space left on device")

    def cut(descriptor: int, size: int) -> None:
        if failed and not at_once:
            raise OSError(5, "Input/output error")
        real(descriptor, size)

    with monkeypatch.context() as patched:
        patched.setattr("llamay.session.journal.write_all", all_but_one)
        patched.setattr("llamay.session.journal.os.ftruncate", cut)
        with pytest.raises(SessionError, match="No space left"):
            writer.append(records, sync=False)
    if at_once:
        assert read_journal(tmp_path / JOURNAL, bytes(16), 0, None).records == []
    writer.append(records, sync=False)
    writer.close()
    text = read_journal(tmp_path / JOURNAL, bytes(16), 0, None)
    assert (text.records, text.damage) == ([*enumerate(records, 1)], [])


def test_another_key_and_a_newer_version_are_errors_of_their_own(tmp_path: Path) -> None:
    path, data = session(tmp_path, KEY)
    with pytest.raises(SessionKeyError, match="another key"):
        read_journal(path / JOURNAL, load(path, KEY).id, 0, OTHER_KEY)
    head = bytearray(data[: EMPTY_BYTES // 2])
    head[8:12] = b"\x02\x00\x02\x00"
    head[96:] = digest(bytes(head[:96]))
    with pytest.raises(SessionVersionError, match="needs a reader of version 2"):
        loaded_with(path, bytes(head * 2) + data[EMPTY_BYTES:], KEY)


def test_a_damaged_journal_is_kept_under_another_name(tmp_path: Path) -> None:
    path, data = session(tmp_path, None)
    changed = data[:-20] + b"!" + data[-19:]
    (path / JOURNAL).write_bytes(changed)
    folder = open_folder(path)
    assert len(folder.notices) == 1
    folder.append([SetLabel(1, "later")])
    folder.release()
    assert (path / f"{JOURNAL}.damaged").read_bytes() == changed
    loaded = load(path)
    assert (loaded.notices, loaded.tree.node(1).label) == ([], "later")


def test_after_a_lost_record_no_undo_takes_back_what_it_was_not_meant_for(tmp_path: Path) -> None:
    path, data = session(tmp_path, None)
    position = starts(data)[RECORDS.index(SetLabel(3, "x"))] + 30
    loaded = loaded_with(path, data[:position] + b"!" + data[position + 1 :], None)
    assert set(loaded.tree.walk()) == {0, 1, 2, 3, 4}  # the undo was of the label
    assert not loaded.tree.can_undo
