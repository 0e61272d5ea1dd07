"""Tasks of lm_eval (extra `eval`). Importing this module registers the model type `calm`.

generate_until samples at the temperature that a task asks for; for greedy decoding at a temperature close to 0. For
models without token probabilities, likelihoods are bounds, and the results say so.
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

from calm.checkpoint import model_type
from calm.distributed import resolve_device
from calm.errors import UserError, did_you_mean, one_line
from calm.generate.engine import whole_chunks
from calm.generate.mixture import Mixture
from calm.generate.sampler import SamplingParams
from calm.generate.text import TextGenerator
from calm.model import Calm, PlainCalmConfig
from calm.noise import RowNoise
from calm.seeds import SeedStream, torch_seed

NEW_TOKENS = 256  # if a task does not say
GREEDY = 0.1  # temperature that stands for greedy decoding
LATENTS = 64  # of a likelihood bound
MAX_ELEMENTS = 2**22  # probabilities held at once


@register_model("calm")
class HarnessModel(LM):
    """A CALM model for lm_eval: `lm_eval --model calm --model_args pretrained=DIR`."""

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 8,
        seed: int = 0,
        device: str | None = None,
        dtype: str = "auto",
        num_latents: int = LATENTS,
        **_: Any,
    ):
        super().__init__()
        self.generator = TextGenerator(Path(pretrained), device or "auto", dtype)
        self.model, self.tokenizer = self.generator.model, self.generator.tokenizer
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 8
        self.seed, self.num_latents = int(seed), int(num_latents)
        self.bounded = False  # whether a likelihood bound was computed

    def generate_until(self, requests: list[Instance]) -> list[str]:
        kinds: dict[tuple[int, float], list[int]] = {}  # tokens and temperature → numbers of requests
        arguments_of: list[Any] = [request.args for request in requests]  # prompt and options
        requested: list[Any] = [normalize_gen_kwargs(dict(kwargs), NEW_TOKENS) for _, kwargs in arguments_of]
        for number, arguments in enumerate(requested):
            kinds.setdefault((int(arguments["max_gen_toks"]), _temperature(arguments)), []).append(number)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate_until") as bar:
            for (new_tokens, temperature), numbers in kinds.items():
                for first in range(0, len(numbers), self.batch_size):
                    batch = numbers[first : first + self.batch_size]
                    deltas = self.generator.stream(
                        [self._end(self.tokenizer.encode(arguments_of[n][0]), new_tokens) for n in batch],
                        SamplingParams(temperature),
                        max_new_tokens=new_tokens,
                        stops=[[stop for stop in requested[n].get("until") or [] if stop] for n in batch],
                        numbers=batch,
                        seed=self.seed,
                    )
                    for delta in deltas:
                        answers[batch[delta.index]] += delta.text
                    bar.update(len(batch))
        return answers

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        answers = []
        for number, request in enumerate(tqdm(requests, desc="log-likelihood bounds")):
            context, continuation = cast(Any, request.args)
            spaces = len(context) - len(
                context.rstrip()
            )  # a token begins with its space, so it moves to the continuation
            context, continuation = context[: len(context) - spaces], context[len(context) - spaces :] + continuation
            answers.append(self._bound(self.tokenizer.encode(context), self.tokenizer.encode(continuation), number))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-likelihoods of whole texts, in pieces of half the positions, each with the text before it as context."""
        answers = []
        for number, request in enumerate(tqdm(requests, desc="log-likelihood bounds")):
            ids = self.tokenizer.encode(cast(Any, request.args)[0])
            piece = max(1, (self._longest() or len(ids) + 1) // 2)
            starts = range(0, len(ids), piece)
            answers.append(sum(self._bound(ids[:start], ids[start : start + piece], number)[0] for start in starts))
        return answers

    def _bound(self, before: list[int], after: list[int], number: int) -> tuple[float, bool]:
        self.bounded = not self.model.head.exact_likelihood
        noise = RowNoise([torch_seed(self.seed, SeedStream.LIKELIHOOD, number)], self.model.device)
        before = self._end(before, len(after)) or [self.tokenizer.eos_token_id]
        pad = self.tokenizer.pad_token_id if self.model.front_padding else self.tokenizer.eos_token_id
        log_likelihood, greedy = continuation_log_likelihood(self.model, before, after, self.num_latents, noise, pad)
        return log_likelihood, greedy

    def _longest(self) -> int | None:
        """Tokens that fit the model's positions."""
        positions = getattr(self.model.config.backbone_config, "max_position_embeddings", None)
        return None if positions is None else positions * self.model.config.chunk_size

    def _end(self, ids: list[int], new_tokens: int) -> list[int]:
        """The end of a text that leaves room for its continuation."""
        size, longest = self.model.config.chunk_size, self._longest()
        if longest is None:
            return ids
        room = longest - -(-new_tokens // size) * size
        if room < size:
            raise UserError(f"{new_tokens} new tokens do not fit the model's {longest // size} chunks of {size}")
        return ids[-room:]


@torch.no_grad()
def continuation_log_likelihood(
    model: Calm, before: list[int], after: list[int], num_latents: int, noise: RowNoise, pad_token_id: int
) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether each of its tokens is the most probable one.

    A lower bound for heads without token probabilities, from the mixture of `num_latents` draws. The continuation
    starts at a chunk boundary; only its own tokens count in the last chunk.
    """
    if not after:
        return 0.0, True
    size, device = model.chunk_size, model.device
    before = whole_chunks(model, before)
    ids = [pad_token_id] * (-len(before) % size) + before + after
    first = (len(ids) - len(after)) // size  # the first chunk to score
    read = torch.tensor(ids[: (len(ids) - 1) // size * size], device=device).view(1, -1, size)
    hidden = model.hidden_states(read)[0, first - 1 :]  # a state for each chunk to score
    targets = torch.tensor(after + [0] * (-len(after) % size), device=device).view(-1, size)
    counted = (torch.arange(targets.numel(), device=device) < len(after)).view_as(targets)
    total, greedy = 0.0, True
    rows = max(1, MAX_ELEMENTS // (num_latents * model.vocab_size))
    for start in range(0, len(targets), rows):
        here = slice(start, start + rows)
        shared = RowNoise([])
        shared.generators = noise.generators * len(targets[here])  # one text, one generator
        mixture = Mixture(model.head.propose(hidden[here], num_latents, shared).log_probs, len(targets[here]), device)
        for tokens, valid in zip(targets[here].unbind(1), counted[here].unbind(1), strict=True):
            log_probs = mixture.next()
            total += float(log_probs.gather(1, tokens[:, None])[valid].sum())
            greedy &= bool((log_probs.argmax(1) == tokens)[valid].all())
            mixture.append(tokens)
    return total, greedy


def _temperature(arguments: dict[str, Any]) -> float:
    """The temperature that a task asks for, or the closest supported one."""
    requested = float(arguments.get("temperature", 1.0)) if arguments.get("do_sample") else 0.0
    return min(requested, 1.0) or GREEDY


def run_harness(
    directory: Path,
    tasks: list[str],
    limit: int | None,
    batch_size: int,
    seed: int,
    num_latents: int = 0,
    device: str = "auto",
    dtype: str = "auto",
) -> dict[str, Any]:
    """Results of tasks (names, patterns, or YAML files) for a CALM or a softmax model.

    `likelihood_bound` in the results is the number of latents if likelihoods are bounds, and None otherwise.
    """
    files = [Path(task) for task in tasks if Path(task).is_file()]
    try:
        manager: Any = cast(Any, TaskManager)(include_path=[str(file.parent.resolve()) for file in files] or None)
        names = [_task_name(Path(task)) if Path(task) in files else task for task in tasks]
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            raise UserError(f"lm_eval has no task {unknown[0]!r}" + did_you_mean(unknown[0], manager.all_tasks))
        if model_type(directory) == PlainCalmConfig.model_type:
            model = cast(Any, HarnessModel)(
                str(directory), batch_size, seed, device, dtype, num_latents=num_latents or LATENTS
            )
        else:
            place = str(resolve_device(device))
            weights = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16"}[dtype]
            model = cast(Any, HFLM)(pretrained=str(directory), batch_size=batch_size, device=place, dtype=weights)
        evaluated = cast(Any, simple_evaluate)(
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
        raise UserError(f"lm_eval cannot run {', '.join(tasks)}: {one_line(error)}") from error
    bounded = model.num_latents if getattr(model, "bounded", False) else None
    results = {"model": str(directory), "limit": limit, "seed": seed, "likelihood_bound": bounded}
    return results | {"tasks": evaluated["results"]}


def _task_name(path: Path) -> str:
    """The name in a task file, which is parsed without executing its tags."""
    root = yaml.compose(path.read_text())
    for key, value in getattr(root, "value", []):
        if key.value == "task":
            return value.value
    raise UserError(f"{path} is not a task of lm_eval: it has no field 'task'")
