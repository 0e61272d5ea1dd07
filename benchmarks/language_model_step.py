"""Breakdown of a training step of a language model with the energy head: backbone, head, and energy loss.

    python benchmarks/language_model_step.py [RECIPE] [VOCABULARY]

Medians over interleaved rounds, for the model of a recipe with random weights.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from calm.bench.clock import take_turns
from calm.bench.models import Training, config_of
from calm.bench.training import Head
from calm.scores.energy import energy_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="laptop-calm")
    parser.add_argument("vocabulary", nargs="?", type=int, default=4096, help="vocabulary size")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    training = Training(config_of(args.recipe, "laptop"), args.vocabulary)
    model, chunks = training.model, training.inputs["chunks"][:, :-1]
    head = Head(training)
    with torch.no_grad():
        samples = model.head.sample(head.hidden, model.head.num_model_samples)
    samples.requires_grad_()

    def backbone() -> None:
        model.hidden_states(chunks).sum().backward()
        model.zero_grad()

    def loss() -> None:
        energy_loss(samples, head.posterior).mean().backward()
        samples.grad = None

    training.step()  # allocates the optimizer state, which is not part of a step
    functions: dict[str, Callable[[], object]] = {
        "step": training.step,
        "chunk embedding and backbone": backbone,
        "head and loss": head.run,
        "loss": loss,
    }
    medians = {name: statistics.median(seconds) for name, seconds in take_turns(functions, args.rounds).items()}
    for name, median in medians.items():
        print(f"{name:32}{1000 * median:9.1f} ms{median / medians['step']:8.1%}")


if __name__ == "__main__":
    main()
