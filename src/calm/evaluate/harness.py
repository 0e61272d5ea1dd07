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
from calm.models.loading import load_calm, model_type
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
        asked: list[Any] = [normalize_gen_kwargs(dict(cast(Any, request.args)[1]), NEW_TOKENS) for request in requests]
        lengths: dict[int, list[int]] = {}  # how many tokens are wanted → the numbers of requests
        for number, wanted in enumerate(asked):
            lengths.setdefault(int(wanted["max_gen_toks"]), []).append(number)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate_until") as bar:
            for new_tokens, numbers in lengths.items():
                for first in range(0, len(numbers), self.batch_size):
                    batch = numbers[first : first + self.batch_size]
                    prompts = [self._prompt(cast(Any, requests[number].args)[0], new_tokens) for number in batch]
                    stops = [[stop for stop in asked[number].get("until") or [] if stop] for number in batch]
                    texts = self._continue(prompts, stops, batch, new_tokens)
                    for number, text in zip(batch, texts, strict=True):
                        answers[number] = text
                    bar.update(len(batch))
        return answers

    def _continue(self, prompts: list[list[int]], stops: list[list[str]], numbers: list[int], new_tokens: int):
        """Texts that follow prompts, each up to its first stop; their numbers seed their noise."""
        generation = Generation(
            self.model,
            prompts,
            [int(mix(self.seed, 8, number) >> 1) for number in numbers],
            max_new_tokens=new_tokens,
            end_id=self.tokenizer.end_id,
            fill_id=self.tokenizer.fill_id,
        )
        ids: list[list[int]] = [[] for _ in prompts]
        texts = [""] * len(prompts)
        while generation.running:
            for place, new in generation.step().items():
                ids[place] += new
                texts[place] = self.tokenizer.decode(ids[place])
                if any(stop in texts[place] for stop in stops[place]):
                    generation.end([place])
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
    """Results of tasks (names, patterns, or YAML files) for a CALM or a softmax model."""
    files = [Path(task) for task in tasks if Path(task).is_file()]
    try:
        manager: Any = cast(Any, TaskManager)(include_path=[str(file.parent.resolve()) for file in files] or None)
        names = [_task_name(Path(task)) if Path(task) in files else task for task in tasks]
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            raise UserError(f"lm_eval has no task {unknown[0]!r}" + did_you_mean(unknown[0], manager.all_tasks))
        if model_type(directory) == CalmConfig.model_type:
            model = cast(Any, HarnessModel)(str(directory), batch_size, seed)
        else:
            model = cast(Any, HFLM)(pretrained=str(directory), batch_size=batch_size, device=_device())
        found = cast(Any, simple_evaluate)(
            model=model,
            tasks=manager.match_tasks(names),
            limit=limit,
            task_manager=manager,
            log_samples=False,
            torch_random_seed=seed,
            bootstrap_iters=1000,
        )
    except UserError:
        raise
    except Exception as error:  # data that cannot be fetched, a file that is no task, a model that cannot be read
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"lm_eval cannot run {', '.join(tasks)}: {reason}") from error
    return {"model": str(directory), "limit": limit, "seed": seed, "tasks": found["results"]}


def _task_name(path: Path) -> str:
    """What a task file calls itself; nothing in it is carried out here."""
    root = yaml.compose(path.read_text())
    for key, value in getattr(root, "value", []):
        if key.value == "task":
            return value.value
    raise UserError(f"{path} is not a task of lm_eval: it has no field 'task'")
