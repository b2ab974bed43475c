"""Ids -> text, one at a time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamay.tokenizer import StreamingDecoder
from tests.tokenizer.test_tokenizer_ids import default_tokenizer, every_variant, tokenizer_of


def streamed(tokenizer, ids):
    decoder = StreamingDecoder(tokenizer)
    return [*map(decoder.feed, ids), decoder.flush()]


def joined_bytes(tokenizer, ids):
    return b"".join(map(tokenizer.token_bytes, ids))


@every_variant
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_text_of_all_ids(variant, data):
    tokenizer = tokenizer_of(variant)
    # Half of them from the first 300, where the tokens of single bytes are.
    token_id = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 300)
    ids = data.draw(st.lists(token_id))
    expected = joined_bytes(tokenizer, ids).decode("utf-8", "replace")
    assert "".join(streamed(tokenizer, ids)) == expected
    assert tokenizer.decode(ids) == expected


@pytest.mark.model
def test_pieces_of_the_default_model_joined_are_the_text_of_all_ids(default_model_path):
    tokenizer = default_tokenizer(default_model_path)
    randomly = random.Random(2)
    for _ in range(300):
        ids = randomly.choices(range(tokenizer.vocab_size), k=randomly.randrange(1, 60))
        expected = joined_bytes(tokenizer, ids).decode("utf-8", "replace")
        assert "".join(streamed(tokenizer, ids)) == expected


def test_a_character_appears_only_when_it_is_whole():
    tokenizer = tokenizer_of("spm")
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "é👍".encode()]
    assert streamed(tokenizer, ids) == ["", "é", "", "", "", "👍", ""]


def test_a_character_that_stays_incomplete_is_replaced_at_the_end():
    tokenizer = tokenizer_of("spm")
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in b"\xf0\x9f"]
    assert streamed(tokenizer, ids) == ["", "", "\ufffd"]


def test_control_tokens_give_no_text_and_do_not_split_a_character():
    tokenizer = tokenizer_of("spm")
    first, second = (tokenizer.token_id(f"<0x{byte:02X}>") for byte in "é".encode())
    assert streamed(tokenizer, [first, tokenizer.token_id("<|im_end|>"), second]) == [
        "",
        "",
        "é",
        "",
    ]


def test_the_space_that_encode_put_first_is_taken_away_once():
    tokenizer = tokenizer_of("spm")
    ids = tokenizer.encode("  the")
    assert tokenizer.decode(ids) == "   the"
    decoder = StreamingDecoder(tokenizer, start_of_text=True)
    assert "".join(map(decoder.feed, [tokenizer.bos_id, *ids])) == "  the"
