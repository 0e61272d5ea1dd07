"""Published checkpoints: the imported model computes what the format's description says, and every key is used.

The functions `reference_*` implement that description on a state dict with the authors' names; they share no code with
the package. The numbers in ../shared/parity come from the authors' own code.
"""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaModel

from calm.autoencoder import Posterior
from calm.checkpoint import load_autoencoder, load_calm
from calm.errors import UserError
from calm.hf import CalmForCausalLM, ChunkAutoencoder
from calm.official import import_language_model, import_official
from calm.scores import energy_loss

V, D, FF, Z, H, BLOCKS, NOISE = 50, 16, 24, 6, 32, 2, 10


def linear(out, into, bias=True):
    shapes = {"weight": (out, into), "bias": (out,)}
    return shapes if bias else {"weight": (out, into)}


def norm(size, bias=True):
    return {"weight": (size,), "bias": (size,)} if bias else {"weight": (size,)}


def autoencoder_shapes(k, layers):
    shapes = {"encoder.embed_tokens": {"weight": (V, D)}, "encoder.squeeze_layer": linear(D, k * D)}
    shapes |= {"encoder.norm": norm(D, False), "encoder.hidden_to_latent": linear(2 * Z, D)}
    shapes |= {"decoder.latent_to_hidden": linear(D, Z), "decoder.expand_layer": linear(k * D, D)}
    shapes |= {"decoder.norm": norm(D, False)}
    for part in ("encoder", "decoder"):
        for i in range(layers):
            layer = f"{part}.{part}_layers.{i}"
            shapes[f"{layer}.layernorm"] = norm(D, False)
            shapes |= {f"{layer}.mlp.{name}_proj": linear(FF, D, False) for name in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj"] = linear(D, FF, False)
    return shapes


def head_shapes(head):
    if head == "energy":
        shapes = {
            "noise_embd": linear(H, NOISE),
            "hidden_embd": linear(H, H),
            "norm_noise": norm(H),
            "norm_hidden": norm(H),
        }
        for i in range(BLOCKS):
            block = f"mlp_blocks.{i}"
            shapes |= {
                f"{block}.in_ln": norm(H),
                f"{block}.linears.0": linear(H, 2 * H),
                f"{block}.linears.2": linear(H, H),
            }
            shapes |= {f"{block}.linears.4": linear(2 * H, H), f"{block}.down_proj": linear(H, H)}
        shapes |= {
            "final_layer.in_ln": norm(H),
            "final_layer.linears.0": linear(H, H),
            "final_layer.linears.2": linear(Z, H),
        }
        return {
            f"{name}.{key}": value for name in ("mlp_generator", "generative_head") for key, value in shapes.items()
        }
    shapes = {"time_embed.mlp.0": linear(H, 256), "time_embed.mlp.2": linear(H, H), "cond_embed": linear(H, H)}
    shapes |= {"input_proj": linear(H, Z), "final_layer.adaLN_modulation.1": linear(2 * H, H)}
    shapes["final_layer.linear"] = linear(Z if head == "flow" else 2 * Z, H)
    for i in range(BLOCKS):
        block = f"res_blocks.{i}"
        shapes |= {f"{block}.in_ln": norm(H), f"{block}.mlp.0": linear(H, H), f"{block}.mlp.2": linear(H, H)}
        shapes[f"{block}.adaLN_modulation.1"] = linear(3 * H, H)
    return {f"generative_head.net.{key}": value for key, value in shapes.items()}


def random_weights(shapes, generator):
    def value(shape):
        return torch.randn(shape, generator=generator) * (0.5 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.3)

    return {f"{module}.{kind}": value(shape) for module, kinds in shapes.items() for kind, shape in kinds.items()}


def publish(directory, head="energy", k=4, layers=2, **changes):
    """A language model and its autoencoder with random weights, in the authors' format."""
    generator = torch.Generator().manual_seed(0)
    inner = random_weights(autoencoder_shapes(k, layers), generator)
    inner["decoder.lm_head_weight"] = inner["encoder.embed_tokens.weight"].clone()
    fields = {
        "hidden_size": H,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": V,
    }
    fields |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 500.0, "max_position_embeddings": 64}
    torch.manual_seed(0)
    backbone = LlamaModel(LlamaConfig(**fields))
    weights = {f"ae_model.{key}": value for key, value in inner.items()}
    weights |= {f"transformer.{key}": value.clone() for key, value in backbone.state_dict().items()}
    weights |= random_weights(
        {"embed_proj.0": linear(2 * H, k * H), "embed_proj.2": linear(H, 2 * H), "embed_proj.3": norm(H)}, generator
    )
    of_head = random_weights(head_shapes(head), generator)
    for key in [key for key in of_head if key.startswith("generative_head.") and head == "energy"]:
        of_head[key] = of_head[key.replace("generative_head", "mlp_generator")].clone()
    weights |= of_head
    name = {"energy": "EnergyTransformer", "flow": "FlowTransformer", "diffusion": "DiffusionTransformer"}[head]
    config = {**fields, "architectures": [name], "patch_size": k, "latent_size": Z, "num_mlp_layers": BLOCKS}
    config |= {"noise_size": NOISE, "num_samples": 8, "beta": 1.0, "eos_token_id": 1, "pad_token_id": 2} | changes
    encoder = {"patch_size": k, "latent_size": Z, "hidden_size": D, "intermediate_size": FF, "vocab_size": V}
    encoder |= {"num_encoder_layers": layers, "num_decoder_layers": layers, "ae_dropout": 0.2}
    for place, content, tensors in (("model", config, weights), ("autoencoder", encoder, inner)):
        (directory / place).mkdir(parents=True)
        (directory / place / "config.json").write_text(json.dumps(content))
        torch.save(tensors, directory / place / "pytorch_model.bin")
    return directory / "model", directory / "autoencoder", weights, backbone


def lin(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def ln(w, name, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)


def rms(w, name, x):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]


def reference_layer(w, name, x):
    y = rms(w, f"{name}.layernorm", x)
    return x + lin(
        w, f"{name}.mlp.down_proj", F.silu(lin(w, f"{name}.mlp.gate_proj", y)) * lin(w, f"{name}.mlp.up_proj", y)
    )


def reference_encode(w, chunks, layers):
    x = w["ae_model.encoder.embed_tokens.weight"][chunks]
    for i in range(layers // 2):
        x = reference_layer(w, f"ae_model.encoder.encoder_layers.{i}", x)
    x = lin(w, "ae_model.encoder.squeeze_layer", x.flatten(-2))
    for i in range(layers // 2, layers // 2 * 2):
        x = reference_layer(w, f"ae_model.encoder.encoder_layers.{i}", x)
    return lin(w, "ae_model.encoder.hidden_to_latent", rms(w, "ae_model.encoder.norm", x)).chunk(2, -1)


def reference_decode(w, latents, layers, k):
    x = lin(w, "ae_model.decoder.latent_to_hidden", latents)
    for i in range(layers // 2):
        x = reference_layer(w, f"ae_model.decoder.decoder_layers.{i}", x)
    x = lin(w, "ae_model.decoder.expand_layer", x).unflatten(-1, (k, D))
    for i in range(layers // 2, layers // 2 * 2):
        x = reference_layer(w, f"ae_model.decoder.decoder_layers.{i}", x)
    return rms(w, "ae_model.decoder.norm", x) @ w["ae_model.decoder.lm_head_weight"].T


def reference_energy(w, hidden, noise):
    p = "mlp_generator."
    x, y = (
        ln(w, p + "norm_noise", lin(w, p + "noise_embd", noise)),
        ln(w, p + "norm_hidden", lin(w, p + "hidden_embd", hidden)),
    )
    y = y.expand(len(noise), *y.shape)
    for i in range(BLOCKS):
        b = f"{p}mlp_blocks.{i}."
        u = torch.cat([ln(w, b + "in_ln", x), y], dim=-1)
        for j in (0, 2):
            u = F.silu(lin(w, f"{b}linears.{j}", u))
        gate, up = lin(w, b + "linears.4", u).chunk(2, -1)
        x = x + lin(w, b + "down_proj", F.silu(gate) * up)
    return lin(
        w, p + "final_layer.linears.2", F.silu(lin(w, p + "final_layer.linears.0", ln(w, p + "final_layer.in_ln", x)))
    )


def reference_network(w, x, time, hidden):
    p = "generative_head.net."
    angles = time * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    t = torch.cat([angles.cos(), angles.sin()])
    y = lin(w, p + "time_embed.mlp.2", F.silu(lin(w, p + "time_embed.mlp.0", t))) + lin(w, p + "cond_embed", hidden)
    x = lin(w, p + "input_proj", x)
    for i in range(BLOCKS):
        b = f"{p}res_blocks.{i}."
        shift, scale, gate = lin(w, b + "adaLN_modulation.1", F.silu(y)).chunk(3, -1)
        z = ln(w, b + "in_ln", x) * (1 + scale) + shift
        x = x + gate * lin(w, b + "mlp.2", F.silu(lin(w, b + "mlp.0", z)))
    shift, scale = lin(w, p + "final_layer.adaLN_modulation.1", F.silu(y)).chunk(2, -1)
    return lin(w, p + "final_layer.linear", F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift)


def reference_flow(w, hidden, x):
    for i in range(10):
        half = x + reference_network(w, x, i * 100, hidden) / 20
        x = x + reference_network(w, half, i * 100 + 50, hidden) / 10
    return x


def reference_diffusion(w, hidden, noise):
    """100 ancestral steps; noise[0] is the initial one, noise[i] that of the i-th step."""
    remaining, abar = 1.0, []
    f = [math.cos((i / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(1001)]
    for i in range(1000):
        remaining *= 1 - min(0.999, 1 - f[i + 1] / f[i])
        abar.append(remaining)
    steps = [round(i * 999 / 99) for i in range(100)]
    a = [abar[s] for s in steps]
    before = [1.0, *a[:-1]]
    beta = [1 - now / previous for now, previous in zip(a, before, strict=True)]
    post = [b * (1 - p) / (1 - n) for b, p, n in zip(beta, before, a, strict=True)]
    post[0] = post[1]
    x = noise[0]
    for number, i in enumerate(reversed(range(100)), 1):
        eps, v = reference_network(w, x, steps[i], hidden).chunk(2, -1)
        x0 = (x - math.sqrt(1 - a[i]) * eps) / math.sqrt(a[i])
        mean = beta[i] * math.sqrt(before[i]) / (1 - a[i]) * x0
        mean = mean + (1 - before[i]) * math.sqrt(1 - beta[i]) / (1 - a[i]) * x
        share = (v + 1) / 2
        log_variance = share * math.log(beta[i]) + (1 - share) * math.log(post[i])
        x = mean + (torch.exp(0.5 * log_variance) * noise[number] if i else 0)
    return x


@pytest.mark.parametrize(
    ("head", "k", "layers"),
    [("energy", 4, 2), ("energy", 1, 2), ("energy", 2, 4), ("energy", 8, 3), ("flow", 4, 2), ("diffusion", 2, 2)],
)
def test_imported_models_match_the_reference(tmp_path, head, k, layers):
    directory, autoencoder, w, backbone = publish(tmp_path, head, k, layers)
    model = import_language_model(directory, autoencoder).eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (2, 5 * k), generator=generator)
    close = {"rtol": 0, "atol": 1e-5}
    with torch.no_grad():
        chunks = ids.unflatten(1, (5, k))
        mean, log_std = reference_encode(w, chunks, layers)
        posterior = model.autoencoder.encode(chunks)
        torch.testing.assert_close(posterior.mean, mean, **close)
        torch.testing.assert_close(posterior.log_std, log_std, **close)
        logits = reference_decode(w, mean, layers, k)
        torch.testing.assert_close(model.autoencoder.decode(mean), logits, **close)
        assert torch.equal(model.autoencoder.tokens(mean), logits.argmax(-1))
        x = w["transformer.embed_tokens.weight"][chunks].flatten(-2)
        x = ln(w, "embed_proj.3", lin(w, "embed_proj.2", F.silu(lin(w, "embed_proj.0", x))))
        torch.testing.assert_close(model.chunk_embedding(chunks), x, **close)
        hidden = backbone(inputs_embeds=x).last_hidden_state
        torch.testing.assert_close(model.hidden_states(chunks), hidden, **close)
        if head == "energy":
            noise = torch.rand(3, 2, 5, NOISE, generator=generator) - 0.5
            expected = reference_energy(w, hidden, noise)
        elif head == "flow":
            noise = torch.randn(3, 2, 5, Z, generator=generator)
            expected = reference_flow(w, hidden, noise)
        else:
            noise = torch.randn(100, 3, 2, 5, Z, generator=generator)
            expected = reference_diffusion(w, hidden, noise)
        found = model.head.sample(hidden, num_samples=3, noise=noise)
        scale = expected.abs().max().clamp(min=1)  # samples of a random diffusion network are large
        torch.testing.assert_close(found / scale, expected / scale, **close)


def test_parity_with_the_authors_code(shared):
    directory = shared / "parity" / "energy-k4"
    model = import_language_model(directory / "model", directory / "autoencoder").eval()
    expected = {name: torch.from_numpy(value) for name, value in np.load(directory / "expected.npz").items()}
    close = {"rtol": 0, "atol": 1e-5}
    with torch.no_grad():
        chunks = expected["input_ids"].unflatten(1, (-1, model.chunk_size))
        posterior = model.autoencoder.encode(chunks)
        torch.testing.assert_close(posterior.mean, expected["posterior_mean"], **close)
        torch.testing.assert_close(posterior.log_std, expected["posterior_log_std"], **close)
        torch.testing.assert_close(model.autoencoder.decode(expected["latents"]), expected["decoder_logits"], **close)
        torch.testing.assert_close(model.chunk_embedding(chunks), expected["chunk_embeddings"], **close)
        torch.testing.assert_close(model.hidden_states(chunks), expected["hidden"], **close)
        samples = model.head.sample(expected["hidden"], noise=expected["noise"])
        torch.testing.assert_close(samples, expected["head_samples"], **close)
        assert torch.equal(model.autoencoder.tokens(samples), expected["decoded_tokens"])
        flat = Posterior(posterior.mean.flatten(0, 1), posterior.log_std.flatten(0, 1))
        loss = energy_loss(samples.flatten(1, 2), flat, target_noise=expected["energy_eps"])
        torch.testing.assert_close(-loss, expected["energy_score"], **close)


def test_all_weight_file_formats(tmp_path):
    directory, autoencoder, weights, _ = publish(tmp_path)
    once = import_language_model(directory, autoencoder).state_dict()
    (directory / "pytorch_model.bin").unlink()
    untied = {name: value for name, value in weights.items() if "lm_head_weight" not in name}  # as in some files
    save_file(untied, directory / "model.safetensors")
    models = [import_language_model(directory, autoencoder)]
    (directory / "model.safetensors").unlink()
    for suffix, save in (("safetensors", save_file), ("bin", torch.save)):
        stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
        names, index = sorted(untied), {}
        for number, part in enumerate((names[::2], names[1::2])):
            file = f"{stem}-{number}.{suffix}"
            save({name: untied[name] for name in part}, directory / file)
            index |= dict.fromkeys(part, file)
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
        models.append(import_language_model(directory, autoencoder))
        (directory / f"{stem}.{suffix}.index.json").unlink()
    for model in models:
        assert all(torch.equal(value, once[name]) for name, value in model.state_dict().items())


def test_command(tmp_path, calm):
    directory, autoencoder, _, _ = publish(tmp_path / "official")
    done = calm("import-official", directory, "--autoencoder", autoencoder, "--output", tmp_path / "ours", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["type"] == "calm"
    assert "has no tokenizer.json" in done.stderr
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(loaded) is CalmForCausalLM
    plain, ids = load_calm(tmp_path / "ours"), torch.arange(16).view(2, 8)
    for model in (loaded, plain):
        config = model.config
        assert config.noise_size == NOISE
        assert (config.eos_token_id, config.pad_token_id, config.front_padding) == (1, 2, False)
        assert config.backbone_config.rope_parameters["rope_theta"] == 500.0
    with torch.no_grad():
        hidden = import_language_model(directory, autoencoder).eval().hidden_states(ids.view(2, 2, 4))
        assert torch.equal(plain.hidden_states(ids.view(2, 2, 4)), hidden)
        torch.testing.assert_close(loaded(ids).last_hidden_state, hidden)
    done = calm("import-official", directory, "--output", tmp_path / "x")
    assert done.returncode == 2
    assert "name its autoencoder's directory with --autoencoder" in done.stderr
    assert "Traceback" not in done.stderr


def test_failed_imports_leave_no_files(tmp_path):
    directory, autoencoder, _, _ = publish(tmp_path / "official")
    import_official(autoencoder, tmp_path / "ours")
    assert load_autoencoder(tmp_path / "ours").config.token_dropout == 0.2
    assert type(AutoModel.from_pretrained(tmp_path / "ours")) is ChunkAutoencoder
    for arguments, message in (
        ((directory, tmp_path / "ours", autoencoder), "exists; choose another directory"),
        ((directory, tmp_path / "x", directory), "autoencoder holds a language model"),
        ((tmp_path / "none", tmp_path / "x"), "not a checkpoint directory"),
    ):
        with pytest.raises(UserError, match=message):
            import_official(*arguments)
    assert not list(tmp_path.glob("x*"))


def test_tokenizer_is_imported(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from calm.data.tokenizer import load_tokenizer

    directory, autoencoder, _, _ = publish(tmp_path)
    vocab = {f"w{i}": i for i in range(V - 3)} | {"<e>": V - 3, "<p>": V - 2, "<|reserved_special_token_0|>": V - 1}
    Tokenizer(WordLevel(vocab, unk_token="w0")).save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": V - 3, "pad_token_id": V - 2}
    (directory / "config.json").write_text(json.dumps(config))
    import_official(directory, tmp_path / "ours", autoencoder)
    tokenizer = load_tokenizer(str(tmp_path / "ours"))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (V - 3, V - 2, V - 1)
    assert tokenizer.vocab_size == V


def edit_weights(directory, change):
    path = directory / "pytorch_model.bin"
    weights = torch.load(path, weights_only=True)
    change(weights)
    torch.save(weights, path)


KEY = "mlp_generator.mlp_blocks.0.down_proj.weight"


def without(*keys):
    return lambda w: [w.pop(key) for key in keys]


def put(key, value):
    return lambda w: w.update({key: value})


def both(key, value):
    """Under both names of the energy head in the authors' files."""
    return lambda w: w.update({key: value, key.replace("mlp_generator", "generative_head"): value})


COPY = KEY.replace("mlp_generator", "generative_head")
FUSED = "mlp_generator.mlp_blocks.1.linears.0.weight"
LAYER = "ae_model.encoder.encoder_layers.2.layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("surprise.weight", torch.zeros(1)), "holds surprise.weight, which belongs to no part"),
        (without(KEY, COPY), f"lack {KEY}$"),
        (without(FUSED, FUSED.replace("mlp_generator", "generative_head")), f"lack {FUSED}$"),
        (without("transformer.layers.0.mlp.up_proj.weight"), "lack transformer.layers.0.mlp.up_proj.weight$"),
        (without("embed_proj.3.bias", "embed_proj.0.weight"), "lack embed_proj.0.weight, embed_proj.3.bias$"),
        (
            without("ae_model.decoder.decoder_layers.1.mlp.up_proj.weight"),
            "lack ae_model.decoder.decoder_layers.1.mlp.up",
        ),
        (put("embed_proj.0.bias", torch.zeros(3)), r"embed_proj.0.bias \(.* here\) has the shape \(3,\)"),
        (put(KEY, torch.zeros(H, H)), "should be a copy of"),
        (put("ae_model.decoder.lm_head_weight", torch.zeros(V, D)), "should be one matrix"),
        (put("transformer.layers.7.mlp.up_proj.weight", torch.zeros(2, 2)), "layers.7.mlp.up_proj.weight.*no place"),
        (put("mlp_generator.mlp_blocks.9.down_proj.bias", torch.zeros(H)), "mlp_blocks.9.down_proj.bias.*no place"),
        (put(LAYER, torch.zeros(D)), f"holds {LAYER[9:]}, which belongs"),
        (both(FUSED, torch.zeros(4)), "linears.0.weight .* has the shape"),
    ],
)
def test_error_messages_name_the_key(tmp_path, change, message):
    directory, autoencoder, _, _ = publish(tmp_path)
    edit_weights(directory, change)
    with pytest.raises(UserError, match=message):
        import_language_model(directory, autoencoder)


def test_tied_embedding_under_either_name(tmp_path):
    directory, autoencoder, weights, _ = publish(tmp_path)
    edit_weights(directory, without("ae_model.encoder.embed_tokens.weight"))
    model = import_language_model(directory, autoencoder)
    assert torch.equal(model.autoencoder.embedding.weight, weights["ae_model.decoder.lm_head_weight"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "[]", "should hold an object, not a list"),
        ("config.json", "{", "config.json cannot be read"),
        ("model.safetensors.index.json", "{", "index.json cannot be read"),
        ("model.safetensors.index.json", "{}", "the field 'weight_map' is missing"),
    ],
)
def test_broken_json(tmp_path, file, content, message):
    directory, autoencoder, _, _ = publish(tmp_path)
    (directory / file).write_text(content)
    with pytest.raises(UserError, match=message):
        import_language_model(directory, autoencoder)


@pytest.mark.parametrize(
    "fields", [{"hidden_size": "wide"}, {"num_attention_heads": 5}, {"num_mlp_layers": None}, {"beta": 7}]
)
def test_invalid_configs(tmp_path, fields):
    directory, autoencoder, _, _ = publish(tmp_path, **fields)
    with pytest.raises(UserError):
        import_language_model(directory, autoencoder)


def test_broken_files_and_malicious_pickles(tmp_path):
    directory, autoencoder, weights, _ = publish(tmp_path)
    path = directory / "pytorch_model.bin"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not a checkpoint"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read"):
            import_language_model(directory, autoencoder)

    class RunsCode:
        def __reduce__(self):
            return (print, ("this code ran",))

    torch.save({"a": RunsCode()}, path)
    with pytest.raises(UserError, match="cannot be read"):
        import_language_model(directory, autoencoder)
    path.unlink()
    with pytest.raises(UserError, match="holds no weights"):
        import_language_model(directory, autoencoder)
    save_file(
        {name: value for name, value in weights.items() if name.startswith("ae_model")}, directory / "model.safetensors"
    )
    with pytest.raises(UserError, match="no generative head that is known"):
        import_language_model(directory, autoencoder)


def test_mismatched_configs(tmp_path):
    directory, _, _, _ = publish(tmp_path / "one")
    _, other, _, _ = publish(tmp_path / "two", k=2)
    with pytest.raises(UserError, match="do not belong together: patch_size is 4 and 2"):
        import_language_model(directory, other)
    directory, autoencoder, _, _ = publish(tmp_path / "three", architectures=["FlowTransformer"])
    with pytest.raises(UserError, match="names a flow head, but the weights have another: energy"):
        import_language_model(directory, autoencoder)
