"""Fixtures that tests of running sessions share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from llamay.engine import Engine
from tests.scripted_model import write_endless_model
from tests.session.talking import engine_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers do not end by themselves."""
    path = tmp_path_factory.mktemp("model") / "endless.gguf"
    write_endless_model(path)
    return path


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    """One for each test."""
    with engine_of(model) as engine:
        yield engine
