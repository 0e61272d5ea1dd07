"""From tokens to text that can be shown at once, and from a model directory to texts.

Text grows by whole characters only (a character may have its bytes in several tokens), and nothing is shown that might
turn out to be the beginning of a stop string.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calm.data.tokenizer import Tokenizer, load_tokenizer
from calm.errors import ConfigError, UserError
from calm.models.int8 import to_int8
from calm.models.network import CalmNetwork
from calm.models.plain import read_plain
from calm.sampling.batch import Batch, Spent, Text
from calm.sampling.next_chunk import Sampling
from calm.sampling.predictor import CalmPredictor, Predictor, SoftmaxPredictor
from calm.seeds import SeedStream, torch_seed

UNFINISHED = "\ufffd"  # what a character's first bytes look like
LONGEST_CHARACTER = 4  # bytes, so tokens at most


class GrowingText:
    """Tokens go in, text comes out as soon as it is sure; `stopped` once a stop string was met."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        if any(not stop for stop in stops):
            raise ConfigError("a stop string must have a character")
        self.tokenizer, self.stops = tokenizer, list(stops)
        self.ids: list[int] = []
        self.text = ""  # of the tokens before `sure`: whole characters
        self.window, self.sure = (
            0,
            0,
        )  # the last of them are decoded again with new ones, which may need to stand behind
        self.shown = 0  # characters that were given out
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """What can be shown now that these tokens have come."""
        if self.stopped:
            return ""
        self.ids += ids
        text = self._text()
        if (cut := self._stop(text)) is not None:
            self.stopped = True
            return self._show(text, cut)
        for _ in range(LONGEST_CHARACTER):
            text = text.removesuffix(UNFINISHED)
        return self._show(text, self._beginning_of_a_stop(text))

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        text = self._text()
        return "" if self.stopped else self._show(text, len(text))

    def _text(self) -> str:
        """All that the tokens say so far, at the cost of the last ones."""
        before = self.tokenizer.decode(self.ids[self.window : self.sure])
        text = self.text + self.tokenizer.decode(self.ids[self.window :])[len(before) :]
        if not text.endswith(UNFINISHED):
            self.text, self.window, self.sure = text, self.sure, len(self.ids)
        return text

    def _show(self, text: str, end: int) -> str:
        new = text[self.shown : end]
        self.shown = max(self.shown, end)
        return new

    def _stop(self, text: str) -> int | None:
        return min((text.index(stop) for stop in self.stops if stop in text), default=None)

    def _beginning_of_a_stop(self, text: str) -> int:
        """Where a stop string may have begun at the end of the text."""
        return min(
            (len(text) - n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=len(text),
        )


@dataclass
class Piece:
    """What one step added to one text."""

    number: int
    text: str
    ids: list[int]
    agreement: float | None = None  # share of the candidates that were the chosen chunk


class Writer:
    """A model and its tokenizer, which continue texts; `int8` reads its matrices in eight bits.

    It is a plain model where that suffices. Who wants more of it than texts says `plain=False`.
    """

    def __init__(self, directory: Path, device: torch.device | str = "cpu", *, int8: bool = False, plain: bool = True):
        loaded: Any = read_plain(directory) if plain else None
        if loaded is None:
            from calm.models.loading import load_writing  # transformers takes seconds to import

            loaded = load_writing(directory)
        self.model = loaded.to(torch.device(device)).eval()
        if int8:
            to_int8(self.model)
        calm = isinstance(self.model, CalmNetwork)
        # after weights have come where they stay: a predictor lays them out
        self.predictor: Predictor = CalmPredictor(self.model) if calm else SoftmaxPredictor(self.model)
        if not (directory / "tokenizer.json").exists():
            raise UserError(f"{directory} holds no tokenizer.json, so it cannot read or write text; put its own there")
        self.tokenizer = load_tokenizer(str(directory))
        self.spent = Spent()
        if self.tokenizer.vocab_size > self.model.config.vocab_size:
            raise UserError(
                f"the tokenizer in {directory} has {self.tokenizer.vocab_size} ids and the model only "
                f"{self.model.config.vocab_size}: it is not its own"
            )

    def batch(self) -> Batch:
        """An empty batch for texts of this model."""
        return Batch(self.predictor, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)

    def write(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stops: Sequence[Sequence[str]] = (),
        numbers: Sequence[int] | None = None,
        seed: int = 0,
    ) -> Iterator[Piece]:
        """Continue texts (ids), piece by piece. Each has its own `stops`; `seed` and its number make its noise.

        A last piece without tokens holds what had been kept back. `spent` says what it costs.
        """
        numbers = range(len(prompts)) if numbers is None else numbers
        shown = [GrowingText(self.tokenizer, stops[place] if stops else ()) for place in range(len(prompts))]
        texts = [
            Text(prompt, noise_seed(seed, number), max_new_tokens, sampling)
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        places = {id(text): place for place, text in enumerate(texts)}
        batch = self.batch()
        batch.join(texts)
        self.spent = batch.spent
        while batch.joining or batch.texts:
            for text, ids, share in batch.step():
                place = places[id(text)]
                yield Piece(place, shown[place].push(ids), ids, share)
                if shown[place].stopped:
                    batch.leave([text])
        for place, growing in enumerate(shown):
            if rest := growing.finish():
                yield Piece(place, rest, [])


def noise_seed(seed: int, number: int) -> int:
    """What seeds the noise of the text with this number."""
    return torch_seed(seed, SeedStream.GENERATION, number)
