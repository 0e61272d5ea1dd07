"""Replaced modules: `optimize` changes how a model computes, not what; native layers and decoding steps."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from calm import cpu
from calm.autoencoder import Autoencoder, NearestTokens, SwiGLULayer, VocabularyProjection
from calm.checkpoint import load_transformer, save_model
from calm.cpu import allocator, linear, modules, native, onednn, search
from calm.cpu.allocator import HUGE_PAGE
from calm.cpu.modules import NativeEnergyBlock, NativeLlama, NativeSwiGLULayer
from calm.errors import UserError
from calm.heads.energy import EnergyBlock
from calm.llama import Llama, LlamaConfig
from calm.model import Calm, PlainCalmConfig
from calm.transformer import Transformer
from tests.batches import check_batch
from tests.cpu.conftest import OPERATOR

SIZE = 37  # not a multiple of any vector register
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # fp32, three layers, sums in another order


# -------------------------------------------------------------------------------------------------- SwiGLU and energy


def replaced(module: nn.Module) -> Any:
    """A copy of a module, replaced for inference."""
    parent = nn.Sequential(copy.deepcopy(module))
    modules.prepare_decoding(parent)
    return parent[0]


def make_pair(kind: str) -> tuple[Any, Any]:
    """A layer with random weights, norms included, and its native copy."""
    torch.manual_seed(0)
    plain: nn.Module = SwiGLULayer(SIZE, 53, 0.1) if kind == "swiglu" else EnergyBlock(SIZE)
    for weight in plain.parameters():
        nn.init.normal_(weight, mean=0.1, std=0.3)
    return plain, replaced(plain)


def make_inputs(kind: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
    x = torch.randn(*shape, SIZE)
    return [x] if kind == "swiglu" else [x, torch.randn(*shape[1:], SIZE)]


def assert_same(plain: nn.Module, ours: nn.Module, inputs: list[torch.Tensor]) -> None:
    before = [x.clone() for x in inputs]
    with torch.no_grad():
        # sums of some dozens of products in another order, through three to five matrices
        found, expected = ours(*inputs), plain(*inputs)
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * scale)
    assert all(map(torch.equal, inputs, before))


LAYERS = pytest.mark.parametrize("kind", ["swiglu", "energy"])
FUNCTIONS = {"swiglu": "calm_layer", "energy": "calm_energy_block"}


@LAYERS
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 2, 2)])
@pytest.mark.usefixtures("compiler", "threads")
def test_few_rows_are_one_native_call(kind, shape, native_calls):
    plain, ours = make_pair(kind)
    assert type(ours) is {"swiglu": NativeSwiGLULayer, "energy": NativeEnergyBlock}[kind]
    assert_same(plain, ours, make_inputs(kind, shape))
    assert native_calls == [FUNCTIONS[kind]]


@LAYERS
@pytest.mark.parametrize("shape", [(1, 0), (2, 3), (70, 1)])
@pytest.mark.usefixtures("threads")
def test_many_rows_and_none_are_left_to_torch(kind, shape, native_calls):
    plain, ours = make_pair(kind)
    assert_same(plain, ours, make_inputs(kind, shape))
    assert not set(FUNCTIONS.values()) & set(native_calls)


@pytest.mark.usefixtures("threads")
def test_samples_that_share_a_condition_are_left_to_torch(native_calls):
    plain, ours = make_pair("energy")
    assert_same(plain, ours, make_inputs("energy", (2, 1)))
    assert "calm_energy_block" not in native_calls


@LAYERS
@pytest.mark.usefixtures("threads")
def test_strided_inputs(kind):
    plain, ours = make_pair(kind)
    assert_same(
        plain,
        ours,
        [x[..., ::2] for x in (torch.randn(1, 3, 2 * SIZE), torch.randn(3, 2 * SIZE))][: 1 + (kind == "energy")],
    )


@LAYERS
def test_gradients_are_left_to_torch(kind, native_calls):
    plain, ours = make_pair(kind)
    inputs = make_inputs(kind, (1, 1))
    for layer in (plain, ours):
        layer(*inputs).square().sum().backward()
    for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert (found.grad - expected.grad).norm() <= 1e-4 * expected.grad.norm()  # sums in another order
    assert not native_calls


@LAYERS
def test_other_dtypes_are_left_to_torch(kind, native_calls):
    plain, ours = (layer.double() for layer in make_pair(kind))
    assert_same(plain, ours, [x.double() for x in make_inputs(kind, (1, 1))])
    ours.float().norm.double()  # weights of different dtypes
    assert modules._native_weights(torch.randn(1, SIZE), *ours.children()) is None
    assert not native_calls


@pytest.mark.usefixtures("compiler")
def test_weights_may_change_and_move(native_calls):
    plain, ours = make_pair("swiglu")
    inputs = make_inputs("swiglu", (1, 1))
    assert_same(plain, ours, inputs)
    with torch.no_grad():
        for layer in (plain, ours):
            layer.gate.weight.mul_(2)
            layer.down.weight.data = -layer.down.weight.data
    assert_same(plain, ours, inputs)
    assert native_calls == ["calm_layer"] * 2


def test_hooks_on_parts_are_called(native_calls):
    plain, ours = make_pair("swiglu")
    outputs: list[torch.Tensor] = []
    ours.down.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    assert_same(plain, ours, make_inputs("swiglu", (1,)))
    assert len(outputs) == 1
    assert "calm_layer" not in native_calls


def test_forward_of_an_instance_is_called(native_calls):
    """As accelerate replaces it."""
    plain, ours = make_pair("swiglu")
    for layer in (plain, ours):
        layer.down.forward = lambda x: torch.zeros(*x.shape[:-1], SIZE)
    assert_same(plain, ours, make_inputs("swiglu", (1,)))
    assert "calm_layer" not in native_calls


@LAYERS
@pytest.mark.usefixtures("no_native")
def test_without_the_kernel_layers_are_left_to_torch(kind, native_calls):
    plain, ours = make_pair(kind)
    assert_same(plain, ours, make_inputs(kind, (1, 1)))
    assert not native_calls


# ----------------------------------------------------------------------------------------------------------- optimize

BACKBONE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
AUTOENCODER = {"vocab_size": 40, "chunk_size": 2, "latent_size": 4, "hidden_size": 8, "intermediate_size": 16}
KINDS = ["transformer", "tied transformer", "energy", "chain", "probit", "diffusion"]


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if "transformer" in kind:
        return Transformer(LlamaConfig(**BACKBONE, tie_word_embeddings=kind == "tied transformer")).eval()
    model = Calm(PlainCalmConfig(BACKBONE, {**AUTOENCODER, "initializer_range": 0.3}, head=kind)).eval()
    for parameter in model.head.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def run(model: Any) -> list[torch.Tensor]:
    """Hidden states of three chunks at once and two one by one, and logits or samples for them."""
    chunks = torch.randint(40, (2, 5, model.chunk_size), generator=torch.Generator().manual_seed(0))
    embeddings, cache = model.embed(chunks), model.backbone.new_cache()
    hidden = [model.backbone(part, cache=cache) for part in embeddings.split([3, 1, 1], dim=1)]
    results = [embeddings, *hidden, model.backbone(embeddings)]
    for states in (hidden[0], hidden[2][:1]):
        proposals = model.head.propose(states, 2, torch.Generator().manual_seed(0))
        if isinstance(model, Transformer):
            results += [model.lm_head(states), proposals.log_probs(chunks[:0]), proposals.tokens()]
        elif model.config.head in ("chain", "probit"):
            results += [proposals.tokens()]
        else:
            results += [proposals.latents(), model.autoencoder.decode(proposals.latents()), proposals.tokens()]
    return results


def assert_same_results(ours: Any, plain: Any) -> None:
    for found, expected in zip(run(ours), run(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def types_of(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernel", "matmul")
def test_optimize_keeps_results_names_and_parameters(kind):
    plain, ours = make_model(kind), make_model(kind)
    parameters, flags = dict(ours.named_parameters()), [p.requires_grad for p in ours.parameters()]
    cpu.optimize(ours)
    assert list(ours.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    assert list(dict(ours.named_parameters())) == list(parameters)
    assert all(parameter is parameters[name] for name, parameter in ours.named_parameters())
    assert [p.requires_grad for p in ours.parameters()] == flags
    assert not ours.training
    assert_same_results(ours, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_optimize_replaces_every_module_that_it_knows(kind):
    model = make_model(kind)
    cpu.optimize(model)
    assert not set(modules.REPLACEMENTS) & set(types_of(model))
    assert not [
        part for part in model.modules() if isinstance(part, Autoencoder) and type(part.nearest) is NearestTokens
    ]


@pytest.mark.parametrize("kind", ["transformer", "energy"])
@pytest.mark.usefixtures("kernel")
def test_optimize_is_idempotent(kind):
    model = make_model(kind)
    cpu.optimize(model)
    types, ids = types_of(model), [id(module) for module in model.modules()]
    pointers, results = [parameter.data_ptr() for parameter in model.parameters()], run(model)
    cpu.optimize(model)
    assert types_of(model) == types
    assert [id(module) for module in model.modules()] == ids
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert all(map(torch.equal, run(model), results))


@pytest.mark.parametrize("kind", ["transformer", "energy"])
@pytest.mark.usefixtures("kernel")
def test_hooks_are_kept(kind, native_calls):
    """Hooks of the model before it was optimized are called in every forward pass; then decoding is left to torch."""
    plain, ours = make_model(kind), make_model(kind)
    calls: list[str] = []
    layer = ours.backbone.layers[1]
    layer.self_attn.q_proj.register_forward_hook(lambda *_: calls.append("forward"))
    layer.mlp.down_proj.register_forward_pre_hook(lambda *_: calls.append("pre-forward"))
    ours.backbone.register_forward_hook(lambda *_: calls.append("backbone"))
    cpu.optimize(ours)
    assert_same_results(ours, plain)
    assert calls == ["forward", "pre-forward", "backbone"] * 4
    assert "calm_llama_step" not in native_calls


def test_backward_and_state_dict_hooks_are_kept():
    model = make_model("transformer")
    calls: list[str] = []
    model.lm_head.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.lm_head.register_state_dict_post_hook(lambda *_: calls.append("state dict"))
    cpu.optimize(model, training=True)
    cpu.optimize(model)
    model.logits(torch.arange(4)[None]).sum().backward()
    model.state_dict()
    assert calls == ["backward", "state dict"]


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    chunks = torch.randint(40, (3, 6, model.chunk_size), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model(chunks)["loss"].backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def assert_same_gradients(ours: Any, plain: Any) -> None:
    found, expected = gradients_of(ours), gradients_of(plain)
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(True,), (True, False), (False, True), (False, True, False)])
@pytest.mark.usefixtures("matmul")
def test_optimize_for_training_and_inference_in_any_order(kind, order):
    plain, ours = make_model(kind), make_model(kind)
    for training in order:
        cpu.optimize(ours, training=training)
        assert_same_gradients(ours, plain)
        assert_same_results(ours, plain)
    if order != (True,):
        assert not set(modules.REPLACEMENTS) & set(types_of(ours))
    for model in (plain, ours):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)  # as an optimizer changes it, in place
    assert_same_gradients(ours, plain)
    assert_same_results(ours, plain)
    assert list(ours.state_dict()) == list(plain.state_dict())


def test_training_is_left_to_torch_where_onednn_is_no_faster(monkeypatch):
    model = make_model("energy")
    types = types_of(model)
    monkeypatch.setattr(onednn, "product", lambda: None)
    cpu.optimize(model, training=True)
    assert types_of(model) == types
    monkeypatch.setattr(onednn, "product", lambda: OPERATOR)
    cpu.optimize(model, training=True)
    assert nn.Linear not in types_of(model)
    assert type(model.backbone) is Llama


@pytest.mark.parametrize("training", [True, False])
def test_environment_variable_disables_the_backend(monkeypatch, native_calls, training):
    monkeypatch.setenv(cpu.SWITCH, "0")
    for kind in ("transformer", "energy"):
        plain, ours = make_model(kind), make_model(kind)
        cpu.optimize(ours, training=training)
        assert types_of(ours) == types_of(plain)
        assert all(map(torch.equal, run(ours), run(plain)))
    assert not native_calls
    assert cpu.description() == {"native_kernel": "no", "training_matmul": "torch"}


def test_environment_variable_does_not_disable_int8(monkeypatch):
    monkeypatch.setenv(cpu.SWITCH, "0")
    model = make_model("transformer")
    cpu.optimize(model, int8=True)
    assert type(model.backbone) is Llama
    assert isinstance(model.backbone.layers[0].mlp.up_proj, torch.ao.nn.quantized.dynamic.Linear)


def test_other_devices():
    model = make_model("energy").to("meta")
    types = types_of(model)
    for training in (True, False):
        cpu.optimize(model, training=training)
    assert types_of(model) == types
    with pytest.raises(UserError, match="int8 is for CPUs, and the model is on meta"):
        cpu.optimize(model, int8=True)


def test_description(monkeypatch):
    monkeypatch.delenv(cpu.SWITCH, raising=False)
    monkeypatch.setattr(onednn, "product", lambda: OPERATOR)
    expected = "yes" if native.library() is not None else "no"
    assert cpu.description() == {"native_kernel": expected, "training_matmul": "oneDNN"}
    monkeypatch.setattr(onednn, "product", lambda: None)
    monkeypatch.setattr(native, "library", lambda: None)
    assert cpu.description() == {"native_kernel": "no", "training_matmul": "torch"}


def test_subclasses_are_not_replaced():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Other(4, 4), nn.LayerNorm(4), VocabularyProjection())
    names = list(model.state_dict())
    modules.prepare_decoding(model)
    assert [type(part) for part in model] == [linear.FastLinear, Other, nn.LayerNorm, linear.FastProjection]
    assert list(model.state_dict()) == names


def test_module_with_two_parents_keeps_one_weight():
    layer = nn.Linear(4, 4)
    model = nn.ModuleList([nn.Sequential(layer), nn.Sequential(layer)])
    modules.prepare_decoding(model)
    assert [type(part[0]) for part in model] == [linear.FastLinear] * 2
    assert model[0][0].weight is model[1][0].weight is layer.weight


def test_tied_embeddings_stay_tied(monkeypatch):
    monkeypatch.setattr(allocator, "HUGE_PAGE", 64)  # bytes: every matrix is moved
    plain, ours = make_model("tied transformer"), make_model("tied transformer")
    before = ours.lm_head.weight.data_ptr()
    cpu.optimize(ours)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert ours.lm_head.weight.data_ptr() != before or before % 64 == 0
    assert_same_results(ours, plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.usefixtures("compiler")
def test_optimized_models_can_be_copied(kind, duplicate, native_calls):
    plain, ours = make_model(kind), make_model(kind)
    cpu.optimize(ours)
    twin = duplicate(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()  # the copy has weights of its own
    assert_same_results(twin, plain)
    assert "calm_llama_step" not in native_calls  # until the copy is optimized
    cpu.optimize(twin)
    assert_same_results(twin, plain)
    assert "calm_llama_step" in native_calls


@pytest.mark.usefixtures("compiler")
def test_weights_created_in_inference_mode(native_calls):
    plain = make_model("transformer")
    with torch.inference_mode():
        ours = make_model("transformer")
    cpu.optimize(ours)
    assert_same_results(ours, plain)


@pytest.mark.parametrize("kind", ["transformer", "tied transformer"])
@pytest.mark.parametrize("page", [64, HUGE_PAGE])  # bytes: every matrix is moved, or none
def test_optimized_model_is_saved_and_loaded(kind, page, tmp_path, monkeypatch):
    """Fused and moved weights are saved as separate tensors, tied ones once."""
    monkeypatch.setattr(allocator, "HUGE_PAGE", page)
    plain, ours = make_model(kind), make_model(kind)
    cpu.optimize(ours)
    save_model(ours, tmp_path / "ours")
    save_model(plain, tmp_path / "plain")
    assert len({(path / "model.safetensors").stat().st_size for path in tmp_path.iterdir()}) == 1
    loaded = load_transformer(tmp_path / "ours")
    assert list(loaded.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_nearest_tokens_are_replaced():
    model = make_model("energy")
    cpu.optimize(model)
    assert type(model.autoencoder.nearest) is search.Int8NearestTokens


# ------------------------------------------------------------------------------------------------- native Llama decode

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LINEAR_SCALING = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}


def make_llama(**fields: Any) -> Llama:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**{**SIZES, **fields})).eval()
    for name, weight in model.named_parameters():  # norms start as ones, which would hide a mix-up
        nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    return model


def make_native(plain: Llama) -> NativeLlama:
    model = replaced(plain)
    assert type(model) is NativeLlama
    return model


def make_batch(rows: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, mask, and positions; each sequence starts one position after the one before."""
    mask = torch.arange(length) >= torch.arange(rows)[:, None]
    embeddings = torch.randn(rows, length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(rows))
    return embeddings, mask, (mask.long().cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def assert_same_states(ours: Llama, plain: Llama, rows: int, prompt: int = 2, **tolerance: float) -> None:
    """`ours` reads a prompt and then decodes step by step, `plain` reads everything without a cache each time."""
    embeddings, mask, positions = make_batch(rows)
    cache = ours.new_cache()
    for first, last in [(0, prompt), *((k, k + 1) for k in range(prompt, embeddings.shape[1]))]:
        hidden = ours(embeddings[:, first:last], positions[:, first:last], mask[:, :last], cache)[:, -1]
        expected = plain(embeddings[:, :last], positions[:, :last], mask[:, :last])[:, -1]
        valid = mask[:, last - 1]  # a sequence that has not started has no state
        torch.testing.assert_close(hidden[valid], expected[valid], **(tolerance or TOLERANCE))
        assert cache.length == last


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])  # five are left to torch
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "head_dim": 12},
        {"attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 0.1},
        {"rope_parameters": LINEAR_SCALING},
        {"rope_parameters": LLAMA3_SCALING},
    ],
)
@pytest.mark.usefixtures("threads")
def test_decoding_steps(rows, fields, kernel, native_calls):
    plain = make_llama(**fields)
    ours = make_native(plain)
    assert (ours.weights is not None) == ("mlp_bias" not in fields and kernel == "native")
    assert_same_states(ours, plain, rows)
    steps = 4 if ours.weights is not None and rows <= linear.NATIVE_ROWS else 0
    assert native_calls.count("calm_llama_step") == steps


@pytest.mark.parametrize("prompt", [1, 6])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.usefixtures("kernel", "threads")
def test_prompts_of_one_position_and_prompts_alone(rows, prompt):
    plain = make_llama()
    assert_same_states(make_native(plain), plain, rows, prompt)


@torch.no_grad()
@pytest.mark.usefixtures("kernel", "threads")
def test_positions_and_mask_are_optional():
    plain = make_llama()
    ours, (embeddings, _, _) = make_native(plain), make_batch(3)
    cache = ours.new_cache()
    hidden = torch.cat([ours(part, cache=cache) for part in embeddings.split(1, dim=1)], dim=1)
    torch.testing.assert_close(hidden, plain(embeddings), **TOLERANCE)
    cache = ours.new_cache()
    parts = embeddings.split(1, dim=1)
    hidden = torch.cat([ours(x, torch.tensor([[k]]), None, cache) for k, x in enumerate(parts)], dim=1)
    torch.testing.assert_close(hidden, plain(embeddings), **TOLERANCE)


@torch.no_grad()
@pytest.mark.usefixtures("kernel", "threads")
def test_long_sequences():
    """Beyond the capacity that the cache starts with, and with scores that overflow a softmax without a maximum."""
    plain = make_llama(num_key_value_heads=2)
    plain.layers[0].self_attn.q_proj.weight.mul_(20)
    ours, length = make_native(plain), 100
    embeddings = torch.randn(1, length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    mask, positions, cache = torch.ones(1, length, dtype=torch.bool), torch.arange(length)[None], ours.new_cache()
    for last in range(1, length + 1):
        hidden = ours(embeddings[:, last - 1 : last], positions[:, last - 1 : last], mask[:, :last], cache)
    expected = plain(embeddings)[:, -1:]
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)  # sharp attention amplifies rounding errors


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.usefixtures("kernel", "threads")
def test_several_positions_after_a_cache(rows):
    plain = make_llama()
    ours, (embeddings, mask, positions) = make_native(plain), make_batch(rows)
    cache = ours.new_cache()
    for first, last in [(0, 3), (3, 5), (5, 6)]:
        hidden = ours(embeddings[:, first:last], positions[:, first:last], mask[:, :last], cache)
    torch.testing.assert_close(hidden[:, -1], plain(embeddings, positions, mask)[:, -1], **TOLERANCE)


@torch.no_grad()
@pytest.mark.usefixtures("kernel", "threads")
def test_four_dimensional_mask(native_calls):
    """Who attends to whom, as branches use it; left to torch."""
    plain = make_llama()
    ours, (embeddings, _, _) = make_native(plain), make_batch(2)
    visible = torch.tensor([True, False, True, True, False, True]).expand(2, 1, 1, 6)
    results = []
    for model in (ours, plain):
        cache = model.new_cache()
        model(embeddings[:, :5], cache=cache)
        results.append(model(embeddings[:, 5:], None, visible, cache))
    torch.testing.assert_close(*results, **TOLERANCE)
    assert "calm_llama_step" not in native_calls


@pytest.mark.usefixtures("kernel", "threads")
def test_sequences_join_and_leave():
    plain = make_llama(num_key_value_heads=2)
    check_batch(make_native(plain).new_batch(), plain, SIZES["hidden_size"], **TOLERANCE)


@pytest.mark.usefixtures("kernel")
def test_inputs_are_not_modified():
    ours, (embeddings, mask, positions) = make_native(make_llama()), make_batch(2)
    before = [tensor.clone() for tensor in (embeddings, mask, positions)]
    assert_same_states(ours, ours, 2)
    cache = ours.new_cache()
    with torch.no_grad():
        ours(embeddings[:, :5], positions[:, :5], mask[:, :5], cache)
        ours(embeddings[:, 5:], positions[:, 5:], mask, cache)
    assert all(map(torch.equal, (embeddings, mask, positions), before))


@pytest.mark.usefixtures("kernel")
def test_weights_may_change_in_place():
    plain = make_llama()
    ours = make_native(plain)
    with torch.no_grad():
        for model in (plain, ours):
            for weight in model.parameters():
                weight.mul_(1.1)
    assert_same_states(ours, plain, rows=2)


@pytest.mark.usefixtures("compiler")
def test_replaced_memory_stays_readable():
    """The kernel keeps the memory that its pointers refer to, norms included, until it is prepared again."""
    plain = make_llama()
    ours = make_native(plain)
    for weight in ours.parameters():
        weight.data = torch.full_like(weight, torch.nan)
    assert ours.weights is not None
    held = {weight.data_ptr() for part in ours.weights for weight in part}
    names = [name for name, _ in native.LlamaLayer._fields_ if name not in ("keys", "values")]
    assert {ours.kernel.norm, *(getattr(layer, name) for layer in ours.kernel_layers for name in names)} == held
    embeddings, mask, positions = make_batch(1)
    cache = plain.new_cache()
    with torch.no_grad():
        plain(embeddings[:, :5], cache=cache)
        hidden = ours(embeddings[:, 5:], positions[:, 5:], mask, cache)
        torch.testing.assert_close(hidden, plain(embeddings)[:, 5:], **TOLERANCE)


@pytest.mark.usefixtures("kernel")
def test_moved_weights_are_used_after_optimizing_again():
    plain = make_llama()
    parent = nn.Sequential(copy.deepcopy(plain))
    cpu.optimize(parent)
    for model in (plain, parent):
        model.bfloat16().float()
    cpu.optimize(parent)
    assert_same_states(parent[0], plain, rows=2)
    parent[0].load_state_dict({name: 1.1 * weight for name, weight in plain.state_dict().items()}, assign=True)
    plain.load_state_dict({name: 1.1 * weight for name, weight in plain.state_dict().items()})
    cpu.optimize(parent)
    assert_same_states(parent[0], plain, rows=2)


@pytest.mark.usefixtures("kernel")
def test_other_dtypes(native_calls):
    plain = make_llama()
    parent = nn.Sequential(copy.deepcopy(plain))
    cpu.optimize(parent)
    parent.bfloat16()
    for again in (False, True):
        if again:
            cpu.optimize(parent)
        ours, (embeddings, mask, positions) = parent[0], make_batch(1)
        cache = ours.new_cache()
        with torch.no_grad():
            ours(embeddings[:, :5].bfloat16(), positions[:, :5], mask[:, :5], cache)
            hidden = ours(embeddings[:, 5:].bfloat16(), positions[:, 5:], mask, cache)
            expected = plain.bfloat16()(embeddings.bfloat16(), positions)[:, -1:]
        assert hidden.dtype == torch.bfloat16
        torch.testing.assert_close(hidden, expected, rtol=0.05, atol=0.1)  # bf16 has three digits
    assert not native_calls


@pytest.mark.usefixtures("compiler")
def test_gradients_are_left_to_torch_when_decoding(native_calls):
    plain = make_llama()
    ours, (embeddings, _, _) = make_native(plain), make_batch(1)
    for model in (ours, plain):
        cache = model.new_cache()
        with torch.no_grad():
            model(embeddings[:, :5], cache=cache)
        model(embeddings[:, 5:], cache=cache).square().sum().backward()
    for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4 * float(expected.grad.abs().max()))
    assert not native_calls


def add_hook(model: Llama) -> None:
    model.layers[1].register_forward_pre_hook(lambda *_: None)


def add_linear_hook(model: Llama) -> None:
    model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)


def replace_forward(model: Llama) -> None:
    model.layers[2].forward = model.layers[2].forward  # as accelerate does


def replace_linear(model: Llama) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model.layers[2].mlp.up_proj.__class__ = Doubled


def transpose_weight(model: Llama) -> None:
    weight = model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.T.contiguous().T


@pytest.mark.parametrize("change", [add_hook, add_linear_hook, replace_forward, replace_linear, transpose_weight])
def test_unsupported_models_are_left_to_torch(change, native_calls):
    plain = make_llama()
    change(plain)
    ours = make_native(plain)
    assert ours.weights is None
    assert_same_states(ours, plain, rows=2)
    assert "calm_llama_step" not in native_calls
