"""What is trained: the model of a stage, the loss of a step, and its score. The loop knows no more than this."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calm.config import Data, RunConfig
from calm.data.chunks import ChunkedStream
from calm.data.loader import Batch, Loader, evaluation_batches, permute, row_seeds
from calm.data.shards import PreparedData
from calm.errors import DataError
from calm.evaluate.reconstruction import evaluate_reconstruction
from calm.models.autoencoder import ChunkAutoencoder, count_chunks
from calm.models.configuration import ChunkAutoencoderConfig
from calm.noise import RowNoise
from calm.train.distributed import Processes


class TrainingData:
    """The prepared sets of a recipe, which must share one tokenizer."""

    def __init__(self, data: Data, seed: int, among: Processes):
        sets = [PreparedData(s.path, verify=data.verify and among.is_first) for s in data.sets]
        self.tokenizer = sets[0].tokenizer
        for other in sets[1:]:
            if other.tokenizer.sha256 != self.tokenizer.sha256:
                raise DataError(f"{other.directory} and {sets[0].directory} were prepared with different tokenizers")
        self.loader = Loader(
            [self._chunked(prepared, "train", data) for prepared in sets],
            [s.weight for s in data.sets],
            data.batch_size,
            seed,
            data.front_fill,
            among.rank,
            among.size,
        )
        self.validation = [self._chunked(prepared, "validation", data) for prepared in sets]
        if not any(len(stream) for stream in self.validation):
            raise DataError(
                f"{sets[0].directory} has no validation documents; prepare it with a larger --validation-share"
            )

    def _chunked(self, prepared: PreparedData, split: str, data: Data) -> ChunkedStream:
        stream = prepared.split(split)
        return ChunkedStream(
            stream, data.chunk_size, data.sequence_length, self.tokenizer.fill_id, data.align_documents
        )

    def validation_batches(self, rows: int, at_once: int, among: Processes) -> Iterator[Batch]:
        """So many rows of validation text, an equal part of each set, whatever the number of processes."""
        streams = [stream for stream in self.validation if len(stream)]
        for stream in streams:
            yield from evaluation_batches(stream, at_once, among.rank, among.size, -(-rows // len(streams)))


class AutoencoderStage:
    """§2: reconstruct chunks."""

    def __init__(self, config: RunConfig, among: Processes):
        self.config, self.among = config, among
        self.data = TrainingData(config.data, config.seed, among)
        fields = config.autoencoder.model_dump(exclude={"vocabulary_sample"})
        tokenizer = self.data.tokenizer
        self.model = ChunkAutoencoder(
            ChunkAutoencoderConfig(
                vocab_size=tokenizer.vocab_size,
                chunk_size=config.data.chunk_size,
                mask_token_id=tokenizer.mask_id,
                **fields,
            )
        )

    def read(self, step: int) -> dict[str, Any]:
        """This process's share of a step, on the host; it may run ahead of the training."""
        sampled = self.config.autoencoder.vocabulary_sample is not None
        batch, whole = self.data.loader.batch_and_whole(step, whole=sampled)
        return {
            "input_ids": torch.from_numpy(batch.tokens),
            "attention_mask": torch.from_numpy(batch.mask),
            "seeds": row_seeds(batch.rows, self.config.seed, 4),
            "candidates": self._candidates(step, whole.tokens),
        }

    def parts(self, share: dict[str, Any]) -> list[dict[str, Any]]:
        """What to give to the model's `forward`, part for part."""
        tokens, mask, device = share["input_ids"], share["attention_mask"], self.among.device
        counted = count_chunks(tokens, mask, self.config.data.chunk_size).sum().item()
        common = {"num_chunks": self.among.sum(counted)[0], "candidates": share["candidates"]}
        if common["candidates"] is not None:
            common["candidates"] = common["candidates"].to(device)
        parts = []
        for rows in torch.arange(len(tokens)).chunk(self.config.train.accumulation):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            noise = RowNoise(share["seeds"][here], device)
            rows_here = {"input_ids": tokens[here].to(device), "attention_mask": mask[here].to(device), "noise": noise}
            parts.append({**rows_here, **common})
        return parts

    def _candidates(self, step: int, tokens: np.ndarray) -> Tensor | None:
        """The words of the global batch and some random ones, the same in every process."""
        number = self.config.autoencoder.vocabulary_sample
        if number is None:
            return None
        size = self.model.config.vocab_size
        random = permute(np.arange(min(number, size)), size, self.config.seed, 5, step)
        return torch.from_numpy(np.union1d(tokens, random))

    def evaluate(self) -> dict[str, float]:
        """Measures on validation text; `score` decides which checkpoint is the best."""
        settings, batch_size = self.config.train, self.config.data.batch_size
        at_once = max(1, batch_size // self.among.size // settings.accumulation)
        batches = self.data.validation_batches(settings.evaluation_batches * batch_size, at_once, self.among)
        found = evaluate_reconstruction(self.model, batches, extra_noise=(), reduce=self.among.add_up)
        names = ("token_accuracy", "token_accuracy_from_mean", "chunk_accuracy", "mean_sigma", "collapsed_dimensions")
        return {"score": found["token_accuracy"], **{name: found[name] for name in names}}

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * (self.config.data.sequence_length + self.config.data.chunk_size)

    def estimated_memory(self) -> float:
        """Bytes on one process: parameters, gradients, two moments and the checkpoint's copy, and activations."""
        parameters = sum(p.numel() for p in self.model.parameters()) / self.among.size
        config = self.model.config
        tokens = self.tokens_per_step / self.among.size / self.config.train.accumulation
        width = 4 * config.hidden_size + 6 * config.intermediate_size
        layers = config.num_encoder_layers + config.num_decoder_layers
        return parameters * 4 * 7 + tokens * width * 4 * (1 + layers / 2)

    def save_extras(self, directory: Path) -> None:
        self.data.tokenizer.save(directory)


STAGES = {"autoencoder": AutoencoderStage}
