"""Tasks of lm_eval (extra `eval`), for models that continue a text. Importing this registers the model type `calm`.

A CALM model gives samples and no likelihoods, so tasks of the kind generate_until run, and others are refused. It is
sampled at temperature 1, whatever a task asks for.
"""

from pathlib import Path
from typing import Any, cast

import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from calm.data.loader import mix
from calm.data.tokenizer import load_tokenizer
from calm.errors import UserError, did_you_mean
from calm.models.configuration import CalmConfig
from calm.models.loading import load_calm, load_softmax, model_type
from calm.sampling.generator import Generation

NEW_TOKENS = 256  # where a task does not say


@register_model("calm")
class HarnessModel(LM):
    """A CALM model as lm_eval sees one: `lm_eval --model calm --model_args pretrained=DIR`."""

    def __init__(self, pretrained: str, batch_size: int | str = 8, seed: int = 0, device: str | None = None, **_: Any):
        super().__init__()
        directory = Path(pretrained)
        self.model: Any = load_calm(directory)
        self.model.to(torch.device(device or _device())).eval()
        self.tokenizer = load_tokenizer(pretrained)
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 8
        self.seed = int(seed)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        answers: list[str] = []
        with tqdm(total=len(requests), desc="generate_until") as bar:
            for first in range(0, len(requests), self.batch_size):
                batch = requests[first : first + self.batch_size]
                answers += self._continue([request.args for request in batch], first)  # pyright: ignore
                bar.update(len(batch))
        return answers

    def _continue(self, batch: list[tuple[str, dict[str, Any]]], first: int) -> list[str]:
        kwargs: list[Any] = [normalize_gen_kwargs(dict(asked), NEW_TOKENS) for _, asked in batch]
        stops = [[stop for stop in asked.get("until") or [] if stop] for asked in kwargs]
        wanted = [int(asked["max_gen_toks"]) for asked in kwargs]
        generation = Generation(
            self.model,
            [self._prompt(text, max(wanted)) for text, _ in batch],
            [int(mix(self.seed, 8, first + place) >> 1) for place in range(len(batch))],
            max_new_tokens=max(wanted),
            end_id=self.tokenizer.end_id,
            fill_id=self.tokenizer.fill_id,
        )
        ids: list[list[int]] = [[] for _ in batch]
        texts = [""] * len(batch)
        while generation.running:
            for number, new in generation.step().items():
                ids[number] += new
                texts[number] = self.tokenizer.decode(ids[number][: wanted[number]])
                if any(stop in texts[number] for stop in stops[number]) or len(ids[number]) >= wanted[number]:
                    generation.end([number])
        return [_cut(text, stop) for text, stop in zip(texts, stops, strict=True)]

    def _prompt(self, text: str, new_tokens: int) -> list[int]:
        """The end of a text that leaves room for its continuation."""
        size, positions = self.model.config.chunk_size, self.model.config.backbone_config
        longest = getattr(positions, "max_position_embeddings", None)
        ids = self.tokenizer.encode(text)
        if longest is None:
            return ids
        room = (longest - -(-new_tokens // size)) * size
        if room < size:
            raise UserError(f"{new_tokens} new tokens do not fit the model's {longest} chunks of {size}")
        return ids[-room:]

    def loglikelihood(self, requests: list[Instance]) -> Any:
        self._refuse("loglikelihood")

    def loglikelihood_rolling(self, requests: list[Instance]) -> Any:
        self._refuse("loglikelihood_rolling")

    def _refuse(self, kind: str) -> None:
        raise UserError(
            f"the task asks for {kind}, and a CALM model has no likelihoods, only samples; tasks of the kind "
            "generate_until work"
        )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cut(text: str, stops: list[str]) -> str:
    """The text before the first stop in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def run_harness(directory: Path, tasks: list[str], limit: int | None, batch_size: int, seed: int) -> dict[str, Any]:
    """Results of tasks (names, or YAML files) for a CALM or a softmax model."""
    manager: Any = cast(Any, TaskManager)()
    if unknown := [task for task in tasks if not Path(task).is_file() and not manager.match_tasks([task])]:
        raise UserError(f"lm_eval has no task {unknown[0]!r}" + did_you_mean(unknown[0], manager.all_tasks))
    model: LM
    if model_type(directory) == CalmConfig.model_type:
        model = cast(Any, HarnessModel)(str(directory), batch_size, seed)
    else:
        load_softmax(directory)  # whatever is wrong with it is said here
        model = cast(Any, HFLM)(pretrained=str(directory), batch_size=batch_size, device=_device())
    try:
        wanted = [yaml.safe_load(Path(task).read_text()) if Path(task).is_file() else task for task in tasks]
        found = cast(Any, simple_evaluate)(
            model=model,
            tasks=wanted,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            torch_random_seed=seed,
            bootstrap_iters=1000,
        )
    except UserError:
        raise
    except Exception as error:  # data that cannot be fetched, a file that is no task
        raise UserError(f"lm_eval cannot run {', '.join(tasks)}: {error or repr(error)}") from error
    return {"model": str(directory), "limit": limit, "seed": seed, "tasks": found["results"]}
