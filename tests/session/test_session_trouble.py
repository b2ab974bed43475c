"""When something goes wrong: a sentence each, nothing lost that was saved, and on it goes."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamay.engine import Engine
from llamay.errors import SessionError, SnapshotError
from llamay.events import AnswerEnded, AnswerFailed, AnswerText, Notice, SessionEvent
from llamay.session import Session, Settings
from llamay.session.catalog import Catalog
from tests.session.talking import Ear, engine_of, hear

ROOT = Path(__file__).parents[2]


@pytest.fixture
def session(engine: Engine, tmp_path: Path) -> Iterator[Session]:
    session = Session.create(tmp_path, engine, "s", settings=Settings(max_tokens=70))
    yield session
    session.close()


@pytest.fixture
def ear(session: Session) -> Ear:
    return hear(session)


class Disk:
    """Every file, on a disk that can be full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        for name in ("write", "pwrite"):
            monkeypatch.setattr(os, name, self._limited(getattr(os, name)))

    def _limited(self, write: Callable[..., int]) -> Callable[..., int]:
        def limited(descriptor: int, *arguments: Any) -> int:
            if self.full and stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, *arguments)

        return limited


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr("llamay.session.saver.RETRY_S", 0.05)
    monkeypatch.setattr("llamay.session.writing.RETRY_S", 0.05)
    return Disk(monkeypatch)


def test_with_a_full_disk_it_goes_on_in_memory_and_saves_when_there_is_room(
    disk: Disk, engine: Engine, tmp_path: Path, session: Session, ear: Ear
) -> None:
    _, (first,) = session.send("one")
    ear.wait_ended(first)
    session.save()
    disk.full = True
    _, (second,) = session.send("two")
    ear.wait_ended(second)
    told = ear.wait(Notice, 2)
    assert all("No space left on device" in notice.message for notice in told)
    assert [notice.level for notice in told] == ["error", "error"]
    with pytest.raises(SessionError, match="cannot be written"):
        session.save()
    time.sleep(0.2)
    assert len(ear.of(Notice)) == 2, "one sentence each, however often it is tried"
    disk.full = False
    assert {notice.level for notice in ear.wait(Notice, 4)[2:]} == {"info"}
    session.save()
    session.close()
    engine.cache.clear_tree()
    prefilled = engine.counters.prefilled_tokens
    again = Session.open(tmp_path, "s", engine)
    assert again.tree.node(second).ids == session.tree.node(second).ids
    deadline = time.monotonic() + 30
    while again.where(second).place != "memory":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.counters.prefilled_tokens == prefilled
    again.close()


def test_closing_on_a_full_disk_keeps_what_was_saved(
    disk: Disk, engine: Engine, tmp_path: Path
) -> None:
    session = Session.create(tmp_path, engine, "s", settings=Settings(max_tokens=70))
    ear = hear(session)
    _, (first,) = session.send("one")
    ear.wait_ended(first)
    session.save()
    disk.full = True
    _, (second,) = session.send("two")
    ear.wait_ended(second)
    goodbye = session.close()
    assert goodbye.seconds < 1
    assert "are lost" in (goodbye.problem or "")
    disk.full = False
    again = Session.open(tmp_path, "s", engine)
    assert again.tree.node(first).ids == session.tree.node(first).ids
    assert second not in again.tree.nodes
    again.close()


def test_closing_says_what_state_could_not_be_saved(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.create(tmp_path, engine, "s", settings=Settings(max_tokens=70))
    ear = hear(session)

    def full(*_: object, **__: object) -> None:
        raise SnapshotError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("llamay.session.saver.write_segment", full)
        _, (answer,) = session.send("one")
        ear.wait_ended(answer)
        problem = session.close().problem
    assert problem == "the disk is full; the text is saved, and is read again when it is continued"
    again = Session.open(tmp_path, "s", engine)
    assert again.tree.node(answer).ids == session.tree.node(answer).ids
    assert again.close().problem is None


def test_a_folder_that_is_gone_is_told_and_not_made_again(
    tmp_path: Path, session: Session, ear: Ear
) -> None:
    _, (first,) = session.send("one")
    ear.wait_ended(first)
    session.save()
    shutil.rmtree(tmp_path / "sessions" / "s")
    _, (second,) = session.send("two")
    ear.wait_ended(second)
    messages = [notice.message for notice in ear.wait(Notice, 2)]
    assert any("deleted" in message for message in messages)
    assert session.tree.node(second).state == "done"
    assert session.close().problem
    assert not (tmp_path / "sessions" / "s").exists()


def test_an_engine_that_dies_leaves_the_session_whole(model: Path, tmp_path: Path) -> None:
    with engine_of(model, step_s=0.003) as engine:
        session = Session.create(tmp_path, engine, "s", settings=Settings(max_tokens=300))
        ear = hear(session)
        _, (answer,) = session.send("one")
        ear.wait_tokens(answer, 80)
        engine.close()
        ear.wait(AnswerFailed)
        assert "engine was closed" in ear.of(AnswerFailed)[0].message
        _, (second,) = session.send("two", at=0)
        ear.wait_ended(second)
        assert len(ear.of(AnswerFailed)) == 2
        ids = list(session.tree.node(answer).ids)
        assert session.close().seconds < 1
    with engine_of(model) as engine:
        session = Session.open(tmp_path, "s", engine)
        ear = hear(session)
        assert session.tree.node(answer).ids == ids
        session.resume(answer)
        ear.wait_ended(answer)
        assert len(session.tree.node(answer).ids) == 300
        session.close()


def test_a_budget_that_is_too_small_is_told_with_figures(model: Path, tmp_path: Path) -> None:
    with engine_of(model) as probe:
        page = probe.cache.store.page_bytes
    with engine_of(model, budget_bytes=4 * page) as engine:
        session = Session.create(tmp_path, engine, "s", settings=Settings(max_tokens=70))
        ear = hear(session)
        _, (long,) = session.send("one two " * 200)
        ear.wait_ended(long)
        (failed,) = ear.of(AnswerFailed)
        assert "the context memory budget holds 4 pages" in failed.message
        assert session.tree.node(long).error == failed.message
        _, (short,) = session.send("one", at=0)
        ear.wait_ended(short)
        assert session.tree.node(short).state == "done"
        session.close()


def test_a_listener_that_fails_does_not_stop_the_others(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def fail(event: SessionEvent) -> None:
        raise RuntimeError("broken")

    session.subscribe(fail)
    ear = hear(session)
    _, (answer,) = session.send("one")
    ear.wait_ended(answer)
    assert len(seen) == 1
    assert ear.of(AnswerText)


def test_events_come_on_one_thread_after_they_are_in_the_journal(
    tmp_path: Path, session: Session
) -> None:
    threads: set[str] = set()
    bad: list[object] = []
    ended = threading.Event()
    written: list[int] = []

    def listen(event: SessionEvent) -> None:
        threads.add(threading.current_thread().name)
        if isinstance(event, AnswerText):
            written.extend(event.ids)
            from llamay.session.loading import load

            loaded = load(tmp_path / "sessions" / "s").tree
            if loaded.node(event.node).ids[: len(written)] != written:
                bad.append(event)
        if isinstance(event, AnswerEnded):
            ended.set()

    session.subscribe(listen)
    session.set_settings(0, Settings(max_tokens=20))
    session.send("one")
    assert ended.wait(60)
    assert bad == []
    assert threads == {"llamay-journal"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_the_session_within_a_second(
    number: int, model: Path, engine: Engine, tmp_path: Path
) -> None:
    script = f"""
import os, sys
from pathlib import Path
from typing import Any
from llamay.session import Session, Settings
from llamay.session.catalog import Catalog
from llamay.session.signals import saved_on_signals
from tests.session.talking import engine_of, hear
def ended(number, goodbye):
    print(number, goodbye.seconds, goodbye.command, flush=True)
    os._exit(128 + number)
with engine_of(Path({str(model)!r}), step_s=0.003) as engine:
    session = Session.create(Path({str(tmp_path)!r}), engine, "s")
    ear = hear(session)
    with saved_on_signals(session, ended):
        _, (answer,) = session.send("one")
        ear.wait_tokens(answer, 70)
        print("ready", flush=True)
        ear.wait_ended(answer)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, seconds, command = process.stdout.readline().split(" ", 2)
    process.stdout.close()
    assert process.wait() == 128 + number == 128 + int(code)
    assert float(seconds) < 1
    assert command == "llamay --session s\n"
    session = Session.open(tmp_path, "s", engine)
    assert session.tree.node(2).state == "interrupted"
    assert len(session.tree.node(2).ids) >= 70
    assert session.tree.node(2).segments
    session.close()


def test_a_session_that_nobody_wrote_in_is_not_kept(engine: Engine, tmp_path: Path) -> None:
    session = Session.create(tmp_path, engine)
    assert session.close().command == "llamay"
    assert Catalog(tmp_path).entries() == []
    session = Session.create(tmp_path, engine)
    session.set_settings(0, Settings(system="Be brief."))
    name = session.name
    assert session.close().command == f"llamay --session {name}"
    again = Session.open(tmp_path, name, engine)
    assert again.tree.root.settings.system == "Be brief."
    again.close()


def test_a_session_is_named_by_its_first_message(engine: Engine, tmp_path: Path) -> None:
    session = Session.create(tmp_path, engine, settings=Settings(max_tokens=3))
    ear = hear(session)
    _, (answer,) = session.send("Which index would you use?")
    ear.wait_ended(answer)
    session.send("And then?")
    assert session.name == "which-index-would-you-use"
    goodbye = session.close()
    assert goodbye.command == "llamay --session which-index-would-you-use"
    assert goodbye.problem is None
    assert Catalog(tmp_path).last() == session.name
