"""The probit head: noise that changes all logits alike, states that are read like tokens, joint distributions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from calm.autoencoder import Autoencoder, AutoencoderConfig
from calm.heads.chain import ChainHead
from calm.heads.probit import GUMBEL_STD, ProbitHead, whitening_noise
from calm.noise import RowNoise, ScaledNoise
from calm.train.optimizer import adamw

V, K, SIZE, HIDDEN = 12, 2, 10, 8


def make_head(**fields: Any) -> ProbitHead:
    torch.manual_seed(0)
    sizes = {"latent_size": 4, "hidden_size": SIZE, "intermediate_size": 8, "vocab_size": V, "chunk_size": K}
    autoencoder = Autoencoder(AutoencoderConfig(**sizes, initializer_range=1.0)).requires_grad_(False)
    settings = {"untied_lm_head": False, "noise_scale": 1.25, "num_read_tokens": V} | fields
    config = SimpleNamespace(hidden_size=HIDDEN, chunk_size=K, vocab_size=V, num_head_layers=1, **settings)
    head = ProbitHead(config, autoencoder)
    head.config = config  # pyright: ignore[reportAttributeAccessIssue]
    head.reset_parameters()
    head.initialize_from(autoencoder)
    return head


def frequencies(chunks: Tensor) -> Tensor:
    """Of chunks of two tokens (n, 2): (V, V)."""
    return (chunks[:, 0] * V + chunks[:, 1]).bincount(minlength=V * V).view(V, V) / len(chunks)


def test_noise_changes_logits_alike():
    generator = torch.Generator().manual_seed(0)
    vocabulary = torch.randn(300, 20, generator=generator) @ torch.randn(20, 20, generator=generator) + 3  # correlated
    factor = whitening_noise(vocabulary, 1.5)
    variances = ((vocabulary - vocabulary.mean(0)) @ factor.T).square().sum(-1)  # of each token's logit
    assert variances.mean().item() == pytest.approx(1.5**2, rel=0.1)  # a small ridge keeps the inverse finite
    assert variances.max() < 4 * 1.5**2  # with the same noise in all directions it is 20 times the mean


@torch.no_grad()
def test_noise_follows_token_vectors_that_are_trained():
    head = make_head(untied_lm_head=True)
    before = head.noise_factor()
    assert head.noise_factor() is before
    head.lm_head.weight.mul_(2)  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(head.noise_factor(), before / 2)


def test_noise_follows_a_fused_optimizer():
    head = make_head(untied_lm_head=True)
    optimizer = adamw(head, (0.9, 0.95), 1e-8, 0.0)
    before = head.eval().noise_factor()
    head.train()
    head.loss(torch.randn(2, 3, HIDDEN), torch.randint(V, (2, 3, K))).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    assert not torch.allclose(head.eval().noise_factor(), before)


def test_the_argmax_of_noisy_logits_is_nearly_a_sample_of_the_softmax():
    generator = torch.Generator().manual_seed(0)
    vocabulary, state = (torch.randn(shape, generator=generator) for shape in ((50, 64), (64,)))
    state = 2 * state / state.norm()  # logits of standard deviation 2
    probabilities = (vocabulary @ state).softmax(0)

    def difference(scale: float) -> float:
        noise = torch.randn(20_000, 64, generator=generator) @ whitening_noise(vocabulary, scale * GUMBEL_STD)
        drawn = ((state + noise) @ vocabulary.T).argmax(-1).bincount(minlength=50) / 20_000
        return 0.5 * (drawn - probabilities).abs().sum().item()

    assert difference(1.5) < 0.1
    assert difference(0.4) > 0.5


@torch.no_grad()
def test_states_are_read_as_the_tokens_that_they_decode_to():
    """Attention over all tokens, or over the first of them."""
    head = make_head()
    states = 8 * head.vocabulary / head.vocabulary.norm(dim=-1, keepdim=True) ** 2 + 0.01 * torch.randn(V, SIZE)
    torch.testing.assert_close(head.read(states), head.vocabulary[head.tokens_of(states)], rtol=0, atol=0.05)
    head.num_read_tokens = 5
    assert not torch.allclose(head.read(states)[5:], head.vocabulary[5:], rtol=0, atol=0.5)
    torch.testing.assert_close(head.read(states[:5]), head.vocabulary[:5], rtol=0, atol=0.05)


@torch.no_grad()
def test_the_weights_of_a_chain_head_work_as_a_probit_head():
    probit = make_head()
    chain = ChainHead(probit.config, probit.autoencoder)
    chain.load_state_dict(probit.state_dict())
    hidden, chunks = torch.randn(2, 3, HIDDEN), torch.randint(V, (2, 3, K))
    assert torch.equal(chain.loss(hidden, chunks), probit.loss(hidden, chunks))
    first = chain.propose(hidden, 1).log_probs(chunks[..., :0])
    torch.testing.assert_close(probit.propose(hidden, 1).log_probs(chunks[..., :0]), first)


def test_it_learns_a_joint_distribution():
    """Two contexts with different joint distributions of two tokens; independent tokens would miss the second half."""
    head = make_head()
    generator = torch.Generator().manual_seed(1)
    contexts = torch.randn(2, HIDDEN, generator=generator)
    joint = torch.zeros(2, V, V)
    for context in range(2):
        firsts = torch.randperm(V, generator=generator)[:4]
        for first, probability in zip(firsts, (0.4, 0.3, 0.2, 0.1), strict=True):
            seconds = torch.randperm(V, generator=generator)[:2]
            joint[context, first, seconds] = probability * torch.tensor([0.75, 0.25])
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for step in range(400):
        which = torch.randint(2, (8, 16), generator=generator)
        chunks = torch.multinomial(joint.flatten(1)[which.flatten()], 1, generator=generator)[:, 0]
        chunks = torch.stack([chunks // V, chunks % V], dim=-1).view(8, 16, 2)
        loss = head.loss(contexts[which], chunks, noise=RowNoise([8 * step + row for row in range(8)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        drawn = head.propose(contexts, 10_000, RowNoise([0, 1])).tokens()
    for context in range(2):
        truth, found = joint[context], frequencies(drawn[:, context])
        independent = truth.sum(1)[:, None] * truth.sum(0)
        assert 0.5 * (independent - truth).abs().sum() > 0.4
        assert 0.5 * (found - truth).abs().sum() < 0.25


@torch.no_grad()
def test_less_noise_is_a_lower_temperature():
    head, hidden = make_head(), torch.randn(3, HIDDEN)
    collisions = []
    for temperature in (1.0, 0.5, 0.2, 0.0):
        noise = ScaledNoise(RowNoise([0, 1, 2]), torch.full((3,), temperature))
        tokens = head.propose(hidden, 400, noise).tokens()  # (n, 3, K)
        collisions.append((tokens[:200] == tokens[200:]).all(-1).float().mean().item())
    assert collisions == sorted(collisions)
    assert collisions[0] < 0.9
    assert collisions[-1] == 1
