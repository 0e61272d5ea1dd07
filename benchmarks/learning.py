"""How much models learn in the same processor time.

    python benchmarks/learning.py RECIPE [RECIPE ...] --seconds 600 --seeds 0 1 2 --output DIR [--set key=value ...]

Each recipe is trained with each seed for so many seconds of the process's own time (two threads that are both busy
make two a second), which neither evaluations nor other programs on the machine shorten; schedules follow that clock
instead of the steps. Models go to DIR/RECIPE-SEED, where `calm evaluate` takes them.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from calm.config import RunConfig, load_config
from calm.distributed import process_group
from calm.train.optimizer import adamw, learning_rate
from calm.train.stages import STAGES

UNITS = 1_000_000  # of the clock, for schedules that count steps


def train(config: RunConfig, seconds: float, output: Path) -> dict[str, float]:
    torch.manual_seed(config.seed)
    settings = config.optimizer
    with process_group() as world:
        stage = STAGES[config.stage](config, world)
        model = stage.model.train()
        optimizer = adamw(model, settings.betas, settings.eps, settings.weight_decay)
        warmup = settings.warmup_steps / config.train.steps
        began, step, last = time.process_time(), 0, 0.0
        while (done := (time.process_time() - began) / seconds) < 1:
            (part,) = stage.parts(stage.read(step))
            loss = model(**part).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
            rate = learning_rate(
                int(done * UNITS), UNITS, settings.learning_rate, int(warmup * UNITS), settings.schedule
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if done - last > 0.1:
                last = done
                print(f"  {done:4.0%} step {step} loss {loss.item():.3f}", file=sys.stderr, flush=True)
        model.save_pretrained(output)
        stage.save_extras(output)
        return {"steps": step, "tokens": step * stage.tokens_per_step, **stage.evaluate()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="a recipe, or NAME=recipe for its directory's name")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for recipe in options.recipes:
        name, _, source = recipe.rpartition("=")
        for seed in options.seeds:
            config = load_config(source, [*options.settings, f"seed={seed}"])
            output = options.output / f"{name or source}-{seed}"
            print(json.dumps({"model": str(output), **train(config, options.seconds, output)}), flush=True)


if __name__ == "__main__":
    main()
