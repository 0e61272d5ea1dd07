"""Metrics of language models during training, on validation rows.

A CALM model, from a few samples at each position:

score                  decides which checkpoint is best: minus the energy loss
energy_loss            with α = 1, of samples against the true next chunk: a proper score, whatever the head
fidelity, diversity    its two terms, 2·E|x - z| and E|x - x'|; a collapsed model has no diversity
context_gap            how much worse the samples fit another position's target; 0: the context is ignored
sample_spread          standard deviation of samples per dimension; 0: the noise is ignored
same_chunk             share of pairs of samples that decode to the same chunk
brier_1 … brier_4      §4, in percent, on the first tokens of a chunk (the first K for K < 4); brier_lm if there are
                       four, all positive

A Transformer: cross-entropy per token and Brier-1, exactly.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from calm.autoencoder import Posterior, chunk_mask
from calm.data.loader import Batch
from calm.model import Calm
from calm.noise import RowNoise
from calm.scores.brier import MAX_NGRAM, brier_lm, brier_of_samples, pairs
from calm.scores.energy import energy_terms
from calm.scores.vocabulary import rows_at_once
from calm.seeds import row_seeds

NUM_SAMPLES = 4


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and without gradients, and afterwards as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and mask of a batch: (B, T) and (B, T)."""
    return torch.from_numpy(batch.tokens).to(device), torch.from_numpy(batch.mask).to(device)


def evaluate_predictions(
    model: Calm,
    batches: Iterable[Batch],
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> dict[str, Any]:
    """Metrics of a CALM model; the samples of a row depend on `seed` and the row's number alone."""
    size, ngrams = model.config.chunk_size, min(model.config.chunk_size, MAX_NGRAM)
    sums = torch.zeros(6 + ngrams, dtype=torch.float64)  # positions, metrics, Brier-n
    with evaluating(model):
        for batch in batches:
            tokens, mask = on_device(batch, model.device)
            counted = chunk_mask(mask, size)[:, 1:]  # (B, L)
            noise = RowNoise(row_seeds(batch.rows, seed), model.device)
            true = tokens.unflatten(1, (-1, size))  # (B, L, K)
            latents, chunks, posterior = model.predict(true, num_samples, noise)
            target = true[:, 1:]
            fidelity, diversity = energy_terms(latents, posterior)
            elsewhere, _ = energy_terms(latents, _elsewhere(posterior, counted))
            scores = brier_of_samples(chunks[..., :ngrams], target[..., :ngrams])  # (B, L, n)
            metrics = [
                torch.ones_like(fidelity),
                fidelity,
                diversity,
                elsewhere - fidelity,
                latents.float().var(0).mean(-1).sqrt(),
                _same_chunk(chunks),
                *scores.unbind(-1),
            ]
            sums += torch.stack([(m * counted).double().sum() for m in metrics]).cpu()
    positions, *totals = reduce(sums).tolist()
    fidelity, diversity, gap, spread, same, *scores = (total / max(positions, 1.0) for total in totals)
    results = {
        "score": diversity - fidelity,
        "energy_loss": fidelity - diversity,
        "fidelity": fidelity,
        "diversity": diversity,
        "context_gap": gap,
        "sample_spread": spread,
        "same_chunk": same,
        **{f"brier_{n}": 100 * score for n, score in enumerate(scores, 1)},
    }
    whole = brier_lm(torch.tensor(scores)) if ngrams == MAX_NGRAM else None
    return results if whole is None else {**results, "brier_lm": whole}


def _elsewhere(posterior: Posterior, counted: Tensor) -> Posterior:
    """For each position the posterior of another position of its row, half of the row's targets away."""
    targets = counted.sum(1, keepdim=True).long().clamp(min=1)  # they come first in a row; the rest is padding
    places = (torch.arange(counted.shape[1], device=counted.device) + targets // 2) % targets  # (B, L)
    index = places[..., None].expand_as(posterior.mean)
    return Posterior(posterior.mean.gather(1, index), posterior.log_std.gather(1, index))


def _same_chunk(chunks: Tensor) -> Tensor:
    """(N, B, L, K) → the share of pairs that are equal, (B, L)."""
    left, right = pairs(chunks)
    return (left == right).all(-1).float().mean(0)


def evaluate_transformer(
    model: Any, batches: Iterable[Batch], *, reduce: Callable[[Tensor], Tensor] = lambda sums: sums
) -> dict[str, float]:
    """Cross-entropy per token, and Brier-1 = 2·P(y) - Σ P(x)² in percent."""
    sums = torch.zeros(3, dtype=torch.float64)  # tokens, nats, Brier-1
    with evaluating(model):
        for batch in batches:
            whole = on_device(batch, model.device)
            rows = rows_at_once(whole[0].shape[1] * model.vocab_size, model.device)  # a row is computed whole
            for tokens, mask in zip(*(part.split(rows) for part in whole), strict=True):
                log_probs = model.logits(tokens[:, :-1]).float().log_softmax(-1)  # (B, T-1, V)
                chosen = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
                score = 2 * chosen.exp() - log_probs.mul_(2).exp_().sum(-1)
                metrics = [torch.ones_like(chosen), -chosen, score]
                sums += torch.stack([(m * mask[:, 1:]).double().sum() for m in metrics]).cpu()
    count, nats, score = reduce(sums).tolist()
    count = max(count, 1.0)
    return {"score": -nats / count, "cross_entropy": nats / count, "brier_1": 100 * score / count}
