"""The head contract: every head fulfils it, and a new head, defined below, needs nothing else to be used everywhere."""

import math
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from pydantic import Field
from starlette.testclient import TestClient
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from calm import cpu
from calm.autoencoder import Autoencoder, Posterior, SwiGLULayer, matmul_flops
from calm.checkpoint import load_calm
from calm.config import load_config
from calm.distributed import process_group
from calm.errors import ConfigError
from calm.evaluate.language_models import Options, evaluate_language_models
from calm.generate.sampler import Method, SamplingParams
from calm.generate.text import TextGenerator
from calm.heads import HEADS, Head, HeadConfig, VectorHead
from calm.heads.base import FORWARD_AND_BACKWARD, masked_mean, xavier_init
from calm.llama import LlamaConfig
from calm.model import Calm, PlainCalmConfig
from calm.noise import NoiseSource, RowNoise, draw_normal, draw_uniform
from calm.paper.cost import cost_of
from calm.scores.likelihood import mixture_cross_entropy
from calm.scores.vocabulary import VocabularySubset
from calm.serve.limits import Limits
from calm.serve.server import create_app
from calm.train.loop import train
from calm.transformer import Transformer

# -------------------------------------------------------------------------------------------------------- a new head

NAME = "gaussian-mixture"


class GaussianMixtureConfig(HeadConfig):
    num_components: int = Field(4, ge=1, description="components of the mixture")


class GaussianMixtureHead(VectorHead):
    """A mixture of diagonal Gaussians, trained by maximum likelihood (as in GIVT, Tschannen et al. 2024)."""

    Config = GaussianMixtureConfig

    def __init__(self, config: Any, autoencoder: Autoencoder | None = None):
        super().__init__(config, autoencoder)
        size, self.num_components = config.hidden_size, config.num_components
        self.layers = nn.Sequential(*(SwiGLULayer(size, 2 * size, 1e-6) for _ in range(config.num_head_layers)))
        self.output = nn.Linear(size, self.num_components * (1 + 2 * self.latent_size))

    def reset_parameters(self) -> None:
        xavier_init(self)

    def mixture(self, hidden: Tensor) -> MixtureSameFamily:
        """The distribution of the next latent given hidden states (..., H)."""
        output = self.output(self.layers(hidden)).float().unflatten(-1, (self.num_components, -1))
        logits, mean, log_std = output.split([1, self.latent_size, self.latent_size], dim=-1)
        components = Independent(Normal(mean, log_std.clamp(-7, 7).exp()), 1)
        return MixtureSameFamily(Categorical(logits=logits[..., 0]), components)

    def sample(self, hidden: Tensor, num_samples: int = 1, generator: NoiseSource = None) -> Tensor:
        mixture = self.mixture(hidden)
        uniform = draw_uniform(generator, hidden, num_samples, 1)  # (N, ..., 1)
        chosen = (uniform > mixture.mixture_distribution.probs.cumsum(-1)).sum(-1).clamp(max=self.num_components - 1)
        normal: Any = mixture.component_distribution.base_dist
        mean, std = (
            torch.take_along_dim(part[None], chosen[..., None, None], -2)[..., 0, :]
            for part in (normal.loc, normal.scale)
        )
        return (mean + std * draw_normal(generator, hidden, num_samples, self.latent_size)).to(hidden.dtype)

    def latent_loss(
        self, hidden: Tensor, posterior: Posterior, mask: Tensor | None = None, generator: NoiseSource = None
    ) -> Tensor:
        """Negative log-likelihood of a posterior sample."""
        target = posterior.float().sample(draw_normal(generator, hidden, 1, self.latent_size)[0])
        return masked_mean(-self.mixture(hidden).log_prob(target), mask)

    def sample_flops(self) -> tuple[float, float, float]:
        flops = matmul_flops(self)
        return FORWARD_AND_BACKWARD * flops, flops, 0.0

    def activation_size(self) -> float:
        return 16.0 * len(self.layers) * self.output.in_features + 4.0 * self.output.out_features


@pytest.fixture
def registered(monkeypatch) -> None:
    monkeypatch.setitem(HEADS, NAME, GaussianMixtureHead)


# ------------------------------------------------------------------------------------------------- all of the package

STEPS = 6
RECIPE: dict[str, Any] = {
    "data": {"chunk_size": 4, "sequence_length": 28, "batch_size": 4},
    "autoencoder": {"latent_size": 8, "hidden_size": 24, "intermediate_size": 32},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
    "train": {
        "steps": STEPS,
        "log_every": 1,
        "evaluate_every": STEPS,
        "evaluation_batches": 2,
        "checkpoint_every": STEPS,
        "tensorboard": False,
    },
}
BACKBONE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OVERRIDES = [f"language_model.head={NAME}", "language_model.num_components=3"]
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def recipe(prepared, tmp_path_factory) -> str:
    """A recipe of a language model with the default head, on an autoencoder that was trained for a few steps."""
    directory = tmp_path_factory.mktemp("recipe")
    values = {**RECIPE, "data": {**RECIPE["data"], "sets": [{"path": str(prepared)}]}}
    (directory / "autoencoder.yaml").write_text(yaml.safe_dump(values))
    train(load_config(str(directory / "autoencoder.yaml")), directory / "autoencoder")
    model = {"autoencoder": str(directory / "autoencoder" / "model"), "backbone": BACKBONE, "num_head_layers": 1}
    values |= {"stage": "language-model", "language_model": model}
    (directory / "language-model.yaml").write_text(yaml.safe_dump(values))
    return str(directory / "language-model.yaml")


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory) -> Path:
    """The model directory of a run with the new head."""
    run = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HEADS, NAME, GaussianMixtureHead)
        train(load_config(recipe, OVERRIDES), run)
    return run / "model"


def test_training_and_loading(registered, recipe, tmp_path):
    config = load_config(recipe, OVERRIDES)
    assert config.language_model.head_settings == {"num_components": 3}
    losses = []
    summary = train(config, tmp_path / "run", report=lambda report: losses.append(report.metrics["loss"]))
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert math.isfinite(summary["score"])
    assert load_config(str(tmp_path / "run" / "config.yaml")) == config
    longer = load_config(recipe, [*OVERRIDES, f"train.steps={STEPS + 2}"])
    train(longer, tmp_path / "run", resume=True, report=lambda report: losses.append(report.metrics["loss"]))
    assert len(losses) == STEPS + 2
    directory = tmp_path / "run" / "model"
    for model in (load_calm(directory), AutoModelForCausalLM.from_pretrained(directory)):
        assert type(model.head) is GaussianMixtureHead
        assert model.config.num_components == model.head.num_components == 3


def test_evaluation(registered, trained, prepared):
    with process_group() as world:
        options = Options(num_latents=4, batch_size=2)
        answer = evaluate_language_models([trained], prepared, "validation", options, world)
    (scores,) = answer["models"].values()
    assert 0 < scores["cross_entropy_bound"] < 20
    assert -100 <= scores["brier_1"]["value"] <= 100


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.5, 50), SamplingParams(0.5, 50, "mixture", top_p=0.9)]
)
def test_generation(registered, trained, params, int8):
    generator = TextGenerator(trained, int8=int8)
    prompt = generator.tokenizer.encode(PROMPT)
    texts = []
    for _ in range(2):
        deltas = list(generator.stream([prompt, prompt], params, max_new_tokens=12, seed=1))
        assert {delta.index for delta in deltas} == {0, 1}
        assert all(0 <= token < generator.model.vocab_size for delta in deltas for token in delta.token_ids)
        texts.append(["".join(delta.text for delta in deltas if delta.index == i) for i in range(2)])
    assert texts[0] == texts[1]  # the same seed
    assert any(texts[0])


def test_serving(registered, trained):
    app = create_app({"mixture": TextGenerator(trained)}, Limits(), [])
    with TestClient(app) as client:
        (info,) = client.get("/v1/models").json()["data"]
        assert (info["head"], info["chunk_size"]) == (NAME, 4)
        for temperature in (1, 0.5):
            request = {"model": "mixture", "prompt": PROMPT, "max_tokens": 12, "seed": 1}
            sampling = {"temperature": temperature, "num_candidates": 50}
            response = client.post("/v1/completions", json={**request, **sampling})
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")
            assert 0 <= response.json()["usage"]["completion_tokens"] <= 12


def test_cost(registered, recipe, trained):
    """Against the parameters of the trained model, and the FLOPs that torch counts."""
    model = load_calm(trained)
    cost = cost_of("mixture", load_config(recipe, OVERRIDES), context=6, candidates=5)
    assert cost.parts["head"].parameters == sum(p.numel() for p in model.head.parameters())
    assert cost.parameters_with_autoencoder == sum(p.numel() for p in model.parameters())
    assert cost.peak_memory > 0
    chunks = torch.zeros(1, 6, 4, dtype=torch.long)
    for count, expected in (
        (1, cost.inference_flops_per_token),
        (5, cost.inference_flops_per_token_with_candidates),
    ):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.head.propose(model.hidden_states(chunks), count).tokens()
        assert expected == pytest.approx(counter.get_total_flops() / chunks.numel(), rel=0.03)


@torch.no_grad()
def test_quantization(registered, trained):
    model, chunks = load_calm(trained), torch.arange(24).view(1, 6, 4)
    expected = model.head.sample(model.hidden_states(chunks), 3, RowNoise([0]))
    cpu.optimize(model, int8=True)
    assert not any(isinstance(part, nn.Linear) for part in model.head.modules())
    found = model.head.sample(model.hidden_states(chunks), 3, RowNoise([0]))
    assert (found - expected).norm() / expected.norm() < 0.1


def test_fields_of_the_new_head_are_checked(registered, recipe):
    for override, message in (
        ("language_model.num_components=0", "num_components: input should be greater than or equal to 1, not 0"),
        ("language_model.num_component=2", "unknown key num_component; did you mean num_components"),
        ("language_model.head=gaussian-mixtures", f"did you mean {NAME}"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(recipe, [OVERRIDES[0], override])


def test_new_head_is_unknown_without_its_line(recipe):
    with pytest.raises(ConfigError, match=f"head must be one of energy, .* not '{NAME}'"):
        load_config(recipe, OVERRIDES)


def test_new_head_learns_a_mixture():
    """It is a density model: on a mixture of two Gaussians it reaches their entropy."""
    torch.manual_seed(0)
    config = PlainCalmConfig(BACKBONE, AUTOENCODER)
    config.__dict__.update({"num_components": 2, "num_head_layers": 1})
    head = GaussianMixtureHead(config)
    head.reset_parameters()
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    hidden, log_std = torch.randn(1, 32), torch.full((256, LATENT_SIZE), math.log(0.5))
    loss = torch.zeros(())
    for _ in range(300):
        signs = 2.0 * torch.randint(2, (256, 1)) - 1
        loss = head.latent_loss(hidden.expand(256, -1), Posterior(3 * signs.expand(-1, LATENT_SIZE), log_std))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    entropy = math.log(2) + LATENT_SIZE * (0.5 * math.log(2 * math.pi * math.e) + math.log(0.5))
    assert loss.item() == pytest.approx(entropy, abs=0.3)
    with torch.no_grad():
        samples = head.sample(hidden, 4000)[:, 0]
    positive = samples[samples.mean(-1) > 0]
    assert len(positive) / len(samples) == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(positive.mean(0), torch.full((LATENT_SIZE,), 3.0), rtol=0, atol=0.2)
    torch.testing.assert_close(positive.std(0), torch.full((LATENT_SIZE,), 0.5), rtol=0, atol=0.1)


# --------------------------------------------------------------------------------------------------------- every head

B, L, N, K, V, LATENT_SIZE = 3, 2, 5, 3, 20, 4
AUTOENCODER = {
    "vocab_size": V,
    "chunk_size": K,
    "latent_size": LATENT_SIZE,
    "hidden_size": 8,
    "intermediate_size": 8,
    "initializer_range": 0.5,
}
NAMES = [*HEADS, NAME, "softmax"]


def make_head(name: str) -> Head:
    """The head of a small model with random weights; "softmax" is that of a Transformer."""
    torch.manual_seed(0)
    if name == "softmax":
        return Transformer(LlamaConfig(**BACKBONE, vocab_size=V)).head
    fields = {"num_sampling_steps": 20} if name == "diffusion" else {}
    model = Calm(PlainCalmConfig({**BACKBONE, "vocab_size": V}, AUTOENCODER, head=name, num_head_layers=1, **fields))
    for parameter in model.head.parameters():
        nn.init.normal_(parameter, std=0.1)  # output layers start at zero
    return model.head


@pytest.fixture(params=NAMES)
def head(request, registered) -> Head:
    return make_head(request.param)


def make_inputs(head: Head) -> tuple[Tensor, Tensor]:
    """Hidden states (B, L, H) and chunks (B, L, K)."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, L, BACKBONE["hidden_size"], generator=generator)
    return hidden, torch.randint(V, (B, L, head.chunk_size), generator=generator)


def noise(*rows: int) -> RowNoise:
    return RowNoise([7 + row for row in rows or range(B)])


def test_loss_is_a_mean_over_positions(head):
    hidden, chunks = make_inputs(head)
    hidden.requires_grad_()
    loss = head.loss(hidden, chunks, noise=noise())
    assert loss.shape == ()
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.isfinite().all()
    assert gradient.flatten(0, 1).any(-1).all()
    torch.testing.assert_close(head.loss(hidden, chunks, mask=torch.ones(B, L), noise=noise()), loss)
    parts = []
    for row in range(B):
        mask = torch.zeros(B, L)
        mask[row] = 1
        parts.append(head.loss(hidden, chunks, mask=mask, noise=noise()))
        (gradient,) = torch.autograd.grad(parts[-1], hidden)
        assert gradient[row].any()
        assert not gradient[[other for other in range(B) if other != row]].any()
    torch.testing.assert_close(torch.stack(parts).mean(), loss)
    assert head.loss(hidden, chunks, mask=torch.zeros(B, L), noise=noise()) == 0
    whole = VocabularySubset(torch.arange(V), torch.ones(V))
    torch.testing.assert_close(head.loss(hidden, chunks, noise=noise(), vocabulary=whole), loss)


@torch.no_grad()
def test_proposals_of_every_shape(head):
    hidden, _ = make_inputs(head)
    size = head.chunk_size
    for states in (hidden, hidden[:, 0]):
        shape = states.shape[:-1]
        proposals = head.propose(states, N, noise())
        assert isinstance(proposals.lazy, bool)
        tokens = proposals.tokens()
        assert tokens.shape == (N, *shape, size)
        assert tokens.dtype == torch.long
        assert 0 <= tokens.min() <= tokens.max() < V
        for k in range(size):
            log_probs = proposals.log_probs(tokens[0, ..., :k])
            assert log_probs.shape == (1 if head.exact_likelihood else N, *shape, V)
            torch.testing.assert_close(log_probs.logsumexp(-1), torch.zeros(log_probs.shape[:-1]), rtol=0, atol=1e-5)
        if head.autoencoder is not None:
            assert proposals.latents().shape == (N, *shape, LATENT_SIZE)
            assert proposals.latents().isfinite().all()
    assert len({tuple(chunk) for chunk in tokens.flatten(0, -2).tolist()}) > 1


@torch.no_grad()
def test_tokens_at_is_consistent_with_tokens(head):
    """Whether or not all tokens have been asked for before."""
    hidden = make_inputs(head)[0][:, 0]
    tokens = head.propose(hidden, N, noise()).tokens()
    draws, rows = torch.tensor([0, 4, 2, 2]), torch.tensor([1, 0, 2, 2])
    for first in range(head.chunk_size):
        for last in range(first + 1, head.chunk_size + 1):
            found = head.propose(hidden, N, noise()).tokens_at(draws, rows, first, last)
            assert torch.equal(found, tokens[draws, rows, first:last])


@torch.no_grad()
def test_draws_of_a_row_depend_on_its_noise_alone(head):
    hidden = make_inputs(head)[0][:, 0]
    tokens = head.propose(hidden, N, noise()).tokens()
    assert torch.equal(head.propose(hidden, N, noise()).tokens(), tokens)
    assert torch.equal(head.propose(hidden[[2, 1]], N, noise(2, 1)).tokens(), tokens[:, [2, 1]])


@torch.no_grad()
def test_log_probs_are_those_that_tokens_are_drawn_from(head):
    """A head with token probabilities samples from them; else a latent's tokens are its most probable ones.

    The probit head adds noise to its logits instead of sampling their softmax (test_probit.py compares the two).
    """
    hidden = make_inputs(head)[0][:, 0]
    count = 20_000 if head.exact_likelihood else N
    proposals = head.propose(hidden, count, noise())
    tokens = proposals.tokens()
    if isinstance(head, VectorHead):
        for k in range(head.chunk_size):
            assert torch.equal(proposals.log_probs(tokens[0, :, :k]).argmax(-1), tokens[..., k])
    if head.exact_likelihood:
        expected = proposals.log_probs(tokens[0, :, :0])[0].exp()
        found = nn.functional.one_hot(tokens[..., 0], V).float().mean(0)
        error = (expected * (1 - expected) / count).sqrt()
        assert ((found - expected).abs() < 4.5 * error + 1e-6).all()


@torch.no_grad()
def test_cross_entropy_is_that_of_the_mixture_of_draws(head):
    hidden, chunks = make_inputs(head)
    losses = head.cross_entropy(hidden, chunks, N, noise())
    assert losses.shape == chunks.shape
    proposals = head.propose(hidden, N, noise())
    each = []
    for k in range(head.chunk_size):
        log_probs = proposals.log_probs(chunks[..., :k])
        each.append(-torch.take_along_dim(log_probs, chunks[None, ..., k, None], -1))
    expected = mixture_cross_entropy(torch.cat(each, dim=-1))
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-4)
    assert (losses > 0).all()


def test_sampling_methods(head):
    assert set(head.methods) <= set(get_args(Method))
    for tempered, truncated in product((False, True), repeat=2):
        assert head.default_method(tempered, truncated) in head.methods
    for method in get_args(Method):
        if method in head.methods:
            assert SamplingParams(0.5, method=method).resolve(head).method == method
        else:
            with pytest.raises(ConfigError, match="not available for this model"):
                SamplingParams(0.5, method=method).resolve(head)


def test_costs(head):
    cost = head.cost()
    assert sum(cost.parameters.values()) > 0
    for flops in (cost.training, cost.generation, cost.candidate):
        assert all(value >= 0 for value in flops.values())
    assert sum(cost.training.values()) > 0
    assert sum(cost.generation.values()) > 0
    assert bool(cost.candidate) != head.exact_likelihood
    assert sum(cost.candidate.values()) <= sum(cost.generation.values())
    assert sum(head.cost(0.5).training.values()) <= sum(cost.training.values())
    assert head.cost(0.5).generation == cost.generation
    assert head.activation_size() > 0


def test_parts_for_backends(head):
    streamed = head.streamed_weights()
    assert streamed
    assert all(isinstance(weight, Tensor) and weight.ndim == 2 for weight in streamed)
    inside = {id(module) for module in head.modules()}
    assert all(id(module) in inside for module in (*head.compile_units(), *head.quantizable()))


def test_the_autoencoder_is_not_part_of_the_head(head):
    """The model owns it: a head has neither its parameters nor its weights in a state dict."""
    if head.autoencoder is None:
        return
    frozen = {id(parameter) for parameter in head.autoencoder.parameters()}
    assert not any(id(parameter) in frozen for parameter in head.parameters())
    assert not any(isinstance(module, Autoencoder) for module in head.modules())
    head.initialize_from(head.autoencoder)


def test_initialisation_is_reproducible(head):
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        head.reset_parameters()
        weights.append({name: value.clone() for name, value in head.state_dict().items()})
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_config_has_defaults_and_documentation(registered):
    for name, kind in HEADS.items():
        for field, info in kind.Config.model_fields.items():
            assert info.description, (name, field)
        assert kind.Config().model_dump().keys() == kind.Config.model_fields.keys()
