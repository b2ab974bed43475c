"""`llamay sessions`, on sessions of which everything is known."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llamay import cli
from llamay.hub.paths import data_dir
from llamay.session.catalog import Catalog
from llamay.session.records import AddNode, Edit, Info, Settings
from llamay.session.tree import Tree

Run = Callable[..., tuple[int, str, str]]
KEY_BYTES = bytes(range(32))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], empty_home: Path) -> Run:
    """Runs `llamay sessions` with arguments; gives its code, stdout and stderr."""

    def run_sessions(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["sessions", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_sessions


@pytest.fixture
def session(empty_home: Path) -> str:
    """A message with two answers; its text would command a terminal."""
    tree = Tree(Settings(system="Be brief."), Info(model="tiny"))
    folder = Catalog(data_dir()).create(tree, text="Fork it")
    edit = Edit(
        (
            AddNode(1, 0, "user", "Fork it", ids=(1, 2)),
            AddNode(2, 1, "assistant", "No.", ids=(3,), logprobs=(-1.0,)),
            AddNode(3, 1, "assistant", "\x1b[31mYes.", ids=(4,), logprobs=(-1.0,)),
        )
    )
    folder.append([edit])
    tree.apply(edit)
    folder.close(tree)
    return folder.name


def test_without_sessions_it_says_so(run: Run) -> None:
    assert run() == (0, "", "no sessions; `llamay` starts one\n")
    assert run("--json") == (0, "[]\n", "")


def test_the_list_comes_with_and_without_its_subcommand(run: Run, session: str) -> None:
    code, output, _ = run()
    assert code == 0
    heading, line = output.splitlines()
    assert heading.split()[:4] == ["NAME", "TITLE", "TOKENS", "BRANCHES"]
    assert line.split()[:5] == ["fork-it", "Fork", "it", "4", "2"]
    assert run("list") == (0, output, "")
    for arguments in (["--json"], ["list", "--json"]):
        (entry,) = json.loads(run(*arguments)[1])
        expected = {"name": "fork-it", "title": "Fork it", "tokens": 4, "branches": 2}
        assert {name: entry[name] for name in expected} == expected
        assert (entry["encrypted"], entry["owner"], entry["model"]) == (False, None, "tiny")


def test_show_draws_the_tree_and_nothing_that_a_terminal_obeys(run: Run, session: str) -> None:
    code, output, _ = run("show", session)
    assert code == 0
    assert output.splitlines() == [
        "fork-it: Fork it",
        "4 tokens, 2 branches, tiny",
        "system: Be brief.",
        "└─ 1 you: Fork it (2 tokens)",
        "   ├─ 2 answer: No. (1 tokens)",
        "   └─ 3 answer: \\x1b[31mYes. (1 tokens)",
    ]
    assert json.loads(run("show", session, "--json")[1])["tokens"] == 4


def test_export_writes_all_or_a_branch_in_two_formats(
    run: Run, session: str, tmp_path: Path
) -> None:
    code, output, _ = run("export", session, "--branch", 2)
    assert (code, output.endswith("## You\n\nFork it\n\n## Answer\n\nNo.\n")) == (0, True)
    for path, turns in ((tmp_path / "x.json", 4), (tmp_path / "x.md", None)):
        code, output, said = run("export", session, "-o", path)
        assert (code, output, said) == (0, "", f"wrote 3 turns to {path}\n")
        text = path.read_text("utf-8")
        assert text.startswith("# Fork it") if turns is None else json.loads(text)["turns"][3]
    exported = json.loads(run("export", session, "--json")[1])
    assert [turn["text"] for turn in exported["turns"]] == ["", "Fork it", "No.", "\x1b[31mYes."]
    code, _, said = run("export", session, "--branch", 9)
    assert (code, "there is no turn 9" in said) == (1, True)


def test_rm_asks_unless_told_not_to(
    run: Run, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("click.confirm", lambda *args, **kwargs: False)
    assert run("rm", session)[0] == 0
    assert json.loads(run("--json")[1])
    assert run("rm", "-y", session) == (0, "", "deleted fork-it\n")
    assert json.loads(run("--json")[1]) == []
    code, _, said = run("rm", "-y", session)
    assert (code, said) == (
        1,
        "error: there is no session 'fork-it'; `llamay sessions` lists them\n",
    )


def test_an_open_session_is_not_removed(run: Run, session: str) -> None:
    folder = Catalog(data_dir()).open(session)
    code, _, said = run("rm", "-y", session)
    assert (code, f"process {os.getpid()} has the session open" in said) == (1, True)
    folder.release()


def test_an_encrypted_session_needs_its_key(run: Run, tmp_path: Path) -> None:
    from llamay.kv.snapshot import Key

    key = tmp_path / "key"
    key.write_bytes(KEY_BYTES)
    Catalog(data_dir()).create(Tree(), name="secret", key=Key(KEY_BYTES)).release()
    (entry,) = json.loads(run("--json")[1])
    assert (entry["name"], entry["encrypted"], "title" in entry) == ("secret", True, False)
    (entry,) = json.loads(run("--json", "--context-key", key)[1])
    assert entry["tokens"] == 0
    code, _, said = run("show", "secret")
    assert (code, "give its --context-key" in said) == (1, True)
    assert run("show", "secret", "--context-key", key)[0] == 0
