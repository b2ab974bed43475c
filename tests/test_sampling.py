import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llamay import sampling
from llamay.errors import UsageError
from llamay.sampling import SamplingParams, child_seed, choose, philox, uniform

F32 = NDArray[np.float32]

ONES = 2**32 - 1
SEEDS = st.integers(0, 2**64 - 1)
VOCAB = 300


def random_logits(seed: int, scale: float = 4.0) -> F32:
    return (np.random.Generator(np.random.PCG64(seed)).normal(size=VOCAB) * scale).astype("f4")


def greedy(**options: float) -> SamplingParams:
    return SamplingParams(temperature=0, **options)  # type: ignore[arg-type]


# Random123's published known answers (kat_vectors, "philox4x32 10"): counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox(key[1] << 32 | key[0], counter) == words


def test_uniform_is_53_bits_of_the_words_of_a_position() -> None:
    # Seed 0, position 0 is the first known answer: the low word comes first.
    assert uniform(0, 0) == (0xE169C58D6627E8D5 >> 11) / 2**53


@pytest.mark.parametrize(("word", "number"), [(0, 0.0), (ONES, 1 - 2**-53)])
def test_uniform_is_below_1_whatever_the_words(
    monkeypatch: pytest.MonkeyPatch, word: int, number: float
) -> None:
    monkeypatch.setattr(sampling, "philox", lambda key, counter: (word,) * 4)
    assert uniform(1, 2) == number


def test_uniform_is_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(7, p) for p in range(4000)], [uniform(s, 7) for s in range(4000)]):
        counts = np.histogram(numbers, 20, (0, 1))[0]
        # Chi-square of 19 degrees of freedom: above 50 once in 7000 times.
        assert ((counts - 200) ** 2 / 200).sum() < 50
        assert len(set(numbers)) == 4000


def test_positions_beyond_32_bits_have_numbers_of_their_own() -> None:
    assert len({uniform(3, p + q) for p in (0, 2**32, 2**33) for q in (0, 1)}) == 6


def test_children_have_seeds_of_their_own_and_the_first_goes_on_with_the_parent_s() -> None:
    for seed in (0, 1, 2**64 - 1):
        seeds = [child_seed(seed, index) for index in range(3000)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 3000
        assert all(0 <= s < 2**64 for s in seeds)
        # A child's seed says nothing about the parent's numbers.
        assert {s >> 11 for s in seeds[1:]}.isdisjoint(
            int(uniform(seed, position) * 2**53) for position in range(3000)
        )


def test_seeds_of_grandchildren_are_distinct_too() -> None:
    seeds = {child_seed(child_seed(5, i), j) for i in range(40) for j in range(1, 40)}
    assert len(seeds) == 40 * 39


@pytest.mark.parametrize(
    ("field", "flag", "values"),
    [
        ("temperature", "temperature", [-0.1, 100.5, math.nan, math.inf]),
        ("top_k", "top-k", [-1]),
        ("top_p", "top-p", [0, -0.5, 1.01, math.nan]),
        ("min_p", "min-p", [-0.1, 1.1, math.nan]),
        ("repeat_penalty", "repeat-penalty", [0, 1e-46, -1, 101, math.nan]),
        ("presence_penalty", "presence-penalty", [-101, 101, math.nan]),
        ("frequency_penalty", "frequency-penalty", [-101, 101, math.nan]),
        ("seed", "seed", [-1, 2**64]),
        ("max_tokens", "max-tokens", [0, -5]),
        ("stop", "stop", [("",), ("a", "")]),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_flag(
    field: str, flag: str, values: list[object]
) -> None:
    for value in values:
        with pytest.raises(UsageError) as error:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert str(error.value).startswith(f"{flag}: expected ")
        assert str(value) in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 2**64 - 1},
        {"temperature": 100, "min_p": 1, "max_tokens": 1, "repeat_penalty": 100},
        {"temperature": 5e-324, "top_p": 5e-324, "top_k": 2**70, "repeat_penalty": 0.01},
        {"presence_penalty": -100, "frequency_penalty": 100, "stop": (" ",)},
    ],
)
def test_the_ends_of_the_ranges_sample_a_token(options: dict[str, float]) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    for logits in (random_logits(1), np.zeros(VOCAB, np.float32), random_logits(2, 1e30)):
        token, logprob = choose(logits, params, [1, 2, 3], [2, 3])
        assert 0 <= token < VOCAB
        assert logprob <= 0


def test_greedy_ties_go_to_the_lower_id() -> None:
    logits = random_logits(3)
    logits[[250, 40, 77]] = logits.max() + 1
    assert choose(logits, greedy(), [], [])[0] == 40


def test_sampling_ties_go_to_the_lower_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    for seed in range(50):
        params = SamplingParams(temperature=1, top_k=3, top_p=1, min_p=0, seed=seed)
        assert choose(logits, params, [], [])[0] == int(uniform(seed, 0) * 3)


@given(st.integers(0, 2**32), st.sampled_from([0.1, 1.0, 8.0, 60.0]))
@settings(max_examples=60, deadline=None)
def test_log_probabilities_are_those_of_the_softmax_in_float64(seed: int, scale: float) -> None:
    logits = random_logits(seed, scale)
    token, logprob = choose(logits, SamplingParams(seed=seed), [], [])
    wide = logits.astype(np.float64)
    largest = wide.max()
    expected = wide[token] - largest - np.log(np.exp(wide - largest).sum())
    assert logprob == pytest.approx(expected, rel=2e-7, abs=5e-7)


def test_log_probabilities_do_not_depend_on_the_options() -> None:
    logits = random_logits(4)
    options = [greedy(), SamplingParams(top_k=1), greedy(presence_penalty=0.0, repeat_penalty=1.01)]
    assert len({choose(logits, params, [], []) for params in options}) == 1


def penalised(
    logits: F32, history: Sequence[int], generated: Sequence[int], params: SamplingParams
) -> list[float]:
    """llama.cpp's penalties, token by token in float64."""
    result = []
    for token, logit in enumerate(logits.astype(np.float64)):
        if token in history[-64:]:
            logit = logit / params.repeat_penalty if logit > 0 else logit * params.repeat_penalty
        count = list(generated).count(token)
        if count:
            logit -= params.presence_penalty + count * params.frequency_penalty
        result.append(float(logit))
    return result


@given(
    seed=st.integers(0, 2**32),
    length=st.integers(0, 100),
    repeat=st.sampled_from([0.5, 1.0, 1.1, 3.0]),
    presence=st.sampled_from([-1.5, 0.0, 0.7]),
    frequency=st.sampled_from([-0.25, 0.0, 0.9]),
)
@settings(max_examples=100, deadline=None)
def test_penalties_against_the_plain_formula(
    seed: int, length: int, repeat: float, presence: float, frequency: float
) -> None:
    logits = random_logits(seed)
    before = logits.copy()
    # Few distinct tokens, among them the most likely, so that the penalties decide.
    likely = np.argsort(-logits)[:6]
    random = np.random.Generator(np.random.PCG64(seed))
    history = random.choice(likely, length).tolist()
    generated = history[length // 2 :]
    params = greedy(repeat_penalty=repeat, presence_penalty=presence, frequency_penalty=frequency)
    token, logprob = choose(logits, params, history, generated)
    expected = penalised(logits, history, generated, params)
    assert expected[token] == pytest.approx(max(expected), abs=1e-5)
    assert (logits == before).all()
    assert logprob <= 0


def test_the_repeat_penalty_looks_back_64_tokens() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[5] = 1
    params = greedy(repeat_penalty=100.0)
    logits[6] = 0.5
    assert choose(logits, params, [5, *[9] * 63], [])[0] == 6
    assert choose(logits, params, [5, *[9] * 64], [])[0] == 5


def test_presence_and_frequency_penalties_leave_the_prompt_alone() -> None:
    logits = random_logits(5)
    likely = int(logits.argmax())
    params = greedy(presence_penalty=50, frequency_penalty=50)
    assert choose(logits, params, [likely] * 9, [])[0] == likely
    assert choose(logits, params, [likely] * 9, [likely])[0] != likely


def test_without_penalties_only_seed_and_position_count() -> None:
    logits = random_logits(6, 1)
    params = SamplingParams(temperature=2, top_k=0, top_p=1, min_p=0, seed=11)
    by_position = [
        {choose(logits, params, history, ids)[0] for history, ids in histories}
        for histories in (
            [([token] * position, [token] * (position // 2)) for token in (1, 2)]
            for position in range(40)
        )
    ]
    assert all(len(tokens) == 1 for tokens in by_position)
    assert len(set.union(*by_position)) > 10


def kept_candidates(logits: F32, params: SamplingParams) -> tuple[list[int], list[float]]:
    """The tokens that the filters leave, most likely first, and their cumulated shares."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: params.top_k or len(order)]
    wide = logits.astype(np.float64)
    weights = np.exp(wide[order] - wide.max())
    before = np.cumsum(weights) - weights
    keep = (before < params.top_p * weights.sum()) & (weights >= params.min_p)
    keep[0] = True
    order = [token for token, kept in zip(order, np.cumprod(keep), strict=True) if kept]
    tempered = np.exp((wide[order] - wide.max()) / params.temperature)
    return order, (np.cumsum(tempered) / tempered.sum()).tolist()


@given(
    logits_seed=st.integers(0, 2**32),
    seed=SEEDS,
    temperature=st.sampled_from([0.05, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 299, 300, 301]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.9, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_a_token_is_drawn_from_what_the_filters_keep(
    logits_seed: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(logits_seed, 2)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    order, shares = kept_candidates(logits, params)
    index = order.index(choose(logits, params, [0] * 5, [])[0])
    number = uniform(seed, 5)
    # Within the token's interval; the filters' float32 weights move its ends by little.
    assert (shares[index - 1] if index else 0) - 1e-5 <= number < shares[index] + 1e-5
