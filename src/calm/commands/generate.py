"""`calm generate`: stream texts to the terminal, or print them as JSON with sampling statistics."""

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from calm import console
from calm.checkpoint import resolve_model_dir
from calm.distributed import default_device
from calm.errors import INTERRUPTED, UserError
from calm.generate.sampler import SamplingParams
from calm.generate.text import TextGenerator


class Request(NamedTuple):
    """Prompt and limits of a generation."""

    prompt: str  # "-" reads it from stdin
    max_new_tokens: int
    stops: list[str]
    num_samples: int
    seed: int


def generate(
    model: Path, request: Request, params: SamplingParams, int8: bool, show_chunks: bool, as_json: bool
) -> None:
    with console.stderr.status("loading") if console.stderr.is_terminal else nullcontext():
        generator = TextGenerator(resolve_model_dir(model), default_device(), int8=int8)
    params = params.resolve(generator.model.head)
    prompt, count = _read_prompt(request.prompt), request.num_samples
    deltas = generator.stream(
        [generator.tokenizer.encode(prompt)] * count,
        params,
        max_new_tokens=request.max_new_tokens,
        stops=[request.stops] * count,
        seed=request.seed,
    )
    try:
        if as_json:
            settings = {"temperature": params.temperature, "method": params.method}
            texts = console.collected_texts(deltas, count)  # runs the generation, which fills generator.stats
            cost = asdict(generator.stats)
            console.print_json({"prompt": prompt, "seed": request.seed} | settings | texts | {"cost": cost})
        else:
            console.show_texts(deltas, count, show_chunks)
    except KeyboardInterrupt:
        console.stdout.print()
        sys.exit(INTERRUPTED)
    if warning := generator.stats.warning(params):
        console.warn(warning)


def _read_prompt(prompt: str) -> str:
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise UserError(f"the prompt is not valid UTF-8: {error}; convert it to UTF-8 first") from error
    return text
