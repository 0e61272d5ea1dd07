"""Train models for the same processor time, to compare how much they learn.

    python benchmarks/learning.py RECIPE [RECIPE ...] --seconds 600 --seeds 0 1 2 --output DIR [--set key=value ...]

Each recipe is trained with each seed for a fixed CPU time of the process: two busy threads take two seconds per second.
Neither evaluation nor other programs on the machine shorten it, and learning rate schedules follow it instead of the
number of steps. Models are saved to DIR/RECIPE-SEED, for `calm evaluate`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from calm.checkpoint import save_model
from calm.config import RunConfig, load_config
from calm.distributed import process_group
from calm.train.loop import optimize_for_cpu
from calm.train.optimizer import adamw, learning_rate
from calm.train.stages import STAGES

UNITS = 1_000_000  # virtual steps of the whole run, for schedules that count steps


def train(config: RunConfig, seconds: float, output: Path) -> dict[str, float]:
    torch.manual_seed(config.seed)
    settings = config.optimizer
    with process_group() as world:
        stage = STAGES[config.stage](config, world)
        stage.initialize()
        model = stage.model.train()
        optimize_for_cpu(model)
        optimizer = adamw(model, settings.betas, settings.eps, settings.weight_decay)
        warmup = int(settings.warmup_steps / config.train.steps * UNITS)
        began, step, reported = time.process_time(), 0, 0.0
        while (done := (time.process_time() - began) / seconds) < 1:
            (inputs,) = stage.micro_batches(stage.read(step))
            loss = model(**inputs)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
            rate = learning_rate(int(done * UNITS), UNITS, settings.learning_rate, warmup, settings.schedule)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if done - reported > 0.1:
                reported = done
                print(f"  {done:4.0%} step {step} loss {loss.item():.3f}", file=sys.stderr, flush=True)
        save_model(model, output)
        stage.save_extras(output)
        return {"steps": step, "tokens": step * stage.tokens_per_step, **stage.evaluate()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="a recipe, or NAME=recipe to name its directory")
    parser.add_argument("--seconds", type=float, default=600, help="CPU time per run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="section.key=value")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for recipe in args.recipes:
        name, _, source = recipe.rpartition("=")
        for seed in args.seeds:
            config = load_config(source, [*args.settings, f"seed={seed}"])
            output = args.output / f"{name or source}-{seed}"
            print(json.dumps({"model": str(output), **train(config, args.seconds, output)}), flush=True)


if __name__ == "__main__":
    main()
