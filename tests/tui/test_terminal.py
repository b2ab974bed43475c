"""A day with llamay: the real model in a real terminal, ended in all the ways that a day has."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tui.tmux import Tmux, tmux

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]

LLAMAY = [sys.executable, "-m", "llamay"]
WRITING = "Esc [Ss]top"
STORY = "Tell me a very long story about a river, with many chapters."


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Tmux]:
    with tmux(tmp_path) as opened:
        yield opened


def start(terminal: Tmux, home: Path, model: Path, *arguments: str) -> str:
    """Opens llamay, and gives its screen once the model is loaded."""
    environment = {"LLAMAY_HOME": str(home), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    terminal.start([*LLAMAY, "-m", str(model), *arguments], environment)
    return terminal.wait(r" · cpu ")


def ask(terminal: Tmux, text: str) -> None:
    terminal.type(text)
    terminal.wait(re.escape(text[:20]))
    terminal.press("Enter")


def idle(terminal: Tmux, wanted: str = "[│┃]▌ ") -> str:
    """The screen, once it shows what is wanted, by default an answer, and no longer changes."""
    seen: list[str] = []

    def settled(screen: str) -> bool:
        seen.append(screen)
        return seen[-20:] == [screen] * 20 and re.search(wanted, screen, re.M) is not None

    return terminal.wait(settled, but=WRITING)


def leave_editor(terminal: Tmux) -> None:
    terminal.press("Escape")
    terminal.wait("Enter Continue")


def exported(home: Path, name: str) -> dict[str, Any]:
    """The session as another program gets it."""
    done = subprocess.run(
        [*LLAMAY, "sessions", "export", name, "--json"],
        env={**os.environ, "LLAMAY_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def story(home: Path, name: str) -> str:
    """What the answer to `STORY` says by now."""
    turns = exported(home, name)["turns"]
    (asked,) = [turn["id"] for turn in turns if turn["text"] == STORY]
    return next((turn["text"] for turn in turns if turn["parent"] == asked), "")


def words_on(screen: str) -> str:
    """The transcript's words, on one line."""
    lines = [line.split("▌ ")[1] for line in screen.splitlines() if "▌ " in line]
    return " ".join(" ".join(lines).replace("┃", " ").replace("│", " ").split())


def test_a_day_with_llamay(terminal: Tmux, home: Path, default_model_path: Path) -> None:
    screen = start(terminal, home, default_model_path)
    assert "llamay" in screen

    ask(terminal, "Name three fruits.")
    screen = idle(terminal)
    assert re.search(r"\d+ tok", screen)
    assert "1 branch" in screen

    # A fork: the next message begins another branch at this answer.
    leave_editor(terminal)
    terminal.press("f")
    terminal.wait("fork:")
    ask(terminal, "And three colours.")
    idle(terminal)

    # Three samples, side by side, decoding together.
    leave_editor(terminal)
    terminal.press("n")
    terminal.wait("How many answers")
    terminal.type("3")
    terminal.press("Enter")
    screen = terminal.wait(r"shared: [\d,]+ tokens")
    assert len(re.findall(r"[123] ?· ?seed", screen)) == 3
    screen = idle(terminal, r"shared: [\d,]+ tokens")
    assert len(re.findall(r"\+\d+ tok", screen)) == 3
    terminal.press("Escape")  # out of the prompt to all
    terminal.wait("Esc Back")
    terminal.press("Escape")
    screen = idle(terminal)
    assert "4 branches" in screen

    # A label, which the tree shows.
    terminal.press("L")
    terminal.wait("Label of this turn")
    terminal.type("chosen")
    terminal.press("Enter")
    terminal.wait(r"\[chosen\]", but="Label of this turn")

    # Hung up in mid-answer: saved within a second, and out.
    terminal.press("Enter")
    terminal.wait("Enter Send")
    ask(terminal, STORY)
    terminal.wait(WRITING)
    name = terminal.screen().split(" · ")[1]
    terminal.wait(lambda screen: len(story(home, name)) > 100)
    os.kill(terminal.pid, signal.SIGHUP)
    terminal.wait(lambda screen: terminal.dead, 20)
    screen = terminal.wait("resume with:")
    assert f"llamay --session {name}" in screen
    seconds = re.search(r"new, ([\d.]+) (ms|s)", " ".join(screen.split()))
    assert seconds, screen
    assert seconds[2] == "ms" or float(seconds[1]) < 2  # a second, on a machine that is not busy
    begun = story(home, name)
    assert len(begun) > 100

    # The next morning: resumed without reading anything again, the turn shown as interrupted.
    screen = start(terminal, home, default_model_path, "--session", name)
    screen = terminal.wait(r"resumed [\d,]+ tok")
    screen = terminal.wait("interrupted")
    assert "[chosen]" in screen
    leave_editor(terminal)
    terminal.press("R")
    terminal.wait(WRITING)
    longer = len(begun) + 200
    terminal.wait(lambda screen: len(story(home, name)) > longer)
    before = words_on(terminal.screen())

    # Killed: what was shown is there, and it goes on.
    os.kill(terminal.pid, signal.SIGKILL)
    terminal.wait(lambda screen: terminal.dead, 20)
    kept = story(home, name)
    assert kept.startswith(begun)
    assert before[-150:] in " ".join(kept.split())
    screen = start(terminal, home, default_model_path, "--session", name)
    screen = terminal.wait("interrupted")
    leave_editor(terminal)
    terminal.press("R")
    terminal.wait(WRITING)
    terminal.wait(lambda screen: len(story(home, name)) > len(kept) + 100)
    terminal.press("Escape")
    idle(terminal)
    terminal.press("C-q")
    terminal.wait(lambda screen: terminal.dead, 20)
    assert story(home, name).startswith(kept)

    # The window is closed: nobody reads what it would say, and it still ends.
    start(terminal, home, default_model_path, "--session", name)
    terminal.wait(WRITING + "|R continues")
    pid = terminal.pid
    terminal.stop()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
