"""A prompt whose reading was stopped is read on from there: from memory, or from disk."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamay.engine import Engine
from llamay.events import AnswerStarted, AnswerText, PrefillProgress, Resumed, Saved
from llamay.formats import KVPrecision
from llamay.mlx_kernels import Control
from llamay.sampling import SamplingParams
from llamay.session import Session, Settings
from llamay.session.answers import Answers
from llamay.session.node import Node
from tests.session.talking import LONG, Ear, around_steps, engine_of, hear, plain, written

PAGE = 64
PARAMS = SamplingParams(max_tokens=20, seed=5)
SETTINGS = Settings(max_tokens=20, seed=5)


@contextmanager
def held_after(engine: Engine, steps: int) -> Iterator[threading.Event]:
    """Within, the engine takes so many steps, and the next one only when all in it is cancelled.

    Yields what says that this one has begun.
    """
    begun, count = threading.Event(), itertools.count(1)

    def held(step: Callable[[], Any], control: Control) -> Any:
        if next(count) > steps:
            begun.set()
            while not control.cancelled:
                time.sleep(0.001)
        return step()

    end = around_steps(engine, held)
    try:
        yield begun
    finally:
        end()


def create(home: Path, engine: Engine) -> tuple[Session, Ear]:
    session = Session.create(home, engine, "s", settings=SETTINGS)
    return session, hear(session)


def stop_while_reading(session: Session, ear: Ear, engine: Engine, n: int = 1) -> tuple[int, int]:
    """Sends a long text and stops its answers in the middle of it; returns the turn, and how many
    of its tokens were read."""
    with held_after(engine, steps=3) as begun:
        user, answers = session.send(LONG, n=n)
        assert begun.wait(60)
        session.stop()
        ear.wait_ended(*answers)
    read = engine.counters.prefilled_tokens
    assert 0 < read < session.tree.length(user)
    return user, read


def whole_pages(tokens: int) -> int:
    return tokens - tokens % PAGE


def check(session: Session, model: Path, answer: int) -> None:
    """The answer is that of an engine that read everything at once."""
    node = session.tree.node(answer)
    expected = plain(model, session.tree.history(node.parent), replace(PARAMS, seed=node.seed or 0))
    assert written(session.tree, answer) == expected


@pytest.mark.parametrize("again", ["resume", "regenerate"])
def test_what_was_read_is_not_read_again(
    again: str, engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    user, read = stop_while_reading(session, ear, engine)
    answer, kept, length = user + 1, whole_pages(read), session.tree.length(user)
    assert engine.cache.retained == 0, "nobody has asked for it again"
    session.save()
    assert [(ref.start, ref.end) for ref in session.tree.node(user).segments] == [(0, kept)]
    assert session.figures().pages == engine.cache.live_pages == kept // PAGE
    if again == "resume":
        session.resume(answer)
        ear.wait_ended(answer, answer)
    else:
        (answer,) = session.regenerate(answer)
        ear.wait_ended(answer)
    assert ear.of(AnswerStarted)[-1] == AnswerStarted(answer, kept, 0, length - kept)
    assert engine.counters.prefilled_tokens == read + length - kept
    check(session, model, answer)
    session.save()
    refs = session.tree.node(user).segments
    assert refs[0].end == kept == refs[1].start
    assert refs[-1].end == length
    session.close()


def test_all_samples_of_one_prompt_have_what_was_read(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    user, read = stop_while_reading(session, ear, engine, n=3)
    answers, kept = [user + 1, user + 2, user + 3], whole_pages(read)
    figures = session.figures()
    assert (figures.pages, figures.copy_pages) == (kept // PAGE, 3 * kept // PAGE)
    for answer in answers:
        session.resume(answer)
    ear.wait_ended(*answers, *answers)
    assert engine.counters.prefilled_tokens == read + session.tree.length(user) - kept
    for answer in answers:
        check(session, model, answer)
    session.close()


def test_a_session_that_is_closed_while_it_reads_reads_on_when_it_is_opened(
    model: Path, tmp_path: Path
) -> None:
    with engine_of(model) as engine:
        session, _ = create(tmp_path, engine)
        with held_after(engine, steps=3) as begun:
            user, (answer,) = session.send(LONG)
            assert begun.wait(60)
            goodbye = session.close()
        assert goodbye.seconds < 1
        kept = whole_pages(engine.counters.prefilled_tokens)
        assert goodbye.pages == kept // PAGE > 0
    with engine_of(model) as engine:
        session = Session.open(tmp_path, "s", engine)
        ear = hear(session)
        assert ear.wait(Resumed)[0].tokens == kept
        assert session.tree.node(answer).state == "interrupted"
        session.resume(answer)
        ear.wait_ended(answer)
        length = session.tree.length(user)
        assert ear.of(AnswerStarted) == [AnswerStarted(answer, kept, 0, length - kept)]
        assert engine.counters.prefilled_tokens == length - kept
        check(session, model, answer)
        session.close()


def test_what_is_read_is_saved_meanwhile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamay.session.answers.READ_S", 0.0)
    monkeypatch.setattr("llamay.engine.scheduler.MAX_STEP_TOKENS", 64)
    with engine_of(model, step_s=0.01) as engine:
        session, ear = create(tmp_path, engine)
        user, (answer,) = session.send(LONG)
        first = ear.wait(Saved)[0]
        assert first.node == user
        assert ear.of(AnswerText) == []
        ref = session.tree.node(user).segments[0]
        assert (ref.start, ref.end % PAGE) == (0, 0)
        ear.wait_ended(answer)
        check(session, model, answer)
        session.close()


def test_a_long_turn_is_saved_in_pieces_that_follow_one_another(
    engine: Engine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_bytes = engine.cache.store.layout.row_bytes
    monkeypatch.setattr("llamay.session.saver.PIECE_BYTES", 3 * PAGE * row_bytes)
    session, ear = create(tmp_path, engine)
    user, (answer,) = session.send(LONG)
    ear.wait_ended(answer)
    session.save()
    length, refs = session.tree.length(user), session.tree.node(user).segments
    ends = [*range(3 * PAGE, length, 3 * PAGE), length]
    assert [(ref.start, ref.end) for ref in refs] == list(zip([0, *ends], ends, strict=False))
    session.close()
    engine.cache.clear_tree()
    prefilled = engine.counters.prefilled_tokens
    session = Session.open(tmp_path, "s", engine)
    ear = hear(session)
    assert ear.wait(Resumed)[0].tokens == session.tree.length(answer)
    (again,) = session.regenerate(answer)
    ear.wait_ended(again)
    assert engine.counters.prefilled_tokens == prefilled
    check(session, model, again)
    session.close()


def test_reading_is_saved_no_more_often_than_once_a_second() -> None:
    saved: list[float] = []
    node = Node(2, 1, "assistant", [""])
    now = 0.0
    answers = Answers([node], 9, PAGE, on_page=lambda _: saved.append(now), on_end=lambda _: None)
    for tenths in range(1, 36):
        now = tenths / 10
        told = answers.told(PrefillProgress(9999, 0, tenths, now))
        assert told is not None
        if told.then:
            told.then()
    assert saved == [1, 2, 3]


def test_what_waits_to_be_read_has_nothing_to_keep(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    with held_after(engine, steps=1) as begun:
        _, (first,) = session.send(LONG)
        assert begun.wait(60)
        _, (second,) = session.send("another", at=0)
        ear.wait(AnswerStarted, 2)
        session.stop(second)
        session.stop(first)
        ear.wait_ended(first, second)
    assert session.where(second).place == "none"
    session.resume(second)
    ear.wait_ended(second, second)
    check(session, model, second)
    session.close()


def test_state_of_another_precision_is_read_on_from_too(model: Path, tmp_path: Path) -> None:
    with engine_of(model) as engine:
        session, ear = create(tmp_path, engine)
        user, read = stop_while_reading(session, ear, engine)
        kept, answer = whole_pages(read), user + 1
        session.close()
    with engine_of(model, precision=KVPrecision.Q8) as engine:
        session = Session.open(tmp_path, "s", engine)
        ear = hear(session)
        ear.wait(Resumed)
        with held_after(engine, steps=2) as begun:
            session.resume(answer)
            assert begun.wait(60)
            session.stop()
            ear.wait_ended(answer)
        more = whole_pages(kept + engine.counters.prefilled_tokens)
        assert more > kept
        session.resume(answer)
        ear.wait_ended(answer, answer)
        assert ear.of(AnswerStarted)[-1].memory == more
        assert len(session.tree.node(answer).ids) == 20
        session.close()


def test_an_error_while_reading_costs_what_was_read(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    count = itertools.count(1)

    def failing(step: Callable[[], Any], control: Control) -> Any:
        if next(count) == 3:
            raise RuntimeError("broken")
        return step()

    around_steps(engine, failing)
    user, (answer,) = session.send(LONG)
    ear.wait_ended(answer)
    assert session.tree.node(answer).state == "failed"
    assert engine.cache.live_pages == 0
    read = engine.counters.prefilled_tokens
    session.resume(answer)
    ear.wait_ended(answer, answer)
    assert engine.counters.prefilled_tokens == read + session.tree.length(user)
    check(session, model, answer)
    session.close()
