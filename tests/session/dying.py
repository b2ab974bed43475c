"""Runs as a process of its own, without threads, and forks: children use a session and die.

Usage: python -m tests.session.dying random|reader|every-call|errors|full FOLDER

What a session of n records is, is known from n alone, so whatever a child left can be judged.
"""

import errno
import itertools
import os
import random
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from llamay.errors import SessionError
from llamay.session.folder import SessionFolder, create_folder, open_folder
from llamay.session.loading import MANIFEST, load
from llamay.session.records import AddNode, AppendIds, Record, SetLabel, Undo
from llamay.session.tree import Tree
from tests.session.sessions import KEY, new_tree, same

CALLS = ("write", "replace", "rename", "open", "unlink", "ftruncate", "fsync")
_MARGIN = 3  # records that may be on the disk though their writer did not live to say so


class Story:
    """Records without end, always the same, and the trees that they make."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._writer = new_tree()
        self._told = [same(self._writer)]

    def next_after(self, sequence: int) -> Record:
        while len(self.records) <= sequence:
            record = self._record(len(self.records))
            self._writer.apply(record)
            self.records.append(record)
            self._told.append(same(self._writer))
        return self.records[sequence]

    def after(self, sequence: int) -> object:
        self.next_after(sequence)
        return self._told[sequence]

    def _record(self, i: int) -> Record:
        tree = self._writer
        last = max(id for id in tree.nodes if tree.visible(id))
        role = tree.node(last).role
        if i % 13 == 12 and tree.can_undo:
            return Undo()
        if role != "user" and i % 5 == 0:
            return AddNode(tree.next_id, last, "user", f"message {i}", ids=(i,))
        if role == "user":
            return AddNode(tree.next_id, last, "assistant")
        if role == "assistant":
            return AppendIds(last, len(tree.node(last).ids), (i,), (-1 / (i + 1),), f"word {i} ")
        return SetLabel(last, f"label {i}")


STORY = Story()


def judge(path: Path, at_least: int, more: int = _MARGIN) -> int:
    """What is there must be a session of `at_least` records, or `more`; returns how many."""
    loaded = load(path, KEY)
    assert loaded.notices == [], loaded.notices
    assert at_least <= loaded.sequence <= at_least + more, (at_least, loaded.sequence)
    assert same(loaded.tree) == STORY.after(loaded.sequence)
    return loaded.sequence


def judge_without_session_json(path: Path, sequence: int) -> None:
    """With damage to session.json, the one before and the journals must give the same."""
    if (path / MANIFEST).exists():
        whole = (path / MANIFEST).read_bytes()
        (path / MANIFEST).write_bytes(b"{")
        loaded = load(path, KEY)
        assert len(loaded.notices) == 1
        assert (loaded.sequence, same(loaded.tree)) == (sequence, STORY.after(sequence))
        (path / MANIFEST).write_bytes(whole)


def use(path: Path, ways: Iterator[int], told: Callable[[int], None]) -> None:
    """Goes on with a session: records, one to three at once, and rotations between them."""
    folder = open_folder(path, KEY)
    tree = folder.tree
    told(folder.sequence)
    for way in ways:
        if way == 0:
            folder.checkpoint(tree)
            continue
        append(folder, tree, way)
        told(folder.sequence)
    folder.release()


def append(folder: SessionFolder, tree: Tree, count: int) -> None:
    records = [STORY.next_after(folder.sequence + i) for i in range(count)]
    folder.append(records, sync=count == 2)
    for record in records:
        tree.apply(record)


def child(task: Callable[[int], None]) -> tuple[int, int]:
    """Forks; the child does `task(pipe)`; returns its process id and the pipe's other end."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    code = 1
    try:
        os.close(reader)
        task(writer)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def last_told(reader: int) -> int:
    data = b""
    while part := REAL["read"](reader, 65536):
        data += part
    os.close(reader)
    return int.from_bytes(data[-8:], "little")


REAL = {name: getattr(os, name) for name in (*CALLS, "read")}


def teller(pipe: int) -> Callable[[int], None]:
    return lambda sequence: REAL["write"](pipe, sequence.to_bytes(8, "little"))


def patch_calls(nth: int, end: Callable[[str, tuple[object, ...]], None]) -> Iterator[int]:
    """Has the nth of all calls that change files do `end` in its place; counts them."""
    calls = itertools.count(1)
    for name in CALLS:

        def patched(*args: object, _name: str = name, **kwargs: object) -> object:
            if next(calls) == nth:
                end(_name, args)
            return REAL[_name](*args, **kwargs)

        setattr(os, name, patched)
    return calls


def die(name: str, args: tuple[object, ...]) -> None:
    if name == "write":
        descriptor, data = args
        REAL["write"](descriptor, data[: len(data) // 2])  # type: ignore[index, arg-type]
    os.kill(os.getpid(), signal.SIGKILL)


def at_random(path: Path, seconds: float = 2.5) -> None:
    chance = random.Random(1)
    sequence, deaths = judge(path, 0), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or deaths < 20:
        ways = (chance.choice((0, 1, 1, 1, 2, 3)) for _ in itertools.count())
        process, reader = child(lambda pipe, ways=ways: use(path, ways, teller(pipe)))  # type: ignore[misc]
        if deaths % 3:
            select.select([reader], [], [])  # it has opened the session
        time.sleep(chance.random() ** 2 * 0.15)
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), status
        sequence = judge(path, max(sequence, last_told(reader)))
        deaths += 1
    print(f"{deaths} deaths, {sequence} records")


def with_a_reader(path: Path, records: int = 20) -> None:
    """Whoever reads while the owner writes and rotates gets a whole session, never an older one."""
    ways = (0 if i % 3 else 2 for i in itertools.count())
    process, reader = child(lambda pipe: use(path, ways, lambda sequence: None))
    sequence, reads = 0, 0
    try:
        while sequence < records:
            sequence = judge(path, sequence, more=10**6)
            reads += 1
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reader)
    print(f"{reads} reads of {sequence} records")


WAYS = (1, 0, 3, 2, 0, 1, 0, 0, 2)


def at_every_call(path: Path) -> None:
    for nth in itertools.count(1):
        copy = path.with_name(f"copy-{nth}")
        shutil.copytree(path, copy)

        def task(pipe: int, copy: Path = copy, nth: int = nth) -> None:
            patch_calls(nth, die)
            use(copy, iter(WAYS), teller(pipe))

        process, reader = child(task)
        _, status = os.waitpid(process, 0)
        sequence = judge(copy, last_told(reader))
        judge_without_session_json(copy, sequence)
        open_folder(copy, KEY).release()
        judge(copy, sequence, more=0)
        assert not [file for file in copy.iterdir() if file.name.startswith(".")]
        if not os.WIFSIGNALED(status):
            assert (status, sequence) == (0, sum(WAYS))
            print(f"{nth - 1} deaths")
            return


def fail(name: str, args: tuple[object, ...]) -> None:
    if name == "write":
        descriptor, data = args
        REAL["write"](descriptor, data[: len(data) // 2])  # type: ignore[index, arg-type]
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def with_errors(path: Path) -> None:
    """Each call fails in turn; what failed is tried again, and everything is there."""
    for nth in itertools.count(1):
        copy = path.with_name(f"copy-{nth}")
        shutil.copytree(path, copy)
        folder = open_folder(copy, KEY)
        tree, errors = folder.tree, list[str]()
        calls = patch_calls(nth, fail)
        for way in WAYS:
            try:
                folder.checkpoint(tree) if way == 0 else append(folder, tree, way)
            except SessionError as error:
                errors.append(str(error))
                folder.checkpoint(tree) if way == 0 else append(folder, tree, way)
        made = next(calls) - 1
        for name in CALLS:
            setattr(os, name, REAL[name])
        folder.release()
        judge(copy, sum(WAYS), more=0)
        for text in errors:
            assert str(copy) in text, text
            assert "No space left on device" in text, text
        if made < nth:
            print(f"{made} calls")
            return


def disk_full(path: Path) -> None:
    """Files may not grow: what fits is kept, the rest is told, and can be tried again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder = open_folder(path, KEY)
    tree = folder.tree
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    while not fails(lambda: append(folder, tree, 1)):
        pass
    sequence = folder.sequence
    judge(path, sequence, more=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    assert fails(lambda: folder.checkpoint(tree))
    judge(path, sequence, more=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    append(folder, tree, 3)
    folder.checkpoint(tree)
    folder.release()
    judge(path, sequence + 3, more=0)
    print(f"full after {sequence} records")


def fails(task: Callable[[], None]) -> bool:
    try:
        task()
    except SessionError as error:
        text = str(error)
    else:
        return False
    assert "cannot be written (File too large)" in text
    return True


def main() -> None:
    mode, place = sys.argv[1:]
    path = Path(place) / "s"
    create_folder(path, new_tree(), KEY).release()
    modes = {
        "random": at_random,
        "reader": with_a_reader,
        "every-call": at_every_call,
        "errors": with_errors,
        "full": disk_full,
    }
    modes[mode](path)


if __name__ == "__main__":
    main()
