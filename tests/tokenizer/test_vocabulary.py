"""Metadata that is not as it should be: one sentence, no traceback."""

import contextlib

import numpy as np
import pytest

from llamay.errors import GGUFError, LlamayError, UnsupportedModelError
from llamay.tokenizer import Tokenizer

GOOD = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>"],
    "tokenizer.ggml.token_type": np.array([1, 1, 1, 3], np.int32),
    "tokenizer.ggml.merges": ["a b"],
}


def load(**changes):
    metadata = GOOD | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_metadata(
        {key: value for key, value in metadata.items() if value is not None}, "some.gguf"
    )


def refusal(error, **changes):
    with pytest.raises(error) as caught:
        load(**changes)
    message = str(caught.value)
    assert message.startswith("some.gguf: ")
    assert "\n" not in message
    return message


def test_an_unknown_tokenizer_model_is_named_with_those_supported():
    message = refusal(UnsupportedModelError, model="t5")
    assert "'t5'" in message
    assert "'gpt2'" in message
    assert "'llama'" in message


def test_an_unknown_pre_tokenizer_is_named_with_those_supported():
    message = refusal(UnsupportedModelError, pre="chameleon")
    assert "'chameleon'" in message
    for supported in ("smollm", "qwen2", "llama-bpe", "gpt-2", "deepseek-r1-qwen", "llama-v3"):
        assert supported in message


def test_a_missing_pre_tokenizer_is_the_default_one():
    text = "ab12345"
    assert load(pre=None).encode(text) == load(pre="default").encode(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "found str"),
        ({"tokens": 3}, "found int"),
        ({"tokens": ["a", 3]}, "an entry of type int"),
        ({"tokens": ["a", "b", "a", "c"]}, "'a' at 0 and 2"),
        ({"token_type": np.array([1, 1, 1])}, "each of the 4 tokens, found 3 entries"),
        ({"token_type": ["x"] * 4}, "tokenizer.ggml.token_type"),
        ({"token_type": [[1], [1, 2]]}, "tokenizer.ggml.token_type"),
        ({"scores": np.zeros((4, 2), np.float32)}, "2 dimensions"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": [1]}, "an entry of type int"),
        ({"bos_token_id": "1"}, "type int, found str"),
        ({"add_bos_token": 1}, "type bool, found int"),
        ({"model": 7}, "type str, found int"),
    ],
)
def test_a_damaged_list_is_refused_by_its_key(changes, words):
    assert words in refusal(GGUFError, **changes)


def test_numpy_scalars_are_numbers():
    tokenizer = load(bos_token_id=np.uint32(2), add_bos_token=np.bool_(True))
    assert (tokenizer.bos_id, tokenizer.add_bos) == (2, True)


def test_an_id_outside_the_vocabulary_counts_as_none():
    tokenizer = load(bos_token_id=0xFFFFFFFF, eos_token_id=4, add_bos_token=True)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (None, None, False)


def test_merges_that_lead_to_no_token_are_left_out():
    assert load(merges=["b a", "a b", "x", "", "a b c"]).encode("ab") == [2]


def test_the_first_of_two_equal_merges_counts():
    # "a b" comes before "b b"; as the last of all, it would lose to it.
    tokens = ["a", "b", "ab", "bb", "<|im_end|>"]
    tokenizer = load(tokens=tokens, token_type=None, merges=["a b", "b b", "a b"])
    assert tokenizer.encode("abb") == [2, 1]


def test_a_merge_cannot_make_a_control_token():
    tokens = ["a", "b", "ab"]
    tokenizer = load(tokens=tokens, token_type=np.array([1, 1, 3]), merges=["a b"])
    assert tokenizer.encode("ab") == [0, 1]
    assert tokenizer.encode("ab", special=True) == [2]


def test_a_byte_without_a_token_gives_none_and_keeps_its_neighbours_apart():
    assert load().encode("acb") == [0, 1]


def test_tokens_that_are_not_utf8_keep_their_bytes():
    tokenizer = load(tokens=["a", "b", "ab", "\udcff"], token_type=None)
    assert tokenizer.token_bytes(3) == b"\xff"
    assert tokenizer.encode("\udcff") == tokenizer.encode("\ufffd")


def test_an_empty_vocabulary_gives_no_ids():
    for model in ("gpt2", "llama"):
        tokenizer = load(model=model, tokens=[], token_type=None, merges=[])
        assert tokenizer.encode("text") == []


KEYS = ("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id")


@pytest.mark.parametrize("value", [None, 0, -1.5, "x", b"x", [], [[]], {}, np.zeros(3), True])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("key", [*KEYS, "add_bos_token", "add_space_prefix"])
def test_any_value_of_any_key_loads_or_is_refused(model, key, value):
    with contextlib.suppress(LlamayError):
        load(**{"model": model, key: value}).encode("ab <|im_end|>", special=True)
