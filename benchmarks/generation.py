"""Generation throughput of CALM models compared with transformers' `LlamaForCausalLM.generate`.

    python benchmarks/generation.py                                      random weights, sizes of the paper
    python benchmarks/generation.py --autoencoder AE --latents-of LM --data DIR   a trained autoencoder
    python benchmarks/generation.py --calm runs/laptop-calm/model --transformer runs/laptop-transformer/model

By default CALM-M and Transformer-S of the paper, batch size 1, 64 prompt tokens and 64 new tokens. The speed of a
backbone does not depend on its weights, but the speed of the vocabulary search depends on the latents. With
--autoencoder and --latents-of, the head is computed as usual, but its samples are replaced by samples of a trained
model on held-out text (--data); with --posterior by samples of the autoencoder's posterior, the best case.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from calm.bench.clock import ratios, take_turns
from calm.bench.generation import NEW, PROMPT, PROMPT_VOCABULARY, transformer
from calm.bench.models import VOCABULARIES, as_transformers
from calm.checkpoint import load_autoencoder, load_calm, load_transformer
from calm.config import load_config
from calm.cpu.allocator import keep_memory
from calm.cpu.search import Int8NearestTokens
from calm.data.shards import PreparedData
from calm.generate.engine import Engine, Sequence, prepare_inference
from calm.generate.sampler import SamplingParams
from calm.train.stages import autoencoder_config, described_model, new_calm

CONTEXT, DATA_TOKENS, POSITIONS = 512, 4096, 64  # of held-out text for latents


class RecordedSamples:
    """Calls a head's `sample`, but returns recorded latents (positions, N, Z) instead of its result."""

    def __init__(self, sample: Callable[..., Tensor], latents: Tensor):
        self.sample, self.latents, self.calls = sample, latents, 0

    def __call__(self, hidden: Tensor, num_samples: int = 1, generator: Any = None) -> Tensor:
        self.sample(hidden, num_samples, generator)
        positions = (self.calls + torch.arange(len(hidden))) % len(self.latents)
        self.calls += len(hidden)
        return self.latents[positions, :num_samples].transpose(0, 1)


def held_out_tokens(data: Path) -> Tensor:
    return torch.tensor(PreparedData(data).split("validation")[:DATA_TOKENS].astype("int64"))


@torch.no_grad()
def model_latents(model: Any, data: Path, num_samples: int) -> Tensor:
    """Samples of a language model on held-out text: (positions, N, Z)."""
    ids = held_out_tokens(data)
    chunks = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT // model.chunk_size, model.chunk_size)
    hidden = model.hidden_states(chunks)[:, CONTEXT // model.chunk_size // 2 :].flatten(0, 1)
    positions = torch.randperm(len(hidden), generator=torch.Generator().manual_seed(0))[:POSITIONS]
    generator = torch.Generator().manual_seed(1)
    return model.head.sample(hidden[positions], num_samples, generator).transpose(0, 1).contiguous()


@torch.no_grad()
def posterior_latents(autoencoder: Any, data: Path, num_samples: int) -> Tensor:
    """Samples of an autoencoder's posteriors of held-out text: (positions, N, Z)."""
    posterior = autoencoder.encode(held_out_tokens(data).view(-1, autoencoder.config.chunk_size))
    rows = torch.randint(len(posterior.mean), (POSITIONS * num_samples,), generator=torch.Generator().manual_seed(0))
    noise = torch.randn(len(rows), posterior.mean.shape[-1], generator=torch.Generator().manual_seed(1))
    latents = posterior.mean[rows] + posterior.std[rows] * noise
    return latents.view(POSITIONS, num_samples, -1)


def make_models(args: argparse.Namespace) -> tuple[Any, Any]:
    """The CALM model and transformers' Llama."""
    if args.calm is not None:
        return load_calm(args.calm), as_transformers(load_transformer(args.transformer))
    torch.manual_seed(0)
    vocab_size = VOCABULARIES["paper"]
    config, baseline = load_config(args.recipe, [f"language_model.head={args.head}"]), load_config(args.baseline)
    autoencoder = None if args.autoencoder is None else load_autoencoder(args.autoencoder)
    fields = autoencoder_config(config, vocab_size) if autoencoder is None else autoencoder.config
    model: Any = new_calm(config.language_model, fields).eval()
    if autoencoder is not None:
        model.load_autoencoder(autoencoder)
    elif args.head == "energy":
        torch.nn.init.normal_(model.head.latent.weight)
    return model, as_transformers(described_model(baseline, vocab_size))


def generation(model: Any, ids: Tensor, params: SamplingParams) -> Callable[[], object]:
    def run() -> None:
        engine = Engine(model, eos_token_id=-1, pad_token_id=0)
        engine.add(Sequence(prompt, seed, NEW, params) for seed, prompt in enumerate(ids.tolist()))
        while engine.waiting or engine.running:
            engine.step()

    return run


def sampling_params(model: Any, num_candidates: int) -> dict[str, SamplingParams]:
    params = {"CALM, T = 1": SamplingParams()}
    if model.head.exact_likelihood:
        return {**params, "CALM, T = 0.5": SamplingParams(0.5)}
    return {
        **params,
        "CALM, T = 0.5, token": SamplingParams(0.5, num_candidates, "token"),
        "CALM, T = 0.5, batch": SamplingParams(0.5, num_candidates, "batch"),
        "CALM, T = 0.5, batch, tolerance 0.1": SamplingParams(0.5, num_candidates, "batch", tolerance=0.1),
    }


def time_of_parts(model: Any, run: Callable[[], object]) -> dict[str, float]:
    """Seconds that one run spends in each part of a CALM model."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(owner: Any, name: str, part: str) -> AbstractContextManager[object]:
        inner = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = inner(*args, **kwargs)
            seconds[part] += time.perf_counter() - began
            return result

        return mock.patch.object(owner, name, wrapper)

    head, autoencoder = model.head, model.autoencoder
    methods = [(model.backbone, "forward", "backbone")]
    if head.exact_likelihood:
        methods += [(head, "states", "head"), (head.project, "forward", "vocabulary")]
    else:
        methods += [
            (head, "sample", "head"),
            (autoencoder.decoder, "chunk_states", "decoder"),
            (autoencoder.decoder, "token_states", "decoder"),
            (autoencoder.nearest, "forward", "vocabulary"),
        ]
    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(timed(*method))
        began = time.perf_counter()
        run()
        total = time.perf_counter() - began
    return {**seconds, "other": total - sum(seconds.values())}


def report_parts(name: str, model: Any, run: Callable[[], object]) -> None:
    """Print the time per decoding step of each part, and how many tokens the vocabulary search compares in fp32."""
    nearest, search = model.autoencoder.nearest, None
    if isinstance(nearest, Int8NearestTokens) and not model.head.exact_likelihood:
        search = nearest.search(model.autoencoder.embedding.weight)
        search.multiplied = search.asked = 0
    steps = NEW / model.chunk_size
    parts = {part: 1e3 * seconds / steps for part, seconds in time_of_parts(model, run).items()}
    shares = ", ".join(f"{part} {milliseconds:.1f}" for part, milliseconds in parts.items())
    print(f"{name}: {sum(parts.values()):.1f} ms per step: {shares}")
    if search is not None and search.asked:
        compared = len(search.vocabulary) * search.multiplied / search.asked
        print(f"    tokens of the vocabulary compared in fp32: {compared:.1f} per state")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--autoencoder", type=Path, help="directory of a trained autoencoder")
    parser.add_argument("--latents-of", type=Path, help="directory of a CALM model with that autoencoder")
    parser.add_argument("--posterior", action="store_true", help="use samples of the autoencoder's posterior")
    parser.add_argument("--data", type=Path, help="prepared data for --latents-of and --posterior")
    parser.add_argument("--calm", type=Path, help="directory of a trained CALM model")
    parser.add_argument("--transformer", type=Path, help="directory of a trained Transformer, with --calm")
    parser.add_argument("--head", choices=("energy", "chain"), default="energy", help="of a model with random weights")
    parser.add_argument("--recipe", default="paper-calm-m", help="of a CALM model with random weights")
    parser.add_argument("--baseline", default="paper-transformer-s", help="of a Transformer with random weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1, help="number of sequences")
    parser.add_argument("--candidates", type=int, default=200, help="per chunk, for T = 0.5")
    args = parser.parse_args()
    if (args.calm is None) != (args.transformer is None):
        parser.error("--calm and --transformer go together")
    keep_memory()
    torch.set_num_threads(args.threads)
    model, baseline = make_models(args)
    prepare_inference(model)
    latents: Tensor | None = None
    if args.latents_of is not None:
        latents = model_latents(load_calm(args.latents_of), args.data, args.candidates)
    elif args.posterior:
        latents = posterior_latents(model.autoencoder, args.data, args.candidates)
    if latents is not None:
        model.head.sample = RecordedSamples(model.head.sample, latents)
    ids = torch.randint(3, min(model.vocab_size, PROMPT_VOCABULARY), (args.batch, PROMPT))
    runs = {name: generation(model, ids, params) for name, params in sampling_params(model, args.candidates).items()}
    times = take_turns({"Transformer": transformer(baseline, ids), **runs}, args.repeats)
    medians = f"medians of {args.repeats} rounds"
    print(f"batch size {args.batch}, {PROMPT} + {NEW} tokens, {args.threads} threads, {medians}")
    for name, seconds in times.items():
        speedup = statistics.median(ratios(times["Transformer"], seconds))
        speed = args.batch * NEW / statistics.median(seconds)
        print(f"{name:38} {speed:8.1f} tokens/s   {speedup:5.2f}x the Transformer")
    for name, run in runs.items():
        report_parts(name, model, run)


if __name__ == "__main__":
    main()
