"""The data of a run: training rows and validation rows of all its sets."""

from collections.abc import Iterator

from calm.config import Data
from calm.data.chunks import ChunkedStream
from calm.data.loader import Batch, Loader, evaluation_batches
from calm.data.shards import PreparedData
from calm.distributed import World
from calm.errors import DataError


class TrainingData:
    """The prepared sets of a recipe, which must share one tokenizer."""

    def __init__(self, data: Data, seed: int, world: World):
        sets = [PreparedData(s.path, verify=data.verify and world.is_main) for s in data.sets]
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
            world.rank,
            world.size,
        )
        self.validation = [self._chunked(prepared, "validation", data) for prepared in sets]
        if not any(len(stream) for stream in self.validation):
            raise DataError(
                f"{sets[0].directory} has no validation documents; prepare it with a larger --validation-share"
            )

    def _chunked(self, prepared: PreparedData, split: str, data: Data) -> ChunkedStream:
        stream = prepared.split(split)
        return ChunkedStream(
            stream, data.chunk_size, data.sequence_length, self.tokenizer.pad_token_id, data.align_documents
        )

    def validation_batches(self, rows: int, at_once: int, world: World) -> Iterator[Batch]:
        """So many rows of validation text, an equal part of each set, whatever the number of processes."""
        streams = [stream for stream in self.validation if len(stream)]
        for stream in streams:
            yield from evaluation_batches(stream, at_once, world.rank, world.size, -(-rows // len(streams)))
