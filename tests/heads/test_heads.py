"""Heads: what they compute, and that they learn and sample known distributions."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from calm.autoencoder import Autoencoder, AutoencoderConfig, Posterior
from calm.errors import CalmWarning, ConfigError
from calm.heads import HEADS, ChainHead, DiffusionHead, EnergyHead, FlowHead, MeanFlowHead, VectorHead
from calm.heads.denoiser import sinusoids
from calm.heads.diffusion import Schedule, cosine_betas
from calm.noise import RowNoise

SIZES = {"hidden_size": 16, "latent_size": 4, "num_head_layers": 2}
VECTOR_HEADS = sorted(name for name, kind in HEADS.items() if issubclass(kind, VectorHead))


def make_head(kind: type, autoencoder: Autoencoder | None = None, **fields) -> Any:
    """A head with the defaults of its config, on its own."""
    own = kind.Config(**{name: value for name, value in fields.items() if name in kind.Config.model_fields})
    sizes = {**SIZES, "chunk_size": 4, "vocab_size": 50}
    return kind(SimpleNamespace(**(sizes | own.model_dump() | fields)), autoencoder)


def randomized(head):
    """Output layers start at zero: give every weight a random value."""
    torch.manual_seed(0)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    return head


@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_samples_and_losses_of_vector_heads(name):
    head = randomized(make_head(HEADS[name]))
    hidden, posterior = torch.randn(3, 5, 16), Posterior(torch.randn(3, 5, 4), torch.zeros(3, 5, 4))
    assert head.sample(hidden, num_samples=7).shape == (7, 3, 5, 4)
    assert head.sample(hidden[0, 0], num_samples=2).shape == (2, 4)  # one position
    together = head.sample(hidden, 2, RowNoise([1, 2, 3]))
    alone = head.sample(hidden[1:2], 2, RowNoise([2]))
    torch.testing.assert_close(together[:, 1:2], alone, rtol=1e-4, atol=1e-4)  # noise depends on the row alone
    same = [head.sample(hidden, 2, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*same)
    loss = head.latent_loss(hidden, posterior, generator=RowNoise([1, 2, 3]))
    assert loss.ndim == 0
    mask = torch.zeros(3, 5)
    mask[1, 2] = 1
    masked = head.latent_loss(hidden, posterior, mask, RowNoise([1, 2, 3]))
    other = Posterior(posterior.mean.clone(), posterior.log_std)
    other.mean[0] += 9  # a masked row
    assert torch.equal(masked, head.latent_loss(hidden, other, mask, RowNoise([1, 2, 3])))
    assert head.latent_loss(hidden, posterior, torch.zeros(3, 5)).item() == 0


def test_energy_head_with_a_shared_condition_matches_the_paper():
    """Against blocks on the concatenation [LN(x), y], sample by sample."""
    head = randomized(make_head(EnergyHead, noise_size=6))
    hidden, noise = torch.randn(2, 3, 16), torch.rand(5, 2, 3, 6) - 0.5
    found = head.sample(hidden, noise=noise)
    for n in range(5):
        x, y = head.noise_norm(head.noise(noise[n])), head.condition_norm(head.condition(hidden))
        for block in head.blocks:
            weight = torch.cat([block.fuse_state.weight, block.fuse_condition.weight], dim=1)
            u = F.linear(torch.cat([block.norm(x), y], dim=-1), weight, block.fuse_condition.bias)
            gate, up = block.gate_up(F.silu(block.mix(F.silu(u)))).chunk(2, dim=-1)
            x = x + block.down(F.silu(gate) * up)
        expected = head.latent(F.silu(head.mix(head.norm(x))))
        torch.testing.assert_close(found[n], expected, rtol=1e-5, atol=1e-5)


def test_noise_of_the_energy_head_is_uniform():
    head = make_head(EnergyHead, noise_size=8)
    seen = []
    head.noise.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    head.sample(torch.zeros(500, 16), 10)
    (noise,) = seen
    assert noise.shape == (10, 500, 8)
    assert -0.5 <= noise.min() < -0.49
    assert 0.49 < noise.max() <= 0.5
    assert abs(noise.var().item() - 1 / 12) < 0.002  # 40,000 draws: a standard error of 0.0004


def test_block_size_is_that_of_the_paper():
    head = make_head(EnergyHead, hidden_size=64, latent_size=8, num_head_layers=3)
    block = sum(p.numel() for p in head.blocks[0].parameters() if p.ndim == 2)
    assert block == 6 * 64**2


CENTRES, SHARES, SIGMA = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.5]]), torch.tensor([0.2, 0.3, 0.5]), 0.1


def fit(head, steps: int, rate: float = 3e-3) -> torch.Tensor:
    """Train on a mixture of three narrow Gaussians; returns 4,000 samples."""
    torch.manual_seed(0)
    head.reset_parameters()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(head.parameters(), lr=rate, betas=(0.9, 0.95))
    hidden = torch.zeros(64, 1)
    for step in range(steps):
        chosen = torch.multinomial(SHARES, 64, replacement=True, generator=generator)
        posterior = Posterior(CENTRES[chosen], torch.full((64, 2), math.log(SIGMA)))
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        head.latent_loss(hidden, posterior, generator=generator).backward()
        optimizer.step()
    with torch.no_grad():
        return head.sample(torch.zeros(1, 1), 4000, generator)[:, 0]


def describe(samples: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The share of samples nearest to each centre, and the share of samples close to any."""
    distances = torch.cdist(samples, CENTRES)
    shares = torch.bincount(distances.argmin(1), minlength=3) / len(samples)
    return shares, (distances.min(1).values < 4 * SIGMA).float().mean().item()


class Wide(nn.Module):
    """A head of width 48 for two-dimensional latents, on a condition of one number."""

    def __init__(self, kind: type, **fields):
        super().__init__()
        self.widen = nn.Linear(1, 48)
        self.head = make_head(kind, hidden_size=48, latent_size=2, **fields)

    def reset_parameters(self):
        self.head.reset_parameters()

    def latent_loss(self, hidden, posterior, **kwargs):
        return self.head.latent_loss(self.widen(hidden), posterior, **kwargs)

    def sample(self, hidden, *args):
        return self.head.sample(self.widen(hidden), *args)


def test_energy_loss_recovers_a_distribution_except_for_alpha_2():
    shares, close = describe(fit(Wide(EnergyHead, noise_size=8), steps=400, rate=5e-3))
    assert (shares - SHARES).abs().max() < 0.07
    assert close > 0.8  # a continuous map of noise has samples between the centres
    with pytest.warns(CalmWarning, match="not strictly"):
        collapsed = Wide(EnergyHead, noise_size=8, alpha=2.0)
    samples = fit(collapsed, steps=300)
    assert describe(samples)[1] < 0.5
    torch.testing.assert_close(samples.mean(0), SHARES @ CENTRES, rtol=0, atol=0.1)  # the mean is still learnt


def test_flow_matching_recovers_a_distribution():
    shares, close = describe(fit(Wide(FlowHead, num_sampling_steps=20), steps=700))
    assert (shares - SHARES).abs().max() < 0.07
    assert close > 0.8


def test_diffusion_recovers_a_distribution():
    head = Wide(DiffusionHead, num_sampling_steps=250)  # it needs many steps, as in the paper
    shares, close = describe(fit(head, steps=700, rate=5e-3))
    assert (shares - SHARES).abs().max() < 0.07
    assert close > 0.8


def test_mean_flow_recovers_a_distribution_in_one_step():
    shares, close = describe(fit(Wide(MeanFlowHead, num_model_samples=4), steps=400))
    assert (shares - SHARES).abs().max() < 0.12  # weighted errors favour the largest component: about 0.6, not 0.5
    assert close > 0.6  # one continuous map of noise: more samples between the centres than after many steps


def test_derivative_of_the_mean_velocity_along_the_path():
    head = randomized(make_head(MeanFlowHead)).double()
    draws = torch.Generator().manual_seed(0)
    moved, velocity = torch.randn(2, 3, 4, generator=draws).double(), torch.randn(2, 3, 4, generator=draws).double()
    times, end = torch.tensor([0.2, 0.7]).double().repeat(2, 3, 1), torch.tensor([0.0, 1.0])
    condition, step = torch.randn(3, 16, generator=draws).double(), 1e-4

    def at(t: float) -> torch.Tensor:
        return head.denoiser(moved + t * velocity, times + t * end, condition)

    numerical = (at(step) - at(-step)) / (2 * step)
    # Time embeddings are computed in fp32, which limits the finite difference.
    torch.testing.assert_close(head._change(moved, velocity, times, condition), numerical, rtol=0.02, atol=0.05)
    start, end = head._spans(torch.zeros(8000, 16), draws).flatten(0, 1).unbind(-1)
    assert (start <= end).all()
    assert abs((start == end).float().mean() - 0.75) < 0.01  # 64,000 spans: a standard error of 0.002


class KnownVelocity(nn.Module):
    """The exact velocity of flow matching to N(mean, std²): E[z - noise | x_t = x]."""

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.mean, self.std, self.condition = mean, std, nn.Identity()

    def forward(self, x, times, condition):
        t = times.double() / 1000
        variance = (1 - t) ** 2 + (t * self.std) ** 2
        return self.mean + (t * self.std**2 - (1 - t)) / variance * (x - t * self.mean)


def test_order_of_convergence_of_the_ode_solvers():
    """The flow to a Gaussian is known: it maps noise e to mean + std·e."""
    head = make_head(FlowHead)
    head.denoiser = KnownVelocity(2.0, 0.5)  # pyright: ignore
    noise = torch.randn(64, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = 2.0 + 0.5 * noise

    def error(sampler, steps):
        hidden = torch.zeros(1, 16, dtype=torch.float64)
        found = head.sample(hidden, noise=noise, sampler=sampler, num_steps=steps)
        return (found - exact).abs().max().item()

    assert 1.7 < error("euler", 25) / error("euler", 50) < 2.3  # first order
    assert error("midpoint", 25) / error("midpoint", 50) > 3.5  # second order, or better
    assert error("midpoint", 10) < error("euler", 100)
    with pytest.raises(ConfigError, match="euler or midpoint, not 'heun'"):
        head.sample(torch.zeros(1, 16), sampler="heun")  # pyright: ignore


class KnownNoise(nn.Module):
    """The exact prediction of the noise for data from N(mean, std²), and the largest variance of a step."""

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.mean, self.std, self.condition = mean, std, nn.Identity()

    def forward(self, x, times, condition):
        remaining = (1 - cosine_betas()).cumprod(0)[times].float()[..., None]
        variance = remaining * self.std**2 + 1 - remaining
        noise = (1 - remaining).sqrt() * (x - remaining.sqrt() * self.mean) / variance
        return torch.cat([noise, torch.ones_like(noise)], dim=-1)


def test_ancestral_sampling_recovers_the_data_distribution():
    head = make_head(DiffusionHead)
    head.denoiser = KnownNoise(2.0, 0.5)  # pyright: ignore
    found = head.sample(torch.zeros(16), 4000, torch.Generator().manual_seed(0), num_steps=200)
    assert abs(found.mean().item() - 2.0) < 0.03  # 16,000 numbers: standard error 0.004, and the steps are finite
    assert abs(found.std().item() - 0.5) < 0.03


class FaultyNoise(KnownNoise):
    """Like a trained network: off by a tenth, and clipped outside of the training distribution."""

    def forward(self, x, times, condition):
        noise, place = super().forward(x, times, condition).chunk(2, dim=-1)
        return torch.cat([(0.9 * noise).clamp(-4, 4), place], dim=-1)


def test_bound_on_latents_keeps_sampling_stable():
    found = {}
    for largest in (None, 10.0):
        head = make_head(DiffusionHead, largest_latent=largest)
        head.denoiser = FaultyNoise(2.0, 0.5)  # pyright: ignore
        found[largest] = head.sample(torch.zeros(16), 4000, torch.Generator().manual_seed(0), num_steps=100)
    assert found[None].abs().median() > 100
    assert abs(found[10.0].mean().item() - 2.0) < 0.1
    assert abs(found[10.0].std().item() - 0.5) < 0.1


def test_cosine_schedule():
    betas = cosine_betas()
    assert len(betas) == 1000
    assert betas.max() == 0.999
    first = 1 - (math.cos(0.009 / 1.008 * math.pi / 2) / math.cos(0.008 / 1.008 * math.pi / 2)) ** 2
    assert betas[0].item() == pytest.approx(first)
    schedule = Schedule.of(100)
    assert schedule.times.tolist()[:3] == [0, 10, 20]
    assert schedule.times.tolist()[-1] == 999
    torch.testing.assert_close(schedule.signal**2 + schedule.noise_scale**2, torch.ones(100))
    assert schedule.log_smallest[0] == schedule.log_smallest[1]
    whole = Schedule.of(1000)
    torch.testing.assert_close(whole.log_largest, betas.log().float(), rtol=1e-4, atol=1e-4)
    for steps in (1, 0, 1001):
        with pytest.raises(ConfigError, match=f"2 to 1000 steps, not {steps}"):
            Schedule.of(steps)


@pytest.mark.parametrize("kind", [FlowHead, DiffusionHead])
def test_times_are_drawn_in_fp32(kind):
    """bf16 has too few values to draw times from."""
    head, seen = randomized(make_head(kind)).to(torch.bfloat16), []
    head.denoiser.time.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    posterior = Posterior(torch.zeros(1, 8000, 4, dtype=torch.bfloat16), torch.zeros(1, 8000, 4, dtype=torch.bfloat16))
    loss = head.latent_loss(torch.zeros(1, 8000, 16, dtype=torch.bfloat16), posterior)
    assert loss.dtype == torch.float32
    assert (
        len(torch.unique(seen[0].flatten(0, -2), dim=0)) > 400
    )  # of 1,000 times, those whose embeddings differ in bf16
    samples = head.sample(torch.zeros(3, 16, dtype=torch.bfloat16), 2)
    assert samples.dtype == torch.bfloat16


def test_time_embedding_is_cosines_then_sines():
    found = sinusoids(torch.tensor([3]))[0]
    assert found.shape == (256,)
    assert found[1].item() == pytest.approx(math.cos(3 * math.exp(-math.log(10000) / 128)), abs=1e-6)
    assert found[129].item() == pytest.approx(math.sin(3 * math.exp(-math.log(10000) / 128)), abs=1e-6)


def test_chain_head_attends_to_earlier_tokens_only():
    torch.manual_seed(0)
    inner = {"vocab_size": 50, "chunk_size": 4, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    autoencoder = Autoencoder(AutoencoderConfig(**inner, initializer_range=1.0))
    head = randomized(make_head(ChainHead, autoencoder))
    hidden, prefix = torch.randn(3, 5, 16), torch.randint(50, (2, 3, 5, 3))
    states = head.states(hidden, prefix)
    assert states.shape == (2, 3, 5, 4, 8)
    for k in range(4):
        changed = prefix.clone()
        changed[..., k:] = (changed[..., k:] + 1) % 50
        torch.testing.assert_close(head.states(hidden, changed)[..., : k + 1, :], states[..., : k + 1, :])
        if k < 3:
            assert (head.states(hidden, changed)[..., k + 1, :] - states[..., k + 1, :]).abs().amax(-1).min() > 1e-3
        torch.testing.assert_close(head.states(hidden, prefix[..., :k], k), states[..., k : k + 1, :])  # one at a time
        torch.testing.assert_close(head.next_state(hidden, prefix[..., :k]), states[..., k, :])
    far = prefix.clone()
    far[..., 0] = (far[..., 0] + 1) % 50  # the last token depends on the first, too
    assert (head.states(hidden, far)[..., 3, :] - states[..., 3, :]).abs().amax(-1).min() > 1e-3
