"""The energy loss against an exact integral, on known distributions, and for degenerate inputs."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import gamma
from torch.utils._python_dispatch import TorchDispatchMode

from calm.autoencoder import Posterior
from calm.errors import ConfigError
from calm.noise import RowNoise
from calm.scores import energy as module
from calm.scores import energy_loss, energy_terms


def exact_moment(d: np.ndarray, sigma: np.ndarray, alpha: float) -> float:
    """E|d + σε|^alpha from the Laplace transform of the squared distance, by quadrature over log t."""
    scale = (d**2 + sigma**2).sum()

    def integrand(u: float) -> float:
        t = math.exp(u) / scale
        exponent = (0.5 * np.log1p(2 * t * sigma**2) + t * d**2 / (1 + 2 * t * sigma**2)).sum()
        return -math.expm1(-exponent) * math.exp(-alpha / 2 * u)

    low, high = -60.0, 60.0  # beyond them the integrand is known: t·scale below, 1 above
    middle = sum(quad(integrand, a, b, limit=400)[0] for a, b in ((low, -5), (-5, 5), (5, high)))
    p = alpha / 2
    tails = math.exp(low * (1 - p)) / (1 - p) + math.exp(-p * high) / p
    return p / gamma(1 - p) * (middle + tails) * scale**p


def exact_gradient(d: np.ndarray, sigma: np.ndarray, alpha: float, elements: np.ndarray) -> np.ndarray:
    """Its gradient with respect to some elements of d, by central differences: an error of about 1e-7."""
    step, found = 1e-4, []
    for i in elements:
        up, down = d.copy(), d.copy()
        up[i] += step
        down[i] -= step
        found.append((exact_moment(up, sigma, alpha) - exact_moment(down, sigma, alpha)) / (2 * step))
    return np.array(found)


def closed_form(d: np.ndarray, sigma: np.ndarray, alpha: float) -> tuple[float, np.ndarray]:
    """The target term of the loss, and its gradient with respect to the sample."""
    samples = torch.tensor(np.stack([d, d]), dtype=torch.float32).requires_grad_()  # two, at mean 0
    posterior = Posterior(torch.zeros(len(d)), torch.tensor(np.log(sigma), dtype=torch.float32))
    fidelity, _ = energy_terms(samples, posterior, alpha=alpha)
    fidelity.backward()
    assert samples.grad is not None
    return fidelity.item() / 2, samples.grad[0].numpy()


CASES = [
    (latent, spread, distance)
    for latent in (8, 16, 64, 128, 256)
    for spread in (0.0, 0.5, 1.0)
    for distance in (0.0, 0.1, 0.5, 3.0)
]


@pytest.mark.parametrize("alpha", [0.75, 1.0, 1.5])
def test_closed_form_is_the_expectation(alpha):
    rng = np.random.default_rng(0)
    for latent, spread, distance in CASES:
        sigma = 0.2 * np.exp(spread * rng.normal(size=latent))
        d = distance * rng.normal(size=latent)
        exact = exact_moment(d, sigma, alpha)
        value, _ = closed_form(d, sigma, alpha)
        assert abs(value / exact - 1) < 1e-3, (latent, spread, distance)


@pytest.mark.parametrize(
    ("latent", "spread", "alpha"),
    [(8, 0.0, 1.0), (8, 1.0, 1.5), (32, 1.0, 1.0), (64, 0.0, 0.75), (64, 0.5, 1.0), (256, 0.0, 1.0), (256, 0.5, 1.5)],
)
def test_gradient_is_that_of_the_expectation(latent, spread, alpha):
    rng = np.random.default_rng(1)
    sigma = 0.2 * np.exp(spread * rng.normal(size=latent))
    for distance in (0.1, 1.0):
        d = distance * rng.normal(size=latent)
        some = np.arange(0, latent, max(1, latent // 16))  # every gradient takes two integrals
        exact = exact_gradient(d, sigma, alpha, some)
        _, found = closed_form(d, sigma, alpha)  # both samples' halves of a mean of two, times 2
        # The gradient of an expansion that is good to 1e-3; the integral's is exact.
        assert np.linalg.norm(found[some] - exact) < 5e-3 * np.linalg.norm(exact)


def test_few_or_uneven_dimensions_use_the_integral():
    """Where a second-order expansion is off by percents."""
    for latent, sigma in ((1, np.array([0.3])), (2, np.array([0.3, 1e-3])), (16, 0.2 * np.exp(np.linspace(-3, 3, 16)))):
        d = np.zeros(latent)
        k2, mean = 2 * (sigma**4).sum(), (sigma**2).sum()
        exact = exact_moment(d, sigma, 1.0)
        expansion = mean**0.5 * (1 - k2 / mean**2 / 8)
        assert abs(expansion / exact - 1) > 1e-2
        assert abs(closed_form(d, sigma, 1.0)[0] / exact - 1) < 1e-4


def test_target_samples_agree_with_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(8, 5, 32, generator=generator)
    posterior = Posterior(torch.randn(5, 32, generator=generator), torch.full((5, 32), -1.0))
    closed = energy_loss(samples, posterior)
    draws = torch.stack(
        [energy_loss(samples, posterior, num_target_samples=200, generator=generator) for _ in range(50)]
    )
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((closed - draws.mean(0)).abs() < 5 * error + 1e-3 * closed.abs()).all()


def test_given_target_noise_matches_the_paper():
    generator = torch.Generator().manual_seed(0)
    samples, noise = torch.randn(4, 3, 6, generator=generator), torch.randn(5, 3, 6, generator=generator)
    posterior = Posterior(torch.randn(3, 6, generator=generator), torch.randn(3, 6, generator=generator))
    for alpha in (0.5, 1.0, 1.7, 2.0):
        z = posterior.mean + posterior.std * noise
        expected = torch.zeros(3)
        for n in range(4):
            expected += sum(2 * (samples[n] - z[m]).norm(dim=-1) ** alpha for m in range(5)) / 20
            expected -= sum((samples[n] - samples[k]).norm(dim=-1) ** alpha for k in range(4) if k != n) / 12
        found = energy_loss(samples, posterior, alpha=alpha, target_noise=noise)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_slicing_does_not_change_loss_and_gradient(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(4, 2, 37, 8, generator=generator, requires_grad=True)
    posterior = Posterior(torch.randn(2, 37, 8, generator=generator), torch.randn(2, 37, 8, generator=generator))
    noise = torch.randn(6, 2, 37, 8, generator=generator)

    def loss_and_gradient(**kwargs):
        loss = energy_loss(samples, posterior, **kwargs)
        return loss, torch.autograd.grad(loss.sum(), samples)[0]

    for kwargs in ({}, {"target_noise": noise}):
        whole = loss_and_gradient(**kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(module, "SLICE_ELEMENTS", 300)
            patch.setattr(module, "INTEGRAL_ELEMENTS", 3000)
            for one, other in zip(whole, loss_and_gradient(**kwargs), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_degenerate_inputs_have_finite_losses_and_gradients():
    samples = torch.zeros(4, 3, 8, requires_grad=True)  # all equal to the target
    certain = Posterior(torch.zeros(3, 8), torch.full((3, 8), -math.inf))
    for alpha in (0.5, 1.0, 1.9):
        loss = energy_loss(samples, certain, alpha=alpha)
        assert torch.equal(loss, torch.zeros(3))
        (gradient,) = torch.autograd.grad(loss.sum(), samples)
        assert torch.equal(gradient, torch.zeros_like(gradient))
    for distance, log_std in ((1e-12, -math.inf), (1e-20, -math.inf), (0.0, -30.0), (0.0, -25.0), (1e-9, -25.0)):
        near = torch.full((2, 3, 8), distance).requires_grad_()
        loss = energy_loss(near, Posterior(torch.zeros(3, 8), torch.full((3, 8), log_std)))
        (gradient,) = torch.autograd.grad(loss.sum(), near)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()
    far = (1e3 + torch.zeros(4, 3, 8)).requires_grad_()  # all equal, far from the origin
    loss = energy_loss(far, Posterior(torch.zeros(3, 8), torch.zeros(3, 8)))
    (gradient,) = torch.autograd.grad(loss.sum(), far)
    assert gradient.isfinite().all()
    torch.testing.assert_close(loss, torch.full((3,), 2 * 1e3 * math.sqrt(8)), rtol=1e-4, atol=0)


def test_distances_of_near_samples_are_accurate():
    """Distances by matrix products are as accurate as the rounding of the coordinates allows."""
    base = 10 + torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    samples = torch.cat([base, base + 1e-3])
    _, diversity = energy_terms(samples, Posterior(base[0], torch.zeros(6, 64)))
    torch.testing.assert_close(diversity, torch.full((6,), 1e-3 * 8), rtol=2e-2, atol=0)


def test_all_differences_are_never_materialised():
    largest = 0

    class RecordLargest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            largest = max(largest, result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    n, m, positions, latent = 8, 20, 50, 16
    samples = torch.randn(n, positions, latent, requires_grad=True)
    posterior = Posterior(torch.randn(positions, latent), torch.zeros(positions, latent))
    with RecordLargest():
        energy_loss(samples, posterior, num_target_samples=m).sum().backward()
    assert largest < n * m * positions * latent / 4


def test_improper_scores_are_refused():
    posterior = Posterior(torch.zeros(1, 2), torch.zeros(1, 2))
    for alpha in (0.0, -1.0, 2.5):
        with pytest.raises(ConfigError, match="alpha must be in"):
            energy_loss(torch.zeros(2, 1, 2), posterior, alpha=alpha)
    with pytest.raises(ConfigError, match="at least 2, not 1"):
        energy_loss(torch.zeros(1, 1, 2), posterior)
    assert "not strictly" in (module.check_energy(2.0, 8) or "")
    assert "explode" in (module.check_energy(0.75, 8) or "")
    assert module.check_energy(1.0, 8) is None


def test_target_noise_depends_on_the_row_alone():
    posterior = Posterior(torch.randn(3, 5, 4), torch.zeros(3, 5, 4))
    samples = torch.randn(2, 3, 5, 4)
    together = energy_loss(samples, posterior, num_target_samples=7, generator=RowNoise([1, 2, 3]))
    alone = energy_loss(
        samples[:, 1:2],
        Posterior(posterior.mean[1:2], posterior.log_std[1:2]),
        num_target_samples=7,
        generator=RowNoise([2]),
    )
    torch.testing.assert_close(together[1:2], alone)


def test_score_is_strictly_proper_except_for_alpha_2():
    """Targets at -1, 0 and 1, the outer ones with probability 0.2 each; forecasts with other shares, the same mean."""
    generator = torch.Generator().manual_seed(0)
    posterior = Posterior(torch.tensor([[-1.0], [0.0], [1.0]]), torch.full((3, 1), math.log(0.1)))
    truth = torch.tensor([0.2, 0.6, 0.2])
    noise, quantiles = 0.1 * torch.randn(4000, generator=generator), (torch.arange(4000) + 0.5) / 4000

    def expected(share: float, alpha: float) -> float:
        points = (quantiles > 1 - share).float() - (quantiles < share).float()
        samples = (points + noise - noise.mean())[:, None, None].expand(-1, 3, 1)
        return (truth * energy_loss(samples, posterior, alpha=alpha)).sum().item()

    shares = [0.0, 0.1, 0.2, 0.3, 0.4]
    losses = [expected(share, 1.0) for share in shares]
    assert losses.index(min(losses)) == 2
    assert min(losses[1], losses[3]) - losses[2] > 5e-3
    flat = [expected(share, 2.0) for share in shares]
    assert max(flat) - min(flat) < 2e-2
    assert max(losses) - min(losses) > 0.1
