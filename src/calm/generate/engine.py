"""The generation engine: continuous batching of sequences of token ids.

    add → waiting → a step: prefill new sequences, sample a chunk for every sequence → StepOutput → remove

Sequences are added and removed between steps. Each has its own noise, so its tokens do not depend on its neighbors. A
prompt is padded at its front to whole chunks, as in training. The backbone's batch holds keys and values; rows are its
slots, some of which may be free.

A step waits for the device once, for `_collect`, unless the sampling method itself has to (see `sampler.py`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calm.errors import ConfigError, UserError
from calm.generate.sampler import SampleOutput, SamplingParams, sample_chunks
from calm.llama import check_positions
from calm.model import Batch, LanguageModel
from calm.noise import RowNoise
from calm.scores.vocabulary import rows_at_once


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


class TokenLogProb(NamedTuple):
    """Log-probability of a token, and the most probable tokens in its place, in descending order."""

    log_prob: float
    top: list[tuple[int, float]]


@dataclass
class GenerationStats:
    """What the chunks of an engine have cost so far."""

    chunks: int = 0
    draws: int = 0
    fallen_back: int = 0  # chunks for which the exponent 1/T was lowered
    unsettled: int = 0  # chunks that reached a limit of draws first

    def add(self, draws: int, fallbacks: int, unsettled: bool) -> None:
        """Count one chunk."""
        self.chunks += 1
        self.draws += draws
        self.fallen_back += fallbacks > 0
        self.unsettled += unsettled

    def warning(self, params: SamplingParams) -> str | None:
        """How the output deviates from the requested temperature, if it does."""
        if params.method == "exact" and self.unsettled:
            return (
                f"{self.unsettled} of {self.chunks} chunks hit the limit of draws and are approximate; allow more with "
                "num_candidates, or use the method 'token'"
            )
        if params.method == "batch" and 2 * self.fallen_back > self.chunks:
            remedy = "use more candidates or the method 'token'" if params.number > 1 else "use more"
            return (
                f"for {self.fallen_back} of {self.chunks} chunks no candidate occurred often enough among "
                f"{params.number}, so the temperature had little or no effect; {remedy}"
            )
        if params.method == "token" and 0 < params.number * params.temperature < 1:
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
        self.batch: Batch = model.backbone.new_batch()
        self.slots: list[Sequence | None] = []  # the sequence of each row of the batch; None: a free slot
        self.waiting: list[Sequence] = []
        self.index = ([], torch.zeros(0, dtype=torch.long))  # slots, and the same on the device
        self.noise = RowNoise([])  # of each slot
        self.next_chunks = torch.zeros(0, model.chunk_size, dtype=torch.long, device=model.device)  # (slots, K)

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.slots if sequence is not None]

    def validate(self, sequence: Sequence) -> None:
        """Raise ConfigError for what the model does not support; sets the sampling method if none was named."""
        model, size = self.model, self.model.chunk_size
        sequence.params = sequence.params.resolve(model.head)
        if not isinstance(sequence.max_new_tokens, int) or sequence.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be an integer of at least 1, not {sequence.max_new_tokens}")
        for token in set(sequence.prompt):
            if not 0 <= token < model.vocab_size:
                raise ConfigError(f"token id {token} is out of range: the vocabulary has {model.vocab_size:,} entries")
        config = getattr(model.config, "backbone_config", model.config)
        check_positions(config, self._longest(sequence), "chunks" if size > 1 else "tokens")

    def max_new_tokens(self, prompt: list[int]) -> float:
        """New tokens that fit the backbone's positions after a prompt; at most 0 if none do, inf without a limit."""
        config = getattr(self.model.config, "backbone_config", self.model.config)
        positions = getattr(config, "max_position_embeddings", None) or math.inf
        return (positions + 1 - self._prompt_chunks(prompt)) * self.model.chunk_size

    def _prompt_chunks(self, prompt: list[int]) -> int:
        return max(1, -(-len(whole_chunks(self.model, prompt)) // self.model.chunk_size))

    def _longest(self, sequence: Sequence) -> int:
        """Positions that the backbone reads of a sequence, at most; the last chunk is sampled, but never read."""
        return self._prompt_chunks(sequence.prompt) + -(-sequence.max_new_tokens // self.model.chunk_size) - 1

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences to the waiting queue."""
        sequences = list(sequences)
        for sequence in sequences:
            self.validate(sequence)
        self.waiting += sequences

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Abort sequences; they keep their output so far."""
        gone = {id(sequence) for sequence in sequences}
        self.waiting = [sequence for sequence in self.waiting if id(sequence) not in gone]
        free = [slot for slot, sequence in enumerate(self.slots) if sequence is not None and id(sequence) in gone]
        if not free:
            return
        for slot in free:
            self.slots[slot] = None
        kept = self.batch.remove(free)
        if kept != list(range(len(self.slots))):
            self.slots = [self.slots[slot] for slot in kept]
            self.noise, self.next_chunks = self.noise.rows(kept), self.next_chunks[kept]

    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """Decode one chunk for every sequence, truncated at its end; finished sequences are removed."""
        slots = [slot for slot, sequence in enumerate(self.slots) if sequence is not None]
        hidden = []
        if slots:
            states = self.batch.step(self.model.embed(self.next_chunks))
            hidden.append(states if len(slots) == len(self.slots) else states[self._index(slots)])
        if self.waiting:
            added, states = self._prefill()
            slots, hidden = slots + added, [*hidden, states]
        running = [sequence for slot in slots if (sequence := self.slots[slot]) is not None]
        noise = self.noise.rows(slots)
        output = sample_chunks(self.model.head, torch.cat(hidden), [s.params for s in running], noise)
        if slots == list(range(len(self.slots))):
            self.next_chunks = output.chunks
        else:
            self.next_chunks[self._index(slots)] = output.chunks
        outputs = []
        for sequence, chunk, share in zip(running, *self._collect(output), strict=True):
            ids = chunk[: sequence.max_new_tokens - len(sequence.output_ids)]
            if self.eos_token_id in ids:
                ids, sequence.hit_eos = ids[: ids.index(self.eos_token_id)], True
            sequence.output_ids += ids
            outputs.append(StepOutput(sequence, ids, share))
        self.remove([sequence for sequence in running if sequence.finished])
        return outputs

    def _index(self, slots: list[int]) -> Tensor:
        """Slots as an index, which is copied to the device only when they have changed."""
        if self.index[0] != slots:
            self.index = slots, torch.tensor(slots, device=self.model.device)
        return self.index[1]

    @torch.no_grad()
    def log_probs(self, sequence: Sequence, num_top: int) -> list[TokenLogProb | None]:
        """Log-probabilities of a sequence's prompt and output, for heads with token probabilities.

        The sequence is read as in generation. None for tokens that nothing predicts: those of the first chunk, and
        those that `whole_chunks` drops.
        """
        assert self.model.head.exact_likelihood
        size, read = self.model.chunk_size, whole_chunks(self.model, sequence.prompt)
        (prompt,), _ = self._pad([sequence.prompt])
        output = sequence.output_ids + [self.pad_token_id] * (-len(sequence.output_ids) % size)
        chunks = torch.cat([prompt, torch.tensor(output, dtype=torch.long).view(-1, size)]).to(self.model.device)
        result: list[TokenLogProb | None] = [None] * size
        if len(chunks) > 1:
            hidden = self.model.backbone(self.model.embed(chunks[None, :-1]))[0]  # (L - 1, H)
            rows = rows_at_once(self.model.vocab_size, hidden.device)
            for states, targets in zip(hidden.split(rows), chunks[1:].split(rows), strict=True):
                result += self._token_log_probs(states, targets, num_top)
        front, dropped = prompt.numel() - len(read), len(sequence.prompt) - len(read)
        return [None] * dropped + result[front : prompt.numel() + len(sequence.output_ids)]

    def _token_log_probs(self, hidden: Tensor, chunks: Tensor, num_top: int) -> list[TokenLogProb]:
        """Of all tokens of chunks (B, K), given hidden states (B, H)."""
        proposals, each = self.model.head.propose(hidden, 1), []
        for k in range(chunks.shape[1]):
            log_probs = proposals.log_probs(chunks[:, :k])[0]  # (B, V)
            each.append((log_probs.gather(1, chunks[:, k : k + 1]), *log_probs.topk(min(num_top, log_probs.shape[1]))))
        own, top, ids = (torch.stack(part, dim=1).flatten(0, 1).tolist() for part in zip(*each, strict=True))
        return [
            TokenLogProb(log_prob, list(zip(tokens, values, strict=True)))
            for (log_prob,), values, tokens in zip(own, top, ids, strict=True)
        ]

    def _prefill(self) -> tuple[list[int], Tensor]:
        """Prefill waiting sequences: their slots in the batch, and the hidden states of their last chunks (n, H)."""
        new, self.waiting = self.waiting, []
        chunks, lengths = self._pad([sequence.prompt for sequence in new])
        embeddings = self.model.embed(chunks.to(self.model.device))
        slots, hidden = self.batch.add(embeddings, lengths, max(map(self._longest, new)))
        free = 1 + max(slots) - len(self.slots)
        if free > 0:
            self.slots += [None] * free
            self.noise = RowNoise.concat([self.noise, RowNoise([0] * free, hidden.device)])
            self.next_chunks = F.pad(self.next_chunks, (0, 0, 0, free))
        for slot, sequence in zip(slots, new, strict=True):
            self.slots[slot] = sequence
            self.noise.generators[slot] = RowNoise([sequence.seed], hidden.device).generators[0]
        return slots, hidden

    def _pad(self, prompts: list[list[int]]) -> tuple[Tensor, list[int]]:
        """Prompts as chunks (B, L, K), and the number of chunks of each; shorter ones end with padding."""
        size = self.model.chunk_size
        pad = self.pad_token_id if self.model.front_padding else self.eos_token_id
        texts = [whole_chunks(self.model, prompt) or [self.eos_token_id] for prompt in prompts]
        texts = [[pad] * (-len(text) % size) + text for text in texts]
        longest = max(map(len, texts))
        rows = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
        return rows.unflatten(1, (-1, size)), [len(text) // size for text in texts]

    def _collect(self, output: SampleOutput) -> tuple[list[list[int]], list[float | None]]:
        """Chunks and their agreement, in one transfer from the device, which this waits for; counts what they cost."""
        columns = [*output.chunks.unbind(1), *output.stats, output.finite, output.agreement]
        rows = torch.stack([column.double() for column in columns], dim=1).tolist()
        chunks, agreement = [], []
        for *ids, draws, fallbacks, unsettled, finite, share in rows:
            if not finite:
                raise UserError("the model's output is not finite (NaN or inf): check its weights, or try --dtype fp32")
            self.stats.add(int(draws), int(fallbacks), bool(unsettled))
            chunks.append([int(token) for token in ids])
            agreement.append(None if math.isnan(share) else share)
        return chunks, agreement


def whole_chunks(model: LanguageModel, prompt: list[int]) -> list[int]:
    """The part of a prompt that a model reads: one trained without front padding drops up to K-1 leading tokens."""
    size = model.chunk_size
    return prompt if model.front_padding or len(prompt) < size else prompt[len(prompt) % size :]
