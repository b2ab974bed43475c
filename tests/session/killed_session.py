"""A process that talks in a session, for a test to kill: python -m ... HOME MODEL.

It prints what a screen would have shown, a line of JSON each, before it goes on: `ready`, tokens of
answers, how far a prompt is read, turns, saved files, and `done` when the script is over.
"""

import json
import os
import sys
from pathlib import Path

import llamay.engine.scheduler
import llamay.session.answers
import llamay.session.saver
from llamay.events import AnswerProgress, AnswerText, Saved, SessionEvent
from llamay.session import Session, Settings
from tests.session.talking import LONG, Ear, engine_of

SETTINGS = Settings(max_tokens=100, seed=11, repeat_penalty=1.1)
PROMPT = "one two three four five six seven eight nine ten " * 4
STEP_S = 0.002


def show(**values: object) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


class Screen(Ear):
    """Shows what it hears."""

    def __call__(self, event: SessionEvent) -> None:
        if isinstance(event, AnswerText):
            show(node=event.node, ids=event.ids, logprobs=event.logprobs, text=event.text)
        elif isinstance(event, AnswerProgress):
            show(read=event.done)
        elif isinstance(event, Saved):
            show(saved=event.node)
        super().__call__(event)


def talk(home: Path, model: Path) -> None:
    """Forks, generates, edits, saves, sweeps, closes while it reads, and opens again."""
    with engine_of(model, step_s=STEP_S) as engine:
        session = Session.create(home, engine, "s", settings=SETTINGS)
        screen = Screen()
        session.subscribe(screen)
        show(ready=True)
        _, (first,) = session.send(PROMPT)
        screen.wait_tokens(first, 70)
        second, third = session.regenerate(first, 2)
        screen.wait_ended(first)
        _, (fourth,) = session.send("go on", at=first)
        screen.wait_ended(second, third)
        session.delete(third)
        session.label(second, "kept")
        screen.wait_ended(fourth)
        session.save()
        show(turns=sorted(session.tree.nodes))
        _, (long,) = session.send(LONG, at=first)
        screen.wait_read(long, 1000)
        session.close()
        session = Session.open(home, "s", engine)
        show(turns=sorted(session.tree.nodes))
        screen = Screen()
        session.subscribe(screen)
        session.resume(long)
        fifth, sixth = session.send_to([second, fourth], "and on")
        screen.wait_ended(long, fifth, sixth)
        session.undo()
        screen.wait_tokens(fifth, 100)
        session.close()
        show(done=True)


if __name__ == "__main__":
    llamay.engine.scheduler.MAX_STEP_TOKENS = 64
    llamay.session.answers.READ_S = llamay.session.saver.IDLE_S = 0.02
    talk(Path(sys.argv[1]), Path(sys.argv[2]))
