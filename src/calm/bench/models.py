"""Models of the recipes with random weights, and random inputs: neither affects speed."""

from typing import Any

import torch
from torch import Tensor, nn

from calm.config import RunConfig, load_config
from calm.heads import EnergyHead
from calm.linear import FastLinear, change_layers
from calm.noise import RowNoise
from calm.train.optimizer import adamw
from calm.train.stages import described_model, sampled_words

SIZES = ("laptop", "paper")
VOCABULARIES = {"laptop": 4096, "paper": 128_257}
SHORT = {"paper": ("data.batch_size=1", "data.sequence_length=2048")}  # a batch that fits a CPU
RECIPES = {  # energy head, chain head, and the Transformer baseline
    "laptop": {"energy": "laptop-calm", "chain": "quickstart-calm", "Transformer": "laptop-transformer"},
    "paper": {"energy": "paper-calm-m", "Transformer": "paper-transformer-s"},
}
SETTINGS = ("train.precision=fp32", "train.gradient_checkpointing=false", "language_model.num_target_samples=null")


def config_of(recipe: str, size: str, *settings: str) -> RunConfig:
    """Load a recipe in fp32, with the closed form of the energy loss."""
    return load_config(recipe, [*SETTINGS, *SHORT.get(size, ()), *settings])


def model_of(config: RunConfig, vocabulary: int) -> Any:
    torch.manual_seed(0)
    model: Any = described_model(config, vocabulary)
    head = getattr(model, "head", None)
    if isinstance(head, EnergyHead):
        torch.nn.init.normal_(head.latent.weight, std=0.05)  # zero at initialization, where all samples coincide
    return model


class Training:
    """A training step as in `calm train`: forward, backward, gradient clipping, AdamW."""

    def __init__(self, config: RunConfig, vocabulary: int, layers: type[nn.Linear] = FastLinear):
        self.config, self.model = config, model_of(config, vocabulary).train()
        change_layers(self.model, layers)
        self.make_optimizer()
        extra = 1 if config.stage == "transformer" else config.data.chunk_size  # targets that are not part of the input
        shape = (config.data.batch_size, config.data.sequence_length + extra)
        self.inputs = _inputs(config, torch.randint(vocabulary, shape), vocabulary)

    def make_optimizer(self) -> None:
        settings = self.config.optimizer
        self.optimizer = adamw(self.model, settings.betas, settings.eps, settings.weight_decay)

    @property
    def tokens(self) -> int:
        return self.config.data.batch_size * self.config.data.sequence_length

    def forward_backward(self) -> None:
        self.model(**self.inputs, **self._noise()).loss.backward()

    def step(self) -> None:
        self.forward_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _noise(self) -> dict[str, Any]:
        if self.config.stage == "transformer":
            return {}
        return {"noise": RowNoise(list(range(self.config.data.batch_size)))}


def _inputs(config: RunConfig, ids: Tensor, vocabulary: int) -> dict[str, Any]:
    if config.stage == "transformer":
        labels = ids[:, 1:].contiguous()
        return {"input_ids": ids[:, :-1], "labels": labels, "shift_labels": labels, "use_cache": False}
    number = config.autoencoder.vocabulary_sample
    if config.stage == "autoencoder":
        candidates = None if number is None else sampled_words(ids.numpy(), number, vocabulary, 0, 0).ids
        return {"input_ids": ids, "candidates": candidates}
    number = config.language_model.vocabulary_sample
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if number is not None and config.language_model.head == "chain":
        inputs["words"] = sampled_words(ids.numpy(), number, vocabulary, 0, 0)
    return inputs
