"""Texts that join and leave a batch at any step are what they are alone."""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calm.errors import ConfigError
from calm.noise import RowNoise
from calm.sampling.batch import Batch, Text
from calm.sampling.next_chunk import Sampling
from calm.sampling.predictor import CalmPredictor, SoftmaxPredictor
from tests.sampling.conftest import FILL, make

WAYS = [Sampling(), Sampling(0.5, 20, "token"), Sampling(0.5, 20, "batch"), Sampling(0.7, 5, "mixture")]
END_WORD = 25  # not too frequent


def softmax_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, max_position_embeddings=64, initializer_range=0.5, **sizes)
    return LlamaForCausalLM(config).eval()


def texts_of(generator: random.Random, count: int, ways: list[Sampling]) -> list[Text]:
    return [
        Text(
            [generator.randrange(3, 40) for _ in range(generator.randrange(12))],
            seed,
            generator.randrange(1, 10),
            generator.choice(ways),
        )
        for seed in range(count)
    ]


def alone(predictor, text: Text, eos_token_id: int) -> list[int]:
    batch, copy = Batch(predictor, eos_token_id, FILL), Text(text.prompt, text.seed, text.max_new_tokens, text.sampling)
    batch.join([copy])
    while batch.joining or batch.texts:
        batch.step()
    return copy.new


@pytest.mark.parametrize("kind", ["energy", "chain", "softmax"])
def test_texts_that_come_and_go_at_random_are_what_they_are_alone(kind):
    predictor = SoftmaxPredictor(softmax_model()) if kind == "softmax" else CalmPredictor(make(2, head=kind))
    ways = [Sampling(), Sampling(0.5), Sampling(top_p=0.8)] if kind == "softmax" else WAYS
    ends = set()
    for case in range(4):
        generator = random.Random(case)
        texts = texts_of(generator, 12, ways)
        expected = {id(text): alone(predictor, text, END_WORD) for text in texts}
        batch, waiting, gone = Batch(predictor, END_WORD, FILL), list(texts), set()
        while waiting or batch.texts:
            joining, waiting = waiting[: (n := generator.randrange(3))], waiting[n:]
            batch.join(joining)
            if not (batch.joining or batch.texts):
                continue
            grown = batch.step()
            assert len(grown) == len({id(step.text) for step in grown})
            if batch.texts and generator.random() < 0.3:
                leaving = generator.choice(batch.texts)
                gone.add(id(leaving))
                batch.leave([leaving])
        for text in texts:
            found = expected[id(text)]
            assert text.new == (found[: len(text.new)] if id(text) in gone else found)
        assert 0 < len(gone) < len(texts)
        ends |= {text.met_end for text in texts if text.ended}
    assert ends == {True, False}  # both ways to end were met


def test_the_room_of_long_texts_is_given_back():
    batch = Batch(CalmPredictor(make(2)), -1, FILL)
    batch.join([Text([5] * 20, 0, 2), Text([5], 1, 8)])
    batch.step()
    assert batch.there.shape == (1, 1)  # the long text has left, and the places that only it had
    batch.step()
    assert batch.there.shape == (1, 2)
    assert batch.cache.get_seq_length() == 2
    batch.leave(batch.texts)
    assert batch.texts == []
    assert batch.cache.get_seq_length() == 0


def test_a_text_may_leave_before_its_first_step():
    batch, text = Batch(CalmPredictor(make(2)), -1, FILL), Text([5], 0, 4)
    batch.join([text, Text([6], 1, 4)])
    batch.leave([text])
    assert [grown.text.seed for grown in batch.step()] == [1]


def test_what_a_model_cannot_do_is_refused_before_the_text_joins():
    batch = Batch(SoftmaxPredictor(softmax_model()), -1, FILL)
    with pytest.raises(ConfigError, match="no method"):
        batch.join([Text([5], 0, 4, Sampling(0.5, method="token"))])
    with pytest.raises(ConfigError, match="64 positions"):
        batch.join([Text([5] * 60, 0, 10)])
    with pytest.raises(ConfigError, match="40 words"):
        batch.join([Text([40], 0, 10)])
    assert not batch.joining


@torch.no_grad()
def test_a_softmax_model_is_drawn_from_as_it_says():
    """Chi-square of 4,000 first tokens at T = 0.5 against its own probabilities, squared and normalised."""
    model, count = softmax_model(), 4000
    predictor = SoftmaxPredictor(model)
    logits = model(torch.tensor([[5, 6]])).logits[0, -1]
    expected = (2 * logits).softmax(-1)
    hidden = model.model(torch.tensor([[5, 6]])).last_hidden_state[:, -1].expand(count, -1)
    drawn = predictor.choose(hidden, Sampling(0.5), RowNoise(list(range(count)))).chunks[:, 0]
    found = torch.bincount(drawn, minlength=40)
    often = expected * count >= 5
    statistic = ((found - expected * count) ** 2 / (expected * count))[often].sum()
    assert statistic < int(often.sum()) + 4 * (2 * int(often.sum())) ** 0.5  # mean and spread of a chi-square
