"""Incremental detokenization: text is emitted as soon as it is certain, and never retracted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm.data.tokenizer import train_bpe
from calm.errors import ConfigError
from calm.generate.text import Detokenizer

TOKENIZER = train_bpe(["the quick brown fox 漢字 🙂 naïve café"] * 3, 300)
TEXTS = st.text(st.sampled_from(list("the quick\n漢字🙂ïé")), max_size=40)


def detokenize(text: str, stops=(), step: int = 1) -> tuple[list[str], Detokenizer]:
    """Push the tokens of a text, `step` at a time; returns what was emitted each time, and at the end."""
    detokenizer, ids = Detokenizer(TOKENIZER, stops), TOKENIZER.encode(text)
    pieces = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.finish()], detokenizer


@given(TEXTS, st.integers(1, 5))
def test_pieces_concatenate_to_the_text_and_hold_whole_characters(text, step):
    pieces, _ = detokenize(text, step=step)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), st.integers(1, 5))
def test_arbitrary_tokens_are_emitted_as_they_decode_at_once(ids, step):
    """Most of these are bytes that form no characters."""
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert "".join(pieces) + detokenizer.finish() == TOKENIZER.decode(ids)


@given(TEXTS, st.text(st.sampled_from(list("the \n漢")), min_size=1, max_size=4), st.integers(1, 5))
def test_text_ends_before_a_stop_string(text, stop, step):
    pieces, detokenizer = detokenize(text, [stop], step)
    assert "".join(pieces) == text.partition(stop)[0]
    assert detokenizer.stopped == (stop in text)


def test_first_complete_stop_string_ends_the_text():
    assert "".join(detokenize("the quick fox", ["quick fo", "ick"])[0]) == "the qu"
    assert "".join(detokenize("the quick fox", ["\n", "quick"])[0]) == "the "


def test_partial_stop_string_is_held_back():
    detokenizer = Detokenizer(TOKENIZER, ["fox"])
    assert detokenizer.push(TOKENIZER.encode("the fo")) == "the "
    assert detokenizer.push(TOKENIZER.encode("o")) == "foo"
    assert detokenizer.finish() == ""


def test_incomplete_characters_are_emitted_at_the_end():
    detokenizer = Detokenizer(TOKENIZER)
    first = TOKENIZER.encode("🙂")[:1]
    assert detokenizer.push(first) == ""
    assert detokenizer.finish() == "\ufffd"


def test_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="must not be empty"):
        Detokenizer(TOKENIZER, [""])
