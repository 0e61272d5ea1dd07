"""Parameters, FLOPs and memory of a recipe, as in Table 1, split by part and by formula.

A matrix of P parameters costs 2·P FLOPs a vector, and training costs three times the forward pass. Attention adds
4·context·H a layer and position (scores and weighted values, on the whole context, as the paper counts). For a chunk:

    backbone, chunk embedding    2·P
    head                         2·P for each sample; the condition's share once for all N
    autoencoder                  training: the encoder, forward only, and its own training before;
                                 inference: the decoder
    vocabulary projection        K·2·V·d of the decoder (a Transformer: 2·V·H a token)

Everything is divided by K. The models are built on the meta device: the counts are those of the real modules.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from calm.config import RunConfig, load_config, recipe_names
from calm.data.shards import PreparedData
from calm.errors import UserError
from calm.heads import ChainHead
from calm.models.autoencoder import ChunkAutoencoder
from calm.models.calm import CalmForCausalLM
from calm.sampling.vocabulary import SMALL
from calm.train.memory import training_memory
from calm.train.stages import described_model

PAPER_VOCABULARY = 128_257
FORWARD_AND_BACKWARD = 3
EIGHT_BITS = 1 / 4  # of an operation in 32 bits: what one in eight counts

TABLE_1 = {  # parameters, training FLOPs, inference FLOPs a token
    "paper-transformer-s": (281e6, 6.6e20, 4.4e8),
    "paper-transformer-m": (465e6, 11.9e20, 7.9e8),
    "paper-transformer-l": (849e6, 22.5e20, 15.0e8),
    "paper-calm-m": (371e6, 3.7e20, 2.9e8),
    "paper-calm-l": (735e6, 7.7e20, 4.6e8),
    "paper-calm-xl": (1.82e9, 19.5e20, 9.4e8),
}


@dataclass
class Part:
    """One part of a model; FLOPs a token."""

    parameters: int = 0
    train_flops_per_token: float = 0.0
    inference_flops_per_token: float = 0.0


@dataclass
class Cost:
    name: str
    parameters: int  # without the autoencoder, as the counts that Table 1 prints
    parameters_with_autoencoder: int
    train_flops: float  # of the whole run, and of the autoencoder's
    inference_flops_per_token: float
    vocabulary: int
    parts: dict[str, Part]
    peak_memory: float = 0.0  # bytes of one process in training
    candidates: int = 1  # of a chunk, at low temperature: what the paper leaves out
    inference_flops_per_token_with_candidates: float | None = None
    inference_flops_per_token_with_search: float | None = None  # the same, words found by bounds

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cost_of(
    name: str,
    config: RunConfig,
    context: int = 2048,
    candidates: int = 1,
    vocabulary: int | None = None,
    processes: int = 1,
) -> Cost:
    """What a recipe costs; `context` in steps of the model, `candidates` a chunk in sampling, memory of one process."""
    vocabulary = vocabulary or _vocabulary(config)
    _check_described(config, name)
    with torch.device("meta"):
        model = described_model(config, vocabulary)
    if isinstance(model, ChunkAutoencoder):
        cost = _autoencoder_cost(name, config, model)
    elif isinstance(model, CalmForCausalLM):
        cost = _calm_cost(name, config, context, candidates, model)
    else:
        cost = _transformer_cost(name, config, context, model)
    rows = config.data.batch_size / config.train.accumulation / processes
    cost.peak_memory = training_memory(model, config, rows, processes)
    return cost


def _vocabulary(config: RunConfig) -> int:
    """That of the recipe's data where it is there, else the paper's."""
    try:
        return PreparedData(config.data.sets[0].path, verify=False).manifest["vocab_size"]
    except UserError:
        return PAPER_VOCABULARY


def _matrices(*modules: nn.Module) -> int:
    """Parameters that multiply a vector: all but embeddings, norms and biases."""
    parts = [part for module in modules for part in module.modules() if not isinstance(part, nn.Embedding)]
    return sum(p.numel() for part in parts for p in part.parameters(recurse=False) if p.ndim == 2)


def _count(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def _attention(config: Any, context: int) -> float:
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 0) or config.hidden_size
    return 4.0 * context * width * config.num_hidden_layers


def _check_described(config: RunConfig, name: str) -> None:
    """A model that is read from a directory has no fields to count by."""
    model = config.language_model
    if config.stage != "autoencoder" and (model.start is not None or not isinstance(model.backbone, dict)):
        raise UserError(f"{name} takes its model from a directory; calm cost counts models that a recipe describes")


def _transformer_cost(name: str, config: RunConfig, context: int, model: Any) -> Cost:
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    layers = _count(model) - _count(embedding) - (0 if head.weight is embedding.weight else _count(head))
    forward = {
        "backbone": 2.0 * (_matrices(model) - head.weight.numel()),
        "attention": _attention(model.config, context),
        "vocabulary projection": 2.0 * head.weight.numel(),
    }
    sizes = {"backbone": layers, "token embedding": _count(embedding), "vocabulary projection": _count(head)}
    parts = _parts(sizes, {n: FORWARD_AND_BACKWARD * f for n, f in forward.items()}, forward)
    return _sum(name, config, model, parts)


def _calm_cost(name: str, config: RunConfig, context: int, candidates: int, model: CalmForCausalLM) -> Cost:
    size, samples = model.config.chunk_size, model.config.num_model_samples
    once, evaluation, sample = _head_flops(model)
    evaluations = _evaluations(model)
    encoder, decoder, projection = _autoencoder_flops(model.autoencoder)
    tokens: Any = model.chunk_embedding.tokens
    embedding = _count(tokens) if tokens is not None else 0
    own_words = 0
    forward = {
        "backbone": 2.0 * _matrices(model.backbone),
        "attention": _attention(model.config.backbone_config, context),
        "chunk embedding": 2.0 * _matrices(model.chunk_embedding),
    }
    training = {n: FORWARD_AND_BACKWARD * flops for n, flops in forward.items()}
    training["autoencoder"] = encoder * (2 if model.chunk_embedding.reads_latents else 1)  # of targets, and of inputs
    every = 2.0 * _matrices(model.head) - once  # in training samples have times of their own
    if isinstance(model.head, ChainHead):
        samples, decoder, training["autoencoder"] = 1, 0.0, training["autoencoder"] - encoder  # tokens, not latents
        every = sample  # of the head's maps that every token has
        own_words = _count(model.head.own_words) if model.head.own_words is not None else 0
        passes = FORWARD_AND_BACKWARD if own_words else 2  # words that stay have no gradient
        training["vocabulary projection"] = passes * projection * _share_of_words(config, model.config.vocab_size)
    derivative = 2 if model.config.head == "mean-flow" else 0  # forward with values and their changes beside them
    training["head"] = (FORWARD_AND_BACKWARD + derivative) * (once + samples * every)
    inference = {
        **forward,
        "head": once + evaluations * (evaluation + sample),
        "autoencoder": decoder,
        "vocabulary projection": projection,
    }
    sizes = {
        "backbone": _count(model.backbone),
        "token embedding": embedding,
        "chunk embedding": _count(model.chunk_embedding) - embedding,
        "head": _count(model.head) - own_words,
        "vocabulary projection": own_words,
        "autoencoder": _count(model.autoencoder),
    }
    parts = _parts(sizes, {n: f / size for n, f in training.items()}, {n: f / size for n, f in inference.items()})
    cost = _sum(name, config, model, parts)
    cost.train_flops += _autoencoder_training(config, model.config.vocab_size)
    candidates = 1 if model.config.is_chain else candidates  # it needs no others at any temperature
    before = cost.inference_flops_per_token - projection / size
    more = before + (candidates - 1) * (evaluations * sample + decoder) / size
    cost.inference_flops_per_token_with_candidates = more + candidates * projection / size
    cost.inference_flops_per_token_with_search = more + candidates * projection * _searched(model) / size
    cost.candidates = candidates
    return cost


def _searched(model: CalmForCausalLM) -> float:
    """The share of a vocabulary projection that an exact search for the most probable word computes."""
    read_whole = model.config.vocab_size <= SMALL or model.config.is_chain  # a chain needs every word's probability
    return 1.0 if read_whole else EIGHT_BITS  # the words that its bounds leave are too few to count


def _share_of_words(config: RunConfig, vocabulary: int) -> float:
    """Of the vocabulary, what the sums of a chain head run over: at most a word for each token of a batch."""
    sample = config.language_model.vocabulary_sample
    if sample is None:
        return 1.0
    return min(1.0, (config.data.batch_size * config.data.sequence_length + sample) / vocabulary)


def _autoencoder_training(config: RunConfig, vocabulary: int) -> float:
    """What the autoencoder's own run costs, where its directory is named after the recipe, as in runs/RECIPE/model."""
    path = config.language_model.autoencoder
    recipe = path.parent.name if path is not None else ""
    return cost_of(recipe, load_config(recipe), vocabulary=vocabulary).train_flops if recipe in recipe_names() else 0.0


def _autoencoder_cost(name: str, config: RunConfig, model: ChunkAutoencoder) -> Cost:
    encoder, decoder, projection = (flops / model.config.chunk_size for flops in _autoencoder_flops(model))
    forward = {"encoder": encoder, "decoder": decoder, "vocabulary projection": projection}
    sizes = {
        "encoder": _count(model.encoder),
        "decoder": _count(model.decoder),
        "token embedding": _count(model.embedding),
    }
    parts = _parts(sizes, {n: FORWARD_AND_BACKWARD * f for n, f in forward.items()}, forward)
    return _sum(name, config, model, parts)


def _head_flops(model: CalmForCausalLM) -> tuple[float, float, float]:
    """Of a position: what is done once, what in each evaluation of the network, and what for each sample in it.

    In sampling all samples share the time of a denoiser, and with it the modulation; the embedding of the time itself
    is one vector for all positions and costs nothing.
    """
    if isinstance(model.head, ChainHead):  # each of the K tokens goes through all but the map of the hidden state
        once = _matrices(model.head.hidden)
        return 2.0 * once, 0.0, 2.0 * model.config.chunk_size * (_matrices(model.head) - once)
    sums = {"once": 0, "evaluation": 0, "sample": 0}
    for path, part in model.head.named_modules():
        if isinstance(part, nn.Linear) and not {"time", "span"} & set(path.split(".")):
            name = path.rsplit(".", 1)[-1]
            kind = {"condition": "once", "fuse_condition": "once", "modulation": "evaluation"}.get(name, "sample")
            sums[kind] += part.weight.numel()
    return 2.0 * sums["once"], 2.0 * sums["evaluation"], 2.0 * sums["sample"]


def _evaluations(model: CalmForCausalLM) -> int:
    """How often the network of a head runs for one sample."""
    config = model.config
    if config.head in ("energy", "mean-flow", "chain"):
        return 1
    return config.num_sampling_steps * (2 if config.head == "flow" and config.sampler == "midpoint" else 1)


def _autoencoder_flops(model: ChunkAutoencoder) -> tuple[float, float, float]:
    """Of one chunk: encoder, decoder without its projection on the vocabulary, and that."""
    config = model.config
    size = config.chunk_size
    encoder = size * _matrices(model.encoder.token_layers)
    encoder += _matrices(model.encoder.squeeze, model.encoder.chunk_layers, model.encoder.posterior)
    decoder = size * _matrices(model.decoder.token_layers)
    decoder += _matrices(model.decoder.latent, model.decoder.chunk_layers, model.decoder.expand)
    return 2.0 * encoder, 2.0 * decoder, 2.0 * size * config.vocab_size * config.hidden_size


def _parts(sizes: dict[str, int], training: dict[str, float], inference: dict[str, float]) -> dict[str, Part]:
    names = dict.fromkeys((*sizes, *training, *inference))
    return {n: Part(sizes.get(n, 0), training.get(n, 0.0), inference.get(n, 0.0)) for n in names}


def _sum(name: str, config: RunConfig, model: Any, parts: dict[str, Part]) -> Cost:
    tokens = config.train.steps * config.data.batch_size * config.data.sequence_length
    everything = _count(model)
    return Cost(
        name,
        everything - (_count(model.autoencoder) if isinstance(model, CalmForCausalLM) else 0),
        everything,
        tokens * sum(part.train_flops_per_token for part in parts.values()),
        sum(part.inference_flops_per_token for part in parts.values()),
        model.config.vocab_size,
        parts,
    )
