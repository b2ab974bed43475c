"""A session survives kill -9 at any moment: nothing shown is lost, and it continues exactly."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from llamay.engine import Engine, Request
from llamay.events import TextDelta
from llamay.session import Session
from llamay.session.answers import sampling_params
from llamay.session.states import saved
from tests.session.killed_session import SETTINGS
from tests.session.talking import Plain, engine_of, hear, written

ROOT = Path(__file__).parents[2]

Shown: TypeAlias = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Engine]:
    """Answers without sessions."""
    with engine_of(model) as engine:
        yield engine


class Process:
    """The script of `killed_session`, running."""

    def __init__(self, home: Path, model: Path) -> None:
        command = [sys.executable, "-m", "tests.session.killed_session", str(home), str(model)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline()]
        assert self.lines[0], "it did not start"

    def kill_after(self, lines: int, seconds: float) -> None:
        """Kills it some time after it printed so many lines."""
        assert self.process.stdout is not None
        while len(self.lines) < lines and (line := self.process.stdout.readline()):
            self.lines.append(line)
        time.sleep(seconds)
        os.kill(self.process.pid, signal.SIGKILL)

    def shown(self) -> Shown:
        """Everything that it printed, once it has ended."""
        assert self.process.stdout is not None
        lines = [*self.lines, *self.process.stdout]
        self.process.wait()
        self.process.stdout.close()
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def plain(engine: Engine, session: Session, node: int) -> Plain:
    """What the answer would be in an engine that knows nothing."""
    user = session.tree.node(node).parent
    params = sampling_params(SETTINGS, session.tree.node(node).seed)
    told = Plain([], [], "")

    def listen(event: object) -> None:
        if isinstance(event, TextDelta):
            told.ids += event.ids
            told.logprobs += event.logprobs
            told.text += event.text

    engine.cache.clear_tree()
    generation = engine.submit(
        Request(session.tree.history(user), (params,), speculate=False), listen
    )
    assert generation.done.wait(60)
    return told


def check(home: Path, model: Path, reference: Engine, shown: Shown) -> str:
    """Opens the session, and goes on with whatever was not finished; says what state it was in."""
    with engine_of(model) as engine:
        session = Session.open(home, "s", engine)
        ear = hear(session)
        for line in shown:
            for turn in line.get("turns", ()):
                assert turn in session.tree.nodes or turn > 3, "a turn that was shown is lost"
        for node in {line["node"] for line in shown if "node" in line}:
            if node not in session.tree.nodes:
                assert {"turns"} & {key for line in shown for key in line}, f"turn {node} is lost"
                continue  # it was deleted, and the session closed
            told = [line for line in shown if line.get("node") == node]
            ids = [id for line in told for id in line["ids"]]
            answer = session.tree.node(node)
            assert answer.ids[: len(ids)] == ids, f"tokens of turn {node} are lost"
            assert answer.text.startswith("".join(line["text"] for line in told))
        states = []
        for answer in list(session.tree.nodes.values()):
            if answer.state == "interrupted":
                before = engine.counters.prefilled_tokens
                id = answer.id if answer.ids else answer.parent
                known = bool(session.tree.node(id).ids)
                length = session.tree.length(id)
                on_disk = saved(session.tree, id, answer.model or "").end
                states.append((len(answer.ids), on_disk, length))
                session.resume(answer.id)
                ear.wait_ended(answer.id)
                prefilled = engine.counters.prefilled_tokens - before
                if known:
                    assert prefilled <= length - on_disk, "what was saved was computed again"
                assert session.tree.node(answer.id).state == "done"
        for answer in session.tree.nodes.values():
            if answer.role == "assistant" and answer.state == "done":
                assert written(session.tree, answer.id) == plain(reference, session, answer.id)
        session.close()
    return f"{len(shown)} lines; interrupted (tokens, on disk, of): {states}"


def run(tmp_path: Path, model: Path, reference: Engine, seed: int, whole: Shown) -> None:
    """Kills the script while it generates, or while it saves, closes, sweeps and opens."""
    moments = random.Random(seed)
    ends = [i for i, line in enumerate(whole) if not {"node", "saved", "read"} & line.keys()]
    lines = moments.choice(ends) if seed % 3 == 0 else moments.randrange(1, len(whole))
    home = tmp_path / str(seed)
    process = Process(home, model)
    process.kill_after(lines, moments.uniform(0, 0.08))
    print(seed, lines, check(home, model, reference, process.shown()))


@pytest.fixture(scope="module")
def whole(model: Path, reference: Engine, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What the script shows when nobody kills it, and that it is right then."""
    home = tmp_path_factory.mktemp("whole")
    shown = Process(home, model).shown()
    assert shown[-1] == {"done": True}
    check(home, model, reference, shown)
    return shown


def test_nothing_shown_is_lost_at_any_moment(
    tmp_path: Path, model: Path, reference: Engine, whole: Shown
) -> None:
    for seed in range(8):
        run(tmp_path, model, reference, seed, whole)


@pytest.mark.deep
def test_nothing_shown_is_lost_at_a_hundred_moments(
    tmp_path: Path, model: Path, reference: Engine, whole: Shown
) -> None:
    for seed in range(100, 200):
        run(tmp_path, model, reference, seed, whole)
