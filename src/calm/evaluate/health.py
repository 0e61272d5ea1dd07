"""How a continuous language model is doing while it is trained, from a few samples at each position.

score                  what decides which checkpoint is best: minus the energy loss
energy_loss            of samples against the true next chunk: a proper score, whatever head made them
fidelity, diversity    its two terms, 2·E|x - z| and E|x - x'|; a collapsed model has no diversity
context_gap            how much worse the samples fit another position's target; 0: the context is ignored
sample_spread          standard deviation of samples in a dimension; 0: the noise is ignored
same_chunk             share of pairs of samples that decode to the same chunk
brier_1 … brier_4      §4, in percent, on the first tokens of a chunk (of K < 4 the first K); brier_lm
                       where there are four, all positive
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from calm.data.loader import Batch
from calm.evaluate.common import evaluating, on_device
from calm.models.autoencoder import count_chunks
from calm.models.calm import CalmForCausalLM
from calm.models.posterior import Posterior
from calm.noise import RowNoise
from calm.scores.brier import LONGEST, brier_lm, brier_of_samples, pairs
from calm.scores.energy import energy_terms
from calm.seeds import row_seeds

NUM_SAMPLES = 4


def evaluate_predictions(
    model: CalmForCausalLM,
    batches: Iterable[Batch],
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> dict[str, Any]:
    """Measures on rows of text; the samples of a row depend on `seed` and the row's number alone."""
    size, ngrams = model.config.chunk_size, min(model.config.chunk_size, LONGEST)
    sums = torch.zeros(6 + ngrams, dtype=torch.float64)  # positions, the measures, Brier-n
    with evaluating(model):
        for batch in batches:
            tokens, mask = on_device(batch, model.device)
            counted = count_chunks(tokens, mask, size)[:, 1:]  # (B, L)
            noise = RowNoise(row_seeds(batch.rows, seed), model.device)
            latents, chunks, posterior = model.predict(tokens, num_samples, noise)
            target = model.chunks(tokens)[:, 1:]  # (B, L, K)
            fidelity, diversity = energy_terms(latents, posterior)
            elsewhere, _ = energy_terms(latents, _elsewhere(posterior, counted))
            scores = brier_of_samples(chunks[..., :ngrams], target[..., :ngrams])  # (B, L, n)
            measures = [
                torch.ones_like(fidelity),
                fidelity,
                diversity,
                elsewhere - fidelity,
                latents.float().var(0).mean(-1).sqrt(),
                _same_chunk(chunks),
                *scores.unbind(-1),
            ]
            sums += torch.stack([(m * counted).double().sum() for m in measures]).cpu()
    positions, *totals = reduce(sums).tolist()
    fidelity, diversity, gap, spread, same, *scores = (total / max(positions, 1.0) for total in totals)
    found = {
        "score": diversity - fidelity,
        "energy_loss": fidelity - diversity,
        "fidelity": fidelity,
        "diversity": diversity,
        "context_gap": gap,
        "sample_spread": spread,
        "same_chunk": same,
        **{f"brier_{n}": 100 * score for n, score in enumerate(scores, 1)},
    }
    whole = brier_lm(torch.tensor(scores)) if ngrams == LONGEST else None
    return found if whole is None else {**found, "brier_lm": whole}


def _elsewhere(posterior: Posterior, counted: Tensor) -> Posterior:
    """For each position the posterior of another of its row, half of the row's targets away."""
    targets = counted.sum(1, keepdim=True).long().clamp(min=1)  # they come first in a row; behind them is fill
    places = (torch.arange(counted.shape[1], device=counted.device) + targets // 2) % targets  # (B, L)
    index = places[..., None].expand_as(posterior.mean)
    return Posterior(posterior.mean.gather(1, index), posterior.log_std.gather(1, index))


def _same_chunk(chunks: Tensor) -> Tensor:
    """(N, B, L, K) → the share of pairs that are equal, (B, L)."""
    left, right = pairs(chunks)
    return (left == right).all(-1).float().mean(0)
