import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llamay import cli
from llamay.errors import SnapshotError
from llamay.session import Session, Settings
from llamay.session.catalog import Catalog
from llamay.session.loading import load
from tests.scripted_model import byte_ids, write_endless_model, write_scripted_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "scripted.gguf"
    write_scripted_model(path, byte_ids(b"\nFine."))
    return path


@pytest.fixture
def wandering(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_endless_model(path)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], empty_home: Path) -> Run:
    def generate(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["generate", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return generate


@pytest.fixture
def home(empty_home: Path) -> Path:
    """Where sessions are."""
    return empty_home / "llamay"


def test_a_session_is_made_and_goes_on_with_its_model(run: Run, model: Path, home: Path) -> None:
    assert run("--session", "s", "-m", model, "-p", "hello") == (0, "Fine.\n", "")
    assert run("--session", "s", "-p", "again") == (0, "Fine.\n", "")
    tree = load(home / "sessions" / "s").tree
    assert [node.text for node in tree.nodes.values()][1:] == ["hello", "Fine.", "again", "Fine."]
    assert tree.path(4) == [0, 1, 2, 3, 4]
    assert tree.info.model == str(model)


def test_json_tells_what_was_known(run: Run, model: Path) -> None:
    run("--session", "s", "-m", model, "-p", "hello", "--system", "Be brief.")
    code, out, _ = run("--session", "s", "-p", "again", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["session"] == "s"
    (choice,) = told["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Fine.", "stop")
    assert len(choice["ids"]) == len(choice["logprobs"]) == 5
    assert told["cached_tokens"] + told["timings"]["prefill_tokens"] == len(told["prompt_ids"])
    assert told["cached_tokens"] > 40


def test_flags_hold_from_their_message_on(run: Run, wandering: Path, home: Path) -> None:
    run("--session", "s", "-m", wandering, "-p", "a", "--max-tokens", 3, "--seed", 5)
    run("--session", "s", "-p", "b")
    run("--session", "s", "-p", "c", "--max-tokens", 4, "--temperature", 0)
    tree = load(home / "sessions" / "s").tree
    assert [len(tree.node(id).ids) for id in (2, 4, 6)] == [3, 3, 4]
    assert (tree.root.settings.seed, tree.root.settings.max_tokens) == (5, 3)
    assert (tree.effective(4).seed, tree.effective(4).temperature) == (5, None)
    assert tree.node(3).settings == Settings()
    assert (tree.effective(6).seed, tree.effective(6).temperature) == (5, 0.0)


@pytest.mark.parametrize("in_session", [False, True])
def test_best_of_prints_the_answer_with_the_highest_mean_logprob(
    in_session: bool, run: Run, wandering: Path, home: Path
) -> None:
    session = ["--session", "s"] if in_session else []
    flags = ["-m", wandering, "-p", "a", "--max-tokens", 6, "--seed", 3, "--best-of", 4]
    code, out, _ = run(*session, *flags, "--json")
    assert code == 0
    told = json.loads(out)
    means = [sum(choice["logprobs"]) / 6 for choice in told["choices"]]
    assert len(means) == 4
    assert means[told["best"]] == max(means)
    if in_session:
        tree = load(home / "sessions" / "s").tree
        assert tree.place == 2 + told["best"]
        flags[3] = "b"
        run(*session, *flags)
        tree = load(home / "sessions" / "s").tree
        assert tree.node(tree.path(tree.place)[-2]).parent == 2 + told["best"]
    else:
        code, out, _ = run(*flags)
        expected = told["choices"][told["best"]]["text"]
        assert out == cli.output.terminal_text(expected) + "\n"


def test_several_answers_are_branches(run: Run, model: Path, home: Path) -> None:
    code, out, _ = run("--session", "s", "-m", model, "-p", "hello", "--n", 2, "--seed", 1)
    assert code == 0
    assert out.count("Fine.") == 2
    assert load(home / "sessions" / "s").tree.children(1) == [2, 3]


def test_an_encrypted_session_needs_its_key(
    run: Run, model: Path, home: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    run("--session", "s", "-m", model, "-p", "hello", "--context-key", key)
    code, _, err = run("--session", "s", "-m", model, "-p", "again")
    assert code == 1
    assert "encrypted" in err
    assert run("--session", "s", "-p", "again", "--context-key", key)[:2] == (0, "Fine.\n")


def test_what_cannot_be_is_refused(run: Run, model: Path, home: Path) -> None:
    assert run("-p", "x", "--n", 2, "--best-of", 2)[0] == 2
    assert run("-p", "x", "--context-key", "file")[0] == 2
    assert run("--session", "../s", "-m", model, "-p", "x")[0] == 2
    code, _, err = run("--session", "s", "-m", model, "-p", "one " * 9000)
    assert code == 1
    assert "the context holds" in err


def test_a_session_of_other_weights_goes_on_only_if_asked(
    run: Run, model: Path, wandering: Path, home: Path
) -> None:
    run("--session", "s", "-m", model, "-p", "hello")
    other = wandering.read_bytes()
    model.write_bytes(other)
    code, _, err = run("--session", "s", "-p", "again")
    assert code == 1
    assert "-m MODEL" in err
    code, _, err = run("--session", "s", "-m", wandering, "-p", "again", "--max-tokens", 2)
    assert code == 0
    assert "another model wrote" in err or "tokenised anew" in err


def test_what_cannot_be_written_is_told(
    run: Run, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--session", "s", "-m", model, "-p", "hello")

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr("llamay.session.lock.fcntl.flock", read_only)
        code, out, err = run("--session", "s", "-p", "again")
    assert (code, out) == (1, "")
    assert "Read-only file system" in err
    assert "-m MODEL" not in err

    def full(*_: object, **__: object) -> None:
        raise SnapshotError("the disk is full")

    monkeypatch.setattr("llamay.session.saver.write_segment", full)
    code, out, err = run("--session", "s", "-p", "again")
    assert (code, out) == (1, "Fine.\n")
    assert "the disk is full; the text is saved" in err
    assert len(load(home / "sessions" / "s").tree.nodes) == 5


def test_ctrl_c_keeps_what_came(wandering: Path, home: Path, run: Run) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "llamay", "generate", "--session", "s", "-m", wandering, "-p", "a"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert b"resume with:  llamay --session s" in err
    tree = load(home / "sessions" / "s").tree
    assert tree.node(2).state == "interrupted"
    assert tree.node(2).ids
    assert Catalog(home).last() == "s"


def test_a_session_that_is_open_elsewhere_is_not_touched(run: Run, model: Path, home: Path) -> None:
    from llamay.engine import Engine

    run("--session", "s", "-m", model, "-p", "hello")
    with Engine.load(str(model)) as engine:
        session = Session.open(home, "s", engine)
        code, _, err = run("--session", "s", "-p", "again")
        assert code == 1
        assert "has the session open" in err
        session.close()
