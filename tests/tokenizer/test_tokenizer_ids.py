"""Text -> ids: the same as llama.cpp's, recorded by scripts/record_tokenizers."""

import json
import random
import string
import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamay.gguf import open_gguf
from llamay.tokenizer import Tokenizer

TESTDATA = Path(__file__).parents[2] / "testdata"
EXPECTED = json.loads((TESTDATA / "tokenizers" / "expected.json").read_text())
VARIANTS = EXPECTED["variants"]
TEXTS = EXPECTED["texts"]
GOLDEN = json.loads((TESTDATA / "golden" / "smollm2-135m-instruct-q4_1.json").read_text())

every_variant = pytest.mark.parametrize("variant", VARIANTS)


@cache
def metadata_of(variant):
    with open_gguf(TESTDATA / "tokenizers" / f"{VARIANTS[variant]['vocabulary']}.gguf") as file:
        return dict(file.metadata) | VARIANTS[variant]["metadata"]


@cache
def tokenizer_of(variant):
    return Tokenizer.from_metadata(metadata_of(variant), variant)


@cache
def default_tokenizer(path):
    with open_gguf(path) as file:
        return Tokenizer.from_metadata(file.metadata, path.name)


@every_variant
def test_text_without_control_tokens_has_llama_cpps_ids(variant):
    tokenizer = tokenizer_of(variant)
    for text, ids in zip(TEXTS, VARIANTS[variant]["ids_plain"], strict=True):
        assert tokenizer.encode(text) == ids, text


@every_variant
def test_text_with_control_tokens_has_llama_cpps_ids(variant):
    tokenizer = tokenizer_of(variant)
    differing = VARIANTS[variant]["ids_special"]
    assert len(differing) >= 4
    for i, (text, plain) in enumerate(zip(TEXTS, VARIANTS[variant]["ids_plain"], strict=True)):
        assert tokenizer.encode(text, special=True) == differing.get(str(i), plain), text


@every_variant
def test_roles_of_tokens_are_llama_cpps(variant):
    tokenizer = tokenizer_of(variant)
    expected = VARIANTS[variant]
    ids = range(tokenizer.vocab_size)
    assert sorted(tokenizer.stop_ids) == expected["stop_ids"]
    assert [i for i in ids if tokenizer.is_control(i)] == expected["control_ids"]
    assert tokenizer.bos_id == expected["bos_id"]
    assert tokenizer.eos_id == expected["eos_id"]
    assert tokenizer.add_bos == expected["add_bos"]
    pieces = EXPECTED["token_bytes"][expected["vocabulary"]]
    assert [tokenizer.token_bytes(i).hex() for i in ids] == pieces


@pytest.mark.model
def test_the_default_model_has_llama_cpps_ids(default_model_path):
    tokenizer = default_tokenizer(default_model_path)
    for case in GOLDEN["tokenize"]:
        assert tokenizer.encode(case["text"]) == case["ids_plain"], case["text"]
        assert tokenizer.encode(case["text"], special=True) == case["ids_special"], case["text"]


@every_variant
def test_plain_text_never_gives_a_token_of_control_type(variant):
    tokenizer = tokenizer_of(variant)
    types = metadata_of(variant)["tokenizer.ggml.token_type"]
    control = {i for i, kind in enumerate(types) if kind in (2, 3)}
    spelled = [tokenizer.token_text(i) for i in control]
    randomly = random.Random(1)
    for _ in range(200):
        text = "".join(randomly.choices([*spelled, " ", "x", "\n", "<", ">"], k=6))
        assert not control & set(tokenizer.encode(text)), text


@every_variant
@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back_from_its_ids(variant, text):
    tokenizer = tokenizer_of(variant)
    # The byte vocabulary lacks 0xF1, the first byte of planes 4 to 7; U+2581 stands for a space
    # in SentencePiece, and Phi-3 drops the white space after special tokens.
    text = "".join(char for char in text if not 0x40000 <= ord(char) < 0x80000 and char != "\u2581")
    assert tokenizer.decode(tokenizer.encode(text), start_of_text=True) == text


@every_variant
def test_lone_surrogates_count_as_replacement_characters(variant):
    tokenizer = tokenizer_of(variant)
    assert tokenizer.encode("a\ud800b\udcff") == tokenizer.encode("a\ufffdb\ufffd")


@every_variant
def test_a_guard_keeps_a_control_token_out(variant):
    tokenizer = tokenizer_of(variant)
    start = tokenizer.token_id("<|im_start|>")
    text = "<|im_start|>x<|im_start|>"
    assert tokenizer.encode(text, special=True).count(start) == 2
    assert tokenizer.encode(text, special=True, guards=[0]).count(start) == 1
    assert tokenizer.encode(text, special=True, guards=[0])[-1] == start
    assert tokenizer.encode(text, special=True, guards=[5, 20]).count(start) == 0
    # Where the first one ends and the second one has not begun, a guard changes nothing.
    assert tokenizer.encode(text, special=True, guards=[12]).count(start) == 2


def test_text_that_continues_has_no_space_before_it():
    tokenizer = tokenizer_of("spm")
    assert tokenizer.encode("the") == tokenizer_of("spm-no-prefix").encode(" the")
    assert tokenizer.encode("the", continues=True) == tokenizer_of("spm-no-prefix").encode("the")


@pytest.mark.parametrize("variant", ["smollm", "spm"])
@pytest.mark.parametrize("text", ["a", "\n", "🎉", "word 12, ", "<|im_start|"])
def test_a_megabyte_takes_less_than_two_seconds(variant, text):
    tokenizer = tokenizer_of(variant)
    long = text * (1_000_000 // len(text.encode()))
    start = time.process_time()
    ids = tokenizer.encode(long, special=True)
    assert time.process_time() - start < 2
    assert tokenizer.decode(ids, start_of_text=True) == long


def test_a_large_vocabulary_loads_in_half_a_second():
    """151,000 made-up tokens, as many as Qwen 2.5 has."""
    letters = string.ascii_letters + string.digits
    pairs = [a + b for a in letters for b in letters]
    merges = [f"{pair[0]} {pair[1]}" for pair in pairs]
    longer = [(a, b) for a in pairs for b in pairs[:40]][: 151_000 - len(pairs) - 256]
    merges += [f"{a} {b}" for a, b in longer]
    tokens = [*map(chr, range(256)), *pairs, *(a + b for a, b in longer)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
    }
    seconds = []
    for _ in range(3):
        start = time.process_time()
        tokenizer = Tokenizer.from_metadata(metadata, "large")
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5
    assert tokenizer.encode("aaab") == [tokens.index("aaab")]
