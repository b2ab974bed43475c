"""llamay in a real terminal: tmux, driven from outside."""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Tmux:
    """A terminal in a tmux server of its own, and what it shows."""

    def __init__(self, socket: Path, columns: int, rows: int) -> None:
        options = socket.with_suffix(".conf")
        options.write_text(
            f"set -g status off\nset -g remain-on-exit on\nset -g default-size {columns}x{rows}\n"
        )
        self._size = ["-x", str(columns), "-y", str(rows)]
        self._command = ["tmux", "-S", str(socket), "-f", str(options)]

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Runs a command in a new terminal, in place of the one before."""
        self._run("kill-server", check=False)
        variables = [f"{name}={value}" for name, value in environment.items()]
        line = shlex.join(["exec", "env", *variables, *command])
        # A server that is ending still answers, and takes no session.
        deadline = time.monotonic() + 10
        while (done := self._call("new-session", "-d", *self._size, line)).returncode:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        """The command's process."""
        return int(self._run("display-message", "-p", "#{pane_pid}"))

    @property
    def dead(self) -> bool:
        """Whether the command has ended; what it showed last is still there."""
        return self._run("display-message", "-p", "#{pane_dead}").strip() == "1"

    def type(self, text: str) -> None:
        """Types characters as they are."""
        self._run("send-keys", "-l", "--", text)

    def press(self, *keys: str) -> None:
        """Presses keys by tmux's names."""
        self._run("send-keys", *keys)

    def resize(self, columns: int, rows: int) -> None:
        """Gives the terminal another size."""
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self) -> str:
        """What it shows, lines without spaces at their ends, and a few that have scrolled off."""
        return self._run("capture-pane", "-p", "-S", "-5")

    def wait(
        self, wanted: str | Callable[[str], object], timeout_s: float = 60, *, but: str = ""
    ) -> str:
        """The screen, once it shows what is wanted: a regular expression, or what accepts it.

        but: a regular expression that it must not show
        """
        accepts = wanted if callable(wanted) else re.compile(wanted, re.M).search
        deadline = time.monotonic() + timeout_s
        while not accepts(screen := self.screen()) or (but and re.search(but, screen)):
            assert time.monotonic() < deadline, f"never showed {wanted}:\n{screen}"
            time.sleep(0.1)
        return screen

    def stop(self) -> None:
        """Ends the server and what runs in it."""
        self._run("kill-server", check=False)

    def _run(self, *arguments: str, check: bool = True) -> str:
        done = self._call(*arguments)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def _call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        # Given, not inherited: readline has put this process's COLUMNS and LINES there.
        environment = dict(os.environ)
        return subprocess.run(
            [*self._command, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


@contextmanager
def tmux(folder: Path, columns: int = 120, rows: int = 36) -> Iterator[Tmux]:
    """A terminal of this size; its server ends with it."""
    terminal = Tmux(folder / "tmux.sock", columns, rows)
    try:
        yield terminal
    finally:
        terminal.stop()
