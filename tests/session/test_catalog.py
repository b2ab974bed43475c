"""Names of sessions, the list, the last one used, and removing."""

import fcntl
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamay.errors import SessionBusyError, SessionError, UsageError
from llamay.kv.snapshot import Key
from llamay.session.catalog import Catalog
from llamay.session.loading import MANIFEST, PREVIOUS
from llamay.session.names import checked_name, slug
from llamay.session.records import Info, SetLabel
from llamay.session.tree import Tree
from tests.session.sessions import KEY, OTHER_KEY, RECORDS, owner


def add(
    catalog: Catalog,
    text: str,
    key: Key | None = None,
    parent: str | None = None,
    ends: bool = True,
) -> str:
    """A session with the records of `sessions`; returns its id."""
    tree = Tree(info=Info(title=text, parent=parent, model="m", created=5.0))
    folder = catalog.create(tree, text=text, key=key)
    folder.append(RECORDS)
    if ends:
        for record in RECORDS:
            tree.apply(record)
        folder.close(tree)
    else:
        folder.release()
    return folder.id.hex()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("How do I fork a branch?", "how-do-i-fork-a-branch"),
        ("  ../../etc/passwd\n", "etc-passwd"),
        ("Über Straße №5", "über-strasse-no5"),
        ("日本語のテスト", "日本語のテスト"),
        ("?!…", "session"),
        ("", "session"),
        ("x" * 100, "x" * 40),
        (
            "one two three four five six seven eight nine ten",
            "one-two-three-four-five-six-seven-eight",
        ),
    ],
)
def test_a_name_is_the_beginning_of_the_first_message(text: str, name: str) -> None:
    assert slug(text) == name


@given(st.text(max_size=60))
def test_every_text_gives_a_name_that_is_safe(text: str) -> None:
    name = slug(text)
    assert checked_name(name) == name
    assert len(name.encode()) <= 120


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".last", "-x", "a/b", "a\0", "a\nb", "x" * 121, "a.", "\x1b[m", "é" * 61],
)
def test_names_that_are_not_safe_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        Catalog(tmp_path).create(Tree(), name=name)
    with pytest.raises(SessionError, match="there is no session"):
        Catalog(tmp_path).path(name)


def test_a_name_that_is_taken_gets_a_number_unless_it_was_given(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    names = []
    for _ in range(3):
        folder = catalog.create(Tree(), text="Hello")
        names.append(folder.name)
        folder.release()
    assert names == ["hello", "hello-2", "hello-3"]
    with pytest.raises(UsageError, match="already"):
        catalog.create(Tree(), name="Hello")


def test_a_session_gets_its_name_with_its_first_message(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.create(Tree(), text="Hello").release()
    folder = catalog.create(Tree())
    folder.append([SetLabel(0, "a")])
    catalog.rename(folder, "Hello")
    folder.append([SetLabel(0, "b")])
    assert (folder.name, catalog.last()) == ("hello-2", "hello-2")
    with pytest.raises(SessionBusyError):
        catalog.open("hello-2")
    folder.release()
    loaded = catalog.read("hello-2")
    assert (loaded.notices, loaded.tree.root.label) == ([], "b")
    assert [entry.name for entry in catalog.entries()] == ["hello-2", "hello"]


def test_the_list_has_what_was_saved_and_what_was_not_yet(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    for ends in (True, False):
        add(catalog, f"Ends {ends}", ends=ends)
    assert {entry.name for entry in catalog.entries()} == {"ends-true", "ends-false"}
    for entry in catalog.entries():
        summary = entry.summary
        assert summary
        # 2 + 2 + 1 + 1 tokens; leaves: the second answer and the last message
        assert (summary.tokens, summary.branches, summary.model) == (6, 2, "m")
        assert (summary.created, entry.owner, entry.encrypted) == (5.0, None, False)
        assert abs(summary.updated - time.time()) < 60
        files = list((tmp_path / "sessions" / entry.name).iterdir())
        assert entry.bytes == sum(file.stat().st_size for file in files)


def test_copies_are_listed_below_what_they_are_copies_of(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    first = add(catalog, "first")
    add(catalog, "second")
    copy = add(catalog, "copy", parent=first)
    add(catalog, "copy of copy", parent=copy)
    add(catalog, "orphan", parent="00" * 16)
    assert [(entry.name, entry.depth) for entry in catalog.entries()] == [
        ("orphan", 0),
        ("second", 0),
        ("first", 0),
        ("copy", 1),
        ("copy-of-copy", 2),
    ]


def test_an_encrypted_session_is_listed_by_its_name_and_opened_by_its_key(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    add(catalog, "Secret", KEY)
    add(catalog, "Secret too", KEY, ends=False)
    for key, count in ((None, 0), (OTHER_KEY, 0), (KEY, 2)):
        entries = catalog.entries(key)
        assert {entry.name for entry in entries} == {"secret", "secret-too"}
        assert all(entry.encrypted for entry in entries)
        assert sum(entry.summary is not None for entry in entries) == count
        assert all(("another key" in (e.problem or "")) == (key is OTHER_KEY) for e in entries)


def test_a_damaged_session_is_listed_with_its_problem(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    add(catalog, "Broken")
    add(catalog, "Whole")
    for name in (MANIFEST, PREVIOUS):
        (catalog.path("broken") / name).write_bytes(b"x")
    problems = {entry.name: entry.problem for entry in catalog.entries()}
    assert problems["whole"] is None
    assert "damaged" in str(problems["broken"])


def test_the_last_session_is_the_last_used_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(tmp_path)
    assert catalog.last() is None
    add(catalog, "first")
    add(catalog, "second")
    past = time.time() - 10**8
    monkeypatch.setattr("llamay.session.folder.time.time", lambda: past)
    folder = catalog.open("first")
    folder.append([SetLabel(1, "past")])
    folder.tree.apply(SetLabel(1, "past"))
    folder.close(folder.tree)
    assert catalog.entries()[0].name == "second"
    assert catalog.last() == "first"
    catalog.remove("first")
    assert catalog.last() == "second"


def test_a_session_is_not_removed_from_under_its_owner(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    add(catalog, "s")
    before = sorted(file.name for file in catalog.path("s").iterdir())
    with owner(catalog.path("s")) as process:
        with pytest.raises(SessionBusyError, match=f"process {process.pid} has the session open"):
            catalog.remove("s")
        assert catalog.entries()[0].owner == f"process {process.pid}"
        assert sorted(file.name for file in catalog.path("s").iterdir()) == before
    catalog.remove("s")
    assert list(catalog.folder.iterdir()) == []
    with pytest.raises(SessionError, match="there is no session 's'"):
        catalog.remove("s")


def test_a_session_that_is_removed_while_it_is_opened_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(tmp_path)
    add(catalog, "s")
    real = fcntl.flock

    def removed_first(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        catalog.remove("s")
        real(descriptor, operation)

    monkeypatch.setattr("llamay.session.lock.fcntl.flock", removed_first)
    with pytest.raises(SessionError, match="removed just now"):
        catalog.open("s")
