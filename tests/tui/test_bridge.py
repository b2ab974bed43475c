"""From a session's events to updates."""

import asyncio

import pytest

from llamay.events import (
    AnswerEnded,
    AnswerFailed,
    AnswerProgress,
    AnswerStarted,
    AnswerText,
    Notice,
    PlaceChanged,
    SessionEvent,
    TreeChanged,
)
from llamay.tui.bridge import Bridge, Running, SessionUpdate

from .fake_session import FakeSession


class Follower:
    def __init__(self) -> None:
        self.updates: list[SessionUpdate] = []

    def post_message(self, update: SessionUpdate) -> None:
        self.updates.append(update)


def gathered(*events: SessionEvent) -> tuple[list[SessionUpdate], Bridge]:
    """What a follower gets of events that come at once."""

    async def run() -> tuple[list[SessionUpdate], Bridge]:
        bridge, follower, session = Bridge(), Follower(), FakeSession()
        bridge.follow(follower)  # type: ignore[arg-type]
        bridge.attach(session)  # type: ignore[arg-type]
        for event in events:
            session.emit(event)
        for _ in range(200):
            await asyncio.sleep(0.01)
            if follower.updates and not bridge._waiting:
                break
        session.close()
        return follower.updates, bridge

    return asyncio.run(run())


def test_an_update_names_what_to_look_at_and_keeps_what_happens_once():
    notice = Notice("saved", "info")
    updates, _ = gathered(
        AnswerText(3, (1,), (-0.1,), "a"), TreeChanged((4, 5)), PlaceChanged(4), notice
    )
    assert frozenset().union(*(update.nodes for update in updates)) == {3, 4, 5}
    assert any(update.tree for update in updates)
    assert any(update.place for update in updates)
    assert [event for update in updates for event in update.events] == [notice]


def test_tokens_alone_change_no_tree():
    updates, bridge = gathered(*(AnswerText(3, (1, 2), (-0.1, -0.1), "a") for _ in range(50)))
    assert not any(update.tree or update.place or update.events for update in updates)
    assert bridge.running[3].tokens == 100


@pytest.mark.parametrize(
    "last", [AnswerEnded(3, "stop", 1, 0.1), AnswerFailed(3, "the context is full")]
)
def test_an_answer_that_ended_is_not_running_any_more(last):
    updates, bridge = gathered(AnswerStarted(3, 10, 0, 5), AnswerProgress(3, 15, 10, 12, 0.1), last)
    assert bridge.running == {}
    assert updates[-1].events[-1] == last


def test_reading_ends_with_the_first_token():
    running = Running(3, total=100, cached=40, done=70, seconds=0.6)
    assert running.is_reading
    assert running.seconds_left == pytest.approx(0.6)  # 30 took 0.6 s, 30 are left
    running.tokens = 1
    assert not running.is_reading


def test_speed_is_that_of_the_tokens_after_the_first():
    assert Running(3, tokens=1, first_at=1.0, last_at=1.0).tokens_per_s is None
    assert Running(3, tokens=11, first_at=1.0, last_at=1.5).tokens_per_s == pytest.approx(20)
    assert Running(3, total=9, cached=9, done=9).seconds_left is None
