"""Losses on a simulated GPU at the paper's sizes: no host synchronisation, and few kernels."""

import pytest
import torch

from calm.autoencoder import Posterior
from calm.scores import energy
from calm.scores.energy import energy_loss
from calm.scores.vocabulary import VocabularySubset, token_losses, vocabulary_cross_entropy
from tests.gpu import GPU, simulated_gpu

TOKENS = 256 * 8192 // 32  # the batch of paper-calm-l: 256 rows of 8,192 tokens, on 32 GPUs
POSITIONS, LATENT, N = TOKENS // 4, 128, 8  # K = 4
MAX_KERNELS = 2000


def test_the_simulation_finds_what_a_gpu_would_be_waited_for():
    numbers = torch.empty(3, device=GPU)
    for wait in (lambda: numbers.sum().item(), lambda: bool(numbers.any()), lambda: numbers[numbers > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait()
    with pytest.raises(RuntimeError):
        numbers + torch.ones(3)


@pytest.mark.parametrize("num_target_samples", [None, 100])
def test_energy_loss(num_target_samples):
    samples = torch.empty(N, POSITIONS, LATENT, device=GPU, requires_grad=True)
    posterior = Posterior(torch.empty(POSITIONS, LATENT, device=GPU), torch.empty(POSITIONS, LATENT, device=GPU))
    noise = None
    if num_target_samples is not None:
        noise = torch.empty(num_target_samples, POSITIONS, LATENT, device=GPU)
    with simulated_gpu() as count:
        energy_loss(samples, posterior, target_noise=noise).mean().backward()
    assert samples.grad is not None
    assert 20 < count.total <= MAX_KERNELS


@pytest.mark.parametrize("exponent", [0.5, 0.75])
def test_the_closed_form_is_the_same_with_a_mask(exponent):
    """Values and gradients, for positions that need the integral and others that do not; one has no variance."""
    generator = torch.Generator().manual_seed(0)
    squared = torch.rand(40, 6, generator=generator) * torch.logspace(-3, 3, 40)[:, None]
    variance = torch.rand(40, 6, generator=generator)
    variance[-1] = 0
    results = []
    for replace in (energy._replace_some, energy._replace_by_mask):
        inputs = [part.clone().requires_grad_() for part in (squared, variance)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(energy, "_replace_some", replace)
            moment = energy.gaussian_moment(inputs[0], inputs[1], exponent)
        moment.sum().backward()
        results.append([moment.detach(), *(part.grad for part in inputs)])
    for some, mask in zip(*results, strict=True):
        assert some.isfinite().all()
        torch.testing.assert_close(mask, some, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("subset", [False, True])
def test_vocabulary_cross_entropy(subset):
    states = torch.empty(TOKENS, 512, device=GPU, requires_grad=True)
    vocabulary = torch.empty(128_257, 512, device=GPU, requires_grad=True)
    targets = torch.empty(TOKENS, dtype=torch.long, device=GPU)
    chosen = None
    if subset:
        chosen = VocabularySubset(torch.empty(20_000, dtype=torch.long, device=GPU), torch.empty(20_000, device=GPU))
    with simulated_gpu() as count:
        loss = vocabulary_cross_entropy(states, vocabulary, targets, torch.empty(TOKENS, device=GPU), chosen)
        loss.backward()
        token_losses(states, vocabulary, targets)
    assert 20 < count.total <= MAX_KERNELS
