"""Alternatives at a token: the model's own probabilities, to the last bit."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamay.engine import Engine
from llamay.session import Session, Settings
from tests.scripted_model import write_endless_model
from tests.session.talking import engine_of, hear


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model") / "endless.gguf"
    write_endless_model(path)
    with engine_of(path) as engine:
        yield engine


@pytest.fixture
def answered(engine: Engine, tmp_path: Path) -> Iterator[tuple[Session, int]]:
    """A session, and an answer in it that took the likeliest token 80 times."""
    settings = Settings(max_tokens=80, temperature=0.0)
    session = Session.create(tmp_path, engine, settings=settings)
    ear = hear(session)
    _, (answer,) = session.send("Which index?")
    ear.wait_ended(answer)
    yield session, answer
    session.close()


def test_the_likeliest_one_is_what_a_greedy_answer_took_with_its_exact_probability(answered):
    session, answer = answered
    node = session.tree.node(answer)
    for index in (0, 1, 40, 63, 79):
        (_, logprob), *others = session.alternatives(answer, index)
        assert logprob - node.logprobs[index] == 0.0
        assert all(logprob >= other for _, other in others)


def test_all_of_them_have_a_probability_of_one_together(answered, engine):
    session, answer = answered
    everything = session.alternatives(answer, 5, n=engine.model.tokenizer.vocab_size)
    assert sum(math.exp(logprob) for _, logprob in everything) == pytest.approx(1, abs=1e-5)


def test_they_leave_the_branch_as_it_was(answered, engine):
    session, answer = answered
    before, pages = session.page_map(answer), engine.cache.live_pages
    session.alternatives(answer, 70)
    assert session.page_map(answer) == before
    assert engine.cache.live_pages == pages
    engine.cache.check()


def test_without_the_state_before_the_token_there_are_none(answered):
    session, answer = answered
    assert session.alternatives(session.tree.node(answer).parent, 0) == []
