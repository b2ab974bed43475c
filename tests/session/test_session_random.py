"""Random edits while answers are written; then everything is as it was after a restart."""

import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from llamay.engine import Engine
from llamay.errors import LlamayError
from llamay.events import Notice
from llamay.sampling import SamplingParams
from llamay.session import Session, Settings
from llamay.session.records import RUNNING
from llamay.session.states import saved
from tests.session.talking import LONG, Ear, engine_of, hear, plain, written

TOKENS = 40


def act(session: Session, moments: random.Random) -> None:
    """Does something to some turn, or nothing if that cannot be done to it."""
    id = moments.choice(list(session.tree.walk()))
    node = session.tree.node(id)
    at = id if node.role != "user" else node.parent
    actions = {
        "send": lambda: session.send("word " * moments.randrange(1, 60), at, 2),
        "send long": lambda: session.send(LONG, at),
        "send to": lambda: session.send_to([at], "more"),
        "regenerate": lambda: session.regenerate(id, moments.randrange(1, 3)),
        "stop": lambda: session.stop(moments.choice([None, id])),
        "resume": lambda: session.resume(id),
        "delete": lambda: session.delete(id),
        "undo": session.undo,
        "redo": session.redo,
        "go": lambda: session.go(id),
        "look": lambda: session.look_at([id]),
        "see": lambda: (session.where(id), session.page_map(id), session.figures()),
        "save": lambda: session.save(wait=False),
    }
    weights = [4, 1, 1, 2, 3, 5, 1, 1, 1, 2, 1, 3, 1]
    with suppress(LlamayError):
        moments.choices(list(actions.values()), weights)[0]()


def wait_until_quiet(session: Session) -> None:
    deadline = time.monotonic() + 60
    while any(node.state in RUNNING for node in session.tree.nodes.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_unread(session: Session, id: int) -> bool:
    """Whether it is an answer that was stopped while its message was read, or before."""
    node = session.tree.node(id)
    return node.state == "stopped" and not node.ids and bool(session.tree.node(node.parent).ids)


def read_on(model: Path, session: Session, engine: Engine, ear: Ear, leaf: int) -> None:
    """Nothing that was saved is read again, and the answer is that of one reading."""
    node, weights = session.tree.node(leaf), session.tree.info.weights_sha256 or ""
    on_disk = saved(session.tree, leaf, weights).end
    prefilled = engine.counters.prefilled_tokens
    session.resume(leaf)
    ear.wait_ended(leaf)
    read = engine.counters.prefilled_tokens - prefilled
    assert read <= session.tree.length(node.parent) - on_disk
    params = SamplingParams(max_tokens=TOKENS, seed=node.seed or 0)
    assert written(session.tree, leaf) == plain(model, session.tree.history(node.parent), params)


def run(model: Path, home: Path, seed: int, seconds: float) -> None:
    moments = random.Random(seed)
    settings = Settings(max_tokens=TOKENS, seed=seed)
    with engine_of(model, step_s=0.001) as engine:
        session = Session.create(home, engine, "s", settings=settings)
        ear = hear(session)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            act(session, moments)
            time.sleep(moments.random() * 0.05)
        session.stop()
        wait_until_quiet(session)
        session.save()
        session.close()
        assert ear.of(Notice) == []
    before = session.tree
    with engine_of(model) as engine:
        session = Session.open(home, "s", engine)
        ear = hear(session)
        nodes = map(session.tree.node, session.tree.leaves())
        leaves = [node.id for node in nodes if node.role == "assistant" and node.ids]
        assert session.tree.leaves() == before.leaves()
        deadline = time.monotonic() + 30
        while any(session.where(leaf).place != "memory" for leaf in leaves):
            assert time.monotonic() < deadline, [session.where(leaf) for leaf in leaves]
            time.sleep(0.01)
        assert ear.of(Notice) == []
        assert engine.counters.prefilled_tokens == 0
        unread = [id for id in session.tree.leaves() if is_unread(session, id)]
        for leaf in moments.sample(unread, min(3, len(unread))):
            read_on(model, session, engine, ear, leaf)
        for leaf in moments.sample(leaves, min(3, len(leaves))):
            node = session.tree.node(leaf)
            assert node.ids == before.node(leaf).ids
            params = SamplingParams(max_tokens=TOKENS, seed=node.seed or 0)
            expected = plain(model, session.tree.history(node.parent), params)
            if node.state == "stopped":
                session.resume(leaf)
                ear.wait_ended(leaf)
            assert written(session.tree, leaf) == expected
        session.close()


def test_a_session_is_the_same_after_a_restart(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, seed=1, seconds=3)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_sessions_are_the_same_after_a_restart(model: Path, tmp_path: Path, seed: int) -> None:
    run(model, tmp_path, seed, seconds=20)
