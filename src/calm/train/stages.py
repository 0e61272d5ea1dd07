"""What is trained: the model of a stage, the loss of a step, and its score. The loop knows no more than this."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from calm.config import LanguageModel, RunConfig
from calm.data.loader import Batch
from calm.data.tokenizer import Tokenizer, load_tokenizer
from calm.distributed import World
from calm.errors import ConfigError, DataError
from calm.evaluate.health import evaluate_predictions
from calm.evaluate.reconstruction import evaluate_reconstruction
from calm.evaluate.softmax import evaluate_softmax
from calm.models.autoencoder import ChunkAutoencoder, count_chunks
from calm.models.backbone import build_transformer
from calm.models.calm import IGNORED, CalmForCausalLM
from calm.models.configuration import CalmConfig, ChunkAutoencoderConfig, make_backbone_config
from calm.models.fields import check_positions
from calm.models.loading import load_autoencoder, load_backbone, load_calm, load_softmax
from calm.noise import RowNoise
from calm.scores.tokens import Words
from calm.seeds import SeedStream, permute, row_seeds
from calm.train.data import TrainingData
from calm.train.memory import training_memory


class Stage(ABC):
    """What the stages share: rows of a step, in parts, each part what the model's `forward` takes."""

    def __init__(self, config: RunConfig, world: World):
        self.config, self.world = config, world
        self.data = TrainingData(config.data, config.seed, world)
        self.model: Any = self.build()

    @abstractmethod
    def build(self) -> PreTrainedModel: ...

    @abstractmethod
    def count(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """What the loss is a mean over, in some rows."""

    @abstractmethod
    def part(self, tokens: Tensor, mask: Tensor, noise: RowNoise, count: float) -> dict[str, Any]:
        """What the model's `forward` takes for some rows."""

    @abstractmethod
    def measure(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Measures on validation rows; `score` decides which checkpoint is the best."""

    def read(self, step: int) -> dict[str, Any]:
        """This process's share of a step, on the host; it may run ahead of the training."""
        return self._share(self.data.loader.batch(step))

    def _share(self, batch: Batch) -> dict[str, Any]:
        return {
            "tokens": torch.from_numpy(batch.tokens),
            "mask": torch.from_numpy(batch.mask),
            "seeds": row_seeds(batch.rows, self.config.seed, SeedStream.TRAINING),
        }

    def parts(self, share: dict[str, Any]) -> list[dict[str, Any]]:
        """What to give to the model's `forward`, part for part."""
        tokens, mask, device = share["tokens"], share["mask"], self.world.device
        (count,) = self.world.sum(self.count(tokens, mask).sum().item())
        parts = []
        for rows in torch.arange(len(tokens)).chunk(self.config.train.accumulation):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            noise = RowNoise(share["seeds"][here], device)
            parts.append(self.part(tokens[here].to(device), mask[here].to(device), noise, count))
        return parts

    def evaluate(self) -> dict[str, float]:
        settings, batch_size = self.config.train, self.config.data.batch_size
        at_once = max(1, batch_size // self.world.size // settings.accumulation)
        return self.measure(self.data.validation_batches(settings.evaluation_batches * batch_size, at_once, self.world))

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.config.data.sequence_length

    def estimated_memory(self) -> float:
        """Bytes that one process will need."""
        rows = self.config.data.batch_size / self.world.size / self.config.train.accumulation
        return training_memory(self.model, self.config, rows, self.world.size)

    def save_extras(self, directory: Path) -> None:
        self.data.tokenizer.save(directory)


class AutoencoderStage(Stage):
    """§2: reconstruct chunks."""

    def build(self) -> ChunkAutoencoder:
        tokenizer = self.data.tokenizer
        return ChunkAutoencoder(autoencoder_config(self.config, tokenizer.vocab_size, tokenizer.mask_token_id))

    def read(self, step: int) -> dict[str, Any]:
        sampled = self.config.autoencoder.vocabulary_sample is not None
        batch, whole = self.data.loader.batch_and_whole(step, whole=sampled)
        return {**self._share(batch), "candidates": self._candidates(step, whole.tokens)}

    def parts(self, share: dict[str, Any]) -> list[dict[str, Any]]:
        candidates = share["candidates"]
        if candidates is not None:
            candidates = candidates.to(self.world.device)
        return [{**part, "candidates": candidates} for part in super().parts(share)]

    def count(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return count_chunks(tokens, mask, self.config.data.chunk_size)

    def part(self, tokens: Tensor, mask: Tensor, noise: RowNoise, count: float) -> dict[str, Any]:
        return {"input_ids": tokens, "attention_mask": mask, "noise": noise, "num_chunks": count}

    def _candidates(self, step: int, tokens: np.ndarray) -> Tensor | None:
        """The words of the global batch and some random ones, the same in every process."""
        number = self.config.autoencoder.vocabulary_sample
        if number is None:
            return None
        size = self.model.config.vocab_size
        random = permute(np.arange(min(number, size)), size, self.config.seed, SeedStream.VOCABULARY, step)
        return torch.from_numpy(np.union1d(tokens, random))

    def measure(self, batches: Iterable[Batch]) -> dict[str, float]:
        found = evaluate_reconstruction(self.model, batches, extra_noise=(), reduce=self.world.all_reduce)
        names = ("token_accuracy", "token_accuracy_from_mean", "chunk_accuracy", "mean_sigma", "collapsed_dimensions")
        return {"score": found["token_accuracy"], **{name: found[name] for name in names}}

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * (self.config.data.sequence_length + self.config.data.chunk_size)


class LanguageModelStage(Stage):
    """§3: predict the latent of the next chunk."""

    def build(self) -> CalmForCausalLM:
        settings, data, tokenizer = self.config.language_model, self.config.data, self.data.tokenizer
        if settings.start is not None:
            model, place = load_calm(settings.start), settings.start
        else:
            assert settings.autoencoder is not None
            autoencoder, place = load_autoencoder(settings.autoencoder), settings.autoencoder
            pretrained = _pretrained_backbone(settings.backbone, tokenizer)
            model = CalmForCausalLM(calm_config(settings, autoencoder.config, pretrained and pretrained.config))
            model.config.knows_fill = False  # until it has seen some
            model.take_autoencoder(autoencoder)
            if pretrained is not None:
                _take_backbone(model, pretrained)
            if settings.words_from_autoencoder:
                _take_words(model)
        if model.config.chunk_size != data.chunk_size:
            raise ConfigError(
                f"data.chunk_size is {data.chunk_size}, but the model in {place} has chunks of "
                f"{model.config.chunk_size} tokens"
            )
        check_tokenizer(place, tokenizer, model.config.vocab_size)
        check_positions(model.config.backbone_config, data.sequence_length // data.chunk_size, "chunks")
        model.config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
        model.config.knows_fill |= data.front_fill > 0
        return model

    def read(self, step: int) -> dict[str, Any]:
        number = self.config.language_model.vocabulary_sample
        if number is None or not self.model.config.is_chain:
            return super().read(step)
        batch, whole = self.data.loader.batch_and_whole(step, whole=True)
        words = sampled_words(whole.tokens, number, self.model.config.vocab_size, self.config.seed, step)
        return {**self._share(batch), "words": words}

    def parts(self, share: dict[str, Any]) -> list[dict[str, Any]]:
        parts = super().parts(share)
        if "words" not in share:
            return parts
        words = share["words"].to(self.world.device)
        return [{**part, "words": words} for part in parts]

    def count(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return count_chunks(tokens, mask, self.config.data.chunk_size)[:, 1:]

    def part(self, tokens: Tensor, mask: Tensor, noise: RowNoise, count: float) -> dict[str, Any]:
        labels = tokens.masked_fill(~mask, IGNORED)
        return {"input_ids": tokens, "labels": labels, "noise": noise, "num_chunks": count}

    def measure(self, batches: Iterable[Batch]) -> dict[str, float]:
        return evaluate_predictions(self.model, batches, reduce=self.world.all_reduce)


class TransformerStage(Stage):
    """The baseline: a standard Transformer that predicts the next token, on the same shards."""

    def build(self) -> PreTrainedModel:
        settings, data, tokenizer = self.config.language_model, self.config.data, self.data.tokenizer
        if settings.start is not None:
            model = load_softmax(settings.start)
            check_tokenizer(settings.start, tokenizer, model.config.vocab_size)
        else:
            if not isinstance(settings.backbone, dict):
                raise ConfigError("a pretrained Transformer is named by language_model.start, not by backbone")
            config = make_backbone_config(settings.backbone, tokenizer.vocab_size)
            model = build_transformer(AutoModelForCausalLM, config)
        check_positions(model.config, data.sequence_length + data.chunk_size - 1, "tokens")
        return model

    def count(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return mask[:, 1:]

    def part(self, tokens: Tensor, mask: Tensor, noise: RowNoise, count: float) -> dict[str, Any]:
        labels = tokens.masked_fill(~mask, IGNORED)[:, 1:].contiguous()
        shifted = {"labels": labels, "shift_labels": labels}  # so that no last token is computed for nothing
        return {"input_ids": tokens[:, :-1], **shifted, "num_items_in_batch": count, "use_cache": False}

    def measure(self, batches: Iterable[Batch]) -> dict[str, float]:
        return evaluate_softmax(self.model, batches, reduce=self.world.all_reduce)


OF_TRAINING = ("vocabulary_sample", "words_from_autoencoder")  # fields that no model knows

STAGES: dict[str, type[Stage]] = {
    "autoencoder": AutoencoderStage,
    "language-model": LanguageModelStage,
    "transformer": TransformerStage,
}


def sampled_words(tokens: np.ndarray, number: int, vocab_size: int, seed: int, step: int) -> Words:
    """The words of the global batch, and so many random others that stand for the rest; the same in every process."""
    present = np.unique(tokens)
    rest = np.setdiff1d(np.arange(vocab_size), present, assume_unique=True)
    number = min(number, len(rest))
    chosen = rest[permute(np.arange(number), len(rest), seed, SeedStream.VOCABULARY, step)] if number else rest
    ids = np.concatenate([present, chosen])
    weights = np.concatenate([np.ones(len(present)), np.full(number, len(rest) / max(number, 1))])
    order = np.argsort(ids)
    return Words(torch.from_numpy(ids[order]).long(), torch.from_numpy(weights[order]).float())


def autoencoder_config(config: RunConfig, vocab_size: int, mask_token_id: int = 0) -> ChunkAutoencoderConfig:
    fields = config.autoencoder.model_dump(exclude={"vocabulary_sample"})
    return ChunkAutoencoderConfig(
        vocab_size=vocab_size, chunk_size=config.data.chunk_size, mask_token_id=mask_token_id, **fields
    )


def calm_config(settings: LanguageModel, autoencoder: ChunkAutoencoderConfig, backbone: Any = None) -> CalmConfig:
    """The model that a recipe describes; `backbone` is the config of a pretrained one."""
    fields = settings.model_dump(exclude={"autoencoder", "start", "backbone", *OF_TRAINING})
    return CalmConfig(backbone or cast(dict, settings.backbone), autoencoder, **fields)


def described_model(config: RunConfig, vocab_size: int) -> PreTrainedModel:
    """The model of a stage as its recipe describes it, with new weights."""
    if config.stage == "autoencoder":
        return ChunkAutoencoder(autoencoder_config(config, vocab_size))
    if config.stage == "transformer":
        backbone = make_backbone_config(cast(dict, config.language_model.backbone), vocab_size)
        return build_transformer(AutoModelForCausalLM, backbone)
    return CalmForCausalLM(calm_config(config.language_model, autoencoder_config(config, vocab_size)))


def check_tokenizer(place: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """A model reads only what its own tokenizer wrote, and has a row for each of its ids."""
    if not (place / "tokenizer.json").exists():
        raise DataError(
            f"{place} holds no tokenizer.json, so nobody knows its ids; put the one there that it was made with"
        )
    if load_tokenizer(str(place)).sha256 != tokenizer.sha256:
        raise DataError(
            f"the model in {place} and the data were made with different tokenizers (vocabularies); prepare the data "
            f"with --tokenizer {place}"
        )
    if max(tokenizer.eos_token_id, tokenizer.pad_token_id) >= vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} ids, and the model in {place} only {vocab_size}: it has no end "
            "or no fill of its own, and cannot be trained on this data"
        )


def _pretrained_backbone(backbone: Path | dict[str, Any], tokenizer: Tokenizer) -> PreTrainedModel | None:
    if isinstance(backbone, dict):
        return None
    model = load_backbone(backbone)
    check_tokenizer(backbone, tokenizer, tokenizer.vocab_size)
    words: Any = model.get_input_embeddings()
    if words.num_embeddings < tokenizer.vocab_size:
        model.resize_token_embeddings(tokenizer.vocab_size, mean_resizing=False)  # for the roles that were added
    return model


def _take_backbone(model: CalmForCausalLM, pretrained: PreTrainedModel) -> None:
    """Give a new model the weights of a pretrained backbone, its token embedding included."""
    if model.chunk_embedding.tokens is not None:
        model.chunk_embedding.tokens.load_state_dict(pretrained.get_input_embeddings().state_dict())
    pretrained.set_input_embeddings(None)  # pyright: ignore[reportArgumentType]
    model.backbone.load_state_dict(pretrained.state_dict())


def _take_words(model: CalmForCausalLM) -> None:
    """Let the token embedding begin as the autoencoder's words, in its first dimensions."""
    tokens, words = model.chunk_embedding.tokens, model.words
    if tokens is None or tokens.embedding_dim < words.shape[1]:
        raise ConfigError(
            "language_model.words_from_autoencoder needs a token embedding of at least the autoencoder's "
            f"{words.shape[1]} dimensions; make the backbone wider or leave it out"
        )
    with torch.no_grad():
        tokens.weight[:, : words.shape[1]] = words
