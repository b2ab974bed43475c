from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from llamay.engine.stop_text import StopText


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where an answer ends that is read letter by letter until some stop text is complete."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return end - max(map(len, found))
    return None


LETTERS = st.text("ab", max_size=12)


@given(
    chunks=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_a_stop_text_ends_the_answer_however_the_text_is_cut(
    chunks: list[str], stops: list[str]
) -> None:
    text, watch, shown = "".join(chunks), StopText(stops), ""
    end = first_stop(text, stops)
    expected = text if end is None else text[:end]
    for chunk in chunks:
        shown += watch.feed(chunk)
        assert expected.startswith(shown)
    assert watch.found == (end is not None)
    assert shown + watch.flush() == expected
    assert watch.flush() == ""


@given(chunks=st.lists(LETTERS), stops=st.lists(st.text("ab", min_size=1, max_size=5)))
@settings(max_examples=150, deadline=None)
def test_no_more_is_held_back_than_could_become_a_stop_text(
    chunks: list[str], stops: list[str]
) -> None:
    watch, text, shown = StopText(stops), "", ""
    for chunk in chunks:
        text += chunk
        shown += watch.feed(chunk)
        if watch.found:
            return
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
