"""Tokens a second of CALM models against Transformers with a cache, in one run.

    python benchmarks/generation.py                                      random weights, and recipes' sizes
    python benchmarks/generation.py --autoencoder AE --latents-of LM --data DIR   a trained vocabulary of 128k
    python benchmarks/generation.py --calm runs/laptop-calm/model --transformer runs/laptop-transformer/model

By default CALM-M against Transformer-S of the paper, batch 1, 64 tokens of prompt and 64 new ones. A backbone's speed
does not depend on its weights, but how much of the vocabulary has to be looked at depends on the latents: with
--autoencoder and --latents-of the head is computed as usual, and what it says is replaced by latents that a trained
model has drawn at positions of a text (--data); --posterior takes the autoencoder's own posteriors, the best case.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from calm.allocator import keep_memory
from calm.config import load_config
from calm.data.shards import PreparedData
from calm.linear import prepare_for_writing
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig, ChunkAutoencoderConfig, make_backbone_config
from calm.models.loading import load_autoencoder, load_calm, load_softmax
from calm.sampling.predictor import LastStates
from calm.sampling.vocabulary import VocabularySearch, search_of

VOCABULARY, PROMPT, NEW = 128_257, 64, 64


class Recorded:
    """A head that is computed and then overruled: it says what a trained model has said."""

    def __init__(self, head: Any, latents: Tensor):
        self.head, self.latents, self.calls = head, latents, 0  # (positions, N, Z)

    def sample(self, hidden: Tensor, num_samples: int, generator: Any = None) -> Tensor:
        self.head.sample(hidden, num_samples, generator)
        places = (self.calls + torch.arange(len(hidden))) % len(self.latents)
        self.calls += len(hidden)
        return self.latents[places, :num_samples].transpose(0, 1)


@torch.no_grad()
def recorded(model: Any, data: Path, positions: int, number: int) -> Tensor:
    """Latents that a language model draws behind a text it was not trained on: (positions, N, Z)."""
    ids = torch.tensor(PreparedData(data).split("validation")[:4096].astype("int64"))
    size = model.config.chunk_size
    hidden = model.hidden_states(ids[: len(ids) // 512 * 512].view(-1, 512))[:, 512 // size // 2 :].flatten(0, 1)
    chosen = torch.randperm(len(hidden), generator=torch.Generator().manual_seed(0))[:positions]
    generator = torch.Generator().manual_seed(1)
    return model.head.sample(hidden[chosen], number, generator).transpose(0, 1).contiguous()


@torch.no_grad()
def posteriors(autoencoder: Any, data: Path, positions: int, number: int) -> Tensor:
    ids = torch.tensor(PreparedData(data).split("validation")[:4096].astype("int64"))
    found = autoencoder.encode(ids.view(-1, autoencoder.config.chunk_size))
    rows = torch.randint(len(found.mean), (positions * number,), generator=torch.Generator().manual_seed(0))
    noise = torch.randn(len(rows), found.mean.shape[-1], generator=torch.Generator().manual_seed(1))
    latents = found.mean[rows] + found.log_std[rows].exp() * noise
    return latents.view(positions, number, -1)


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    """The models to compare."""
    if options.calm is not None:
        return load_calm(options.calm).eval(), load_softmax(options.transformer).eval()
    torch.manual_seed(0)
    ours, theirs = load_config("paper-calm-m"), load_config("paper-transformer-s")
    fields = ours.language_model
    if options.autoencoder is not None:
        inner = load_autoencoder(options.autoencoder).eval()
        config = inner.config
    else:
        inner, config = None, ChunkAutoencoderConfig(vocab_size=VOCABULARY)
    backbone = make_backbone_config(dict(fields.backbone), config.vocab_size)  # pyright: ignore
    layers = fields.num_head_layers
    model: Any = CalmForCausalLM(CalmConfig(backbone, config, head=options.head, num_head_layers=layers)).eval()
    if inner is not None:
        model.autoencoder.load_state_dict(inner.state_dict())
    elif options.head == "energy":
        torch.nn.init.normal_(model.head.latent.weight)
    baseline = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **theirs.language_model.backbone)).eval()  # pyright: ignore
    return model, baseline


def timed_parts(model: Any, run: Callable[[], Any]) -> dict[str, float]:
    """Seconds that one run spends in each part of a CALM model."""
    spent: dict[str, float] = defaultdict(float)

    def wrap(owner: Any, name: str, part: str) -> Callable[[], None]:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = inner(*args, **kwargs)
            spent[part] += time.perf_counter() - began
            return found

        setattr(owner, name, timed)
        return lambda: setattr(owner, name, inner)

    decoder, chain = model.autoencoder.decoder, model.config.is_chain
    undo = [
        wrap(LastStates, "__call__", "backbone"),
        wrap(model.head, "forward" if chain else "sample", "head"),
        wrap(decoder, "chunk_states", "decoder"),
        wrap(decoder, "token_states", "decoder"),
        wrap(VocabularySearch, "__call__", "vocabulary"),
    ]
    began = time.perf_counter()
    run()
    total = time.perf_counter() - began
    for take_back in undo:
        take_back()
    return {**spent, "rest": total - sum(spent.values())}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--autoencoder", type=Path)
    parser.add_argument("--latents-of", type=Path)
    parser.add_argument("--posterior", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--calm", type=Path)
    parser.add_argument("--transformer", type=Path)
    parser.add_argument("--head", choices=("energy", "chain"), default="energy", help="of the paper's sizes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--candidates", type=int, default=200)
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(options.threads)
    model, baseline = build(options)
    trained: Any = None
    if options.latents_of is not None:
        trained = recorded(load_calm(options.latents_of).eval(), options.data, 64, options.candidates)
    elif options.posterior:
        trained = posteriors(model.autoencoder, options.data, 64, options.candidates)
    if trained is not None:
        prepare_for_writing(model)  # while the head is a part of it
        real = model.head
        del model.head
        model.head = Recorded(real, trained)
    ids = torch.randint(3, min(model.config.vocab_size, 4096), (options.batch, PROMPT))

    def calm(**how: Any) -> None:
        roles = {"eos_token_id": -1, "pad_token_id": 0}
        model.generate(ids, max_new_tokens=NEW, generator=torch.Generator().manual_seed(0), **roles, **how)

    def transformer() -> None:
        baseline.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )

    low = {"temperature": 0.5, "num_candidates": options.candidates}
    ways: dict[str, Callable[[], None]] = {
        "Transformer": transformer,
        "CALM, T = 1": calm,
    }
    if model.config.is_chain:
        ways["CALM, T = 0.5"] = lambda: calm(temperature=0.5)
    else:
        ways["CALM, T = 0.5, token"] = lambda: calm(method="token", **low)
        ways["CALM, T = 0.5, batch"] = lambda: calm(method="batch", **low)
        ways["CALM, T = 0.5, batch, tolerance 0.1"] = lambda: calm(method="batch", tolerance=0.1, **low)
    times: dict[str, list[float]] = defaultdict(list)
    for way in ways.values():
        way()
    for _ in range(options.repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
    print(f"batch {options.batch}, {PROMPT} + {NEW} tokens, {options.threads} threads, medians of {options.repeats}")
    for name, spent in times.items():
        ratio = statistics.median(b / t for b, t in zip(times["Transformer"], spent, strict=True))
        speed = options.batch * NEW / statistics.median(spent)
        print(f"{name:38} {speed:8.1f} tokens/s   {ratio:5.2f} times the Transformer")
    search = search_of(model.autoencoder)
    for name in list(ways)[1:]:
        search.multiplied = search.asked = 0
        parts = timed_parts(model, ways[name])
        total = sum(parts.values())
        shown = ", ".join(f"{part} {1e3 * t / (NEW / model.config.chunk_size):.1f}" for part, t in parts.items())
        print(f"{name}: ms a step: {shown}; {1e3 * total / (NEW / model.config.chunk_size):.1f} in all")
        if search.asked:
            print(
                f"    words multiplied as they are: {len(search.words) * search.multiplied / search.asked:.1f} a state"
            )


if __name__ == "__main__":
    main()
