"""Accuracy P(y) and collision Σ P(x)² of the four tokens behind each chunk border of a text, for every kind of model.

An estimator has `chunk_size`, `length` (tokens that it reads at once) and `estimate(tokens, noise)`: ids
(B, length + 4) → two tensors (B, length / K, 4) for the starts K, 2K, …, length. Both are unbiased:

    K ≥ 4     samples of one chunk: accuracy over all, collision over all pairs
    K < 4     accuracy: the product of hits of independent samples at each step, on the true text;
              collision: pairs of whole continuations, each on its own samples
    softmax   accuracy exactly; collision: prefixes are sampled, weighted by their own probability, and the last token
              is exact; all of it exactly where prefixes can be enumerated
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calm.evaluate.branches import Branches
from calm.models.calm import CalmForCausalLM
from calm.noise import RowNoise
from calm.scores.brier import LONGEST, accuracy_and_collision

ENUMERABLE = 512  # prefixes of three tokens that are enumerated rather than sampled


def next_tokens(tokens: Tensor, starts: Tensor) -> Tensor:
    """The LONGEST tokens from each start: (B, T), (P,) → (B, P, LONGEST)."""
    return tokens[:, starts[:, None] + torch.arange(LONGEST, device=tokens.device)]


class CalmEstimator:
    def __init__(self, model: CalmForCausalLM, length: int, num_samples: int):
        self.model, self.length, self.num_samples = model, length, num_samples
        self.chunk_size = model.config.chunk_size

    def estimate(self, tokens: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
        starts = torch.arange(self.chunk_size, self.length + 1, self.chunk_size, device=tokens.device)
        target = next_tokens(tokens, starts)  # (B, P, 4)
        if self.chunk_size >= LONGEST:
            _, chunks = self.model.predict(tokens[:, : self.length], self.num_samples, noise)
            return accuracy_and_collision(chunks[..., :LONGEST], target)
        return self._accuracy(tokens, noise)[:, : len(starts)], self._collision(tokens, target, noise)

    def _accuracy(self, tokens: Tensor, noise: RowNoise) -> Tensor:
        size = self.chunk_size
        steps = -(-LONGEST // size)
        read = (self.length + LONGEST - 1) // size * size
        _, chunks = self.model.predict(tokens[:, :read], self.num_samples, noise)  # (N, B, P', K)
        behind = tokens[:, size:]
        places = chunks.shape[2] * size
        if behind.shape[1] < places:  # the last chunk may end behind the window: it is never wanted whole
            behind = torch.nn.functional.pad(behind, (0, places - behind.shape[1]), value=-1)
        true = behind[:, :places].unflatten(1, (-1, size))
        hits = (chunks == true).cumprod(-1).float().mean(0)  # (B, P', K): of the first 1 … K tokens of a chunk
        hits = torch.cat([hits, hits.new_zeros(len(hits), steps, size)], dim=1)  # beyond the text
        grams, before = [], torch.ones_like(hits[:, : chunks.shape[2], 0])
        for step in range(steps):
            here = hits[:, step : step + chunks.shape[2]]
            grams += [before * here[..., k] for k in range(size)]
            before = before * here[..., -1]
        return torch.stack(grams[:LONGEST], dim=-1)

    def _collision(self, tokens: Tensor, target: Tensor, noise: RowNoise) -> Tensor:
        """All pairs of continuations that are drawn independently of each other."""
        model, copies = self.model, self.num_samples
        length = self.length // self.chunk_size
        branches = Branches(self._forward, model.config.backbone_config, length, copies)
        chunks = model.chunks(tokens[:, : self.length])
        hidden = branches.read(model.embed(chunks)).repeat(1, copies, 1)  # (B, copies·L, H)
        drawn: list[Tensor] = []
        while sum(chunk.shape[-1] for chunk in drawn) < LONGEST:
            if drawn:
                hidden = branches.advance(model.embed(drawn[-1]))
            latents = model.head.sample(hidden, 1, noise)[0]
            drawn.append(model.autoencoder.tokens(latents))  # (B, copies·L, K)
        samples = torch.cat(drawn, dim=-1)[..., :LONGEST].unflatten(1, (copies, length)).movedim(1, 0)
        return accuracy_and_collision(samples, target)[1]

    def _forward(self, inputs: Tensor, **kwargs) -> Tensor:
        return self.model.backbone(inputs_embeds=inputs, use_cache=True, **kwargs).last_hidden_state


class SoftmaxEstimator:
    chunk_size = 1

    def __init__(self, model: PreTrainedModel, length: int, num_samples: int):
        self.model, self.length, self.num_samples = model, length, num_samples
        self.nats: Tensor | None = None  # of each next token of the last texts

    def estimate(self, tokens: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
        vocabulary = self.model.config.vocab_size
        exact = vocabulary ** (LONGEST - 1) <= ENUMERABLE
        copies = vocabulary ** (LONGEST - 1) if exact else self.num_samples
        branches = Branches(self._forward, self.model.config, self.length, copies)
        logits = branches.read(tokens[:, : self.length])
        ahead = self._forward(
            tokens[:, self.length : self.length + LONGEST - 1], past_key_values=branches.cache
        )  # the tokens behind the window, for the accuracy of its last starts
        branches.cache.crop(-(LONGEST - 1))
        chosen = torch.cat([logits, ahead], dim=1).log_softmax(-1)
        chosen = chosen.gather(-1, tokens[:, 1 : self.length + LONGEST, None])[..., 0]  # (B, length + 3)
        self.nats = -chosen
        starts = torch.arange(self.length, device=tokens.device)
        accuracy = chosen[:, starts[:, None] + torch.arange(LONGEST, device=tokens.device)].cumsum(-1).exp()
        return accuracy, self._collision(branches, logits, noise, exact)

    def _collision(self, branches: Branches, logits: Tensor, noise: RowNoise, exact: bool) -> Tensor:
        vocabulary, copies, length = logits.shape[-1], branches.copies, self.length
        probabilities = logits.softmax(-1).repeat(1, copies, 1)  # (B, copies·L, V)
        weight = torch.ones_like(probabilities[..., 0])  # P(prefix); its square where prefixes are enumerated
        grams = []
        for n in range(1, LONGEST + 1):
            collided = (weight * probabilities.square().sum(-1)).unflatten(1, (copies, length))
            # A prefix of n - 1 tokens is enumerated once for every way to go on to LONGEST - 1.
            grams.append(collided.sum(1) / vocabulary ** (LONGEST - n) if exact else collided.mean(1))
            if n == LONGEST:
                break
            if exact:
                number = torch.arange(copies, device=logits.device) // vocabulary ** (LONGEST - 1 - n) % vocabulary
                drawn = number.repeat_interleave(length).expand(len(logits), -1)
            else:
                drawn = _draw(probabilities, noise.uniform(copies * length))
            probability = probabilities.gather(-1, drawn[..., None])[..., 0]
            weight = weight * (probability.square() if exact else probability)
            probabilities = branches.advance(drawn).softmax(-1)
        return torch.stack(grams, dim=-1)

    def _forward(self, inputs: Tensor, **kwargs) -> Tensor:
        return self.model(input_ids=inputs, use_cache=True, **kwargs).logits.float()


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """One outcome of each distribution (..., V), by where a uniform number falls: (...)."""
    cumulated = probabilities.cumsum(-1)
    wanted = (uniform * cumulated[..., -1])[..., None]
    return torch.searchsorted(cumulated, wanted, right=True)[..., 0].clamp(max=probabilities.shape[-1] - 1)
