"""Training and validation data of a run."""

from collections.abc import Iterator

from calm.config import Data
from calm.data.chunks import ChunkedStream
from calm.data.loader import Batch, Loader, evaluation_batches
from calm.data.shards import PreparedData
from calm.distributed import World
from calm.errors import DataError


class TrainingData:
    """The prepared datasets of a recipe. All must have the same tokenizer."""

    def __init__(self, data: Data, seed: int, world: World):
        datasets = [PreparedData(s.path, verify=data.verify and world.is_main) for s in data.sets]
        self.tokenizer = datasets[0].tokenizer
        for other in datasets[1:]:
            if other.tokenizer.sha256 != self.tokenizer.sha256:
                raise DataError(
                    f"{other.directory} and {datasets[0].directory} were prepared with different tokenizers; "
                    "prepare them with the same one"
                )
        self.loader = Loader(
            [self._chunked(prepared, "train", data) for prepared in datasets],
            [s.weight for s in data.sets],
            data.batch_size,
            seed,
            data.front_padding,
            world.rank,
            world.size,
        )
        self.validation = [self._chunked(prepared, "validation", data) for prepared in datasets]
        if not any(len(stream) for stream in self.validation):
            raise DataError(
                f"{datasets[0].directory} has no validation documents; prepare it with a larger --validation-share"
            )

    def _chunked(self, prepared: PreparedData, split: str, data: Data) -> ChunkedStream:
        stream = prepared.split(split)
        return ChunkedStream(
            stream, data.chunk_size, data.sequence_length, self.tokenizer.pad_token_id, data.align_documents
        )

    def validation_batches(self, num_rows: int, batch_size: int, world: World) -> Iterator[Batch]:
        """Yield `num_rows` validation rows over all ranks, the same number from each dataset."""
        streams = [stream for stream in self.validation if len(stream)]
        for stream in streams:
            yield from evaluation_batches(stream, batch_size, world.rank, world.size, -(-num_rows // len(streams)))
