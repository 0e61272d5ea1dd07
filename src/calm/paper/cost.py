"""Parameters, FLOPs, and memory of a recipe, as in Table 1, by part.

A matrix of P parameters costs 2·P FLOPs per vector, and training costs three times the forward pass. Attention adds
4·context·H per layer and position (scores and weighted values, on the whole context, as the paper counts). Per chunk:

    backbone, chunk embedding    2·P
    head                         2·P per sample; layers that only read the hidden state once for all N
    autoencoder                  training: the encoder, forward only, and the training of the autoencoder;
                                 inference: the decoder
    vocabulary projection        K·2·V·d of the decoder (a Transformer: 2·V·H per token)

All costs are divided by K. Modules count their own FLOPs (`flops`, `cost`); models are built on the meta device.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from calm.autoencoder import Autoencoder, matmul_flops
from calm.config import RunConfig, load_config, recipe_names
from calm.data.shards import PreparedData
from calm.errors import UserError
from calm.heads.base import FORWARD_AND_BACKWARD, count_parameters
from calm.model import Calm
from calm.train.memory import gpu_training_memory, training_memory
from calm.train.stages import described_model

PAPER_VOCABULARY = 128_257
INT8_COST = 1 / 4  # of an int8 operation, relative to one in fp32
MIN_SEARCHED_VOCABULARY = 2**14  # smaller ones are not searched (calm/cpu/search.py)

TABLE_1 = {  # parameters, training FLOPs, inference FLOPs per token
    "paper-transformer-s": (281e6, 6.6e20, 4.4e8),
    "paper-transformer-m": (465e6, 11.9e20, 7.9e8),
    "paper-transformer-l": (849e6, 22.5e20, 15.0e8),
    "paper-calm-m": (371e6, 3.7e20, 2.9e8),
    "paper-calm-l": (735e6, 7.7e20, 4.6e8),
    "paper-calm-xl": (1.82e9, 19.5e20, 9.4e8),
}


@dataclass
class Part:
    """One part of a model."""

    parameters: int = 0
    train_flops_per_token: float = 0.0
    inference_flops_per_token: float = 0.0


@dataclass
class Cost:
    name: str
    parameters: int  # without the autoencoder, as in Table 1
    parameters_with_autoencoder: int
    train_flops: float  # of the run, and of the autoencoder's run
    inference_flops_per_token: float
    vocabulary: int
    parts: dict[str, Part]
    peak_memory: float = 0.0  # bytes of one process in training, on CPUs
    gpu_memory: float = 0.0  # the same on GPUs; never measured
    candidates: int = 1  # per chunk at low temperature; not counted in the paper
    inference_flops_per_token_with_candidates: float | None = None
    inference_flops_per_token_with_search: float | None = None  # the same with int8 vocabulary search

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
    """Cost of a recipe.

    Args:
        context: Context length in backbone steps.
        candidates: Candidates per chunk at a lower temperature.
        vocabulary: Vocabulary size. Default: that of the recipe's data if it exists, else the paper's.
        processes: Number of processes that share the training state; the memory is that of one process.
    """
    settings = config.language_model
    if config.stage != "autoencoder" and (settings.start is not None or not isinstance(settings.backbone, dict)):
        raise UserError(f"{name} takes its model from a directory; calm cost counts models that a recipe describes")
    with torch.device("meta"):
        model = described_model(config, vocabulary or _vocabulary(config))
    if isinstance(model, Autoencoder):
        cost = _autoencoder_cost(name, config, model)
    else:
        cost = _language_model_cost(name, config, context, candidates, model)
    rows = config.data.batch_size / config.train.accumulation / processes
    cost.peak_memory = training_memory(model, config, rows, processes)
    cost.gpu_memory = gpu_training_memory(model, config, rows, processes)
    return cost


def _vocabulary(config: RunConfig) -> int:
    """Vocabulary size of the recipe's data if it exists, else the paper's."""
    try:
        return PreparedData(config.data.sets[0].path, verify=False).manifest["vocab_size"]
    except UserError:
        return PAPER_VOCABULARY


def _attention(config: Any, context: int) -> float:
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 0) or config.hidden_size
    return 4.0 * context * width * config.num_hidden_layers


def _language_model_cost(name: str, config: RunConfig, context: int, candidates: int, model: Any) -> Cost:
    """Cost of a CALM model or a Transformer."""
    head = model.head.cost(_subset_share(config, model.vocab_size))
    backbone_config = getattr(model.config, "backbone_config", model.config)
    forward = {"backbone": matmul_flops(*model.backbone.layers), "attention": _attention(backbone_config, context)}
    embedding = count_parameters(*(part for part in model.backbone.modules() if isinstance(part, nn.Embedding)))
    sizes = {"backbone": count_parameters(model.backbone) - embedding, "token embedding": embedding}
    frozen = {}
    if isinstance(model, Calm):
        chunk_embedding = model.chunk_embedding
        tokens = 0 if chunk_embedding.tokens is None else count_parameters(chunk_embedding.tokens)
        forward["chunk embedding"] = matmul_flops(chunk_embedding)
        sizes |= {"token embedding": tokens, "chunk embedding": count_parameters(chunk_embedding) - tokens}
        frozen["autoencoder"] = model.autoencoder.flops()[0] if chunk_embedding.reads_latents else 0.0  # of the inputs
    sizes |= head.parameters
    training = {part: FORWARD_AND_BACKWARD * flops for part, flops in forward.items()} | frozen
    for part, flops in head.training.items():
        training[part] = training.get(part, 0.0) + flops
    if isinstance(model, Calm):
        sizes["autoencoder"] = count_parameters(model.autoencoder)
    cost = _sum(name, config, model, _parts(model.chunk_size, sizes, training, forward | head.generation))
    if isinstance(model, Calm):
        cost.train_flops += _autoencoder_training(config, model.vocab_size)
        _add_candidates(cost, model, head.candidate, candidates)
    return cost


def _add_candidates(cost: Cost, model: Calm, candidate: dict[str, float], candidates: int) -> None:
    """Add the inference cost at a lower temperature, with and without the int8 vocabulary search."""
    size, candidates = model.chunk_size, candidates if candidate else 1
    projection = cost.parts["vocabulary projection"].inference_flops_per_token
    others = sum(flops for part, flops in candidate.items() if part != "vocabulary projection") / size
    fixed = cost.inference_flops_per_token - projection + (candidates - 1) * others
    searched = INT8_COST if candidate and model.vocab_size > MIN_SEARCHED_VOCABULARY else 1.0
    cost.inference_flops_per_token_with_candidates = fixed + candidates * projection
    cost.inference_flops_per_token_with_search = fixed + candidates * projection * searched
    cost.candidates = candidates


def _subset_share(config: RunConfig, vocab_size: int) -> float:
    """Upper bound on the fraction of the vocabulary in a sampled softmax: the sample and each token of a batch."""
    sample = config.language_model.vocabulary_sample
    if sample is None:
        return 1.0
    return min(1.0, (config.data.batch_size * config.data.sequence_length + sample) / vocab_size)


def _autoencoder_training(config: RunConfig, vocabulary: int) -> float:
    """Training cost of the autoencoder if its directory is named after a recipe, as in runs/RECIPE/model."""
    path = config.language_model.autoencoder
    recipe = path.parent.name if path is not None else ""
    return cost_of(recipe, load_config(recipe), vocabulary=vocabulary).train_flops if recipe in recipe_names() else 0.0


def _autoencoder_cost(name: str, config: RunConfig, model: Autoencoder) -> Cost:
    encoder, decoder, projection = model.flops()
    forward = {"encoder": encoder, "decoder": decoder, "vocabulary projection": projection}
    sizes = {
        "encoder": count_parameters(model.encoder),
        "decoder": count_parameters(model.decoder),
        "token embedding": count_parameters(model.embedding),
    }
    training = {part: FORWARD_AND_BACKWARD * flops for part, flops in forward.items()}
    return _sum(name, config, model, _parts(model.config.chunk_size, sizes, training, forward))


def _parts(
    chunk_size: int, sizes: dict[str, int], training: dict[str, float], inference: dict[str, float]
) -> dict[str, Part]:
    """Combine parameters and FLOPs per chunk by name."""
    return {
        name: Part(sizes.get(name, 0), training.get(name, 0.0) / chunk_size, inference.get(name, 0.0) / chunk_size)
        for name in dict.fromkeys((*sizes, *training, *inference))
    }


def _sum(name: str, config: RunConfig, model: Any, parts: dict[str, Part]) -> Cost:
    tokens = config.train.steps * config.data.batch_size * config.data.sequence_length
    total = count_parameters(model)
    return Cost(
        name,
        total - (count_parameters(model.autoencoder) if isinstance(model, Calm) else 0),
        total,
        tokens * sum(part.train_flops_per_token for part in parts.values()),
        sum(part.inference_flops_per_token for part in parts.values()),
        model.config.vocab_size,
        parts,
    )
