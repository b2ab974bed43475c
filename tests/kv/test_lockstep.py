"""Random operations on a cache, in lock step with a model that shares nothing."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamay.kv.snapshot import files
from tests.kv.lockstep import (
    CONFIGS,
    MAX_CONTEXTS,
    OTHER,
    OWN,
    PAGE_SIZES,
    TOKENS,
    Config,
    LockStep,
    run_random_operations,
)

SEEDS, OPERATIONS = 3, 80
DEEP_SEEDS, DEEP_OPERATIONS = 500, 400


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of snapshots are written here, and none has to outlive a power loss."""
    monkeypatch.setattr(files, "to_disk", lambda descriptor: None)
    monkeypatch.setattr(files, "folder_to_disk", lambda folder: None)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_cache_agrees_with_the_model(config: Config) -> None:
    for seed in range(SEEDS):
        run_random_operations(config, seed, OPERATIONS)


@pytest.mark.deep
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_cache_agrees_with_the_model_deep(config: Config) -> None:
    for seed in range(DEEP_SEEDS):
        run_random_operations(config, seed, DEEP_OPERATIONS)


INDEX = st.integers(0, MAX_CONTEXTS - 1)
POSITION = st.integers(0, 400)
COUNT = st.integers(1, 130)
SOME_TOKENS = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=3)


def has_contexts(machine: "CacheMachine") -> bool:
    return machine.lockstep is not None and bool(machine.lockstep.pairs)


def has_room(machine: "CacheMachine") -> bool:
    return machine.lockstep is not None and len(machine.lockstep.pairs) < MAX_CONTEXTS


def has_both(machine: "CacheMachine") -> bool:
    return has_contexts(machine) and has_room(machine)


class CacheMachine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis, which shrinks a failure."""

    lockstep: LockStep | None = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(config=st.sampled_from(CONFIGS))
    def start(self, config: Config) -> None:
        self.lockstep = LockStep(config, Path(self.folder.name))

    @property
    def run(self) -> LockStep:
        assert self.lockstep is not None
        return self.lockstep

    @precondition(has_room)
    @rule(numerics=st.sampled_from((OWN, OTHER)))
    def new(self, numerics: str) -> None:
        self.run.new(numerics)

    @precondition(has_both)
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        self.run.fork(index)

    @precondition(has_contexts)
    @rule(index=INDEX, count=COUNT, tokens=SOME_TOKENS)
    def extend(self, index: int, count: int, tokens: list[int]) -> None:
        self.run.extend(index, count, tokens)

    @precondition(has_contexts)
    @rule(index=INDEX, position=POSITION, count=COUNT, tokens=SOME_TOKENS)
    def overwrite(self, index: int, position: int, count: int, tokens: list[int]) -> None:
        self.run.overwrite(index, position, count, tokens)

    @precondition(has_contexts)
    @rule(index=INDEX, count=COUNT)
    def cancel(self, index: int, count: int) -> None:
        self.run.cancel(index, count)

    @precondition(lambda self: has_contexts(self) and not self.run.config.budget)
    @rule(index=INDEX, count=COUNT, slabs=st.integers(0, 2))
    def extend_without_memory(self, index: int, count: int, slabs: int) -> None:
        self.run.extend_without_memory(index, count, slabs)

    @precondition(has_contexts)
    @rule(index=INDEX, position=POSITION)
    def truncate(self, index: int, position: int) -> None:
        self.run.truncate(index, position)

    @precondition(has_contexts)
    @rule(index=INDEX)
    def keep_logits(self, index: int) -> None:
        self.run.keep_logits(index)

    @precondition(has_contexts)
    @rule(index=INDEX)
    def close(self, index: int) -> None:
        self.run.close(index)

    @precondition(has_contexts)
    @rule(index=INDEX)
    def drop(self, index: int) -> None:
        self.run.drop(index)

    @precondition(has_contexts)
    @rule(index=INDEX)
    def retain(self, index: int) -> None:
        self.run.retain(index)

    @precondition(has_contexts)
    @rule(index=INDEX)
    def park(self, index: int) -> None:
        self.run.park(index)

    @precondition(has_contexts)
    @rule(index=INDEX)
    def unpark(self, index: int) -> None:
        self.run.unpark(index)

    @precondition(has_room)
    @rule(index=INDEX, position=POSITION, tail=st.lists(st.sampled_from(TOKENS), max_size=2))
    def match(self, index: int, position: int, tail: list[int]) -> None:
        self.run.match(index, position, tail)

    @precondition(has_contexts)
    @rule(index=INDEX, own_precision=st.booleans())
    def snapshot(self, index: int, own_precision: bool) -> None:
        self.run.snapshot(index, self.run.config.precision if own_precision else None)

    @precondition(lambda self: has_room(self) and bool(self.run.snapshots))
    @rule(index=INDEX)
    def restore(self, index: int) -> None:
        self.run.restore(index)

    @precondition(lambda self: self.lockstep is not None and bool(self.run.snapshots))
    @rule(index=INDEX, page_tokens=st.sampled_from(PAGE_SIZES))
    def restore_elsewhere(self, index: int, page_tokens: int) -> None:
        self.run.restore_elsewhere(index, page_tokens)

    @precondition(has_contexts)
    @rule(index=INDEX)
    def save_branch(self, index: int) -> None:
        self.run.save_branch(index)

    @precondition(lambda self: has_room(self) and bool(self.run.branches))
    @rule(index=INDEX, position=POSITION, matched=st.booleans(), hop=st.booleans())
    def restore_branch(self, index: int, position: int, matched: bool, hop: bool) -> None:
        self.run.restore_branch(index, position, matched=matched, hop=hop)

    @precondition(has_contexts)
    @rule()
    def clear_tree(self) -> None:
        self.run.clear_tree()

    @invariant()
    def agree(self) -> None:
        if self.lockstep is not None:
            self.lockstep.check()

    def teardown(self) -> None:
        if self.lockstep is not None:
            self.lockstep.finish()
        self.folder.cleanup()


COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))

TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    COMMON, max_examples=80, stateful_step_count=40, derandomize=True
)


class DeepCacheMachine(CacheMachine):
    """The same machine, to be run for longer."""


TestDeepCacheMachine = pytest.mark.deep(DeepCacheMachine.TestCase)
TestDeepCacheMachine.settings = settings(COMMON, max_examples=2000, stateful_step_count=60)
