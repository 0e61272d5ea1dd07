"""Continuous batching: a sequence's output depends neither on the batch nor on the KV cache."""

import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from calm.errors import ConfigError
from calm.generate.engine import Engine, Sequence
from calm.generate.sampler import SamplingParams
from calm.hf import HFTransformer
from calm.llama import LlamaConfig
from calm.noise import RowNoise
from calm.transformer import Transformer
from tests.generate.conftest import BACKBONE, EOS, GPT2, PAD, VOCAB_SIZE, build_model

PROMPTS = [[5, 6, 7], [4] * 9, [], [8, 9, 10, 11]]
SEEDS = [10, 11, 12, 13]
CALM_PARAMS = [
    SamplingParams(),
    SamplingParams(0.5, 20, "token"),
    SamplingParams(0.5, 20, "batch"),
    SamplingParams(0.7, 5, "mixture"),
]
TRANSFORMER_PARAMS = [SamplingParams(), SamplingParams(0.5), SamplingParams(top_p=0.8)]
RARE_EOS = {"energy": 20, "chain": 20, "probit": 20, "transformer": 25, "gpt2": 25}  # sampled, but not too often
METHODS = {
    "token": {"method": "token", "temperature": 0.5, "num_candidates": 20},
    "refill": {"method": "token", "temperature": 0.2, "num_candidates": 10, "refill": True},
    "batch": {"method": "batch", "temperature": 0.5, "num_candidates": 20},
    "tolerance": {"method": "batch", "temperature": 0.5, "num_candidates": 100, "tolerance": 0.3},
    "exact": {"method": "exact", "temperature": 0.5},
    "mixture": {"method": "mixture", "temperature": 0.7, "num_candidates": 5, "top_p": 0.9},
    "noise": {"method": "noise", "temperature": 0.5},
}


def build_transformer() -> Transformer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=64, initializer_range=0.5, **sizes)
    return Transformer(config).eval()


def build_gpt2() -> HFTransformer:
    torch.manual_seed(0)
    sizes = {name: value for name, value in GPT2.items() if name not in ("model_type", "n_positions")}
    return HFTransformer(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_positions=64, **sizes))).eval()


def generate(model, prompts, seeds, max_new_tokens, eos_token_id=EOS, **options) -> list[list[int]]:
    """Outputs of a batch of sequences that are added at once."""
    params = SamplingParams(**options)
    sequences = [Sequence(prompt, seed, max_new_tokens, params) for prompt, seed in zip(prompts, seeds, strict=True)]
    return run(Engine(model, eos_token_id, PAD), sequences)


def run(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    engine.add(sequences)
    while engine.waiting or engine.running:
        engine.step()
    return [sequence.output_ids for sequence in sequences]


@torch.no_grad()
def generate_without_cache(model, prompt, seed, max_new_tokens) -> list[int]:
    """Reference: the whole sequence is read again for every chunk."""
    size, noise = model.chunk_size, RowNoise([seed])
    prompt = prompt or [EOS]
    ids = [PAD] * (-len(prompt) % size) + prompt
    output: list[int] = []
    while len(output) < max_new_tokens:
        hidden = model.hidden_states(torch.tensor([ids + output]).unflatten(1, (-1, size)))[:, -1]
        chunk = model.autoencoder.tokens(model.head.sample(hidden, 1, noise)[0])[0].tolist()
        output += chunk
        if EOS in chunk:
            return output[: output.index(EOS)][:max_new_tokens]
    return output[:max_new_tokens]


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
@pytest.mark.parametrize("backbone", [BACKBONE, GPT2], ids=["llama", "gpt2"])
def test_batched_generation_equals_generation_without_batch_and_cache(chunk_size, backbone):
    model = build_model(chunk_size, backbone)
    expected = [generate_without_cache(model, p, s, 6) for p, s in zip(PROMPTS, SEEDS, strict=True)]
    assert generate(model, PROMPTS, SEEDS, 6) == expected
    assert len({tuple(output) for output in expected}) > 1
    assert all(len(output) <= 6 for output in expected)


@pytest.mark.parametrize(
    ("head", "options"),
    [
        pytest.param(head, options, id=f"{head}-{name}")
        for head in ("energy", "chain", "probit")
        for name, options in METHODS.items()
        if (head, name) != ("chain", "noise")
    ],
)
def test_output_does_not_depend_on_the_batch(head, options):
    model, prompts, seeds = build_model(2, head=head), [[5, 6, 7], [4] * 9, [8, 9, 10, 11]], [10, 11, 12]
    batched = generate(model, prompts, seeds, 6, eos_token_id=-1, **options)
    alone = [generate(model, [p], [s], 6, eos_token_id=-1, **options)[0] for p, s in zip(prompts, seeds, strict=True)]
    assert batched == alone
    assert generate(model, prompts, seeds, 6, eos_token_id=-1, **options) == batched


@pytest.mark.parametrize("kind", ["energy", "chain", "probit", "transformer", "gpt2"])
def test_output_does_not_depend_on_sequences_that_are_added_and_removed(kind):
    if kind in ("energy", "chain", "probit"):
        model, all_params = build_model(2, head=kind), CALM_PARAMS
    else:
        model, all_params = build_transformer() if kind == "transformer" else build_gpt2(), TRANSFORMER_PARAMS
    hit_eos = set()
    for case in range(4):
        rng = random.Random(case)
        sequences = random_sequences(rng, 12, all_params)
        expected = {id(sequence): generate_alone(model, sequence, RARE_EOS[kind]) for sequence in sequences}
        engine, later, removed = Engine(model, RARE_EOS[kind], PAD), list(sequences), set()
        while later or engine.running:
            added, later = later[: (n := rng.randrange(3))], later[n:]
            engine.add(added)
            if not (engine.waiting or engine.running):
                continue
            outputs = engine.step()
            assert len(outputs) == len({id(output.sequence) for output in outputs})
            if engine.running and rng.random() < 0.3:
                sequence = rng.choice(engine.running)
                removed.add(id(sequence))
                engine.remove([sequence])
        for sequence in sequences:
            whole = expected[id(sequence)]
            assert sequence.output_ids == (whole[: len(sequence.output_ids)] if id(sequence) in removed else whole)
        assert 0 < len(removed) < len(sequences)
        hit_eos |= {sequence.hit_eos for sequence in sequences if sequence.finished}
    assert hit_eos == {True, False}  # some ended at the end-of-text token, some at their maximum length


def random_sequences(rng: random.Random, count: int, all_params: list[SamplingParams]) -> list[Sequence]:
    return [
        Sequence(
            [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(12))],
            seed,
            rng.randrange(1, 10),
            rng.choice(all_params),
        )
        for seed in range(count)
    ]


def generate_alone(model, sequence: Sequence, eos_token_id: int) -> list[int]:
    copy = Sequence(sequence.prompt, sequence.seed, sequence.max_new_tokens, sequence.params)
    return run(Engine(model, eos_token_id, PAD), [copy])[0]


def test_finished_sequences_are_removed_without_changing_the_others():
    model = build_model(2)
    prompts = [prompt for prompt in PROMPTS if prompt]  # an empty one begins with the end-of-text token itself
    unstopped = generate(model, prompts, SEEDS[:3], 8, eos_token_id=-1)
    eos = unstopped[0][3]
    stopped = generate(model, prompts, SEEDS[:3], 8, eos_token_id=eos)
    assert stopped == [output[: output.index(eos)] if eos in output else output for output in unstopped]
    assert len(stopped[0]) < 8


def test_cache_of_removed_sequences_is_freed():
    engine = Engine(build_model(2), -1, PAD)
    engine.add([Sequence([5] * 20, 0, 2), Sequence([5], 1, 8)])
    engine.step()
    assert engine.batch.lengths == [0, 1]  # the long sequence is finished, and its slot is free
    engine.add([Sequence([6] * 3, 2, 8)])
    memory = [id(part) for part in engine.batch.cache.keys]
    engine.step()
    assert engine.batch.lengths == [2, 2]  # a new sequence took it
    assert memory == [id(part) for part in engine.batch.cache.keys]
    engine.remove(engine.running)
    assert engine.running == engine.slots == engine.batch.lengths == []


def test_waiting_sequences_can_be_removed():
    engine, sequence = Engine(build_model(2), -1, PAD), Sequence([5], 0, 4)
    engine.add([sequence, Sequence([6], 1, 4)])
    engine.remove([sequence])
    assert [output.sequence.seed for output in engine.step()] == [1]


def test_agreement_and_draws_are_reported():
    engine = Engine(build_model(2), eos_token_id=-1, pad_token_id=PAD)
    engine.add([Sequence([5, 6], 0, 2, SamplingParams(0.25, 50, "batch"))])
    (output,) = engine.step()
    assert output.agreement is not None
    assert 1 / 50 <= output.agreement <= 1
    assert engine.stats.draws == 50


def test_prompts_are_padded_at_the_front_to_whole_chunks():
    engine = Engine(build_model(4), EOS, PAD)
    chunks, lengths = engine._pad([[5, 6, 7, 8, 9], [5, 6], []])
    assert chunks.tolist() == [
        [[PAD, PAD, PAD, 5], [6, 7, 8, 9]],
        [[PAD, PAD, 5, 6], [PAD] * 4],
        [[PAD, PAD, PAD, EOS], [PAD] * 4],
    ]
    assert lengths == [2, 1, 1]


def test_model_trained_without_front_padding_gets_none():
    engine = Engine(build_model(4, front_padding=False), EOS, PAD)

    def first_chunks(prompt):
        return engine._pad([prompt])[0].tolist()

    assert first_chunks([5, 6, 7, 8, 9]) == [[[6, 7, 8, 9]]]
    assert first_chunks([5, 6, 7, 8]) == [[[5, 6, 7, 8]]]
    assert first_chunks([5, 6]) == [[[EOS, EOS, 5, 6]]]
    assert first_chunks([]) == [[[EOS] * 4]]


def test_length_limits(model):
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        generate(model, PROMPTS, SEEDS, 0)
    with pytest.raises(ConfigError, match="21 chunks exceed the backbone's 16 positions"):
        generate(model, [[3] * 40], [0], 4)
    outputs = generate(model, [[3] * 30], [0], 4, eos_token_id=-1)  # the 17th chunk is sampled, but never read
    assert len(outputs[0]) == 4
    with pytest.raises(ConfigError, match="17 chunks exceed"):
        generate(model, [[3] * 30], [0], 5)


@pytest.mark.parametrize("token", [VOCAB_SIZE, -1])
def test_token_ids_out_of_range_are_refused(model, token):
    with pytest.raises(ConfigError, match=f"token id {token} is out of range: the vocabulary has 40 entries"):
        generate(model, [[5, token]], [0], 4)


def test_invalid_sequences_are_refused_when_added():
    engine = Engine(build_transformer(), -1, PAD)
    with pytest.raises(ConfigError, match="'token' is not available for this model"):
        engine.add([Sequence([5], 0, 4, SamplingParams(0.5, method="token"))])
    with pytest.raises(ConfigError, match="num_candidates has no effect"):
        engine.add([Sequence([5], 0, 4, SamplingParams(0.5, 20))])
    with pytest.raises(ConfigError, match="69 tokens exceed the backbone's 64 positions"):
        engine.add([Sequence([5] * 60, 0, 10)])
    with pytest.raises(ConfigError, match="40 entries"):
        engine.add([Sequence([40], 0, 10)])
    assert not engine.waiting
