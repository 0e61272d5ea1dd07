"""Texts grow as if each were alone and read from its beginning at every step."""

import pytest
import torch

from calm.errors import CalmWarning, ConfigError
from calm.noise import RowNoise, ScaledNoise
from calm.sampling.batch import Batch, Text, laid_out
from calm.sampling.next_chunk import Sampling, next_chunks
from calm.sampling.predictor import CalmPredictor
from calm.sampling.vocabulary import search_of
from tests.sampling.conftest import BACKBONE, END, FILL, make

PROMPTS = [[5, 6, 7], [4] * 9, [], [8, 9, 10, 11]]
SEEDS = [10, 11, 12, 13]


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 16, "initializer_range": 0.5}


def run(model, prompts, seeds, count, eos_token_id=END, **options) -> list[list[int]]:
    texts = [Text(prompt, seed, count, Sampling(**options)) for prompt, seed in zip(prompts, seeds, strict=True)]
    batch = Batch(CalmPredictor(model), eos_token_id, FILL)
    batch.join(texts)
    while batch.joining or batch.texts:
        batch.step()
    return [text.new for text in texts]


@torch.no_grad()
def from_the_beginning(model, prompt, seed, count) -> list[int]:
    size, noise = model.config.chunk_size, RowNoise([seed])
    prompt = prompt or [END]
    ids = [FILL] * (-len(prompt) % size) + prompt
    new: list[int] = []
    while len(new) < count:
        hidden = model.hidden_states(torch.tensor([ids + new]))[:, -1]
        chunk = model.autoencoder.tokens(model.head.sample(hidden, 1, noise)[0])[0].tolist()
        new += chunk
        if END in chunk:
            return new[: new.index(END)][:count]
    return new[:count]


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
@pytest.mark.parametrize("backbone", [BACKBONE, GPT2], ids=["llama", "gpt2"])
def test_a_batch_is_what_each_text_is_alone(chunk_size, backbone):
    model = make(chunk_size, backbone)
    count = 6
    expected = [from_the_beginning(model, p, s, count) for p, s in zip(PROMPTS, SEEDS, strict=True)]
    assert run(model, PROMPTS, SEEDS, count) == expected
    assert len({tuple(text) for text in expected}) > 1
    assert all(len(text) <= count for text in expected)


def test_a_text_that_ends_leaves_and_the_others_stay_the_same():
    model = make(2)
    prompts = [prompt for prompt in PROMPTS if prompt]  # an empty one begins with the end id itself
    free = run(model, prompts, SEEDS[:3], 8, eos_token_id=-1)
    word = free[0][3]
    stopped = run(model, prompts, SEEDS[:3], 8, eos_token_id=word)
    assert stopped == [text[: text.index(word)] if word in text else text for text in free]
    assert len(stopped[0]) < 8


def test_bad_input():
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        run(make(2), PROMPTS, SEEDS, 0)
    with pytest.raises(ConfigError, match="16"):
        run(make(2), [[3] * 40], [0], 4)
    assert (
        len(run(make(2), [[3] * 30], [0], 4, eos_token_id=-1)[0]) == 4
    )  # 15 chunks are read, the last is only written


METHODS = {
    "token": {"method": "token", "temperature": 0.5, "num_candidates": 20},
    "refilled": {"method": "token", "temperature": 0.2, "num_candidates": 10, "refill": True},
    "batch": {"method": "batch", "temperature": 0.5, "num_candidates": 20},
    "growing": {"method": "batch", "temperature": 0.5, "num_candidates": 100, "tolerance": 0.3},
    "exact": {"method": "exact", "temperature": 0.5},
    "mixture": {"method": "mixture", "temperature": 0.7, "num_candidates": 5, "top_p": 0.9},
    "noise": {"method": "noise", "temperature": 0.5},
}


@pytest.mark.parametrize(
    ("head", "options"),
    [
        (head, options)
        for head in ("energy", "chain")
        for options in METHODS.values()
        if (head, options["method"]) != ("chain", "noise")
    ],
)
def test_no_text_depends_on_those_beside_it(head, options):
    model, prompts, seeds = make(2, head=head), [[5, 6, 7], [4] * 9, [8, 9, 10, 11]], [10, 11, 12]
    together = run(model, prompts, seeds, 6, eos_token_id=-1, **options)
    alone = [run(model, [p], [s], 6, eos_token_id=-1, **options)[0] for p, s in zip(prompts, seeds, strict=True)]
    assert together == alone
    assert run(model, prompts, seeds, 6, eos_token_id=-1, **options) == together


@pytest.mark.parametrize("head", ["flow", "mean-flow", "diffusion"])
def test_other_heads(head):
    model = make(2, head=head, num_sampling_steps=3)
    for options in METHODS.values():
        if options["method"] != "exact":
            assert len(run(model, [[5, 6, 7]], [0], 4, eos_token_id=-1, **options)[0]) == 4


@torch.no_grad()
def test_a_chain_knows_its_softmaxes_at_every_temperature():
    """P(x_k | x_<k)^(1/T), normalised at each k, without candidates; counting many gives the same."""
    model, temperature, count = make(2, head="chain"), 0.5, 4000
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)).expand(count, -1)
    first = (model.words @ model.head(hidden[0], model.words[:0])[0]).softmax(0) ** (1 / temperature)
    firsts = torch.arange(40)
    second = (model.head(hidden[:40], model.words[firsts[:, None]], 1)[:, 0] @ model.words.T).softmax(-1) ** 2
    expected = (first / first.sum())[:, None] * second / second.sum(1, keepdim=True)  # (40, 40)
    for method, candidates in ((None, None), ("token", 500)):
        sampling = Sampling(temperature, candidates, method).of(model.config)
        chosen = next_chunks(model, search_of(model.autoencoder), hidden, sampling, RowNoise(list(range(count))))
        assert set(chosen.cost.draws.tolist()) == {candidates or 1}
        found = torch.bincount(chosen.chunks @ torch.tensor([40, 1]), minlength=1600).view(40, 40) / count
        error = (expected * (1 - expected) / count).sqrt()
        near = 0.02 if candidates else 1e-3  # 500 candidates have not quite arrived
        assert ((found - expected).abs() < 4.5 * error + near).all(), method
    assert Sampling().of(model.config).method == "token"  # one draw
    assert Sampling(top_p=0.9).of(model.config).method == Sampling(1.5).of(model.config).method == "mixture"
    with pytest.raises(ConfigError, match="at most 1, not 1.5"):
        Sampling(1.5).of(make(2).config)
    with pytest.raises(ConfigError, match="no noise to scale"):
        Sampling(0.5, method="noise").of(model.config)
    with pytest.raises(ConfigError, match="top_p needs probabilities"):
        Sampling(top_p=0.9).of(make(2).config)


def test_prompts_with_ids_that_the_model_has_not(model):
    for wrong in (40, -1):
        with pytest.raises(ConfigError, match=f"token {wrong}, and the model has 40"):
            run(model, [[5, wrong]], [0], 4)


def test_a_low_temperature_makes_texts_alike():
    model, prompts, seeds = make(2), [[5, 6, 7]] * 60, list(range(60))
    kinds = {
        name: len({tuple(text) for text in run(model, prompts, seeds, 2, eos_token_id=-1, **options)})
        for name, options in {
            "plain": {},
            "token": {"method": "token", "temperature": 0.1},
            "batch": {"method": "batch", "temperature": 0.1},
            "mixture": {"method": "mixture", "temperature": 0.1},
        }.items()
    }
    assert kinds["token"] < kinds["plain"] / 2
    assert kinds["batch"] < kinds["plain"] / 2
    assert kinds["mixture"] < kinds["plain"] / 2


def test_the_share_of_candidates_that_agree_is_told():
    batch = Batch(CalmPredictor(make(2)), eos_token_id=-1, pad_token_id=FILL)
    batch.join([Text([5, 6], 0, 2, Sampling(0.25, 50, "batch"))])
    (grown,) = batch.step()
    assert grown.agreement is not None
    assert 1 / 50 <= grown.agreement <= 1
    assert batch.spent.draws == 50


def test_a_model_that_never_saw_fill_gets_none():
    predictor = CalmPredictor(make(4, knows_fill=False))

    def begun(prompt):
        return laid_out(predictor, [prompt], END, FILL)[0].tolist()

    assert begun([5, 6, 7, 8, 9]) == [[[6, 7, 8, 9]]]
    assert begun([5, 6, 7, 8]) == [[[5, 6, 7, 8]]]
    assert begun([5, 6]) == [[[END, END, 5, 6]]]
    assert begun([]) == [[[END] * 4]]


# model.generate


def test_generate_continues_ragged_prompts(model):
    ids = torch.tensor([[5, 6, 7, 8], [FILL, FILL, 9, 10], [11, FILL, FILL, FILL]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]])
    found = model.generate(ids, mask, max_new_tokens=6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(found[:, :4], ids)
    seeds = torch.randint(2**62, (3,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = run(model, [[5, 6, 7, 8], [9, 10], [11]], seeds, 6)
    for row, text in zip(found[:, 4:].tolist(), expected, strict=True):
        assert row == text + [FILL] * (len(row) - len(text))
    again = model.generate(ids, mask, max_new_tokens=6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(found, again)


def test_generate_stops_inside_a_chunk(model):
    ids = torch.tensor([[5, 6, 7, 8]])

    def new(**options):
        generator = torch.Generator().manual_seed(0)
        return model.generate(ids, max_new_tokens=8, eos_token_id=-1, generator=generator, **options)[0, 4:].tolist()

    free = new()
    assert new(stop=[free[3:5]]) == free[:3]
    assert new(stop=[[99], free[:1]]) == []


def test_a_streamer_gets_the_prompt_and_chunk_after_chunk(model):
    class Streamer:
        def __init__(self):
            self.got, self.ended = [], False

        def put(self, value):
            self.got.append(value.flatten().tolist())

        def end(self):
            self.ended = True

    streamer, ids = Streamer(), torch.tensor([[5, 6, 7]])
    found = model.generate(ids, max_new_tokens=5, eos_token_id=-1, streamer=streamer)
    assert [len(piece) for piece in streamer.got] == [3, 2, 2, 1]
    assert sum(streamer.got, []) == found[0].tolist()
    assert streamer.ended
    with pytest.raises(ConfigError, match="one text"):
        model.generate(torch.ones(2, 3, dtype=torch.long), streamer=streamer)


def test_a_stop_that_has_begun_is_not_streamed(model):
    class Streamer(list):
        def put(self, value):
            self += value.flatten().tolist()

        def end(self):
            pass

    ids, options = torch.tensor([[5, 6]]), {"max_new_tokens": 8, "eos_token_id": -1}
    free = model.generate(ids, generator=torch.Generator().manual_seed(0), **options)[0].tolist()
    for stop in (free[5:8], [free[5], 39]):  # one comes over a chunk border, one only begins
        streamer = Streamer()
        found = model.generate(
            ids, generator=torch.Generator().manual_seed(0), stop=[stop], streamer=streamer, **options
        )
        assert streamer == found[0].tolist()


def test_several_end_ids(model):
    ids = torch.tensor([[5, 6]])
    options = {"max_new_tokens": 8, "generator": torch.Generator().manual_seed(0)}
    free = model.generate(ids, eos_token_id=-1, **options)[0, 2:].tolist()
    options["generator"].manual_seed(0)
    assert model.generate(ids, eos_token_id=[-1, free[3]], **options)[0, 2:].tolist() == free[: free.index(free[3])]


def test_less_noise_makes_latents_alike():
    model = make(2, head="flow", num_sampling_steps=3)  # an energy head normalises what the noise becomes
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    spread = {}
    for scale in (1.0, 0.001):
        noise = ScaledNoise(RowNoise([0, 1]), scale).rows([1])
        spread[scale] = float(model.head.sample(hidden, 200, noise).detach().std(0).mean())
    assert spread[0.001] < 0.5 * spread[1.0]


def test_one_candidate_is_temperature_one_and_that_is_told(model):
    for method in ("batch", "token"):
        options = {"temperature": 0.5, "num_candidates": 1, "method": method, "max_new_tokens": 4}
        with pytest.warns(CalmWarning, match="candidate"):
            model.generate(torch.tensor([[5, 6]]), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "above 0 and at most 1, not 0; for the likeliest text"),
        ({"temperature": 1.5}, "at most 1, not 1.5"),
        ({"temperature": float("nan")}, "not nan"),
        ({"method": "greedy"}, "method must be one of token"),
        ({"method": "tokens"}, "did you mean token"),
        ({"num_candidates": 0}, "at least 1, not 0"),
        ({"max_new_tokens": -5}, "at least 1, not -5"),
        ({"max_new_tokens": 1000}, "more than the backbone's 16 positions"),
        ({"top_p": 0.9}, "needs probabilities of tokens"),
        ({"method": "mixture", "top_p": 2}, "top_p must be above 0 and at most 1, not 2"),
        ({"tolerance": 0.1}, "for the method 'batch'"),
        ({"method": "batch", "tolerance": -1}, "from 0 to 1, not -1"),
        ({"num_beams": 4}, "no beams"),
        ({"do_sample": False}, "always samples"),
        ({"output_logits": True}, "no logits"),
        ({"temprature": 0.5}, "did you mean temperature"),
        ({"stop": [[]]}, "a stop without a token"),
        ({"stop": "fox"}, "lists of token ids"),
        ({"stop": [5]}, "lists of token ids"),
        ({"temperature": "0.5"}, "at most 1, not 0.5"),
        ({"max_new_tokens": 4.5}, "a whole number, at least 1, not 4.5"),
        ({"num_candidates": 2.5}, "a whole number, at least 1, not 2.5"),
    ],
)
def test_arguments_that_make_no_sense(model, options, message):
    with pytest.raises(ConfigError, match=message):
        model.generate(torch.tensor([[5, 6]]), **options)


def test_ids_that_nobody_names(model):
    model.config.eos_token_id = None
    with pytest.raises(ConfigError, match="no eos_token_id"):
        model.generate(torch.tensor([[5, 6]]))
    with pytest.raises(ConfigError, match="shape"):
        model.generate(torch.tensor([5, 6]), eos_token_id=0)
