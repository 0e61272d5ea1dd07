"""Texts grow as if each were alone and read from its beginning at every step."""

import pytest
import torch

from calm.errors import ConfigError
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig
from calm.noise import RowNoise
from calm.sampling.generator import Generation

BACKBONE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.5,
}
END, FILL = 0, 1
PROMPTS = [[5, 6, 7], [4] * 9, [], [8, 9, 10, 11]]
SEEDS = [10, 11, 12, 13]


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 16, "initializer_range": 0.5}


def make(chunk_size: int, backbone=BACKBONE) -> CalmForCausalLM:
    torch.manual_seed(0)
    inner = {"vocab_size": 40, "chunk_size": chunk_size, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    model = CalmForCausalLM(CalmConfig(backbone, {**inner, "initializer_range": 0.5})).eval()
    torch.nn.init.normal_(model.head.latent.weight)
    return model


def run(model, prompts, seeds, count, end_id=END) -> list[list[int]]:
    generation = Generation(model, prompts, seeds, max_new_tokens=count, end_id=end_id, fill_id=FILL)
    texts = [[] for _ in prompts]
    while generation.running:
        for number, tokens in generation.step().items():
            texts[number] += tokens
    return texts


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
    free = run(model, prompts, SEEDS[:3], 8, end_id=-1)
    word = free[0][3]
    stopped = run(model, prompts, SEEDS[:3], 8, end_id=word)
    assert stopped == [text[: text.index(word)] if word in text else text for text in free]
    assert len(stopped[0]) < 8


def test_bad_input():
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        run(make(2), PROMPTS, SEEDS, 0)
    with pytest.raises(ConfigError, match="16"):
        run(make(2), [[3] * 40], [0], 4)
    assert len(run(make(2), [[3] * 30], [0], 4, end_id=-1)[0]) == 4  # 15 chunks are read, the last is only written
