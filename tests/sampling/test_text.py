"""Text is shown as soon as it is sure, and never taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm.data.tokenizer import train_bpe
from calm.errors import ConfigError
from calm.sampling.text import GrowingText

TOKENIZER = train_bpe(["the quick brown fox 漢字 🙂 naïve café"] * 3, 300)
TEXTS = st.text(st.sampled_from(list("the quick\n漢字🙂ïé")), max_size=40)


def grow(text: str, stops=(), step: int = 1) -> tuple[list[str], GrowingText]:
    growing, ids = GrowingText(TOKENIZER, stops), TOKENIZER.encode(text)
    pieces = [growing.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, growing.finish()], growing


@given(TEXTS, st.integers(1, 5))
def test_pieces_are_the_text_and_whole_characters(text, step):
    pieces, _ = grow(text, step=step)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), st.integers(1, 5))
def test_tokens_in_any_order_are_shown_as_they_are_decoded_whole(ids, step):
    """Most of these are bytes that make no characters."""
    growing = GrowingText(TOKENIZER)
    pieces = [growing.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert "".join(pieces) + growing.finish() == TOKENIZER.decode(ids)


@given(TEXTS, st.text(st.sampled_from(list("the \n漢")), min_size=1, max_size=4), st.integers(1, 5))
def test_the_text_ends_before_a_stop(text, stop, step):
    pieces, growing = grow(text, [stop], step)
    assert "".join(pieces) == text.partition(stop)[0]
    assert growing.stopped == (stop in text)


def test_of_several_stops_the_first_that_is_complete_ends_the_text():
    assert "".join(grow("the quick fox", ["quick fo", "ick"])[0]) == "the qu"
    assert "".join(grow("the quick fox", ["\n", "quick"])[0]) == "the "


def test_what_may_begin_a_stop_waits():
    growing = GrowingText(TOKENIZER, ["fox"])
    assert growing.push(TOKENIZER.encode("the fo")) == "the "
    assert growing.push(TOKENIZER.encode("o")) == "foo"
    assert growing.finish() == ""


def test_bytes_that_never_become_a_character_are_shown_in_the_end():
    growing = GrowingText(TOKENIZER)
    first = TOKENIZER.encode("🙂")[:1]
    assert growing.push(first) == ""
    assert growing.finish() == "\ufffd"


def test_an_empty_stop_is_refused():
    with pytest.raises(ConfigError, match="must have a character"):
        GrowingText(TOKENIZER, [""])
