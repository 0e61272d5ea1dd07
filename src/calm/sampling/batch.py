"""Texts that grow together, a chunk a step; they join and leave between steps, and none notices the others (§3.1).

prompt of any length     fill ids at its front put its end on a chunk border, as in training
several texts            end together; shorter ones stand behind empty chunks that nobody attends to
noise                    belongs to a text, so whoever is beside it, it is the same text
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from calm.noise import RowNoise
from calm.sampling.cache import Cache
from calm.sampling.next_chunk import Chosen, Sampling
from calm.sampling.predictor import Predictor, check_room, readable


@dataclass(eq=False)
class Text:
    """One text of a batch: how it is continued, and what has come."""

    prompt: list[int]
    seed: int
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    new: list[int] = field(default_factory=list)
    met_end: bool = False  # the end id was drawn, which is no part of the text

    @property
    def ended(self) -> bool:
        return self.met_end or len(self.new) >= self.max_new_tokens


class Grown(NamedTuple):
    """What a step added to a text."""

    text: Text
    ids: list[int]
    agreement: float | None  # share of the candidates that were the chosen chunk, or its probability


@dataclass
class Spent:
    """What the chunks of some texts have cost so far."""

    chunks: int = 0
    draws: int = 0
    fallen_back: int = 0  # chunks for which n had to be lowered
    unsettled: int = 0

    def add(self, chosen: Chosen) -> None:
        self.chunks += len(chosen.chunks)
        self.draws += int(chosen.cost.draws.sum())
        self.fallen_back += int((chosen.cost.fallbacks > 0).sum())
        self.unsettled += int(chosen.cost.unsettled.sum())

    def warning(self, sampling: Sampling) -> str | None:
        """What a user should know about how a temperature was kept."""
        if sampling.method == "exact" and self.unsettled:
            return f"{self.unsettled} of {self.chunks} chunks hit the limit of draws and are approximate"
        if sampling.method == "batch" and 2 * self.fallen_back > self.chunks:
            remedy = "take more candidates or the method 'token'" if sampling.number > 1 else "take more"
            return (
                f"for {self.fallen_back} of {self.chunks} chunks no candidate came up often enough among "
                f"{sampling.number}, so the temperature acted less or not at all; {remedy}"
            )
        if sampling.method == "token" and sampling.number < 1 / sampling.temperature:
            return f"{sampling.number} candidates are too few for a temperature of {sampling.temperature}"
        return None


class Batch:
    """`texts` are those that grow; the rows of everything else stand in their order."""

    def __init__(self, predictor: Predictor, eos_token_id: int, pad_token_id: int):
        self.predictor, self.eos_token_id, self.pad_token_id = predictor, eos_token_id, pad_token_id
        self.texts: list[Text] = []
        self.spent = Spent()
        self.joining: list[Text] = []
        self._clear()

    def _clear(self) -> None:
        size, device = self.predictor.chunk_size, self.predictor.model.device
        self.noise = RowNoise([])
        self.cache = self.predictor.last_states.cache()
        self.there = torch.zeros(0, 0, dtype=torch.bool, device=device)  # (B, L): which places can be attended to
        self.unread = torch.zeros(0, size, dtype=torch.long, device=device)  # (B, K): what the last step chose

    def join(self, texts: Sequence[Text]) -> None:
        """Let texts grow from the next step on."""
        for text in texts:
            text.sampling = self.predictor.resolve(text.sampling)
            check_room(self.predictor, text.prompt, text.max_new_tokens)
        self.joining += texts

    def leave(self, texts: Iterable[Text]) -> None:
        """Let some texts end here."""
        gone = {id(text) for text in texts}
        self.joining = [text for text in self.joining if id(text) not in gone]
        keep = [row for row, text in enumerate(self.texts) if id(text) not in gone]
        if len(keep) == len(self.texts):
            return
        self.texts = [self.texts[row] for row in keep]
        if not keep:
            self._clear()
            return
        index = torch.tensor(keep, device=self.unread.device)
        self.noise, self.unread, self.there = self.noise.rows(keep), self.unread[index], self.there[index]
        self.cache.batch_select_indices(index)
        if empty := int(self.there.any(0).int().argmax()):  # places of the longest texts, which left
            self.there = self.there[:, empty:]
            _each(self.cache, lambda states: states[:, :, empty:])

    @torch.no_grad()
    def step(self) -> list[Grown]:
        """One more chunk for every text, cut at its end; texts that ended leave."""
        hidden = [self._read()] if self.texts else []
        if self.joining:
            hidden.append(self._read_prompts())
        chosen = self._choose(torch.cat(hidden))
        grown, rows = [], self.unread.tolist()
        for text, chunk, share in zip(self.texts, rows, chosen, strict=True):
            ids = chunk[: text.max_new_tokens - len(text.new)]
            if self.eos_token_id in ids:
                ids, text.met_end = ids[: ids.index(self.eos_token_id)], True
            text.new += ids
            grown.append(Grown(text, ids, share))
        self.leave([text for text in self.texts if text.ended])
        return grown

    def _read(self) -> Tensor:
        """Read what the last step chose: (B, H)."""
        self.there = F.pad(self.there, (0, 1), value=True)
        positions = self.there.sum(1, keepdim=True) - 1
        return self.predictor.read(self.unread[:, None], self.there, positions, self.cache)

    def _read_prompts(self) -> Tensor:
        """Read the prompts of texts that join, on their own, and put them beside the others: (new ones, H)."""
        texts, self.joining = self.joining, []
        chunks, there = laid_out(self.predictor, [text.prompt for text in texts], self.eos_token_id, self.pad_token_id)
        chunks, there = chunks.to(self.unread.device), there.to(self.unread.device)
        cache = self.predictor.last_states.cache()
        hidden = self.predictor.read(chunks, there, (there.long().cumsum(1) - 1).clamp(min=0), cache)
        if self.texts:
            length = max(there.shape[1], self.there.shape[1])
            for part, own in ((self.cache, self.there), (cache, there)):
                _each(part, partial(F.pad, pad=(0, 0, length - own.shape[1], 0)))
            rows = iter([states for layer in cache.layers for states in (layer.keys, layer.values)])
            _each(self.cache, lambda states: torch.cat([states, next(rows)]))
            self.there = torch.cat([F.pad(own, (length - own.shape[1], 0)) for own in (self.there, there)])
        else:
            self.cache, self.there = cache, there
        self.noise = RowNoise.together([self.noise, RowNoise([text.seed for text in texts], hidden.device)])
        self.texts = self.texts + texts
        return hidden

    def _choose(self, hidden: Tensor) -> list[float | None]:
        """Chunks behind all texts, those of one way of sampling at once; how much the candidates agreed."""
        groups: dict[Sampling, list[int]] = {}
        for row, text in enumerate(self.texts):
            groups.setdefault(text.sampling, []).append(row)
        self.unread = torch.empty(len(self.texts), self.predictor.chunk_size, dtype=torch.long, device=hidden.device)
        shares: list[float | None] = [None] * len(self.texts)
        for sampling, rows in groups.items():
            chosen = self.predictor.choose(hidden[rows], sampling, self.noise.rows(rows))
            self.spent.add(chosen)
            self.unread[rows] = chosen.chunks
            if chosen.agreement is not None:
                for row, share in zip(rows, chosen.agreement.tolist(), strict=True):
                    shares[row] = share
        return shares


def _each(cache: Cache, change: Callable[[Tensor], Tensor]) -> None:
    """Change all keys and values (B, heads, L, d), layer by layer."""
    for layer in cache.layers:
        layer.keys, layer.values = change(layer.keys), change(layer.values)


def laid_out(
    predictor: Predictor, prompts: list[list[int]], eos_token_id: int, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Prompts as chunks (B, L, K), all ending together, and which of them are there (B, L)."""
    size = predictor.chunk_size
    pad_token_id = pad_token_id if predictor.knows_fill else eos_token_id
    texts = [
        readable(predictor, prompt) or [eos_token_id] for prompt in prompts
    ]  # a document begins behind another's end
    counts = [-(-len(text) // size) for text in texts]
    longest = max(counts)
    rows = [[pad_token_id] * (longest * size - len(text)) + text for text in texts]
    chunks = torch.tensor(rows).unflatten(1, (longest, size))
    places = torch.arange(longest)
    return chunks, places >= longest - torch.tensor(counts)[:, None]
