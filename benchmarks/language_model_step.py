"""Where a training step of the language model goes: backbone, head, and the energy loss alone, as shares of a step.

Medians of several rounds in one run; the model is that of a recipe with random weights.

    python benchmarks/language_model_step.py [RECIPE] [VOCABULARY]
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch

from calm.config import load_config
from calm.heads import EnergyHead
from calm.models.calm import CalmForCausalLM
from calm.noise import RowNoise
from calm.scores.energy import energy_loss
from calm.train.optimizer import adamw
from calm.train.stages import autoencoder_config, calm_config

ROUNDS = 9


def main() -> None:
    recipe, vocabulary = (*sys.argv[1:], *("laptop-calm", "4096")[len(sys.argv) - 1 :])
    config, vocabulary = load_config(recipe), int(vocabulary)
    torch.manual_seed(0)
    model = CalmForCausalLM(calm_config(config.language_model, autoencoder_config(config, vocabulary))).train()
    head = model.head
    assert isinstance(head, EnergyHead)
    torch.nn.init.normal_(head.latent.weight, std=0.05)  # it begins at zero, where all samples coincide
    optimizer = adamw(model, (0.9, 0.95), 1e-8, 0.1)
    rows, size = config.data.batch_size, config.data.chunk_size
    ids = torch.randint(vocabulary, (rows, config.data.sequence_length + size))
    posterior = model.posterior(model.chunks(ids)[:, 1:])
    with torch.no_grad():
        hidden = model.hidden_states(ids[:, :-size])
        samples = head.sample(hidden, config.language_model.num_model_samples)
    hidden.requires_grad_()
    samples.requires_grad_()

    def step() -> None:
        model(ids, labels=ids, noise=RowNoise(list(range(rows)))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    parts: dict[str, Callable[[], object]] = {
        "step": step,
        "chunk embedding and backbone": lambda: model.hidden_states(ids[:, :-size]).sum().backward(),
        "head and loss": lambda: head.loss(hidden, posterior).backward(),
        "loss": lambda: energy_loss(samples, posterior).mean().backward(),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(ROUNDS + 1):
        for name, function in parts.items():
            began = time.perf_counter()
            function()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:32}{1000 * median:9.1f} ms{median / medians['step']:8.1%}")


if __name__ == "__main__":
    main()
