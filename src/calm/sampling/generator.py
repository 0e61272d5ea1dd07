"""`model.generate`, in the manner of transformers: prompts of any length go in, texts come out."""

import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from calm.errors import CalmWarning, ConfigError, did_you_mean
from calm.models.calm import CalmForCausalLM
from calm.sampling.batch import Batch, Text
from calm.sampling.next_chunk import Sampling
from calm.sampling.predictor import CalmPredictor

NEW_TOKENS = 128  # where nobody says how many
MEANINGLESS = {
    "num_beams": "there are no beams: a CALM model has no probabilities of texts to search by",
    "do_sample": "a CALM model always samples; a low temperature, like 0.1, comes near to the likeliest text",
    "output_logits": "a CALM model has no logits",
    "output_scores": "a CALM model has no scores of tokens",
    "logprobs": "log-probabilities exist with the method 'mixture' only; calm.sampling.next_chunk returns them",
    "repetition_penalty": "there are no probabilities of tokens that could be lowered",
}


def generate(
    model: CalmForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = NEW_TOKENS,
    stop: Sequence[Sequence[int]] = (),
    generator: torch.Generator | None = None,
    streamer: Any = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    **options: Any,
) -> Tensor:
    """Prompts (B, T) with what follows them, each cut before its end or a `stop` (token ids); shorter ones are padded.

    `attention_mask` says which tokens are there: pads may stand before or behind a prompt. `options` are the fields of
    Sampling: temperature, num_candidates, method and so on. A streamer, as transformers has them, gets the prompt and
    then chunk after chunk of a single text.
    """
    sampling = _sampling(options)
    eos_token_id, *ends = _role("eos_token_id", eos_token_id, model)
    pad_token_id = _role("pad_token_id", pad_token_id, model)[0]
    stops = [*_token_lists(stop), *([other] for other in ends)]
    if input_ids.ndim != 2 or not len(input_ids):
        raise ConfigError(f"input_ids should have the shape (B, T), not {tuple(input_ids.shape)}")
    there = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if there.shape != input_ids.shape:
        raise ConfigError(f"attention_mask of shape {tuple(there.shape)} for input_ids of {tuple(input_ids.shape)}")
    if streamer is not None and len(input_ids) > 1:
        raise ConfigError(f"a streamer takes one text, and there are {len(input_ids)}")
    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, there, strict=True)]
    device = None if generator is None else generator.device
    seeds = torch.randint(2**62, (len(prompts),), generator=generator, device=device).tolist()
    texts = [Text(prompt, seed, max_new_tokens, sampling) for prompt, seed in zip(prompts, seeds, strict=True)]
    batch = Batch(CalmPredictor(model), eos_token_id, pad_token_id)
    batch.join(texts)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    shown = 0
    while batch.joining or batch.texts:
        for text, _, _ in batch.step():
            if (cut := _first_stop(text.new, stops)) is not None:
                text.new = text.new[:cut]
                batch.leave([text])
        if streamer is not None:
            new = texts[0].new
            sure = len(new) - (_begun_stop(new, stops) if batch.texts else 0)
            if sure > shown:
                streamer.put(torch.tensor(new[shown:sure]))
                shown = sure
    if streamer is not None:
        streamer.end()
    if warning := batch.spent.warning(texts[0].sampling):
        warnings.warn(warning, CalmWarning, stacklevel=3)
    behind = pad_sequence([torch.tensor(text.new, dtype=torch.long) for text in texts], True, pad_token_id)
    return torch.cat([input_ids, behind.to(input_ids.device)], dim=1)


def _sampling(options: dict[str, Any]) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    for name, value in options.items():
        if name in MEANINGLESS and not (name == "do_sample" and value):
            raise ConfigError(f"generate takes no {name}: {MEANINGLESS[name]}")
        if name not in known and name != "do_sample":
            raise ConfigError(f"generate takes no {name!r}{did_you_mean(name, known)}")
    return Sampling(**{name: value for name, value in options.items() if name != "do_sample"})


def _role(name: str, given: int | list[int] | None, model: CalmForCausalLM) -> list[int]:
    """The ids of a role; a config.json may name several."""
    found = given if given is not None else getattr(model.config, name, None)
    if found is None:
        raise ConfigError(f"the model's config.json has no {name}; give it to generate")
    return list(found) if isinstance(found, list | tuple) else [int(found)]


def _token_lists(stop: Any) -> list[list[int]]:
    if isinstance(stop, str) or not all(isinstance(ids, list | tuple) for ids in stop):
        raise ConfigError("stop takes lists of token ids, as tokenizer.encode gives them; calm generate takes strings")
    if not all(stop):
        raise ConfigError("a stop without a token would end every text at once")
    return [list(ids) for ids in stop]


def _first_stop(ids: list[int], stops: list[list[int]]) -> int | None:
    """Where the first of some sequences begins."""
    places = range(len(ids))
    return next((place for place in places if any(s == ids[place : place + len(s)] for s in stops)), None)


def _begun_stop(ids: list[int], stops: list[list[int]]) -> int:
    """How many tokens at the end may be the beginning of a stop."""
    return max((n for stop in stops for n in range(1, len(stop)) if ids[-n:] == stop[:n]), default=0)
