"""Drafts: where they come from, when they pay, and that they change nothing but time."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamay.engine import Engine, Request
from llamay.engine.lookup import MAX_DRAFT, NGRAM, PromptLookup
from llamay.sampling import SamplingParams
from tests.engine.running import Listener, prompt_ids, run
from tests.scripted_model import byte_ids, write_endless_model, write_scripted_model

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(history=TOKENS, token=st.integers(0, 2), cut=st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_a_draft_is_what_followed_the_latest_occurrence(
    history: list[int], token: int, cut: int
) -> None:
    lookup = PromptLookup()
    lookup.draft(history[:cut], token, 1)  # what it learnt before changes nothing
    draft = lookup.draft(history, token, 1)
    text = [*history, token]
    ends = [end for end in range(NGRAM, len(history)) if text[end - NGRAM : end] == text[-NGRAM:]]
    assert bool(draft) == bool(ends)
    assert len(draft) <= MAX_DRAFT
    for offset, guess in enumerate(draft):
        assert guess == (text + draft)[ends[-1] + offset]


def test_drafts_that_are_wrong_become_rare() -> None:
    lookup, history, drafts = PromptLookup(), [1, 2, 3, 4] * 3, 0
    for _ in range(2000):
        history.append(history[-4])
        if draft := lookup.draft(history[:-1], history[-1], 1):
            drafts += 1
            lookup.judge(len(draft), 0, len(history))
    assert 5 < drafts < 40


def test_drafts_that_are_right_become_long_and_come_at_once() -> None:
    lookup, history = PromptLookup(), [1, 2, 3, 4] * 10
    lengths = []
    for _ in range(4):
        draft = lookup.draft(history, 1, 1)
        lengths.append(len(draft))
        lookup.judge(len(draft), len(draft), len(history))
        history += [1, 2, 3, 4]
    assert lengths == sorted(lengths)
    assert lengths[-1] == MAX_DRAFT


# With an engine.


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("lookup") / "tiny.gguf"
    write_endless_model(path)
    return Engine.load(str(path), threads=2, page_tokens=16, context_size=400)


@pytest.mark.parametrize("temperature", [0, 0.3, 1.2])
@pytest.mark.parametrize(
    ("penalties", "limit"),
    [({}, 200), ({}, None), ({"repeat_penalty": 1.05}, 77), ({"presence_penalty": 0.1}, 60)],
)
def test_an_answer_is_the_same_with_drafts_and_without(
    engine: Engine, temperature: float, penalties: dict[str, float], limit: int | None
) -> None:
    ids = (prompt_ids(9) * 12)[:100]
    params = SamplingParams(temperature=temperature, max_tokens=limit, seed=4, **penalties)
    plain = run(engine, Request(ids, (params,), speculate=False))
    engine.cache.clear_tree()
    drafted = run(engine, Request(ids, (params,)))
    assert drafted.told == plain.told
    assert drafted.told[0].text == plain.told[0].text
    engine.cache.clear_tree()
    beside = run(engine, Request(ids, (params, *(replace(params, seed=i) for i in range(5)))))
    assert beside.told[0] == plain.told[0]
    engine.cache.check()


def test_answers_that_repeat_take_fewer_steps(tmp_path: Path) -> None:
    path = tmp_path / "scripted.gguf"
    write_scripted_model(path, byte_ids(b"\nabcdefghij\n"))
    scripted = Engine.load(str(path))
    params = (SamplingParams(temperature=0, max_tokens=250),)
    counts = []
    for speculate in (False, True):
        before = scripted.counters.steps
        run(scripted, Request(byte_ids(b"\nabc"), params, speculate=speculate))
        counts.append(scripted.counters.steps - before)
    assert counts[0] == 251
    assert counts[1] < 60


def test_a_stop_text_within_a_draft_ends_the_answer_there(tmp_path: Path) -> None:
    path = tmp_path / "scripted.gguf"
    write_scripted_model(path, byte_ids(b"\nabcdefghij\n"))
    scripted = Engine.load(str(path), page_tokens=16)
    ids = byte_ids(b"\nabcdefghij" * 3)
    for stop in ("c", "fgh", "j\na", "zz"):
        params = (SamplingParams(temperature=0, max_tokens=70, stop=(stop,)),)
        plain = run(scripted, Request(ids, params, speculate=False))
        scripted.cache.clear_tree()
        before = scripted.counters.accepted_tokens
        drafted = run(scripted, Request(ids, params))
        assert drafted.told == plain.told
        assert drafted.told[0].text == plain.told[0].text
        assert scripted.counters.accepted_tokens > before


def test_what_is_told_of_a_draft_is_whole(engine: Engine) -> None:
    listener: Listener = run(
        engine, Request((prompt_ids(9) * 12)[:100], (SamplingParams(temperature=0, max_tokens=99),))
    )
    told = listener.told[0]
    assert len(told.ids) == len(told.logprobs) == told.tokens == 99
