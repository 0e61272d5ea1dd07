"""What is trained: the model of a stage, the inputs of a step, and its validation score. The loop knows no more."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from calm.autoencoder import Autoencoder, AutoencoderConfig, chunk_mask
from calm.checkpoint import build_calm, load_autoencoder, load_calm, load_transformer
from calm.config import LanguageModel, RunConfig
from calm.data.loader import Batch
from calm.data.tokenizer import Tokenizer, load_tokenizer
from calm.distributed import World
from calm.errors import ConfigError, DataError
from calm.evaluate.health import evaluate_predictions, evaluate_transformer
from calm.evaluate.reconstruction import evaluate_reconstruction
from calm.llama import LlamaConfig, check_positions
from calm.model import Calm, PlainCalmConfig, TeacherSamples
from calm.noise import RowNoise
from calm.scores.vocabulary import VocabularySubset
from calm.seeds import SeedStream, permute, row_seeds
from calm.train.data import TrainingData
from calm.train.distributed import initialize
from calm.train.memory import gpu_training_memory, training_memory
from calm.train.teacher import Teacher
from calm.transformer import Transformer


class Stage(ABC):
    """What the stages share: the rows of a step, in micro-batches of the arguments of the model's `forward`."""

    vocabulary_sample: int | None = None  # random tokens of a sampled softmax

    def __init__(self, config: RunConfig, world: World):
        self.config, self.world = config, world
        self.data = TrainingData(config.data, config.seed, world)
        self.model: Any = self.build()

    @abstractmethod
    def build(self) -> Any:
        """The model: with the weights of a directory, or on the meta device, until `initialize`."""

    def initialize(self) -> None:
        """Move the model to the device. New weights follow from the seed of the run alone."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            torch.manual_seed(self.config.seed)
            initialize(self.model, self.fill, self.world.device)
        else:
            self.model.to(self.world.device)

    def fill(self) -> None:
        """Set new weights."""
        self.model.reset_parameters()

    @abstractmethod
    def count(self, mask: Tensor) -> Tensor:
        """What the loss is a mean over, in rows with this token mask (B, T)."""

    @abstractmethod
    def inputs(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        """Arguments of the model's `forward` for rows (B, T)."""

    def further_inputs(self, tokens: Tensor, seeds: list[int]) -> dict[str, Any]:
        """Arguments that are only for training, for rows (B, T) with these seeds."""
        return {}

    @abstractmethod
    def measure(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Metrics on validation rows; `score` decides which checkpoint is the best."""

    def read(self, step: int) -> dict[str, Any]:
        """This process's share of a step, on the host; it may run ahead of the training."""
        sampled = self.vocabulary_sample is not None
        batch, whole = self.data.loader.batch_and_whole(step, whole=sampled)
        share = {
            "tokens": self._pinned(torch.from_numpy(batch.tokens)),
            "mask": self._pinned(torch.from_numpy(batch.mask)),
            "seeds": row_seeds(batch.rows, self.config.seed, SeedStream.TRAINING),
        }
        if not sampled:
            return {**share, "vocabulary": None}
        return {**share, "vocabulary": VocabularySubset(*map(self._pinned, self.subset(whole.tokens, step)))}

    def _pinned(self, tensor: Tensor) -> Tensor:
        """In memory that a GPU can copy from while the CPU goes on."""
        return tensor.pin_memory() if self.world.device.type == "cuda" else tensor

    def subset(self, tokens: np.ndarray, step: int) -> VocabularySubset:
        """Tokens that the softmaxes of a step sum over, the same in every process; `tokens` is the global batch."""
        assert self.vocabulary_sample is not None
        return sampled_subset(tokens, self.vocabulary_sample, self.model.config.vocab_size, self.config.seed, step)

    def micro_batches(self, share: dict[str, Any]) -> list[dict[str, Any]]:
        """Arguments of the model's `forward`, one after the other."""
        device = self.world.device
        tokens, mask = (share[name].to(device, non_blocking=True) for name in ("tokens", "mask"))
        count = self.world.all_reduce(self.count(mask).sum())
        vocabulary = share["vocabulary"] and {"vocabulary": share["vocabulary"].to(device)}
        micro_batches = []
        for rows in torch.arange(len(tokens)).chunk(self.config.train.accumulation):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            noise = RowNoise(share["seeds"][here], device)
            inputs = self.inputs(tokens[here], mask[here])
            inputs |= self.further_inputs(tokens[here], share["seeds"][here])
            micro_batches.append({**inputs, "noise": noise, "num_chunks": count, **(vocabulary or {})})
        return micro_batches

    def evaluate(self) -> dict[str, float]:
        settings, batch_size = self.config.train, self.config.data.batch_size
        at_once = max(1, batch_size // self.world.size // settings.accumulation)
        return self.measure(self.data.validation_batches(settings.evaluation_batches * batch_size, at_once, self.world))

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.config.data.sequence_length

    def estimated_memory(self) -> float:
        """Bytes that one process will need on its device."""
        rows = self.config.data.batch_size / self.world.size / self.config.train.accumulation
        estimate = gpu_training_memory if self.world.device.type == "cuda" else training_memory
        return estimate(self.model, self.config, rows, self.world.size)

    def save_extras(self, directory: Path) -> None:
        self.data.tokenizer.save(directory)


class AutoencoderStage(Stage):
    """§2: reconstruct chunks."""

    def build(self) -> Autoencoder:
        self.vocabulary_sample = self.config.autoencoder.vocabulary_sample
        tokenizer = self.data.tokenizer
        with torch.device("meta"):
            return Autoencoder(autoencoder_config(self.config, tokenizer.vocab_size, tokenizer.mask_token_id))

    def subset(self, tokens: np.ndarray, step: int) -> VocabularySubset:
        """The batch's tokens and random ones, without importance weights: a lower bound of the loss over all."""
        assert self.vocabulary_sample is not None
        size = self.model.config.vocab_size
        number = min(self.vocabulary_sample, size)
        random = permute(np.arange(number), size, self.config.seed, SeedStream.VOCABULARY, step)
        ids = torch.from_numpy(np.union1d(tokens, random))
        return VocabularySubset(ids, torch.ones(len(ids)))

    def count(self, mask: Tensor) -> Tensor:
        return chunk_mask(mask, self.config.data.chunk_size)

    def inputs(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        size = self.config.data.chunk_size
        return {"chunks": tokens.unflatten(1, (-1, size)), "loss_mask": chunk_mask(mask, size)}

    def measure(self, batches: Iterable[Batch]) -> dict[str, float]:
        metrics = evaluate_reconstruction(self.model, batches, extra_noise=(), reduce=self.world.all_reduce)
        names = ("token_accuracy", "token_accuracy_from_mean", "chunk_accuracy", "mean_sigma", "collapsed_dimensions")
        return {"score": metrics["token_accuracy"], **{name: metrics[name] for name in names}}

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * (self.config.data.sequence_length + self.config.data.chunk_size)


class LanguageModelStage(Stage):
    """§3: predict the next chunk."""

    def build(self) -> Calm:
        settings, data, tokenizer = self.config.language_model, self.config.data, self.data.tokenizer
        if settings.start is not None:
            model, place = load_calm(settings.start), settings.start
        else:
            assert settings.autoencoder is not None
            autoencoder, place = load_autoencoder(settings.autoencoder), settings.autoencoder
            model = self._new_model(settings, autoencoder, tokenizer)
        if model.config.chunk_size != data.chunk_size:
            raise ConfigError(
                f"data.chunk_size is {data.chunk_size}, but the model in {place} has chunks of "
                f"{model.config.chunk_size} tokens"
            )
        check_tokenizer(place, tokenizer, model.config.vocab_size)
        check_positions(model.config.backbone_config, data.sequence_length // data.chunk_size, "chunks")
        model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        model.config.front_padding |= data.front_padding > 0
        if model.head.vocabulary_loss:
            self.vocabulary_sample = settings.vocabulary_sample
        self.teacher = None if settings.teacher is None else self._load_teacher(settings.teacher)
        return model

    def _load_teacher(self, directory: Path) -> Teacher:
        settings, data, tokenizer = self.config.language_model, self.config.data, self.data.tokenizer
        teacher = Teacher(
            directory,
            data.chunk_size,
            settings.num_teacher_samples,
            settings.teacher_stride,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        )
        check_tokenizer(directory, tokenizer, teacher.model.vocab_size)
        teacher.prepare(self.world, data.sequence_length + data.chunk_size)
        return teacher

    def further_inputs(self, tokens: Tensor, seeds: list[int]) -> dict[str, Any]:
        if self.teacher is None:
            return {}
        settings = self.config.language_model
        noise = RowNoise(row_seeds(np.array(seeds), SeedStream.TEACHER), tokens.device)
        samples, finite = self.teacher.draw(tokens, noise)
        return {"teacher_samples": TeacherSamples(samples, finite, settings.teacher_stride, settings.teacher_weight)}

    def _new_model(self, settings: LanguageModel, autoencoder: Autoencoder, tokenizer: Tokenizer) -> Calm:
        config, self.autoencoder = autoencoder.config, autoencoder
        if isinstance(settings.backbone, dict):
            fields = backbone_fields(settings.backbone, config.vocab_size)
            with torch.device("meta") if LlamaConfig.describes(fields) else nullcontext():
                model = new_calm(settings, config, front_padding=False)  # until it has seen some
            if model.autoencoder.embedding.weight.is_meta:
                return model
        else:
            from calm.hf import load_backbone

            check_tokenizer(settings.backbone, tokenizer, tokenizer.vocab_size)
            backbone = load_backbone(settings.backbone, tokenizer.vocab_size)
            # copies: Calm initializes all of its parameters in place
            weights, embedding = deepcopy((backbone.state_dict(), backbone.token_embedding.state_dict()))
            fields = calm_fields_of(settings)
            model = Calm(PlainCalmConfig(backbone.config, config, front_padding=False, **fields), backbone)
            backbone.load_state_dict(weights)
            if model.chunk_embedding.tokens is not None:
                model.chunk_embedding.tokens.load_state_dict(embedding)
        model.load_autoencoder(autoencoder)
        if settings.init_embedding_from_autoencoder:
            weight = autoencoder.embedding.weight
            with torch.no_grad():
                _wide_embedding(model).weight[: weight.shape[0], : weight.shape[1]] = weight
        return model

    def fill(self) -> None:
        super().fill()
        self.model.load_autoencoder(self.autoencoder)
        if self.config.language_model.init_embedding_from_autoencoder:
            _init_embedding(self.model)

    def count(self, mask: Tensor) -> Tensor:
        return chunk_mask(mask, self.config.data.chunk_size)[:, 1:]

    def inputs(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        size = self.config.data.chunk_size
        return {"chunks": tokens.unflatten(1, (-1, size)), "loss_mask": chunk_mask(mask, size)}

    def measure(self, batches: Iterable[Batch]) -> dict[str, float]:
        return evaluate_predictions(self.model, batches, reduce=self.world.all_reduce)


class TransformerStage(Stage):
    """The baseline: a standard Transformer that predicts the next token, on the same shards."""

    def build(self) -> Any:
        settings, data, tokenizer = self.config.language_model, self.config.data, self.data.tokenizer
        if settings.start is not None:
            model = load_transformer(settings.start)
            check_tokenizer(settings.start, tokenizer, model.vocab_size)
        elif not isinstance(settings.backbone, dict):
            raise ConfigError("set language_model.start, not backbone, to load a pretrained Transformer")
        else:
            fields = backbone_fields(settings.backbone, tokenizer.vocab_size)
            with torch.device("meta") if LlamaConfig.describes(fields) else nullcontext():
                model = new_transformer(settings.backbone, tokenizer.vocab_size)
        model.config.bos_token_id, model.config.eos_token_id = None, tokenizer.eos_token_id
        model.config.pad_token_id = tokenizer.pad_token_id
        check_positions(model.config, data.sequence_length + data.chunk_size - 1, "tokens")
        return model

    def count(self, mask: Tensor) -> Tensor:
        return mask[:, 1:]

    def inputs(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        return {"chunks": tokens[..., None], "loss_mask": mask}

    def measure(self, batches: Iterable[Batch]) -> dict[str, float]:
        return evaluate_transformer(self.model, batches, reduce=self.world.all_reduce)


STAGES: dict[str, type[Stage]] = {
    "autoencoder": AutoencoderStage,
    "language-model": LanguageModelStage,
    "transformer": TransformerStage,
}


def sampled_subset(tokens: np.ndarray, number: int, vocab_size: int, seed: int, step: int) -> VocabularySubset:
    """The tokens of the global batch, and random others that stand for the rest; the same in every process."""
    present = np.unique(tokens)
    rest = np.setdiff1d(np.arange(vocab_size), present, assume_unique=True)
    number = min(number, len(rest))
    chosen = rest[permute(np.arange(number), len(rest), seed, SeedStream.VOCABULARY, step)] if number else rest
    ids = np.concatenate([present, chosen])
    weights = np.concatenate([np.ones(len(present)), np.full(number, len(rest) / max(number, 1))])
    order = np.argsort(ids)
    return VocabularySubset(torch.from_numpy(ids[order]).long(), torch.from_numpy(weights[order]).float())


def autoencoder_config(config: RunConfig, vocab_size: int, mask_token_id: int = 0) -> AutoencoderConfig:
    return AutoencoderConfig(
        vocab_size=vocab_size,
        chunk_size=config.data.chunk_size,
        mask_token_id=mask_token_id,
        **config.autoencoder.model_dump(exclude={"vocabulary_sample"}),
    )


def calm_fields_of(settings: LanguageModel) -> dict[str, Any]:
    """The fields of a model's config that a recipe describes, parts excluded."""
    common = {name: getattr(settings, name) for name in ("model_input", "head", "num_head_layers")}
    return common | settings.head_settings


def new_calm(settings: LanguageModel, autoencoder: AutoencoderConfig, **fields: Any) -> Calm:
    """The CALM model that a recipe describes, with new weights."""
    backbone = backbone_fields(cast(dict, settings.backbone), autoencoder.vocab_size)
    parts = {"backbone_config": backbone, "autoencoder_config": autoencoder}
    return build_calm({**parts, **calm_fields_of(settings), **fields})


def new_transformer(backbone: dict[str, Any], vocab_size: int) -> Any:
    """The Transformer that a recipe describes, with new weights."""
    fields = backbone_fields(backbone, vocab_size)
    if LlamaConfig.describes(fields):
        return Transformer(LlamaConfig(**fields))
    from calm.hf import build_hf_transformer, make_backbone_config

    return build_hf_transformer(make_backbone_config(fields, vocab_size))


def backbone_fields(backbone: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """A recipe's backbone with its defaults; unknown fields are refused."""
    fields = {"model_type": "llama", "vocab_size": vocab_size, **backbone}
    if LlamaConfig.describes(fields):
        return LlamaConfig.checked(fields).to_dict()
    from calm.hf import make_backbone_config

    return make_backbone_config(backbone, vocab_size).to_dict()


def described_model(config: RunConfig, vocab_size: int) -> Any:
    """The model of a recipe's stage, with new weights."""
    if config.stage == "autoencoder":
        return Autoencoder(autoencoder_config(config, vocab_size))
    if config.stage == "transformer":
        return new_transformer(cast(dict, config.language_model.backbone), vocab_size)
    return new_calm(config.language_model, autoencoder_config(config, vocab_size))


def check_tokenizer(place: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """A model understands only the ids of its own tokenizer, and has an embedding for each of them."""
    if not (place / "tokenizer.json").exists():
        raise DataError(f"{place} has no tokenizer.json; put the model's tokenizer there")
    if load_tokenizer(str(place)).sha256 != tokenizer.sha256:
        raise DataError(
            f"the model in {place} and the data were made with different tokenizers; prepare the data with "
            f"--tokenizer {place}"
        )
    if max(tokenizer.eos_token_id, tokenizer.pad_token_id) >= vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, and the vocabulary of the model in {place} only "
            f"{vocab_size:,} entries: it has no end-of-text or padding token, and cannot be trained on this data"
        )


def _wide_embedding(model: Calm) -> Any:
    """The token embedding, if its first dimensions can start from the autoencoder's."""
    tokens, size = model.chunk_embedding.tokens, model.autoencoder.embedding.embedding_dim
    if tokens is None or tokens.embedding_dim < size:
        raise ConfigError(
            "language_model.init_embedding_from_autoencoder needs a token embedding of at least the autoencoder's "
            f"{size} dimensions; use a wider backbone or leave it out"
        )
    return tokens


def _init_embedding(model: Calm) -> None:
    """Start a new token embedding, which may be sharded, from the autoencoder's, in its first dimensions."""
    tokens, embedding = _wide_embedding(model), model.autoencoder.embedding.weight
    weight = torch.empty(tokens.weight.shape, device="cpu")
    weight.normal_(std=getattr(model.config.backbone_config, "initializer_range", 0.02))
    weight[:, : embedding.shape[1]] = embedding.cpu()
    with torch.no_grad():
        tokens.weight.copy_(weight)
