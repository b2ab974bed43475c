"""Answers in a saved session, streamed in the terminal, for the commands that do."""

import os
import queue
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamay.cli.answers import Choice, Streamer
from llamay.cli.options import ModelOptions, read_key
from llamay.cli.output import format_bytes, format_time, progress_line, say
from llamay.errors import SessionError
from llamay.events import (
    AnswerEnded,
    AnswerFailed,
    AnswerProgress,
    AnswerStarted,
    AnswerText,
    Finished,
    Notice,
    SessionEvent,
    TextDelta,
)

if TYPE_CHECKING:
    from llamay.session import Goodbye, Session, Settings


@dataclass
class Answered:
    """What became of a message.

    known: tokens of the prompt that were taken from memory or disk
    """

    prompt_ids: list[int]
    nodes: list[int]
    choices: list[Choice]
    known: int = 0
    prefilled: int = 0
    prefill_s: float = 0.0
    errors: list[str] = field(default_factory=list)


def given_settings(system: str | None) -> "Settings":
    """What the command line's sampling flags say, without those that it does not have."""
    from llamay.session import Settings

    context = click.get_current_context()
    given = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    known = {field.name for field in fields(Settings)}
    values = {name: value for name, value in given.items() if name in known}
    return Settings(**{**values, "system": system})


def open_session(
    name: str, options: ModelOptions, settings: "Settings", key_file: Path | None
) -> tuple["Session", "Settings"]:
    """The session of that name, opened, or created with `settings` if there is none.

    Returns the settings that are left for the next message too. Without -m, an existing session
    gets the model that it was made with.
    Raises SessionError if it is in use, or if that model is not here any more.
    """
    from dataclasses import replace

    from llamay.hub.paths import data_dir
    from llamay.session import Session, Settings
    from llamay.session.catalog import Catalog

    key = read_key(key_file)
    catalog = Catalog(data_dir())
    if name not in {entry.name for entry in catalog.entries()}:
        engine = options.load(identified=True)
        created = Session.create(
            data_dir(), engine, name, settings=settings, key=key, model=options.name
        )
        return created, Settings()
    chosen = options.model
    made_with = catalog.read(name, key).tree.info.model
    engine = replace(options, model=chosen or made_with).load(identified=True)
    session = Session.open(data_dir(), name, engine, key)
    if session.read_only:
        weights = engine.model.identity().weights_sha256
        try:
            if not chosen and session.tree.info.weights_sha256 != weights:
                raise SessionError(f"{session.read_only}; -m MODEL does")
            session.continue_with_model()
        except SessionError:
            session.close()
            raise
    return session, settings


def answer_in(
    session: "Session", text: str, count: int, settings: "Settings", *, show: bool
) -> Answered:
    """Sends a message and waits for all answers, which are printed if `show`."""
    from llamay.session.signals import saved_on_signals

    events: queue.SimpleQueue[SessionEvent] = queue.SimpleQueue()
    session.subscribe(events.put)
    with saved_on_signals(session, lambda number, goodbye: _leave(session.name, number, goodbye)):
        user, nodes = session.send(text, n=count, settings=settings)
        answered = Answered([], nodes, [Choice() for _ in nodes])
        seeds = [session.tree.node(node).seed or 0 for node in nodes]
        _listen(events, answered, Streamer(count, seeds) if show else None)
    answered.prompt_ids = session.tree.history(user)
    return answered


def _listen(
    events: "queue.SimpleQueue[SessionEvent]", answered: Answered, streamer: Streamer | None
) -> None:
    waiting = set(answered.nodes)
    with progress_line() as progress:
        while waiting:
            match event := events.get():
                case Notice():
                    say(event.message)
                case AnswerStarted() if event.node == answered.nodes[0]:
                    answered.known = event.memory + event.disk
                    answered.prefilled = event.prefill
                case AnswerProgress() if event.node == answered.nodes[0]:
                    answered.prefill_s = event.seconds
                    left = event.total - event.done
                    rest = event.seconds / max(1, event.done - event.cached) * left
                    progress(f"reading {event.done} of {event.total} tokens", rest)
                case AnswerText() | AnswerEnded() | AnswerFailed() if event.node in waiting:
                    _take(event, answered, streamer)
                    if not isinstance(event, AnswerText):
                        waiting.discard(event.node)


def _take(
    event: AnswerText | AnswerEnded | AnswerFailed, answered: Answered, streamer: Streamer | None
) -> None:
    index = answered.nodes.index(event.node)
    choice = answered.choices[index]
    told: TextDelta | Finished
    if isinstance(event, AnswerText):
        told = TextDelta(index, event.ids, event.logprobs, event.text)
        choice.add(told)
    elif isinstance(event, AnswerEnded):
        choice.finish_reason = event.reason
        told = Finished(index, event.reason, event.tokens, event.seconds)
    else:
        answered.errors.append(event.message)
        told = Finished(index, "cancelled", len(choice.ids), 0.0)
    if streamer:
        streamer.show(told)


def _leave(name: str, number: int, goodbye: "Goodbye") -> None:
    """Ends the process after a signal, with everything saved."""
    branches = "1 branch" if goodbye.branches == 1 else f"{goodbye.branches} branches"
    sys.stdout.flush()
    say("")
    say(
        f"saved {name}: {branches}, {format_bytes(goodbye.bytes_written)} new, "
        f"{format_time(goodbye.seconds)}"
    )
    if goodbye.problem:
        say(goodbye.problem)
    say(f"resume with:  {goodbye.command}")
    os._exit(128 + number)
