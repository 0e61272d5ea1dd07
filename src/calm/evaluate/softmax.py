"""How a Transformer with a softmax over tokens is doing while it is trained: cross-entropy, and Brier-1, exactly."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from calm.data.loader import Batch
from calm.evaluate.common import evaluating, on_device


def evaluate_softmax(
    model: Any, batches: Iterable[Batch], *, reduce: Callable[[Tensor], Tensor] = lambda sums: sums
) -> dict[str, float]:
    """Nats a token, and 2·P(y) - Σ P(x)² in percent, over the tokens of some rows."""
    sums = torch.zeros(3, dtype=torch.float64)  # tokens, nats, Brier-1
    with evaluating(model):
        for batch in batches:
            tokens, mask = on_device(batch, model.device)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()  # (B, T-1, V)
            log_probabilities = logits.log_softmax(-1)
            chosen = log_probabilities.gather(-1, tokens[:, 1:, None])[..., 0]
            score = 2 * chosen.exp() - log_probabilities.exp().square().sum(-1)
            measures = [torch.ones_like(chosen), -chosen, score]
            sums += torch.stack([(m * mask[:, 1:]).double().sum() for m in measures]).cpu()
    count, nats, score = reduce(sums).tolist()
    count = max(count, 1.0)
    return {"score": -nats / count, "cross_entropy": nats / count, "brier_1": 100 * score / count}
