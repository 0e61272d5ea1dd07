"""The autoencoder: shapes for every K, the loss against a plain computation, and the effect of each regulariser."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

import calm  # noqa: F401 - registers the Auto classes
from calm.autoencoder import Autoencoder, AutoencoderConfig, Posterior, chunk_mask, floored_kl, latent_dropout
from calm.checkpoint import load_autoencoder, save_model
from calm.hf import ChunkAutoencoder, ChunkAutoencoderConfig
from calm.noise import RowNoise

SMALL = {"vocab_size": 50, "latent_size": 6, "hidden_size": 16, "intermediate_size": 24}


def make_model(chunk_size=4, **fields) -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder(AutoencoderConfig(chunk_size=chunk_size, **{**SMALL, **fields}))


def make_hf_model() -> ChunkAutoencoder:
    """The same model as a class of transformers."""
    model = ChunkAutoencoder(ChunkAutoencoderConfig(chunk_size=4, **SMALL))
    model.load_state_dict(make_model().state_dict())
    return model


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layers", [0, 2, 4])
def test_shapes(chunk_size, layers):
    model = make_model(chunk_size, num_encoder_layers=layers, num_decoder_layers=layers)
    chunks = torch.randint(50, (2, 5, chunk_size))
    posterior = model.encode(chunks)
    assert posterior.mean.shape == posterior.log_std.shape == (2, 5, 6)
    logits = model.decode(posterior.mean)
    assert logits.shape == (2, 5, chunk_size, 50)
    ids, losses = model.reconstruct(posterior.mean, chunks)
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.equal(ids, model.tokens(posterior.mean))
    expected = F.cross_entropy(logits.flatten(0, 2), chunks.flatten(), reduction="none").view_as(chunks)
    torch.testing.assert_close(losses, expected)


def test_decoding_a_range_of_tokens():
    """States of some tokens of a chunk are those of the whole chunk."""
    model = make_model()
    latents = torch.randn(3, 6)
    whole, shared = model.decoder(latents), model.decoder.chunk_states(latents)
    for first in range(4):
        for last in range(first + 1, 5):
            torch.testing.assert_close(model.decoder.token_states(shared, first, last), whole[:, first:last])


def test_loss_is_that_of_the_paper():
    """Reconstruction summed over K plus beta times the floored KL, by the formulas, with the same noise."""
    model = make_model(token_dropout=0.0, latent_dropout=0.0, kl_weight=0.01, kl_floor=0.5).train()
    chunks = torch.randint(50, (3, 5, 4))
    output = model(chunks, noise=RowNoise([1, 2, 3]))
    posterior = model.encode(chunks)
    noise = torch.stack([torch.randn(5, 6, generator=torch.Generator().manual_seed(s)) for s in (1, 2, 3)])
    logits = model.decode(posterior.mean + posterior.log_std.exp() * noise)
    reconstruction = F.cross_entropy(logits.flatten(0, 2), chunks.flatten()) * 4
    variance, mean = (2 * posterior.log_std).exp(), posterior.mean
    kl = -0.5 * (1 + variance.log() - variance - mean**2)
    torch.testing.assert_close(output["reconstruction"], reconstruction)
    torch.testing.assert_close(output["kl"], kl.clamp(min=0.5).sum(-1).mean())
    torch.testing.assert_close(output["loss"], reconstruction + 0.01 * kl.clamp(min=0.5).sum(-1).mean())


def test_gradients_are_those_of_the_plain_loss():
    def gradients(plain: bool):
        model = make_model(token_dropout=0.0, latent_dropout=0.0).train()
        chunks = torch.randint(50, (3, 5, 4), generator=torch.Generator().manual_seed(0))
        if plain:
            noise = torch.stack([torch.randn(5, 6, generator=torch.Generator().manual_seed(s)) for s in (1, 2, 3)])
            posterior = model.encode(chunks)
            logits = model.decode(posterior.sample(noise))
            loss = F.cross_entropy(logits.flatten(0, 2), chunks.flatten()) * 4
            loss = loss + model.config.kl_weight * floored_kl(posterior, 0.5).mean()
        else:
            loss = model(chunks, noise=RowNoise([1, 2, 3]))["loss"]
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


def test_floored_dimensions_have_no_kl_gradient():
    mean = torch.tensor([[0.1, 2.0]], requires_grad=True)
    floored_kl(Posterior(mean, torch.zeros(1, 2)), floor=0.5).sum().backward()
    assert mean.grad is not None
    assert mean.grad.tolist() == [[0.0, 2.0]]


def test_masked_chunks_do_not_count():
    model = make_model(token_dropout=0.0, latent_dropout=0.0).eval()
    chunks = torch.randint(50, (2, 2, 4))
    with_noise = model(chunks[:, :1], noise=RowNoise([1, 2]))
    mask = torch.tensor([[1, 0], [1, 0]])
    # Noise is drawn for all positions of a row at once, so compare without it.
    model.config = model.config.model_copy(update={"variational": False})
    both, first = model(chunks, mask), model(chunks[:, :1])
    torch.testing.assert_close(both["loss"], first["loss"])
    assert with_noise["loss"] != first["loss"]


def test_a_chunk_counts_if_any_of_its_tokens_is_valid():
    tokens = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]])
    mask = chunk_mask(tokens, 2)
    assert mask.dtype == torch.float32
    assert mask.tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert torch.equal(chunk_mask(tokens.bool(), 2), mask)


def test_micro_batches_add_up():
    """Two parts of a batch, with the count of the whole, give the loss and gradient of the whole."""
    model = make_model().train()
    chunks = torch.randint(50, (4, 3, 4))
    loss = model(chunks, noise=RowNoise([1, 2, 3, 4]))["loss"]
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    losses = []
    for rows in (slice(0, 1), slice(1, 4)):
        losses.append(model(chunks[rows], noise=RowNoise([1, 2, 3, 4][rows]), num_chunks=12)["loss"])
        losses[-1].backward()
    torch.testing.assert_close(sum(losses), loss)
    for gradient, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_dropout_rates():
    model = make_model(token_dropout=0.3).train()
    inputs = []
    model.embedding.register_forward_hook(lambda _, arguments, __: inputs.append(arguments[0]))
    model(torch.full((50, 100, 4), 7), noise=RowNoise(list(range(50))))
    share = (inputs[0] == model.config.mask_token_id).float().mean().item()
    assert abs(share - 0.3) < 5 * math.sqrt(0.21 / 20_000)
    generator = torch.Generator().manual_seed(0)
    dropped = latent_dropout(torch.ones(100_000), torch.rand(100_000, generator=generator), 0.2)
    assert set(dropped.unique().tolist()) == {0.0, 1.25}
    assert abs(dropped.mean().item() - 1) < 5 * 1.25 * math.sqrt(0.16 / 100_000)
    inputs.clear()
    model.eval()(torch.full((2, 2, 4), 7))
    assert (inputs[0] == 7).all()


def test_reconstruction_only():
    model = make_model(variational=False)
    posterior = model.encode(torch.randint(50, (3, 4)))
    assert posterior.std.eq(0).all()
    output = model(torch.randint(50, (3, 2, 4)))
    assert output["kl"] == 0
    assert output["loss"] == output["reconstruction"]


def test_save_and_load(tmp_path):
    """A directory is the same whether the plain or the transformers class has written it, and either class reads it."""
    model = make_model().eval()
    save_model(model, tmp_path / "plain")
    make_hf_model().save_pretrained(tmp_path / "transformers")
    chunks = torch.randint(50, (3, 4))
    for directory in (tmp_path / "plain", tmp_path / "transformers"):
        assert (directory / "model.safetensors").exists()
        loaded = AutoModel.from_pretrained(directory)
        assert type(loaded) is ChunkAutoencoder
        assert AutoConfig.from_pretrained(directory).to_dict() == loaded.config.to_dict()
        plain = load_autoencoder(directory)
        assert type(plain) is Autoencoder
        assert plain.config == model.config
        for other in (loaded, plain):
            assert other.state_dict().keys() == model.state_dict().keys()
            for name, value in model.state_dict().items():
                assert torch.equal(other.state_dict()[name], value), name
            assert torch.equal(other.decode(other.encode(chunks).mean), model.decode(model.encode(chunks).mean))


def test_transformers_class_computes_the_same_loss():
    """From rows of tokens and their attention mask instead of chunks."""
    input_ids, mask = torch.randint(50, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[:, :7] = mask[0, 16:] = 0
    expected = make_model().train()(input_ids.view(2, 5, 4), chunk_mask(mask, 4), RowNoise([1, 2]))
    output = make_hf_model().train()(input_ids, mask, RowNoise([1, 2]))
    assert output.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(output[name], value), name


@pytest.mark.parametrize("config", [AutoencoderConfig, ChunkAutoencoderConfig])
@pytest.mark.parametrize("name", ["num_encoder_layers", "num_decoder_layers"])
def test_odd_numbers_of_layers_are_refused(config, name):
    with pytest.raises(ValueError, match=rf"{name}\s+Input should be a multiple of 2"):
        config(**{name: 3})


def test_sizes_of_the_paper():
    """§7.1: autoencoders of about 75M parameters with 128,257 tokens and width 512."""
    with torch.device("meta"):
        for chunk_size in (1, 2, 4, 8):
            model = Autoencoder(AutoencoderConfig(chunk_size=chunk_size, latent_size=32 * chunk_size))
            assert 74e6 < sum(p.numel() for p in model.parameters()) < 79e6


def test_row_noise_depends_on_the_row_alone():
    whole, part = RowNoise([5, 6, 7]), RowNoise([6])
    assert torch.equal(whole.normal(3, 2)[1], part.normal(3, 2)[0])
    assert torch.equal(whole.uniform(4)[1], part.uniform(4)[0])
