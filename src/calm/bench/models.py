"""Models of the recipes with random weights, and random inputs: neither affects speed."""

from typing import Any

import torch
from torch import Tensor, nn

from calm.config import RunConfig, load_config
from calm.noise import RowNoise
from calm.paper.cost import PAPER_VOCABULARY
from calm.scores.vocabulary import VocabularySubset
from calm.train.loop import optimize_for_cpu
from calm.train.optimizer import adamw
from calm.train.stages import described_model, sampled_subset

SIZES = ("laptop", "paper")
VOCABULARIES = {"laptop": 4096, "paper": PAPER_VOCABULARY}
SHORT = {"paper": ("data.batch_size=1", "data.sequence_length=2048")}  # a batch that fits a CPU
RECIPES = {  # energy head, chain head, and the Transformer baseline
    "laptop": {"energy": "laptop-calm", "chain": "laptop-chain", "Transformer": "laptop-transformer"},
    "paper": {"energy": "paper-calm-m", "Transformer": "paper-transformer-s"},
}
SETTINGS = ("train.precision=fp32", "train.gradient_checkpointing=false", "language_model.num_target_samples=null")


def config_of(recipe: str, size: str, *settings: str) -> RunConfig:
    """Load a recipe in fp32, with the closed form of the energy loss."""
    return load_config(recipe, [*SETTINGS, *SHORT.get(size, ()), *settings])


def model_of(config: RunConfig, vocabulary: int) -> Any:
    torch.manual_seed(0)
    model: Any = described_model(config, vocabulary)
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.05)  # zero at initialization, where all samples coincide
    return model


def as_transformers(model: Any) -> Any:
    """The same Transformer as transformers' `LlamaForCausalLM`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaForCausalLM(LlamaConfig(**model.config.to_dict()))
    other.load_state_dict(model.state_dict())
    return other.eval()


class Training:
    """A training step as in `calm train`: forward, backward, gradient clipping, AdamW."""

    def __init__(self, config: RunConfig, vocabulary: int):
        self.config, self.model = config, model_of(config, vocabulary).train()
        optimize_for_cpu(self.model)
        self.make_optimizer()
        extra = 1 if config.stage == "transformer" else config.data.chunk_size  # targets that are not part of the input
        shape = (config.data.batch_size, config.data.sequence_length + extra)
        self.inputs = _inputs(config, self.model, torch.randint(vocabulary, shape))

    def make_optimizer(self) -> None:
        settings = self.config.optimizer
        self.optimizer = adamw(self.model, settings.betas, settings.eps, settings.weight_decay)

    @property
    def tokens(self) -> int:
        return self.config.data.batch_size * self.config.data.sequence_length

    def loss(self) -> Tensor:
        return self.model(**self.inputs, noise=RowNoise(list(range(self.config.data.batch_size))))["loss"]

    def forward_backward(self) -> None:
        self.loss().backward()

    def step(self) -> None:
        self.forward_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


class TransformersTraining(Training):
    """The same with transformers' `LlamaForCausalLM`."""

    def __init__(self, config: RunConfig, vocabulary: int):
        super().__init__(config, vocabulary)
        self.model = as_transformers(self.model).train()
        self.make_optimizer()

    def loss(self) -> Tensor:
        ids = self.inputs["chunks"][..., 0]
        labels = ids[:, 1:].contiguous()
        return self.model(input_ids=ids[:, :-1], labels=labels, shift_labels=labels, use_cache=False).loss


def _inputs(config: RunConfig, model: Any, ids: Tensor) -> dict[str, Any]:
    size = 1 if config.stage == "transformer" else config.data.chunk_size
    inputs: dict[str, Any] = {"chunks": ids.unflatten(1, (-1, size))}
    settings = config.autoencoder if config.stage == "autoencoder" else config.language_model
    if settings.vocabulary_sample is None or not getattr(getattr(model, "head", None), "vocabulary_loss", True):
        return inputs
    subset = sampled_subset(ids.numpy(), settings.vocabulary_sample, model.config.vocab_size, 0, 0)
    if config.stage == "autoencoder":
        subset = VocabularySubset(subset.ids, torch.ones(len(subset.ids)))
    return {**inputs, "vocabulary": subset}
