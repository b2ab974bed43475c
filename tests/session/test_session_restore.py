"""A session that is opened again has its state again, and nothing is read twice."""

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from llamay.engine import Engine
from llamay.errors import SessionBusyError, SessionError, SessionKeyError
from llamay.events import AnswerStarted, Notice, Resumed, Saved
from llamay.formats import KVPrecision
from llamay.kv.snapshot import Key
from llamay.sampling import SamplingParams
from llamay.session import Session, Settings
from llamay.session.catalog import Catalog
from tests.session.talking import LONG, Ear, engine_of, hear, plain, written

SETTINGS = Settings(max_tokens=70, seed=5)
PARAMS = SamplingParams(max_tokens=70, seed=5)


def create(home: Path, engine: Engine, **options: object) -> tuple[Session, Ear]:
    session = Session.create(home, engine, "s", settings=SETTINGS, **options)  # type: ignore[arg-type]
    return session, hear(session)


def reopen(home: Path, engine: Engine, key: Key | None = None) -> tuple[Session, Ear]:
    session = Session.open(home, "s", engine, key)
    return session, hear(session)


def wait_in_memory(session: Session) -> None:
    """Until the state of every leaf is back."""
    deadline = time.monotonic() + 60
    leaves = session.tree.leaves()
    while any(session.where(leaf).place != "memory" for leaf in leaves):
        assert time.monotonic() < deadline, [session.where(leaf) for leaf in leaves]
        time.sleep(0.01)


def test_five_branches_come_back_with_their_sharing_and_nothing_is_prefilled(
    model: Path, tmp_path: Path
) -> None:
    with engine_of(model) as engine:
        session, ear = create(tmp_path, engine)
        user, first = session.send(LONG, n=3)
        ear.wait_ended(*first)
        more = session.send_to(first[:2], "and then?")
        ear.wait_ended(*more)
        more += session.regenerate(first[0], 2)
        ear.wait_ended(*more)
        leaves = session.tree.leaves()
        assert len(leaves) == 5
        session.save()
        engine.call(lambda: None)
        before = session.figures()
        pages = {leaf: session.where(leaf) for leaf in leaves}
        live = engine.cache.live_pages
        session.close()
    with engine_of(model) as engine:
        begun = time.perf_counter()
        session, ear = reopen(tmp_path, engine)
        ear.wait(Resumed, 2)
        wait_in_memory(session)
        restored_s = time.perf_counter() - begun
        after = session.figures()
        assert (after.pages, after.copy_pages) == (before.pages, before.copy_pages)
        assert engine.cache.live_pages == live
        assert {leaf: session.where(leaf) for leaf in leaves} == pages
        assert engine.counters.prefilled_tokens == 0
        resumed = ear.of(Resumed)[-1]
        assert resumed.tokens == engine.counters.restored_tokens
        assert len(session.tree.node(user).ids) > 2000
        assert resumed.prefill_seconds is not None
        print(f"restored in {restored_s:.3f} s, prefill would take {resumed.prefill_seconds:.3f} s")
        (answer,) = session.regenerate(leaves[-1])
        ear.wait_ended(answer)
        assert engine.counters.prefilled_tokens == 0
        prompt = session.tree.history(session.tree.node(answer).parent)
        params = replace(PARAMS, seed=session.tree.node(answer).seed or 0)
        assert written(session.tree, answer) == plain(model, prompt, params)
        session.close()


def test_an_interrupted_answer_goes_on_from_its_exact_token(model: Path, tmp_path: Path) -> None:
    settings = Settings(max_tokens=300, repeat_penalty=1.2, presence_penalty=0.3, seed=9)
    with engine_of(model, step_s=0.002) as engine:
        session = Session.create(tmp_path, engine, "s", settings=settings)
        ear = hear(session)
        user, (answer,) = session.send("a long way")
        ear.wait_tokens(answer, 100)
        goodbye = session.close()
        assert goodbye.seconds < 1
    with engine_of(model) as engine:
        session, ear = reopen(tmp_path, engine)
        node = session.tree.node(answer)
        assert node.state == "interrupted"
        assert 100 <= len(node.ids) < 300
        wait_in_memory(session)
        session.resume(answer)
        ear.wait_ended(answer)
        assert engine.counters.prefilled_tokens == 0
        params = SamplingParams(max_tokens=300, repeat_penalty=1.2, presence_penalty=0.3, seed=9)
        assert written(session.tree, answer) == plain(model, session.tree.node(user).ids, params)
        session.close()


def test_what_is_not_in_memory_is_taken_from_disk_and_the_rest_computed(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    _, (answer,) = session.send(LONG)
    ear.wait_ended(answer)
    session.save()
    session._running.states.close()  # type: ignore[union-attr]
    engine.cache.clear_tree()
    assert engine.cache.live_pages == 0
    assert session.where(answer).place == "disk"
    assert {cell.where for cell in session.page_map(answer)} == {"disk"}
    user, (second,) = session.send("more")
    ear.wait_ended(second)
    started = ear.of(AnswerStarted)[-1]
    length = session.tree.length(answer)
    assert (started.memory, started.disk) == (0, length)
    assert started.prefill == len(session.tree.node(user).ids)
    assert written(session.tree, second) == plain(model, session.tree.history(user), PARAMS)
    session.close()


def test_whole_pages_are_on_disk_while_an_answer_is_written(model: Path, tmp_path: Path) -> None:
    with engine_of(model, step_s=0.003) as engine:
        session = Session.create(tmp_path, engine, "s", settings=Settings(max_tokens=400))
        ear = hear(session)
        user, (answer,) = session.send("go")
        ear.wait(Saved, 3)
        assert session.tree.node(answer).state == "writing"
        segments = session.tree.node(answer).segments
        start = session.tree.length(user)
        assert segments[0].start == start
        assert all(a.end == b.start and a.end % 64 == 0 for a, b in pairwise(segments))
        ear.wait_ended(answer)
        session.save()
        assert session.tree.node(answer).segments[-1].end == session.tree.length(answer)
        session.close()


def test_branches_share_on_disk_what_they_share_in_memory(engine: Engine, tmp_path: Path) -> None:
    session, ear = create(tmp_path, engine)
    user, answers = session.send(LONG, n=4)
    ear.wait_ended(*answers)
    session.save()
    nodes = [session.tree.node(id) for id in (user, *answers)]
    for node in nodes:
        start = session.tree.start(node.id)
        assert node.segments[0].start == start
        assert node.segments[-1].end == start + len(node.ids)
    sizes = [sum(ref.bytes for ref in node.segments) for node in nodes]
    assert sizes[0] > 10 * max(sizes[1:])
    session.close()
    files = list((tmp_path / "sessions" / "s" / "segments").iterdir())
    assert sum(file.stat().st_size for file in files) == sum(sizes)


def test_small_segments_become_one_and_the_old_ones_go(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamay.session.saver.IDLE_S", 0.05)
    session = Session.create(tmp_path, engine, "s", settings=Settings(max_tokens=300))
    ear = hear(session)
    user, (answer,) = session.send("go")
    ear.wait_ended(answer)
    folder = tmp_path / "sessions" / "s" / "segments"
    deadline = time.monotonic() + 30
    whole = [(session.tree.length(user), session.tree.length(answer))]
    while [(ref.start, ref.end) for ref in session.tree.node(answer).segments] != whole or len(
        list(folder.iterdir())
    ) != 2:
        assert time.monotonic() < deadline, session.tree.node(answer).segments
        time.sleep(0.02)
    session.close()


def test_a_damaged_segment_costs_its_state_only(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    _, (first,) = session.send(LONG)
    ear.wait_ended(first)
    user, (second,) = session.send("more")
    ear.wait_ended(second)
    session.close()
    engine.cache.clear_tree()
    text = session.tree.node(second).text
    (ref, *_) = session.tree.node(user).segments
    path = tmp_path / "sessions" / "s" / "segments" / ref.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    session, ear = reopen(tmp_path, engine)
    notice = ear.wait(Notice)[0]
    assert str(path) in notice.message
    assert f"{ref.end - ref.start} tokens are read again" in notice.message
    assert session.tree.node(second).text == text
    _, (third,) = session.send("and?")
    ear.wait_ended(third)
    started = ear.of(AnswerStarted)[-1]
    assert started.memory == session.tree.length(first)  # what was before the damage
    asked = session.tree.node(third).parent
    assert written(session.tree, third) == plain(model, session.tree.history(asked), PARAMS)
    session.close()
    engine.cache.clear_tree()
    prefilled = engine.counters.prefilled_tokens
    session, ear = reopen(tmp_path, engine)
    wait_in_memory(session)
    assert ear.of(Notice) == []
    assert engine.counters.prefilled_tokens == prefilled
    session.close()


def test_state_is_found_for_a_history_that_has_grown_since(engine: Engine, tmp_path: Path) -> None:
    session, ear = create(tmp_path, engine)
    _, (first,) = session.send("hello")
    ear.wait_ended(first)
    _, (second,) = session.send(LONG)
    ear.wait_ended(second)
    session.save()
    earlier = session.tree.history(first)
    running = session._running
    assert running is not None
    running.states.close()
    engine.cache.clear_tree()
    state = running.runner._finder.find(second, earlier)
    assert list(state.branch.tokens) == earlier
    assert state.disk == len(earlier)
    state.branch.close()
    session.close()
    assert ear.of(Notice) == []


def test_a_sibling_of_the_same_length_is_never_saved_in_place_of_a_turn(
    engine: Engine, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    _, (first, second) = session.send("hello", n=2)
    ear.wait_ended(first, second)
    running = session._running
    assert running is not None
    states, length = running.states, session.tree.length(first)
    assert session.tree.length(second) == length
    with session._lock:  # nobody brings it back meanwhile
        states._kept.pop(first).close()
        beginning = states.beginning(first)
    assert beginning is not None
    assert list(beginning.tokens) == session.tree.history(first)[: beginning.length]
    assert beginning.length < length
    beginning.close()
    fork = running.saver._fork(first, length)  # from what the cache has still
    assert list(fork.tokens) == session.tree.history(first)
    fork.close()
    session.close()


def test_segments_that_are_gone_are_told_and_read_again(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    _, (first,) = session.send("hello")
    ear.wait_ended(first)
    session.close()
    engine.cache.clear_tree()
    for file in (tmp_path / "sessions" / "s" / "segments").iterdir():
        file.unlink()
    session, ear = reopen(tmp_path, engine)
    assert "are gone" in ear.wait(Notice)[0].message
    assert session.where(first).place == "none"
    asked, (second,) = session.send("more")
    ear.wait_ended(second)
    assert written(session.tree, second) == plain(model, session.tree.history(asked), PARAMS)
    session.close()


def test_an_encrypted_session_keeps_its_text_and_state_to_its_key(
    engine: Engine, tmp_path: Path
) -> None:
    key = Key.random()
    session, ear = create(tmp_path, engine, key=key)
    _, (answer,) = session.send("my secret is out")
    ear.wait_ended(answer)
    session.close()
    engine.cache.clear_tree()
    for file in (tmp_path / "sessions" / "s").rglob("*"):
        assert not file.is_file() or b"secret" not in file.read_bytes()
    with pytest.raises(SessionKeyError):
        Session.open(tmp_path, "s", engine)
    with pytest.raises(SessionKeyError):
        Session.open(tmp_path, "s", engine, Key.random())
    prefilled = engine.counters.prefilled_tokens
    session, ear = reopen(tmp_path, engine, key)
    wait_in_memory(session)
    session.send("more")
    assert engine.counters.prefilled_tokens == prefilled
    session.close()


def test_one_process_at_a_time_has_a_session(engine: Engine, tmp_path: Path) -> None:
    session, _ = create(tmp_path, engine)
    with pytest.raises(SessionBusyError):
        Session.open(tmp_path, "s", engine)
    session.close()
    session, _ = reopen(tmp_path, engine)
    session.close()


def test_without_its_model_a_session_is_read_only(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    user, (answer,) = session.send("hello")
    ear.wait_ended(answer)
    session.close()
    alone = Session.open(tmp_path, "s", None)
    assert alone.read_only is not None
    assert alone.tree.node(answer).text == session.tree.node(answer).text
    assert alone.where(answer).place == "none"
    for change in (
        lambda: alone.send("x"),
        lambda: alone.go(user),
        lambda: alone.delete(user),
        lambda: alone.resume(answer),
        alone.figures,
    ):
        with pytest.raises(SessionError, match="read-only"):
            change()
    assert alone.duplicate(answer, "copy") == "copy"
    alone.close()
    copy = Session.open(tmp_path, "copy", engine)
    assert [node.text for node in copy.tree.nodes.values()][1:] == [
        session.tree.node(user).text,
        session.tree.node(answer).text,
    ]
    copy.close()


def test_another_model_continues_by_reading_the_text(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    user, (answer,) = session.send("hello")
    ear.wait_ended(answer)
    session.close()
    other_path = tmp_path / "other.gguf"
    _write_other_weights(model, other_path)
    with engine_of(other_path) as other:
        session, ear = reopen(tmp_path, other)
        assert "other weights" in (session.read_only or "")
        with pytest.raises(SessionError, match="read-only"):
            session.send("more")
        session.continue_with_model()
        assert session.read_only is None
        asked, (second,) = session.send("more")
        ear.wait_ended(second)
        assert "another model wrote" in ear.of(Notice)[-1].message
        node = session.tree.node(asked)
        assert node.keeps == 0
        # The tokenizer is the same: what the other model sampled is read as it was.
        assert node.ids[: session.tree.length(answer)] == session.tree.history(answer)
        assert written(session.tree, second) == plain(
            other_path, session.tree.history(asked), PARAMS
        )
        (again,) = session.regenerate(answer)
        ear.wait_ended(again)
        assert session.tree.node(again).parent != user
        assert written(session.tree, again).ids
        session.close()
        other.cache.clear_tree()
        prefilled = other.counters.prefilled_tokens
        session, ear = reopen(tmp_path, other)
        assert session.read_only is None
        deadline = time.monotonic() + 30
        while session.where(second).place != "memory":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert other.counters.prefilled_tokens == prefilled
        session.close()


def _write_other_weights(model: Path, path: Path) -> None:
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_duplicate_has_the_branch_and_its_state(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    session, ear = create(tmp_path, engine)
    _, answers = session.send(LONG, n=2)
    ear.wait_ended(*answers)
    session.label(answers[1], "good")
    session.save()
    name = session.duplicate(answers[1])
    assert name == "s-2"
    assert Catalog(tmp_path).last() == "s"
    session.close()
    engine.cache.clear_tree()
    prefilled = engine.counters.prefilled_tokens
    copy = Session.open(tmp_path, name, engine)
    assert len(copy.tree.nodes) == 3
    assert copy.tree.node(2).label == "good"
    assert copy.tree.history(2) == session.tree.history(answers[1])
    assert copy.tree.info.parent == session.id
    wait_in_memory(copy)
    assert engine.counters.prefilled_tokens == prefilled
    ear = hear(copy)
    asked, (third,) = copy.send("more")
    ear.wait_ended(third)
    assert written(copy.tree, third) == plain(model, copy.tree.history(asked), PARAMS)
    copy.close()
    assert [(e.name, e.depth) for e in Catalog(tmp_path).entries()] == [("s", 0), ("s-2", 1)]


def test_idle_branches_make_room_and_come_back_from_disk(model: Path, tmp_path: Path) -> None:
    with engine_of(model) as probe:
        page = probe.cache.store.page_bytes
    with engine_of(model, budget_bytes=page * 11) as engine:
        session, ear = create(tmp_path, engine)
        _, (first,) = session.send("one " * 100)
        ear.wait_ended(first)
        session.save()
        _, (second,) = session.send("two " * 100, at=0)
        ear.wait_ended(second)
        session.save()
        assert session.where(first).place == "disk"
        asked, (third,) = session.send("more", at=first)
        ear.wait_ended(third)
        started = ear.of(AnswerStarted)[-1]
        assert started.memory + started.disk == session.tree.length(first)
        assert started.disk > 0
        assert written(session.tree, third) == plain(model, session.tree.history(asked), PARAMS)
        session.close()


def test_state_of_another_precision_continues_and_says_that_it_is_not_exact(
    model: Path, tmp_path: Path
) -> None:
    with engine_of(model) as engine:
        session, ear = create(tmp_path, engine)
        _, (first,) = session.send(LONG)
        ear.wait_ended(first)
        session.close()
    with engine_of(model, precision=KVPrecision.Q8) as engine:
        session, ear = reopen(tmp_path, engine)
        wait_in_memory(session)
        (notice,) = ear.wait(Notice)
        assert "not bit-exact" in notice.message
        assert engine.counters.prefilled_tokens == 0
        restored = engine.counters.restored_tokens
        user, (second,) = session.send("more")
        ear.wait_ended(second)
        started = ear.of(AnswerStarted)[-1]
        assert (started.memory, started.disk) == (session.tree.length(first), 0)
        (third,) = session.regenerate(second)
        ear.wait_ended(third)
        assert engine.counters.restored_tokens == restored
        assert engine.counters.prefilled_tokens == len(session.tree.node(user).ids)
        session.close()


@pytest.mark.model
def test_the_default_model_is_back_without_prefill(
    default_model_path: Path, tmp_path: Path
) -> None:
    settings = Settings(max_tokens=24, seed=5)
    with Engine.load(str(default_model_path)) as engine:
        session = Session.create(tmp_path, engine, "s", settings=settings)
        ear = hear(session)
        begun = time.perf_counter()
        _, answers = session.send("Please summarise this. " + "The hen is in the reed. " * 70, n=2)
        ear.wait_ended(*answers)
        prefill_s = time.perf_counter() - begun
        _, (last,) = session.send("Shorter.", at=answers[0])
        ear.wait_ended(last)
        session.regenerate(last)
        ear.wait(AnswerStarted, 4)
        figures = session.figures()
        assert session.close().seconds < 1
    with Engine.load(str(default_model_path)) as engine:
        begun = time.perf_counter()
        session, ear = reopen(tmp_path, engine)
        assert session.where(last).tokens == session.tree.length(last)
        wait_in_memory(session)
        restored_s = time.perf_counter() - begun
        assert engine.counters.prefilled_tokens == 0
        assert session.figures().pages <= figures.pages
        print(f"restored in {restored_s:.3f} s; prefill and answers took {prefill_s:.3f} s")
        (answer,) = session.regenerate(answers[0])
        ear.wait_ended(answer)
        assert engine.counters.prefilled_tokens == 0
        prompt = session.tree.history(session.tree.node(answer).parent)
        params = SamplingParams(max_tokens=24, seed=session.tree.node(answer).seed or 0)
        assert written(session.tree, answer) == plain(default_model_path, prompt, params)
        session.close()
