"""`calm generate` for people: texts as they come, or all of them as JSON with what they cost."""

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from calm import console
from calm.distributed import default_device
from calm.errors import INTERRUPTED, UserError
from calm.models.directories import located
from calm.sampling.next_chunk import Sampling
from calm.sampling.text import Writer


class Wanted(NamedTuple):
    """What to write."""

    prompt: str  # - is stdin
    max_new_tokens: int
    stops: list[str]
    num_samples: int
    seed: int


def generate(model: Path, wanted: Wanted, sampling: Sampling, int8: bool, show_chunks: bool, as_json: bool) -> None:
    with console.stderr.status("loading") if console.stderr.is_terminal else nullcontext():
        writer = Writer(located(model), default_device(), int8=int8)
    sampling = writer.predictor.resolve(sampling)
    prompt, number = _read(wanted.prompt), wanted.num_samples
    pieces = writer.write(
        [writer.tokenizer.encode(prompt)] * number,
        sampling,
        max_new_tokens=wanted.max_new_tokens,
        stops=[wanted.stops] * number,
        seed=wanted.seed,
    )
    try:
        if as_json:
            settings = {"temperature": sampling.temperature, "method": sampling.method}
            texts = console.collected_texts(pieces, number)  # before what they cost is known
            console.print_json(
                {"prompt": prompt, "seed": wanted.seed} | settings | texts | {"cost": asdict(writer.spent)}
            )
        else:
            console.show_texts(pieces, number, show_chunks)
    except KeyboardInterrupt:
        console.stdout.print()
        sys.exit(INTERRUPTED)
    if warning := writer.spent.warning(sampling):
        console.warn(warning)


def _read(prompt: str) -> str:
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise UserError(f"the prompt is not UTF-8: {error}") from error
    return text
