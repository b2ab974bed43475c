"""Commands on a real terminal: a pseudo-terminal that they control, keys typed into it."""

import io
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamay.cli.output import progress_line
from tests.scripted_model import byte_ids, write_scripted_model

CHAT = (
    "import sys; from llamay import cli; cli.COMMANDS['chat'] = (cli.START, 'Chat.'); "
    "sys.exit(cli.main(sys.argv[1:]))"
)
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, main_end: int, process: subprocess.Popen[bytes]) -> None:
        self._main_end = main_end
        self._process = process
        self.output = b""
        self._seen = 0

    def press(self, keys: bytes) -> None:
        os.write(self._main_end, keys)

    def expect(self, text: bytes, timeout_s: float = 20) -> None:
        """Waits until `text` comes, after what earlier calls have waited for."""
        deadline = time.monotonic() + timeout_s
        while (at := self.output.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, (text, self.output[-500:])
            self._read(0.1)
        self._seen = at + len(text)

    def end(self, timeout_s: float = 20) -> int:
        """The process's code, once it has ended and all that it wrote is read."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            assert time.monotonic() < deadline, self.output[-500:]
            self._read(0.05)
        while self._read(0):
            pass
        return self._process.returncode

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._main_end], [], [], timeout_s)[0]:
            return False
        self.output += os.read(self._main_end, 65536)
        return True


@contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    """Runs a command on a new terminal, and checks that the terminal is left as it was."""
    main_end, other_end = pty.openpty()
    before = termios.tcgetattr(other_end)
    process = subprocess.Popen(command, preexec_fn=lambda: os.login_tty(os.dup(other_end)))
    try:
        yield Terminal(main_end, process)
        assert process.poll() is not None, "still running"
        assert termios.tcgetattr(other_end) == before
    finally:
        process.kill()
        process.wait()
        os.close(main_end)
        os.close(other_end)


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model that counts after a line's end or a zero, and never ends."""
    path = tmp_path / "endless.gguf"
    write_scripted_model(path, byte_ids(b"\n12345678901"))
    return path


@contextmanager
def chat(model: Path, *arguments: str) -> Iterator[Terminal]:
    options = ["-m", str(model), *arguments]
    with terminal(sys.executable, "-c", CHAT, "chat", "--plain", *options) as screen:
        screen.expect(b"Ctrl+D ends\r\n")
        screen.expect(b"> ")
        yield screen


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(endless: Path) -> None:
    with chat(endless, "--ctx-size", "100000000") as screen:
        for message in (b"One", b"Two", b"Three"):
            screen.press(message + b"\n")
            screen.expect(message + b"\r\n12345678901234567890")
            screen.press(CTRL_C)
            screen.expect(b"^C")
            screen.expect(b" [stopped]\r\n> ")
        screen.press(CTRL_D)
        assert screen.end() == 0
    assert screen.output.endswith(b"> \r\n")
    assert b"\x1b" not in screen.output


def test_ctrl_c_at_the_prompt_takes_the_line_back(endless: Path) -> None:
    with chat(endless, "--max-tokens", "3") as screen:
        screen.press(b"Never mi")
        screen.expect(b"Never mi")
        time.sleep(0.3)  # the prompt is shown just before the process waits for a key
        screen.press(CTRL_C)
        screen.expect(b"^C\r\nCtrl+D ends\r\n> ")
        screen.press(b"One\n")
        screen.expect(b"One\r\n123\r\n> ")
        screen.press(CTRL_D)
        assert screen.end() == 0


def test_what_is_not_utf_8_is_no_message(endless: Path) -> None:
    with chat(endless, "--max-tokens", "3") as screen:
        screen.press(b"a\xff\n")
        screen.expect(b"expected UTF-8 text; the line is ignored\r\n> ")
        screen.press("Grüße\n".encode())
        screen.expect(b"\r\n123\r\n> ")
        screen.press(CTRL_D)
        assert screen.end() == 0


def test_ctrl_c_ends_a_completion_with_130_on_a_line_of_its_own(endless: Path) -> None:
    options = ["-m", str(endless), "-p", "0", "--ctx-size", "100000000"]
    with terminal(sys.executable, "-m", "llamay", "generate", *options) as screen:
        screen.expect(b"12345678901234567890")
        screen.press(CTRL_C)
        assert screen.end() == 130
    assert screen.output.rstrip(b"\r\n") != screen.output
    assert b"Traceback" not in screen.output
    assert b"\x1b" not in screen.output


def test_a_model_cannot_command_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "evil.gguf"
    write_scripted_model(path, byte_ids("\nA\x1b[2J\x07\x9bZ".encode()))
    with terminal(
        sys.executable, "-m", "llamay", "generate", "-m", str(path), "-p", "\n"
    ) as screen:
        assert screen.end() == 0
    assert screen.output == b"A\\x1b[2J\\x07\\x9bZ\r\n"


def test_without_a_prompt_one_is_asked_for(endless: Path) -> None:
    with terminal(sys.executable, "-m", "llamay", "generate", "-m", str(endless)) as screen:
        assert screen.end() == 2
    assert screen.output.startswith(b"error: prompt: expected -p TEXT")


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_line_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_line() as show:
        show("half\x1b[2J", 3.0)
        show("nearly", 0.1)
    assert screen.getvalue() == "\r\x1b[Khalf\\x1b[2J\r\x1b[Knearly\r\x1b[K"


def test_a_short_wait_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_line() as show:
        show("half", 0.4)
    assert screen.getvalue() == ""


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with progress_line() as show:
        show("half", 3.0)
    assert file.getvalue() == ""


@pytest.mark.model
def test_a_chat_with_the_default_model(default_model_path: Path) -> None:
    with chat(default_model_path, "--temperature", "0") as screen:
        screen.press(b"Write a very long story about a ship.\n")
        screen.expect(b"ship.\r\n")
        screen.expect(b" the ")
        screen.press(CTRL_C)
        screen.expect(b" [stopped]\r\n> ", timeout_s=5)
        screen.press(b"What is the capital of France?\n")
        screen.expect(b"France?\r\n")
        screen.expect(b"Paris")
        screen.expect(b"\r\n> ")
        screen.press(CTRL_D)
        assert screen.end() == 0
