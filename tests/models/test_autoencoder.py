"""The autoencoder: shapes for every K, the loss against a plain computation, what each regulariser does."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

import calm  # noqa: F401 - registers the Auto classes
from calm.models.autoencoder import ChunkAutoencoder
from calm.models.configuration import ChunkAutoencoderConfig
from calm.models.posterior import Posterior, drop, floored_kl
from calm.noise import RowNoise


def make(chunk_size=4, **fields):
    torch.manual_seed(0)
    small = {"vocab_size": 50, "latent_size": 6, "hidden_size": 16, "intermediate_size": 24}
    return ChunkAutoencoder(ChunkAutoencoderConfig(chunk_size=chunk_size, **{**small, **fields}))


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layers", [0, 2, 4])
def test_shapes(chunk_size, layers):
    model = make(chunk_size, num_encoder_layers=layers, num_decoder_layers=layers)
    chunks = torch.randint(50, (2, 5, chunk_size))
    posterior = model.encode(chunks)
    assert posterior.mean.shape == posterior.log_std.shape == (2, 5, 6)
    assert model.decode(posterior.mean).shape == (2, 5, chunk_size, 50)
    ids, nats = model.reconstruct(posterior.mean, chunks)
    logits = model.decode(posterior.mean)
    assert torch.equal(ids, logits.argmax(-1))
    expected = F.cross_entropy(logits.flatten(0, 2), chunks.flatten(), reduction="none").view_as(chunks)
    torch.testing.assert_close(nats, expected)


def test_loss_is_that_of_the_paper():
    """Reconstruction summed over K plus beta times the floored KL, by the formulas, with the same noise."""
    model = make(token_dropout=0.0, latent_dropout=0.0, kl_weight=0.01, kl_floor=0.5).train()
    ids = torch.randint(50, (3, 20))
    output = model(ids, noise=RowNoise([1, 2, 3]))
    chunks = ids.view(3, 5, 4)
    posterior = model.encode(chunks)
    noise = torch.stack([torch.randn(5, 6, generator=torch.Generator().manual_seed(s)) for s in (1, 2, 3)])
    logits = model.decode(posterior.mean + posterior.log_std.exp() * noise)
    reconstruction = F.cross_entropy(logits.flatten(0, 2), chunks.flatten()) * 4
    variance, mean = (2 * posterior.log_std).exp(), posterior.mean
    kl = -0.5 * (1 + variance.log() - variance - mean**2)
    torch.testing.assert_close(output.reconstruction, reconstruction)
    torch.testing.assert_close(output.kl, kl.clamp(min=0.5).sum(-1).mean())
    torch.testing.assert_close(output.loss, reconstruction + 0.01 * kl.clamp(min=0.5).sum(-1).mean())


def test_gradients_are_those_of_the_plain_loss():
    def gradients(plain: bool):
        model = make(token_dropout=0.0, latent_dropout=0.0).train()
        ids = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(0))
        if plain:
            noise = torch.stack([torch.randn(5, 6, generator=torch.Generator().manual_seed(s)) for s in (1, 2, 3)])
            posterior = model.encode(ids.view(3, 5, 4))
            logits = model.decode(posterior.sample(noise))
            loss = F.cross_entropy(logits.flatten(0, 2), ids.flatten()) * 4
            loss = loss + model.config.kl_weight * floored_kl(posterior, 0.5).mean()
        else:
            loss = model(ids, noise=RowNoise([1, 2, 3])).loss
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    ours, plain = gradients(False), gradients(True)
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], msg=name)


def test_kl_against_sampling():
    posterior = Posterior(torch.tensor([0.7, -1.2]), torch.tensor([-0.5, 0.3]))
    generator = torch.Generator().manual_seed(0)
    z = posterior.sample(torch.randn(400_000, 2, generator=generator))
    q = torch.distributions.Normal(posterior.mean, posterior.std).log_prob(z)
    p = torch.distributions.Normal(0.0, 1.0).log_prob(z)
    # The standard error of the mean of q - p is about 0.003 here: five of them.
    torch.testing.assert_close(posterior.kl(), (q - p).mean(0), atol=0.015, rtol=0)


def test_the_floor_takes_the_pressure_from_small_dimensions():
    mean = torch.tensor([[0.1, 2.0]], requires_grad=True)
    floored_kl(Posterior(mean, torch.zeros(1, 2)), floor=0.5).sum().backward()
    assert mean.grad is not None
    assert mean.grad.tolist() == [[0.0, 2.0]]


def test_chunks_without_real_tokens_do_not_count():
    model = make(token_dropout=0.0, latent_dropout=0.0).eval()
    ids = torch.randint(50, (2, 8))
    alone = model(ids[:, :4], noise=RowNoise([1, 2]))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 4:] = False
    # The second chunk changes nothing; noise is drawn for a row as a whole, so compare without it.
    model.config.variational = False
    both, first = model(ids, mask), model(ids[:, :4])
    torch.testing.assert_close(both.loss, first.loss)
    assert alone.loss != first.loss


def test_parts_of_a_batch_add_up():
    """Two halves with the count of the whole give the loss and gradient of the whole."""
    model = make().train()
    ids = torch.randint(50, (4, 12))
    model(ids, noise=RowNoise([1, 2, 3, 4])).loss.backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        model(ids[rows], noise=RowNoise([1, 2, 3, 4][rows]), num_chunks=12).loss.backward()
    for expected, parameter in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_dropouts_have_their_rates():
    model = make(token_dropout=0.3).train()
    shown = []
    model.embedding.register_forward_hook(lambda _, arguments, __: shown.append(arguments[0]))
    model(torch.full((50, 400), 7), noise=RowNoise(list(range(50))))
    share = (shown[0] == model.config.mask_token_id).float().mean().item()
    assert abs(share - 0.3) < 5 * math.sqrt(0.21 / 20_000)
    generator = torch.Generator().manual_seed(0)
    dropped = drop(torch.ones(100_000), torch.rand(100_000, generator=generator), 0.2)
    assert set(dropped.unique().tolist()) == {0.0, 1.25}
    assert abs(dropped.mean().item() - 1) < 5 * 1.25 * math.sqrt(0.16 / 100_000)
    shown.clear()
    model.eval()(torch.full((2, 8), 7))
    assert (shown[0] == 7).all()


def test_reconstruction_only():
    model = make(variational=False)
    posterior = model.encode(torch.randint(50, (3, 4)))
    assert posterior.std.eq(0).all()
    output = model(torch.randint(50, (3, 8)))
    assert output.kl == 0
    assert output.loss == output.reconstruction


def test_save_and_load(tmp_path):
    model = make().eval()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is ChunkAutoencoder
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    chunks = torch.randint(50, (3, 4))
    assert torch.equal(loaded.decode(loaded.encode(chunks).mean), model.decode(model.encode(chunks).mean))


def test_uneven_layers_are_refused():
    with pytest.raises(ValueError, match="num_encoder_layers must be even"):
        make(num_encoder_layers=3)


def test_paper_sizes():
    """§7.1: autoencoders of about 75M parameters with 128,257 words and width 512."""
    with torch.device("meta"):
        for chunk_size in (1, 2, 4, 8):
            model = ChunkAutoencoder(ChunkAutoencoderConfig(chunk_size=chunk_size, latent_size=32 * chunk_size))
            assert 74e6 < sum(p.numel() for p in model.parameters()) < 79e6


def test_row_noise_belongs_to_the_row():
    whole, part = RowNoise([5, 6, 7]), RowNoise([6])
    assert torch.equal(whole.normal(3, 2)[1], part.normal(3, 2)[0])
    assert torch.equal(whole.uniform(4)[1], part.uniform(4)[0])
