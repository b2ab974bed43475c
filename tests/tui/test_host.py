"""Opening real sessions with real engines of tiny models, for the interface."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamay.engine import Engine
from llamay.errors import HubError, LlamayError
from llamay.hub import Progress
from llamay.session import Session
from llamay.tui.host import EngineHost
from tests.scripted_model import byte_ids, write_scripted_model


def load(name: str, progress: Progress) -> Engine:
    return Engine.load(name, threads=1, page_tokens=16, context_size=256)


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Two models, by the paths of their files."""
    paths = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for path, answer in zip(paths, (b"\nthe w.", b"\nhe."), strict=True):
        write_scripted_model(path, byte_ids(answer))
    return [str(path) for path in paths]


@pytest.fixture
def hosted(
    tmp_path: Path, models: list[str]
) -> Iterator[Callable[..., tuple[EngineHost, Session]]]:
    """Opens sessions in hosts of their own; all are closed at the end."""
    opened: list[tuple[EngineHost, Session]] = []

    def open_(name: str | None = None, model: str | None = None) -> tuple[EngineHost, Session]:
        host = EngineHost(tmp_path, load, model=models[0], settings={"temperature": 0.0})
        session = host.open(name, model, lambda sentence: None)
        opened.append((host, session))
        return host, session

    yield open_
    for host, session in opened:
        session.close()
        host.close()


def test_hashing_the_model_is_told_as_it_proceeds(tmp_path: Path, models: list[str]) -> None:
    host = EngineHost(tmp_path, load, model=models[0])
    said: list[str] = []
    session = host.open(None, None, said.append)
    session.close()
    host.close()
    assert said[0] == f"opening {models[0]}"
    assert said[-1].startswith("hashing one.gguf: ")
    assert " of " in said[-1]


def test_the_first_start_makes_a_session_and_the_next_one_opens_it(hosted):
    _, first = hosted()
    assert first.tree.effective(0).temperature == 0.0
    first.send("Which index?")
    first.close()
    host, again = hosted()
    assert [node.text for node in again.tree.nodes.values() if node.role == "user"] == [
        "Which index?"
    ]
    assert again.read_only is None
    assert host.title[0] == "one"
    assert host.title[2] == "kv f32"


def test_a_name_that_is_not_there_yet_is_a_new_sessions(hosted):
    _, session = hosted("review")
    assert session.name == "review"


def test_a_session_comes_back_with_the_model_that_it_was_made_with(hosted, models):
    _, session = hosted("second", models[1])
    session.close()
    host, again = hosted("second")
    assert host.model == models[1]
    assert again.read_only is None


def test_another_model_opens_a_session_read_only_until_it_may_continue(hosted, models):
    _, session = hosted("first")
    session.close()
    _, again = hosted("first", models[1])
    assert again.read_only is not None
    again.continue_with_model()
    assert again.read_only is None


def test_a_model_that_is_gone_leaves_the_text_to_read(hosted, models, tmp_path):
    _, session = hosted("first")
    session.close()
    (tmp_path / "one.gguf").unlink()
    host, again = hosted("first")
    assert again.read_only is not None
    assert "cannot be opened" in host.remark


def test_without_any_model_there_is_a_sentence(tmp_path):
    def fail(name: str, progress: Progress) -> Engine:
        raise HubError("there is none; pull one")

    host = EngineHost(tmp_path, fail, model="none:1b")
    with pytest.raises(LlamayError, match="pull one"):
        host.open(None, None, lambda sentence: None)


def test_the_last_session_open_elsewhere_gives_a_new_one_and_says_so(hosted):
    _, first = hosted("first")
    host, second = hosted()
    assert second.name != first.name
    assert "this is a new session" in host.remark
    with pytest.raises(LlamayError, match="first"):
        hosted("first")
