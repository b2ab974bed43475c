import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llamay.engine import Branch, Engine, Generation, Request
from llamay.errors import (
    CancelledError,
    ContextBusyError,
    ContextFullError,
    NumericsError,
    TemplateError,
    UsageError,
)
from llamay.events import Event, Finished, PrefillProgress, TextDelta
from llamay.kv import Context
from llamay.mlx_kernels import Control
from llamay.model.decoder import Rows
from llamay.sampling import SamplingParams, child_seed
from tests.engine.running import Listener, Told, prompt_ids, wait
from tests.gguf_writer import float_tensor, write_gguf
from tests.scripted_model import CONFIG, END, byte_ids, write_endless_model, write_scripted_model
from tests.tiny_models import (
    VOCAB,
    TinyConfig,
    tiny_metadata,
    tiny_tensors,
)

F32 = NDArray[np.float32]


PARAMS = [
    SamplingParams(max_tokens=40, seed=1),
    SamplingParams(max_tokens=40, temperature=0),
    SamplingParams(max_tokens=33, seed=2, temperature=1.5, top_k=0, top_p=1, min_p=0),
    SamplingParams(max_tokens=40, seed=3, repeat_penalty=1.3, presence_penalty=0.5),
    SamplingParams(max_tokens=5, seed=1, frequency_penalty=0.4),
]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights: its answers wander, and it knows no token to end them."""
    path = tmp_path_factory.mktemp("engine") / "tiny.gguf"
    write_endless_model(path)
    return path


@pytest.fixture
def engine(tiny_path: Path) -> Engine:
    return Engine.load(str(tiny_path), threads=2, page_tokens=16)


def scripted(folder: Path, *chains: Sequence[int], **metadata: Any) -> Engine:
    path = folder / "scripted.gguf"
    write_scripted_model(path, *chains, **metadata)
    return Engine.load(str(path), threads=1)


def collect(events: Iterable[Event], count: int) -> list[Told]:
    told = [Told() for _ in range(count)]
    for event in events:
        if not isinstance(event, PrefillProgress):
            told[event.branch].hear(event)
    return told


def answer(engine: Engine, ids: Sequence[int], params: SamplingParams) -> Told:
    """One answer in a context of its own."""
    branch = engine.prefill(ids)
    (told,) = collect(engine.generate([branch], [params]), 1)
    assert list(branch.tokens) == [*ids, *told.ids]
    branch.close()
    engine.cache.check()
    return told


def last_logits(engine: Engine, branch: Branch) -> F32:
    """Computed again."""
    return engine.call(lambda: engine.model.decoder.last_logits(engine.cache, branch.context))


def stored(engine: Engine, context: Context) -> F32:
    """The keys and values of a context."""
    store = engine.cache.store
    return store.kernels.export_rows(store.slabs, context.page_ids, 0, context.length)


# Stop texts.


def test_a_stop_text_across_tokens_and_within_a_character(tmp_path: Path) -> None:
    engine = scripted(tmp_path, byte_ids("\nab€cdefg".encode()))
    for stop, text in (
        ("€c", "ab"),
        ("b€cde", "a"),
        ("ab", ""),
        ("g", "ab€cdef"),
        ("x", "ab€cdefg"),
    ):
        branch = engine.prefill(byte_ids(b"\n"))
        (told,) = collect(engine.generate([branch], [SamplingParams(stop=(stop, "gg"))]), 1)
        assert (told.text, told.reason) == (text, "stop")
        # The tokens that spelled it are part of the context: they were computed.
        decoded = engine.model.tokenizer.decode(told.ids)
        assert decoded == (text if stop == "x" else text + stop)
        assert list(branch.tokens) == [*byte_ids(b"\n"), *told.ids]


def test_held_text_is_shown_when_the_answer_ends_without_the_stop(tmp_path: Path) -> None:
    engine = scripted(tmp_path, byte_ids(b"\nabcd"))
    for limit, text in ((2, "ab"), (3, "abc"), (None, "abcd")):
        params = SamplingParams(max_tokens=limit, stop=("abcdX",))
        assert answer(engine, byte_ids(b"\n"), params).text == text


def test_half_a_character_at_the_end_is_a_replacement_character(tmp_path: Path) -> None:
    engine = scripted(tmp_path, byte_ids("\na€".encode()))
    told = answer(engine, byte_ids(b"\n"), SamplingParams(max_tokens=3))
    assert told.texts == ["a", "", "", "\ufffd"]


# How answers end.


def test_the_model_s_end_is_not_part_of_the_answer(tmp_path: Path) -> None:
    engine = scripted(tmp_path, byte_ids(b"\nWorld"))
    told = answer(engine, byte_ids(b"\n"), SamplingParams())
    assert told.ids == byte_ids(b"World")
    assert (told.text, told.reason, told.tokens) == ("World", "stop", 5)
    # 270 other tokens have a logit of 0; this one has that of a normed axis, about sqrt(288).
    logit = 1 / np.sqrt(1 / 288 + CONFIG.rms_eps)
    expected = -np.log1p(270 * np.exp(-logit))
    assert told.logprobs == pytest.approx([expected] * 5, abs=1e-7)


def test_every_stop_id_of_the_file_ends_an_answer(tmp_path: Path) -> None:
    chain = byte_ids(b"\nabcde")
    for key in ("eos", "eot", "eom"):
        extra = {f"tokenizer.ggml.{key}_token_id": byte_ids(b"d")[0]}
        told = answer(scripted(tmp_path, chain, **extra), byte_ids(b"\n"), SamplingParams())
        assert (told.text, told.reason) == ("abc", "stop")


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_tokens(engine: Engine, limit: int) -> None:
    whole = answer(engine, prompt_ids(20), replace(PARAMS[0], max_tokens=9))
    told = answer(engine, prompt_ids(20), replace(PARAMS[0], max_tokens=limit))
    assert (told.ids, told.reason, told.tokens) == (whole.ids[:limit], "length", limit)


def test_an_answer_that_ends_at_max_tokens_by_itself_has_stopped(tmp_path: Path) -> None:
    engine = scripted(tmp_path, byte_ids(b"\nabc"))
    assert answer(engine, byte_ids(b"\n"), SamplingParams(max_tokens=3)).reason == "stop"
    assert answer(engine, byte_ids(b"\n"), SamplingParams(max_tokens=2)).reason == "length"


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_full_context_ends_an_answer(tiny_path: Path, room: int) -> None:
    engine = Engine.load(str(tiny_path), context_size=30 + room)
    branch = engine.prefill(prompt_ids(30))
    (told,) = collect(engine.generate([branch], [PARAMS[0]]), 1)
    assert (len(told.ids), told.reason) == (room, "context")
    assert branch.length == 30 + room


def test_a_prompt_that_does_not_fit_is_refused_with_both_counts(tiny_path: Path) -> None:
    engine = Engine.load(str(tiny_path), context_size=50)
    base = engine.prefill(prompt_ids(20))
    before = stored(engine, base.context)
    with pytest.raises(ContextFullError, match=r"holds 50 tokens, and 51 are needed"):
        engine.prefill(prompt_ids(31), start=base)
    assert base.length == 20
    assert (stored(engine, base.context) == before).all()
    engine.cache.check()
    assert engine.prefill(prompt_ids(30), start=base).length == 50


def test_the_context_s_size_is_the_model_s_own_by_default(engine: Engine) -> None:
    assert engine.context_size == 9999


# Batches.


def test_branches_together_equal_each_alone(tiny_path: Path, engine: Engine) -> None:
    prompt = prompt_ids(70)
    branch = engine.prefill(prompt)
    branches = [branch, *branch.fork(len(PARAMS) - 1)]
    together = collect(engine.generate(branches, PARAMS), len(PARAMS))
    engine.cache.check()
    for told, params, used in zip(together, PARAMS, branches, strict=True):
        alone = Engine.load(str(tiny_path), threads=1, page_tokens=64)
        assert told == answer(alone, prompt, params)
        assert list(used.tokens) == [*prompt, *told.ids]
    assert len({tuple(told.ids[:5]) for told in together}) == len(PARAMS)


def test_an_answer_does_not_depend_on_the_others(engine: Engine) -> None:
    prompt = prompt_ids(40)
    answers = []
    for others in ([], PARAMS[1:2], PARAMS[2:]):
        branches = [engine.prefill(prompt) for _ in range(len(others) + 1)]
        events = engine.generate(branches, [PARAMS[0], *others])
        answers.append(collect(events, len(branches))[0])
    assert answers[0] == answers[1] == answers[2]


def test_one_set_of_parameters_gives_each_branch_the_seed_of_a_child(engine: Engine) -> None:
    base = engine.prefill(prompt_ids(20))
    params = [replace(PARAMS[2], seed=child_seed(2, i)) for i in range(3)]
    expected = collect(engine.generate(base.fork(3), params), 3)
    assert collect(engine.generate(base.fork(3), PARAMS[2]), 3) == expected


def test_branches_of_different_prompts_decode_together(engine: Engine) -> None:
    prompts = [prompt_ids(count, seed=count) for count in (1, 16, 17, 300)]
    params = [replace(PARAMS[0], seed=i) for i in range(4)]
    alone = [answer(engine, ids, p) for ids, p in zip(prompts, params, strict=True)]
    branches = [engine.prefill(ids) for ids in prompts]
    assert collect(engine.generate(branches, params), 4) == alone


def test_children_s_seeds_give_different_answers_and_the_first_is_the_parent_s(
    engine: Engine,
) -> None:
    branch = engine.prefill(prompt_ids(20))
    branches = [branch, *branch.fork(7)]
    params = [replace(PARAMS[2], seed=child_seed(9, i)) for i in range(8)]
    told = collect(engine.generate(branches, params), 8)
    assert len({tuple(t.ids) for t in told}) == 8
    assert told[0] == answer(engine, prompt_ids(20), replace(PARAMS[2], seed=9))


def test_params_and_branches_must_be_as_many(engine: Engine) -> None:
    branch = engine.prefill(prompt_ids(3))
    with pytest.raises(ValueError, match="1 branches, and 0 parameters"):
        list(engine.generate([branch], []))


# Who continues a branch.


def test_a_branch_that_is_given_twice_is_refused(engine: Engine) -> None:
    branch = engine.prefill(prompt_ids(20))
    with pytest.raises(ContextBusyError, match="continued already; fork it"):
        list(engine.generate([branch, *branch.fork(), branch], PARAMS[:3]))
    assert list(branch.tokens) == prompt_ids(20)
    assert collect(engine.generate([branch], PARAMS[:1]), 1) == [
        answer(engine, prompt_ids(20), PARAMS[0])
    ]


def test_a_branch_that_is_continued_is_refused_until_its_answer_ends(engine: Engine) -> None:
    expected = answer(engine, prompt_ids(20), PARAMS[0])
    long, short = engine.prefill(prompt_ids(20)).fork(2)
    events = engine.generate([long, short], [replace(PARAMS[0], max_tokens=2000), PARAMS[4]])
    told = list(takewhile(lambda event: not isinstance(event, Finished), events))
    for busy in (long, engine.branch(long.context)):
        with pytest.raises(ContextBusyError, match="continued already; fork it"):
            list(engine.generate([busy], PARAMS[:1]))
    assert short.length == 25
    assert collect(engine.generate([short], PARAMS[:1]), 1)[0].tokens == 40
    (fork,) = long.fork()
    told += islice(events, 60)
    ids = [id for e in told if isinstance(e, TextDelta) and e.branch == 0 for id in e.ids]
    assert ids[:40] == expected.ids
    assert list(fork.tokens)[20:60] == expected.ids[: fork.length - 20]
    events.close()
    assert collect(engine.generate([long], PARAMS[:1]), 1)[0].tokens == 40
    engine.cache.check()


@pytest.mark.parametrize("length", [0, 3, 20])
def test_an_answer_whose_branch_is_changed_fails(engine: Engine, length: int) -> None:
    expected = answer(engine, prompt_ids(20), PARAMS[0])
    changed, other = Listener(), Listener()
    branch = engine.prefill(prompt_ids(20))

    def change(event: Event) -> None:
        if isinstance(event, TextDelta) and len(changed.told[0].ids) >= 5:
            branch.context.truncate(length)

    changed.on_event = change
    generation = Generation(Request((), (PARAMS[0],)), changed, [branch.context])
    engine.call(lambda: engine._scheduler.add(generation))
    wait(engine.submit(Request(prompt_ids(20), (PARAMS[0],)), other), generation)
    (told,) = changed.told
    assert isinstance(told.error, ContextBusyError)
    assert f"held {length} tokens" in str(told.error)
    assert told.ids == expected.ids[: len(told.ids)]
    assert branch.length == length
    assert other.told == [expected]
    branch.close()
    engine.cache.check()


def test_a_branch_that_is_closed_keeps_no_logits_of_its_answer(engine: Engine) -> None:
    branch = engine.prefill(prompt_ids(20))
    events = engine.generate([branch], [replace(PARAMS[0], max_tokens=2000)])
    next(events)

    def close_and_cancel() -> None:  # between two steps
        branch.close()
        engine._scheduler._running[0].cancel()

    engine.call(close_and_cancel)
    assert collect(events, 1)[0].reason == "cancelled"
    assert branch.length == 0
    assert branch.context.logits is None


# Pages.


def test_forks_share_pages_until_they_write(engine: Engine) -> None:
    cache = engine.cache
    branch = engine.prefill(prompt_ids(40))  # 2 full pages of 16, one begun
    assert cache.live_pages == 3
    forks = branch.fork(8)
    assert cache.live_pages == 3
    cache.check()
    for count, fork in enumerate(forks, 1):
        before = stored(engine, branch.context)
        collect(engine.generate([fork], [SamplingParams(max_tokens=8, seed=count)]), 1)
        cache.clear_tree()
        assert cache.live_pages == 3 + count
        assert (stored(engine, branch.context) == before).all()
    for fork in forks:
        fork.close()
    assert cache.live_pages == 3
    branch.close()
    assert cache.live_pages == 0
    assert cache.store.slab_bytes <= cache.store.slabs.pages_per_slab * cache.store.page_bytes
    cache.check()


def test_forks_at_the_end_of_a_page_copy_nothing(engine: Engine) -> None:
    branch = engine.prefill(prompt_ids(32))
    forks = branch.fork(3)
    collect(engine.generate(forks, [SamplingParams(max_tokens=1)] * 3), 3)
    engine.cache.clear_tree()
    assert engine.cache.live_pages == 2 + 3
    engine.cache.check()


def test_a_context_resumes_from_kept_or_recomputed_logits(engine: Engine) -> None:
    """They are kept where a turn ends; elsewhere a row that writes nothing computes them."""
    branch = engine.prefill(prompt_ids(70))
    list(engine.generate([branch], [SamplingParams(temperature=0, max_tokens=5)]))
    context = branch.context
    kept, rows, pages = context.logits, stored(engine, context), engine.cache.live_pages
    assert kept is not None
    np.testing.assert_array_equal(last_logits(engine, branch), kept)
    np.testing.assert_array_equal(stored(engine, context), rows)
    assert engine.cache.live_pages == pages
    whole = collect(engine.generate(branch.fork(), [PARAMS[0]]), 1)
    context.logits = None
    assert collect(engine.generate(branch.fork(), [PARAMS[0]]), 1) == whole


@pytest.mark.parametrize("count", [1, 31, 32, 33, 700, 2500])
def test_prefill_in_steps_equals_prefill_in_one(tiny_path: Path, count: int) -> None:
    ids = prompt_ids(count)
    engine = Engine.load(str(tiny_path), threads=2)
    context = engine.cache.new_context()
    one = engine.model.decoder.forward(engine.cache, [Rows(context, ids)], Control())
    branch = engine.prefill(ids)
    assert (branch.context.logits == one[0]).all()
    assert (stored(engine, branch.context) == stored(engine, context)).all()


def test_prefill_tells_its_progress(engine: Engine) -> None:
    engine.prefill(prompt_ids(300))
    progress: list[PrefillProgress] = []
    engine.prefill(prompt_ids(1500), on_progress=progress.append)
    done = [event.done for event in progress]
    assert len(progress) > 2
    assert done == sorted(set(done))
    assert done[-1] == 1200
    assert all((event.total, event.cached) == (1500, 300) for event in progress)
    assert all(event.seconds > 0 for event in progress)


# Cancelling.


def test_a_prefill_that_is_cancelled_leaves_nothing_to_match(engine: Engine) -> None:
    ids = prompt_ids(4000)
    generation: list[Generation] = []
    told: list[Event] = []

    def listen(event: Event) -> None:
        told.append(event)
        if len(told) == 2:
            generation[0].cancel()

    generation.append(engine.submit(Request(ids, (PARAMS[0],)), listen))
    assert generation[0].done.wait(30)
    assert told[2:] == [Finished(0, "cancelled", 0, 0.0)]
    assert isinstance(told[1], PrefillProgress)
    assert 0 < told[1].done < 4000
    assert engine.cache.match(ids).length == 0
    assert engine.cache.live_pages == 0
    engine.cache.check()


def test_what_was_read_stays_for_who_asked_for_it(engine: Engine) -> None:
    ids = prompt_ids(4000)
    generation: list[Generation] = []

    def listen(event: Event) -> None:
        if isinstance(event, PrefillProgress) and event.done > 500:
            generation[0].cancel()

    request = Request(ids, (PARAMS[0],) * 2, keep_read=True)
    generation.append(engine.submit(request, listen))
    assert generation[0].done.wait(30)
    first, second = generation[0].branches
    assert 500 < first.length == second.length < 4000
    assert list(first.tokens) == ids[: first.length]
    assert engine.cache.match(ids).length == 0, "the tree has nothing of it"
    page_tokens = engine.cache.store.layout.page_tokens
    assert engine.cache.live_pages == -(-first.length // page_tokens), "nothing is reserved"
    rest = engine.prefill(ids[first.length :], start=first)
    (told,) = collect(engine.generate([rest], [PARAMS[0]]), 1)
    engine.cache.clear_tree()
    assert told == answer(engine, ids, PARAMS[0])
    for branch in (first, second, rest):
        branch.close()
    engine.cache.clear_tree()
    assert engine.cache.live_pages == 0
    engine.cache.check()


def test_cancel_within_a_step_publishes_nothing_of_it(tiny_path: Path) -> None:
    engine = Engine.load(str(tiny_path), threads=2, page_tokens=16)
    context, ids = engine.cache.new_context(), prompt_ids(6000)
    control, seen = Control(), list[int]()

    def cancel_when_running() -> None:
        while not control.operations_done:
            pass
        seen.append(control.operations_done)
        control.cancel()

    watcher = threading.Thread(target=cancel_when_running)
    watcher.start()
    # One step of 6000 rows takes long enough to be met by the other thread.
    with pytest.raises(CancelledError):
        engine.model.decoder.forward(engine.cache, [Rows(context, ids)], control)
    watcher.join()
    assert 0 < seen[0] < engine.model.decoder.num_operations
    assert context.length == 0
    assert engine.cache.live_pages == 0
    engine.cache.check()


def test_an_answer_that_is_cancelled_goes_on_as_if_it_never_was(engine: Engine) -> None:
    """Also where penalties, a stop text begun or half a character depend on what came before."""
    prompt = prompt_ids(30)
    for params in PARAMS:
        whole = answer(engine, prompt, params)
        for taken in (1, 4, len(whole.ids) - 1):
            branch = engine.prefill(prompt)
            events = engine.generate([branch], [params])
            first = collect(islice(events, taken), 1)[0]
            del events  # leaves, which cancels
            # The engine may have been a step ahead of who left.
            written = list(branch.tokens)[len(prompt) :]
            assert written[: len(first.ids)] == first.ids
            request = Request((), (params,), start=branch, answered=len(written))
            (rest,) = collect(engine.stream(request), 1)
            assert written + rest.ids == whole.ids
            assert whole.logprobs[len(written) :] == rest.logprobs
            assert whole.text.endswith(rest.text)
            assert (rest.reason, rest.tokens) == (whole.reason, whole.tokens)


@pytest.mark.parametrize("taken", range(1, 9))
def test_branches_are_whole_after_a_listener_leaves(engine: Engine, taken: int) -> None:
    prompt = prompt_ids(30)
    branches = [engine.prefill(prompt) for _ in range(3)]
    events = engine.generate(branches, [replace(PARAMS[0], seed=i) for i in range(3)])
    for _ in range(taken):
        next(events)
    del events
    engine.cache.check()
    for branch in branches:
        engine.cache.clear_tree()
        again = engine.prefill(list(branch.tokens))
        np.testing.assert_array_equal(last_logits(engine, branch), again.context.logits)


# What is refused.


@pytest.mark.parametrize("page_tokens", [-16, 0, 8, 15, 17, 100, 2048, 10**9 // 16 * 16, 2**60])
def test_a_page_size_that_kernels_do_not_take_is_refused(tiny_path: Path, page_tokens: int) -> None:
    with pytest.raises(UsageError, match=f"page-tokens: expected .*, found {page_tokens}"):
        Engine.load(str(tiny_path), page_tokens=page_tokens)


@pytest.mark.parametrize("page_tokens", [16, 48, 1024])
def test_a_page_size_that_kernels_take_changes_nothing(
    tiny_path: Path, engine: Engine, page_tokens: int
) -> None:
    other = Engine.load(str(tiny_path), page_tokens=page_tokens)
    assert answer(other, prompt_ids(70), PARAMS[0]) == answer(engine, prompt_ids(70), PARAMS[0])


@pytest.mark.parametrize("context_size", [0, -1])
def test_a_context_size_below_1_is_refused(tiny_path: Path, context_size: int) -> None:
    with pytest.raises(UsageError, match=f"ctx-size: expected 1 or more, found {context_size}"):
        Engine.load(str(tiny_path), context_size=context_size)


def test_nothing_to_read_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="prompt"):
        engine.prefill([])


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    config, path = TinyConfig(), tmp_path / "small.gguf"
    metadata, tensors = tiny_metadata(config), tiny_tensors(config)
    rows = np.zeros((len(VOCAB) - 1, config.hidden), np.float32)
    tensors["token_embd.weight"] = tensors["output.weight"] = float_tensor(rows)
    write_gguf(path, metadata | {"llama.vocab_size": len(VOCAB) - 1}, tensors)
    with pytest.raises(UsageError, match=rf"small.gguf: .*{len(VOCAB)} tokens.*{len(VOCAB) - 1}"):
        Engine.load(str(path))


def test_logits_that_are_not_finite_are_an_error_and_change_nothing(tmp_path: Path) -> None:
    config, path = TinyConfig(), tmp_path / "broken.gguf"
    tensors = tiny_tensors(config)
    tensors["output_norm.weight"] = float_tensor(np.full(config.hidden, np.inf, np.float32))
    write_gguf(path, tiny_metadata(config), tensors)
    engine = Engine.load(str(path))
    with pytest.raises(NumericsError):
        engine.prefill([1, 2, 3])
    assert engine.cache.live_pages == 0
    engine.cache.check()


# Prompts.


def test_a_prompt_starts_with_bos_if_the_file_says_so(tmp_path: Path) -> None:
    assert scripted(tmp_path).model.encode_prompt("ab") == byte_ids(b"ab")
    wanted = scripted(tmp_path, **{"tokenizer.ggml.add_bos_token": True})
    assert wanted.model.encode_prompt("ab") == [wanted.model.tokenizer.bos_id, *byte_ids(b"ab")]
    assert wanted.model.encode_prompt("") == [wanted.model.tokenizer.bos_id]


def test_an_empty_prompt_is_bos_or_refused(tmp_path: Path) -> None:
    assert scripted(tmp_path).model.encode_prompt("") == [VOCAB.index("<|im_start|>")]
    without = scripted(tmp_path, **{"tokenizer.ggml.bos_token_id": None})
    with pytest.raises(UsageError, match="prompt: expected some text"):
        without.model.encode_prompt("")


def test_a_prompt_s_control_tokens_are_text(engine: Engine) -> None:
    ids = engine.model.encode_prompt("<|im_end|>")
    assert END not in ids
    assert engine.model.tokenizer.decode(ids) == "<|im_end|>"


def test_a_file_without_a_template_answers_but_does_not_chat(tmp_path: Path) -> None:
    engine = scripted(tmp_path, byte_ids(b"ab"), **{"tokenizer.chat_template": None})
    with pytest.raises(TemplateError, match=r"scripted.gguf: .*tokenizer.chat_template"):
        engine.model.chat_template()
    assert answer(engine, byte_ids(b"a"), SamplingParams()).text == "b"
