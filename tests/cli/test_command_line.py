import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from llamay import cli
from llamay.cli.output import format_bytes, print_json, print_table, printable
from llamay.errors import HubError, UsageError

LLAMAY = [sys.executable, "-m", "llamay"]
HEAVY = ("mlx", "numpy", "rich", "textual", "tokenizers", "llamay.hub", "llamay.gguf")

Install = Callable[[Callable[[], object]], None]


@pytest.fixture(autouse=True)
def home(empty_home: Path) -> Path:
    """No test here sees the models of this machine."""
    return empty_home


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a function the command `try`."""

    def install(function: Callable[[], object]) -> None:
        module = types.ModuleType("command_of_a_test")
        module.command = click.Command("try", callback=function)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "try", (module.__name__, "Try."))

    return install


def raising(error: BaseException) -> Callable[[], object]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize("code", ["import llamay", "from llamay.cli import main; main(['--help'])"])
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    code += f"\nimport sys; print([name for name in {HEAVY} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == "[]"


@pytest.mark.timing
def test_help_comes_at_once() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([*LLAMAY, "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (_, text) in cli.COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, text] for line in lines)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (HubError("the hub is gone"), 1, "error: the hub is gone\n"),
        (UsageError("--n is 0"), 2, "error: --n is 0\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            MemoryError("the system has no 7 bytes of memory left"),
            1,
            "error: memory ran out (the system has no 7 bytes of memory left); close other "
            "programs, or use a smaller model\n",
        ),
        (
            ValueError("what?"),
            1,
            "error: unexpected ValueError: what?; --debug shows the traceback\n",
        ),
    ],
)
def test_errors_are_one_sentence_and_a_code(
    command: Install,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    command(raising(error))
    assert cli.main(["try"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("arguments", [["--debug", "try"], ["try", "--debug"]])
@pytest.mark.parametrize("error", [HubError("gone"), ValueError("what?")])
def test_debug_shows_the_traceback(
    command: Install, capsys: pytest.CaptureFixture[str], arguments: list[str], error: Exception
) -> None:
    command(raising(error))
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert f"{type(error).__name__}: {error}" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["pull"], "NAME"),
        (["pull", "a", "b"], "b"),
        (["models", "--nonsense"], "llamay models --help"),
    ],
)
def test_wrong_use_is_one_sentence_and_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_a_message_cannot_command_the_terminal(
    command: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(HubError("x\x1b[2J\r\n\u202ey\udcff.gguf")))
    cli.main(["try"])
    assert capsys.readouterr().err == "error: x\\x1b[2J\\r\\n\\u202ey\\udcff.gguf\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([*LLAMAY, "models", "--json"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert run.returncode == 141
    assert run.stderr == b""


def test_ctrl_c_during_a_download_is_quiet_and_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_hub:
        port = silent_hub.getsockname()[1]
        run = subprocess.Popen(
            [*LLAMAY, "pull", "hf:owner/repo/file.gguf"],
            env=os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{port}"},
            stderr=subprocess.PIPE,
        )
        connection, _ = silent_hub.accept()
        with connection:
            run.send_signal(signal.SIGINT)
            assert run.communicate(timeout=20)[1] == b""
    assert run.returncode == 130


def test_without_models_the_list_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "llamay pull smollm2:135m" in captured.err
    assert cli.main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.fixture
def evil_file(home: Path) -> Path:
    path = home / "llamay" / "models" / "evil\x1b[2J\u202e" / "m.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def test_models_as_json_is_a_list_of_objects(
    evil_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "--json"]) == 0
    output = capsys.readouterr().out
    assert output.isascii()
    assert "\x1b" not in output
    (entry,) = json.loads(output)
    assert entry.pop("reason")
    assert entry == {
        "name": str(evil_file),
        "store": "llamay",
        "path": str(evil_file),
        "size_bytes": 4,
        "architecture": None,
        "quantisation": None,
        "supported": False,
    }


def test_models_piped_is_plain(evil_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "WHERE", "SIZE", "ARCHITECTURE", "QUANTISATION", "SUPPORTED"]
    assert "evil\\x1b[2J\\u202e" in line
    assert heading.index("WHERE") == line.index("llamay  ")


def test_models_on_a_terminal_obeys_no_file_name(evil_file: Path) -> None:
    main_end, terminal = pty.openpty()
    environment = os.environ | {"COLUMNS": "400", "TERM": "xterm-256color"}
    with subprocess.Popen([*LLAMAY, "models"], stdout=terminal, env=environment) as run:
        os.close(terminal)
        output = b""
        while chunk := read_terminal(main_end):
            output += chunk
    os.close(main_end)
    assert run.returncode == 0
    assert b"evil\\x1b[2J" in output
    assert b"\x1b[2J" not in output
    assert b"\x1b[1m" in output  # the bold heading: this was the terminal's form


def read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says so when the other side is closed
        return b""


def test_pull_of_a_path_as_json(evil_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", str(evil_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": str(evil_file),
        "path": str(evil_file),
        "size_bytes": 4,
        "sha256": None,
        "fetched": False,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ü 漢字 😀", "plain ü 漢字 😀"),
        ("\x07\x7f\x9b", "\\x07\\x7f\\x9b"),
        ("a\tb\nc", "a\\tb\\nc"),
        ("\u2028\u200b\ufeff", "\\u2028\\u200b\\ufeff"),
    ],
)
def test_printable(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_a_plain_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["A", "LONG"], [["aaa", "b"], ["c", "dd\x1b"]])
    assert capsys.readouterr().out == "A    LONG\naaa  b\nc    dd\\x1b\n"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (999_950_000, "1.0 GB"),
        (2_000_000_000_000_000, "2000.0 TB"),
    ],
)
def test_sizes(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


def test_json_never_holds_what_is_not_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json({"loss": float("nan")})


def test_the_help_says_how_the_interface_s_flags_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    (command,) = re.findall(r"`llamay ([^`]+)` lists its flags", capsys.readouterr().out)
    assert cli.main(command.split()) == 0
    assert "--session NAME" in capsys.readouterr().out
