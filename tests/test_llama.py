"""Our Llama against transformers' `LlamaModel`, its key-value cache, and its checkpoints."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2Model, LlamaForCausalLM, LlamaModel

from calm.checkpoint import load_transformer, save_model
from calm.errors import ConfigError, UserError
from calm.hf import HFBackbone
from calm.kv_cache import SPARE_POSITIONS, KVCache
from calm.llama import Llama, LlamaConfig, check_positions, make_attention_mask
from calm.transformer import Transformer
from tests.batches import check_batch

SIZES = {
    "vocab_size": 11,
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
VARIANTS = {
    "default": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head of another size": {"num_key_value_heads": 1, "head_dim": 12},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "epsilon": {"rms_norm_eps": 0.1},
    "linear scaling": {"rope_parameters": LINEAR_SCALING},
    "llama3 scaling": {"rope_parameters": LLAMA3_SCALING},
    "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}
EVERY_VARIANT = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # fp32, three layers


def make_pair(**fields: Any) -> tuple[Llama, LlamaModel]:
    """Our model and transformers' with the same random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **fields})
    theirs = LlamaModel(config).eval()
    for name, weight in theirs.named_parameters():  # norms start as ones, which would hide a mix-up
        nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    ours = Llama(LlamaConfig(**{**SIZES, **copy.deepcopy(fields)})).eval()
    weights = {name: weight for name, weight in theirs.state_dict().items() if not name.startswith("embed_tokens")}
    ours.load_state_dict(weights)
    return ours, theirs


def make_batch(rows: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, mask, and positions; each sequence has one more position of left padding than the one before."""
    mask = torch.arange(length) >= torch.arange(rows)[:, None]
    embeddings = torch.randn(rows, length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(rows))
    return embeddings, mask, (mask.long().cumsum(1) - 1).clamp(min=0)


def run_theirs(model: LlamaModel, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    outputs = model(inputs_embeds=x, attention_mask=mask.long(), position_ids=positions, use_cache=False)
    return outputs.last_hidden_state


# -------------------------------------------------------------------------------------------------------- forward pass


@EVERY_VARIANT
@pytest.mark.parametrize("length", [1, 6, 100])
@torch.no_grad()
def test_forward(fields, length):
    ours, theirs = make_pair(**fields)
    x = torch.randn(2, length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    expected = theirs(inputs_embeds=x, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours(x), expected, **TOLERANCE)
    mask = torch.ones(2, length)
    torch.testing.assert_close(ours(x, torch.arange(length)[None], mask), expected, **TOLERANCE)


@EVERY_VARIANT
@torch.no_grad()
def test_left_padding(fields):
    ours, theirs = make_pair(**fields)
    embeddings, mask, positions = make_batch(4)
    hidden, expected = ours(embeddings, positions, mask), run_theirs(theirs, embeddings, mask, positions)
    torch.testing.assert_close(hidden[mask], expected[mask], **TOLERANCE)
    assert hidden.isfinite().all()  # padding attends to itself
    for row, own in enumerate(mask):  # a padded sequence is the sequence alone
        alone = ours(embeddings[row : row + 1, own])
        torch.testing.assert_close(hidden[row : row + 1, own], alone, **TOLERANCE)


@torch.no_grad()
def test_right_padding():
    ours, theirs = make_pair()
    embeddings, mask, _ = make_batch(4)
    mask, positions = mask.flip(1), torch.arange(6).expand(4, -1)
    hidden, expected = ours(embeddings, positions, mask), run_theirs(theirs, embeddings, mask, positions)
    torch.testing.assert_close(hidden[mask], expected[mask], **TOLERANCE)


@EVERY_VARIANT
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(fields, padding, checkpointing):
    ours, theirs = make_pair(**fields)
    ours.train().gradient_checkpointing = checkpointing
    embeddings, mask, positions = make_batch(4)
    if not padding:
        mask, positions = torch.ones_like(mask), torch.arange(6).expand(4, -1)
    inputs = [embeddings.clone().requires_grad_() for _ in range(2)]
    weights = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1)) * mask[..., None]
    hidden = ours(inputs[0], positions, mask) if padding else ours(inputs[0])
    (hidden * weights).sum().backward()
    (run_theirs(theirs, inputs[1], mask, positions) * weights).sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if not name.startswith("embed_tokens")}
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert sorted(found) == sorted(expected)
    for name, gradient in [*expected.items(), ("inputs", inputs[1].grad)]:
        other = inputs[0].grad if name == "inputs" else found[name]
        assert (other - gradient).norm() <= 1e-4 * gradient.norm(), name


@EVERY_VARIANT
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("prompt", [1, 2, 6])
@torch.no_grad()
def test_step_by_step(fields, rows, prompt):
    """A prompt and then one position at a time, with left padding, against transformers without a cache."""
    ours, theirs = make_pair(**fields)
    embeddings, mask, positions = make_batch(rows)
    cache = ours.new_cache()
    for first, last in [(0, prompt), *((k, k + 1) for k in range(prompt, embeddings.shape[1]))]:
        hidden = ours(embeddings[:, first:last], positions[:, first:last], mask[:, :last], cache)[:, -1]
        expected = run_theirs(theirs, embeddings[:, :last], mask[:, :last], positions[:, :last])[:, -1]
        valid = mask[:, last - 1]  # a sequence that has not started has no state
        torch.testing.assert_close(hidden[valid], expected[valid], **TOLERANCE)
        assert cache.length == last


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("padding", [False, True])
@torch.no_grad()
def test_several_positions_after_a_cache(rows, padding):
    ours, theirs = make_pair(num_key_value_heads=2)
    embeddings, mask, positions = make_batch(rows)
    if not padding:
        mask, positions = torch.ones_like(mask), torch.arange(6).expand(rows, -1)
    cache, hidden = ours.new_cache(), []
    for first, last in [(0, 3), (3, 5), (5, 6)]:
        given = (positions[:, first:last], mask[:, :last]) if padding else (None, None)
        hidden.append(ours(embeddings[:, first:last], *given, cache))
    expected = run_theirs(theirs, embeddings, mask, positions)
    torch.testing.assert_close(torch.cat(hidden, dim=1)[mask], expected[mask], **TOLERANCE)


@torch.no_grad()
def test_long_sequences():
    """Beyond the capacity that the cache starts with, and with scores that overflow a softmax without a maximum."""
    ours, theirs = make_pair(num_key_value_heads=2)
    for model in (ours, theirs):
        model.layers[0].self_attn.q_proj.weight.mul_(40)
    x = torch.randn(1, 100, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    cache = ours.new_cache()
    hidden = torch.cat([ours(part, cache=cache) for part in x.split(1, dim=1)], dim=1)
    expected = theirs(inputs_embeds=x, use_cache=False).last_hidden_state
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)  # sharp attention amplifies rounding errors


@torch.no_grad()
def test_bfloat16():
    ours, theirs = (model.bfloat16() for model in make_pair())
    embeddings, mask, positions = make_batch(1)
    x, cache = embeddings.bfloat16(), ours.new_cache()
    ours(x[:, :5], positions[:, :5], mask[:, :5], cache)
    hidden = ours(x[:, 5:], positions[:, 5:], mask, cache)
    assert hidden.dtype == torch.bfloat16
    expected = run_theirs(theirs, x, mask, positions)[:, -1:]
    torch.testing.assert_close(hidden, expected, rtol=0.05, atol=0.1)  # bf16 has three digits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@torch.no_grad()
def test_norm(dtype):
    """RMSNorm is computed in fp32 and rounded once."""
    ours, theirs = make_pair()
    nn.init.normal_(theirs.norm.weight, mean=1.0)
    ours.norm.weight.copy_(theirs.norm.weight)
    scales = torch.tensor([[1e-4], [0.01], [1.0], [10.0], [0.0]])
    x = (torch.randn(5, SIZES["hidden_size"]) * scales).to(dtype)
    output, expected = ours.norm.to(dtype)(x), theirs.norm.to(dtype)(x)
    assert output.dtype == dtype
    eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-6  # transformers computes fp64 in fp32
    torch.testing.assert_close(output, expected, rtol=2 * eps, atol=1e-7)


def test_make_attention_mask():
    device = torch.device("cpu")
    assert make_attention_mask(None, 4, 4, device) is None
    assert make_attention_mask(None, 1, 4, device) is None
    causal = make_attention_mask(None, 2, 4, device)
    assert causal is not None
    assert causal[0, 0].tolist() == [[True, True, True, False], [True] * 4]
    mask = torch.tensor([[0, 0, 1, 1]])
    padded = make_attention_mask(mask, 3, 4, device)
    assert padded is not None
    assert padded[0, 0].long().tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    whole = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    assert make_attention_mask(whole, 3, 4, device) is whole


# ------------------------------------------------------------------------------------------------------------- config


def test_config_reads_transformers_4_names():
    config = LlamaConfig(**SIZES, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.rope_parameters == {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}
    assert LlamaConfig(**SIZES).rope_parameters == {"rope_theta": 10_000.0, "rope_type": "default"}
    assert LlamaConfig(**SIZES).num_key_value_heads == SIZES["num_attention_heads"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"model_type": "qwen2"}, False),
        ({"hidden_act": "gelu"}, False),
        ({"attention_dropout": 0.1}, False),
        ({"rope_parameters": LINEAR_SCALING}, True),
        ({"rope_parameters": LLAMA3_SCALING}, True),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, False),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, False),
    ],
)
def test_config_knows_what_is_implemented(fields, expected):
    assert LlamaConfig.describes({"model_type": "llama", **SIZES, **fields}) is expected


def test_config_errors():
    with pytest.raises(ConfigError, match="llama has no field 'hiden_size'.*did you mean hidden_size"):
        LlamaConfig.checked({"hiden_size": 8})
    with pytest.raises(ConfigError, match="hidden_size 30 is not a multiple of num_attention_heads 4"):
        LlamaConfig.checked({**SIZES, "hidden_size": 30})
    with pytest.raises(ConfigError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        LlamaConfig.checked({**SIZES, "num_key_value_heads": 3})


def test_check_positions():
    check_positions(LlamaConfig(**SIZES), 256, "chunks")
    with pytest.raises(ConfigError, match="257 chunks exceed the backbone's 256 positions"):
        check_positions(LlamaConfig(**SIZES), 257, "chunks")


# ------------------------------------------------------------------------------------------------------------ KVCache


def make_states(length: int, seed: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(rows, 3, length, 4, generator=generator) for _ in range(2))
    return keys, values


def filled(lengths: list[int], rows: int = 2, layers: int = 2) -> KVCache:
    """A cache to which states of these lengths were appended, other ones for each layer."""
    cache = KVCache(layers)
    for number, length in enumerate(lengths):
        for layer in range(layers):
            cache.append(layer, *make_states(length, 10 * number + layer, rows))
    return cache


def content(cache: KVCache) -> list[torch.Tensor]:
    """Keys and values in use of all layers."""
    memories = [*cache.keys, *cache.values]
    return [memory[..., : cache.length, :].clone() for memory in memories if memory is not None]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


def test_cache_holds_what_dynamic_cache_holds():
    ours, theirs = KVCache(2), DynamicCache()
    for number, length in enumerate([5, *[1] * (3 * SPARE_POSITIONS), 7]):
        for layer in range(2):
            states = make_states(length, 10 * number + layer)
            assert_equal([*ours.append(layer, *states)], [*theirs.update(*states, layer)])
        assert ours.length == theirs.get_seq_length()
    assert ours.length == 12 + 3 * SPARE_POSITIONS


def test_length_counts_once_all_layers_are_appended():
    cache = KVCache(2)
    cache.append(0, *make_states(3, 0))
    assert cache.length == 0
    cache.append(1, *make_states(3, 1))
    assert cache.length == 3


def test_decoding_step_copies_nothing_within_the_capacity():
    cache, pointers = filled([5], layers=1), set()
    for number in range(SPARE_POSITIONS):
        keys, values = cache.append(0, *make_states(1, number))
        pointers |= {keys.data_ptr(), values.data_ptr()}
    assert len(pointers) == 2
    keys, _ = cache.append(0, *make_states(1, 0))
    assert keys.data_ptr() not in pointers


def test_capacity_grows_with_the_length():
    cache, allocations, pointer = KVCache(1), 0, 0
    for number in range(2000):
        keys, _ = cache.append(0, *make_states(1, number, rows=1))
        allocations += keys.data_ptr() != pointer
        pointer = keys.data_ptr()
    assert cache.length == 2000
    assert allocations < 25  # by a quarter each time, not by SPARE_POSITIONS
    memory = cache.keys[0]
    assert memory is not None
    assert 2000 <= memory.shape[-2] <= 1.25 * 2000 + SPARE_POSITIONS


def test_views_stay_as_they_were():
    """What `append` returned is not overwritten by later positions, nor by growth."""
    cache = KVCache(1)
    views = [view for number in range(30) for view in cache.append(0, *make_states(2, number))]
    copies = [view.clone() for view in views]
    for number in range(40):
        cache.append(0, *make_states(1, 100 + number))
    assert cache.length == 100
    assert_equal(views, copies)


def test_crop():
    cache = filled([5, 1, 1])
    before = content(cache)
    cache.crop(9)
    assert cache.length == 7
    cache.crop(4)
    assert cache.length == 4
    assert_equal(content(cache), [part[:, :, :4] for part in before])
    states = [make_states(2, layer) for layer in (50, 51)]
    for layer, new in enumerate(states):
        keys, values = cache.append(layer, *new)
        assert_equal([keys, values], [torch.cat([before[layer + 2 * k][:, :, :4], new[k]], dim=2) for k in (0, 1)])
    assert cache.length == 6


@pytest.mark.parametrize("rows", [[1], [0], [1, 0], [0, 1, 1], []])
def test_select(rows):
    cache = filled([5, 1, 1])
    before, index = content(cache), torch.tensor(rows, dtype=torch.long)
    cache.select(index)
    assert cache.length == 7
    expected = [part[index] for part in before]
    assert_equal(content(cache), expected)
    for step in range(3):  # and it grows on
        for layer in range(2):
            new = make_states(1, 90 + 10 * step + layer, len(rows))
            cache.append(layer, *new)
            expected[layer] = torch.cat([expected[layer], new[0]], dim=2)
            expected[layer + 2] = torch.cat([expected[layer + 2], new[1]], dim=2)
    assert cache.length == 10
    assert_equal(content(cache), expected)


# -------------------------------------------------------------------------------------------------------------- batch


@EVERY_VARIANT
def test_sequences_join_and_leave(fields):
    ours, _ = make_pair(**fields)
    check_batch(ours.new_batch(), ours, SIZES["hidden_size"], **TOLERANCE)


@pytest.mark.parametrize("kind", [GPT2Model, LlamaModel])
def test_sequences_join_and_leave_a_batch_of_transformers(kind):
    torch.manual_seed(0)
    gpt2 = {"n_embd": SIZES["hidden_size"], "n_head": 2, "n_layer": 2, "vocab_size": 10, "initializer_range": 0.5}
    config = GPT2Config(**gpt2) if kind is GPT2Model else transformers.LlamaConfig(**SIZES)
    backbone = HFBackbone(kind(config).eval())
    check_batch(backbone.new_batch(), backbone, SIZES["hidden_size"], **TOLERANCE)


def test_joining_and_leaving_copy_no_keys_and_values():
    """Memory stays where it is, and no other row of it is written."""
    batch = make_pair()[0].new_batch()
    x = torch.randn(3, 4, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        batch.add(x, [4, 2, 3], 8)
        batch.step(x[:, 0])
        memories = [*batch.cache.keys, *batch.cache.values]
        before = [(memory.data_ptr(), memory[[0, 2]].clone()) for memory in memories]
        assert batch.remove([1]) == [0, 1, 2]
        assert batch.add(x[:1], [4], 8)[0] == [1]
    assert [*batch.cache.keys, *batch.cache.values] == memories
    for memory, (pointer, others) in zip(memories, before, strict=True):
        assert memory.data_ptr() == pointer
        assert torch.equal(memory[[0, 2]], others)


# -------------------------------------------------------------------------------------------------------- checkpoints

CHECKPOINTS = pytest.mark.parametrize(
    "fields", [*VARIANTS.values(), {"tie_word_embeddings": True}], ids=[*VARIANTS, "tied"]
)
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 1]])


def randomize(model: nn.Module) -> None:
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, mean=float("norm" in name), std=0.3)


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def our_logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(TOKENS)


@CHECKPOINTS
@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
def test_directory_of_transformers_is_loaded(fields, shard_size, tmp_path):
    theirs = LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **fields})).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "5GB")
    ours = load_transformer(tmp_path)
    assert type(ours) is Transformer
    assert not ours.training
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == ("tie_word_embeddings" in fields)
    torch.testing.assert_close(our_logits(ours), their_logits(theirs), **TOLERANCE)


@CHECKPOINTS
def test_saved_directory_is_loaded_by_transformers(fields, tmp_path):
    ours = Transformer(LlamaConfig(**{**SIZES, **fields})).eval()
    randomize(ours)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs) is LlamaForCausalLM
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == ("tie_word_embeddings" in fields)
    torch.testing.assert_close(our_logits(ours), their_logits(theirs), **TOLERANCE)
    again = load_transformer(tmp_path)
    assert list(again.state_dict()) == list(ours.state_dict())
    assert torch.equal(our_logits(again), our_logits(ours))


def test_weights_that_do_not_fit_are_refused(tmp_path):
    ours = Transformer(LlamaConfig(**SIZES))
    save_model(ours, tmp_path)
    config = ours.config.model_copy(update={"num_hidden_layers": 2})
    smaller = {name: weight for name, weight in ours.state_dict().items() if ".layers.2." not in name}
    ours.config = config
    save_model(ours, tmp_path / "smaller", smaller)
    assert len(load_transformer(tmp_path / "smaller").model.layers) == 2
    (tmp_path / "smaller" / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    with pytest.raises(UserError, match="do not fit their config.json: model.layers.2"):
        load_transformer(tmp_path / "smaller")
