"""The energy score of §3.3 as a loss: samples should be close to the target, and diverse.

    loss = 2·E|x - z|^α - E|x - x'|^α        x, x' from the model, z from the autoencoder's posterior

The first term, fidelity, is estimated from M samples z, or computed in closed form, without variance and at the cost of
M = 1: the squared distance Q = |x - z|² to a Gaussian has mean S and variance k2, and E Q^p (p = α/2) follows from them
if its relative variance is small. If it is not (S² < 20·k2: few dimensions, or a few noisy ones) an integral is used:

    E Q^p = E G^p + p/Γ(1-p) ∫ (φ_G(t) - φ_Q(t)) t^(-p-1) dt

with φ the Laplace transforms, known for Q and for a gamma variable G of the same mean and variance; the remaining
integrand is small and smooth.

To try another kernel of x - y, replace `_distances` and `gaussian_moment`, its closed form for a Gaussian target;
`energy_loss_of_samples`, the loss of distillation, uses the first.
Without a closed form, require `num_target_samples` here and in `evaluate/health.py`, whose score selects the best
checkpoint.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from calm.errors import ConfigError
from calm.noise import NoiseSource, draw_normal

if TYPE_CHECKING:  # the autoencoder is built on scores
    from calm.autoencoder import Posterior

CONCENTRATED = 20.0  # S²/k2 above which the expansion is accurate to 1e-3
TF32_PRECISION = 2.0**-10  # of a product's factors
SMALLEST = 1e-15  # squared distances below it are treated as exact: their squares underflow in fp32
FIRST_NODE, LAST_NODE, NODES = -6.0, 14.0, 21  # log(t·S) at the integral's nodes: accurate to 1e-5
SLICE_ELEMENTS = 2**19  # elements of samples and targets that are compared at once on a CPU: its caches hold them
INTEGRAL_ELEMENTS = 2**20  # (elements × nodes × Z) held at once on a CPU
GPU_ELEMENTS = 2**26  # either, on a GPU, which needs few and large kernels: 256 MB


def check_energy(alpha: float, num_samples: int) -> str | None:
    """Refuse what is not a proper scoring rule; returns a warning for what is known to train badly."""
    if not 0 < alpha <= 2:
        raise ConfigError(f"alpha must be in (0, 2]: the energy score is not a proper scoring rule for alpha = {alpha}")
    if num_samples < 2:
        raise ConfigError(
            f"the energy loss compares model samples with each other: it needs at least 2, not {num_samples}"
        )
    if alpha == 2:
        return "alpha = 2 is proper, but not strictly: the model learns only the mean of the distribution"
    if alpha < 1:
        return f"alpha = {alpha}: below 1 gradients explode where samples coincide, and the paper's runs failed"
    return None


def energy_loss(
    samples: Tensor,
    posterior: "Posterior",
    *,
    alpha: float = 1.0,
    num_target_samples: int | None = None,
    target_noise: Tensor | None = None,
    generator: NoiseSource = None,
) -> Tensor:
    """The energy loss at each position.

    Args:
        samples: model samples (N, ..., Z), N at least 2.
        posterior: of the target, mean and log_std (..., Z).
        alpha: exponent in (0, 2].
        num_target_samples: M, samples of the target; None: closed form.
        target_noise: standard normal noise for the target samples (M, ..., Z).

    Returns:
        (...)
    """
    fidelity, diversity = energy_terms(
        samples,
        posterior,
        alpha=alpha,
        num_target_samples=num_target_samples,
        target_noise=target_noise,
        generator=generator,
    )
    return fidelity - diversity


def energy_loss_of_samples(samples: Tensor, targets: Tensor, alpha: float = 1.0) -> Tensor:
    """The energy loss at each position against samples of the target: (N, ..., Z), (M, ..., Z) → (...)."""
    check_energy(alpha, len(samples))
    with torch.autocast(samples.device.type, enabled=False):
        samples, targets = samples.float(), targets.float()
        center = targets.mean(0)  # same distances, smaller rounding errors
        fidelity = _distances(samples - center, targets - center, alpha).mean((-2, -1))
        return 2 * fidelity - _diversity(samples, alpha)


def energy_terms(
    samples: Tensor,
    posterior: "Posterior",
    *,
    alpha: float = 1.0,
    num_target_samples: int | None = None,
    target_noise: Tensor | None = None,
    generator: NoiseSource = None,
) -> tuple[Tensor, Tensor]:
    """Fidelity 2·E|x - z|^α and diversity E|x - x'|^α, whose difference is the loss: (...) and (...)."""
    check_energy(alpha, len(samples))
    mean, log_std = posterior.mean, posterior.log_std
    shape, latent = mean.shape[:-1], mean.shape[-1]
    if num_target_samples is not None and target_noise is None:
        target_noise = draw_normal(generator, mean, num_target_samples, latent)
    many = [samples] if target_noise is None else [samples, target_noise]  # (N, ..., Z), (M, ..., Z)
    at_once = SLICE_ELEMENTS if samples.device.type == "cpu" else GPU_ELEMENTS
    rows = max(1, at_once // (latent * sum(map(len, many))))
    one = [part.reshape(-1, latent).split(rows) for part in (mean, log_std)]
    first, *rest = [part.reshape(len(part), -1, latent).split(rows, 1) for part in many]
    pieces = [first, *one, *rest]
    # Several slices are recomputed in the backward pass, so that the memory of one suffices.
    compute = _terms if len(pieces[0]) == 1 else partial(_recomputed, _terms)
    terms: Any = [compute(alpha, *piece) for piece in zip(*pieces, strict=True)]
    fidelity, diversity = (torch.cat(parts).view(shape) for parts in zip(*terms, strict=True))
    return fidelity, diversity


_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # draws no random numbers


def _terms(
    alpha: float, samples: Tensor, mean: Tensor, log_std: Tensor, target_noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The two terms at n positions: samples (N, n, Z), mean and log_std (n, Z), noise (M, n, Z)."""
    with torch.autocast(samples.device.type, enabled=False):
        samples, std = samples.float(), log_std.float().exp()
        differences = samples - mean.float()
        if target_noise is None:
            fidelity = gaussian_moment(differences**2, std**2, alpha / 2).mean(0)
        else:
            fidelity = _distances(differences, std * target_noise.float(), alpha).mean((-2, -1))
        return 2 * fidelity, _diversity(samples, alpha)


def _diversity(samples: Tensor, alpha: float) -> Tensor:
    """Mean of |x - x'|^α over ordered pairs of different samples."""
    count = len(samples)
    centered = samples - samples.mean(0).detach()  # same distances, smaller rounding errors
    distances = _distances(centered, centered, alpha)
    others = ~torch.eye(count, dtype=torch.bool, device=samples.device)
    return torch.where(others, distances, 0.0).sum((-2, -1)) / (count * (count - 1))


def _distances(left: Tensor, right: Tensor, alpha: float) -> Tensor:
    """|x - y|^α for all pairs, by one matrix product per position: (N, ..., Z), (M, ..., Z) → (..., N, M)."""
    left, right = left.movedim(0, -2), right.movedim(0, -2)  # (..., N, Z), (..., M, Z)
    sizes = (left**2).sum(-1)[..., :, None] + (right**2).sum(-1)[..., None, :]
    squared = sizes - 2 * left @ right.mT
    noise_floor = 4 * _product_precision(sizes) * sizes.detach()  # below it a difference is rounding
    return _power(squared, alpha / 2, noise_floor)


def _product_precision(like: Tensor) -> float:
    """Relative precision of a matrix product in fp32, which a GPU may compute in TF32."""
    tf32 = like.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return TF32_PRECISION if tf32 else torch.finfo(like.dtype).eps


def _power(base: Tensor, exponent: float, floor: Tensor | float) -> Tensor:
    """base^exponent; 0 with gradient 0 up to the floor."""
    above = base > floor
    return torch.where(above, torch.where(above, base, 1.0) ** exponent, 0.0)


def gaussian_moment(squared: Tensor, variance: Tensor, exponent: float) -> Tensor:
    """E (Σ (d + σε)²)^p for standard normal ε, from d² (..., Z) and σ² that broadcasts to it: (...)."""
    mean = squared.sum(-1) + variance.sum(-1)  # S
    k2 = 2 * (variance**2).sum(-1) + 4 * (squared * variance).sum(-1)
    spread = k2 / mean.clamp(min=SMALLEST) ** 2  # k2/S²
    curvature = exponent * (exponent - 1) / 2
    moment = _power(mean, exponent, 0.0) * (1 + curvature * spread)
    if exponent == 1:
        return moment
    scattered, variance = CONCENTRATED * spread > 1, variance.expand_as(squared)
    replace = _replace_some if squared.device.type == "cpu" else _replace_by_mask
    return replace(moment, scattered, squared, variance, exponent)


def _replace_some(moment: Tensor, scattered: Tensor, squared: Tensor, variance: Tensor, exponent: float) -> Tensor:
    """Compute the integral where it is needed, which would synchronize with a GPU."""
    if not scattered.any():
        return moment
    exact = _gaussian_moment_by_integral(squared[scattered], variance[scattered], exponent)
    return moment.masked_scatter(scattered, exact)


def _replace_by_mask(moment: Tensor, scattered: Tensor, squared: Tensor, variance: Tensor, exponent: float) -> Tensor:
    """Compute the integral everywhere; where it is not needed, of harmless numbers, so that gradients are finite."""
    squared = torch.where(scattered[..., None], squared, 0.0).flatten(0, -2)
    variance = torch.where(scattered[..., None], variance, 1.0).flatten(0, -2)
    exact = _gaussian_moment_by_integral(squared, variance, exponent)
    return torch.where(scattered, exact.view_as(moment), moment)


def _gaussian_moment_by_integral(squared: Tensor, variance: Tensor, exponent: float) -> Tensor:
    """The same by the integral, for (n, Z), in slices that are recomputed in the backward pass."""
    elements = INTEGRAL_ELEMENTS if squared.device.type == "cpu" else GPU_ELEMENTS
    at_once = max(1, elements // (NODES * squared.shape[-1]))
    pieces = zip(squared.split(at_once), variance.split(at_once), strict=True)
    return torch.cat([_recomputed(_integral, d, v, exponent) for d, v in pieces])  # pyright: ignore


def _integral(squared: Tensor, variance: Tensor, p: float) -> Tensor:
    mean = (squared + variance).sum(-1, keepdim=True)  # (n, 1)
    squared, variance = squared / mean, variance / mean  # so that S = 1
    k2 = 2 * (variance**2).sum(-1) + 4 * (squared * variance).sum(-1)  # (n,)
    t = torch.linspace(FIRST_NODE, LAST_NODE, NODES, dtype=squared.dtype, device=squared.device).exp()  # (T,)
    growth = 1 + 2 * t[:, None] * variance[:, None, :]  # (n, T, Z)
    laplace = torch.exp(-(0.5 * growth.log() + t[:, None] * squared[:, None, :] / growth).sum(-1))  # φ_Q
    gamma_laplace = torch.exp(-torch.log1p(t * k2[:, None]) / k2[:, None])  # φ_G: shape 1/k2, scale k2
    step = (LAST_NODE - FIRST_NODE) / (NODES - 1)
    correction = p / math.gamma(1 - p) * ((gamma_laplace - laplace) * t**-p).sum(-1) * step
    gamma_moment = torch.exp(p * k2.log() + torch.lgamma(1 / k2 + p) - torch.lgamma(1 / k2))
    return mean[:, 0] ** p * (gamma_moment + correction)
