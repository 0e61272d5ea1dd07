"""The generation engine: continuous batching of sequences of token ids.

    add → waiting → a step: read what is new, sample a chunk for every sequence → StepOutput → remove

Sequences are added and removed between steps. Each has its own noise, so its tokens do not depend on its neighbours. A
prompt is padded at its front to whole chunks, as in training. Rows are right-aligned; shorter ones are masked.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calm.errors import ConfigError, UserError
from calm.generate.sampler import SampleOutput, SamplingParams, sample_chunks
from calm.llama import check_positions
from calm.model import LanguageModel
from calm.noise import RowNoise


def prepare_inference(model: nn.Module, int8: bool = False) -> None:
    """Let the CPU backend replace modules by faster ones, if it is installed and the model is on a CPU.

    `int8` quantizes the linear layers, which only that backend does.
    """
    try:
        from calm import cpu
    except ImportError as error:
        if int8:
            raise UserError("int8 needs the CPU backend, calm.cpu, which is not installed") from error
        return
    cpu.optimize(model, int8=int8)


def backend_description() -> dict[str, str]:
    """What the CPU backend uses on this machine."""
    try:
        from calm import cpu
    except ImportError:
        return {}
    return cpu.description()


@dataclass(eq=False)
class Sequence:
    """One sequence of a batch: how it is continued, and its output so far."""

    prompt: list[int]
    seed: int
    max_new_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    output_ids: list[int] = field(default_factory=list)
    hit_eos: bool = False  # the end-of-text token was sampled; it is not part of the output

    @property
    def finished(self) -> bool:
        return self.hit_eos or len(self.output_ids) >= self.max_new_tokens


class StepOutput(NamedTuple):
    """What a step added to a sequence."""

    sequence: Sequence
    token_ids: list[int]
    agreement: float | None  # share of the candidates that equal the chunk, or its probability


@dataclass
class GenerationStats:
    """What the chunks of an engine have cost so far."""

    chunks: int = 0
    draws: int = 0
    fallen_back: int = 0  # chunks for which n had to be lowered
    unsettled: int = 0  # chunks for which a limit came before the goal

    def add(self, output: SampleOutput) -> None:
        self.chunks += len(output.chunks)
        self.draws += int(output.stats.draws.sum())
        self.fallen_back += int((output.stats.fallbacks > 0).sum())
        self.unsettled += int(output.stats.unsettled.sum())

    def warning(self, params: SamplingParams) -> str | None:
        """How the output deviates from the requested temperature, if it does."""
        if params.method == "exact" and self.unsettled:
            return f"{self.unsettled} of {self.chunks} chunks hit the limit of draws and are approximate"
        if params.method == "batch" and 2 * self.fallen_back > self.chunks:
            remedy = "use more candidates or the method 'token'" if params.number > 1 else "use more"
            return (
                f"for {self.fallen_back} of {self.chunks} chunks no candidate occurred often enough among "
                f"{params.number}, so the temperature had little or no effect; {remedy}"
            )
        if params.method == "token" and params.number < 1 / params.temperature:
            return f"{params.number} candidates are too few for a temperature of {params.temperature}"
        return None


class Engine:
    """Continuous batching for a CALM model or a Transformer.

    Args:
        model: see `calm.model.LanguageModel`.
        eos_token_id: ends a sequence.
        pad_token_id: fills the front of a first chunk.

    Example:
        >>> engine = Engine(model, eos_token_id=1, pad_token_id=2)
        >>> engine.add([Sequence([5, 6, 7], seed=0, max_new_tokens=16)])
        >>> while engine.running or engine.waiting:
        ...     outputs = engine.step()
    """

    def __init__(self, model: LanguageModel, eos_token_id: int, pad_token_id: int):
        self.model, self.eos_token_id, self.pad_token_id = model, eos_token_id, pad_token_id
        prepare_inference(model)  # pyright: ignore[reportArgumentType]
        self.stats = GenerationStats()
        self.running: list[Sequence] = []  # rows of all tensors below are in their order
        self.waiting: list[Sequence] = []
        self._clear()

    def _clear(self) -> None:
        self.noise = RowNoise([])
        self.cache = self.model.backbone.new_cache()
        self.mask = torch.zeros(0, 0, dtype=torch.bool, device=self.model.device)  # (B, L): false for padding
        self.next_chunks = torch.zeros(0, self.model.chunk_size, dtype=torch.long, device=self.model.device)  # (B, K)

    def validate(self, sequence: Sequence) -> None:
        """Refuse what the model cannot do; resolves the sampling method."""
        model, size = self.model, self.model.chunk_size
        sequence.params = sequence.params.resolve(model.head)
        if not isinstance(sequence.max_new_tokens, int) or sequence.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be an integer of at least 1, not {sequence.max_new_tokens}")
        for token in set(sequence.prompt):
            if not 0 <= token < model.vocab_size:
                raise ConfigError(f"token id {token} is out of range: the vocabulary has {model.vocab_size:,} entries")
        length = max(1, -(-len(whole_chunks(model, sequence.prompt)) // size))
        length += -(-sequence.max_new_tokens // size) - 1
        config = getattr(model.config, "backbone_config", model.config)
        check_positions(config, length, "chunks" if size > 1 else "tokens")

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Continue sequences from the next step on."""
        sequences = list(sequences)
        for sequence in sequences:
            self.validate(sequence)
        self.waiting += sequences

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Stop sequences where they are."""
        gone = {id(sequence) for sequence in sequences}
        self.waiting = [sequence for sequence in self.waiting if id(sequence) not in gone]
        keep = [row for row, sequence in enumerate(self.running) if id(sequence) not in gone]
        if len(keep) == len(self.running):
            return
        self.running = [self.running[row] for row in keep]
        if not keep:
            self._clear()
            return
        rows = torch.tensor(keep, device=self.next_chunks.device)
        self.noise, self.next_chunks, self.mask = self.noise.rows(keep), self.next_chunks[rows], self.mask[rows]
        first = int(self.mask.any(0).int().argmax())  # positions of longer sequences that are gone
        self.mask = self.mask[:, first:]
        self.cache.select(rows, first)

    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """One more chunk for every sequence, cut at its end; finished sequences are removed."""
        hidden = [self._decode()] if self.running else []
        if self.waiting:
            hidden.append(self._prefill())
        agreement = self._sample(torch.cat(hidden))
        outputs, rows = [], self.next_chunks.tolist()
        for sequence, chunk, share in zip(self.running, rows, agreement, strict=True):
            ids = chunk[: sequence.max_new_tokens - len(sequence.output_ids)]
            if self.eos_token_id in ids:
                ids, sequence.hit_eos = ids[: ids.index(self.eos_token_id)], True
            sequence.output_ids += ids
            outputs.append(StepOutput(sequence, ids, share))
        self.remove([sequence for sequence in self.running if sequence.finished])
        return outputs

    def _decode(self) -> Tensor:
        """Read the chunks of the last step: (B, H)."""
        self.mask = F.pad(self.mask, (0, 1), value=True)
        return self._forward(self.next_chunks[:, None], self.mask, self.mask.sum(1, keepdim=True) - 1, self.cache)

    def _prefill(self) -> Tensor:
        """Read the prompts of waiting sequences and add them to the batch: (new sequences, H)."""
        new, self.waiting = self.waiting, []
        chunks, mask = self._pad([sequence.prompt for sequence in new])
        cache = self.model.backbone.new_cache()
        hidden = self._forward(chunks, mask, (mask.long().cumsum(1) - 1).clamp(min=0), cache)
        if self.running:
            length = max(mask.shape[1], self.mask.shape[1])
            self.cache.merge(cache)
            self.mask = torch.cat([F.pad(own, (length - own.shape[1], 0)) for own in (self.mask, mask)])
        else:
            self.cache, self.mask = cache, mask
        seeds = [sequence.seed for sequence in new]
        self.noise = RowNoise.concat([self.noise, RowNoise(seeds, hidden.device)])
        self.running = self.running + new
        return hidden

    def _forward(self, chunks: Tensor, mask: Tensor, positions: Tensor, cache) -> Tensor:
        """Hidden state of the last chunk: (B, L, K) → (B, H)."""
        padded = not bool(mask.all())
        return self.model.backbone(self.model.embed(chunks), positions, mask if padded else None, cache)[:, -1]

    def _pad(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Prompts as right-aligned chunks (B, L, K), and their mask (B, L)."""
        size, device = self.model.chunk_size, self.model.device
        pad = self.pad_token_id if self.model.front_padding else self.eos_token_id
        texts = [whole_chunks(self.model, prompt) or [self.eos_token_id] for prompt in prompts]
        counts = [-(-len(text) // size) for text in texts]
        length = max(counts)
        rows = [[pad] * (length * size - len(text)) + text for text in texts]
        mask = torch.arange(length) >= length - torch.tensor(counts)[:, None]
        return torch.tensor(rows).unflatten(1, (length, size)).to(device), mask.to(device)

    def _sample(self, hidden: Tensor) -> list[float | None]:
        """Sample chunks for hidden states (B, H), rows with the same parameters at once; returns their agreement."""
        groups: dict[SamplingParams, list[int]] = {}
        for row, sequence in enumerate(self.running):
            groups.setdefault(sequence.params, []).append(row)
        size = (len(self.running), self.model.chunk_size)
        self.next_chunks = torch.empty(size, dtype=torch.long, device=hidden.device)
        agreement: list[float | None] = [None] * len(self.running)
        for params, rows in groups.items():
            output = sample_chunks(self.model.head, hidden[rows], params, self.noise.rows(rows))
            self.stats.add(output)
            self.next_chunks[rows] = output.chunks
            if output.agreement is not None:
                for row, share in zip(rows, output.agreement.tolist(), strict=True):
                    agreement[row] = share
        return agreement


def whole_chunks(model: LanguageModel, prompt: list[int]) -> list[int]:
    """The part of a prompt that a model reads: one trained without front padding drops up to K-1 leading tokens."""
    size = model.chunk_size
    return prompt if model.front_padding or len(prompt) < size else prompt[len(prompt) % size :]
